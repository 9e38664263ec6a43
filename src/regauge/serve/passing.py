"""A request whose body goes on as the client sent it: placed by the router, tried elsewhere until its first bytes, answered byte by byte.

For fleets of one kind of engine that has an API of its own (`passthrough.py`). The prompt is not tokenised here: the router goes by the bytes of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from regauge import observe
from regauge.blocks import hash_bytes
from regauge.engines.sglang import room
from regauge.errors import ProtocolError, ReceiptError, RegaugeError
from regauge.meter.receipt import Outcome
from regauge.route.cluster import Request, Route
from regauge.route.request import Life, Resume, Start, Stop
from regauge.serve import wire, words
from regauge.serve.answer import ClientGone, House, begin, error_response, part, rounded
from regauge.serve.anthropic_replies import failed as anthropic_failed
from regauge.serve.attempt import abort
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.engine_client import EngineClient
from regauge.serve.failures import api_error, blame, refused, unavailable
from regauge.serve.lives import settled
from regauge.serve.passage import Deliver, Passage, Refused
from regauge.serve.passthrough import MESSAGES, Asked
from regauge.serve.protocol import GONE
from regauge.serve.recent import Story, Tried
from regauge.serve.relay import ALONE, Service
from regauge.serve.replies import failed as openai_failed
from regauge.serve.tenants import Grant
from regauge.serve.told import transferred
from regauge.serve.tracecontext import onward
from regauge.serve.workers import Worker

BYTES_PER_TOKEN: Final = 4
"""Of a prompt in English, and about right for others: for the router, which needs to know how long a prompt will take."""
_PROMPT: Final = ("tools", "system", "instructions", "messages", "prompt", "input")
"""Fields that make the prompt, in the order in which templates write them."""


class Sender(msgspec.Struct, frozen=True):
    """Whose request it is, and under which names it goes on."""

    request_id: str
    tenant: str
    priority: int
    headers: Mapping[str, str]
    salt: str = ""
    """As `wire.Prefill.salt`."""


class PassJob:
    """One client request on pairs of engines."""

    size = 1

    def __init__(self, asked: Asked, sender: Sender, service: Service, max_tokens: int) -> None:
        """`max_tokens`: most tokens of the answer."""
        self.max_tokens = max_tokens
        self.passage: Passage | None = None
        """The latest try."""
        self.attempts = 0
        self.route: Route | None = None
        self._asked = asked
        self._sender = sender
        self._service = service
        self._deadline = asyncio.get_running_loop().time() + service.limit_s
        self.story = Story()
        self._tried: Tried
        """What is kept of the latest attempt."""
        self._arrived = self.story.arrived
        self._first: float | None = None
        self.task: asyncio.Task[Any] | None = None
        """What runs it, and is ended with it."""
        self.failed: RegaugeError | None = None
        fleet = service.fleet
        text = prompt_bytes(asked)
        self.prompt_tokens = max(len(text) // BYTES_PER_TOKEN, 1)
        """Estimated."""
        self.story.prompt_tokens = self.prompt_tokens
        salt = sender.salt.encode() + b"\0" + asked.salt if asked.salt else sender.salt.encode()
        blocks = hash_bytes(text, fleet.router.config.block_tokens * BYTES_PER_TOKEN, salt)
        alone = frozenset(worker.client.name for worker in fleet.of("prefill")) if asked.alone else frozenset[str]()
        request = Request(
            sender.request_id, sender.tenant, service.model, self.prompt_tokens, blocks, max_tokens, sender.priority, exclude=alone
        )  # fmt: skip
        self._life = Life(request, fleet.router, resumable=False, until=self._deadline, wait_s=service.wait_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first bytes of the answer."""
        return None if self._first is None else self._first - self._arrived

    @property
    def path(self) -> str | None:
        """Of its pair's layouts."""
        route = self.route
        if route is None:
            return None
        return ALONE if route.prefill is None else self._service.fleet.pairs.verdict(route.prefill, route.decode).path

    def told(self) -> dict[str, str]:
        """Return the headers that say where the request went, once it has been placed."""
        named = {"x-regauge-path": self.path, "x-regauge-route": self.route.header if self.route else None}
        return {name: value for name, value in named.items() if value}

    def fail(self, error: RegaugeError) -> None:
        """End it from outside, for that reason."""
        if self.failed is None:
            self.failed = error
            if self.task is not None:
                self.task.cancel()

    async def run(self, deliver: Deliver) -> None:
        """Hand the answer's bytes over; what its head is `passage` knows. Raises what ended it."""
        outcome = "failed"
        try:
            await self._run(deliver)
            outcome = "complete"
        finally:
            self._service.metrics.ended("cancelled" if isinstance(self.failed, ClientGone) else outcome)

    async def _run(self, deliver: Deliver) -> None:
        life, fleet = self._life, self._service.fleet
        step: Start | Resume | Stop = life.begin(fleet.now())
        if isinstance(step, Stop):
            raise refused(step.refusal, fleet.fault()) if step.refusal is not None else unavailable(step.message)

        async def first(chunk: bytes) -> None:
            if self._first is None:
                self._first = time.monotonic()
                self._tried.token(self._first)
                if self._asked.stream:
                    life.first_token(fleet.now())
            await deliver(chunk)

        while True:
            outcome: Outcome = "failed"
            route = step.route
            passage = self.passage = self._passage(step.request.id, route)
            try:
                await passage.run(first)
                outcome = "complete"
                self._count(passage)
                life.finished(fleet.now())
                return
            except asyncio.CancelledError:
                outcome = "cancelled"
                life.finished(fleet.now(), "cancelled")
                raise
            except (WorkerLost, WorkerError, RequestTimeout, ProtocolError) as error:
                self._tried.error = str(error)
                step = await self._after(passage, error)
            finally:
                self._keep(passage, outcome)
                self._account(passage, route, outcome)

    def _passage(self, name: str, route: Route) -> Passage:
        fleet = self._service.fleet
        self.route = route
        self.attempts += 1
        if route.prefill is None:
            self._service.metrics.bypassed.inc()
        transfer = room.new_transfer()
        self._tried = self.story.attempt(name, route.prefill, route.decode, self.path or ALONE, transfer)
        prefill = None if route.prefill is None else fleet.workers[route.prefill]
        return Passage(
            self._asked, name, transfer, None if prefill is None else _client(prefill), _client(fleet.workers[route.decode]),
            self._deadline, onward(self._sender.headers, self._tried.context), self._drop, self._sender.salt, self._prefilled,
        )  # fmt: skip

    def _drop(self, client: EngineClient, name: str) -> None:
        worker = self._service.fleet.workers.get(client.name)
        if worker is not None:
            self._service.spawn(abort(worker, name))

    def _prefilled(self, cached: int) -> None:
        self._life.prefilled(self._service.fleet.now(), cached, max(self.prompt_tokens - cached, 0))

    async def _after(
        self, passage: Passage, error: WorkerLost | WorkerError | RequestTimeout | ProtocolError
    ) -> Start | Resume:
        """Return where the request is tried next. Raises the error where it is not."""
        life, fleet = self._life, self._service.fleet
        blamed = blame(error, passage.prefill.name if passage.prefill else None, passage.decode.name)
        if self._first is not None or blamed is None or (isinstance(error, Refused) and error.clients):
            life.finished(fleet.now(), "failed")
            raise error
        kind, worker, role = blamed
        if isinstance(error, WorkerLost):
            fleet.router.health(worker, False, fleet.now())
            if (lost := fleet.workers.get(worker)) is not None:
                lost.doubt()
        found = await settled(life.failure(kind, worker, role, fleet.now()), life, fleet, kind, error)
        self._service.metrics.retried.inc()
        return found

    def _count(self, passage: Passage) -> None:
        metrics, usage, event = self._service.metrics, passage.usage, passage.arrival
        if usage is not None:
            metrics.finished(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                ttft_s=self.ttft_s if self._asked.stream else None,
                seconds=time.monotonic() - self._arrived,
            )
        if event is not None:
            transferred(metrics, event)

    def _keep(self, passage: Passage, outcome: Outcome) -> None:
        tried, now = self._tried, time.monotonic()
        if passage.arrival is not None:
            tried.arrived = self._first or now, passage.arrival
        tried.end(now, outcome)

    def _account(self, passage: Passage, route: Route, outcome: Outcome) -> None:
        """Leave the gateway's receipt; these engines make none."""
        meter = self._service.meter
        if meter is None:
            return
        tag = wire.MeterTag(self._sender.tenant, route.prefill or "", route.decode, route.header)
        try:
            meter.say(words.of_passage(passage, tag, outcome, by=meter.name, model=meter.model))
        except ReceiptError as error:
            meter.refused(error, passage.request_id)


