"""A client's own body as a job: placed by the router, tried, and tried elsewhere until its answer has begun.

What an engine has written nobody can go on with but itself: an answer that has begun ends with its workers. It is metered by the usage that
the engine tells; where the client leaves before that, by prefill's count of the prompt and by the events that were passed on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Final

from regauge.blocks import hash_blocks
from regauge.config import EngineName
from regauge.engines.sglang import room
from regauge.errors import ProtocolError
from regauge.meter.receipt import Outcome
from regauge.observe import ERROR, REQUEST_ID, ROUTE, get_logger
from regauge.route.cluster import Request
from regauge.route.request import Action, Life, Resume, Start, Stop, Wait
from regauge.serve import anthropic, wire
from regauge.serve.attempt import Attempt, Task, abort
from regauge.serve.choice import Choice
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.engine_client import EngineClient
from regauge.serve.failures import blame, poisoned, refused
from regauge.serve.fleet import Fleet
from regauge.serve.inject import INJECT
from regauge.serve.openai import ApiError
from regauge.serve.passage import Head, Passage, Refused
from regauge.serve.passthrough import Asked
from regauge.serve.relay import ALONE, Job, Service
from regauge.serve.replies import Delta, PromptDetails, Usage

CHARACTERS_PER_TOKEN: Final = 4
"""Of a body that the gateway cannot tokenise: for the router's estimate alone."""


def engine_of(fleet: Fleet) -> EngineName | None:
    """Return the engine with an API that all workers are; None: they are several, or have none."""
    kinds = {worker.client.address.engine for worker in fleet.workers.values()}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind if kind in INJECT else None


@dataclass(frozen=True)
class Piece(Delta):
    """Bytes of an engine's answer."""

    data: bytes = b""


class PassedError(ApiError):
    """What an engine told the client of a request that is at fault, as it said it."""

    def __init__(self, head: Head, body: bytes) -> None:
        super().__init__(head.status, f"the engine refused the request: HTTP {head.status}")
        self._head = head
        self._body = body

    def body(self) -> bytes:
        """Return the engine's body."""
        return self._body

    def headers(self) -> dict[str, str]:
        """Return the engine's headers, as far as they are the client's business."""
        return dict(self._head.headers)


