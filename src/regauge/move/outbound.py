"""The prefill side of transfers over real connections: drives `sender.Sender`.

All methods belong to one event loop; writes run in a few threads per link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from regauge.config import TransferConfig
from regauge.errors import ProtocolError, Refused, RegaugeError, TransferFailed, TransportError
from regauge.layout.spec import Layout
from regauge.move import messages as m
from regauge.move import tls
from regauge.move.bound import Borrowed, exports
from regauge.move.channel import Channel, decode_layout, encode_layout
from regauge.move.costs import read
from regauge.move.crossing import DEPTH, Crossing, PageTable, Terms, Writer
from regauge.move.events import Recorder
from regauge.move.flow_sender import Pace
from regauge.move.links import OutLink
from regauge.move.memory import Slab
from regauge.move.moved import Moved
from regauge.move.outgoing import Outgoing
from regauge.move.plane import Plane, resolve
from regauge.move.prepared import TransferKeys
from regauge.move.protocol import (
    Action,
    Delivered,
    Failed,
    Granted,
    Released,
    Relink,
    Send,
    TransferState,
    Write,
)
from regauge.move.rails import Connections, Rails
from regauge.move.sender import Sender
from regauge.move.state import LinkState
from regauge.move.threads import in_thread
from regauge.move.transport import Region
from regauge.plan import Judge, Plan, check
from regauge.plan.cost import DEFAULTS, Setting
from regauge.plan.ranks import leg

log = structlog.get_logger()
TICK_S = 0.25
BURST = 4 << 20
"""Least bytes that leave at line rate after a pause."""
FENCE_S = 10.0
TICKET_S = 5.0
"""Seconds after its deadline in which a transport must end a post."""
RELINK_S = (0.02, 0.5)
"""First and longest pause between two attempts to make a link anew."""
GATHER_THREADS = 2
"""Chunks of a link that are gathered and digested at once; those that the transport carries take no thread."""

Address = tuple[str, int]


class OutboundLinks:
    """All links of a prefill rank."""

    def __init__(
        self, name: str, key: bytes, memory: Borrowed, rails: Rails, config: TransferConfig,
        judge: Judge = check, events: Recorder | None = None,
    ) -> None:  # fmt: skip
        flow = config.flow
        self.sender = Sender(
            offer_s=config.offer_s,
            deadline_s=config.deadline_s,
            resume_s=config.resume_s,
            paces=[Pace(flow.nic_bytes_per_s, max(BURST, flow.quantum_bytes)) for _ in rails.transports],
        )
        self._name = name
        self._key = key
        self._memory = memory
        self._rails = rails
        self._config = config
        self._tls = tls.from_config(config.tls)
        self._constants = read(Path(config.costs)) if config.costs else DEFAULTS
        self._judge = judge
        self.moved = Moved()
        self.events = events or Recorder()
        self._links: dict[str, OutLink] = {}
        self._addresses: dict[str, Address] = {}
        self._opening: dict[str, asyncio.Task[OutLink]] = {}
        self._relinking: dict[str, asyncio.Task[None]] = {}
        self._transfers: dict[str, Outgoing] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._waking: asyncio.TimerHandle | None = None

    async def start(
        self, transfer: str, peers: Mapping[str, Address], tables: Sequence[PageTable], tokens: int,
        free: Callable[[], None],
    ) -> Outgoing:  # fmt: skip
        """Offer a transfer of `tokens` tokens to some decode ranks; the engine writes it into `tables`, one for each state group.

        `free` is called once, when no write reads the pages any more. Raises Refused, AuthError, TransportError or ProtocolError
        when there is no link and none can be made; `free` is not called then.
        """
        links = [await self._link(peer, address) for peer, address in peers.items()]
        if transfer in self._transfers:
            raise ProtocolError(f"transfer {transfer!r} is under way already")
        future: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.exception())  # an error nobody waits for is still logged by `run`
        writer = links[0].writer
        verdict = writer.crossing.plan.verdict
        out = Outgoing(transfer, tuple(tables), verdict.path, writer.modes[0], self, future, free)
        self._transfers[transfer] = out
        try:
            actions = self.sender.offer(transfer, list(peers), tokens, time.monotonic())
        except ProtocolError:
            del self._transfers[transfer]
            raise
        self.run(actions)
        return out

    async def connect(self, peer: str, address: Address) -> None:
        """Make the link to a decode rank ahead of its first transfer. Raises as `start` does."""
        await self._link(peer, address)

    def transfers(self) -> list[TransferState]:
        """Describe each transfer that is not over."""
        return self.sender.transfers(time.monotonic())

    def links(self) -> list[LinkState]:
        """Describe each link, and the peers that transfers wait for."""
        up = [link.state(self.sender.free_slots(link.peer)) for link in self._links.values()]
        return up + [LinkState(peer, "relinking") for peer in self._relinking if peer not in self._links]

    def run(self, actions: Iterable[Action]) -> None:
        """Carry actions out."""
        for action in actions:
            match action:
                case Send(peer, message):
                    if peer in self._links:
                        self.events.word(peer, message, "sent")  # before: its taking may come first on another core
                        self._links[peer].channel.send(message)
                case Write(peer):
                    link = self._links[peer]
                    if not link.closing:  # else `link_lost` comes, and begins anew or ends the transfer
                        task = asyncio.create_task(self._write(link, action))
                        link.writes.add(task)
                        task.add_done_callback(link.writes.discard)
                case Relink(peer):
                    if peer not in self._relinking:
                        self._relinking[peer] = asyncio.create_task(self._relink(peer))
                case Granted(transfer, first):
                    self._transfers[transfer].first = first
                    self._transfers[transfer].granted.set()
                case Delivered() | Failed() | Released():
                    self._ended(action)
                case _:
                    raise AssertionError(f"a sender does not {action!r}")
        if self.sender.wake is not None and self._waking is None:
            delay = max(0.0, self.sender.wake - time.monotonic())
            self._waking = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._waking = None
        self.run(self.sender.resume(time.monotonic()))

    def _ended(self, action: Delivered | Failed | Released) -> None:
        if not isinstance(action, Released):
            name, reason = ("failed", action.reason) if isinstance(action, Failed) else ("delivered", "")
            self.events.note(action.transfer, name, time.monotonic(), text=reason)
        held = isinstance(action, Failed) and action.held
        out = self._transfers[action.transfer] if held else self._transfers.pop(action.transfer)
        if not held:
            out._free()
        if isinstance(action, Delivered):
            out._done.set_result(action)
        elif isinstance(action, Failed):
            log.warning("transfer failed", transfer=action.transfer, reason=action.reason)
            out._done.set_exception(TransferFailed(action.reason))

    async def close(self) -> None:
        """End all links; transfers in flight fail."""
        opening = list(self._opening.values())
        for task in (self._ticker, *self._relinking.values(), *opening):
            if task is not None:
                task.cancel()
        if self._waking is not None:
            self._waking.cancel()
        self.run(self.sender.give_up("the prefill worker is closing"))
        links = list(self._links.values())
        for link in links:
            link.channel.close()
        await asyncio.gather(*opening, *(link.task for link in links if link.task), return_exceptions=True)

    async def _link(self, peer: str, address: Address) -> OutLink:
        """Return the link to a peer, once it stands: who asks, and is cancelled, leaves it to the others and to those to come."""
        link = self._links.get(peer)
        if link is not None and not link.closing:
            return link
        task = self._opening.get(peer)
        if task is None:
            task = self._opening[peer] = asyncio.create_task(self._make(peer, address))
            task.add_done_callback(lambda done: self._opening.pop(peer) and (done.cancelled() or done.exception()))
        return await asyncio.shield(task)

    async def _make(self, peer: str, address: Address) -> OutLink:
        old = self._links.get(peer)
        if old is not None and old.task is not None:
            await asyncio.wait([old.task])
        link = await self._open(peer, address)
        plan = link.writer.crossing.plan
        link.channel.send(m.Ready(plan.verdict.pair, list(link.writer.modes), link.data.sessions))
        self._links[peer] = link
        self._addresses[peer] = address
        terms = replace(link.writer.terms(), ways=link.data.ways)
        self.run(self.sender.link_up(peer, terms, link.instance, link.epoch))
        link.task = asyncio.create_task(self._serve(link))
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        return link

    async def _relink(self, peer: str) -> None:
        """Make a link anew for the transfers that wait for it; they stop waiting by themselves."""
        pause = RELINK_S[0]
        try:
            while self.sender.waits_for(peer):
                try:
                    await self._link(peer, self._addresses[peer])
                except Refused as error:
                    self.run(self.sender.link_refused(peer, f"no new link to {peer}: {error}"))
                except RegaugeError as error:  # nobody is there yet, or the old link is not fenced yet
                    log.info("no link yet", peer=peer, error=str(error))
                await asyncio.sleep(pause)
                pause = min(2 * pause, RELINK_S[1])
        finally:
            del self._relinking[peer]

    async def _open(self, peer: str, address: Address) -> OutLink:
        channel = await Channel.open(*address, self._key, plane=await self._plane(), tls=self._tls)
        try:
            channel.send(
                m.Hello(
                    m.VERSION,
                    self._name,
                    self._rails.session,
                    "prefill",
                    encode_layout(self._memory.layout),
                    self._rails.export(),
                )
            )
            hello = await channel.hello()
            if hello.worker != peer or hello.role != "decode":
                raise ProtocolError(f"{address} is {hello.role} worker {hello.worker!r}, not decode worker {peer!r}")
            layout = await asyncio.to_thread(decode_layout, hello.layout)
            verdict = await asyncio.to_thread(self._judge, self._memory.layout, layout)
            if verdict.path == "REFUSED":
                raise Refused(tuple(str(r) for r in verdict.refusals))
            plan = await asyncio.to_thread(self._plan, peer, layout)
            connect = partial(self._rails.connect, hello.exports, FENCE_S, peer=peer)
            data = await in_thread(connect, Connections.close)
            return await in_thread(partial(self._prepare, hello, channel, data, plan), self._drop)
        except Refused as error:  # decode must not wait for what this side will not offer
            channel.send(m.Refuse([str(error)[:4_000]]))
            channel.close()
            raise
        except BaseException:  # closed whatever broke, also when cancelled
            channel.close()
            raise

    async def _plane(self) -> Plane:
        return await asyncio.to_thread(resolve, self._config.control or self._config.host)

    def _plan(self, peer: str, layout: Layout) -> Plan:
        plan = leg(self._memory.layout, layout)
        if not plan.lanes:
            raise Refused((f"nothing of what {peer} keeps is sent from {self._name}: leave it out of the transfer",))
        return plan

    def _prepare(self, hello: m.Hello, channel: Channel, data: Connections, plan: Plan) -> OutLink:
        peer, staging = hello.worker, hello.staging
        slot: Slab | None = None
        regions: tuple[Region, ...] = ()
        try:
            if staging is not None:
                slot = self._slot(peer, staging)
                regions = self._rails.register(slot)
            setting = Setting(
                self._rails.medium, mode=self._config.mode, reachable=exports(plan.decode, data.peers[0]),
                registered=self._memory.reachable,
            )  # fmt: skip
            terms = Terms(self._rails.caps.maps_memory, setting, self._constants)
            keys = TransferKeys(self._key, data.sessions[0])
            crossing = Crossing(plan, keys, threads=self._config.kernel_threads)
            writer = Writer(crossing, self._memory, data.peers, staging, terms=terms, slot=slot)
            log.info("link opened", peer=peer, modes=writer.modes, why=writer.why)
        except BaseException:  # undone whatever broke
            data.close()
            self._withdraw(slot, regions)
            raise
        threads = ThreadPoolExecutor(min(GATHER_THREADS, writer.depth), thread_name_prefix=f"write-{peer}")
        return OutLink(peer, channel, data, writer, slot, regions, threads, hello.instance, hello.epoch,
                       far=channel.is_far and self._rails.kind != "shm")  # fmt: skip

    def _slot(self, peer: str, staging: m.Staging) -> Slab:
        if staging.slot_bytes > (most := self._config.staging_bytes):
            raise ProtocolError(
                f"{peer} offers slots of {staging.slot_bytes} bytes, more than transfer.staging_bytes, {most}"
            )
        return Slab(DEPTH * staging.slot_bytes, f"slot:{peer}")

    def _drop(self, link: OutLink) -> None:
        link.thread.shutdown(wait=False)
        link.data.close()
        self._withdraw(link.slot, link.regions)

    async def _serve(self, link: OutLink) -> None:
        """Read the link's messages until it ends, then let its transfers wait for a new one once nothing is in flight."""
        reason = f"the link to {link.peer} was closed"
        try:
            while True:
                message = await link.channel.receive()
                self.events.word(link.peer, message, "taken")
                if isinstance(message, m.Refuse):
                    raise ProtocolError("refused: " + "; ".join(message.reasons))
                self.run(self.sender.on_message(link.peer, message, time.monotonic()))
        except RegaugeError as error:
            reason = f"lost the link to {link.peer}: {error}"
        finally:
            link.closing = True
            link.channel.close()
            await self._end(link)
            log.info("link ended", peer=link.peer, reason=reason)
            del self._links[link.peer]
            self.run(self.sender.link_lost(link.peer, reason, time.monotonic()))

    async def _end(self, link: OutLink) -> None:
        await asyncio.to_thread(link.data.fence, FENCE_S)
        if link.writes:
            await asyncio.gather(*link.writes, return_exceptions=True)
        await asyncio.to_thread(self._drop, link)

    def _withdraw(self, slot: Slab | None, regions: tuple[Region, ...]) -> None:
        self._rails.unregister(regions)
        if slot is not None:
            slot.close()

    async def _write(self, link: OutLink, chunk: Write) -> None:
        out = self._transfers[chunk.transfer]
        loop, limit, begun = asyncio.get_running_loop(), self._config.deadline_s, time.monotonic()
        most = link.writer.most_bytes(chunk)
        self.moved.begin(most, far=link.far)
        try:
            posted = await loop.run_in_executor(link.thread, link.writer.start, chunk, out.tables, limit)
            at = time.monotonic()
            where = link.peer, chunk.epoch, chunk.seq, chunk.layers, chunk.tokens, posted.nbytes
            self.events.note(chunk.transfer, "gather", begun, at, *where)
            if posted.ticket is not None:
                await posted.ticket.landed(limit + TICKET_S)
                self.events.note(chunk.transfer, "write", at, time.monotonic(), *where)
            link.writer.ended(posted)
        except TransportError as error:  # bytes may still land: only the link's end is certain
            log.warning("write failed", peer=link.peer, transfer=chunk.transfer, error=str(error))
            link.closing = True
            link.channel.close()
        except Exception as error:  # whatever else broke will break again on a new link
            log.exception("write failed", peer=link.peer, transfer=chunk.transfer)
            link.closing = True
            link.channel.close()
            self.run(self.sender.cancel(chunk.transfer, f"a chunk could not be written: {error}"))
        else:
            self.moved.landed(posted.nbytes, out.path, far=link.far)
            written = chunk.transfer, link.peer, chunk.epoch, chunk.seq, posted.nbytes, posted.digest
            self.run(self.sender.written(*written, time.monotonic()))
        finally:
            self.moved.end(most, far=link.far)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.run(self.sender.tick(time.monotonic()))
