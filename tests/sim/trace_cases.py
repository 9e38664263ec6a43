"""Traces for the tests: the excerpts, lines written to a file, and any trace at all."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from hypothesis import strategies as st

from regauge.sim.trace import Arrival, Trace

DATA = Path(__file__).parent / "data"


def lines(path: Path, rows: Iterable[object]) -> Path:
    """Write objects as JSON lines, or strings as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@st.composite
def traces(draw: st.DrawFn, tick: bool = False) -> Trace:
    """Sessions of one to four turns, prompts that go on from the one before; many begin with block 0."""
    arrivals: list[Arrival] = []
    at = draw(st.integers(0, 5)) * 1.0
    named = 1
    for _ in range(draw(st.integers(1, 12))):
        at += draw(st.integers(0, 4)) * (3.0 if tick else 0.7)
        blocks: tuple[int, ...] = (0,) if draw(st.booleans()) else ()
        for turn in range(draw(st.integers(1, 4))):
            more = draw(st.integers(0, 3))
            blocks = (*blocks, *range(named, named + more))
            named += more
            tokens = max(1, 16 * len(blocks) + draw(st.integers(0, 15)))
            after, think = (len(arrivals) - 1, draw(st.floats(0, 9))) if turn else (-1, 0.0)
            arrivals.append(Arrival(at, tokens, draw(st.integers(1, 50)), blocks, after, think))
    return Trace("any", 16, tuple(arrivals), 3.0 if tick else 0.0)


def check(arrivals: Iterable[Arrival]) -> None:
    """Assert what every trace keeps to."""
    seen: list[Arrival] = []
    for each in arrivals:
        assert not seen or each.at >= seen[-1].at
        assert each.after < len(seen)
        if each.after >= 0:
            assert each.at == seen[each.after].at
        assert each.tokens >= 1
        assert each.output >= 1
        seen.append(each)
