"""The prefill side of transfers over real connections: drives `sender.Sender`.

All methods belong to one event loop; writes run in one thread per link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from regauge.config import TransferConfig
from regauge.errors import ProtocolError, Refused, RegaugeError, TransferFailed, TransportError
from regauge.layout.spec import Layout
from regauge.move import messages as m
from regauge.move.channel import Channel, decode_layout, encode_layout
from regauge.move.costs import read
from regauge.move.crossing import Memory, Terms, Writer
from regauge.move.memory import Slab
from regauge.move.protocol import Action, Delivered, Failed, Granted, Range, Released, Send, Write
from regauge.move.sender import LinkLimits, Sender
from regauge.move.transport import Peer, Transport
from regauge.plan import Judge, check
from regauge.plan.cost import DEFAULTS, Mode, Setting
from regauge.plan.tiles import Int64

log = structlog.get_logger()
TICK_S = 0.25
FENCE_S = 10.0


@dataclass(eq=False)
class _Link:
    peer: str
    channel: Channel
    data: Peer
    writer: Writer
    slot: Slab | None
    thread: ThreadPoolExecutor
    task: asyncio.Task[None] | None = None
    writing: asyncio.Task[None] | None = None
    closing: bool = False


@dataclass(eq=False)
class Outgoing:
    """One transfer on its way out. `ready` and `finish` are for the event loop's thread."""

    transfer: str
    peer: str
    pages: Int64
    path: str
    mode: Mode
    _links: OutboundLinks
    _done: asyncio.Future[Delivered]
    _free: Callable[[], None] = field(repr=False)
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when decode has lent its pages."""

    def ready(self, layers: Range, tokens: Range) -> None:
        """Layers [first, end) of tokens [first, end) are in the pool."""
        self._links.run(self._links.sender.ready(self.transfer, layers, tokens, time.monotonic()))

    def finish(self, handover: bytes) -> None:
        """Everything has been made ready."""
        self._links.run(self._links.sender.finish(self.transfer, handover))

    def cancel(self, reason: str) -> None:
        """Give the transfer up; `done` then raises TransferFailed unless it has ended already."""
        self._links.run(self._links.sender.cancel(self.transfer, reason))

    async def wait_granted(self) -> None:
        """Wait until decode has lent its pages. Raises TransferFailed if the transfer ends before."""
        granted = asyncio.create_task(self.granted.wait())
        waiting: list[asyncio.Future[Any]] = [granted, self._done]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            granted.cancel()
        if not self.granted.is_set():
            await self.done()

    @property
    def finished(self) -> asyncio.Future[Delivered]:
        """Done when the transfer has ended, in whichever way."""
        return self._done

    async def done(self) -> Delivered:
        """Wait until decode has committed. Raises TransferFailed with the reason."""
        return await asyncio.shield(self._done)


class OutboundLinks:
    """All links of a prefill worker."""

    def __init__(
        self, name: str, key: bytes, memory: Memory, transport: Transport, config: TransferConfig,
        judge: Judge = check,
    ) -> None:  # fmt: skip
        self.sender = Sender(offer_s=config.offer_s, deadline_s=config.deadline_s)
        self._name = name
        self._key = key
        self._memory = memory
        self._transport = transport
        self._config = config
        self._constants = read(Path(config.costs)) if config.costs else DEFAULTS
        self._judge = judge
        self._links: dict[str, _Link] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._transfers: dict[str, Outgoing] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def start(
        self, transfer: str, peer: str, address: tuple[str, int], pages: Int64, tokens: int, free: Callable[[], None]
    ) -> Outgoing:
        """Offer a transfer of `tokens` tokens that the engine writes into `pages`.

        `free` is called once, when no write reads the pages any more. Raises Refused, AuthError, TransportError or ProtocolError
        when there is no link and none can be made; `free` is not called then.
        """
        link = await self._link(peer, address)
        if transfer in self._transfers:
            raise ProtocolError(f"transfer {transfer!r} is under way already")
        future: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda f: f.exception())  # an error nobody waits for is still logged by `run`
        verdict = link.writer.plan.verdict
        out = Outgoing(transfer, peer, pages, verdict.path, link.writer.mode, self, future, free)
        self._transfers[transfer] = out
        try:
            actions = self.sender.offer(transfer, peer, tokens, time.monotonic())
        except ProtocolError:
            del self._transfers[transfer]
            raise
        self.run(actions)
        return out

    async def connect(self, peer: str, address: tuple[str, int]) -> None:
        """Make the link to a decode worker ahead of its first transfer. Raises as `start` does."""
        await self._link(peer, address)

    def run(self, actions: Iterable[Action]) -> None:
        """Carry actions out."""
        for action in actions:
            match action:
                case Send(peer, message):
                    if peer in self._links:
                        self._links[peer].channel.send(message)
                case Write(peer):
                    link = self._links[peer]
                    if not link.closing:  # else `link_lost` comes, and ends the transfer
                        link.writing = asyncio.create_task(self._write(link, action))
                case Granted(transfer):
                    self._transfers[transfer].granted.set()
                case Delivered(transfer):
                    out = self._transfers.pop(transfer)
                    out._free()
                    out._done.set_result(action)
                case Failed(transfer, reason, held):
                    out = self._transfers[transfer] if held else self._transfers.pop(transfer)
                    log.warning("transfer failed", transfer=transfer, peer=out.peer, reason=reason)
                    out._done.set_exception(TransferFailed(reason))
                    if not held:
                        out._free()
                case Released(transfer):
                    self._transfers.pop(transfer)._free()
                case _:
                    raise AssertionError(f"a sender does not {action!r}")

    async def close(self) -> None:
        """End all links; transfers in flight fail."""
        if self._ticker is not None:
            self._ticker.cancel()
        for link in list(self._links.values()):
            link.channel.close()
        await asyncio.gather(*(link.task for link in list(self._links.values()) if link.task), return_exceptions=True)

    async def _link(self, peer: str, address: tuple[str, int]) -> _Link:
        async with self._opening.setdefault(peer, asyncio.Lock()):
            old = self._links.get(peer)
            if old is not None and not old.closing:
                return old
            if old is not None and old.task is not None:
                await asyncio.wait([old.task])
            link = await self._open(peer, address)
            link.channel.send(m.Ready(link.writer.plan.verdict.pair, link.writer.mode, link.data.session))
            self._links[peer] = link
            self.sender.link_up(peer, LinkLimits(self._slots(link), link.writer.layers_for))
            link.task = asyncio.create_task(self._serve(link))
            self._ticker = self._ticker or asyncio.create_task(self._tick())
            return link

    def _slots(self, link: _Link) -> int:
        staging = link.writer.staging
        return staging.slots if link.writer.mode == "staged" and staging is not None else 0

    async def _open(self, peer: str, address: tuple[str, int]) -> _Link:
        channel = await Channel.open(*address, self._key)
        try:
            channel.send(
                m.Hello(m.VERSION, self._name, "prefill", encode_layout(self._memory.layout), self._transport.export())
            )
            hello = await channel.hello()
            if hello.worker != peer or hello.role != "decode":
                raise ProtocolError(f"{address} is {hello.role} worker {hello.worker!r}, not decode worker {peer!r}")
            layout = decode_layout(hello.layout)
            verdict = self._judge(self._memory.layout, layout)
            if verdict.path == "REFUSED":
                raise Refused(tuple(str(r) for r in verdict.refusals))
            data = await asyncio.to_thread(self._transport.connect, hello.export, FENCE_S)
            return await asyncio.to_thread(self._prepare, peer, channel, data, layout, hello.staging)
        except BaseException:
            channel.close()
            raise

    def _prepare(self, peer: str, channel: Channel, data: Peer, layout: Layout, staging: m.Staging | None) -> _Link:
        slot = Slab(staging.slot_bytes, f"slot:{peer}") if staging is not None else None
        try:
            if slot is not None:
                self._transport.register(slot)
            setting = Setting(self._transport.kind, mode=self._config.mode)
            terms = Terms(self._transport.caps.maps_memory, setting, self._constants)
            writer = Writer(
                self._memory, layout, data, staging, terms=terms, slot=slot, threads=self._config.kernel_threads
            )
            log.info("link opened", peer=peer, mode=writer.mode, why=writer.why)
        except BaseException:
            data.close()
            if slot is not None:
                slot.close()
            raise
        return _Link(peer, channel, data, writer, slot, ThreadPoolExecutor(1, thread_name_prefix=f"write-{peer}"))

    async def _serve(self, link: _Link) -> None:
        """Read the link's messages until it ends, then fail its transfers once nothing is in flight."""
        reason = f"the link to {link.peer} was closed"
        try:
            while True:
                message = await link.channel.receive()
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
            self.run(self.sender.link_lost(link.peer, reason))

    async def _end(self, link: _Link) -> None:
        await asyncio.to_thread(link.data.fence, FENCE_S)
        if link.writing is not None:
            await asyncio.gather(link.writing, return_exceptions=True)
        link.thread.shutdown(wait=False)
        await asyncio.to_thread(link.data.close)
        if link.slot is not None:
            region = next((r for r in self._transport.memory().table.regions if r.name == link.slot.name), None)
            if region is not None:
                await asyncio.to_thread(self._transport.unregister, region)
            link.slot.close()

    async def _write(self, link: _Link, chunk: Write) -> None:
        out = self._transfers[chunk.transfer]
        loop = asyncio.get_running_loop()
        try:
            nbytes = await loop.run_in_executor(
                link.thread, link.writer.write, chunk, np.asarray(out.pages), self._config.deadline_s
            )
        except Exception as error:  # noqa: BLE001  # whatever broke, bytes may still land: only the link's end is certain
            level = log.warning if isinstance(error, TransportError) else log.exception
            level("write failed", peer=link.peer, transfer=chunk.transfer, error=str(error))
            link.channel.close()
            return
        self.run(self.sender.written(chunk.transfer, chunk.seq, chunk.layers, chunk.tokens, chunk.slot, nbytes))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.run(self.sender.tick(time.monotonic()))
