"""`regauge bench faults`: the transfer protocol over a faulty network, at random and in every interleaving."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.testing.explore import Found
    from regauge.testing.faults import Outcome

STATES = 300_000
"""Most states of one exhaustive search, unless told otherwise."""


def arguments(bench: argparse.ArgumentParser) -> None:
    """Add the options of `bench faults`."""
    bench.add_argument(
        "--steps", type=int, metavar="N", help="events of all random worlds together; default: 1,000,000"
    )
    bench.add_argument("--seed", type=int, default=0, help="of all random worlds, default %(default)s")
    bench.add_argument(
        "--exhaustive", action="store_true", help="every interleaving of small clusters instead; minutes each"
    )
    bench.add_argument(
        "--states", type=int, metavar="N", help=f"of --exhaustive: most states of each cluster; default: {STATES:,}"
    )


def run(options: argparse.Namespace) -> int:
    """Run, and print what happened. Exit code 1 on a violation, with the seed and the events that lead to it."""
    from regauge.testing.explore import Caught
    from regauge.testing.faults import Broken

    steps = 1_000_000 if options.steps is None else options.steps
    if steps < 1:
        raise ConfigError(f"--steps {steps}: give at least 1")
    if options.exhaustive and options.steps is not None:
        raise ConfigError("--steps is for random runs, and --exhaustive searches all there is: give one of them")
    if options.states is not None and (options.states < 1 or not options.exhaustive):
        raise ConfigError(f"--states {options.states}: give at least 1, with --exhaustive")
    try:
        result = _search(options.states or STATES) if options.exhaustive else _random(steps, options.seed)
    except (Broken, Caught) as error:
        print(json.dumps({"violation": str(error)}, indent=2) if options.json else f"VIOLATION: {error}")
        return 1
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{name}:")
            print(*(f"  {key:42} {_number(count)}" for key, count in value.items()), sep="\n")
        else:
            print(f"{name:44} {_number(value)}")
    return 0


def _random(steps: int, seed: int) -> dict[str, Any]:
    from regauge.testing import faults

    began, said = time.monotonic(), _Progress(steps, "steps")
    outcome: Outcome = faults.run(steps, seed, lambda now: said(now.steps))
    taken = time.monotonic() - began
    return {
        "steps": outcome.steps,
        "steps per second": round(outcome.steps / taken),
        "worlds": outcome.worlds,
        "what happened": dict(sorted(outcome.stats.items())),
        "faults": outcome.faults.total(),
        "faults of each kind": dict(sorted(outcome.faults.items())),
        "violations": 0,
    }


def _search(states: int) -> dict[str, Any]:
    from regauge.testing.explore import Search, deeper, instances

    out: dict[str, Any] = {}
    for instance in (*instances(), *deeper()):
        began, said = time.monotonic(), _Progress(states, f"states of {instance.name!r} at most")
        found: Found = Search(instance, states).run(lambda now, say=said: say(now.states))  # type: ignore[misc]  # its default
        out[instance.name] = {
            "states": found.states, "transitions": found.transitions, "ends": found.ends,
            "every state seen": int(found.complete), "seconds": round(time.monotonic() - began),
        }  # fmt: skip
    return {**out, "violations": 0}


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


class _Progress:
    """Says on stderr how far a run is: a line that is written over on a terminal, else a line every ten seconds."""

    def __init__(self, of: int, what: str) -> None:
        self._of, self._what = of, what
        self._said = time.monotonic()

    def __call__(self, done: int) -> None:
        terminal = sys.stderr.isatty()
        if time.monotonic() < self._said + (0.2 if terminal else 10):
            return
        self._said = time.monotonic()
        print(f"{done:,} of {self._of:,} {self._what}", end="\r" if terminal else "\n", file=sys.stderr, flush=True)
