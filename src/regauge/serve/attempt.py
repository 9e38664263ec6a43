"""One try of a choice on one pair of workers: two legs that start together, and an end that leaves nothing behind.

The decode worker's stream reserves pages; the prefill worker's call computes the prompt and delivers the KV cache. A leg that fails ends
the other at once. However an attempt ends other than by both legs' good end, its workers are told to drop it. Without a prefill worker
decode computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from regauge.config import Role
from regauge.engines.local.sampling import SamplingParams
from regauge.errors import RegaugeError
from regauge.observe import ERROR, REQUEST_ID, WORKER, get_logger
from regauge.serve import wire
from regauge.serve.connection import WorkerLost
from regauge.serve.failures import SETTLE_S, cause, errors, good, is_symptom
from regauge.serve.workers import Worker

Spawn = Callable[[Coroutine[Any, Any, Any]], None]
Take = Callable[[wire.TokenEvent], bool]
"""Takes a token; returns whether more are wanted."""
Prefilled = Callable[[wire.Prefilled], None]
"""Takes prefill's answer, as soon as it is there."""


@dataclass(frozen=True)
class Task:
    """What the workers of an attempt are asked for: to answer `token_ids`, or to go on from `generated`, where another attempt was lost."""

    request_id: str
    transfer_id: str
    token_ids: list[int]
    generated: list[int]
    sampling: SamplingParams
    meter: wire.MeterTag | None = None
    salt: str = ""
    """As `wire.Prefill.salt`."""


@dataclass(eq=False)
class Attempt:
    """One attempt; what it came to is in its fields, also where `run` raises."""

    task: Task
    prefill: Worker | None
    decode: Worker
    deadline: float
    headers: Mapping[str, str]
    spawn: Spawn
    """Runs an abort beside the request, so that neither the client nor a cancellation cuts it short."""
    began: float = field(default_factory=time.time)
    ended: float | None = None
    """Seconds since 1970, as `began`."""
    delivered: int = 0
    """Tokens that were taken."""
    prefilled: wire.Prefilled | None = None
    arrival: wire.TransferEvent | None = None
    finish: wire.FinishEvent | None = None
    whole: bool = False
    """Whether both workers have come to their good end by themselves."""
    cached: int | None = None
    """Tokens of the prompt that were cached, as far as the workers have told."""
    lost: set[Role] = field(default_factory=set)
    """Workers that died with it in hand, or had no receipt to give when they were told to drop it."""
    drops: list[asyncio.Future[str]] = field(default_factory=list)
    """Of each worker that was told to drop it: the receipt that it gave, or nothing."""

    async def run(self, take: Take, told: Prefilled) -> None:
        """Have the choice computed; each token goes to `take`. Raises what ended it: WorkerLost, WorkerError, RequestTimeout, ProtocolError."""
        try:
            if self.prefill is None:
                await self._alone(take)
            else:
                await self._together(self.prefill, take, told)
        finally:
            self.ended = time.time()

    def _drop(self, worker: Worker) -> None:
        line: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.drops.append(line)
        self.spawn(self._dropping(worker, line))

    async def _dropping(self, worker: Worker, line: asyncio.Future[str]) -> None:
        given = ""
        try:
            given = await abort(worker, self.task.request_id)
        finally:
            if not given:
                self.lost.add(worker.client.role)
            line.set_result(given)

    async def _alone(self, take: Take) -> None:
        try:
            self.whole = await self._decode(take, None)
        except WorkerLost:
            self.decode.doubt()
            raise
        finally:
            if not self.whole:
                self._drop(self.decode)

    async def _together(self, worker: Worker, take: Take, told: Prefilled) -> None:
        prefill = asyncio.create_task(self._prefill(worker, told))
        decode = asyncio.create_task(self._decode(take, prefill))
        legs: tuple[asyncio.Task[wire.Prefilled], asyncio.Task[bool]] = (prefill, decode)
        workers = (worker, self.decode)
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if good(prefill):
                await asyncio.wait((decode,))
            elif good(decode) or all(map(is_symptom, errors(legs))):
                await asyncio.wait(legs, timeout=SETTLE_S)
            if not good(decode):
                raise cause(legs)
            self.whole = good(prefill) and decode.result()
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
            if not self.whole:
                for each in workers:
                    self._drop(each)
                for leg, each in zip(legs, workers, strict=True):
                    if not leg.cancelled() and isinstance(leg.exception(), WorkerLost):
                        each.doubt()

    async def _prefill(self, worker: Worker, told: Prefilled) -> wire.Prefilled:
        decode, task = self.decode.client, self.task
        body = wire.Prefill(
            task.request_id,
            task.transfer_id,
            task.token_ids,
            task.sampling,
            decode.address.receivers,
            handover=decode.continues,
            generated=task.generated,
            meter=task.meter,
            salt=task.salt,
        )
        self.prefilled = await worker.client.prefill(body, self.deadline, self.headers)
        self.cached = self.prefilled.cached_tokens
        told(self.prefilled)
        return self.prefilled

    async def _decode(self, take: Take, prefill: asyncio.Task[wire.Prefilled] | None) -> bool:
        """Relay the stream; return whether the worker ended it (and not `take`)."""
        task = self.task
        senders = [] if self.prefill is None else self.prefill.client.address.senders
        body = wire.Generate(
            task.request_id, task.transfer_id, task.token_ids, task.sampling, senders, generated=task.generated, meter=task.meter, salt=task.salt
        )  # fmt: skip
        async with aclosing(self.decode.client.generate(body, self.deadline, self.headers)) as events:
            async for event in events:
                if not isinstance(event, wire.ErrorEvent) and event.cached_tokens is not None:
                    self.cached = event.cached_tokens
                if isinstance(event, wire.TokenEvent):
                    asked = task.sampling.logprobs is not None and not self.delivered
                    if prefill is not None and event.logprob is None and asked:
                        # The first token of an engine whose hand-over has no log-probabilities: its answer has them.
                        first = await asyncio.shield(prefill)
                        event = wire.TokenEvent(event.token, first.logprob, first.top)
                    self.delivered += 1
                    if not take(event):
                        return False
                elif isinstance(event, wire.TransferEvent):
                    self.arrival = event
                elif isinstance(event, wire.FinishEvent):
                    self.finish = event
        return True


async def abort(worker: Worker, request_id: str) -> str:
    """Have a worker drop a request, and return its receipt if it has one to give; a worker that cannot be reached is asked for its health."""
    try:
        return (await worker.client.abort(request_id)).receipt
    except WorkerLost:
        worker.doubt()
    except RegaugeError as error:
        fields: dict[str, Any] = {REQUEST_ID: request_id, WORKER: worker.client.name, ERROR: str(error)}
        get_logger().warning("abort failed", **fields)
    return ""
