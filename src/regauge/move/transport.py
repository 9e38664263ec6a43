"""The transport interface, and the rules that every transport shares.

One side registers slabs and exports a description of them; the other connects with it and posts pieces
(local address, remote address, length). A remote address is a virtual address inside the owner's exported regions,
as with RDMA. A post is checked, coalesced and cut to size here; a back end only carries chunks.

A failed ticket does not mean that its bytes have stopped. Only `Peer.fence` (or `Transport.fence_inbound` on the
receiving side) returning True does: until then the pages of a failed transfer must not be used again.
"""

from __future__ import annotations

import abc
import contextlib
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

import msgspec
import numpy as np
import numpy.typing as npt

from regauge.errors import ProtocolError, TransportError
from regauge.move.memory import Slab
from regauge.move.pieces import AddressTable, Chunk, Int64s, Region, check_pieces, cut
from regauge.move.ticket import Ticket, TicketState
from regauge.plan.axes import coalesce

MAX_EXPORT_BYTES = 1 << 20
MAX_REGIONS = 1024

__all__ = [
    "AddressTable",
    "Caps",
    "Chunk",
    "Exported",
    "Inbound",
    "LocalMemory",
    "Peer",
    "Region",
    "Ticket",
    "TicketState",
    "Transport",
    "check_pieces",
    "cut",
    "decode_export",
    "instant",
    "new_session",
]


@dataclass(frozen=True)
class Caps:
    """What a transport can do."""

    one_sided: bool
    """The receiving process takes no part in a write."""
    max_pieces: int
    """Most pieces of one chunk; longer posts are cut by the shared layer."""
    max_bytes: int
    """Most bytes of one chunk; bounds how long a fence waits for a running copy."""
    needs_registration: bool
    """The local side of a piece must lie in a registered slab too."""
    can_fence: bool
    verifies_receiver_bounds: bool
    """The receiver itself checks every piece; otherwise only the initiator does."""
    maps_memory: bool
    """The peer's regions are mapped here, so that a kernel may write them directly (`Peer.map_base`)."""
    checks_grants: bool = False
    """The receiver takes a piece only where `Transport.allow` lets it, and `Transport.revoke` works."""


