"""A request's time line as trace events (`regauge.perfetto`): the gateway and each rank of a worker are a process.

Tracks of a worker, for each attempt: its steps as the gateway has them, layers as they are computed, words of the protocol, chunks that are written or checked (as
many tracks as there are at once), and steps of the engine with their tokens. Arrows go from a chunk's writing to its check; a counter has the
credit that prefill was given and the bytes that it has written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Final

from regauge.move.events import Event as Happened
from regauge.perfetto import Event, Track, process
from regauge.serve.tracing import Told, Traced

GATEWAY: Final = "gateway"
NOTE: Final = (
    "times of the gateway's clock; a worker's own clock is placed within the uncertainty that its process's name says. "
    "Steps without a worker's word: lengths by the worker's clock, placed by when its answer came"
)
ROOM: Final = 64
"""Tracks of a process for each attempt."""
WORDS, LAYERS, STEPS, CHUNKS = 1, 2, 3, 8
"""Of them, after the attempt's own: chunks take what is left, one track for each that is under way."""


def trace_events(line: Traced) -> dict[str, Any]:
    """Return the file's content."""
    places = _places(line)
    events = [*_names(line, places), *_request(line), *_tries(line, places)]
    attempts = {tried.name: number for number, tried in enumerate(line.tries)}
    for told in line.told:
        events += _Worker(told, places[told.rank], ROOM * attempts[told.attempt]).events()
    events += _arrows(line, places, attempts)
    other = {"request": line.request.id, "note": NOTE, "missing": line.missing, "doubts": line.doubts}
    return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}


def _places(line: Traced) -> dict[str, int]:
    ranks = {told.worker: told.rank for told in reversed(line.told)}
    names = [ranks.get(name, name) for tried in line.tries for name in (tried.prefill, tried.decode) if name]
    names += [told.rank for told in line.told]
    return {name: number for number, name in enumerate((GATEWAY, *dict.fromkeys(names)), 1)}


def _names(line: Traced, places: dict[str, int]) -> Iterator[Event]:
    within = {told.rank: f"{told.rank} (+-{1e3 * told.uncertain_s:.3f} ms)" for told in line.told}
    for name, place in places.items():
        yield from process(place, within.get(name, name))
        for number, tried in enumerate(line.tries):
            if name == GATEWAY or name in _ranks(line, tried.prefill, tried.decode):
                yield Track(place, ROOM * number + 1).named(tried.name)


def _ranks(line: Traced, *workers: str) -> set[str]:
    return {*workers, *(told.rank for told in line.told if told.worker in workers)}


def _request(line: Traced) -> Iterator[Event]:
    told = line.request
    detail = {
        "prompt tokens": told.prompt_tokens, "generated tokens": told.completion_tokens, "outcome": told.outcome,
        "error": told.error, "began (Unix s)": told.unix_s,
    }  # fmt: skip
    yield Track(1, 0).span("request", told.id, 0.0, told.seconds, detail)


def _tries(line: Traced, places: dict[str, int]) -> Iterator[Event]:
    first = {told.worker: told.rank for told in reversed(line.told)}
    for number, tried in enumerate(line.tries):
        detail = {"path": tried.path, "mode": tried.mode, "wire bytes": tried.wire_bytes, "outcome": tried.outcome}
        for span in tried.spans:
            track = Track(places[first.get(span.where, span.where)], ROOM * number + 1)
            yield track.span(span.where, span.name, span.begin_s, span.end_s, detail)
        for count, at in enumerate(tried.tokens_s, 1):
            yield Track(1, ROOM * number + 1).instant("token", f"token {count}", at)


