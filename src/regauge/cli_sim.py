"""`regauge sim`: what a cluster would do with a trace. Heavy imports are in the functions: `--help` answers at once."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.sim.arrivals import Requests
    from regauge.sim.log import Log
    from regauge.sim.replay import Progress
    from regauge.sim.results import Report, Run
    from regauge.sim.scenario import Scenario
    from regauge.sim.setup import Setup

POLICIES = ("round-robin", "least-load", "prefix", "cache+load", "network-aware")
FLOWS = ("credit", "uncontrolled", "peer-fifo", "fair-share")
_FIELDS = {
    "trace": ("trace", "file"), "format": ("trace", "format"), "scale": ("trace", "scale"), "slice": ("trace", "slice"),
    "copies": ("trace", "copies"), "requests": ("trace", "requests"), "rate": ("trace", "rate"), "like": ("trace", "like"),
    "model": ("model", "name"), "transfers": ("network", "transfers"), "ttft": ("slo", "ttft_s"), "tpot": ("slo", "tpot_s"),
    "seeds": ("run", "seeds"), "seed": ("run", "first_seed"),
}  # fmt: skip
"""Option -> table and field of the scenario."""


def arguments(sim: argparse.ArgumentParser) -> None:
    """Add the options of `regauge sim`."""
    sim.add_argument("scenario", metavar="SCENARIO", nargs="?",
                     help="a TOML file, or a shipped one: article, large; options go over it; none: the defaults")  # fmt: skip
    trace = sim.add_argument_group("what comes (default: conversations made by the seed)")
    trace.add_argument("--trace", metavar="FILE", help="requests of a published trace")
    trace.add_argument("--format", metavar="NAME", help="the trace's; default: found out")
    trace.add_argument("--like", metavar="FILE", help="requests made like those of this trace")
    trace.add_argument("--scale", type=float, metavar="X", help="times as fast as it came")
    trace.add_argument("--slice", metavar="PART", help="seconds 600:1200 or requests 0:5000r of it")
    trace.add_argument("--copies", type=int, metavar="N", help="of the trace at once, by other users")
    trace.add_argument("--requests", type=int, metavar="N", help="most requests; of made ones, how many")
    trace.add_argument(
        "--rate",
        type=float,
        metavar="X",
        help="made requests a second, or sessions of a trace that does not say when they begin",
    )
    fleet = sim.add_argument_group("who serves")
    fleet.add_argument(
        "--model", metavar="NAME", help="a layout preset (`regauge layout --list`), folder or config.json"
    )
    fleet.add_argument("--prefill", metavar="DEVICE[:N]", help="prefill servers, such as mtt-s5000:12")
    fleet.add_argument("--decode", metavar="DEVICE[:N]", help="decode servers, such as h200:1")
    fleet.add_argument("--catalogue", metavar="FILE", action="append", help="devices of yours; may be given again")
    fleet.add_argument("--policy", metavar="NAMES", help=f"routing: all, or some of {', '.join(POLICIES)}, with commas")
    fleet.add_argument("--flow", metavar="NAMES", help=f"flow control: all, or some of {', '.join(FLOWS)}, with commas")
    fleet.add_argument("--faults", metavar="FILE", help="what goes wrong when: [[faults]] of TOML")
    fleet.add_argument("--transfers", metavar="LEVEL", help="detail: fluid, flow or protocol")
    run = sim.add_argument_group("how, and what of it is kept")
    run.add_argument("--seeds", type=int, metavar="N", help="runs of each case; from 2 on with confidence intervals")
    run.add_argument("--seed", type=int, metavar="N", help="the first")
    run.add_argument("--ttft", type=float, metavar="S", help="limit of the time to the first token, for goodput")
    run.add_argument("--tpot", type=float, metavar="S", help="limit of the time per output token")
    run.add_argument("--out", metavar="DIR", help="write run.json, a table of requests per run, and pictures")
    run.add_argument("--csv", action="store_true", help="tables as CSV instead of Parquet, and no pictures")
    run.add_argument("--perfetto", metavar="FILE", help="write the first run as a time line for ui.perfetto.dev")
    run.add_argument("--window", metavar="FROM:TO", help="seconds of that time line; default: its first 5,000 requests")
    sim.epilog = (
        "All figures are simulated: real routing and flow control over modelled engines and a modelled network. "
        "Exit code 1: a case served no request."
    )


def run(options: argparse.Namespace, *, say: Callable[[str], None] = print) -> int:
    """Run the simulation that is asked for. Raises ConfigError, LayoutError before anything runs."""
    from regauge.sim import arrivals, replay
    from regauge.sim.results import encode

    scenario = chosen(options)
    window = _window(options.window)
    _writable(options)
    requests = arrivals.load(scenario.trace)
    setup = replay.setup_of(scenario, requests)
    runs, logs = _all(scenario, setup, requests)
    report = replay.report(scenario, requests, setup, runs)
    written = _keep(options, report, logs, setup, window)
    if options.json:
        say(encode(report).decode().rstrip())
    else:
        from regauge.cli_sim_view import show

        say(show(report).rstrip())
        for line in written:
            say(line)
    return 0 if all(each.summary.outcomes["complete"] for each in runs) else 1


def chosen(options: argparse.Namespace) -> Scenario:
    """Return the scenario's file with the options over it. Raises ConfigError."""
    from msgspec import to_builtins
    from msgspec.structs import replace

    from regauge.sim import faults
    from regauge.sim.scenario import Scenario, load, override

    scenario = Scenario() if options.scenario is None else load(options.scenario)
    given: dict[str, dict[str, Any]] = {}
    for option, (table, field) in _FIELDS.items():
        if getattr(options, option) is not None:
            given.setdefault(table, {})[field] = getattr(options, option)
    if options.trace is not None:
        given["trace"] = {"like": "", "rate": None} | given["trace"]
    if options.like is not None:
        given["trace"] = {"file": "", "scale": 1.0, "copies": 1} | given["trace"]
    for side in ("prefill", "decode"):
        if (text := getattr(options, side)) is not None:
            given[side] = _pool(side, text)
    if options.policy is not None:
        given.setdefault("run", {})["policies"] = _names("--policy", options.policy, POLICIES)
    if options.flow is not None:
        flows = _names("--flow", options.flow, FLOWS)
        given.setdefault("run", {})["flows"] = flows if len(flows) > 1 else []
        network = given.setdefault("network", {})
        network["flow"] = flows[0]
        if options.transfers is None and scenario.network.transfers == "fluid":
            network["transfers"] = "flow"
    found = override(scenario, given)
    return replace(
        found,
        catalogue=[*found.catalogue, *(options.catalogue or ())],
        faults=found.faults if options.faults is None else to_builtins(faults.read(Path(options.faults))),
    )


