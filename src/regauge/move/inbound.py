"""The decode side of transfers over real connections: drives `receiver.Receiver` and owns the page pool's transitions.

All methods belong to one event loop; chunks are checked in one thread per link.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import structlog

from regauge.config import TransferConfig
from regauge.errors import (
    DeadlineExceeded,
    LayoutError,
    PlanError,
    ProtocolError,
    Refused,
    RegaugeError,
    TransferFailed,
)
from regauge.move import messages as m
from regauge.move import prepared, tls
from regauge.move.bound import Borrowed
from regauge.move.channel import HELLO_S, Channel, Door, decode_layout, encode_layout
from regauge.move.crossing import Checker, Crossing, PageTable
from regauge.move.events import Recorder
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import LinkState as NicState
from regauge.move.flow_types import NicLimits
from regauge.move.incoming import Arrival, Incoming, Refusals
from regauge.move.lending import Lending
from regauge.move.links import InLink, flying, slots
from regauge.move.memory import Slab
from regauge.move.moved import Moved
from regauge.move.pages import Pages
from regauge.move.plane import resolve
from regauge.move.protocol import Action, Check, Delivered, Failed, FenceLink, Released, Send, TransferState
from regauge.move.rails import Rails
from regauge.move.receiver import Receiver
from regauge.move.state import LinkState
from regauge.move.tasks import Tasks
from regauge.move.threads import in_thread
from regauge.plan import Judge, Plan, check
from regauge.plan.ranks import lacking, leg

log = structlog.get_logger()
TICK_S = 0.25
FENCE_S = 5.0
READY_S = 30.0
"""Most seconds for a prefill worker to open its data connection."""
CLOSE_S = 10.0
MAX_GREETING = 32
"""Connections that may authenticate at once; a prefill worker whose connection is dropped tries again."""


class InboundLinks:
    """All links of a decode rank. `pools`: the pages of each of its state groups, leased under a transfer's name."""

    def __init__(
        self, name: str, key: bytes, memory: Borrowed, rails: Rails, pools: Sequence[Pages],
        config: TransferConfig, judge: Judge = check, events: Recorder | None = None,
    ) -> None:  # fmt: skip
        nics = [NicLimits(name, config.flow.nic_bytes_per_s, config.flow.rtt_s) for name in rails.names]
        flow = ReceiverFlow(nics, limits=config.flow)
        times = {"lease_s": config.lease_s, "offer_s": config.offer_s, "deadline_s": config.deadline_s}
        self.receiver = Receiver(**times, resume_s=config.resume_s, flow=flow)
        self.pools = tuple(pools)
        self.on_release: Callable[[], None] = lambda: None
        """Called when pages of a failed transfer have been freed."""
        self._name = name
        self._key = key
        self._memory = memory
        self._rails = rails
        self._config = config
        self._lending = Lending(rails)
        self._tls = tls.from_config(config.tls)
        self._judge = judge
        self._links: dict[str, InLink] = {}
        self._gone: dict[str, InLink] = {}
        """Links whose control connection has ended and whose writer is not fenced yet."""
        self._last: dict[str, InLink] = {}
        """The newest link of each peer, up or not."""
        self.moved = Moved()
        self.events = events or Recorder()
        self._settled = asyncio.Condition()
        """Notified when a link has ended and been fenced."""
        self._incoming: dict[str, Incoming] = {}
        self._refusals = Refusals()
        self._tasks = Tasks()
        self._door: Door | None = None
        self._greeting: set[asyncio.Task[None]] = set()
        """Connections that have not introduced themselves yet."""

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen for prefill workers on a plane (an address, network or interface); return the address."""
        self._door = Door(self._take_in, await asyncio.to_thread(resolve, host), port)
        self._tasks.spawn(self._tick())
        return self._door.address

    async def close(self) -> None:
        """Stop listening and end all links; transfers in flight fail."""
        if self._door is not None:
            await self._door.close()
        for task in self._greeting:
            task.cancel()
        await asyncio.gather(*self._greeting, return_exceptions=True)
        self.receiver.give_up()
        for link in list(self._links.values()):
            link.channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S), self._settled:
                await self._settled.wait_for(lambda: not self._links and not self._gone)
        await self._tasks.end()

    def expect(
        self, transfer: str, peers: Sequence[str], tokens: int, *, first: int = 0, origins: Sequence[int] = (),
        tenant: str = "", due_s: float | None = None,
    ) -> asyncio.Future[Arrival]:  # fmt: skip
        """Wait for tokens [first, tokens) from every peer, in the pages that `transfer` has leased from each pool.

        `origins`: the token that each group's table begins with (default: 0). `tenant`, and `due_s` seconds in which the transfer
        should be complete, are for flow control. The future raises TransferFailed with the reason; the
        pages are freed here then. When it succeeds they are committed, and the caller frees them after use.
        """
        starts = list(origins) or [0] * len(self.pools)
        owned = [pool.owned(transfer) for pool in self.pools]
        tables = [m.Table(pages, origin) for pages, origin in zip(owned, starts, strict=True)]
        future: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: None if f.cancelled() else f.exception())
        now = time.monotonic()
        due = None if due_s is None else now + due_s
        actions = self.receiver.expect(transfer, peers, tokens, tables, now, first=first, tenant=tenant, due=due)
        own = tuple(PageTable(np.array(t.pages, np.int64), t.origin) for t in tables)
        self._incoming[transfer] = Incoming(own, future, tuple(peers), tokens)
        self.events.note(transfer, "expect", now)
        self._run(actions)
        self._cover(transfer)
        return future

    def transfers(self) -> list[TransferState]:
        """Describe each transfer that is not over."""
        return self.receiver.transfers(time.monotonic())

    def links(self) -> list[LinkState]:
        """Describe each link, those included that are gone and not fenced yet."""
        return [x.state("up") for x in self._links.values()] + [x.state("fencing") for x in self._gone.values()]

    def repeated(self) -> tuple[int, int]:
        """Count chunks that were asked for again and legs that went on over a new link, over all links since the start."""
        up = [link.channel for link in self._links.values()]
        return self.moved.resent + sum(x.resent for x in up), self.moved.resumed + sum(x.resumed for x in up)

    def flying(self) -> int:
        """Return the most bytes from other hosts that have landed and were not announced yet."""
        return flying([*self._links.values(), *self._gone.values()])

    def cancel(self, transfer: str, reason: str) -> None:
        """The request is over; a transfer that has ended already is ignored."""
        self._run(self.receiver.cancel(transfer, reason, time.monotonic()))

    def flow(self) -> list[NicState]:
        """Describe what each NIC of this side has granted and what waits for it."""
        return [] if self.receiver.flow is None else self.receiver.flow.links()

    def _cover(self, transfer: str) -> None:
        """Give a transfer up that waits for a refused peer, or whose peers do not send what this rank keeps, once all their links stand."""
        incoming = self._incoming.get(transfer)
        if incoming is None:
            return
        if refused := self._refusals.reason(incoming.peers, time.monotonic()):
            self.cancel(transfer, refused)
            return
        if incoming.covered or not all(peer in self._links for peer in incoming.peers):
            return
        incoming.covered = True
        gone = lacking(self._memory.layout, [self._links[peer].checker.crossing.plan for peer in incoming.peers])
        if gone:
            reason = f"{', '.join(incoming.peers)} together do not send {'; '.join(gone)}: name every prefill rank"
            self.cancel(transfer, reason)

    def _run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    if (link := self._links.get(peer)) is not None:
                        if isinstance(message, m.Grant) and self._lending.checked:
                            incoming = self._incoming[message.transfer]
                            ranges = link.checker.lent(link.modes, incoming.tables, (message.first, incoming.tokens))
                            self._lending.lend(message.transfer, message.epoch, link.sessions, ranges)
                        self.events.word(peer, message, "sent")  # before: its taking may come first on another core
                        link.channel.send(message)
                case Check(peer):
                    link = self._links[peer]
                    self._tasks.spawn(self._check(link, action), link.checks)
                case Delivered(transfer):
                    self._delivered(transfer, action)
                case Failed(transfer, reason, held):
                    self._failed(transfer, reason, held=held)
                case Released(transfer):
                    self._release(transfer)
                    log.info("pages released after fence", transfer=transfer)
                case FenceLink(peer):
                    self._fence(peer)
                case _:
                    raise AssertionError(f"a receiver does not {action!r}")

    def _delivered(self, transfer: str, done: Delivered) -> None:
        incoming = self._incoming.pop(transfer)
        self.events.note(transfer, "delivered", time.monotonic())
        self._lending.take_back(transfer)
        for pool in self.pools:
            pool.commit(transfer)
        link = self._last[incoming.peers[0]]
        a = done.handover, link.path, link.modes[0], done.wire_bytes, done.seconds, done.counted, done.stages
        incoming.future.set_result(Arrival(*a, incoming.spans))

    def _failed(self, transfer: str, reason: str, *, held: bool) -> None:
        incoming = self._incoming.pop(transfer)
        self.events.note(transfer, "failed", time.monotonic(), text=reason)
        if held:
            for pool in self.pools:
                pool.quarantine(transfer)
        else:
            self._release(transfer)
        log.warning("transfer failed", transfer=transfer, peers=incoming.peers, reason=reason, quarantined=held)
        if not incoming.future.done():
            incoming.future.set_exception(TransferFailed(reason))

    def _release(self, transfer: str) -> None:
        self._lending.take_back(transfer)
        for pool in self.pools:
            pool.release(transfer)
        self.on_release()

    def _fence(self, peer: str) -> None:
        if (link := self._links.get(peer)) is not None:
            link.channel.close()  # its reader notices, and comes back here with the link gone
            return
        gone = self._gone.get(peer)
        if gone is not None and not gone.fencing:
            gone.fencing = True
            self._tasks.spawn(self._fence_gone(gone))

    async def _fence_gone(self, link: InLink) -> None:
        while not await asyncio.to_thread(self._rails.fence_inbound, link.sessions, FENCE_S):
            log.warning("a writer cannot be fenced yet; its pages stay quarantined", peer=link.peer)
            await asyncio.sleep(TICK_S)  # where the answer comes at once
        if link.checks:
            await asyncio.gather(*link.checks, return_exceptions=True)
        link.thread.shutdown(wait=False)
        await asyncio.to_thread(self._rails.unregister, link.regions)
        link.staging.close()
        del self._gone[link.peer]
        self._run(self.receiver.link_fenced(link.peer, time.monotonic()))
        async with self._settled:
            self._settled.notify_all()

    def _take_in(self, sock: socket.socket) -> None:
        if len(self._greeting) < MAX_GREETING:
            self._tasks.spawn(self._accept(sock), self._greeting)
        else:
            sock.close()

    async def _accept(self, sock: socket.socket) -> None:
        channel: Channel | None = None
        link: InLink | None = None
        reason = "closed"
        try:
            channel = await Channel.accept(sock, self._key, tls=self._tls)
            link = await self._greet(channel)
            self._greeting -= {asyncio.current_task()}
            self._links[link.peer] = self._last[link.peer] = link
            log.info("link up", peer=link.peer, path=link.path, mode=link.modes[0])
            self._run(self.receiver.link_up(link.peer, link.checker.crossing.parts, link.instance, time.monotonic()))
            for transfer in list(self._incoming):
                self._cover(transfer)
            while True:
                message = await channel.receive()
                self.events.word(link.peer, message, "taken")
                self._run(self.receiver.on_message(link.peer, message, time.monotonic()))
                self.moved.heard(message, link.path, far=link.far)
        except RegaugeError as error:
            reason = str(error)
            log.info("link ended", peer=link.peer if link else channel and channel.peer, reason=reason)
        finally:
            if channel is not None:
                channel.close()
            if link is not None:
                del self._links[link.peer]
                self._gone[link.peer] = link
                self.moved.past(link.channel)
                self._run(
                    self.receiver.link_lost(link.peer, f"lost prefill worker {link.peer}: {reason}", time.monotonic())
                )

    async def _greet(self, channel: Channel) -> InLink:
        hello = await channel.hello()
        try:
            return await self._judged(channel, hello)
        except (LayoutError, PlanError, Refused) as error:
            self._refusals.add(hello.worker, str(error), time.monotonic())
            for transfer in list(self._incoming):
                self._cover(transfer)
            raise

    async def _judged(self, channel: Channel, hello: m.Hello) -> InLink:
        try:
            if hello.role != "prefill":
                raise ProtocolError(f"{hello.worker} is a {hello.role} worker; only prefill workers connect here")
            await self._supersede(hello.worker)
            layout = await asyncio.to_thread(decode_layout, hello.layout)
            verdict = await asyncio.to_thread(self._judge, layout, self._memory.layout)
            if verdict.path == "REFUSED":
                raise Refused(tuple(str(r) for r in verdict.refusals))
            plan = await asyncio.to_thread(leg, layout, self._memory.layout)
            self._refusals.lift(hello.worker)  # before it knows: what it then offers is expected
        except (ProtocolError, LayoutError, PlanError, Refused) as error:
            channel.send(m.Refuse([str(error)[:4_000]]))
            raise
        # A peer that maps the pages writes them directly, unless told otherwise: its slots stay empty.
        direct = self._memory.reachable and self._rails.caps.maps_memory and self._config.mode in ("auto", "fused")
        size = 4096 if direct else self._config.staging_bytes
        staging = await in_thread(partial(Slab, size, f"staging:{hello.worker}"), Slab.close)
        try:
            return await self._finish_greeting(channel, hello, plan, staging)
        except BaseException:  # undone whatever broke, also when cancelled
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

    async def _finish_greeting(self, channel: Channel, hello: m.Hello, plan: Plan, staging: Slab) -> InLink:
        offered = slots(staging)
        regions = self._rails.register(staging)  # by name: of two connections of one worker at once, one fails here
        try:
            channel.send(m.Hello(m.VERSION, self._name, self._rails.session, "decode",
                                 encode_layout(self._memory.layout), self._rails.export(), offered, self.receiver.epoch))  # fmt: skip
            async with asyncio.timeout(READY_S):
                ready = await channel.receive()
            if isinstance(ready, m.Refuse):
                raise Refused(tuple(ready.reasons))
            if not isinstance(ready, m.Ready) or ready.pair != plan.verdict.pair or len(ready.modes) != len(plan.pairs):
                raise ProtocolError(f"{hello.worker} does not agree on the pair of layouts: {ready!r}")
            if len(ready.sessions) != len(self._rails.transports):
                raise ProtocolError(f"{hello.worker} has {len(ready.sessions)} data connections, not one for each NIC")
            keys = prepared.TransferKeys(self._key, ready.sessions[0])
            checker = Checker(Crossing(plan, keys, threads=self._config.kernel_threads), self._memory, offered)
            if "staged" in ready.modes:
                self._lending.slots(ready.sessions, offered)
        except BaseException as error:  # undone whatever broke, also when cancelled
            await asyncio.to_thread(self._rails.unregister, regions)
            if isinstance(error, TimeoutError):
                reason = f"{hello.worker} did not open its data connection within {READY_S:g} s"
                raise DeadlineExceeded(reason) from error
            raise
        return InLink(hello.worker, channel, staging, regions, checker, plan.verdict.path, tuple(ready.modes), ready.sessions,
                     hello.instance, ThreadPoolExecutor(1, thread_name_prefix=f"check-{hello.worker}"),
                     far=channel.is_far and self._rails.kind != "shm")  # fmt: skip

    async def _check(self, link: InLink, chunk: Check) -> None:
        incoming = self._incoming.get(chunk.transfer)
        error, agrees, begun = "", True, time.monotonic()
        if incoming is not None:
            loop = asyncio.get_running_loop()
            try:
                agrees, spans = await loop.run_in_executor(link.thread, link.checker.check, chunk, incoming.tables)
                incoming.spans += spans
            except Exception as failure:  # whatever broke, this request fails and the slot is given back
                log.exception("a chunk could not be brought into its pages", transfer=chunk.transfer)
                error = f"a chunk could not be brought into its pages: {failure}"
            self.events.checked(chunk, begun, error or ("" if agrees else "not what was sent"))
            if not agrees:
                log.warning("a chunk is not what was sent", peer=link.peer, transfer=chunk.transfer, seq=chunk.seq)
        try:
            self._run(self.receiver.checked(chunk, time.monotonic(), agrees=agrees, error=error))
        except ProtocolError as failure:
            log.warning("the peer broke the protocol", peer=link.peer, error=str(failure))
            link.channel.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._run(self.receiver.tick(time.monotonic()))
