"""The simulator against `regauge serve`: the same requests, a real gateway with a prefill and a decode worker, and the simulated ones.

    .venv/bin/python bench/validation.py [--rounds N] [--clockwork] [--json] [--again FILE]

Five rounds of: a calibration run, then each of three unlike loads (`validation_traces.py`) once, with a calibration load before and after them, which is
none of the three. The simulator's constants come from the calibration runs (`validation_stand.py`, `regauge.sim.calibrate`), and are slowed by what the
calibration loads say that a load costs, one pair of factors for all rounds. How fast each core computes at each moment is measured all the while by a
metronome (`validation_metronome.py`), which knows nothing of requests, and is given to the simulator: nothing was fitted to a run that is compared. Both
sides get the same arrivals, lengths and prefix blocks, and route with the same `Router` and configuration; the real requests go over HTTP, each timed by a
client in a process of its own. Figures are medians over the rounds of each run's; a simulated run's are medians of 25 runs whose arrivals differ by up to
20 ms, since in a closed loop small differences grow: which requests share a step decides when the next ones come.

`--clockwork` has the same processes, but steps that sleep for known times: what is off then is how the simulator puts steps together, and hardly moves
when the machine is busy. `--again` takes what an earlier run measured from its bench/out/validation-runs.json.

Errors are simulated over real, minus 1. `spread` is the width of the real figures over the rounds, over their median. Beside the simulated figures stand
those without the metronome, from the same measurements: all as if the cores never changed their speed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import msgspec
import numpy as np

from harness import print_table, write_json
from regauge.config_route import RouteConfig
from regauge.sim.calibrate import Pace, under_load
from regauge.sim.cluster import Cluster
from regauge.sim.drift import STEADY, Drift, course
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.shared import SharedFleet
from regauge.sim.trace import Arrival
from validation_load import Ask, Came
from validation_stand import CHUNK, ON, PAGE, POOL, Calibrated, Samples, Stand, calibrate, fitted, serving
from validation_traces import BLOCK, LOADS, mixed, prompts

KV_BYTES = 11_520.0
"""Of a token of the bundled model on the wire, FP8."""
NIC = 1e12
"""Bytes per second: shared memory, written while the prompt is computed. What is left of it afterwards is part of the measured latency."""
RUNS = 25
AFTER_S = 20.0
"""A simulated run may take so much longer than the real one, and still finds how fast the cores were then."""
JITTER_S = 0.02
"""A request comes so much later at most: less than a step. Who shares a step with whom hangs on less than that, and in a closed loop all that follows."""
NOMINAL_S = 0.72
"""Of a whole chunk where the loads are as they are written. On a machine that is slower, or busy, they come as much more slowly: all would only wait else."""
TARGET = 0.15
JUDGED = ("ttft median", "output tok/s", "requests/s")


@dataclass(frozen=True)
class Run:
    """A load that was sent once, and its figures."""

    name: str
    arrivals: list[Arrival]
    figures: dict[str, float]
    begin: float
    end: float
    """Seconds of the monotonic clock; the arrivals' 0 is the begin."""


@dataclass(frozen=True)
class Measured:
    """All that was measured."""

    samples: Samples
    runs: list[Run]
    """Those that are compared."""
    marks: list[Run]
    """The calibration loads."""
    slower: float
    """How many times as slowly all requests came as the loads are written."""
    beats: dict[str, list[tuple[float, float]]]
    """Of each worker's core."""
    clockwork: bool

    def drift(self) -> Drift:
        """Return how fast each worker's core was at each moment, over the median of all; steps that sleep do not know."""
        if self.clockwork:
            return STEADY
        # The kernel's account of a thread's time stood still over one beat of 20,000: such a one says nothing.
        beats = ([(at, cost) for at, cost in self.beats[name] if cost > 0.0] for name in ON)
        return Drift(*(course(each, median(cost for _, cost in each)) for each in beats))


