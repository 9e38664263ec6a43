"""The newest requests of a gateway process, and when each step of them was: what `GET /debug/requests` and `GET /debug/trace/{id}` answer.

Everything is on the gateway's clock. What a worker tells of its own steps are durations by its clock: they are placed so that the last ends when its word
came, which is later than it was by the word's way, and by nothing else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from regauge.move.protocol import Stages
from regauge.serve import wire
from regauge.serve.tracecontext import Context

MOST_REQUESTS: Final = 500
MOST_TRIES: Final = 64
"""Of one request; what comes after is not kept."""
MOST_TOKENS: Final = 512
"""Times of tokens, of one attempt; what comes after is counted."""
MAX_TEXT: Final = 500
"""Characters of an error; longer ones are cut."""


class Span(msgspec.Struct, frozen=True):
    """Something that took time; seconds since the request came."""

    name: str
    where: str
    """`gateway`, or a worker's name."""
    begin_s: float
    end_s: float


class Try(msgspec.Struct, frozen=True):
    """One attempt of one answer."""

    name: str
    """As `/debug/why` and the workers' logs have it."""
    transfer: str
    prefill: str
    """Empty: decode computed the prompt."""
    decode: str
    path: str
    mode: str
    wire_bytes: int
    outcome: str
    """`running`, `complete`, `cancelled`, `failed` or `resumed`."""
    error: str
    spans: list[Span]
    tokens_s: list[float]
    """When each token came to the gateway, or of an engine's own API the first bytes."""
    more_tokens: int
    """How many more came, whose times are not kept."""


class Line(msgspec.Struct, frozen=True):
    """One request; times in seconds."""

    id: str
    unix_s: float
    """When it came."""
    seconds: float
    """That it took, or has so far."""
    outcome: str
    """`running`, `complete` or `failed`, whose `error` says why; a client that went away is one."""
    error: str
    ttft_s: float | None
    prompt_tokens: int
    completion_tokens: int
    path: str
    mode: str
    prefill: str
    decode: str
    wire_bytes: int
    attempts: int


class Requests(msgspec.Struct, frozen=True):
    """The newest requests, newest first."""

    requests: list[Line]
    hidden: int
    """That are kept and not shown."""
    silent: list[str]
    """Gateway processes that do not answer, and why: theirs are not here."""


class TimeLine(msgspec.Struct, frozen=True):
    """One request with all of its attempts."""

    request: Line
    tries: list[Try]


@dataclass(slots=True, eq=False)
class Tried:
    """What is kept of an attempt while it runs; times of the monotonic clock."""

    name: str
    prefill: str
    decode: str
    path: str
    transfer: str
    began: float
    ended: float | None = None
    outcome: str = "running"
    error: str = ""
    prefilled: tuple[float, wire.Prefilled] | None = None
    arrived: tuple[float, wire.TransferEvent] | None = None
    waited_s: float = 0.0
    """That decode waited for pages, or for its turn."""
    tokens: list[float] = field(default_factory=list)
    more_tokens: int = 0
    context: Context | None = None
    """Its span's place; None: it belongs to no trace."""

    def token(self, now: float, arrival: wire.TransferEvent | None = None) -> None:
        """Note a token; with the first, that its KV had arrived."""
        if len(self.tokens) < MOST_TOKENS:
            self.tokens.append(now)
        else:
            self.more_tokens += 1
        if arrival is not None and self.arrived is None:
            self.arrived = now, arrival

    def end(self, now: float, outcome: str, finish: wire.FinishEvent | None = None) -> None:
        """Note what became of it."""
        self.ended, self.outcome = now, outcome
        if finish is not None and finish.queue_seconds is not None:
            self.waited_s = finish.queue_seconds

    def view(self, since: float, now: float) -> Try:
        """Return it for a reader, in seconds since the request came."""
        event = self.arrived[1] if self.arrived is not None else None
        ended = now if self.ended is None else self.ended
        spans = [("attempt", "gateway", self.began, ended), *self._prefill(), *self._decode(ended)]
        return Try(
            self.name, self.transfer, self.prefill, self.decode, self.path, "" if event is None else event.mode,
            0 if event is None else event.wire_bytes, self.outcome, self.error[:MAX_TEXT],
            [Span(name, where, begin - since, end - since) for name, where, begin, end in spans],
            [at - since for at in self.tokens], self.more_tokens,
        )  # fmt: skip

    def _prefill(self) -> Iterable[tuple[str, str, float, float]]:
        if self.prefilled is None:
            return []
        at, told = self.prefilled
        steps = (("waits for its turn", told.queue_seconds or 0.0), ("computes the prompt", told.prefill_seconds),
                 ("KV not yet across", told.transfer_seconds))  # fmt: skip
        return [(name, self.prefill, begin, end) for name, begin, end in _before(at, steps)]

    def _decode(self, ended: float) -> Iterable[tuple[str, str, float, float]]:
        found: list[tuple[str, str, float, float]] = []
        if self.arrived is not None:
            at, event = self.arrived
            told = _stages(event.stages) if event.stages is not None else [("transfer", event.seconds)]
            steps = [("waits for pages", self.waited_s), *told]
            found += [(name, self.decode, begin, end) for name, begin, end in _before(at, steps)]
        if self.tokens:
            found.append(
                ("decodes", self.decode, self.tokens[0], ended if self.more_tokens else max(self.tokens[-1], self.tokens[0]))
            )  # fmt: skip
        return found


