"""The two sides of a worker: one engine, one KV pool (`core.py`), and on each side a half of the crossing.

The life of a request on the decode worker: lease pages for prompt and answer, expect the transfer, and when it has been committed
hand the pages and the first token to the engine. Where no prefill worker is named, the engine computes the prompt itself. On the prefill worker: lease
pages for the prompt, offer the transfer, compute once decode has granted its pages, mark layers ready as they are written, hand over the first token,
wait for the commit. Whatever ends a request, its pages are freed when neither the engine nor a transfer can touch them any more.

An answer that another worker began is computed as if what there is of it were prompt, but its tokens count as generated.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
import structlog

from regauge.config import Role
from regauge.engines import handover
from regauge.engines.handover import Handover
from regauge.engines.local.model import LocalModel
from regauge.engines.local.prefix import Leased, Prompt
from regauge.engines.local.scheduler import Output, Request
from regauge.errors import RegaugeError
from regauge.move.bound import Memory
from regauge.move.crossing import PageTable
from regauge.move.flow_types import LinkState as NicState
from regauge.move.inbound import InboundLinks
from regauge.move.incoming import Arrival
from regauge.move.outbound import OutboundLinks
from regauge.move.outgoing import Outgoing
from regauge.move.protocol import TransferState
from regauge.move.rails import Rails
from regauge.move.state import LinkState
from regauge.serve import wire
from regauge.serve.core import Core
from regauge.serve.core import RefusalError as RefusalError  # noqa: PLC0414  # re-exported
from regauge.serve.quality_gate import judge
from regauge.serve.receipts import Account

log = structlog.get_logger()


class Worker(abc.ABC):
    """What both sides do alike. Built inside the event loop; `core` is shared with the other side, if there is one."""

    role: Role

    def __init__(
        self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails, core: Core | None = None
    ) -> None:
        self.spec = spec_
        self.core = core or Core(spec_, memory, model)
        self.rails = rails
        self.pool, self.engine, self.scheduler = self.core.pool, self.core.engine, self.core.scheduler
        self.admission, self.ledger, self.notary = self.core.admission, self.core.ledger, self.core.notary
        self.cache, self.events = self.core.cache, self.core.events

    def admit(self, request_id: str, tokens: int, pages: int) -> None:
        """Raise RefusalError for a request that cannot be taken at all."""
        self.core.admit(self.role, request_id, tokens, pages)

    def start(self, body: wire.Generate | wire.Prefill, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a request's work as a job that DELETE can find. Raises RefusalError for one that cannot be taken at all, and closes the work."""
        try:
            text = len(body.token_ids) + len(body.generated)
            if 0 < body.sampling.max_tokens <= len(body.generated):
                raise RefusalError("bad_request", f"generated has all {body.sampling.max_tokens} tokens of the answer")
            self.admit(body.request_id, text if body.token_ids else 0, self._pages(body))
        except RefusalError:
            work.close()
            raise
        return self.core.start(body.request_id, work)

    async def close(self) -> None:
        """End all jobs, then the engine."""
        await self.core.close()

    @abc.abstractmethod
    def transfers(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that are not over, and the links."""

    def _pages(self, body: wire.Generate | wire.Prefill) -> int:
        prefill_only = self.role == "prefill"
        prompt = len(body.token_ids) + (len(body.generated) if prefill_only else 0)
        return self.core.pages_for(prompt, body.sampling, prefill_only=prefill_only)

    def _open(self, body: wire.Generate | wire.Prefill) -> Account:
        return self.notary.open(body.request_id, self.role, len(body.token_ids) + len(body.generated), body.meter)

    async def _lease(self, body: wire.Generate | wire.Prefill, account: Account) -> tuple[Prompt, Leased]:
        """Wait for the pages of a request whose text is computed here, as far as they do not hold it already; until then, it counts as to be computed."""
        self.core.uncomputed[body.request_id] = account.prompt
        text = self.cache.prompt([*body.token_ids, *body.generated], body.salt.encode())
        leased = await self._pages_of(body, text)
        account.cached = leased.cached
        self.core.uncomputed[body.request_id] -= leased.cached
        return text, leased

    async def _pages_of(self, body: wire.Generate | wire.Prefill, text: Prompt | None = None) -> Leased:
        began = time.monotonic()
        leased = await self.admission.lease(body.transfer_id, self._pages(body), text)
        self.events.note(body.transfer_id, "pages", began, time.monotonic())
        return leased

    def _queued(self, body: wire.Generate | wire.Prefill, began: float) -> float | None:
        """Return how long a request waited whose prompt was computed here; None: nothing was."""
        taken_up = self.engine.taken_up(body.request_id)
        return None if taken_up is None else taken_up - began

    def _computed(self, body: wire.Generate | wire.Prefill, account: Account, tokens: int) -> None:
        """Note that so many tokens of a request's text are there."""
        self.core.uncomputed[body.request_id] = account.prompt - tokens
        account.computed = tokens - account.cached

    def _written(self, body: wire.Generate | wire.Prefill, account: Account) -> Callable[[int, int, int], None]:
        """Return what notes the tokens that the engine has computed: for `EngineThread.add`."""
        last = self.core.scheduler.layers - 1

        def written(layer: int, start: int, count: int) -> None:
            where = "", None, None, (layer, layer + 1), (start, start + count)
            self.events.note(body.transfer_id, "computed", *self.engine.took, *where)
            if layer == last and body.request_id in self.core.uncomputed:
                self._computed(body, account, start + count)

        return written


class DecodeWorker(Worker):
    """Takes KV in, and decodes."""

    role: Role = "decode"

    def __init__(
        self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails, core: Core | None = None
    ) -> None:
        super().__init__(spec_, memory, model, rails, core)
        config = spec_.config.transfer
        self.links = InboundLinks(spec_.name, bytes.fromhex(spec_.key), memory, rails, [self.pool], config,
                                  judge(spec_.config.quality), self.events)  # fmt: skip
        self.links.on_release = self.admission.pump

    def transfers(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that come in, and the links they come over."""
        return self.links.transfers(), self.links.links()

    def nics(self) -> list[NicState]:
        """Describe the NICs that KV comes in by."""
        return self.links.flow()

    async def generate(self, body: wire.Generate, events: asyncio.Queue[wire.Event]) -> None:
        """Serve one request: its events, the last of which is a finish or an error, go into the queue."""
        account = self._open(body)
        try:
            await self._generate(body, events, account)
        except asyncio.CancelledError as error:
            events.put_nowait(self.core.error(error, account.close("cancelled")))
            raise
        except RegaugeError as error:
            events.put_nowait(self.core.error(error, account.close("failed")))
        except Exception as error:  # whatever broke, the stream must come to an end
            log.exception("a request broke", request_id=body.request_id)
            events.put_nowait(self.core.error(error, account.close("failed")))

    async def _generate(self, body: wire.Generate, events: asyncio.Queue[wire.Event], account: Account) -> None:
        arrived: Arrival | None = None
        text: Prompt | None = None
        began, queued = time.monotonic(), None
        if body.prefill:
            leased = await self._pages_of(body)
            queued = time.monotonic() - began
            arrived = await self._arrival(body, account)
        else:
            text, leased = await self._lease(body, account)
        try:
            reason: str | None = None
            generated, sampling = list(body.generated), body.sampling
            if arrived is not None:
                first = handover.decode(arrived.handover, ", ".join(body.prefill))
                events.put_nowait(
                    wire.TransferEvent(
                        arrived.path,
                        arrived.mode,
                        arrived.wire_bytes,
                        len(leased.pages),
                        arrived.seconds,
                        first.cached[0] if first.cached is not None else None,
                        arrived.spans,
                        arrived.stages,
                    )
                )
                events.put_nowait(wire.TokenEvent(first.token, first.logprob, first.top, first.seed))
                account.generated = 1
                generated.append(first.token)
                if first.seed is not None:
                    sampling = msgspec.structs.replace(sampling, seed=first.seed)
                reason = first.finish_reason or self.scheduler.ends(
                    sampling, first.token, prompt=len(body.token_ids), generated=len(generated)
                )
            if reason is None:
                request = Request(
                    id=body.request_id, token_ids=tuple(body.token_ids), pages=np.array(leased.pages, np.int64),
                    arrived=time.monotonic(), sampling=sampling, generated=tuple(generated),
                    computed=account.prompt if text is None else leased.cached)  # fmt: skip
                reason = await self._decode(request, body, text, events, account)
            final: Any = reason
            events.put_nowait(
                wire.FinishEvent(
                    final,
                    account.prompt,
                    account.generated,
                    None if body.prefill else account.cached,
                    account.close("complete"),
                    self._queued(body, began) if queued is None else queued,
                )
            )
        finally:
            await asyncio.shield(self._let_go(body))

    async def _arrival(self, body: wire.Generate, account: Account) -> Arrival:
        """Wait for the KV cache."""
        arrival = self.links.expect(body.transfer_id, body.prefill, account.prompt)
        self.ledger.watch(arrival)
        try:
            arrived = await asyncio.shield(arrival)
        except asyncio.CancelledError:
            self.links.cancel(body.transfer_id, "the request was aborted")
            if arrival.done() and arrival.exception() is None:
                self._release(body.transfer_id)  # it had arrived in the same moment
            raise
        account.crossed(account.prompt, arrived.path, arrived.counted.nbytes, arrived.counted.digest)
        return arrived

    async def _decode(
        self, request: Request, body: wire.Generate, text: Prompt | None, events: asyncio.Queue[wire.Event], account: Account
    ) -> str:  # fmt: skip
        """Relay the engine's tokens; return why they ended. `text` is computed first, if it is given."""
        outputs: asyncio.Queue[Output] = asyncio.Queue()

        def take(output: Output) -> None:
            self.events.note(body.transfer_id, "step", *self.engine.took)
            outputs.put_nowait(output)

        await self.engine.add(request, take, None if text is None else self._written(body, account))
        while True:
            output = await outputs.get()
            if output.error is not None:
                raise output.error
            if text is not None and not account.generated:
                self._computed(body, account, account.prompt)
                self.cache.keep(body.transfer_id, text, account.prompt)
            top = list(output.top) if output.top is not None else None
            seed, cached = (None, None) if account.generated else (output.seed, account.cached)
            cached = None if text is None else cached
            events.put_nowait(wire.TokenEvent(output.token, output.logprob, top, seed, cached))
            account.generated += 1
            if output.finish_reason is not None:
                return output.finish_reason

    async def _let_go(self, body: wire.Generate) -> None:
        await self.engine.abort(body.request_id)
        self._release(body.transfer_id)

    def _release(self, transfer: str) -> None:
        self.admission.release(transfer)


class PrefillWorker(Worker):
    """Computes prompts, and sends their KV out."""

    role: Role = "prefill"

    def __init__(
        self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails, core: Core | None = None
    ) -> None:
        super().__init__(spec_, memory, model, rails, core)
        self.links = OutboundLinks(spec_.name, bytes.fromhex(spec_.key), memory, rails, spec_.config.transfer,
                                   judge(spec_.config.quality), self.events)  # fmt: skip

    def transfers(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that go out, and the links they go over."""
        return self.links.transfers(), self.links.links()

    async def prefill(self, body: wire.Prefill) -> wire.Prefilled:
        """Serve one request. Raises RegaugeError for what went wrong."""
        account, began = self._open(body), time.monotonic()
        try:
            return await self._prefill(body, account, began)
        except asyncio.CancelledError:
            account.close("cancelled")
            raise
        finally:
            account.close("failed")  # whatever broke; unless it has ended otherwise

    async def _prefill(self, body: wire.Prefill, account: Account, began: float) -> wire.Prefilled:
        if not body.decode:
            raise RefusalError("bad_request", "decode is empty: name the ranks that take the KV cache")
        text, leased = await self._lease(body, account)
        pages = np.array(leased.pages, np.int64)
        quiet = asyncio.Event()
        out: Outgoing | None = None
        try:
            out = await self.links.start(
                body.transfer_id, body.decode, [PageTable(pages)], account.prompt, quiet.set)  # fmt: skip
            self.ledger.watch(out.finished)
            await out.wait_granted()
            done = await self._compute(body, text, leased, out, account)
            return msgspec.structs.replace(done, queue_seconds=self._queued(body, began))
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

    async def _compute(
        self, body: wire.Prefill, text: Prompt, leased: Leased, out: Outgoing, account: Account
    ) -> wire.Prefilled:
        started = time.monotonic()
        if leased.cached:
            out.ready((0, self.scheduler.layers), (0, leased.cached))
        output: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        request = Request(
            id=body.request_id, token_ids=tuple(body.token_ids), sampling=body.sampling, pages=np.array(leased.pages, np.int64),
            arrived=started, computed=leased.cached, generated=tuple(body.generated), prefill_only=True)  # fmt: skip
        written = self._written(body, account)

        def marked(layer: int, start: int, count: int) -> None:
            out.ready((layer, layer + 1), (start, start + count))
            written(layer, start, count)

        await self.engine.add(request, lambda o: None if output.done() else output.set_result(o), marked)
        waiting: list[asyncio.Future[Any]] = [output, out.finished]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not output.done():
            await out.done()  # the transfer failed while the engine computed
        first = output.result()
        if first.error is not None:
            raise first.error
        computed = time.monotonic()
        self._computed(body, account, account.prompt)
        self.cache.keep(body.transfer_id, text, account.prompt)
        reason = None if first.finish_reason == "prefill" else first.finish_reason
        top = list(first.top) if first.top is not None else None
        cached = (account.cached, 0, 0)
        out.finish(handover.encode(Handover(first.token, first.seed, reason, first.logprob, top, cached)))
        done = await out.done()
        account.crossed(account.prompt - out.first, out.path, done.counted.nbytes, done.counted.digest)
        log.info("prefilled", request_id=body.request_id, tokens=account.prompt, cached=account.cached, path=out.path, mode=out.mode,
                 wire_bytes=done.wire_bytes, prefill_s=round(computed - started, 6),
                 after_last_layer_s=round(time.monotonic() - computed, 6))  # fmt: skip
        return wire.Prefilled(
            first_token=first.token, computed_tokens=account.computed, cached_tokens=account.cached,
            prefill_seconds=computed - started, transfer_seconds=time.monotonic() - computed,
            receipt=account.close("complete"))  # fmt: skip

    async def _let_go(self, body: wire.Prefill, quiet: asyncio.Event) -> None:
        """Free the pages when neither the engine nor a write reads them any more."""
        await self.engine.abort(body.request_id)
        await quiet.wait()
        self.admission.release(body.transfer_id)