def _pool(side: str, text: str) -> dict[str, Any]:
    """`h200:4`, and constants that a file gave for another device no more."""
    match = re.fullmatch(r"([^:]+)(?::(\d{1,6}))?", text)
    if match is None:
        raise ConfigError(f"--{side} {text!r}: give DEVICE or DEVICE:SERVERS, such as h200:4")
    own: dict[str, dict[str, Any]] = {
        "prefill": {"tokens_per_s": None, "attention_s": None, "speeds": {}},
        "decode": {"step_s": None, "step_more_s": None, "kv_tokens": None},
    }
    return {"device": match[1], "cards": 0, **own[side]} | ({"servers": int(match[2])} if match[2] else {})


def _names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    import difflib

    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{option} {name!r}: no such name; {hint}")
    if not names:
        raise ConfigError(f"{option}: give all, or some of {', '.join(known)}")
    return names


def _window(text: str | None) -> tuple[float, float]:
    if text is None:
        return 0.0, float("inf")
    try:
        begin, end = (float(part) for part in text.split(":"))
    except ValueError as error:
        raise ConfigError(f"--window {text!r}: give FROM:TO in seconds, such as 600:660") from error
    if not 0 <= begin < end:
        raise ConfigError(f"--window {text!r}: begins at 0 or later, and ends after it begins")
    return begin, end