def cluster(found: Calibrated) -> Cluster:
    chunk = found.prompts.chunk
    prefill = PrefillModel(chunk / found.prompts.curve(chunk), 0.0, found.prompts.pair_s, cache_blocks=POOL // BLOCK)
    decode = DecodeModel(
        slots=32, pages=POOL // PAGE, page_size=PAGE, step_s=found.steps(1, 0.0), step_token_s=found.steps.token_s, curve=found.steps,
    )  # fmt: skip
    return Cluster(
        1, 1, prefill=prefill, decode=decode, bytes_per_token=KV_BYTES, prefill_nic=NIC, decode_nic=NIC, block=BLOCK,
        report_s=2.0,
    )  # fmt: skip


def simulated(run: Run, found: Calibrated, drift: Drift) -> dict[str, float]:
    """Return the medians of the figures of many simulated runs, each with its own jitter. `drift`: by the monotonic clock."""
    then = drift if drift is STEADY else drift.cut(run.begin, run.end + AFTER_S)
    made = [simulated_once(run.arrivals, found, then, seed) for seed in range(RUNS)]
    return {figure: median(each[figure] for each in made) for figure in made[0]}


def simulated_once(arrivals: Sequence[Arrival], found: Calibrated, drift: Drift, seed: int) -> dict[str, float]:
    """Return the figures of a simulated run. What a first token takes beside computing is added to it, and to the thinking before the next turn."""
    rng = random.Random(seed)  # noqa: S311
    late = [found.latency(each.tokens) for each in arrivals]
    arrivals = _jittered(arrivals, rng)
    given = [replace(each, think_s=each.think_s + late[each.after]) if each.after >= 0 else each for each in arrivals]
    fleet = SharedFleet(cluster(found), RouteConfig(block_tokens=BLOCK), found.prompts, found.beside, drift)
    log = fleet.run(given).log
    assert bool(log.complete.all()), "a simulated request did not complete"
    ttft = log.ttft() + np.array(late)
    span = float(log.ended.max() - log.at.min()) + late[-1]
    tpot = [float(x) for x in log.tpot()]
    return _figures([float(x) for x in ttft], tpot, span, int(log.output.sum()), int(log.cached.sum()))


def _jittered(arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
    """Return the arrivals a little later each, in the order that they had."""
    at, found = 0.0, []
    for each in arrivals:
        later = rng.uniform(0.0, JITTER_S)
        at = max(at, each.at + later) if each.after < 0 else at
        found.append(replace(each, at=at, think_s=each.think_s + later))
    return found


def _paced(arrivals: Sequence[Arrival], pace: float) -> list[Arrival]:
    """Return the arrivals with all times so many times as long."""
    return [replace(each, at=each.at * pace, think_s=each.think_s * pace) for each in arrivals]


def measured(came: Sequence[Came], arrivals: Sequence[Arrival]) -> dict[str, float]:
    for each, asked in zip(came, arrivals, strict=True):
        assert (each.prompt, each.output) == (asked.tokens, asked.output), (each, asked)
    span = max(each.ended for each in came) - min(each.sent for each in came)
    tpot = [(each.ended - each.pieces[0]) / (each.output - 1) for each in came if each.output > 1]
    ttft = [each.ttft_s for each in came]
    return _figures(ttft, tpot, span, sum(each.output for each in came), sum(each.cached for each in came))


def _figures(ttft: Sequence[float], tpot: Sequence[float], span: float, output: int, cached: int) -> dict[str, float]:
    return {
        "ttft median": median(ttft), "ttft mean": mean(ttft), "ttft p90": float(np.quantile(ttft, 0.9)), "tpot median": median(tpot),
        "tpot mean": mean(tpot),
        "output tok/s": output / span, "requests/s": len(ttft) / span, "cached tokens": float(cached),
    }  # fmt: skip


def at_pace(found: Calibrated, pace: Pace) -> Calibrated:
    """Return the constants with all computing so many times as long."""
    return replace(found, prompts=found.prompts.slowed(pace.prompt), steps=found.steps.slowed(pace.step))


def pace_of(run: Run, found: Calibrated, drift: Drift) -> Pace:
    """Return the pace of a calibration load: what its means of TTFT and of the time between tokens were, over what the constants say."""

    def means(figures: dict[str, float]) -> Pace:
        return Pace(figures["ttft mean"], figures["tpot mean"])

    return under_load(means(run.figures), lambda pace: means(simulated(run, at_pace(found, pace), drift)))


def real_run(stand: Stand, arrivals: list[Arrival], name: str, number: int) -> Run:
    ids = prompts(arrivals, f"{name} {number}")
    asks = [Ask(each.at, text, each.output, each.after, each.think_s) for each, text in zip(arrivals, ids, strict=True)]
    answers = stand.answers(asks)
    stand.prefilled(len(asks))
    return Run(name, arrivals, measured(answers.came, arrivals), answers.start, max(c.ended for c in answers.came))


def rows(name: str, runs: Sequence[dict[str, float]], sims: Sequence[dict[str, float]]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for figure in sims[0]:
        each, value = [run[figure] for run in runs], median(sim[figure] for sim in sims)
        real = median(each)
        error = value / real - 1.0 if real else value
        found.append({
            "load": name, "figure": figure, "real": round(real, 4), "simulated": round(value, 4), "error %": round(100 * error, 1),
            "spread %": round(100 * (max(each) - min(each)) / real if real else 0.0, 1), "judged": figure in JUDGED,
        })  # fmt: skip
    return found


def heard(samples: Samples, drift: Drift) -> dict[str, float]:
    """Return what the metronomes say while calibration computes on their own core, and while on the other: what no worker's doing should move."""
    prompts, steps = [window for _, window in samples.alone], [window for _, window in samples.steps]
    return {
        f"metronome beside {what}, its core {state}, times": median(each.during(*window) for window in windows)
        for what, each, busy, idle in (
            ("prefill", drift.prompt, prompts, steps),
            ("decode", drift.step, steps, prompts),
        )
        for state, windows in (("busy", busy), ("idle", idle))
    }


def report(compared: Compared) -> list[dict[str, object]]:
    """Return the constants, as rows."""
    found = compared.constants
    steps = {f"step of {n:g} prompt tokens, ms": 1e3 * s for n, s in found.prompts.curve.points}
    steps |= {f"decode step of {b}, ms": 1e3 * s for b, s in found.steps.batches}
    steps |= {
        "a pair of prompt tokens, ns": 1e9 * found.prompts.pair_s, "a resident token, us": 1e6 * found.steps.token_s,
        "prompts beside decoding, times": found.beside.prompt, "steps beside prompts, times": found.beside.step,
        "first token beside computing, ms": 1e3 * found.latency.fixed_s, "and for 1000 tokens, ms": 1e6 * found.latency.token_s,
        "worst residual of prompts, %": 100 * max(map(abs, found.prompts.residuals)),
        "worst residual of steps, %": 100 * max(map(abs, found.steps.residuals)),
        "prompts under load, times": compared.pace.prompt, "steps under load, times": compared.pace.step,
    }  # fmt: skip
    return [{"calibrated": name, "value": value} for name, value in steps.items()]


def measure(options: argparse.Namespace) -> Measured:
    """Measure all there is."""
    samples, slower = Samples(), 0.0
    runs: list[Run] = []
    marks: list[Run] = []
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), clockwork=options.clockwork) as stand:
        for turn in range(options.rounds):
            calibrate(stand, samples, turn)
            slower = slower or max(1.0, fitted(samples, STEADY).prompts(CHUNK, 0) / NOMINAL_S)
            marks.append(real_run(stand, _paced(mixed(len(marks)), slower), "mixed", len(marks)))
            for name, (make, count) in LOADS.items():
                runs.append(real_run(stand, _paced(make(options.seed, count), slower), name, len(runs)))
            marks.append(real_run(stand, _paced(mixed(len(marks)), slower), "mixed", len(marks)))
        beats = {name: stand.beats(core) for name, core in ON.items()}
    return Measured(samples, runs, marks, slower, beats, options.clockwork)


@dataclass(frozen=True)
class Compared:
    """The simulated figures of each run."""

    constants: Calibrated
    paces: list[Pace]
    """Of each calibration load, and"""
    pace: Pace
    """the median of them, which is what all runs are simulated with."""
    sims: list[dict[str, float]]


def compare(all_of_it: Measured, drift: Drift) -> Compared:
    alone = fitted(all_of_it.samples, drift)
    paces = [pace_of(mark, alone, drift) for mark in all_of_it.marks]
    pace = Pace(median(each.prompt for each in paces), median(each.step for each in paces))
    return Compared(alone, paces, pace, [simulated(run, at_pace(alone, pace), drift) for run in all_of_it.runs])


def _error(sim: float, real: float) -> float:
    return round(100 * (sim / real - 1.0), 1)


def by_run(runs: Sequence[Run], with_it: Compared, without: Compared, drift: Drift) -> list[dict[str, object]]:
    """Return each run by itself, as rows."""
    found: list[dict[str, object]] = []
    for number, (run, sim, steady) in enumerate(zip(runs, with_it.sims, without.sims, strict=True)):
        real = run.figures
        found.append({
            "round": 1 + number // len(LOADS), "run": run.name, "prompts drift, times": drift.prompt.during(run.begin, run.end),
            "steps drift, times": drift.step.during(run.begin, run.end),
            "TTFT median, s": real["ttft median"], "simulated": sim["ttft median"],
            "error %": _error(sim["ttft median"], real["ttft median"]),
            "error %, without metronome": _error(steady["ttft median"], real["ttft median"]),
            "requests/s": real["requests/s"], "simulated ": sim["requests/s"], "error % ": _error(sim["requests/s"], real["requests/s"]),
            "error %, without metronome ": _error(steady["requests/s"], real["requests/s"]),
        })  # fmt: skip
    return found


def by_load(runs: Sequence[Run], sims: Sequence[dict[str, float]]) -> list[dict[str, object]]:
    found = []
    for name in LOADS:
        own = [i for i, run in enumerate(runs) if run.name == name]
        found += rows(name, [runs[i].figures for i in own], [sims[i] for i in own])
    return found


def _say_over(what: str, table: Sequence[dict[str, object]]) -> None:
    over = [row for row in table if row["judged"] and abs(float(str(row["error %"]))) > 100 * TARGET]
    names = "".join(f"\n  {r['load']}: {r['figure']}" for r in over)
    print(f"\n{what}: {len(over)} of the judged figures are off by more than {TARGET:.0%}{names}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--clockwork",
        action="store_true",
        help="steps of known length instead of the model's: what is left is the simulator's structure",
    )
    parser.add_argument(
        "--json", action="store_true", help="also write bench/out/validation.json, and validation-runs.json"
    )
    parser.add_argument("--again", type=Path, help="measure nothing: take an earlier run's validation-runs.json")
    options = parser.parse_args()
    found = msgspec.json.decode(options.again.read_bytes(), type=Measured) if options.again else measure(options)
    suffix = "-clockwork" if found.clockwork else ""
    if options.json and not options.again:
        write_json(f"validation-runs{suffix}", msgspec.to_builtins(found))
    drift = found.drift()
    with_it, without = compare(found, drift), compare(found, STEADY)
    if found.clockwork:
        print("CLOCKWORK: no model computes here; says nothing of how well computing is modelled\n")
    beside = {"loads slowed, times": found.slower, **heard(found.samples, drift)}
    print_table([*report(with_it), *({"calibrated": name, "value": value} for name, value in beside.items())])
    print()
    each, table = by_run(found.runs, with_it, without, drift), by_load(found.runs, with_it.sims)
    steady = by_load(found.runs, without.sims)
    print_table(each)
    print("\nWithout the metronome:\n")
    print_table(steady)
    print("\nWith it:\n")
    print_table(table)
    _say_over("without the metronome", steady)
    _say_over("with it", table)
    if options.json:
        write_json(f"validation{suffix}", {
            "calibrated": report(with_it), "beside": beside, "paces": msgspec.to_builtins(with_it.paces), "each": each, "figures": table,
            "without metronome": {"calibrated": report(without), "paces": msgspec.to_builtins(without.paces), "figures": steady},
        })  # fmt: skip


if __name__ == "__main__":
    main()
