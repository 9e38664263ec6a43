"""A whole worker: both sides on one core, and which of them take requests.

A worker of one role is a worker of both that takes requests of that one alone; another role is another set of requests that it takes. Its pool keeps
the layout that it was started with, and its links to new peers are judged as any other's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from regauge.astray import Crossed, Watch
from regauge.config import Role
from regauge.engines.local.model import LocalModel
from regauge.errors import PeerLost, RegaugeError
from regauge.move.bound import Memory
from regauge.move.rails import Rails
from regauge.move.state import WorkerState, bounded, pool_states, session_states
from regauge.move.transports import uses_rdma
from regauge.observe import ERROR, ROLE, get_logger
from regauge.plane_meter import InterfaceBytes, carried, counts_rdma, read
from regauge.planes import interfaces
from regauge.serve import wire
from regauge.serve.core import Core, RefusalError
from regauge.serve.worker import DecodeWorker, PrefillWorker

WARM_TRIES = 120


class LocalWorker:
    """Built inside the event loop. `start` it, and `close` it."""

    def __init__(self, spec_: wire.WorkerSpec, memory: Memory, model: LocalModel, rails: Rails) -> None:
        self.spec = spec_
        self.core = Core(spec_, memory, model)
        self.prefill = PrefillWorker(spec_, memory, model, rails, self.core)
        self.decode = DecodeWorker(spec_, memory, model, rails, self.core)
        self._rails = rails
        self._planes = interfaces(spec_.config.planes)
        transfer = spec_.config.transfer
        self._strays = Watch() if not uses_rdma(transfer) or counts_rdma(self._planes, "compute") else None
        self._warming: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take control connections, and link to the decode workers before the first request does, once each of them is there."""
        transfer = self.spec.config.transfer
        if self.spec.control_port:
            await self.decode.links.start(transfer.control or transfer.host, self.spec.control_port)
        for peer, address in self.spec.peers.items():
            if peer != self.spec.name:
                self._warming.append(asyncio.create_task(self._warm(peer, address)))

    async def _warm(self, peer: str, address: tuple[str, int]) -> None:
        for _ in range(WARM_TRIES):
            try:
                await self.prefill.links.connect(peer, address)
            except PeerLost:
                await asyncio.sleep(1.0)  # it is still loading
            except RegaugeError as error:
                get_logger(peer=peer).warning("no link yet", **{ERROR: str(error)})
                return
            else:
                return

    def host_bytes(self, now: float, root: Path = Path("/")) -> tuple[list[InterfaceBytes], int]:
        """Return what the interfaces of this host's planes have carried, and the KV that compute's cannot have."""
        found = read(self._planes, root)  # before what has crossed: see `astray.py`
        total = carried(found, "compute")
        if self._strays is None or total is None:
            return found, 0
        sends, takes = self.prefill.links, self.decode.links
        crossed = Crossed(sends.moved.far, sends.moved.flying, takes.moved.far, takes.flying())
        self._strays.look(now, total, crossed)
        return found, self._strays.missing

    def take(self, roles: Sequence[Role]) -> wire.Health:
        """Take requests of these roles alone; those under way go on. Raises RefusalError for decode without a port for control connections."""
        if "decode" in roles and not self.spec.control_port:
            raise RefusalError("bad_request", f"{self.spec.name} has no control_port: it cannot decode for others")
        self.core.take(roles)
        get_logger(**{ROLE: sorted(self.core.roles)}).info("takes requests")
        return self.health()

    def health(self) -> wire.Health:
        """Return the worker's state and load."""
        core, speed = self.core, self.core.engine.speed
        running, now = core.engine.running, time.monotonic()
        self._count()
        carried_, off_plane = self.host_bytes(now)
        return wire.Health(
            status="draining" if core.draining or not core.roles else "ok", role=self.spec.role, name=self.spec.name,
            pid=os.getpid(), model=self.spec.model_name, free_pages=core.cache.available, pages=core.pool.pages,
            running=running, waiting=max(len(core.jobs) - running, 0),
            quarantined_pages=core.pool.count("quarantined"), transfers=core.ledger.totals(),
            roles=sorted(core.roles), computes="decode" in core.roles, page_size=core.pool.page_size,
            queued_tokens=sum(core.uncomputed.values()), decoding=core.scheduler.decoding, slots=core.config.max_batch,
            prefill_tokens_per_s=round(speed.prefill_tokens_per_s, 3), tpot_s=round(speed.tpot_s, 6),
            cache_seq=core.cache.events.seq,
            nics=[
                wire.NicLoad(nic.nic, nic.granted_bytes, nic.queued_bytes, nic.backlog_bytes, nic.bytes_per_s)
                for nic in self.decode.nics()
            ] if "decode" in core.roles else [],
            receipts=core.notary.count, host=socket.gethostname() if carried_ else "", interfaces=carried_,
            off_plane_bytes=off_plane, clock_s=now,
        )  # fmt: skip

    def debug(self, limit: int) -> WorkerState:
        """Return what `/debug/transfers` shows, at most `limit` of each kind of thing."""
        core = self.core
        self._count()
        sides = (self.decode.transfers(), self.prefill.transfers())
        decodes = "decode" in core.roles or self.spec.role == "decode"
        state = WorkerState(
            self.spec.name, self.spec.role, os.getpid(), time.monotonic(),
            [transfer for transfers, _ in sides for transfer in transfers], [link for _, links in sides for link in links],
            pool_states([core.pool]), session_states(self._rails), core.ledger.totals(),
            self.decode.nics() if decodes else [])  # fmt: skip
        return bounded(state, limit)

    def _count(self) -> None:
        self.core.ledger.read(self.decode.links)
        self.core.ledger.read_sent(self.prefill.links)

    async def close(self) -> None:
        """End all requests, the engine, and the links."""
        for task in self._warming:
            task.cancel()
        await self.core.close()
        await self.prefill.links.close()
        await self.decode.links.close()
