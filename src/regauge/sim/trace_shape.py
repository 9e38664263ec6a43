"""Traces cut, sped up, mixed and multiplied.

All keep sessions whole: turns that wait move with the first of their session, and `after` points to where that turn now is.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from regauge.errors import ConfigError
from regauge.sim.trace import Arrival, Trace, ordered, paced, spread

COMMON = 0.05
"""Share of the sessions that begin with a block, from which on it is taken for a system prompt."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a trace: seconds from its begin, or, with `requests`, numbers of arrivals; `end` is not in it."""

    begin: float = 0.0
    end: float = inf
    requests: bool = False


def parse_slice(text: str) -> Slice:
    """Return the part that `--slice` means: `600:1200` in seconds, `0:5000r` in requests; either side may be left out. Raises ConfigError."""
    remedy = "give begin:end in seconds, as 600:1200, or in requests, as 0:5000r; begin is less than end"
    inner = text.strip().removesuffix("r")
    begin, colon, end = inner.partition(":")
    try:
        found = Slice(float(begin or 0), float(end or inf), text.strip().endswith("r"))
    except ValueError:
        raise ConfigError(f"slice: {text!r} is no part of a trace; {remedy}") from None
    if not colon or not isfinite(found.begin) or not 0 <= found.begin < found.end:
        raise ConfigError(f"slice: {text!r} is no part of a trace; {remedy}")
    if found.requests and (found.begin % 1 or (isfinite(found.end) and found.end % 1)):
        raise ConfigError(f"slice: {text!r}: numbers of requests are whole")
    return found


def sliced(trace: Trace, part: Slice) -> Trace:
    """Return a part, its begin at 0. By time, sessions that begin in it are there whole; by requests, a turn whose predecessor is cut off begins one.

    Raises ConfigError where nothing is in it.
    """
    given = trace.arrivals
    if part.requests:
        places = range(int(part.begin), int(min(part.end, len(given))))
        begin = given[places[0]].at if places else 0.0
    else:
        begin = part.begin
        zero = given[0].at if given else 0.0
        places = [i for i, each in enumerate(given) if part.begin <= each.at - zero < part.end]  # type: ignore[assignment]
        begin += zero
    if not places:
        unit = f"{len(given)} requests" if part.requests else f"{given[-1].at - given[0].at if given else 0:g} s"
        raise ConfigError(f"slice: nothing of {trace.name} is from {part.begin:g} to {part.end:g}; it has {unit}")
    new = {old: place for place, old in enumerate(places)}
    kept = (given[i] for i in places)
    return replace(
        trace,
        arrivals=tuple(replace(each, at=each.at - begin, after=new.get(each.after, -1)) for each in kept),
    )


def scaled(trace: Trace, factor: float) -> Trace:
    """Return the trace with `factor` times the arrivals a second, the first at 0. Think times stay. Raises ConfigError unless it is positive."""
    _positive("scale", factor, factor)
    return replace(trace, arrivals=tuple(paced(trace.arrivals, factor)), tick_s=trace.tick_s / factor)


def dequantised(trace: Trace, seed: int) -> Trace:
    """Return the trace with the arrivals of each tick spread over it at random; as it is, if it has no ticks."""
    if not trace.tick_s:
        return trace
    return replace(trace, arrivals=tuple(spread(trace.arrivals, seed, trace.tick_s)), tick_s=0.0)


def staggered(trace: Trace, per_s: float, seed: int) -> Trace:
    """Return the trace with its sessions begun in turn as a Poisson process, for those that have no begin of their own."""
    _positive("sessions per second", per_s, per_s)
    rng = random.Random(seed)  # noqa: S311  # a simulation
    at, moved = 0.0, list[Arrival]()
    for each in trace.arrivals:
        if each.after < 0:
            moved.append(replace(each, at=at))
            at += rng.expovariate(per_s)
        else:
            moved.append(replace(each, at=moved[each.after].at))
    return replace(trace, arrivals=ordered(moved), tick_s=0.0, notes=())


def merged(traces: Sequence[Trace]) -> Trace:
    """Return one trace of several that come together, as of users who share nothing. Raises ConfigError for unlike blocks."""
    blocks = {trace.block for trace in traces if trace.block}
    if len(blocks) > 1:
        sizes = ", ".join(f"{trace.name}: {trace.block}" for trace in traces)
        raise ConfigError(f"traces of unlike blocks do not mix ({sizes} tokens): read them with the same block")
    arrivals: list[Arrival] = []
    base = 0
    for trace in traces:
        begin, names = len(arrivals), _names(trace.arrivals)
        for each in trace.arrivals:
            after = each.after + begin if each.after >= 0 else -1
            arrivals.append(replace(each, blocks=tuple(name + base for name in each.blocks), after=after))
        base += names
    notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
    ticks = max((trace.tick_s for trace in traces), default=0.0)
    name = "+".join(trace.name for trace in traces)
    return Trace(name, max(blocks, default=0), ordered(arrivals), ticks, notes)


