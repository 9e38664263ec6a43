"""The gateway's side of the worker API (`wire.py`): calls with time limits, and who is alive.

A call ends in its result, in what the worker answered (`WorkerError`), in `RequestTimeout`, or in `WorkerLost`: the
last as soon as the connection breaks, or when the health loop gives up a worker whose connections still stand but
which no longer answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeVar

import aiohttp
import msgspec

from regauge.config import Role
from regauge.errors import ConfigError, ProtocolError, RegaugeError
from regauge.move.state import Totals
from regauge.observe import ERROR, ROLE, WORKER, Metrics, get_logger
from regauge.serve import wire
from regauge.serve.debug import WorkerState, WorkerView

CONNECT_S: Final = 2.0
"""Most seconds for a connection to be made: workers are near."""
ABORT_S: Final = 2.0
DRAIN_S: Final = 1.0
DEBUG_S: Final = 2.0
KEEP_ALIVE_S: Final = 3.0
"""Idle connections are dropped before the worker drops them: a request sent just then would look like a death."""
_MAX_LINE: Final = 1 << 20

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


@dataclass(frozen=True)
class HealthPolicy:
    """A worker is dead after a refused connection, or `misses` polls in a row without an answer in `limit_s`."""

    period_s: float = 1.0
    limit_s: float = 2.0
    misses: int = 3


class WorkerClient:
    """One worker, over one session of kept connections; use it in one event loop and `close` it.

    Deadlines are times of the event loop's clock. The number of connections is bounded by the caller's admission,
    so that an abort never waits for a free one.
    """

    def __init__(self, address: wire.WorkerAddress, token: str) -> None:
        self.name = address.name
        self.role: Role = address.role
        self._base = address.url.rstrip("/")
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._waits: set[asyncio.Timeout] = set()
        self._dead: str | None = None

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

    async def health(self, limit_s: float) -> wire.Health:
        """Ask for the worker's state.

        Raises WorkerLost if it cannot be reached or another worker answers, RequestTimeout if the answer is late,
        WorkerError if it refuses.
        """
        try:
            async with asyncio.timeout(limit_s):
                # No deadline and not among the calls that end with a dead worker: this one finds out.
                async with self._call("GET", wire.HEALTH_PATH, None) as answer:
                    health = await self._read(answer, wire.Health, None)
        except TimeoutError as error:
            raise RequestTimeout(f"no answer to GET {wire.HEALTH_PATH} within {limit_s:g} s") from error
        if (health.name, health.role) != (self.name, self.role):
            reason = f"{health.role} worker {health.name} answers at {self._base}"
            raise WorkerLost(self.name, self.role, reason)
        self._dead = None
        return health

    async def generate(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[wire.Event, None]:
        """Yield the decode worker's events up to the finish event.

        Raises WorkerError for an error event, before the stream or in it; WorkerLost; RequestTimeout.
        """
        async with self._call("POST", wire.GENERATE_PATH, deadline, wire.encode(body), headers) as answer:
            await self._refusal(answer, deadline)
            rest = b""
            while chunk := await self._within(answer.content.readany(), deadline):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise ProtocolError(f"{self.role} worker {self.name} sent a line of over {_MAX_LINE} bytes")
                for line in lines:
                    event = wire.decode_event(line)
                    if isinstance(event, wire.ErrorEvent):
                        raise WorkerError(event, self.role)
                    yield event
                    if isinstance(event, wire.FinishEvent):
                        await self._drain(answer)
                        return
        raise WorkerLost(self.name, self.role, "the stream ended before its finish event")

    async def prefill(self, body: wire.Prefill, deadline: float, headers: Mapping[str, str]) -> wire.Prefilled:
        """Have a prompt computed and delivered. Raises WorkerError, WorkerLost, RequestTimeout."""
        async with self._call("POST", wire.PREFILL_PATH, deadline, wire.encode(body), headers) as answer:
            return await self._read(answer, wire.Prefilled, deadline)

    async def abort(self, request_id: str) -> bool:
        """End a request and free its pages; return whether the worker had it. Raises WorkerLost, RequestTimeout."""
        deadline = asyncio.get_running_loop().time() + ABORT_S
        async with self._call("DELETE", f"{wire.REQUESTS_PATH}/{request_id}", deadline) as answer:
            return (await self._read(answer, wire.Aborted, deadline)).found

    async def debug(self, limit: int, deadline: float) -> WorkerState:
        """Ask how transfers, links and pools stand. Raises WorkerError, WorkerLost, RequestTimeout, ProtocolError."""
        async with self._call("GET", f"{wire.DEBUG_PATH}?limit={limit}", deadline) as answer:
            return await self._read(answer, WorkerState, deadline)

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        deadline: float | None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            # Made at first use: aiohttp wants the running loop.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        sent = {
            "Authorization": wire.bearer(self._token),
            "Content-Type": "application/json",
            **(headers or {}),
        }
        url = self._base + path
        request = self._session.request(method, url, data=body, headers=sent, allow_redirects=False)
        answer = await self._within(request, deadline)
        try:
            yield answer
        finally:
            # Closes the connection if the body was not read to its end, which a worker takes as an abort.
            answer.release()

    async def _drain(self, answer: aiohttp.ClientResponse) -> None:
        """Read the end of a finished stream, so that its connection can be used again."""
        with suppress(RegaugeError):
            await self._within(answer.content.readany(), asyncio.get_running_loop().time() + DRAIN_S)

    async def _read(self, answer: aiohttp.ClientResponse, kind: type[Reply], deadline: float | None) -> Reply:
        await self._refusal(answer, deadline)
        body = await self._within(answer.read(), deadline)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"answer of {self.role} worker {self.name}: {error}: {body[:80]!r}") from error

    async def _refusal(self, answer: aiohttp.ClientResponse, deadline: float | None) -> None:
        if answer.status == 200:
            return
        body = await self._within(answer.read(), deadline)
        try:
            event = msgspec.json.decode(body, type=wire.ErrorEvent)
        except msgspec.DecodeError as error:
            reason = f"HTTP {answer.status} from {self.role} worker {self.name}: {body[:80]!r}"
            raise ProtocolError(reason) from error
        raise WorkerError(event, self.role)

    async def _within(self, work: Awaitable[T], deadline: float | None) -> T:
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


class Worker:
    """One worker and what is known of its health: `up`, since when, and why not."""

    def __init__(self, client: WorkerClient, metrics: Metrics, policy: HealthPolicy) -> None:
        self.client = client
        self.up = False
        self.since = datetime.now(UTC)
        self.reason = "it was not asked yet"
        self.draining = False
        self._metrics = metrics
        self._policy = policy
        self._missed = 0
        self._pid = 0
        self._counted = Totals()
        """What is in the metrics of the process `_pid`."""
        self._doubt = asyncio.Event()
        metrics.worker_down(client.name, client.role)

    def doubt(self) -> None:
        """Ask at once: a request has just lost this worker."""
        self._doubt.set()

    async def watch(self) -> None:
        """Poll the worker until cancelled."""
        while True:
            await self.poll()
            self._doubt.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._policy.period_s):
                    await self._doubt.wait()

    async def poll(self) -> None:
        """Ask once, and note the outcome."""
        try:
            health = await self.client.health(self._policy.limit_s)
        except RequestTimeout as error:
            self._missed += 1
            if self._missed >= self._policy.misses or not self.up:
                self._note(False, f"{error}, {self._missed} times in a row")
        except WorkerLost as error:
            self._note(False, error.reason)
        except (WorkerError, ProtocolError) as error:
            self._note(False, str(error))
        else:
            self._missed = 0
            self.draining = health.status == "draining"
            self._note(True, "")
            self._metrics.worker_state(
                self.client.name,
                self.client.role,
                running=health.running,
                waiting=health.waiting,
                free_pages=health.free_pages,
                pages=health.pages,
                quarantined_pages=health.quarantined_pages,
            )
            self._count(health)

    def _count(self, health: wire.Health) -> None:
        """Add what the worker's totals have grown by; a restarted one begins anew."""
        before = self._counted if health.pid == self._pid else Totals()
        after = health.transfers
        self._metrics.worker_trouble(
            self.client.name,
            self.client.role,
            failed={reason: n - before.failed.get(reason, 0) for reason, n in after.failed.items()},
            resent_chunks=after.resent - before.resent,
            resumed_legs=after.resumed - before.resumed,
        )
        self._counted, self._pid = after, health.pid

    def _note(self, up: bool, reason: str) -> None:
        if up != self.up:
            self.up, self.since = up, datetime.now(UTC)
            fields = {WORKER: self.client.name, ROLE: self.client.role}
            if up:
                get_logger(**fields).info("worker is up")
            else:
                get_logger(**fields).error("worker is lost", **{ERROR: reason})
        self.reason = reason
        if not up:
            self._metrics.worker_down(self.client.name, self.client.role)
            self.client.give_up(reason)