class _Worker:
    """One rank's events of an attempt."""

    def __init__(self, told: Told, place: int, base: int) -> None:
        self._told, self._place, self._base = told, place, base

    def events(self) -> Iterator[Event]:
        """Yield all, with the names of their tracks."""
        kinds = {"computed": (LAYERS, "layers"), "step": (STEPS, "engine steps")}
        lanes = lanes_of(self._told)
        named = set[int]()
        for number, event in enumerate(self._told.events):
            offset, what = kinds.get(event.name, (WORDS, "words"))
            if number in lanes:
                offset, what = CHUNKS + lanes[number], f"chunks {lanes[number] + 1}"
            track = Track(self._place, self._base + 1 + offset)
            if offset not in named:
                named.add(offset)
                yield track.named(f"{self._told.attempt} {what}")
            name, detail = _label(event), _detail(event)
            if event.end_s > event.begin_s:
                yield track.span(self._told.role, name, event.begin_s, event.end_s, detail)
            else:
                yield track.instant(self._told.role, name, event.begin_s, detail)
        yield from self._counters()

    def _counters(self) -> Iterator[Event]:
        """Yield the credit of each leg's epoch, and what has been written under it."""
        credit: dict[str, int] = {}
        written: dict[str, int] = {}
        for event in self._told.events:
            if event.name == "grant":
                credit[event.peer] = written[event.peer] = 0
            elif event.name == "credit":
                credit[event.peer] = event.nbytes or 0
            elif event.name == "written":
                written[event.peer] = written.get(event.peer, 0) + (event.nbytes or 0)
            else:
                continue
            values = {"credit": credit.get(event.peer, 0), "written": written.get(event.peer, 0)}
            name = f"{self._told.attempt} bytes, {event.peer}"
            yield Track(self._place, 0).counter(name, event.begin_s, values)


def lanes_of(told: Told) -> dict[int, int]:
    """Return the track of each event of a chunk, by its number among the rank's events: those of one track do not overlap."""
    chunks = [(e.begin_s, e.end_s, n) for n, e in enumerate(told.events) if e.name in ("gather", "write", "check")]
    ends: list[float] = []
    lanes: dict[int, int] = {}
    for begin, end, number in sorted(chunks):
        lane = next((at for at, free in enumerate(ends) if free <= begin), len(ends))
        lane = min(lane, ROOM - CHUNKS - 2)
        ends[lane : lane + 1] = [end]
        lanes[number] = lane
    return lanes


def _label(event: Happened) -> str:
    if event.name == "computed" and event.layers is not None:
        first, end = event.layers
        return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"
    return event.name if event.seq is None else f"{event.name} {event.seq}"


def _detail(event: Happened) -> dict[str, Any]:
    found = {"peer": event.peer, "epoch": event.epoch, "layers": event.layers, "tokens": event.tokens,
             "bytes": event.nbytes, "note": event.text}  # fmt: skip
    return {name: value for name, value in found.items() if value not in (None, "")}


def _arrows(line: Traced, places: dict[str, int], attempts: dict[str, int]) -> Iterator[Event]:
    """Yield an arrow from each chunk's writing to its check; a chunk that was written twice has two."""
    begins = _chunks(line, lambda told, event: (told.attempt, told.rank, event.peer, event.epoch, event.seq), "gather")
    ends = _chunks(line, lambda told, event: (told.attempt, event.peer, told.rank, event.epoch, event.seq), "check")
    for key, sent in begins.items():
        for count, (left, came) in enumerate(zip(sent, ends.get(key, []), strict=False)):
            ident = "/".join(map(str, (*key, count)))
            for (told, lane, at), end in ((left, False), (came, True)):
                track = Track(places[told.rank], ROOM * attempts[told.attempt] + 1 + CHUNKS + lane)
                yield (track.comes if end else track.leaves)("chunk", "KV", ident, at)


def _chunks(
    line: Traced, key: Callable[[Told, Happened], tuple[object, ...]], name: str
) -> dict[tuple[object, ...], list[tuple[Told, int, float]]]:
    found = defaultdict[tuple[object, ...], list[tuple[Told, int, float]]](list)
    for told in line.told:
        lanes = lanes_of(told)
        for number, event in enumerate(told.events):
            if event.name == name:
                found[key(told, event)].append((told, lanes[number], event.begin_s))
    return found
