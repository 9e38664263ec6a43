"""The decode side of transfers over real connections: drives `receiver.Receiver` and owns the page pool's transitions.

All methods belong to one event loop; scatters run in one thread per link.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import structlog

from regauge.config import TransferConfig
from regauge.errors import DeadlineExceeded, LayoutError, ProtocolError, Refused, RegaugeError, TransferFailed
from regauge.layout.spec import Layout
from regauge.move import messages as m
from regauge.move.channel import HELLO_S, Channel, decode_layout, encode_layout
from regauge.move.crossing import Memory, Scatterer
from regauge.move.memory import Slab
from regauge.move.pages import PagePool
from regauge.move.protocol import Action, Delivered, Failed, FenceLink, Released, Scatter, Send
from regauge.move.receiver import Receiver
from regauge.move.transport import Region as SlabRegion
from regauge.move.transport import Transport
from regauge.plan import Judge, check
from regauge.plan.cost import Mode
from regauge.plan.tiles import Int64

log = structlog.get_logger()
TICK_S = 0.25
FENCE_S = 5.0
READY_S = 30.0
"""Most seconds for a prefill worker to open its data connection."""
CLOSE_S = 10.0
MIN_SLOT = 1 << 20
MAX_SLOTS = 16
MAX_GREETING = 32
"""Connections that may authenticate at once; a prefill worker whose connection is dropped tries again."""


@dataclass(eq=False)
class _Link:
    peer: str
    channel: Channel
    staging: Slab
    region: SlabRegion
    scatterer: Scatterer
    path: str
    mode: Mode
    session: str
    thread: ThreadPoolExecutor
    scatters: set[asyncio.Task[None]] = field(default_factory=set)
    fencing: bool = False


@dataclass(eq=False)
class _Incoming:
    pages: Int64
    origin: int
    future: asyncio.Future[Arrival]
    peer: str


@dataclass(frozen=True)
class Arrival:
    """A transfer that is complete: its pages are committed."""

    handover: bytes
    path: str
    mode: Mode
    wire_bytes: int
    seconds: float


class InboundLinks:
    """All links of a decode worker."""

    def __init__(
        self, name: str, key: bytes, memory: Memory, transport: Transport, pool: PagePool, config: TransferConfig,
        judge: Judge = check,
    ) -> None:  # fmt: skip
        self.receiver = Receiver(lease_s=config.lease_s, offer_s=config.offer_s, deadline_s=config.deadline_s)
        self.pool = pool
        self.on_release: Callable[[], None] = lambda: None
        """Called when pages of a failed transfer have been freed."""
        self._name = name
        self._key = key
        self._memory = memory
        self._transport = transport
        self._config = config
        self._judge = judge
        self._links: dict[str, _Link] = {}
        self._gone: dict[str, _Link] = {}
        """Links whose control connection has ended and whose writer is not fenced yet."""
        self._settled = asyncio.Condition()
        """Notified when a link has ended and been fenced."""
        self._incoming: dict[str, _Incoming] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._greeting = 0
        """Connections that have not introduced themselves yet."""

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen for prefill workers; return the address."""
        self._server = await asyncio.start_server(self._accept, host, port)
        self._spawn(self._tick())
        bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return bound

    async def close(self) -> None:
        """Stop listening and end all links; transfers in flight fail."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), self._settled:
                await self._settled.wait_for(lambda: not self._links and not self._gone)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def expect(self, transfer: str, peer: str, tokens: int, *, origin: int = 0) -> asyncio.Future[Arrival]:
        """Wait for tokens [origin, tokens) in the pages that `transfer` has leased from the pool.

        The future raises TransferFailed with the reason; the pages are freed here then. When it succeeds they are committed, and the
        caller frees them after use.
        """
        pages = self.pool.owned(transfer)
        future: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: None if f.cancelled() else f.exception())
        actions = self.receiver.expect(transfer, peer, tokens, tuple(pages), time.monotonic(), origin=origin)
        self._incoming[transfer] = _Incoming(np.array(pages, np.int64), origin, future, peer)
        self._run(actions)
        return future

    def cancel(self, transfer: str, reason: str) -> None:
        """The request is over; a transfer that has ended already is ignored."""
        self._run(self.receiver.cancel(transfer, reason, time.monotonic()))

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    if peer in self._links:
                        self._links[peer].channel.send(message)
                case Scatter(peer):
                    link = self._links[peer]
                    self._spawn(self._scatter(link, action), link.scatters)
                case Delivered(transfer):
                    self._delivered(transfer, action)
                case Failed(transfer, reason, held):
                    self._failed(transfer, reason, held=held)
                case Released(transfer):
                    self.pool.release(transfer)
                    self.on_release()
                    log.info("pages released after fence", transfer=transfer)
                case FenceLink(peer):
                    self._fence(peer)
                case _:
                    raise AssertionError(f"a receiver does not {action!r}")

    def _delivered(self, transfer: str, done: Delivered) -> None:
        incoming = self._incoming.pop(transfer)
        link = self._links[incoming.peer]
        self.pool.commit(transfer)
        incoming.future.set_result(Arrival(done.handover, link.path, link.mode, done.wire_bytes, done.seconds))

    def _failed(self, transfer: str, reason: str, *, held: bool) -> None:
        incoming = self._incoming.pop(transfer)
        if held:
            self.pool.quarantine(transfer)
        else:
            self.pool.release(transfer)
            self.on_release()
        log.warning("transfer failed", transfer=transfer, peer=incoming.peer, reason=reason, quarantined=held)
        if not incoming.future.done():
            incoming.future.set_exception(TransferFailed(reason))

    def _fence(self, peer: str) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.channel.close()  # its reader notices, and comes back here with the link gone
            return
        gone = self._gone.get(peer)
        if gone is not None and not gone.fencing:
            gone.fencing = True
            self._spawn(self._fence_gone(gone))

    async def _fence_gone(self, link: _Link) -> None:
        while not await asyncio.to_thread(self._transport.fence_inbound, link.session, FENCE_S):
            log.warning("a writer cannot be fenced yet; its pages stay quarantined", peer=link.peer)
        if link.scatters:
            await asyncio.gather(*link.scatters, return_exceptions=True)
        link.thread.shutdown(wait=False)
        await asyncio.to_thread(self._transport.unregister, link.region)
        link.staging.close()
        self._run(self.receiver.link_fenced(link.peer))
        del self._gone[link.peer]
        async with self._settled:
            self._settled.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername"))
        link: _Link | None = None
        reason = "closed"
        if self._greeting >= MAX_GREETING:
            writer.close()
            return
        self._greeting += 1
        try:
            try:
                channel = await Channel.accept(reader, writer, self._key)
                link = await self._greet(channel)
            finally:
                self._greeting -= 1
            self._links[link.peer] = link
            self.receiver.link_up(link.peer, len(link.scatterer.layers))
            log.info("link up", peer=link.peer, path=link.path, mode=link.mode)
            while True:
                self._run(self.receiver.on_message(link.peer, await channel.receive(), time.monotonic()))
        except RegaugeError as error:
            reason = str(error)
            log.info("link ended", peer=link.peer if link else peer, reason=reason)
        finally:
            writer.close()
            if link is not None:
                del self._links[link.peer]
                self._gone[link.peer] = link
                self._run(
                    self.receiver.link_lost(link.peer, f"lost prefill worker {link.peer}: {reason}", time.monotonic())
                )

    async def _greet(self, channel: Channel) -> _Link:
        hello = await channel.hello()
        try:
            if hello.role != "prefill":
                raise ProtocolError(f"{hello.worker} is a {hello.role} worker; only prefill workers connect here")
            await self._supersede(hello.worker)
            layout = decode_layout(hello.layout)
            verdict = self._judge(layout, self._memory.layout)
            if verdict.path == "REFUSED":
                raise Refused(tuple(str(r) for r in verdict.refusals))
        except (ProtocolError, LayoutError, Refused) as error:
            channel.send(m.Refuse([str(error)[:4_000]]))
            raise
        # A peer that maps the pages writes them directly, unless told otherwise: its slots stay empty.
        direct = self._transport.caps.maps_memory and self._config.mode in ("auto", "fused")
        size = 4096 if direct else self._config.staging_bytes
        staging = await asyncio.to_thread(Slab, size, f"staging:{hello.worker}")
        try:
            return await self._finish_greeting(channel, hello, layout, verdict.path, verdict.pair, staging)
        except BaseException:
            staging.close()
            raise

    async def _supersede(self, worker: str) -> None:
        """End an earlier connection of the same worker, and wait until nothing of it can land any more."""
        if worker in self._links:
            self._links[worker].channel.close()
        try:
            async with asyncio.timeout(HELLO_S / 2), self._settled:
                await self._settled.wait_for(lambda: worker not in self._links and worker not in self._gone)
        except TimeoutError:
            raise ProtocolError(f"the last connection of {worker} cannot be fenced yet; try again later") from None

    async def _finish_greeting(
        self, channel: Channel, hello: m.Hello, layout: Layout, path: str, pair: str, staging: Slab
    ) -> _Link:
        slots = max(1, min(MAX_SLOTS, staging.nbytes // MIN_SLOT))
        offered = m.Staging(staging.address, staging.nbytes // slots // 64 * 64, slots)
        scatterer = Scatterer(layout, self._memory, offered, threads=self._config.kernel_threads)
        region = self._transport.register(staging)  # by name: of two connections of one worker at once, one fails here
        try:
            channel.send(m.Hello(m.VERSION, self._name, "decode", encode_layout(self._memory.layout),
                                 self._transport.export(), offered))  # fmt: skip
            async with asyncio.timeout(READY_S):
                ready = await channel.receive()
            if isinstance(ready, m.Refuse):
                raise Refused(tuple(ready.reasons))
            if not isinstance(ready, m.Ready) or ready.pair != pair:
                raise ProtocolError(f"{hello.worker} does not agree on the pair of layouts: {ready!r}")
        except BaseException as error:
            await asyncio.to_thread(self._transport.unregister, region)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{hello.worker} did not open its data connection within {READY_S:g} s"
                ) from error
            raise
        return _Link(hello.worker, channel, staging, region, scatterer, path, ready.mode, ready.session,
                     ThreadPoolExecutor(1, thread_name_prefix=f"scatter-{hello.worker}"))  # fmt: skip

    async def _scatter(self, link: _Link, chunk: Scatter) -> None:
        incoming = self._incoming.get(chunk.transfer)
        error = ""
        if incoming is not None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(link.thread, link.scatterer.scatter, chunk, incoming.pages, incoming.origin)
            except Exception as failure:  # whatever broke, this request fails and the slot is given back
                log.exception("a chunk could not be brought into its pages", transfer=chunk.transfer)
                error = f"a chunk could not be brought into its pages: {failure}"
        try:
            self._run(self.receiver.scattered(chunk.transfer, chunk.seq, chunk.slot, time.monotonic(), error=error))
        except ProtocolError as failure:
            log.warning("the peer broke the protocol", peer=link.peer, error=str(failure))
            link.channel.close()

    def _spawn(self, work: object, also: set[asyncio.Task[None]] | None = None) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        for group in (self._tasks, also):
            if group is not None:
                group.add(task)
                task.add_done_callback(group.discard)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._run(self.receiver.tick(time.monotonic()))
