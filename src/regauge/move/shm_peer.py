"""The writing end of the shm transport: mapped slabs, and a thread whose copies pass the gate."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.errors import BoundsError, DeadlineExceeded, PeerLost, TransportError
from regauge.move.gate import EVERYTHING, WORD, Gate
from regauge.move.listener import shut
from regauge.move.memory import Slab
from regauge.move.pieces import Int64s
from regauge.move.transport import Chunk, Exported, Peer, Ticket, Transport, instant

_INLINE_BYTES = 256 << 10  # copied by the caller: about what handing over to a thread costs
_RELEASE_BYTES = 64 << 10  # from this piece size on, letting other Python threads run is worth two switches
_GRID_PIECES = 16  # from this many pieces on, and for this mean length and grid at most, indexing pays
_GRID_BYTES = 32 << 10
_DENSE_BYTES = 512 << 10
_GRID_UNIT = 128
_BLOCK_BYTES = 512 << 10
_CLOSE_S = 5.0

_quick = ctypes.PyDLL(None).memmove
_parallel = ctypes.CDLL(None).memmove
for _call in (_quick, _parallel):
    _call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _call.restype = None


@dataclass
class _Job:
    ticket: Ticket
    chunks: deque[Chunk]
    deadline: float


class ShmPeer(Peer):
    """Maps the regions of one owner. Takes over `sock` and `slabs` (by generation)."""

    def __init__(
        self,
        transport: Transport,
        target: Exported,
        session: str,
        sock: socket.socket,
        slabs: dict[int, Slab],
    ) -> None:
        super().__init__(transport, target, session)
        self._where = f"{target.address} (session {session[:8]})"
        self._sock, self._slabs = sock, slabs
        self._gate = Gate()
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._fenced = self._closed = False
        for region in target.regions:
            if region.generation not in slabs:
                self._gate.stop(region.generation, 0.0, PeerLost("withdrawn"))
        self._copier = threading.Thread(target=self._copy_jobs, name="regauge-shm-copy", daemon=True)
        self._listener = threading.Thread(target=self._listen, name="regauge-shm-stop", daemon=True)
        self._copier.start()
        self._listener.start()

    def map_base(self, region_name: str) -> int:
        """Return the local address of the peer's region. Write there only inside `writing`; see `Peer.map_base`."""
        return self._slab(region_name)[1].address

    @contextlib.contextmanager
    def writing(self, region_name: str) -> Iterator[int]:
        """Hold the right to write the peer's region directly; yields its local address.

        A fence, on either side, and a withdrawal of the slab wait until the block is left. Raises PeerLost when
        the connection is over, BoundsError when the slab was withdrawn, TransportError for an unknown region.
        """
        generation, slab = self._slab(region_name)
        with self._gate.passing(generation):
            yield slab.address

    def fence(self, deadline_s: float) -> bool:
        """Stop copying; see `Peer.fence`. False only while a block of `writing` does not end."""
        self._fenced = True
        error = PeerLost(f"the connection to {self._where} was fenced by this side")
        stopped = self._gate.stop(EVERYTHING, instant(deadline_s), error)
        self._drop_jobs()
        return stopped

    def close(self) -> None:
        """End the connection, its threads and the mapping; see `Peer.close`.

        Raises DeadlineExceeded while a block of `writing` does not end: unmapping would crash it. Call again then.
        """
        error = PeerLost(f"the connection to {self._where} was closed by this side")
        if not self._gate.stop(EVERYTHING, instant(_CLOSE_S), error):
            raise DeadlineExceeded(f"a direct write to {self._where} has not ended; end it, then close again")
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drop_jobs()
        shut(self._sock)  # tells the owner that nothing lands any more, so it comes after the last copy
        for thread in (self._copier, self._listener):
            if thread is not threading.current_thread():
                thread.join()
        self._sock.close()
        for slab in self._slabs.values():
            slab.close()

    def _slab(self, region_name: str) -> tuple[int, Slab]:
        for region in self.regions:
            if region.name == region_name and (slab := self._slabs.get(region.generation)) is not None:
                return region.generation, slab
        known = ", ".join(sorted(region.name for region in self.regions)) or "none"
        raise TransportError(f"{self._where} has no region {region_name!r} mapped here; it exports: {known}")

    def _start(self, ticket: Ticket, chunks: list[Chunk], deadline: float) -> None:
        job = _Job(ticket, deque(chunks), deadline)
        with self._changed:
            inline = ticket.nbytes <= _INLINE_BYTES and not self._jobs
            if not (inline or self._closed):
                self._jobs.append(job)
                self._changed.notify_all()
                return
        while not ticket.done:
            self._step(job)

    def _copy_jobs(self) -> None:
        """Copy chunk by chunk, first come, first served."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Copy one chunk, and end whatever is late, also behind the first; False once closed.

        A frame of its own: the idle thread must not keep a closed slab mapped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if self._closed:
                return False
            job = self._jobs[0]
        self._step(job)
        now = time.monotonic()
        with self._changed:
            late = [each for each in self._jobs if each.deadline <= now]
        for each in late:
            self._expire(each)
        if late or job.ticket.done:
            with self._changed:
                self._jobs = deque(each for each in self._jobs if not each.ticket.done)
        return True

    def _step(self, job: _Job) -> None:
        """Copy one chunk of a job, or end it."""
        if job.deadline <= time.monotonic():
            self._expire(job)
            return
        chunk = job.chunks[0]
        try:
            with self._gate.passing(chunk.region.generation):
                if job.ticket.done:
                    return
                _copy(chunk.pieces, self._slabs[chunk.region.generation].address - chunk.region.address)
        except TransportError as error:
            self._refuse(job, error)
            return
        job.chunks.popleft()
        job.ticket.advance(chunk.nbytes)
        if not job.chunks:
            job.ticket.finish("landed")

    def _refuse(self, job: _Job, error: TransportError) -> None:
        """End a job that the gate keeps out: nothing of it can land any more."""
        fenced = self._fenced and not isinstance(error, BoundsError)
        job.ticket.finish("fenced" if fenced else "failed", error)

    @staticmethod
    def _expire(job: _Job) -> None:
        text = f"{job.ticket.bytes_done} of {job.ticket.nbytes} bytes were copied in time; the rest was not begun"
        job.ticket.finish("failed", DeadlineExceeded(text))

    def _drop_jobs(self) -> None:
        """End what waits behind a stopped gate."""
        with self._changed:
            jobs, self._jobs = list(self._jobs), deque()
        for job in jobs:
            if (error := self._gate.error) is not None:
                self._refuse(job, error)

    def _listen(self) -> None:
        """Obey the owner's demands to stop, until either side ends the connection."""
        try:
            while len(word := self._sock.recv(WORD.size, socket.MSG_WAITALL)) == WORD.size:
                (generation,) = WORD.unpack(word)
                error = PeerLost(f"{self._where} has fenced this connection; connect again")
                while not self._gate.stop(generation, instant(1.0), error):
                    if self._closed:
                        return
                self._sock.send(word, socket.MSG_NOSIGNAL)
        except OSError as broken:
            lost = PeerLost(f"the connection to {self._where} broke: {broken}")
        else:
            lost = PeerLost(f"{self._where} has closed the connection or died; connect again")
        self._gate.stop(EVERYTHING, 0.0, lost)
        self._drop_jobs()