def replicated(trace: Trace, copies: int, seed: int, *, shared: bool = False) -> Trace:
    """Return what `replicas` yields as a trace."""
    arrivals = tuple(replicas(trace, copies, seed, shared=shared))
    return replace(trace, name=f"{trace.name} x{copies}", arrivals=arrivals, tick_s=0.0)


def replicas(trace: Trace, copies: int, seed: int, *, shared: bool = False) -> Iterator[Arrival]:
    """Yield so many copies of a trace at once, in order of time, and `copies` times its arrivals a second.

    Each is of other users, so its blocks have other names; with `shared`, all keep the blocks that many sessions begin with (`common`). Each begins at a
    place of its own and goes on from the start, so that the copies' peaks do not fall together, and has its ticks spread anew. Memory is that of the one trace
    and some of each copy. Raises ConfigError, at the first arrival, unless `copies` is 1 or more.
    """
    if copies < 1:
        raise ConfigError(f"copies: {copies}; give 1 or more")
    arrivals = trace.arrivals
    followed = {each.after for each in arrivals}
    names = _names(arrivals)
    keep = common(arrivals) if shared else frozenset()
    streams = [_copy(trace, copy, f"{seed}:{copy}") for copy in range(copies)]
    places: list[dict[int, int]] = [{} for _ in range(copies)]
    for place, (at, copy, index) in enumerate(heapq.merge(*streams)):
        each, base = arrivals[index], copy * names
        if keep:
            blocks = tuple([name if name in keep else name + base for name in each.blocks])
        else:
            blocks = tuple([name + base for name in each.blocks])
        if index in followed:
            places[copy][index] = place
        after = places[copy][each.after] if each.after >= 0 else -1
        yield Arrival(at, each.tokens, each.output, blocks, after, each.think_s)


def _copy(trace: Trace, copy: int, seed: str) -> Iterator[tuple[float, int, int]]:
    """Yield time, copy and position of the arrivals, from a random one on and round, ticks spread.

    A time is not before its tick's, so what is earlier than the next arrival's is in order: few wait at a time.
    """
    rng = random.Random(seed)  # noqa: S311  # a simulation
    arrivals = trace.arrivals
    if not arrivals:
        return
    begin, tick = arrivals[0].at, trace.tick_s
    span = arrivals[-1].at - begin + (tick or (arrivals[-1].at - begin) / len(arrivals))
    first = _session_start(arrivals, rng.randrange(len(arrivals)))
    shift, lap = arrivals[first].at, 0.0
    waiting: list[tuple[float, int, int]] = []
    moved: dict[int, float] = {}
    for number in range(len(arrivals)):
        index = (first + number) % len(arrivals)
        if number and index == 0:
            lap = span
        each = arrivals[index]
        at = each.at - shift + lap
        while waiting and waiting[0][0] < at:
            yield waiting[0][0], copy, heapq.heappop(waiting)[2]
        if tick:
            # Turns that wait come with the one that they wait for.
            at = moved[index] = at + rng.uniform(0, tick) if each.after < 0 else moved[each.after]
        heapq.heappush(waiting, (at, number, index))
    while waiting:
        yield waiting[0][0], copy, heapq.heappop(waiting)[2]


def _session_start(arrivals: Sequence[Arrival], index: int) -> int:
    """Return the first position with the time of this one: sessions have their turns together."""
    while index and arrivals[index - 1].at == arrivals[index].at:
        index -= 1
    return index


def common(arrivals: Iterable[Arrival], share: float = COMMON) -> frozenset[int]:
    """Return the names of blocks that at least this share of the sessions begin with: what all users have before their own text."""
    counts: Counter[int] = Counter()
    sessions = 0
    for each in arrivals:
        if each.after < 0:
            sessions += 1
            counts.update(each.blocks)
    # A session's every prefix counts: where few share a block, few share what comes behind it.
    return frozenset(name for name, count in counts.items() if count >= max(2.0, share * sessions))


def _names(arrivals: Sequence[Arrival]) -> int:
    """Return one more than the largest name of a block."""
    return 1 + max((max(each.blocks) for each in arrivals if each.blocks), default=-1)


def _positive(field: str, value: float, text: object) -> float:
    if not isfinite(value) or value <= 0:
        raise ConfigError(f"{field}: {text}; give a positive number")
    return value
