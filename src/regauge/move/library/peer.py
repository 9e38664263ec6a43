"""The writing end of a transport over a library: one thread asks the carrier, another obeys the owner.

Nothing but that thread waits for the library, and no longer than until the deadline of what it carries: then the carrier
is killed, and with it everything that it had not finished sending. What the kernel had taken may still arrive, so the
peer is over and only a fence says when its pages are safe.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regauge.errors import BoundsError, DeadlineExceeded, PeerLost, TransportError
from regauge.move.gate import EVERYTHING, WORD, Gate
from regauge.move.library import wire
from regauge.move.library.carrier import LOOK_S, Carrier
from regauge.move.listener import shut
from regauge.move.pieces import Int64s
from regauge.move.stream import Stream
from regauge.move.transport import Chunk, Exported, Peer, Region, Ticket, instant

if TYPE_CHECKING:
    from regauge.move.library.transport import LibraryTransport

FORGET_S = 5.0
HEAR_S = 0.25
"""How long a failed write waits for the news that the peer is gone: the library does not say why it failed."""


@dataclass(frozen=True, eq=False)
class _Load:
    """A chunk whose local addresses are offsets into generations: slabs may come and go while it waits."""

    chunk: Chunk
    generations: Int64s
    offsets: Int64s


@dataclass(eq=False)
class _Post:
    ticket: Ticket
    loads: deque[_Load]
    deadline: float
    lend: list[tuple[Region, int]]
    """Slabs that the carrier must map first, with a descriptor of each."""


class LibraryPeer(Peer):
    """One owner, one carrier. Takes over `stream` and `carrier`; `bases` are the addresses in the owner's carrier."""

    def __init__(
        self,
        transport: LibraryTransport,
        target: Exported,
        session: str,
        stream: Stream,
        carrier: Carrier,
        bases: Mapping[int, int],
        lent: set[int],
        is_gone: Callable[[float], bool],
    ) -> None:
        super().__init__(transport, target, session)
        self._where = f"{target.address} (session {session[:8]})"
        self._owner, self._carrier, self._bases, self._is_gone = transport, carrier, bases, is_gone
        self._stream, self._sock = stream, stream.sock
        self._gate = Gate()
        self._changed = threading.Condition()
        self._queue: deque[_Post | int] = deque()  # an int: a generation to give back
        self._lent = lent
        self._dead: TransportError | None = None
        self._asking = False
        self._doubtful = False
        """Whether something was under way, or had failed, when it ended: only the owner can say that it is over."""
        self._gone = False
        for region in target.regions:
            if region.generation not in bases:
                self._gate.stop(region.generation, 0.0, PeerLost("withdrawn"))
        self._worker = threading.Thread(target=self._work, name=f"regauge-{transport.kind}-write", daemon=True)
        self._hearer = threading.Thread(target=self._hear, name=f"regauge-{transport.kind}-stop", daemon=True)
        self._worker.start()
        self._hearer.start()

    @property
    def carrier(self) -> Carrier:
        """The process that writes."""
        return self._carrier

    def fence(self, deadline_s: float) -> bool:
        """Kill the carrier, and have the owner kill the one written to; see `Peer.fence`."""
        deadline = instant(deadline_s)
        posts = self._cut(PeerLost(f"the connection to {self._where} was fenced by this side"))
        self._gone = self._gone or not self._doubtful or self._is_gone(deadline)
        for post in posts:
            post.ticket.end_fenced(gone=self._gone, where=self._where)
        return self._gone

    def close(self) -> None:
        """End the connection, its threads and the carrier; see `Peer.close`."""
        self._end(PeerLost(f"the connection to {self._where} was closed by this side"))
        if threading.current_thread() not in (self._worker, self._hearer):
            self._worker.join()
            self._hearer.join()

    def forget(self, generation: int) -> None:
        """Have the carrier give a slab of this side back, once everything posted before is over."""
        with self._changed:
            if generation in self._lent and self._dead is None:
                self._lent.discard(generation)
                self._queue.append(generation)
                self._changed.notify_all()

    def _start(self, ticket: Ticket, chunks: list[Chunk], deadline: float) -> None:
        table = self._owner.memory().table
        loads: deque[_Load] = deque()
        for chunk in chunks:
            index = table.locate(chunk.pieces[:, 0], chunk.pieces[:, 2])
            if (index < 0).any():
                ticket.finish("failed", BoundsError("a slab was withdrawn while its pieces were posted"))
                return
            starts = np.array([region.address for region in table.regions], dtype=np.int64)
            numbers = np.array([region.generation for region in table.regions], dtype=np.int64)
            loads.append(_Load(chunk, numbers[index], chunk.pieces[:, 0] - starts[index]))
        with self._changed:
            error: TransportError | None = self._dead and PeerLost(f"{self._dead}; connect again")
            if error is None:
                try:
                    self._queue.append(_Post(ticket, loads, deadline, self._to_lend()))
                except TransportError as none:
                    error = none
                self._changed.notify_all()
        if error is not None:
            ticket.finish("failed", error)

    def _to_lend(self) -> list[tuple[Region, int]]:
        """Return the slabs that the carrier has not been given yet."""
        if {region.generation for region in self._owner.memory().table.regions} <= self._lent:
            return []
        fresh = []
        for region, fd in self._owner.slabs():
            if region.generation in self._lent:
                os.close(fd)
            else:
                self._lent.add(region.generation)
                fresh.append((region, fd))
        return fresh

    def _end(self, error: TransportError) -> None:
        for post in self._cut(error):
            post.ticket.finish("failed", error)

    def _cut(self, error: TransportError) -> list[_Post]:
        """Stop everything; return the posts that had not ended. The first error stands as the connection's."""
        with self._changed:
            posts = [each for each in self._queue if isinstance(each, _Post)]
            self._queue.clear()
            first = self._dead is None
            if first:
                self._dead = error
                self._doubtful = self._doubtful or self._asking
                self._gate.stop(EVERYTHING, 0.0, error)
                if not self._doubtful:  # tells the owner that its carrier need not die for this
                    with contextlib.suppress(OSError):
                        self._stream.send(WORD.pack(EVERYTHING), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            self._changed.notify_all()
        self._carrier.kill()
        if first:
            shut(self._sock)
        for post in posts:
            self._keep_back(post)
        return posts

    def _work(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Carry one chunk, or give one slab back; False once the connection is over.

        A frame of its own: the idle thread must not keep a closed slab mapped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._dead is not None)
            if self._dead is not None:
                return False
            first = self._queue[0]
            if isinstance(first, int):
                self._queue.popleft()
        if isinstance(first, int):
            with contextlib.suppress(TransportError):  # a dead carrier has given everything back
                self._carrier.take_back(first, instant(FORGET_S))
        else:
            self._step(first)
        return True

    def _step(self, post: _Post) -> None:
        self._next_deadline()
        if post.ticket.done:
            return
        load = post.loads[0]
        generation = load.chunk.region.generation
        try:
            with self._gate.passing(generation):
                post.ticket.advance(0)
                try:
                    self._carry(post, load)
                except TransportError as error:
                    self._fail(post, error)
                    return
        except TransportError as error:  # the gate is closed
            if isinstance(error, BoundsError):
                self._drop(post)
                post.ticket.finish("failed", error)
            return
        post.loads.popleft()
        post.ticket.advance(load.chunk.nbytes)
        if not post.loads:
            self._drop(post)
            post.ticket.finish("landed")

    def _carry(self, post: _Post, load: _Load) -> None:
        """Have the carrier write a chunk. Raises TransportError, PeerLost or DeadlineExceeded; it is doubtful then."""
        with self._changed:
            if self._dead is not None:
                raise PeerLost(str(self._dead))
            self._asking = True
            lend, post.lend = post.lend, []
        try:
            for region, fd in lend:
                self._carrier.lend(region, fd, post.deadline)
            pieces = load.chunk.pieces.copy()
            pieces[:, 1] += self._bases[load.chunk.region.generation] - load.chunk.region.address
            pieces[:, 0] = load.offsets
            for generation in np.unique(load.generations).tolist():
                base = self._carrier.base(generation)
                if base is None:
                    raise TransportError("a slab of this side was closed before it was lent; register it again")
                pieces[load.generations == generation, 0] += base
            self._carrier.ask(wire.Write(pieces.tobytes()), self._next_deadline)
        except BaseException:  # whatever broke: nobody knows what has landed
            self._doubtful = True
            raise
        finally:
            for _, fd in lend:
                os.close(fd)
            with self._changed:
                self._asking = False

    def _next_deadline(self) -> float:
        """End the posts that are late, but for the one under way; return when the next will be."""
        now = time.monotonic()
        with self._changed:
            posts = [each for each in self._queue if isinstance(each, _Post)]
            late = [each for each in posts if each.deadline <= now and not (self._asking and each is posts[0])]
            for each in late:
                self._queue.remove(each)
            limit = min((each.deadline for each in posts if each not in late), default=float("inf"))
        for each in late:
            text = (
                f"{each.ticket.bytes_done} of {each.ticket.nbytes} bytes were written in time; the rest was not begun"
            )
            self._keep_back(each)
            each.ticket.finish("failed", DeadlineExceeded(text))
        return limit

    def _keep_back(self, post: _Post) -> None:
        """Let go of what a post was to lend."""
        with self._changed:
            lend, post.lend = post.lend, []
            self._lent -= {region.generation for region, _ in lend}
        for _, fd in lend:
            os.close(fd)

    def _drop(self, post: _Post) -> None:
        with self._changed:
            if post in self._queue:
                self._queue.remove(post)
        self._keep_back(post)

    def _fail(self, post: _Post, error: TransportError) -> None:
        """End the connection over a failed write: what has landed, and will, is not known."""
        if isinstance(error, DeadlineExceeded):
            text = f"{post.ticket.bytes_done} of {post.ticket.nbytes} bytes were written to {self._where} in time"
            error = DeadlineExceeded(f"{text}; the rest may still land until the peer is fenced")
        elif self._dead is None:
            self._hearer.join(HEAR_S)
            if not self._hearer.is_alive():
                return  # it has ended everything with the reason
        others = PeerLost(f"the connection to {self._where} was cut: a write failed ({error}); connect again")
        for each in self._cut(others):
            each.ticket.finish("failed", error if each is post else others)

    def _hear(self) -> None:
        """Obey the owner's demands to stop, until either side ends the connection; then close the socket."""
        self._end(self._obey())
        with self._changed:
            self._sock.close()

    def _obey(self) -> TransportError:
        fenced = PeerLost(f"{self._where} has fenced this connection; connect again")
        word = bytearray(WORD.size)
        try:
            while self._stream.fill(memoryview(word)):
                (generation,) = WORD.unpack(word)
                while not self._gate.stop(generation, instant(LOOK_S), fenced):
                    if self._dead is not None or _hung_up(self._sock):
                        return fenced
                with self._changed:
                    if self._doubtful or self._dead is not None:
                        return fenced  # this side cannot say that it has stopped
                    self._stream.send(bytes(word), socket.MSG_NOSIGNAL)
                if generation == EVERYTHING:
                    return fenced
        except OSError as broken:
            return PeerLost(f"the connection to {self._where} broke: {broken}")
        return PeerLost(f"{self._where} has closed the connection or died; connect again")


def _hung_up(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection, without reading from it."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))