def _copy(pieces: Int64s, shift: int) -> None:
    """Copy pieces int64[N, 3] (local address, remote address, length); `shift` makes remote addresses local.

    Small pieces on a common grid go through numpy's indexing, which costs a third of a call per piece; pieces that
    follow one another here even more so, as numpy then needs no copy in between.
    """
    spans = pieces + np.array((0, shift, 0))
    sources, targets, lengths = spans.T
    dense = bool((sources[1:] == sources[:-1] + lengths[:-1]).all())
    if len(spans) >= _GRID_PIECES and int(lengths.sum()) <= len(spans) * (_DENSE_BYTES if dense else _GRID_BYTES):
        origin = spans.min(axis=0) * (1, 1, 0)
        unit = int(np.gcd.reduce(spans - origin, axis=None))
        if unit >= _GRID_UNIT:
            _copy_grid(spans - origin, int(origin[0]), int(origin[1]), unit, dense)
            return
    release = int(lengths.sum()) >= len(spans) * _RELEASE_BYTES
    call = _parallel if release else _quick
    deque(map(call, targets.tolist(), sources.tolist(), lengths.tolist()), maxlen=0)  # the loop itself runs in C


def _copy_grid(spans: Int64s, source: int, target: int, unit: int, dense: bool) -> None:
    """Copy spans (offset from `source`, offset from `target`, length), all of them multiples of `unit` bytes."""
    cells = spans // unit
    counts = cells[:, 2]
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    rows, slots = (np.repeat(cells[:, side], counts) + within for side in (0, 1))
    here, there = (
        _Cells(source, int(rows.max()) + 1, unit).array(),
        _Cells(target, int(slots.max()) + 1, unit).array(),
    )
    if dense:
        there[slots] = here[: len(slots)]
        return
    block = max(1, _BLOCK_BYTES // unit)  # what lies in between stays in the cache
    between = np.empty(block, dtype=here.dtype)
    for at in range(0, len(rows), block):
        part = rows[at : at + block]
        there[slots[at : at + block]] = here.take(part, out=between[: len(part)], mode="clip")


@dataclass(frozen=True)
class _Cells:
    """Memory at a bare address as an array of `count` cells of `unit` bytes."""

    address: int
    count: int
    unit: int

    def array(self) -> npt.NDArray[np.void]:
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "data": (self.address, False),
            "shape": (self.count,),
            "typestr": f"|V{self.unit}",
        }
