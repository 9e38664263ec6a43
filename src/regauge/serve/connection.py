"""HTTP from the gateway to an engine: calls with time limits, which end when the engine is given up. Dialects of it: `client.py`, `vllm.py`.

A call ends in its result, in what the worker answered (`WorkerError`), in `RequestTimeout`, or in `WorkerLost`: the
last as soon as the connection breaks, or when the health loop gives up a worker whose connections still stand but
which no longer answers.
"""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import msgspec

from regauge.config import Role
from regauge.errors import ProtocolError, RegaugeError
from regauge.layout.spec import Layout
from regauge.move.events import Traces
from regauge.move.state import WorkerState
from regauge.serve import wire
from regauge.serve.exchange import Broken, Exchange, Exchanges, Origin, request

CONNECT_S: Final = 2.0
"""Most seconds for a connection to be made: workers are near."""
DRAIN_S: Final = 1.0
KEEP_ALIVE_S: Final = 3.0
"""Idle connections are dropped before the worker drops them: a request sent just then would look like a death."""
MAX_PART: Final = 1 << 20
"""Most bytes of one event of a stream."""

Reply = TypeVar("Reply", bound=msgspec.Struct)


class WorkerLost(RegaugeError):  # like PeerLost
    """A worker cannot be reached, or broke off in the middle; `worker` and `role` say which."""

    def __init__(self, worker: str, role: Role, reason: str) -> None:
        super().__init__(f"{role} worker {worker} is lost: {reason}")
        self.worker = worker
        self.role: Role = role
        self.reason = reason


class WorkerError(RegaugeError):
    """A worker answered with an error event."""

    def __init__(self, event: wire.ErrorEvent, role: Role) -> None:
        super().__init__(f"{role} worker {event.worker}: {event.message}")
        self.event = event
        self.role: Role = role


class RequestTimeout(RegaugeError):  # a state, like DeadlineExceeded
    """A request's time limit passed while a worker had it."""


