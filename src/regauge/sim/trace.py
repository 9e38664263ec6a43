"""Requests of a trace, published or made: what comes when, how long, and what of its prompt came before.

`read` knows the public formats, each in a module `trace_*.py`. `trace_shape` cuts, speeds up and multiplies traces, `trace_stats` describes
them, `synthetic` makes others like them.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

BLOCK = 512
"""Tokens of a block in Mooncake's traces, and of those whose own blocks are finer than a simulation can pay for."""
TICK_S = 3.0
"""Mooncake's conversation trace has its arrivals rounded to ticks of 3 s: replayed as they are, 10 requests on average come at one instant."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, its lengths in tokens, and its prefix blocks.

    A closed-loop turn waits for the turn before: it comes `think_s` after that one's end. Its `at` is that of its session's first turn, so that
    whoever takes arrivals one at a time knows all turns of a session when it begins.
    """

    at: float
    """Seconds; of a closed-loop turn its session's begin, and no time to send it at."""
    tokens: int
    """Of the prompt."""
    output: int
    blocks: tuple[int, ...]
    """Whole blocks of the prompt, equal ids = equal prefix up to there; () = no information."""
    after: int = -1
    """Position in the trace of the turn before; -1: comes at `at`."""
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals, ascending in `at`; `after` points to an earlier position."""

    name: str
    block: int
    """Tokens of a block; 0: the trace says nothing of reuse."""
    arrivals: tuple[Arrival, ...]
    tick_s: float = 0.0
    """Arrivals are rounded to ticks of so many seconds (`spread` takes that back); 0: they are not."""
    notes: tuple[str, ...] = ()
    """What the reader left out, or could not know."""

    def __len__(self) -> int:
        return len(self.arrivals)


def read(
    path: Path, *, form: str = "auto", block: int | None = None, closed: bool | None = None, limit: int = 0
) -> Trace:
    """Read a trace file (or a folder of Weka sessions), plain or gzip, in order of time.

    `form`: a name of `forms()`; "auto" looks at the first line. `block`: tokens of a block where the format leaves a choice, a multiple of its own.
    `closed`: sessions as closed loops, where the format knows who waits for whom; None: as the format is meant. `limit`: rows to read, 0 all.
    Raises ConfigError that names file, line and remedy.
    """
    from regauge.sim.trace_files import Options
    from regauge.sim.trace_forms import read as by_form

    collecting = gc.isenabled()
    gc.disable()  # millions of objects, and no cycles
    try:
        return by_form(Path(path), form, Options(block, closed, limit))
    finally:
        if collecting:
            gc.enable()


def ordered(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """Sort by time, turns behind those that they wait for, and let `after` point to the new positions.

    Arrivals at one instant stay in order. `after` of those given points to positions in what is given.
    """
    given = list(arrivals)
    places = sorted(range(len(given)), key=lambda i: given[i].at)
    new = [0] * len(given)
    for place, old in enumerate(places):
        new[old] = place
    return tuple(
        each if each.after < 0 else replace(each, after=new[each.after]) for each in (given[old] for old in places)
    )


def spread(arrivals: Sequence[Arrival], seed: int, tick_s: float = TICK_S) -> list[Arrival]:
    """Return the arrivals with each moved by a random part of a tick, in order of time; a session moves as one."""
    rng = random.Random(seed)  # noqa: S311  # a simulation
    moved: list[Arrival] = []
    for each in arrivals:
        at = each.at + rng.uniform(0, tick_s) if each.after < 0 else moved[each.after].at
        moved.append(replace(each, at=at))
    return list(ordered(moved))


def paced(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """Return the arrivals `speed` times as fast, the first at 0. Think times are people's and tools', and stay."""
    first = arrivals[0].at if arrivals else 0.0
    return [replace(each, at=(each.at - first) / speed) for each in arrivals]


def generate(seed: int, count: int, per_s: float) -> list[Arrival]:
    """Make conversations: Poisson arrivals; lengths with a heavy tail; turns that repeat what went before, behind a system prompt of all.

    Needs no trace. `synthetic.generate` makes arrivals like those of one.
    """
    rng = random.Random(seed)  # noqa: S311  # a simulation
    at, fresh = 0.0, 1
    talks: list[tuple[int, ...]] = []
    arrivals = []
    for _ in range(count):
        at += rng.expovariate(per_s)
        talk = rng.choice(talks) if talks and rng.random() < 0.5 else (0,)
        tokens = min(100_000, int(rng.lognormvariate(8.3, 1.1)) + BLOCK)
        new = max(1, tokens // BLOCK)
        blocks = (*talk, *range(fresh, fresh + new))
        fresh += new
        if len(blocks) * BLOCK < 100_000:
            talks.append(blocks)
            del talks[:-200]
        arrivals.append(
            Arrival(at, len(blocks) * BLOCK + rng.randrange(BLOCK), 1 + int(rng.expovariate(1 / 300)), blocks)
        )
    return arrivals