class Verbatim:
    """Writes an answer as the engine did, as `answer.Writer`."""

    def __init__(self, path: str, request_id: str) -> None:
        self._anthropic = anthropic.speaks(path)
        self._request_id = request_id

    def chunks(self, delta: Delta) -> bytes:
        """Return a piece as it came."""
        return delta.data if isinstance(delta, Piece) else b""

    def end(self, usage: Usage) -> bytes:
        """Return nothing: the engine has ended its stream itself."""
        del usage
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the server-sent event that ends a stream which failed."""
        head = b"event: error\n" if self._anthropic else b""
        return head + b"data: " + self.refusal(error) + b"\n\n"

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> bytes:
        """Return the body as it came."""
        del usage
        return b"".join(map(self.chunks, deltas))

    def refusal(self, error: ApiError) -> bytes:
        """Return the body of an error: the engine's own, or one in the API's words."""
        if self._anthropic and not isinstance(error, PassedError):
            return anthropic.error_body(error, self._request_id)
        return error.body()


class PassJob(Job):
    """One body on its way. `choice` is for router and meter: of its tokens only the number counts, where the gateway could not know them."""

    def __init__(
        self, asked: Asked, choice: Choice, service: Service, *, tenant: str, priority: int = 0, headers: Mapping[str, str]
    ) -> None:  # fmt: skip
        super().__init__([choice], service, tenant=tenant, priority=priority, headers=headers)
        self._asked = asked
        self._service = service
        self._used: Usage | None = None
        self._events = 0

    def usage(self) -> Usage:
        """Return the tokens so far, as far as they are known."""
        if self._used is not None:
            return self._used
        prompt = len(self.choices[0].token_ids) if self._events else 0
        return Usage(prompt, self._events, prompt + self._events, PromptDetails(0))

    async def _run(self, choice: Choice) -> None:
        fleet = self._service.fleet
        request = Request(
            choice.request_id, self.tenant, self._service.model, len(choice.token_ids),
            hash_blocks(choice.token_ids, fleet.router.config.block_tokens), choice.sampling.max_tokens, self.priority,
            exclude=frozenset(worker.client.name for worker in fleet.of("prefill")) if self._asked.alone else frozenset(),
        )  # fmt: skip
        life = Life(
            request, fleet.router, resumable=False, until=self.deadline - self._late(), wait_s=self._service.wait_s
        )
        step: Action = life.begin(fleet.now())
        if isinstance(step, Stop) and step.refusal is not None:
            raise refused(step.refusal, fleet.fault())
        while isinstance(step, Start | Resume):
            passage = self._passage(step)
            try:
                await self._try(passage, life)
                self._end(passage, step, "complete")
                return
            except asyncio.CancelledError:
                life.finished(fleet.now(), "cancelled")
                self._end(passage, step, "cancelled")
                raise
            except (WorkerLost, WorkerError, RequestTimeout, ProtocolError) as error:
                self._end(passage, step, "failed")
                step = await self._after(passage, life, error)

    def _late(self) -> float:
        """The job's deadline is of the event loop's clock, the router's of its own."""
        return asyncio.get_running_loop().time() - self._service.fleet.now()

    def _passage(self, step: Start | Resume) -> Passage:
        fleet, route, spawn = self._service.fleet, step.route, self._service.spawn
        self.tally.attempts += 1
        self.tally.route = route
        self.tally.path = fleet.pairs.verdict(route.prefill, route.decode).path if route.prefill else ALONE
        if route.prefill is None:
            self._service.metrics.bypassed.inc()
        clients = [None if name is None else fleet.workers[name].client for name in (route.prefill, route.decode)]
        prefill, decode = clients
        if not isinstance(decode, EngineClient) or not isinstance(prefill, EngineClient | None):
            raise ProtocolError("a worker without an API of its own has come into the pair")

        def drop(client: EngineClient, name: str) -> None:
            if (worker := fleet.workers.get(client.name)) is not None:
                spawn(abort(worker, name))

        return Passage(
            self._asked, step.request.id, room.new_transfer(), prefill, decode, self.deadline, self.headers, drop
        )

    async def _try(self, passage: Passage, life: Life) -> None:
        fleet = self._service.fleet
        began = time.monotonic()
        async with aclosing(passage.chunks()) as chunks:
            async for data in chunks:
                if self.tally.ttft_s is None:
                    now = time.monotonic()
                    self.tally.ttft_s = now - self.tally.arrived
                    if passage.cached_tokens is not None:
                        computed = max(len(self.choices[0].token_ids) - passage.cached_tokens, 0)
                        life.prefilled(fleet.now(), passage.cached_tokens, computed, now - began)
                    life.first_token(fleet.now())
                self._events += data.count(b"\n\n")
                self.put(Piece(0, data=data))
        life.finished(fleet.now(), "complete")
        self._used = passage.usage
        usage = self.usage()
        tpot = self._service.metrics.finished(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, ttft_s=self.tally.ttft_s,
            seconds=time.monotonic() - self.tally.arrived,
        )  # fmt: skip
        if tpot is not None:
            self.tally.tpots_s.append(tpot)
        if (event := passage.arrival) is not None:
            self.tally.mode, self.tally.wire_bytes = event.mode, event.wire_bytes
            self._service.metrics.transfer(
                path=event.path, mode=event.mode, wire_bytes=event.wire_bytes, seconds=event.seconds
            )
        self.put(Delta(0, finish="stop"))

    async def _after(
        self, passage: Passage, life: Life, error: WorkerLost | WorkerError | RequestTimeout | ProtocolError
    ) -> Action:
        """Say what is next after a failed try. Raises what the client is told where nothing is."""
        fleet, now = self._service.fleet, self._service.fleet.now()
        if isinstance(error, Refused) and error.clients:
            life.finished(now, "failed")
            raise PassedError(error.head, error.body) from error
        blamed = blame(error, passage.prefill.name if passage.prefill else None, passage.decode.name)
        if blamed is None:
            life.finished(now, "failed")
            raise error
        kind, name, role = blamed
        if isinstance(error, WorkerLost):
            fleet.router.health(name, False, now)
            if (worker := fleet.workers.get(name)) is not None:
                worker.doubt()
        step = life.failure(kind, name, role, now, generated=0 if passage.head is None else max(self._events, 1))
        while isinstance(step, Wait):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(step.until + self._late()):
                    await fleet.returned(step.role)
            step = life.again(fleet.now())
        if not isinstance(step, Start | Resume):
            life.finished(fleet.now(), "failed")
            if isinstance(step, Stop) and step.reason == "poison":
                raise poisoned(step.message) from error
            raise error
        self._service.metrics.retried.inc()
        log = get_logger(**{REQUEST_ID: passage.request_id, ERROR: str(error)})
        log.warning("the request goes on elsewhere", attempt=step.request.id, **{ROUTE: step.route.header})
        return step

    def _end(self, passage: Passage, step: Start | Resume, outcome: Outcome) -> None:
        """Leave the gateway's receipt: engines make none."""
        meter, route, fleet = self._service.meter, step.route, self._service.fleet
        if meter is None:
            return
        usage = passage.usage or self.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        tag = wire.MeterTag(self.tenant, route.prefill or "", route.decode, route.header, "")
        task = Task(step.request.id, passage.transfer_id, [0] * usage.prompt_tokens, [], self.choices[0].sampling, tag)
        told = wire.Prefilled(0, usage.prompt_tokens - cached, cached, 0.0, 0.0)
        workers = fleet.workers
        if route.decode not in workers or (route.prefill is not None and route.prefill not in workers):
            return
        attempt = Attempt(
            task, None if route.prefill is None else workers[route.prefill], workers[route.decode], self.deadline, self.headers,
            self._service.spawn, passage.began, passage.ended, usage.completion_tokens, told if passage.head is not None else None,
        )  # fmt: skip
        meter.ended(attempt, outcome)
