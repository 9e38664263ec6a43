"""The transfer layer for engines that have a loop of their own: what they call never waits, and they ask now and then what has ended.

The links live in an event loop in a thread. An engine says which pages a transfer has, in whatever step it learns it; on the prefill
side tables grow as the engine allocates. A transfer is `Ended` once, when its pages are the engine's again: nothing reads or writes them any more.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import structlog

from regauge.config import Role, TransferConfig
from regauge.engines.ended import Ended
from regauge.errors import DeadlineExceeded, RegaugeError
from regauge.move.bound import Borrowed
from regauge.move.crossing import PageTable
from regauge.move.events import Trace
from regauge.move.flow_types import LinkState as NicState
from regauge.move.inbound import InboundLinks
from regauge.move.incoming import Arrival
from regauge.move.ledger import Ledger
from regauge.move.outbound import Address, OutboundLinks
from regauge.move.outgoing import Outgoing
from regauge.move.pages import LentPages
from regauge.move.protocol import Range, TransferState
from regauge.move.rails import Rails
from regauge.move.state import LinkState, PoolState, WorkerState, bounded, lent_states, session_states
from regauge.move.transports import open_rails
from regauge.plan import Judge, check

log = structlog.get_logger()
T = TypeVar("T")
KEPT_ENDS = 1_000
"""Transfers whose end can be asked for afterwards."""
START_S = 30.0
CLOSE_S = 20.0


class Bridge(abc.ABC):
    """An event loop in a thread, with one rank's transports. Close it.

    What is `async` here is for that loop.
    """

    role: ClassVar[Role]
    links: InboundLinks | OutboundLinks

    def __init__(self, name: str, key: bytes, config: TransferConfig) -> None:
        """Raises ConfigError as `open_rails`."""
        self.name = name
        self._rails: Rails = open_rails(config, key=key, name=name)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"regauge-{name}", daemon=True)
        self._lock = threading.Lock()
        self._ended: list[Ended] = []
        self._ends: OrderedDict[str, Ended] = OrderedDict()
        """The last `KEPT_ENDS`, oldest first."""
        self._news = asyncio.Event()
        """Set when something has ended; then there is another one."""
        self._ledger = Ledger()
        self._thread.start()

    def ended(self) -> list[Ended]:
        """Take what has ended since the last call."""
        with self._lock:
            out, self._ended = self._ended, []
        return out

    def close(self) -> None:
        """End the links, then the loop; transfers under way fail. Raises nothing: the process may be ending."""
        if not self._loop.is_running():
            return
        try:
            self.run(self._close(), CLOSE_S)
        except (RegaugeError, OSError) as error:
            log.warning("the links did not end cleanly", error=str(error))
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._rails.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> T:
        """Make the links, in their loop."""
        try:
            return self.run(work, START_S)
        except BaseException:  # whatever broke, also an interrupt: the loop and the transports go too
            self._stop()
            raise

    async def end_of(self, transfer: str, wait_s: float) -> Ended | None:
        """Return how a transfer has ended, or will have within `wait_s` seconds; None: it has not, is not known, or was long ago."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while transfer not in self._ends:
                    await self._news.wait()
        return self._ends.get(transfer)

    async def state(self, limit: int) -> WorkerState:
        """Describe at most `limit` of each kind of thing, the newest ones."""
        transfers, links = self._under_way()
        state = WorkerState(
            self.name, self.role, os.getpid(), time.monotonic(), transfers, links, self._pools(), session_states(self._rails),
            self._ledger.totals(), self._nics(),
        )  # fmt: skip
        return bounded(state, limit)

    async def traces_of(self, transfer: str) -> list[Trace]:
        """Return what has happened to a transfer here, as far as it is kept."""
        return self.links.events.of(transfer, self.name)

    @abc.abstractmethod
    def _under_way(self) -> tuple[list[TransferState], list[LinkState]]:
        """Describe the transfers that are not over, and the links."""

    def _pools(self) -> list[PoolState]:
        return []

    def _nics(self) -> list[NicState]:
        return []

    @abc.abstractmethod
    async def _close(self) -> None:
        """End the links."""

    def note(self, ended: Ended) -> None:
        """Keep the end of a transfer that its engine has not given to the links. For any thread."""
        self.post(self._keep, ended)

    def _end(self, ended: Ended) -> None:
        self._keep(ended)
        self._report(ended)

    def _report(self, ended: Ended) -> None:
        with self._lock:
            self._ended.append(ended)

    def _keep(self, ended: Ended) -> None:
        self._ends.pop(ended.transfer, None)
        self._ends[ended.transfer] = ended
        if len(self._ends) > KEPT_ENDS:
            self._ends.popitem(last=False)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have something called in the links' loop. For any thread."""
        self._loop.call_soon_threadsafe(call, *arguments)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Have something done in the links' loop. For any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Have something done in the links' loop, and wait for it. Raises DeadlineExceeded after `limit_s` seconds."""
        future = self.start(work)
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineExceeded(f"{self.name}: the links did not answer within {limit_s:g} s") from error


class ReceivingEnd(Bridge):
    """The decode side of an engine's rank. Every method is for any thread."""

    role = "decode"

    def __init__(
        self, name: str, key: bytes, memory: Borrowed, config: TransferConfig, *, port: int = 0, judge: Judge = check
    ) -> None:  # fmt: skip
        """Listen on the control plane at `port`. Raises ConfigError, and OSError where the port is taken."""
        super().__init__(name, key, config)
        self._groups = memory.layout.groups
        self._lent = tuple(LentPages() for _ in self._groups)
        self._quiet: dict[str, Ended] = {}
        """Failed transfers whose pages something may still touch."""

        async def start() -> tuple[InboundLinks, tuple[str, int]]:
            links = InboundLinks(name, key, memory, self._rails, self._lent, config, judge)
            links.on_release = self._released
            return links, await links.start(config.control or config.host, port)

        self.links: InboundLinks
        self.links, self.address = self._begin(start())

    def expect(
        self, transfer: str, peers: Sequence[str], tokens: int, tables: Sequence[tuple[Sequence[int], int]], *, first: int = 0
    ) -> None:  # fmt: skip
        """Wait for tokens [first, tokens) from every peer. `tables`: pages and the token they begin with, of each group."""

        def begin() -> None:
            if any(transfer in lent for lent in self._lent):
                self._report(Ended(transfer, f"transfer {transfer!r} is expected already"))
                return
            for lent, (pages, _) in zip(self._lent, tables, strict=True):
                lent.lend(transfer, pages)
            try:
                arrival = self.links.expect(
                    transfer, peers, tokens, first=first, origins=[origin for _, origin in tables]
                )
            except RegaugeError as error:
                for lent in self._lent:
                    lent.release(transfer)
                self._ledger.failed(error)
                self._end(Ended.failed(transfer, error))
                return
            self._ledger.watch(arrival)
            arrival.add_done_callback(lambda a: self._over(transfer, a))

        self.post(begin)

    def cancel(self, transfer: str, reason: str) -> None:
        """Give a transfer up; it ends like any other, unless it has."""
        self.post(lambda: self.links.cancel(transfer, reason))

    def _over(self, transfer: str, arrival: asyncio.Future[Arrival]) -> None:
        error = arrival.exception()
        if error is None:
            a = arrival.result()
            self._end(
                Ended(transfer, "", a.handover, a.path, a.mode, a.wire_bytes, a.seconds, stages=a.stages, spans=a.spans)
            )
            return
        self._quiet[transfer] = Ended.failed(transfer, error)
        self._released()

    def _released(self) -> None:
        for transfer in [t for t in self._quiet if all(t not in lent for lent in self._lent)]:
            self._end(self._quiet.pop(transfer))

    def _under_way(self) -> tuple[list[TransferState], list[LinkState]]:
        self._ledger.read(self.links)
        return self.links.transfers(), self.links.links()

    def _pools(self) -> list[PoolState]:
        return lent_states(self._groups, self._lent)

    def _nics(self) -> list[NicState]:
        return self.links.flow()

    async def _close(self) -> None:
        await self.links.close()


