"""A worker process: one engine, one KV pool, one side of the crossing, behind the internal HTTP API (`wire.py`).

The life of a request on the decode worker: lease pages for prompt and answer, expect the transfer, and when it has been committed
hand the pages and the first token to the engine. On the prefill worker: lease pages for the prompt, offer the transfer, compute once
decode has granted its pages, mark layers ready as they are written, hand over the first token, wait for the commit.
Whatever ends a request, its pages are freed when neither the engine nor a transfer can touch them any more.
"""

from __future__ import annotations

import abc
import asyncio
import os
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import structlog

from regauge.engines import handover
from regauge.engines.handover import Handover
from regauge.engines.local.kv import PagedKV
from regauge.engines.local.model import LocalModel
from regauge.engines.local.prefix import Leased, PrefixCache, Prompt
from regauge.engines.local.scheduler import Output, Request, Scheduler, pages_needed
from regauge.engines.local.thread import EngineThread
from regauge.errors import EngineError, RegaugeError
from regauge.move.bound import Memory
from regauge.move.crossing import PageTable
from regauge.move.flow_types import LinkState as NicState
from regauge.move.inbound import InboundLinks
from regauge.move.ledger import Ledger
from regauge.move.outbound import OutboundLinks
from regauge.move.outgoing import Outgoing
from regauge.move.pages import PagePool
from regauge.move.protocol import TransferState
from regauge.move.rails import Rails
from regauge.move.state import LinkState, Totals, WorkerState, bounded, pool_states, session_states
from regauge.serve import wire
from regauge.serve.admission import Admission
from regauge.serve.quality_gate import judge

log = structlog.get_logger()


class RefusalError(RegaugeError):
    """A request that this worker does not take or cannot finish; carries the wire code."""

    def __init__(self, code: wire.Code, message: str) -> None:
        super().__init__(message)
        self.code: wire.Code = code