async def view(worker: Worker, limit: int) -> WorkerView:
    """Ask a worker how its transfers stand; what keeps it from answering within DEBUG_S is said in its place."""
    state, reason = None, worker.reason
    try:
        state = await worker.client.debug(limit, asyncio.get_running_loop().time() + DEBUG_S)
    except RegaugeError as error:
        reason = str(error)
    return WorkerView(worker.client.name, worker.client.role, worker.up, worker.since, reason, state)


@dataclass(frozen=True)
class Workers:
    """The pair that the gateway serves with."""

    prefill: Worker
    decode: Worker

    @classmethod
    def connect(
        cls,
        addresses: Sequence[wire.WorkerAddress],
        token: str,
        metrics: Metrics,
        policy: HealthPolicy = HealthPolicy(),
    ) -> Workers:
        """Make the pair from the two addresses. Raises ConfigError unless there is exactly one of each role."""
        by_role = {address.role: address for address in addresses}
        if len(addresses) != 2 or len(by_role) != 2:
            given = ", ".join(f"{address.name} ({address.role})" for address in addresses) or "none"
            raise ConfigError(f"workers: one prefill and one decode worker are needed, got {given}")
        return cls(*(Worker(WorkerClient(by_role[role], token), metrics, policy) for role in ("prefill", "decode")))

    def both(self) -> tuple[Worker, Worker]:
        """Return the prefill and the decode worker."""
        return self.prefill, self.decode
