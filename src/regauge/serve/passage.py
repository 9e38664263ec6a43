"""One try of a client's own body on a pair of engines (`passthrough.py`): two legs that start together, and decode's bytes to the client.

Nothing is given out before decode's first bytes are there, so that a try which fails until then can be made again elsewhere, unseen. An
engine's refusal is an error here, `Refused`, that carries the answer as it came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec

from regauge.config import Role
from regauge.errors import ProtocolError
from regauge.serve import inject, wire
from regauge.serve.connection import MAX_PART, WorkerError, WorkerLost
from regauge.serve.engine_client import EngineClient
from regauge.serve.exchange import Exchange
from regauge.serve.inject import RID_END, Leg
from regauge.serve.passthrough import Asked, Counts, Cutter, Meter
from regauge.serve.replies import PromptDetails, Usage

SETTLE_S: Final = 0.5
"""After one leg's end, seconds to wait for the other's: a refusal comes from both, a failed transfer is often the other engine's death."""
MAX_WHOLE: Final = 64 << 20
"""Most bytes of an answer that is not streamed."""
MAX_REFUSAL: Final = 64 << 10
"""Most bytes of an engine's error that are passed on."""
_MAX_HEADERS: Final = 32
_MAX_HEADER: Final = 1_024
_DROPPED: Final = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer", "transfer-encoding",
        "upgrade", "content-length", "content-encoding", "date", "server", "set-cookie", "www-authenticate", "x-request-id",
    )
)  # fmt: skip
"""Of this hop alone, or the gateway's own: the answer's length may change, and nothing is packed."""
_NOT_THE_CLIENTS: Final = frozenset((401, 403, 407, 408, 429))
"""What an engine says under 500 that is no fault of the request."""


@dataclass(frozen=True)
class Head:
    """How an engine's answer begins; `headers` are those that may be passed on."""

    status: int
    headers: Mapping[str, str]


class Refused(WorkerError):
    """An engine answered with an error: `head` and `body` (cut at MAX_REFUSAL bytes) are what it said, in the words of the client's API."""

    def __init__(self, event: wire.ErrorEvent, role: Role, head: Head, body: bytes) -> None:
        super().__init__(event, role)
        self.head = head
        self.body = body

    @property
    def clients(self) -> bool:
        """Whether the request is at fault: no other worker would take it, and the client is to have the answer."""
        return 400 <= self.head.status < 500 and self.head.status not in _NOT_THE_CLIENTS


class _Prefilled(msgspec.Struct, frozen=True):
    """What is read of prefill's answer."""

    usage: Counts | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(eq=False)