def _stages(stages: Stages) -> list[tuple[str, float]]:
    return [(name.replace("_", " "), length) for name, length in msgspec.structs.asdict(stages).items()]


def _before(end: float, steps: Iterable[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """Place steps that follow each other, so that the last ends then; of no length, a step is left out."""
    found = []
    for name, length in reversed(list(steps)):
        if length > 0:
            found.append((name, end - length, end))
        end -= max(length, 0.0)
    return found[::-1]


@dataclass(slots=True, eq=False)
class Story:
    """What is kept of a request; `arrived` is of the monotonic clock."""

    arrived: float = field(default_factory=time.monotonic)
    unix_s: float = field(default_factory=time.time)
    id: str = ""
    ended: float | None = None
    error: str = ""
    ttft_s: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    attempts: int = 0
    tries: list[Tried] = field(default_factory=list)
    context: Context | None = None
    """As `Tried.context`."""

    def attempt(self, name: str, prefill: str | None, decode: str, path: str, transfer: str = "") -> Tried:
        """Note that an attempt begins."""
        tried = Tried(name, prefill or "", decode, path, transfer, time.monotonic())
        tried.context = None if self.context is None else self.context.child()
        self.attempts += 1
        if len(self.tries) < MOST_TRIES:
            self.tries.append(tried)
        return tried

    def end(self, error: object, ttft_s: float | None, prompt_tokens: int, completion_tokens: int) -> None:
        """Note what the request came to; `error`: why it failed, if it did."""
        self.ended, self.error, self.ttft_s = time.monotonic(), str(error or ""), ttft_s
        self.prompt_tokens, self.completion_tokens = prompt_tokens, completion_tokens

    def line(self, now: float) -> Line:
        """Return it in short; of several answers, with the workers of the latest attempt."""
        error = self.error[:MAX_TEXT]
        last = self.tries[-1] if self.tries else None
        events = [tried.arrived[1] for tried in self.tries if tried.arrived is not None]
        first = min((tried.tokens[0] for tried in self.tries if tried.tokens), default=None)
        count = sum(len(tried.tokens) + tried.more_tokens for tried in self.tries)
        running = self.ended is None
        return Line(
            self.id, self.unix_s, (now if self.ended is None else self.ended) - self.arrived,
            "running" if running else "failed" if error else "complete", error,
            (None if first is None else first - self.arrived) if running else self.ttft_s,
            self.prompt_tokens, count if running else self.completion_tokens,
            last.path if last else "", events[-1].mode if events else "", last.prefill if last else "", last.decode if last else "",
            sum(event.wire_bytes for event in events), self.attempts,
        )  # fmt: skip

    def time_line(self) -> TimeLine:
        """Return it with all of its attempts, as the gateway knows them."""
        now = time.monotonic()
        return TimeLine(self.line(now), [tried.view(self.arrived, now) for tried in self.tries])


class Recent:
    """The newest requests, by the client's name for each."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._most = most
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def add(self, name: str, story: Story) -> None:
        """Keep a request; of two under one name, the newer."""
        story.id = name
        self._stories.pop(name, None)
        self._stories[name] = story
        if len(self._stories) > self._most:
            self._stories.popitem(last=False)

    def newest(self, limit: int) -> Requests:
        """Return the newest ones."""
        now, stories = time.monotonic(), list(self._stories.values())
        return Requests([story.line(now) for story in stories[: -limit - 1 : -1]], max(0, len(stories) - limit), [])

    def of(self, name: str) -> Story | None:
        """Return a request, by its name or that of one of its attempts; None: it is not kept."""
        story = self._stories.get(name)
        if story is not None:
            return story
        return next((s for s in reversed(self._stories.values()) if any(t.name == name for t in s.tries)), None)