@dataclass(eq=False)
class _Sending:
    out: Outgoing | None = None
    early: list[Callable[[Outgoing], None]] = field(default_factory=list)
    """What the engine said before the links were there."""
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    granted: Callable[[], None] | None = None
    computed: float = 0.0


class SendingEnd(Bridge):
    """The prefill side of an engine's rank. Every method is for any thread."""

    role = "prefill"

    def __init__(
        self, name: str, key: bytes, memory: Borrowed, config: TransferConfig, *, judge: Judge = check
    ) -> None:
        super().__init__(name, key, config)
        self._groups = len(memory.layout.groups)
        self._sending: dict[str, _Sending] = {}
        self._tasks: set[asyncio.Task[None]] = set()

        async def start() -> OutboundLinks:
            return OutboundLinks(name, key, memory, self._rails, config, judge)

        self.links: OutboundLinks = self._begin(start())

    def offer(
        self, transfer: str, peers: Mapping[str, Address], tokens: int, granted: Callable[[], None] | None = None
    ) -> None:
        """Announce a transfer to the decode ranks that it concerns; the engine need not wait for their answer.

        `granted` is called in the links' loop once all of them have lent their pages.
        """

        def begin() -> None:
            if transfer in self._sending:
                self._report(Ended(transfer, f"transfer {transfer!r} is under way already"))
                return
            self._sending[transfer] = _Sending(granted=granted)
            task = self._loop.create_task(self._send(transfer, peers, tokens))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.post(begin)

    def pages(self, transfer: str, tables: Sequence[tuple[Sequence[int], int]]) -> None:
        """Say the pages that hold the transfer's tokens so far, and the token they begin with, of each group. Before `ready`."""
        made = tuple(PageTable(np.array(pages, np.int64), origin) for pages, origin in tables)

        def replace(out: Outgoing) -> None:
            out.tables = made

        self._tell(transfer, replace)

    def ready(self, transfer: str, layers: Range, tokens: Range) -> None:
        """Layers [first, end) of the model hold their state for tokens [first, end)."""
        now = time.monotonic()

        def ready(out: Outgoing) -> None:
            self.links.events.note(transfer, "computed", now, now, "", None, None, layers, tokens)
            out.ready(layers, tokens)

        self._tell(transfer, ready, now)

    def finish(self, transfer: str, handover: bytes) -> None:
        """Everything has been made ready."""
        self._tell(transfer, lambda out: out.finish(handover))

    def cancel(self, transfer: str, reason: str) -> None:
        """Give a transfer up; it ends like any other, unless it has."""
        self._tell(transfer, lambda out: out.cancel(reason))

    def _tell(self, transfer: str, word: Callable[[Outgoing], None], computed: float = 0.0) -> None:
        def tell() -> None:
            sending = self._sending.get(transfer)
            if sending is None:
                return  # it has ended
            sending.computed = max(sending.computed, computed)
            if sending.out is None:
                sending.early.append(word)
            else:
                _say(sending.out, word)

        self.post(tell)

    async def _send(self, transfer: str, peers: Mapping[str, Address], tokens: int) -> None:
        sending = self._sending[transfer]
        nowhere = [PageTable(np.empty(0, np.int64)) for _ in range(self._groups)]
        try:
            out = await self.links.start(transfer, peers, nowhere, tokens, sending.quiet.set)
        except RegaugeError as error:
            del self._sending[transfer]
            self._ledger.failed(error)
            self._end(Ended.failed(transfer, error))
            return
        self._ledger.watch(out.finished)
        sending.out = out
        for word in sending.early:
            _say(out, word)
        try:
            if sending.granted is not None:
                await out.wait_granted()
                sending.granted()
            done = await out.done()
            ended = Ended(
                transfer, "", b"", out.path, out.mode, done.wire_bytes, done.seconds, computed=sending.computed
            )
        except RegaugeError as error:
            ended = Ended.failed(transfer, error, out.path, out.mode)
        await sending.quiet.wait()
        del self._sending[transfer]
        self._end(ended)

    def _under_way(self) -> tuple[list[TransferState], list[LinkState]]:
        self._ledger.read_sent(self.links)
        return self.links.transfers(), self.links.links()

    async def _close(self) -> None:
        await self.links.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _say(out: Outgoing, word: Callable[[Outgoing], None]) -> None:
    """What the engine says wrongly ends its transfer, and no other."""
    try:
        word(out)
    except RegaugeError as error:
        out.cancel(str(error))
