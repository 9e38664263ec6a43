"""Traces cut, sped up, mixed and multiplied: sessions stay whole, times in order, and nobody shares by accident."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import DATA, check, traces

from regauge.errors import ConfigError
from regauge.sim.trace import Arrival, Trace, read
from regauge.sim.trace_shape import (
    Slice,
    common,
    dequantised,
    merged,
    parse_slice,
    replicas,
    replicated,
    scaled,
    sliced,
    staggered,
)
from regauge.sim.trace_stats import hit, tick


def turns(trace: Trace) -> list[tuple[int, int, int, float]]:
    """What a shape does not change, in an order of its own."""
    return sorted((each.tokens, each.output, len(each.blocks), each.think_s) for each in trace.arrivals)


@given(traces(), st.floats(0.01, 100))
def test_a_scaled_trace_has_so_many_times_the_rate_and_the_same_think_times(trace: Trace, factor: float) -> None:
    found = scaled(trace, factor)
    check(found.arrivals)
    assert turns(found) == turns(trace)
    assert found.arrivals[-1].at * factor == pytest.approx(trace.arrivals[-1].at - trace.arrivals[0].at)


@given(traces(), st.integers(0, 5), st.integers(1, 40))
def test_a_slice_by_requests_has_these(trace: Trace, begin: int, count: int) -> None:
    if begin >= len(trace):
        with pytest.raises(ConfigError, match=r"slice: nothing of any is from \d+ to \d+; it has \d+ requests"):
            sliced(trace, Slice(begin, begin + count, requests=True))
        return
    found = sliced(trace, Slice(begin, begin + count, requests=True))
    check(found.arrivals)
    for old, new in zip(trace.arrivals[begin:], found.arrivals, strict=False):
        assert (new.blocks, new.at) == (old.blocks, old.at - trace.arrivals[begin].at)
        assert new.after == (old.after - begin if old.after >= begin else -1)


@given(traces(), st.data())
def test_slices_by_time_have_every_session_whole_and_once(trace: Trace, data: st.DataObject) -> None:
    span = trace.arrivals[-1].at - trace.arrivals[0].at
    cut = data.draw(st.floats(0.1, 0.1 + span))
    parts = []
    for part in (Slice(0, cut), Slice(cut)):
        try:
            parts.append(sliced(trace, part))
        except ConfigError:
            continue
    assert sorted(turn for part in parts for turn in turns(part)) == turns(trace)
    for part in parts:
        check(part.arrivals)
        assert sum(each.after < 0 for each in part.arrivals) <= sum(each.after < 0 for each in trace.arrivals)
    assert sum(each.after < 0 for part in parts for each in part.arrivals) == sum(
        each.after < 0 for each in trace.arrivals
    )


@given(traces(tick=True), st.integers(0, 9))
def test_ticks_are_spread_over_themselves(trace: Trace, seed: int) -> None:
    found = dequantised(trace, seed)
    check(found.arrivals)
    assert turns(found) == turns(trace)
    assert found.tick_s == 0
    assert dequantised(found, seed) is found
    for old, new in zip(trace.arrivals, found.arrivals, strict=True):
        assert -3.0 <= new.at - old.at <= 3.0


@given(traces(), traces(tick=True))
def test_merged_traces_share_nothing(one: Trace, other: Trace) -> None:
    found = merged([one, other])
    check(found.arrivals)
    assert found.name == "any+any"
    assert turns(found) == sorted(turns(one) + turns(other))
    tokens = [sum(each.tokens for each in trace.arrivals) for trace in (one, other)]
    expected = (hit(one.arrivals, 16) * tokens[0] + hit(other.arrivals, 16) * tokens[1]) / sum(tokens)
    assert hit(found.arrivals, 16) == pytest.approx(expected)


@given(traces(), st.booleans(), st.integers(1, 4), st.integers(0, 9))
def test_copies_are_the_trace_of_other_users(trace: Trace, ticks: bool, copies: int, seed: int) -> None:
    given_trace = Trace(trace.name, 16, trace.arrivals, 0.7 if ticks else 0.0)
    found = replicated(given_trace, copies, seed)
    check(found.arrivals)
    assert turns(found) == sorted(turns(trace) * copies)
    assert hit(found.arrivals, 16) == pytest.approx(hit(trace.arrivals, 16))
    assert found.arrivals == replicated(given_trace, copies, seed).arrivals
    links = [
        sorted((arrivals[each.after].tokens, each.tokens) for each in arrivals if each.after >= 0)
        for arrivals in (found.arrivals, trace.arrivals)
    ]
    assert links[0] == sorted(links[1] * copies)


def test_copies_may_share_the_system_prompt() -> None:
    trace = read(DATA / "mooncake_conversation.jsonl")
    assert common(trace.arrivals) == {0}
    apart, together = (replicated(trace, 3, 1, shared=shared) for shared in (False, True))
    assert hit(apart.arrivals, 512) == pytest.approx(hit(trace.arrivals, 512))
    begins = sum(1 for each in trace.arrivals if each.blocks[:1] == (0,))
    more = 2 * 512 / sum(each.tokens for each in together.arrivals)  # of the three copies' first, two hit now
    assert begins > 50
    assert hit(together.arrivals, 512) == pytest.approx(hit(apart.arrivals, 512) + more)


def test_copies_come_at_as_many_times_the_rate_and_their_ticks_are_spread() -> None:
    trace = read(DATA / "mooncake_conversation.jsonl")
    found = replicated(trace, 20, 1)
    span = trace.arrivals[-1].at + trace.tick_s
    assert len(found) == 20 * len(trace)
    assert found.arrivals[-1].at < span + trace.tick_s
    assert tick([each.at for each in found.arrivals]) == 0
    halves = [sum(each.at < span / 2 for each in arrivals) for arrivals in (found.arrivals, trace.arrivals)]
    assert halves[0] / len(found) == pytest.approx(0.5, abs=0.05)


def test_copies_are_made_one_arrival_at_a_time() -> None:
    endless = replicas(read(DATA / "mooncake_synthetic.jsonl"), 10_000, 1)
    assert len(list(islice(endless, 5))) == 5


def test_staggered_sessions_begin_at_a_rate() -> None:
    trace = replicated(read(DATA / "weka_agent_compact.jsonl"), 100, 1)
    found = staggered(trace, 0.5, 1)
    check(found.arrivals)
    assert turns(found) == turns(trace)
    assert 600 / found.arrivals[-1].at == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize(
    ("text", "part"),
    [("600:1200", Slice(600, 1200)), (":1.5", Slice(0, 1.5)), ("7:", Slice(7)), ("0:5000r", Slice(0, 5000, True)), ("9:r", Slice(9, requests=True))],
)  # fmt: skip
def test_slices_are_written_as_seconds_or_requests(text: str, part: Slice) -> None:
    assert parse_slice(text) == part


@pytest.mark.parametrize("text", ["", "600", "5:5", "9:3", "-1:4", "a:b", "nan:4", "1:2:3", "inf:"])
def test_what_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"slice: .* give begin:end in seconds, as 600:1200, or in requests, as 0:5000r"
    ):
        parse_slice(text)


def test_nonsense_is_refused() -> None:
    trace = Trace("any", 16, (Arrival(0.0, 5, 1, ()),))
    with pytest.raises(ConfigError, match=r"slice: '0.5:2r': numbers of requests are whole"):
        parse_slice("0.5:2r")
    for factor in (-1.0, 0.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"scale: {factor}; give a positive number"):
            scaled(trace, factor)
    with pytest.raises(ConfigError, match="sessions per second: 0; give a positive number"):
        staggered(trace, 0, 1)
    with pytest.raises(ConfigError, match="copies: 0; give 1 or more"):
        replicated(trace, 0, 1)
    with pytest.raises(ConfigError, match=r"unlike blocks do not mix \(any: 16, other: 32 tokens\): read them"):
        merged([trace, Trace("other", 32, ())])
