"""What both sides of a worker share: one pool, one engine, the requests that are here, and what they come to.

Prefill and decode are two machines on the same pages (`worker.py`). Which requests a worker takes, `roles`, can change at any time: those under way
go on, and their pages are the pool's again when they end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, Final

import numpy as np

from regauge.config import Role
from regauge.engines.local.kv import PagedKV
from regauge.engines.local.model import LocalModel
from regauge.engines.local.prefix import PrefixCache
from regauge.engines.local.scheduler import Output, Request, Scheduler, pages_needed
from regauge.engines.local.speed import Speed
from regauge.engines.local.thread import EngineThread
from regauge.errors import EngineError, RegaugeError
from regauge.move.bound import Memory
from regauge.move.events import Recorder
from regauge.move.ledger import Ledger
from regauge.move.pages import PagePool
from regauge.serve import wire
from regauge.serve.admission import Admission
from regauge.serve.receipts import Notary

MEASURE: Final = "measurement"
MEASURED_ANSWER: Final = 4
"""Tokens."""
FADED: Final = 0.1


class RefusalError(RegaugeError):
    """A request that this worker does not take or cannot finish; carries the wire code."""

    def __init__(self, code: wire.Code, message: str) -> None:
        super().__init__(message)
        self.code: wire.Code = code


class Core:
    """One worker's pool, engine and requests. Built inside the event loop that it belongs to. Raises ConfigError, also for a receipts' key that cannot be read."""

    def __init__(self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel) -> None:
        self.spec = spec_
        self.config = spec_.config.engine(spec_.role)
        group = memory.layout.groups[0]
        self.pool = PagePool(group.pages, group.page_size)
        c = self.config
        self.cache = PrefixCache(self.pool, block=spec_.config.route.block_tokens, enabled=c.prefix_cache)
        self.admission = Admission(self.cache)
        store = PagedKV(memory, dtype=model.dtype, max_new=c.chunk_tokens + c.max_batch, max_context=c.max_context)
        self.scheduler = Scheduler(model, store, c)
        self.notary = Notary.from_spec(spec_)
        self.engine = EngineThread(self.scheduler)
        self.jobs: dict[str, asyncio.Task[Any]] = {}
        self.ledger = Ledger()
        self.events = Recorder()
        self.draining = False
        self.roles: frozenset[Role] = frozenset(spec_.roles or [spec_.role])
        self.uncomputed: dict[str, int] = {}
        """Prompt tokens that are still to be computed, by request."""

    def admit(self, role: Role, request_id: str, tokens: int, pages: int) -> None:
        """Raise RefusalError for a request that cannot be taken at all."""
        if self.draining:
            raise RefusalError("draining", f"{self.spec.name} is shutting down")
        if role not in self.roles:
            raise RefusalError("draining", f"{self.spec.name} takes no {role} requests now")
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

    async def measure(self) -> None:
        """Compute something as requests will, so that the gateway knows from the start how long a prompt takes. Raises EngineError."""
        sampling = wire.SamplingParams(max_tokens=MEASURED_ANSWER, temperature=0, ignore_eos=True)
        most = min(self.scheduler.context, self.pool.pages * self.pool.page_size)
        tokens = (0,) * max(1, min(self.config.chunk_tokens, most - MEASURED_ANSWER))
        pages = self.pages_for(len(tokens), sampling, prefill_only=False)
        leased = await self.admission.lease(MEASURE, pages)
        try:
            for _ in range(2):  # the first time much is made that is there the second time
                self.engine.speed = Speed()
                outputs: asyncio.Queue[Output] = asyncio.Queue()
                request = Request(MEASURE, tokens, sampling, np.array(leased.pages, np.int64))
                await self.engine.add(request, outputs.put_nowait)
                while (output := await outputs.get()).finish_reason is None:
                    pass
                if output.error is not None:
                    raise output.error
            self.engine.speed.fade(FADED)  # workers start together, and take each other's cores
        finally:
            await self.engine.abort(MEASURE)
            self.admission.release(MEASURE)

    def take(self, roles: Collection[Role]) -> None:
        """Take requests of these roles alone from now on."""
        self.roles = frozenset(roles)

    def pages_for(self, prompt: int, sampling: wire.SamplingParams, *, prefill_only: bool) -> int:
        """Return the pages that a request takes here."""
        need = pages_needed(prompt, sampling, self.pool.page_size, prefill_only=prefill_only)
        return min(need, self.pool.pages_for(self.scheduler.context))

    def start(self, request_id: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a request's work as a job that DELETE can find."""
        job = asyncio.create_task(work)
        self.jobs[request_id] = job
        job.add_done_callback(lambda _: self._over(request_id))
        return job

    async def abort(self, request_id: str) -> bool:
        """End a job and wait until its pages are free or in quarantine."""
        job = self.jobs.get(request_id)
        if job is None:
            return False
        job.cancel()
        await asyncio.wait([job])
        return True

    def error(self, error: BaseException, receipt: str = "") -> wire.ErrorEvent:
        """Return what the gateway is told of a failure."""
        code: wire.Code = "engine_failed"
        if isinstance(error, RefusalError):
            code = error.code
        elif isinstance(error, asyncio.CancelledError):
            code = "aborted"
        elif isinstance(error, RegaugeError) and not isinstance(error, EngineError):
            code = "transfer_failed"
        return wire.ErrorEvent(code, str(error) or "the request was aborted", self.spec.name, receipt)

    async def close(self) -> None:
        """End all jobs, then the engine."""
        self.draining = True
        for request_id in list(self.jobs):
            await self.abort(request_id)
        self.engine.stop()
        self.notary.close()

    def _over(self, request_id: str) -> None:
        self.jobs.pop(request_id, None)
        self.uncomputed.pop(request_id, None)
