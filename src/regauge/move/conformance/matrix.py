"""Runs many pairs, over processes, and says what became of them: the matrix of `regauge bench conformance`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from regauge.errors import ConfigError
from regauge.layout.spec import Layout
from regauge.layout.view import check_memory
from regauge.move.conformance import catalogue, mutations
from regauge.move.conformance.suite import Outcome, run_pair, source
from regauge.plan.check import Path

PATHS: tuple[Path, ...] = ("DIRECT", "REMAP", "CONVERT", "REFUSED")
_LETTERS = {"DIRECT": "D", "REMAP": "R", "CONVERT": "C", "REFUSED": "-"}

Pair = tuple[int, int]
"""Numbers of two entries of the catalogue."""
Report = Callable[[int, int, int], None]
"""Called with the pairs done, all pairs, and faults so far."""


def pairs(sample: int | None = None, seed: int = 0) -> list[Pair]:
    """Return every ordered pair of the catalogue, or a sample: three quarters of one model if it has so many, the rest of two.

    Raises ConfigError for a sample of less than one pair, or of more than there are.
    """
    everything = catalogue.entries()
    numbers = range(len(everything))
    if sample is None:
        return [(i, j) for i in numbers for j in numbers]
    if not 1 <= sample <= len(everything) ** 2:
        raise ConfigError(f"--sample {sample}: give a number of pairs from 1 to {len(everything) ** 2}")
    alike = [(i, j) for i in numbers for j in numbers if everything[i].model == everything[j].model]
    unlike = [(i, j) for i in numbers for j in numbers if everything[i].model != everything[j].model]
    chosen = random.Random(seed)  # noqa: S311  # a sample, not a secret
    few = min(max(sample // 4, sample - len(alike)), len(unlike))
    return sorted(chosen.sample(alike, sample - few) + chosen.sample(unlike, few))


def run(wanted: Sequence[Pair], *, seed: int = 0, processes: int = 1, report: Report | None = None) -> list[Outcome]:
    """Run pairs of the catalogue; outcomes come in the order of `wanted`, whatever the number of processes."""
    rows: dict[int, list[int]] = {}
    for i, j in wanted:
        rows.setdefault(i, []).append(j)
    found: dict[Pair, Outcome] = {}
    faults = 0
    for i, outcomes in _rows(rows, seed, processes):
        for j, outcome in zip(rows[i], outcomes, strict=True):
            found[i, j] = outcome
            faults += bool(outcome.fault)
        if report is not None:
            report(len(found), len(wanted), faults)
    return [found[pair] for pair in wanted]


def _rows(rows: Mapping[int, list[int]], seed: int, processes: int) -> Iterator[tuple[int, list[Outcome]]]:
    if processes == 1:
        for i, others in rows.items():
            yield i, _row(i, others, seed)
        return
    # Spawned, not forked: a fork of a process with threads may hold their locks for ever.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_row, i, others, seed): i for i, others in rows.items()}
        for done in as_completed(waiting):
            yield waiting[done], done.result()


def _row(prefill: int, decode: Sequence[int], seed: int) -> list[Outcome]:
    """Run one prefill side against several decode sides: its pools are made once."""
    everything = catalogue.entries()
    ranks = catalogue.build(everything[prefill])
    if len(decode) == len(everything):  # a whole run; in a sample it would take longer than the pairs
        check_memory(ranks[0])
    from_ = source(everything[prefill].name, ranks, seed)
    return [run_pair(from_, everything[j].name, catalogue.build(everything[j]), seed) for j in decode]


def run_two(names: tuple[str, str], sides: tuple[Sequence[Layout], Sequence[Layout]], seed: int = 0) -> list[Outcome]:
    """Run two sides, all ranks of each, in both directions."""
    return [run_pair(source(names[i], sides[i], seed), names[1 - i], sides[1 - i], seed) for i in (0, 1)]


def self_test(seed: int = 0) -> list[str]:
    """Return what the suite should notice and does not: nothing, or its verdicts are worth nothing."""
    return [name for name in mutations.names() if any(mutations.tried(name, seed))]


# -- what became of them -----------------------------------------------------------------------------------------------


def faults(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the pairs that are wrong."""
    return [o for o in outcomes if o.fault]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the counts by model as text, then those of refusals by cause, then every fault."""
    everything = {e.name: e.model for e in catalogue.entries()}
    by_model: dict[str, list[Outcome]] = {}
    for o in outcomes:
        a, b = everything.get(o.prefill, ""), everything.get(o.decode, "")
        by_model.setdefault(a if a == b else "two models", []).append(o)
    width = max(map(len, by_model), default=5)
    lines = [f"{'model':{width}} {'layouts':>8} {'pairs':>7} " + " ".join(f"{p:>8}" for p in PATHS) + f" {'faults':>7}"]
    for name, some in [*by_model.items(), ("all", list(outcomes))]:
        sides = len({o.prefill for o in some} | {o.decode for o in some})
        counts = Counter(o.path for o in some)
        lines.append(f"{name or 'files':{width}} {sides:>8} {len(some):>7} " + " ".join(f"{counts[p]:>8}" for p in PATHS)
                     + f" {len(faults(some)):>7}")  # fmt: skip
    causes = Counter(o.cause for o in outcomes if o.path == "REFUSED" and not o.fault)
    lines += [f"refused {n:>6}  {cause}" for cause, n in causes.most_common()]
    lines += [f"FAULT {o.prefill} -> {o.decode}: {o.fault}" for o in faults(outcomes)]
    ranks, elements = sum(o.rank_pairs for o in outcomes), sum(o.elements * len(o.ways) for o in outcomes)
    return "\n".join([*lines, f"{ranks} pairs of ranks, {elements / 1e6:.0f} million elements compared"])


def grid(outcomes: Sequence[Outcome]) -> str:
    """Return one letter per pair, a grid for each model: D direct, R remap, C convert, - refused, ! a fault."""
    letters = {(o.prefill, o.decode): "!" if o.fault else _LETTERS[o.path] for o in outcomes}
    blocks = []
    for model in catalogue.FORMS:
        names = [e.name for e in catalogue.entries() if e.model == model]
        if all((a, b) in letters for a in names for b in names):
            rows = [f"  {''.join(letters[a, b] for b in names)}  {a.removeprefix(model).strip()}" for a in names]
            blocks.append("\n".join([f"{model}: prefill down, decode across in the same order", *rows]))
    return "\n\n".join(blocks)


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the counts and every pair, ready for JSON."""
    return {
        "pairs": len(outcomes),
        "paths": {p: sum(o.path == p for o in outcomes) for p in PATHS},
        "refused": dict(Counter(o.cause for o in outcomes if o.path == "REFUSED" and not o.fault)),
        "faults": len(faults(outcomes)),
        "outcomes": [asdict(o) for o in outcomes],
    }
