"""Figures of a trace, against arithmetic and against processes of which they are known."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from hypothesis import given
from trace_cases import DATA, traces

from regauge.sim.trace import Arrival, Trace, read
from regauge.sim.trace_stats import describe, dispersion, hit, lengths, tick, variation


def test_a_trace_in_figures() -> None:
    arrivals = (
        Arrival(0.0, 40, 2, (1, 2)),
        Arrival(0.0, 70, 4, (1, 2, 3, 4), 0, 5.0),
        Arrival(1.0, 20, 3, (1,)),
        Arrival(4.0, 10, 1, ()),
    )
    found = describe(Trace("t", 16, arrivals))
    assert (found.requests, found.sessions, found.span_s) == (4, 3, 4.0)
    assert found.prompt == lengths([10, 20, 40, 70])
    assert (found.prompt.mean, found.prompt.p50, found.prompt.most) == (35.0, 30.0, 70)
    assert found.ratio == pytest.approx(14)
    assert found.hit == pytest.approx(3 * 16 / 140)
    assert found.cv == pytest.approx(0.5)
    assert found.dispersion == (None, None, None)
    assert (found.think_p50, found.think_p90) == (5.0, 5.0)
    assert describe(Trace("t", 0, arrivals[2:])).hit is None


def test_poisson_arrivals_have_variation_and_dispersion_one() -> None:
    rng = random.Random(1)
    times = list(accumulate(rng.expovariate(5.0) for _ in range(20_000)))
    assert variation(times) == pytest.approx(1.0, rel=0.05)
    for window in (1.0, 10.0):
        assert dispersion(times, window) == pytest.approx(1.0, rel=0.2)
    assert tick(times) == 0.0
    even = [k / 4 for k in range(1000)]
    assert variation(even) == pytest.approx(0.0, abs=1e-9)
    assert dispersion(even, 1.0) == 0.0


@pytest.mark.parametrize("width", [0.25, 1.0, 3.0, 60.0])
@pytest.mark.parametrize("per_tick", [0.3, 4.0])
def test_ticks_are_found_and_nothing_else(width: float, per_tick: float) -> None:
    rng = random.Random(2)
    times = list(accumulate(rng.expovariate(per_tick / width) for _ in range(2_000)))
    rounded = [
        int(1000 * (width - 1e-4) * int(time / width)) / 1000 for time in times
    ]  # now and then a tick of 1 ms less
    assert tick(rounded) == pytest.approx(width, abs=2e-3)
    assert tick(times) == 0.0


@given(traces())
def test_a_cache_without_end_hits_what_came_before(trace: Trace) -> None:
    seen: set[tuple[int, ...]] = set()
    cached = 0
    for each in trace.arrivals:
        prefixes = [each.blocks[: k + 1] for k in range(len(each.blocks))]
        cached += 16 * sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    assert hit(trace.arrivals, 16) == pytest.approx(cached / sum(each.tokens for each in trace.arrivals))


def test_an_excerpts_figures() -> None:
    found = describe(read(DATA / "azure2023_code.csv"))
    assert (found.prompt.mean, found.output.mean) == (pytest.approx(2633.825), pytest.approx(22.55))
    assert found.hit is None
    assert describe(read(DATA / "mooncake_synthetic.jsonl")).hit == pytest.approx(0.6647, abs=1e-4)