class Passage:
    """One try; what it came to is in its fields, also where `chunks` raises.

    `drop` has an engine end a request by its id, beside this: it is called for both where the try did not come to its good end.
    """

    asked: Asked
    request_id: str
    transfer_id: str
    prefill: EngineClient | None
    """None: decode computes the prompt itself."""
    decode: EngineClient
    deadline: float
    """Of the event loop's clock."""
    headers: Mapping[str, str]
    """For the engines; none of the client's but what the gateway has checked."""
    drop: Callable[[EngineClient, str], None]
    salt: str = ""
    """As `wire.Prefill.salt`."""
    told: Callable[[int], None] = lambda _: None
    """Is told the tokens of the prompt that prefill had cached, as soon as it has delivered."""
    head: Head | None = None
    """There when the first bytes are."""
    began: float = field(default_factory=time.time)
    first: float | None = None
    ended: float | None = None
    """Seconds since 1970, as `began` and `first`."""
    prompt_tokens: int | None = None
    """As prefill has counted them."""
    cached_tokens: int | None = None
    """What prefill had of the prompt."""
    events: int = 0
    """Of a stream, passed on."""
    arrival: wire.TransferEvent | None = None
    whole: bool = False
    """Whether both engines have come to their good end by themselves."""

    def __post_init__(self) -> None:
        self._meter = Meter(self.asked)
        self._name = self.asked.route.id_prefix + self.request_id

    @property
    def usage(self) -> Usage | None:
        """The tokens, as far as the answer has told them: of a stream at its end."""
        return self._meter.usage

    @property
    def used(self) -> Usage | None:
        """Likewise; of an answer that was broken off, the prompt as prefill has counted it, and an event of the stream for a token."""
        if self.usage is not None or self.prompt_tokens is None:
            return self.usage
        events = self.events if self.asked.stream else 0
        return Usage(self.prompt_tokens, events, self.prompt_tokens + events, PromptDetails(self.cached_tokens or 0))

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer's bytes; for a stream as they come. Raises Refused, WorkerError, WorkerLost, RequestTimeout, ProtocolError."""
        prefill = None if self.prefill is None else asyncio.create_task(self._prefill(self.prefill))
        try:
            async with aclosing(self._decode(prefill)) as parts:
                part = await self._begin(parts, prefill)
                if part is None:
                    raise ProtocolError(f"decode worker {self.decode.name} answered with nothing")
                while part is not None:
                    self.events += part.count(b"\n\n")
                    yield part
                    part = await anext(parts, None)
            if prefill is not None:
                await asyncio.wait((prefill,), timeout=SETTLE_S)
            self.whole = prefill is None or _good(prefill)
        finally:
            self.ended = time.time()
            await self._leave(prefill)

    async def _begin(self, parts: AsyncGenerator[bytes, None], prefill: asyncio.Task[None] | None) -> bytes | None:
        """Wait for decode's first bytes; raise the cause if either leg fails before."""
        first = asyncio.create_task(_next(parts))
        legs = {first} if prefill is None else {first, prefill}
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if prefill is not None and _good(prefill):
                await asyncio.wait((first,))
            elif not _good(first):
                await asyncio.wait(legs, timeout=SETTLE_S)
            if not _good(first):
                raise _cause(first, prefill)
            return first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)

    async def _leave(self, prefill: asyncio.Task[None] | None) -> None:
        if prefill is not None:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)
        if not self.whole:
            for client in (self.prefill, self.decode):
                if client is not None:
                    self.drop(client, self._name)

    async def _prefill(self, client: EngineClient) -> None:
        leg = Leg(self._name, self.transfer_id, receivers=self.decode.address.receivers)
        async with self._ask(client, leg) as answer:
            await _accept(client, answer)
            body = await _read(client, answer, MAX_WHOLE)
        try:
            told = msgspec.json.decode(body, type=_Prefilled)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"answer of prefill worker {client.name}: {error}: {body[:80]!r}") from error
        if why := inject.refused(told.kv_transfer_params):
            raise WorkerError(wire.ErrorEvent("transfer_failed", why, client.name), client.role)
        usage = None if told.usage is None else told.usage.usage(self.asked.route)
        self.cached_tokens = 0 if usage is None else usage.prompt_tokens_details.cached_tokens
        self.prompt_tokens = None if usage is None else usage.prompt_tokens
        self.told(self.cached_tokens)

    async def _decode(self, prefill: asyncio.Task[None] | None) -> AsyncGenerator[bytes, None]:
        client, telling = self.decode, None
        senders = [] if self.prefill is None else self.prefill.address.senders
        async with self._ask(client, Leg(self._name, self.transfer_id, senders=senders)) as answer:
            head = await _accept(client, answer)
            streams = answer.content_type == "text/event-stream"
            parts = self._events(answer, prefill) if streams else self._body(answer, prefill)
            try:
                async with aclosing(parts):
                    async for part in parts:
                        if self.head is None:
                            self.head, self.first = head, time.time()
                            if prefill is not None:  # beside the answer: the transfer has ended by now
                                telling = asyncio.create_task(client.arrival(self.transfer_id))
                        yield part
                if telling is not None:
                    self.arrival = await telling
            finally:
                if telling is not None:
                    telling.cancel()

    async def _events(self, answer: Exchange, prefill: asyncio.Task[None] | None) -> AsyncGenerator[bytes, None]:
        cutter = Cutter()
        while chunk := await self.decode.more(answer):
            for piece, has_usage in cutter.push(chunk):
                out = self._meter.event(piece, await self._cached(prefill)) if has_usage else piece
                if out:
                    yield out
            if cutter.pending > MAX_PART:
                raise ProtocolError(f"decode worker {self.decode.name} sent an event of over {MAX_PART} bytes")
        if rest := cutter.flush():
            yield rest

    async def _body(self, answer: Exchange, prefill: asyncio.Task[None] | None) -> AsyncGenerator[bytes, None]:
        data = await _read(self.decode, answer, MAX_WHOLE)
        yield self._meter.body(data, await self._cached(prefill))

    async def _cached(self, prefill: asyncio.Task[None] | None) -> int | None:
        """Return what prefill had cached of the prompt; None where decode has computed it."""
        if prefill is not None:
            await asyncio.wait((prefill,))
        return self.cached_tokens

    def _ask(self, client: EngineClient, leg: Leg) -> Any:
        own = {**self.headers, "X-Request-Id": self._name}
        if not self.asked.route.id_field:
            own["X-Override-Rid"] = (
                self._name + RID_END
            )  # heard by an SGLang with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES
        path, body = self.asked.route.path, self.asked.to(client.address.engine, leg, self.salt)
        return client.call("POST", path, self.deadline, body, own)


