"""HTTP from the gateway to an engine: calls with time limits, which end when the engine is given up. Dialects of it: `client.py`, `vllm.py`.

A call ends in its result, in what the worker answered (`WorkerError`), in `RequestTimeout`, or in `WorkerLost`: the
last as soon as the connection breaks, or when the health loop gives up a worker whose connections still stand but
which no longer answers.
"""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar

import aiohttp
import msgspec

from regauge.config import Role
from regauge.errors import ProtocolError, RegaugeError
from regauge.layout.spec import Layout
from regauge.move.state import WorkerState
from regauge.serve import wire

CONNECT_S: Final = 2.0
"""Most seconds for a connection to be made: workers are near."""
DRAIN_S: Final = 1.0
KEEP_ALIVE_S: Final = 3.0
"""Idle connections are dropped before the worker drops them: a request sent just then would look like a death."""
MAX_PART: Final = 1 << 20
"""Most bytes of one event of a stream."""

T = TypeVar("T")
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
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._waits: set[asyncio.Timeout] = set()
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
    async def abort(self, request_id: str) -> bool:
        """End a request and free its pages; return whether the worker had it. Raises WorkerLost, RequestTimeout."""

    @abc.abstractmethod
    async def debug(self, limit: int, deadline: float | None) -> WorkerState:
        """Ask how transfers, links and pools stand. Raises WorkerError, WorkerLost, RequestTimeout, ProtocolError."""

    async def layout(self) -> Layout | None:
        """Return how its KV cache lies, if it tells. Raises as `debug`, and LayoutError."""
        return None

    @abc.abstractmethod
    async def refusal(self, answer: aiohttp.ClientResponse, deadline: float | None) -> None:
        """Raise WorkerError for an answer that is not 200, ProtocolError where it is none that this worker gives."""

    async def close(self) -> None:
        """End the session; calls that run end with WorkerLost."""
        self.give_up("the gateway is shutting down")
        if self._session is not None:
            await self._session.close()

    def give_up(self, reason: str) -> None:
        """End all running calls with WorkerLost, and new ones too, until `health` succeeds."""
        self._dead = reason
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    @asynccontextmanager
    async def call(
        self,
        method: str,
        path: str,
        deadline: float | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        secure: ssl.SSLContext | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its answer; `path` may be a whole URL instead. A deadline of None: not even `give_up` ends it."""
        if self._session is None:
            # Made at first use: aiohttp wants the running loop.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        if self._session.closed:
            raise WorkerLost(self.name, self.role, self._dead or "the gateway has let it go")
        sent = {
            "Authorization": wire.bearer(self._token),
            "Content-Type": "application/json",
            **(headers or {}),
        }
        url = self._base + path if path.startswith("/") else path
        trust = True if secure is None else secure
        request = self._session.request(method, url, data=body, headers=sent, allow_redirects=False, ssl=trust)
        answer = await self.within(request, deadline)
        try:
            yield answer
        finally:
            # Closes the connection if the body was not read to its end, which a worker takes as an abort.
            answer.release()

    async def read(self, answer: aiohttp.ClientResponse, kind: type[Reply], deadline: float | None) -> Reply:
        """Read a whole answer. Raises as `refusal`, and ProtocolError for what is no such answer."""
        await self.refusal(answer, deadline)
        body = await self.within(answer.read(), deadline)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"answer of {self.role} worker {self.name}: {error}: {body[:80]!r}") from error

    async def parts(self, answer: aiohttp.ClientResponse, end: bytes, deadline: float) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of a streamed answer, each up to `end`, up to the stream's end. Raises ProtocolError for one of over MAX_PART bytes."""
        rest = b""
        while chunk := await self.within(answer.content.readany(), deadline):
            *whole, rest = (rest + chunk).split(end)
            if len(rest) > MAX_PART:
                raise ProtocolError(f"{self.role} worker {self.name} sent a line of over {MAX_PART} bytes")
            for part in whole:
                yield part

    async def drain(self, answer: aiohttp.ClientResponse) -> None:
        """Read the end of a finished stream, so that its connection can be used again."""
        with suppress(RegaugeError):
            await self.within(answer.content.readany(), asyncio.get_running_loop().time() + DRAIN_S)

    async def within(self, work: Awaitable[T], deadline: float | None) -> T:
        """Await one step of a call: until the deadline, or until the worker is given up.

        The limit is around each step, not around the call: a generator must not yield inside a timeout.
        """
        limit = 0.0 if deadline is not None and self._dead is not None else deadline
        try:
            async with asyncio.timeout_at(limit) as wait:
                if deadline is not None:
                    self._waits.add(wait)
                try:
                    return await work
                finally:
                    self._waits.discard(wait)
        except aiohttp.ServerTimeoutError as error:
            raise WorkerLost(self.name, self.role, f"no connection within {CONNECT_S:g} s") from error
        except TimeoutError as error:
            if self._dead is not None:
                raise WorkerLost(self.name, self.role, self._dead) from error
            raise RequestTimeout(f"{self.role} worker {self.name} did not finish in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerLost(self.name, self.role, str(error) or type(error).__name__) from error