class Exported(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `Transport.export` says: where to connect, and to which memory."""

    kind: str
    address: str
    session: str
    """Identity of the exporting transport: a restarted process has another."""
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Inbound:
    """One live incoming connection."""

    session: str
    peer: str
    """The name the other side gave itself."""
    nbytes: int
    """Bytes landed through it so far; 0 where writes are one-sided and nobody here counts them."""


def new_session() -> str:
    """Return an unguessable name for a connection or transport: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def instant(deadline_s: float) -> float:
    """Return the `time.monotonic()` instant `deadline_s` seconds from now. Raises ValueError unless it is finite."""
    if not math.isfinite(deadline_s):
        raise ValueError(f"a deadline of {deadline_s} s; every wait must be bounded")
    return time.monotonic() + deadline_s


def decode_export(exported: bytes, kind: str) -> Exported:
    """Read what `Transport.export` wrote. Raises ProtocolError when malformed, TransportError for another kind."""
    if len(exported) > MAX_EXPORT_BYTES:
        raise ProtocolError(f"a transport's export has {len(exported)} bytes; at most {MAX_EXPORT_BYTES} are taken")
    try:
        out = msgspec.msgpack.decode(exported, type=Exported)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a transport's export is malformed: {error}") from error
    if out.kind != kind:
        raise TransportError(f"the peer exports a {out.kind[:40]!r} transport, this side uses {kind!r}; set both alike")
    if (
        len(out.regions) > MAX_REGIONS
        or len({r.generation for r in out.regions}) < len(out.regions)
        or any(not (0 <= r.address < 1 << 62 and 0 < r.nbytes < 1 << 62 and 0 <= r.generation < 1 << 63) for r in out.regions)
    ):  # fmt: skip
        raise ProtocolError("a transport's export lists too many regions, one twice, or one that cannot exist")
    return out


@dataclass(frozen=True)
class LocalMemory:
    """A snapshot of a transport's registered slabs."""

    table: AddressTable
    arrays: dict[int, npt.NDArray[np.uint8]]
    """By generation."""

    def region(self, generation: int) -> Region | None:
        """Return the region of that generation, while it is registered."""
        return next((each for each in self.table.regions if each.generation == generation), None)


class Peer(abc.ABC):
    """A connection to one exporting transport. Thread-safe; close it."""

    def __init__(self, transport: Transport, exported: Exported, session: str) -> None:
        self.regions = exported.regions
        self.session = session
        """Unguessable name of this connection, known to both ends: what `fence_inbound` takes."""
        self._transport = transport
        self._remote = AddressTable(exported.regions, "exported")

    def post(self, pieces: Int64s, deadline_s: float, grant: int = 0) -> Ticket:
        """Write pieces int64[N, 3] (local address, remote address, length) into the peer's memory, under one of its grants.

        Returns at once. Raises BoundsError when any piece is outside a registered slab here or an exported region
        there; nothing has been sent then. All other failures end the ticket. The local bytes must not change before
        the ticket has ended; pieces that overlap at the target land in no defined order.
        """
        deadline = instant(deadline_s)
        memory = self._transport.memory()
        near, far = check_pieces(pieces, memory.table, self._remote)
        keep = tuple(memory.arrays.values())
        caps = self._transport.caps
        chunks: list[Chunk] = []
        single = bool(len(far)) and far[0] >= 0 and bool((far == far[0]).all())  # the common case, without masks
        for index in far[:1] if single else np.unique(far[pieces[:, 2] > 0]):
            mine = slice(None) if single else far == index
            merged = coalesce(pieces[mine], near[mine])
            runs = cut(merged, caps.max_pieces, caps.max_bytes)
            region = self._remote.regions[index]
            chunks += [Chunk(region, run, int(run[:, 2].sum()), grant, keep) for run in runs]
        ticket = Ticket(sum(chunk.nbytes for chunk in chunks))
        if chunks:
            self._start(ticket, chunks, deadline)
        else:
            ticket.finish("landed")
        return ticket

    @abc.abstractmethod
    def _start(self, ticket: Ticket, chunks: list[Chunk], deadline: float) -> None:
        """Carry the chunks, which are not empty, and end the ticket. Must not block for long, nor raise."""

    @abc.abstractmethod
    def fence(self, deadline_s: float) -> bool:
        """End the connection. True only when nothing posted on this peer can land any more; may be asked again."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the connection and its threads; tickets in flight fail. Idempotent. Not a fence."""

    def map_base(self, region_name: str) -> int:
        """Return the local address of the peer's region (caps.maps_memory). Raises TransportError without one."""
        raise TransportError(f"transport {self._transport.kind!r} does not map the peer's region {region_name!r}")

    @contextlib.contextmanager
    def writing(self, region_name: str) -> Iterator[int]:
        """Hold the right to write a mapped region directly; yields its local address (caps.maps_memory).

        Raises TransportError where the region is not mapped, PeerLost or BoundsError where it is not ours any more.
        """
        yield self.map_base(region_name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Transport(abc.ABC):
    """One process's end of a data plane: owns registered slabs, accepts peers, and connects to others. Close it."""

    kind: ClassVar[str]
    caps: Caps

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = new_session()
        """Identity of this transport; a restarted process has another."""
        self._table_lock = threading.Lock()
        self._generation = 0
        self._live: dict[int, tuple[Region, npt.NDArray[np.uint8], Slab]] = {}
        self._memory = LocalMemory(AddressTable((), "registered"), {})

    @property
    def medium(self) -> str:
        """Name of the cost model's constants for this transport."""
        return self.kind

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where peers connect, as text."""

    def register(self, slab: Slab) -> Region:
        """Make a slab reachable. A slab registered again gets a new generation, and writes that name the old fail.

        Raises TransportError when another slab of that name is registered, or too many are; DeadlineExceeded, as
        `unregister`, when a peer does not confirm that it has stopped writing to the old generation.
        """
        with self._table_lock:
            old = [entry for entry in self._live.values() if entry[2] is slab]
            if not old and any(entry[0].name == slab.name for entry in self._live.values()):
                raise TransportError(f"a slab named {slab.name!r} is registered already; unregister it first")
            if len(self._live) >= MAX_REGIONS:
                raise TransportError(f"{MAX_REGIONS} slabs are registered already; register few, large ones")
            self._generation += 1
            region = Region(slab.name, slab.address, slab.nbytes, self._generation)
            for entry in old:
                del self._live[entry[0].generation]
            self._live[region.generation] = (region, slab.array, slab)
            self._snapshot()
        for entry in old:
            self._revoke(entry[0].generation)
        return region

    def unregister(self, region: Region) -> None:
        """Withdraw a region. When this returns, nothing lands in it any more. Unknown regions are ignored.

        Raises DeadlineExceeded when a peer that maps the memory does not confirm; fence that peer.
        """
        with self._table_lock:
            if self._live.pop(region.generation, None) is None:
                return
            self._snapshot()
        self._revoke(region.generation)

    def memory(self) -> LocalMemory:
        """Return a snapshot of the registered slabs."""
        return self._memory

    def slabs(self) -> list[tuple[Region, int]]:
        """Return the registered regions with a descriptor of each, which the caller closes. Raises TransportError without one."""
        found: list[tuple[Region, int]] = []
        try:
            with self._table_lock:
                for region, _, slab in self._live.values():
                    if not slab.closed:
                        found.append((region, os.dup(slab.fd)))  # closed below when one fails
        except OSError as error:
            for _, fd in found:
                os.close(fd)
            raise TransportError(f"no descriptor for a slab: {error}; raise the limit on open files") from error
        return found

    def export(self) -> bytes:
        """Describe this transport to a peer: msgpack of `Exported`, at most MAX_EXPORT_BYTES."""
        out = msgspec.msgpack.encode(Exported(self.kind, self.address, self.session, self._memory.table.regions))
        if len(out) > MAX_EXPORT_BYTES:
            raise TransportError("the names of the registered slabs are too long to export")
        return out

    def allow(self, session: str, grant: int, ranges: Int64s) -> None:
        """Let an incoming connection write ranges int64[N, 2] (address, length) under a grant (`grants.grant_id`).

        It may be allowed before it connects. Without caps.checks_grants nothing happens: such a writer may write every region.
        Raises TransportError when too many grants are live.
        """
        del session, grant, ranges

    def revoke(self, session: str, grant: int, deadline_s: float) -> bool:
        """Withdraw a grant. True only when nothing that was posted under it can land any more; never without checks_grants.

        A write that is landing is waited for; at the deadline its connection is cut.
        """
        del session, grant, deadline_s
        return False

    def _forget(self) -> None:
        """Let go of every slab; for `close`, once nothing lands any more."""
        with self._table_lock:
            self._live.clear()
            self._snapshot()

    def _snapshot(self) -> None:
        entries = list(self._live.values())
        table = AddressTable([entry[0] for entry in entries], "registered")
        self._memory = LocalMemory(table, {entry[0].generation: entry[1] for entry in entries})

    @abc.abstractmethod
    def _revoke(self, generation: int) -> None:
        """Return once nothing lands in that generation any more; raise DeadlineExceeded when that is not certain."""

    @abc.abstractmethod
    def connect(self, exported: bytes, deadline_s: float) -> Peer:
        """Connect to what a peer exported. Holds no lock meanwhile.

        Raises AuthError, PeerLost, DeadlineExceeded, ProtocolError (malformed export) or TransportError.
        """

    @abc.abstractmethod
    def inbound(self) -> list[Inbound]:
        """Return the live incoming connections."""

    @abc.abstractmethod
    def fence_inbound(self, session: str, deadline_s: float) -> bool:
        """End an incoming connection. True only when nothing can land through it any more (so too if unknown)."""

    @abc.abstractmethod
    def close(self) -> None:
        """End incoming connections and their threads; withdraw all slabs, which stay the caller's. Idempotent.

        Peers are closed by whoever connected them.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