class SlowReader(RegaugeError):  # as ClientGone
    """The client does not read its answer."""


class PassAnswer:
    """Sends a passed answer, as an ASGI app; leaves the house when it is over."""

    def __init__(self, job: PassJob, asked: Asked, house: House, limit_s: float) -> None:
        self._job = job
        self._asked = asked
        self._house = house
        self._limit_s = limit_s
        self._slow: SlowReader | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then leave the house and note what the request came to."""
        job, summary = self._job, scope["state"].setdefault("summary", {})
        task = job.task = asyncio.current_task()
        late = self._house.deadlines.add(asyncio.get_running_loop().time() + self._limit_s, self._late)
        unwatch = scope["extensions"][GONE](self._gone)
        try:
            error = await self._send(scope, receive, send)
        except asyncio.CancelledError:
            error = self._slow
            if error is None:
                raise
        finally:
            unwatch()
            late.cancel()
            self._house.leave(job)
            self._note(scope, summary)
        if error is not None:
            summary[observe.ERROR] = job.story.error = str(error)
            if task is not None and task.cancelling():
                task.uncancel()

    def _note(self, scope: Scope, summary: dict[str, object]) -> None:
        job = self._job
        usage = job.passage.used if job.passage is not None else None
        event = job.passage.arrival if job.passage is not None else None
        tokens = (usage.prompt_tokens, usage.completion_tokens) if usage else (job.prompt_tokens, 0)
        job.story.end(summary.get(observe.ERROR), job.ttft_s, *tokens)
        summary |= {
            observe.PATH: job.path,
            observe.MODE: event.mode if event else None,
            observe.PLACED: job.route.header if job.route else None,
            observe.ATTEMPTS: job.attempts,
            observe.WIRE_BYTES: event.wire_bytes if event else 0,
            observe.PROMPT_TOKENS: usage.prompt_tokens if usage else None,
            observe.COMPLETION_TOKENS: usage.completion_tokens if usage else None,
            observe.TTFT_S: rounded(job.ttft_s),
        }
        if isinstance(granted := scope["state"].get("grant"), Grant):
            granted.used = usage.total_tokens if usage is not None else 0

    def _gone(self) -> None:
        self._job.fail(ClientGone("the client closed its connection"))

    def _late(self) -> None:
        """The job's own time limit has passed already: it is the sending that hangs, maybe of an error."""
        self._slow = SlowReader("the client does not read its answer")
        if self._job.task is not None:
            self._job.task.cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> RegaugeError | None:
        begun, streams = False, self._asked.stream

        async def deliver(chunk: bytes) -> None:
            nonlocal begun
            if not begun:
                await begin(send, 200, self._headers(chunk))
                begun = True
            if not streams:
                self._house.leave(self._job)  # before the client can know, and ask again
            await part(send, chunk, last=not streams)

        try:
            await self._job.run(deliver)
            if streams:
                self._house.leave(self._job)
                await part(send, b"", last=True)
            return None
        except asyncio.CancelledError:
            error = self._job.failed
            if error is None:
                raise
        except RegaugeError as raised:
            error = raised
        if isinstance(error, ClientGone) or (begun and not streams):
            return error
        if begun:
            failed = anthropic_failed if self._asked.route is MESSAGES else openai_failed
            await part(send, failed(api_error(error), scope["state"]["request_id"]), last=True)
        elif isinstance(error, Refused) and error.clients:
            await begin(send, error.head.status, {**error.head.headers, "content-length": str(len(error.body))})
            await part(send, error.body, last=True)
        else:
            told = error_response(api_error(error), self._asked.route.path, scope["state"]["request_id"])
            await told(scope, receive, send)
        return error

    def _headers(self, first: bytes) -> dict[str, str]:
        head = self._job.passage.head if self._job.passage is not None else None
        headers = {**(head.headers if head is not None else {}), **self._job.told()}
        if not self._asked.stream:
            headers["content-length"] = str(len(first))
        return headers


def prompt_bytes(asked: Asked) -> bytes:
    """Return what makes the prompt, as the client wrote it: equal beginnings of it are equal beginnings of prompts."""
    return b"\0".join(bytes(asked.fields[name]) for name in _PROMPT if name in asked.fields)


def _client(worker: Worker) -> EngineClient:
    if not isinstance(worker.client, EngineClient):
        raise TypeError(f"{worker.client.name} has no API of its own")
    return worker.client
