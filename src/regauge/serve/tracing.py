"""One request on one time line, over the gateway and its workers: what `GET /debug/trace/{id}` answers.

Each worker tells by its own clock. Its difference from the gateway's is estimated from exchanges: what a clock said was said between question and answer,
which bounds the difference from both sides (Cristian, "Probabilistic clock synchronization", 1989); of a few exchanges the narrowest bounds count.
Clocks drift apart since the request was there, by DRIFT at most. Events are moved by the estimate and by nothing else: where one then comes
before what caused it, by more than both clocks may be off, that is said.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

import msgspec

from regauge.config import Role
from regauge.errors import RegaugeError
from regauge.move.events import Event, Trace
from regauge.serve.recent import TimeLine, Try
from regauge.serve.workers import Worker

PINGS: Final = 5
"""Short exchanges before the one that brings the events."""
NOBODY: Final = "-"
"""No transfer has this name."""
ASK_S: Final = 2.0
DRIFT: Final = 50e-6
"""Of the time since: two quartz oscillators of +-25 ppm that nobody disciplines."""
MOST_TOLD: Final = 8
"""Attempts, of the latest, whose workers are asked."""


class Told(msgspec.Struct, frozen=True):
    """What a rank of a worker tells of an attempt; times in seconds since the request came to the gateway."""

    attempt: str
    worker: str
    role: Role
    rank: str
    """Its name on the links: of a worker with one rank, the worker's."""
    offset_s: float
    """Its monotonic clock less the gateway's."""
    uncertain_s: float
    """How far off all of its times may be, either way."""
    events: list[Event]
    more: int
    """Events that it did not keep."""


class Traced(TimeLine, frozen=True):
    """A request with what its workers tell of it."""

    told: list[Told]
    missing: list[str]
    """Whose word is not here, and why."""
    doubts: list[str]
    """Events that seem to come before their cause, by more than the clocks' uncertainty."""


class Kept(Protocol):
    """A request, as `Story` has it."""

    @property
    def arrived(self) -> float:
        """When it came, by the monotonic clock."""

    def time_line(self) -> TimeLine:
        """Return it with all of its attempts."""


async def trace(story: Kept, workers: Mapping[str, Worker]) -> Traced:
    """Ask the workers of a request's latest attempts what happened."""
    line = story.time_line()
    asked = [each for tried in line.tries[-MOST_TOLD:] for each in _workers(tried)]
    found = await asyncio.gather(*(_ask(story, *each, workers.get(each[2])) for each in asked))
    told = [one for each in found if isinstance(each, list) for one in each]
    missing = [each for each in found if isinstance(each, str)]
    if len(line.tries) > MOST_TOLD:
        missing.append(f"workers of the first {len(line.tries) - MOST_TOLD} attempts are not asked")
    return Traced(line.request, line.tries, told, missing, list(doubts(told)))


def _workers(tried: Try) -> Iterator[tuple[Try, Role, str]]:
    if tried.prefill:
        yield tried, "prefill", tried.prefill
    yield tried, "decode", tried.decode


async def _ask(story: Kept, tried: Try, role: Role, name: str, worker: Worker | None) -> list[Told] | str:
    """Return what each rank tells, or why nothing does."""
    if worker is None:
        return f"{name} is no worker of this gateway any more"
    deadline = asyncio.get_running_loop().time() + ASK_S
    bounds: list[tuple[float, float]] = []
    try:
        for transfer in (*[NOBODY] * PINGS, tried.transfer):
            begun = time.monotonic()
            ranks = await worker.client.trace(transfer, deadline)
            ended = time.monotonic()
            new = [(each.clock_s - ended, each.clock_s - begun) for each in ranks]
            old = bounds or new
            bounds = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(old, new, strict=True)]
    except (RegaugeError, ValueError) as error:  # the latter: it has another number of ranks all of a sudden
        return f"{name} does not tell: {error}"
    drift = DRIFT * (ended - story.arrived)
    told = [
        _placed(story, tried, role, name, trace, (low + high) / 2, abs(high - low) / 2 + drift)
        for (low, high), rank in zip(bounds, ranks, strict=True)
        for trace in rank.traces
    ]
    return told or f"{name} keeps nothing of {tried.name} (any more)"


def _placed(story: Kept, tried: Try, role: Role, name: str, trace: Trace, offset: float, uncertain: float) -> Told:
    back = offset + story.arrived
    events = [
        msgspec.structs.replace(event, begin_s=event.begin_s - back, end_s=event.end_s - back) for event in trace.events
    ]
    return Told(tried.name, name, role, trace.worker, offset, uncertain, events, trace.more)


def doubts(told: Iterable[Told]) -> Iterator[str]:
    """Yield each kind of word that was taken before it was sent, with the worst case of it."""
    sent: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    taken: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in told:
        for event in one.events:
            way = event.text.partition(":")[0]
            if way == "sent":
                sent[one.attempt, event.name, one.rank, event.peer].append((event.begin_s, one.uncertain_s))
            elif way == "taken":
                taken[one.attempt, event.name, event.peer, one.rank].append((event.begin_s, one.uncertain_s))
    for key, words in taken.items():
        early = [
            (cause - at, uncertain + other)
            for (at, uncertain), (cause, other) in zip(words, sent.get(key, []), strict=False)
            if cause - at > uncertain + other
        ]
        if early:
            by, within = max(early)
            attempt, name, sender, receiver = key
            yield (
                f"{attempt}: {receiver} took {name} {1e3 * by:.3f} ms before {sender} sent it, "
                f"and their clocks are known within {1e3 * within:.3f} ms"
            )