class Connection(abc.ABC):
    """One worker, over one session of kept connections; use it in one event loop and `close` it.

    Deadlines are times of the event loop's clock. The number of connections is bounded by the caller's admission,
    so that an abort never waits for a free one.
    """

    computes = False
    """Whether a decode worker can compute a prompt itself, where no KV comes, whatever its health says."""
    signs = False
    """Whether it makes receipts."""
    continues = True
    """Whether a decode worker goes on from the first token that prefill has sampled, and does not sample one itself."""

    def __init__(self, address: wire.WorkerAddress, token: str) -> None:
        self.address = address
        self.name = address.name
        self.role: Role = address.role
        self._base = address.url.rstrip("/")
        self._bearer = wire.bearer(token)
        self._exchanges = Exchanges(keep_s=KEEP_ALIVE_S)
        self._running: set[Exchange] = set()
        self._dead: str | None = None

    async def health(self, limit_s: float) -> wire.Health:
        """Ask for the worker's state, and take it as alive.

        Raises WorkerLost if it cannot be reached or another worker answers, RequestTimeout if the answer is late,
        WorkerError if it refuses.
        """
        try:
            async with asyncio.timeout(limit_s):
                # No deadline and not among the calls that end with a dead worker: this one finds out.
                health = await self._health()
        except TimeoutError as error:
            raise RequestTimeout(f"no answer to GET {wire.HEALTH_PATH} within {limit_s:g} s") from error
        self._dead = None
        return health

    @abc.abstractmethod
    async def _health(self) -> wire.Health:
        """Ask without a time limit."""

    @abc.abstractmethod
    def generate(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[wire.Event, None]:
        """Yield the decode worker's events up to the finish event.

        Raises WorkerError for an error event, before the stream or in it; WorkerLost; RequestTimeout.
        """

    @abc.abstractmethod
    async def prefill(self, body: wire.Prefill, deadline: float, headers: Mapping[str, str]) -> wire.Prefilled:
        """Have a prompt computed and delivered. Raises WorkerError, WorkerLost, RequestTimeout."""

    @abc.abstractmethod
    async def abort(self, request_id: str) -> wire.Aborted:
        """End a request and free its pages; return whether the worker had it, and its receipt if it makes any. Raises WorkerLost, RequestTimeout."""

    @abc.abstractmethod
    async def debug(self, limit: int, deadline: float | None) -> WorkerState:
        """Ask how transfers, links and pools stand. Raises WorkerError, WorkerLost, RequestTimeout, ProtocolError."""

    @abc.abstractmethod
    async def trace(self, transfer: str, deadline: float) -> list[Traces]:
        """Ask each of its ranks what has happened to a transfer; they answer in the same order. Raises as `debug`."""

    async def layout(self) -> Layout | None:
        """Return how its KV cache lies, if it tells. Raises as `debug`, and LayoutError."""
        return None

    @abc.abstractmethod
    async def refusal(self, answer: Exchange) -> None:
        """Raise WorkerError for an answer that is not 200, ProtocolError where it is none that this worker gives."""

    async def close(self) -> None:
        """End all; calls that run end with WorkerLost."""
        self.give_up("the gateway is shutting down")
        self._exchanges.close()

    def give_up(self, reason: str) -> None:
        """End all running calls with WorkerLost, and new ones too, until `health` succeeds."""
        self._dead = reason
        for exchange in self._running:
            exchange.fail(WorkerLost(self.name, self.role, reason))

    def call(
        self,
        method: str,
        path: str,
        deadline: float | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        secure: ssl.SSLContext | None = None,
    ) -> Call:
        """Send a request and yield its answer; `path` may be a whole URL instead. A deadline of None: not even `give_up` ends it.

        All that is read of the answer is under the deadline.
        """
        return Call(self, method, path, deadline, body, headers or {}, secure)

    async def open(self, call: Call) -> Exchange:
        """Do what `call` says, up to the answer's headers. Raises WorkerLost, RequestTimeout."""
        exchange = self.begin(call) or await self.connect(call)
        try:
            await exchange.begin()
        except Broken as error:
            self.shut(exchange)
            raise self.lost(error) from error
        except BaseException:  # ended whatever broke, also when cancelled: nobody else knows of it
            self.shut(exchange)
            raise
        return exchange

    def begin(self, call: Call) -> Exchange | None:
        """Send a request where a connection is there for it. Raises WorkerLost."""
        if call.deadline is not None and self._dead is not None:
            raise WorkerLost(self.name, self.role, self._dead)
        origin, data = self._written(call)
        wire = self._exchanges.kept(origin)
        return None if wire is None else self._asked(call, wire.ask(data))

    async def connect(self, call: Call) -> Exchange:
        """Send a request over a new connection. Raises WorkerLost."""
        origin, data = self._written(call)
        try:
            async with asyncio.timeout(CONNECT_S):
                wire = await self._exchanges.connect(origin)
        except TimeoutError as error:
            raise WorkerLost(self.name, self.role, f"no connection within {CONNECT_S:g} s") from error
        except (OSError, ValueError) as error:
            raise WorkerLost(self.name, self.role, str(error) or type(error).__name__) from error
        exchange = self._asked(call, wire.ask(data))
        if call.deadline is not None and self._dead is not None:  # since
            self.shut(exchange)
            raise WorkerLost(self.name, self.role, self._dead)
        return exchange

    def lost(self, error: Broken) -> WorkerLost:
        """Return what a broken connection means."""
        return WorkerLost(self.name, self.role, str(error))

    def _written(self, call: Call) -> tuple[Origin, bytes]:
        url = self._base + call.path if call.path.startswith("/") else call.path
        try:
            origin, target = self._exchanges.origin(url, call.secure)
            sent = {"Authorization": self._bearer, "Content-Type": "application/json", **call.headers}
            return origin, request(call.method, origin, target, sent, call.body)
        except ValueError as error:
            raise WorkerLost(self.name, self.role, str(error)) from error

    def _asked(self, call: Call, exchange: Exchange) -> Exchange:
        if call.deadline is not None:
            self._running.add(exchange)
            late = RequestTimeout(f"{self.role} worker {self.name} did not finish in time")
            exchange.limit(call.deadline, late)
        return exchange

    def shut(self, exchange: Exchange) -> None:
        """End an answer: its connection is closed if the body was not read to its end, which a worker takes as an abort."""
        self._running.discard(exchange)
        exchange.release()

    async def more(self, answer: Exchange) -> bytes:
        """Return what has come of an answer, nothing at its end. Raises WorkerLost, RequestTimeout."""
        try:
            return await answer.readany()
        except Broken as error:
            raise self.lost(error) from error

    async def whole(self, answer: Exchange) -> bytes:
        """Return the rest of an answer. Raises as `more`."""
        try:
            return await answer.read()
        except Broken as error:
            raise self.lost(error) from error

    async def read(self, answer: Exchange, kind: type[Reply]) -> Reply:
        """Read a whole answer. Raises as `refusal`, and ProtocolError for what is no such answer."""
        await self.refusal(answer)
        body = await self.whole(answer)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"answer of {self.role} worker {self.name}: {error}: {body[:80]!r}") from error

    async def parts(self, answer: Exchange, end: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of a streamed answer, each up to `end`, up to the stream's end. Raises ProtocolError for one of over MAX_PART bytes."""
        rest = b""
        while chunk := await self.more(answer):
            *whole, rest = (rest + chunk).split(end)
            if len(rest) > MAX_PART:
                raise ProtocolError(f"{self.role} worker {self.name} sent a line of over {MAX_PART} bytes")
            for part in whole:
                yield part

    async def drain(self, answer: Exchange) -> None:
        """Read the end of a finished stream, so that its connection can be used again."""
        with suppress(RegaugeError, TimeoutError):
            if answer.complete:
                return
            async with asyncio.timeout(DRAIN_S):
                while await self.more(answer):
                    pass


class Call:
    """A request that is made when it is entered, and ended when it is left; or that `Leg`s make otherwise."""

    def __init__(
        self,
        connection: Connection,
        method: str,
        path: str,
        deadline: float | None,
        body: bytes | None,
        headers: Mapping[str, str],
        secure: ssl.SSLContext | None,
    ) -> None:
        self._connection = connection
        self.method, self.path, self.deadline = method, path, deadline
        self.body, self.headers, self.secure = body, headers, secure
        self._exchange: Exchange

    async def __aenter__(self) -> Exchange:
        self._exchange = await self._connection.open(self)
        return self._exchange

    async def __aexit__(self, *_: object) -> None:
        self._connection.shut(self._exchange)
