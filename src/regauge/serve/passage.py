"""One try of a client's own body on a pair of engines (`passthrough.py`): two legs that start together, and decode's bytes to the client.

Nothing is given out before decode's first bytes are there, so that a try which fails until then can be made again elsewhere, unseen. An
engine's refusal is an error here, `Refused`, that carries the answer as it came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from regauge.config import Role
from regauge.errors import ProtocolError, RegaugeError
from regauge.serve import inject, wire
from regauge.serve.connection import MAX_PART, WorkerError
from regauge.serve.engine_client import EngineClient
from regauge.serve.errand import Errand
from regauge.serve.exchange import Exchange
from regauge.serve.failures import SETTLE_S, rank
from regauge.serve.inject import RID_END, Leg
from regauge.serve.passthrough import Asked, Counts, Cutter, Meter
from regauge.serve.replies import PromptDetails, Usage

Deliver = Callable[[bytes], Awaitable[None]]
"""Sends a part of an answer to the client."""
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


class Head(msgspec.Struct, frozen=True):
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
    """One try; what it came to is in its fields, also where `run` raises.

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
        self._turn: asyncio.Future[None] | None = None
        """What waits for something to be so, which is `_awaited`."""
        self._awaited: Callable[[], bool] = self._prefill_over
        self._heard = self._read = False
        """Whether prefill's answer has come, and whether it has been read."""
        self._telling: asyncio.Task[wire.TransferEvent | None] | None = None
        senders = [] if self.prefill is None else self.prefill.address.senders
        to_decode = Leg(self._name, self.transfer_id, senders=senders)
        self._decoding = self._errand(self.decode, to_decode, whole=not self.asked.stream)
        self._prefilling: Errand | None = None
        if self.prefill is not None:
            to_prefill = Leg(self._name, self.transfer_id, receivers=self.decode.address.receivers)
            self._prefilling = self._errand(self.prefill, to_prefill, whole=True)

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

    async def run(self, deliver: Deliver) -> None:
        """Hand the answer's bytes over; of a stream as they come. Raises Refused, WorkerError, WorkerLost, RequestTimeout, ProtocolError."""
        prefill = self._prefilling
        legs = [self._decoding] if prefill is None else [prefill, self._decoding]
        try:
            for leg in legs:
                leg.start()
            answer = await self._begin()
            await self._answer(answer, deliver)
            if self._telling is not None:
                self.arrival = await self._telling
            if prefill is not None:
                await self._until(self._prefill_over, SETTLE_S)
            self.whole = prefill is None or prefill.came
        finally:
            self.ended = time.time()
            if self._telling is not None:
                self._telling.cancel()
            for leg in legs:
                leg.stop()
            if not self.whole:
                for leg in legs:
                    self.drop(leg.client, self._name)

    async def _begin(self) -> Exchange:
        """Wait for decode's first bytes, of a whole answer for all; raise the cause if either leg fails before."""
        decode, prefill = self._decoding, self._prefilling
        await self._until(lambda: decode.came or decode.failed or (prefill is not None and prefill.failed))
        if not decode.came:
            await self._until(lambda: (decode.came or decode.failed) and self._prefill_over(), SETTLE_S)
        if not decode.came or decode.exchange is None:
            raise await self._cause()
        decode.exchange.listener = None  # from here on it is awaited
        return decode.exchange

    async def _answer(self, answer: Exchange, deliver: Deliver) -> None:
        head = Head(answer.status, _passed(answer.headers))
        if answer.content_type != "text/event-stream":
            data = await _read(self.decode, answer, MAX_WHOLE)
            await self._give(head, self._meter.body(data, await self._cached()), deliver)
            return
        cutter = Cutter()
        while chunk := await self.decode.more(answer):
            for piece, has_usage in cutter.push(chunk):
                out = self._meter.event(piece, await self._cached()) if has_usage else piece
                if out:
                    await self._give(head, out, deliver)
            if cutter.pending > MAX_PART:
                raise ProtocolError(f"decode worker {self.decode.name} sent an event of over {MAX_PART} bytes")
        if rest := cutter.flush():
            await self._give(head, rest, deliver)
        if self.head is None:
            raise ProtocolError(f"decode worker {self.decode.name} answered with nothing")

    async def _give(self, head: Head, part: bytes, deliver: Deliver) -> None:
        if self.head is None:
            self.head, self.first = head, time.time()
            if self._prefilling is not None and self.decode.tells:  # beside the answer: the transfer has ended by now
                self._telling = asyncio.create_task(self.decode.arrival(self.transfer_id))
        self.events += part.count(b"\n\n")
        await deliver(part)

    def _moved(self) -> None:
        """Look at what has changed in either leg."""
        prefill = self._prefilling
        if prefill is not None and not self._heard and prefill.came:
            self._heard = True  # not within the parser, which takes any error for a fault of the answer
            asyncio.get_running_loop().call_soon(self._prefilled, prefill)
        turn = self._turn
        if turn is not None and self._awaited() and not turn.done():
            turn.set_result(None)

    async def _until(self, awaited: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait until something is so, or for so long."""
        if awaited():
            return
        loop = asyncio.get_running_loop()
        self._awaited = awaited
        turn = self._turn = loop.create_future()
        timer = None if limit_s is None else loop.call_later(limit_s, _wake, turn)
        try:
            await turn
        finally:
            self._turn = None
            if timer is not None:
                timer.cancel()

    def _prefilled(self, prefill: Errand) -> None:
        """Read what prefill says of the prompt."""
        answer, name = prefill.exchange, prefill.client.name
        body = b"" if answer is None else answer.gathered
        try:
            told = msgspec.json.decode(body, type=_Prefilled)
            if why := inject.refused(told.kv_transfer_params):
                raise WorkerError(wire.ErrorEvent("transfer_failed", why, name), prefill.client.role)
        except (msgspec.DecodeError, RecursionError) as error:
            prefill.error = ProtocolError(f"answer of prefill worker {name}: {error}: {body[:80]!r}")
        except WorkerError as error:
            prefill.error = error
        else:
            usage = None if told.usage is None else told.usage.usage(self.asked.route)
            self.cached_tokens = 0 if usage is None else usage.prompt_tokens_details.cached_tokens
            self.prompt_tokens = None if usage is None else usage.prompt_tokens
            self.told(self.cached_tokens)
        self._read = True
        self._moved()

    def _prefill_over(self) -> bool:
        return self._prefilling is None or self._read or self._prefilling.failed

    async def _cached(self) -> int | None:
        """Return what prefill had cached of the prompt; None where decode has computed it."""
        await self._until(self._prefill_over)
        return self.cached_tokens

    async def _cause(self) -> BaseException:
        """Return the error to report: what is the client's fault, else an engine's death, else its own fault, else what there is."""
        legs = [leg for leg in (self._decoding, self._prefilling) if leg is not None and leg.failed]
        return min([leg.fault() or await _refusal(leg) for leg in legs], key=_rank)

    def _errand(self, client: EngineClient, leg: Leg, *, whole: bool) -> Errand:
        own = {**self.headers, "X-Request-Id": self._name}
        if not self.asked.route.id_field:
            own["X-Override-Rid"] = (
                self._name + RID_END
            )  # heard by an SGLang with SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES
        path, body = self.asked.route.path, self.asked.to(client.address.engine, leg, self.salt)
        return Errand(client, client.call("POST", path, self.deadline, body, own), self._moved, whole=whole)


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
    """Return those (lower-case) headers that are for the client."""
    dropped: frozenset[str] = _DROPPED
    if "connection" in headers:
        dropped |= {name.strip().lower() for name in headers["connection"].split(",")}
    kept: dict[str, str] = {}
    for name, value in headers.items():
        if name not in dropped and len(name) + len(value) <= _MAX_HEADER and value.isascii():
            kept[name] = value
            if len(kept) == _MAX_HEADERS:
                break
    return kept


async def _refusal(leg: Errand) -> BaseException:
    """Return what an answer that is no success says."""
    if leg.exchange is None:
        raise ProtocolError(f"{leg.client.role} worker {leg.client.name} was not asked")
    try:
        await _accept(leg.client, leg.exchange)
    except RegaugeError as error:
        return error
    return ProtocolError(f"answer of {leg.client.role} worker {leg.client.name}: HTTP {leg.exchange.status}")


def _rank(error: BaseException) -> tuple[bool, tuple[bool, bool]]:
    """The client's own fault counts before all others."""
    return not (isinstance(error, Refused) and error.clients), rank(error)


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
