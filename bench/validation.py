"""The simulator against `regauge serve`: the same requests, a real gateway with a prefill and a decode worker, and the simulated ones.

    .venv/bin/python bench/validation.py [--rounds N] [--clockwork] [--json]

Two rounds of: a calibration run, then each of three unlike loads (`validation_traces.py`) once, with a calibration load before, between and after them,
which is none of the three. The simulator's constants come from the calibration runs (`validation_stand.py`, `regauge.sim.calibrate`), and are slowed for
each run of a load by the pace of the calibration loads just before and after it: nothing was fitted to a run that is compared. Both sides get the same
arrivals, lengths and prefix blocks, and route with the same `Router` and configuration; the real requests go over HTTP, each timed by a client in a
process of its own. Figures are medians over the rounds of each run's; a simulated run's are medians of 25 runs whose arrivals differ by up to 20 ms,
since in a closed loop small differences grow: which requests share a step decides when the next ones come.

`--clockwork` has the same processes, but steps that sleep for known times: what is off then is how the simulator puts steps together, and hardly moves
when the machine is busy.

Errors are simulated over real, minus 1. `spread` is the width of the real figures over the rounds, over their median: what no simulator could hit.
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
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.shared import SharedFleet
from regauge.sim.trace import Arrival
from validation_load import Ask, Came
from validation_stand import CHUNK, PAGE, POOL, Calibrated, Samples, Stand, calibrate, fitted, serving, warm_up
from validation_traces import BLOCK, LOADS, mixed, prompts

KV_BYTES = 11_520.0
"""Of a token of the bundled model on the wire, FP8."""
NIC = 1e12
"""Bytes per second: shared memory, written while the prompt is computed. What is left of it afterwards is part of the measured latency."""
RUNS = 25
FIT_RUNS = 5
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
    place: int
    """How many calibration loads were before it."""


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


def simulated(arrivals: Sequence[Arrival], found: Calibrated, times: int = RUNS) -> dict[str, float]:
    """Return the medians of the figures of many simulated runs, each with its own jitter."""
    made = [simulated_once(arrivals, found, seed) for seed in range(times)]
    return {figure: median(each[figure] for each in made) for figure in made[0]}


def simulated_once(arrivals: Sequence[Arrival], found: Calibrated, seed: int) -> dict[str, float]:
    """Return the figures of a simulated run. What a first token takes beside computing is added to it, and to the thinking before the next turn."""
    rng = random.Random(seed)  # noqa: S311
    late = [found.latency(each.tokens) for each in arrivals]
    arrivals = _jittered(arrivals, rng)
    given = [replace(each, think_s=each.think_s + late[each.after]) if each.after >= 0 else each for each in arrivals]
    fleet = SharedFleet(cluster(found), RouteConfig(block_tokens=BLOCK), found.prompts, found.beside)
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


def pace_of(run: Run, found: Calibrated) -> Pace:
    """Return the pace of a calibration load: what its means of TTFT and of the time between tokens were, over what the constants say."""

    def means(figures: dict[str, float]) -> Pace:
        return Pace(figures["ttft mean"], figures["tpot mean"])

    return under_load(means(run.figures), lambda pace: means(simulated(run.arrivals, at_pace(found, pace))))


def real_run(stand: Stand, arrivals: Sequence[Arrival], run: str) -> dict[str, float]:
    ids = prompts(arrivals, run)
    asks = [Ask(each.at, text, each.output, each.after, each.think_s) for each, text in zip(arrivals, ids, strict=True)]
    came = stand.ask(asks)
    stand.prefilled(len(asks))
    return measured(came, arrivals)


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


def report(found: Calibrated) -> list[dict[str, object]]:
    """Return the constants, as rows."""
    steps = {f"step of {n:g} prompt tokens, ms": 1e3 * s for n, s in found.prompts.curve.points}
    steps |= {f"decode step of {b}, ms": 1e3 * s for b, s in found.steps.batches}
    steps |= {
        "a pair of prompt tokens, ns": 1e9 * found.prompts.pair_s, "a resident token, us": 1e6 * found.steps.token_s,
        "prompts beside decoding, times": found.beside.prompt, "steps beside prompts, times": found.beside.step,
        "first token beside computing, ms": 1e3 * found.latency.fixed_s, "and for 1000 tokens, ms": 1e6 * found.latency.token_s,
        "worst residual of prompts, %": 100 * max(map(abs, found.prompts.residuals)),
        "worst residual of steps, %": 100 * max(map(abs, found.steps.residuals)),
    }  # fmt: skip
    return [{"calibrated": name, "value": value} for name, value in steps.items()]


def measure(options: argparse.Namespace) -> tuple[Samples, list[Run], list[Run], float]:
    """Measure all there is; return the calibration's samples, the runs that are compared, the calibration loads, and how much slower all arrive."""
    samples, pace = Samples(), 0.0
    runs: list[Run] = []
    marks: list[Run] = []

    def send(name: str, arrivals: list[Arrival], into: list[Run]) -> None:
        slower = _paced(arrivals, pace)
        into.append(Run(name, slower, real_run(stand, slower, f"{name} {len(into)}"), len(marks)))

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), clockwork=options.clockwork) as stand:
        warm_up(stand)
        for turn in range(options.rounds):
            calibrate(stand, samples, turn)
            pace = pace or max(1.0, fitted(samples).prompts(CHUNK, 0) / NOMINAL_S)
            send("mixed", mixed(len(marks)), marks)
            for name, (make, count) in LOADS.items():
                send(name, make(options.seed, count), runs)
                send("mixed", mixed(len(marks)), marks)
    return samples, runs, marks, pace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--clockwork",
        action="store_true",
        help="steps of known length instead of the model's: what is left is the simulator's structure",
    )
    parser.add_argument("--json", action="store_true", help="also write bench/out/validation.json")
    options = parser.parse_args()
    samples, runs, marks, pace = measure(options)
    alone = fitted(samples)
    if options.json:
        write_json(
            "validation-runs", msgspec.to_builtins({"constants": alone, "runs": runs, "calibration loads": marks})
        )
    paces = [pace_of(mark, alone) for mark in marks]
    around = [paces[run.place - 1].between(paces[run.place]) for run in runs]
    sims = [simulated(run.arrivals, at_pace(alone, near)) for run, near in zip(runs, around, strict=True)]
    table = []
    for name in LOADS:
        own = [i for i, run in enumerate(runs) if run.name == name]
        table += rows(name, [runs[i].figures for i in own], [sims[i] for i in own])
    if options.clockwork:
        print("CLOCKWORK: no model computes here; says nothing of how well computing is modelled\n")
    print_table([*report(alone), {"calibrated": "loads slowed, times", "value": pace}])
    print()
    print_table([
        {"run": run.name, "prompts slowed, times": near.prompt, "steps slowed, times": near.step, "TTFT median, s": run.figures["ttft median"],
         "simulated": sim["ttft median"], "requests/s": run.figures["requests/s"], "simulated ": sim["requests/s"]}
        for run, near, sim in zip(runs, around, sims, strict=True)
    ])  # fmt: skip
    print()
    print_table(table)
    over = [row for row in table if row["judged"] and abs(float(str(row["error %"]))) > 100 * TARGET]
    print(
        f"\n{len(over)} of the judged figures are off by more than {TARGET:.0%}"
        + "".join(f"\n  {r['load']}: {r['figure']}" for r in over)
    )
    if options.json:
        write_json(
            "validation-clockwork" if options.clockwork else "validation",
            {"calibrated": report(alone), "paces": msgspec.to_builtins(paces), "figures": table},
        )


if __name__ == "__main__":
    main()