class Worker(abc.ABC):
    """What both roles share. Built inside the event loop."""

    def __init__(self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails) -> None:
        self.spec = spec_
        self.engine_config = spec_.config.engine(spec_.role)
        group = memory.layout.groups[0]
        self.pool = PagePool(group.pages, group.page_size)
        self.cache = PrefixCache(self.pool, enabled=self.engine_config.prefix_cache)
        self.admission = Admission(self.cache)
        self.memory = memory
        self.rails = rails
        c = self.engine_config
        store = PagedKV(memory, dtype=model.dtype, max_new=c.chunk_tokens + c.max_batch, max_context=c.max_context)
        self.scheduler = Scheduler(model, store, c)
        self.engine = EngineThread(self.scheduler)
        self.jobs: dict[str, asyncio.Task[Any]] = {}
        self.ledger = Ledger()
        self.draining = False

    def admit(self, request_id: str, tokens: int, pages: int) -> None:
        """Raise RefusalError for a request that cannot be taken at all."""
        if self.draining:
            raise RefusalError("draining", f"{self.spec.name} is shutting down")
        if request_id in self.jobs:
            raise RefusalError("duplicate_request", f"request {request_id!r} is here already")
        if tokens < 1:
            raise RefusalError("bad_request", "token_ids is empty: give at least one token")
        if tokens >= self.scheduler.context:
            raise RefusalError("bad_request", f"{tokens} tokens leave no room in a context of {self.scheduler.context}")
        if pages > self.pool.pages:
            raise RefusalError("prompt_too_large", f"{pages} pages are needed, the pool has {self.pool.pages}")
        if len(self.jobs) >= self.spec.config.limits.max_queue:
            raise RefusalError("queue_full", f"{len(self.jobs)} requests are here already")

    def pages_for(self, prompt: int, sampling: wire.SamplingParams) -> int:
        """Return the pages that a request takes here."""
        need = pages_needed(prompt, sampling, self.pool.page_size, prefill_only=self.spec.role == "prefill")
        return min(need, self.pool.pages_for(self.scheduler.context))

    def start(self, request_id: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a request's work as a job that DELETE can find."""
        job = asyncio.create_task(work)
        self.jobs[request_id] = job
        job.add_done_callback(lambda _: self.jobs.pop(request_id, None))
        return job

    async def abort(self, request_id: str) -> bool:
        """End a job and wait until its pages are free or in quarantine."""
        job = self.jobs.get(request_id)
        if job is None:
            return False
        job.cancel()
        await asyncio.wait([job])
        return True

    def error(self, error: BaseException) -> wire.ErrorEvent:
        """Return what the gateway is told of a failure."""
        code: wire.Code = "engine_failed"
        if isinstance(error, RefusalError):
            code = error.code
        elif isinstance(error, asyncio.CancelledError):
            code = "aborted"
        elif isinstance(error, RegaugeError) and not isinstance(error, EngineError):
            code = "transfer_failed"
        return wire.ErrorEvent(code, str(error) or "the request was aborted", self.spec.name)

    def health(self) -> wire.Health:
        """Return the worker's state."""
        return wire.Health(
            status="draining" if self.draining else "ok", role=self.spec.role, name=self.spec.name, pid=os.getpid(),
            model=self.spec.model_name, free_pages=self.cache.available, pages=self.pool.pages,
            running=self.engine.running, waiting=max(len(self.jobs) - self.engine.running, 0),
            quarantined_pages=self.pool.count("quarantined"), transfers=self.totals())  # fmt: skip

    def totals(self) -> Totals:
        """Return what the transfers came to."""
        return self.ledger.totals()

    @abc.abstractmethod
    def transfers(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that are not over, and the links."""

    def nics(self) -> list[NicState]:
        """Describe what flow control knows of each receiving NIC."""
        return []

    def debug(self, limit: int) -> WorkerState:
        """Return what `/debug/transfers` shows, at most `limit` of each kind of thing."""
        transfers, links = self.transfers()
        state = WorkerState(
            self.spec.name, self.spec.role, os.getpid(), time.monotonic(), transfers, links, pool_states([self.pool]),
            session_states(self.rails), self.totals(), self.nics())  # fmt: skip
        return bounded(state, limit)

    async def close(self) -> None:
        """End all jobs, then the engine."""
        self.draining = True
        for request_id in list(self.jobs):
            await self.abort(request_id)
        self.engine.stop()


class DecodeWorker(Worker):
    """Takes KV in, and decodes."""

    def __init__(self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails) -> None:
        super().__init__(spec_, memory, model, rails)
        config = spec_.config.transfer
        self.links = InboundLinks(spec_.name, bytes.fromhex(spec_.key), memory, rails, [self.pool], config,
                                  judge(spec_.config.quality))  # fmt: skip
        self.links.on_release = self.admission.pump

    def transfers(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that come in, and the links they come over."""
        return self.links.transfers(), self.links.links()

    def totals(self) -> Totals:
        """Return what the transfers came to, with what the links have counted."""
        self.ledger.read(self.links)
        return super().totals()

    def nics(self) -> list[NicState]:
        """Describe the NICs that KV comes in by."""
        return self.links.flow()

    async def generate(self, body: wire.Generate, events: asyncio.Queue[wire.Event]) -> None:
        """Serve one request: its events, the last of which is a finish or an error, go into the queue."""
        try:
            await self._generate(body, events)
        except asyncio.CancelledError as error:
            events.put_nowait(self.error(error))
            raise
        except RegaugeError as error:
            events.put_nowait(self.error(error))
        except Exception as error:  # whatever broke, the stream must come to an end
            log.exception("a request broke", request_id=body.request_id)
            events.put_nowait(self.error(error))

    async def _generate(self, body: wire.Generate, events: asyncio.Queue[wire.Event]) -> None:
        prompt = len(body.token_ids)
        pages = (await self.admission.lease(body.transfer_id, self.pages_for(prompt, body.sampling))).pages
        arrival = self.links.expect(body.transfer_id, body.prefill, prompt)
        self.ledger.watch(arrival)
        try:
            arrived = await asyncio.shield(arrival)
        except asyncio.CancelledError:
            self.links.cancel(body.transfer_id, "the request was aborted")
            if arrival.done() and arrival.exception() is None:
                self._release(body.transfer_id)  # it had arrived in the same moment
            raise
        try:
            first = handover.decode(arrived.handover, ", ".join(body.prefill))
            events.put_nowait(
                wire.TransferEvent(arrived.path, arrived.mode, arrived.wire_bytes, len(pages), arrived.seconds)
            )
            events.put_nowait(wire.TokenEvent(first.token, first.logprob, first.top))
            count = 1
            reason = first.finish_reason or self.scheduler.ends(body.sampling, first.token, prompt=prompt, generated=1)
            if reason is None:
                count, reason = await self._decode(body, first, pages, events)
            final: Any = reason
            events.put_nowait(wire.FinishEvent(final, prompt, count))
        finally:
            await asyncio.shield(self._let_go(body))

    async def _decode(
        self, body: wire.Generate, first: Handover, pages: list[int], events: asyncio.Queue[wire.Event]
    ) -> tuple[int, str]:
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        request = Request(
            id=body.request_id, token_ids=tuple(body.token_ids), pages=np.array(pages, np.int64), arrived=time.monotonic(),
            sampling=body.sampling if first.seed is None else msgspec.structs.replace(body.sampling, seed=first.seed),
            computed=len(body.token_ids), generated=(first.token,))  # fmt: skip
        await self.engine.add(request, outputs.put_nowait)
        while True:
            output = await outputs.get()
            if output.error is not None:
                raise output.error
            top = list(output.top) if output.top is not None else None
            events.put_nowait(wire.TokenEvent(output.token, output.logprob, top))
            if output.finish_reason is not None:
                return output.index + 1, output.finish_reason

    async def _let_go(self, body: wire.Generate) -> None:
        await self.engine.abort(body.request_id)
        self._release(body.transfer_id)

    def _release(self, transfer: str) -> None:
        self.admission.release(transfer)


class PrefillWorker(Worker):
    """Computes prompts, and sends their KV out."""

    def __init__(self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails) -> None:
        super().__init__(spec_, memory, model, rails)
        self.links = OutboundLinks(spec_.name, bytes.fromhex(spec_.key), memory, rails, spec_.config.transfer,
                                   judge(spec_.config.quality))  # fmt: skip

    def transfers(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that go out, and the links they go over."""
        return self.links.transfers(), self.links.links()

    async def prefill(self, body: wire.Prefill) -> wire.Prefilled:
        """Serve one request. Raises RegaugeError for what went wrong."""
        prompt = len(body.token_ids)
        if not body.decode:
            raise RefusalError("bad_request", "decode is empty: name the ranks that take the KV cache")
        text = self.cache.prompt(body.token_ids, body.salt.encode())
        leased = await self.admission.lease(body.transfer_id, self.pages_for(prompt, body.sampling), text)
        pages = np.array(leased.pages, np.int64)
        quiet = asyncio.Event()
        out: Outgoing | None = None
        try:
            out = await self.links.start(
                body.transfer_id, body.decode, [PageTable(pages)], prompt, quiet.set)  # fmt: skip
            self.ledger.watch(out.finished)
            await out.wait_granted()
            return await self._compute(body, text, leased, out)
        except RegaugeError as error:
            if out is None:
                self.ledger.failed(error)
            raise
        finally:
            if out is not None:
                out.cancel("the request was aborted")
            else:
                quiet.set()
            await asyncio.shield(self._let_go(body, quiet))

    async def _compute(self, body: wire.Prefill, text: Prompt, leased: Leased, out: Outgoing) -> wire.Prefilled:
        started = time.monotonic()
        if leased.cached:
            out.ready((0, self.memory.layout.model.num_layers), (0, leased.cached))
        output: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        request = Request(
            id=body.request_id, token_ids=tuple(body.token_ids), sampling=body.sampling, pages=np.array(leased.pages, np.int64),
            arrived=started, computed=leased.cached, prefill_only=True)  # fmt: skip
        await self.engine.add(
            request,
            lambda o: None if output.done() else output.set_result(o),
            lambda layer, start, count: out.ready((layer, layer + 1), (start, start + count)),
        )
        waiting: list[asyncio.Future[Any]] = [output, out.finished]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not output.done():
            await out.done()  # the transfer failed while the engine computed
        first = output.result()
        if first.error is not None:
            raise first.error
        computed = time.monotonic()
        self.cache.keep(body.transfer_id, text, len(body.token_ids))
        reason = None if first.finish_reason == "prefill" else first.finish_reason
        top = list(first.top) if first.top is not None else None
        out.finish(handover.encode(Handover(first.token, first.seed, reason, first.logprob, top)))
        done = await out.done()
        log.info("prefilled", request_id=body.request_id, tokens=len(body.token_ids), cached=leased.cached, path=out.path, mode=out.mode,
                 wire_bytes=done.wire_bytes, prefill_s=round(computed - started, 6),
                 after_last_layer_s=round(time.monotonic() - computed, 6))  # fmt: skip
        return wire.Prefilled(
            first_token=first.token, computed_tokens=len(body.token_ids) - leased.cached, cached_tokens=leased.cached,
            prefill_seconds=computed - started, transfer_seconds=time.monotonic() - computed)  # fmt: skip

    async def _let_go(self, body: wire.Prefill, quiet: asyncio.Event) -> None:
        """Free the pages when neither the engine nor a write reads them any more."""
        await self.engine.abort(body.request_id)
        await quiet.wait()
        self.admission.release(body.transfer_id)