async def forward(
    client: EngineClient, path: str, body: bytes, deadline: float, headers: Mapping[str, str]
) -> tuple[Head, bytes]:
    """Have one engine answer what needs no transfer, as a count of tokens. Raises as `Passage.chunks`."""
    async with client.call("POST", path, deadline, body, headers) as answer:
        head = await _accept(client, answer)
        return head, await _read(client, answer, MAX_WHOLE)


async def _accept(client: EngineClient, answer: Exchange) -> Head:
    """Return how an answer begins. Raises Refused for one that is no success, with all of it."""
    head = Head(answer.status, _passed(answer.headers))
    if answer.status == 200:
        return head
    body = (await client.whole(answer))[:MAX_REFUSAL]
    try:
        await client.refusal(answer)
    except WorkerError as error:
        raise Refused(error.event, client.role, head, body) from error
    raise ProtocolError(f"answer of {client.role} worker {client.name}: HTTP {answer.status}")


async def _read(client: EngineClient, answer: Exchange, limit: int) -> bytes:
    parts, size = [], 0
    while chunk := await client.more(answer):
        size += len(chunk)
        if size > limit:
            raise ProtocolError(f"answer of {client.role} worker {client.name}: it has over {limit} bytes")
        parts.append(chunk)
    return b"".join(parts)


def _passed(headers: Mapping[str, str]) -> Mapping[str, str]:
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    kept: dict[str, str] = {}
    for name, value in headers.items():
        fits = len(name) + len(value) <= _MAX_HEADER and value.isascii() and len(kept) < _MAX_HEADERS
        if fits and name.lower() not in _DROPPED | named:
            kept[name.lower()] = value
    return MappingProxyType(kept)


async def _next(parts: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(parts, None)


def _good(leg: asyncio.Task[Any]) -> bool:
    return leg.done() and not leg.cancelled() and leg.exception() is None


def _cause(first: asyncio.Task[bytes | None], prefill: asyncio.Task[None] | None) -> BaseException:
    """Return the error to report: what is the client's fault, else an engine's death, else its own fault, else what there is."""
    legs: list[asyncio.Task[Any]] = [first] if prefill is None else [first, prefill]
    ended = [leg.exception() for leg in legs if leg.done() and not leg.cancelled()]
    errors = [error for error in ended if error is not None]

    def rank(error: BaseException) -> tuple[bool, bool, bool]:
        symptom = isinstance(error, WorkerError) and error.event.code in ("transfer_failed", "timeout", "aborted")
        return not (isinstance(error, Refused) and error.clients), not isinstance(error, WorkerLost), symptom

    return min(errors, key=rank)
