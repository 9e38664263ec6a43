"""`regauge bench conformance`: every pair of a catalogue of real layouts, or two layouts of the user's own."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.layout.spec import Layout
    from regauge.move.conformance.suite import Outcome


def arguments(bench: argparse.ArgumentParser, model_help: str) -> str:
    """Add the options of `bench conformance`; return the name of the argument that takes layouts."""
    bench.add_argument("layouts", metavar="LAYOUT", nargs="*", help="two layouts, instead of the catalogue")
    bench.add_argument("--model", default="smollm2-135m-instruct", help=model_help + "; default %(default)s")
    bench.add_argument("--sample", type=int, metavar="N", help="so many pairs of the catalogue; default: all")
    bench.add_argument("--seed", type=int, default=0, help="of the sample and of all bytes, default %(default)s")
    bench.add_argument("--processes", type=int, metavar="N", help="default: one per CPU")
    return "layouts"


def run(options: argparse.Namespace) -> int:
    """Run the suite and print the matrix. Exit code 1 if a pair is wrong, or if the suite misses planted mistakes."""
    from regauge.move.conformance import matrix

    if len(options.layouts) not in (0, 2):
        raise ConfigError(f"{len(options.layouts)} layouts: give two, or none for the catalogue")
    given = [f"--{name}" for name in ("sample", "processes") if getattr(options, name) is not None]
    if options.layouts and given:
        raise ConfigError(f"{' and '.join(given)} is for the catalogue: leave it out with two layouts")
    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: give at least 1")
    if not 0 <= options.seed < 1 << 63:
        raise ConfigError(f"--seed {options.seed}: give a number that is not negative")
    missed = matrix.self_test(options.seed)
    if options.layouts:
        first, second = options.layouts
        outcomes = matrix.run_two((first, second), (_ranks(first, options), _ranks(second, options)), options.seed)
    else:
        wanted = matrix.pairs(options.sample, options.seed)
        outcomes = matrix.run(
            wanted, seed=options.seed, processes=options.processes or len(os.sched_getaffinity(0)), report=_Progress()
        )
    failed = bool(missed or matrix.faults(outcomes))
    if options.json:
        print(json.dumps({**matrix.as_json(outcomes), "mistakes_missed": missed}, indent=2))
        return int(failed)
    _print(outcomes, missed, two=bool(options.layouts))
    return int(failed)


def _print(outcomes: list[Outcome], missed: list[str], *, two: bool) -> None:
    from regauge.move.conformance import matrix, mutations

    planted = len(mutations.names())
    if two:
        for o in outcomes:
            print(f"{o.prefill} -> {o.decode}: {o.path}", o.cause and f"({o.cause})", o.fault and f"FAULT {o.fault}")
            if not o.fault and o.path != "REFUSED":
                print(
                    f"  {o.elements} elements equal the reference, {', '.join(o.ways)}; {o.rank_pairs} pairs of ranks"
                )
    else:
        if text := matrix.grid(outcomes):
            print(text, end="\n\n")
        print(matrix.table(outcomes))
    print(f"planted mistakes noticed: {planted - len(missed)} of {planted}", *missed, sep="\n  missed: ")


def _ranks(text: str, options: argparse.Namespace) -> list[Layout]:
    """Return the layouts of all ranks of a side: a file's rank stands for those like it."""
    from regauge.layout.presets import is_file, load_described, load_layout
    from regauge.move.conformance.catalogue import all_ranks
    from regauge.plan.ranks import ranks

    if is_file(text):
        return ranks(load_layout(text, None))
    told = load_described(options.model)
    return all_ranks(text, told.model, told.dtype, told.state_dtype)


class _Progress:
    """Says on stderr how far a run is: a line that is written over on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, of: int, faults: int) -> None:
        terminal = sys.stderr.isatty()
        if not terminal and done < of and time.monotonic() < self._said + 10:
            return
        self._said = time.monotonic()
        print(
            f"{done} of {of} pairs, {faults} faults",
            end="\r" if terminal and done < of else "\n",
            file=sys.stderr,
            flush=True,
        )