def _writable(options: argparse.Namespace) -> None:
    """Refuse now what could not be written after hours."""
    if options.window is not None and options.perfetto is None:
        raise ConfigError("--window: is of the time line; give --perfetto FILE, too")
    if options.out is not None:
        for module in () if options.csv else ("pyarrow", "matplotlib"):
            if find_spec(module) is None:
                raise ConfigError(f"--out needs {module}: pip install 'regauge[plan]', or give --csv")
        try:
            Path(options.out).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: {error.strerror}") from error
    elif options.csv:
        raise ConfigError("--csv: is the form of the tables; give --out DIR, too")
    if options.perfetto is not None and not Path(options.perfetto).absolute().parent.is_dir():
        raise ConfigError(f"--perfetto {options.perfetto}: no such folder")


def _all(scenario: Scenario, setup: Setup, requests: Requests) -> tuple[list[Run], dict[tuple[str, int], Log]]:
    from regauge.sim import replay

    pairs = [(case, seed) for seed in replay.seeds(scenario) for case in replay.cases(scenario)]
    runs, logs = [], {}
    with _progress(len(pairs), requests.count) as watch:
        for case, seed in pairs:
            run, result = replay.play(scenario, setup, case, seed, requests, watch(f"{case.name}, seed {seed}"))
            runs.append(run)
            logs[case.name, seed] = result.log
    return runs, logs


@contextmanager
def _progress(runs: int, requests: int) -> Iterator[Callable[[str], Progress | None]]:
    """Give what makes each run's progress: a bar on a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests, {task.fields[told]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task, begun = bar.add_task("", total=runs * requests, told=""), -1

        def watch(name: str) -> Progress:
            nonlocal begun
            begun += 1
            before = begun * requests
            bar.update(task, description=name, completed=before, refresh=True)

            def told(done: int, now: float) -> None:
                speed = bar.tasks[0].speed
                bar.update(task, completed=before + done, told=f"{now:,.0f} s simulated, {speed or 0:,.0f} requests/s")

            return told

        yield watch


def _keep(
    options: argparse.Namespace, report: Report, logs: dict[tuple[str, int], Log], setup: Setup, window: tuple[float, float]
) -> list[str]:  # fmt: skip
    """Write what is asked for; return what to say of it."""
    from regauge.sim import results, timeline

    written: list[str] = []
    if options.perfetto is not None:
        path = Path(options.perfetto)
        first = next(iter(logs.values()))
        if timeline.chosen(first, begin_s=window[0], end_s=window[1]).size:
            timeline.write(path, first, begin_s=window[0], end_s=window[1])
            written.append(f"wrote {path}")
        else:
            written.append(f"{path}: not written, no request came in {window[0]:g} to {window[1]:g} s")
    if options.out is not None:
        folder = Path(options.out)
        files = results.save(folder, report, logs, "csv" if options.csv else "parquet")
        if not options.csv:
            files += _pictures(folder, report, logs, setup)
        written += [f"wrote {path}" for path in files]
    return written


def _pictures(folder: Path, report: Report, logs: dict[tuple[str, int], Log], setup: Setup) -> list[Path]:
    from regauge.cli_sim_view import subject
    from regauge.sim import charts, pictures

    (name, seed), first = next(iter(logs.items()))
    what = subject(report)
    servers, decode = report.scenario.decode.servers, setup.decode
    limits = charts.Limits(
        setup.bytes_per_token, servers * setup.decode_nic.together, servers * decode.pages * decode.page_size
    )
    written: list[Path] = []
    for ending in pictures.ENDINGS:
        paths = folder / f"ttft{ending}", folder / f"time{ending}"
        charts.ttft_by_case(
            paths[0], {case: log for (case, of), log in logs.items() if of == seed},
            subject=f"{what}, seed {seed}", slo_s=report.scenario.slo.ttft_s,
        )  # fmt: skip
        charts.over_time(paths[1], first, subject=f"{what}, {name}, seed {seed}", limits=limits)
        written += paths
    return written
