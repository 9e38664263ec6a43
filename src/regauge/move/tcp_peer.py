"""The sending end of the tcp transport: a thread per lane sends frames, one takes acknowledgements and watches deadlines.

Chunks wait in one queue, and whichever lane is free takes the next: a slow lane takes fewer.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from regauge.errors import BoundsError, DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move import frames
from regauge.move.listener import shut
from regauge.move.stream import Stream
from regauge.move.transport import Chunk, Exported, Peer, Ticket, Transport, instant

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger: throw unsent bytes away, they must not land later


@dataclass
class _Post:
    """A ticket that has not ended."""

    ticket: Ticket
    deadline: float
    waiting: int
    """Chunks not yet acknowledged or dropped."""
    error: TransportError | None = None


class TcpPeer(Peer):
    """Streams to one receiver. `is_gone(deadline)` asks the receiver to end and confirm this session."""

    def __init__(
        self,
        transport: Transport,
        target: Exported,
        session: str,
        streams: list[Stream],
        is_gone: Callable[[float], bool],
    ) -> None:
        super().__init__(transport, target, session)
        self._where = f"{target.address} (session {session[:8]})"
        self._streams, self._is_gone = streams, is_gone
        self._changed = threading.Condition()
        self._queue: deque[tuple[int, Chunk]] = deque()
        self._posts: dict[int, _Post] = {}
        self._count = 0
        self._dead: TransportError | None = None
        self._gone = False
        self._watched = float("inf")
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._senders = [
            threading.Thread(target=self._send, args=(each,), name="regauge-tcp-send", daemon=True) for each in streams
        ]
        self._taker = threading.Thread(target=self._take, name="regauge-tcp-acks", daemon=True)
        for thread in (*self._senders, self._taker):
            thread.start()

    def fence(self, deadline_s: float) -> bool:
        """Cut the stream and have the receiver confirm that its reader has ended; see `Peer.fence`."""
        deadline = instant(deadline_s)
        posts = self._cut(PeerLost(f"the connection to {self._where} was fenced by this side"))
        self._gone = self._gone or self._is_gone(deadline)
        for post in posts:
            post.ticket.end_fenced(gone=self._gone, where=self._where)
        return self._gone

    def close(self) -> None:
        """End the connection and its threads; see `Peer.close`."""
        error = PeerLost(f"the connection to {self._where} was closed by this side")
        self._fail(self._cut(error), error)
        if threading.current_thread() not in (*self._senders, self._taker):
            self._taker.join()

    def _start(self, ticket: Ticket, chunks: list[Chunk], deadline: float) -> None:
        with self._changed:
            dead = self._dead
            if dead is None:
                self._count += 1
                self._posts[self._count] = _Post(ticket, deadline, len(chunks))
                self._queue.extend((self._count, chunk) for chunk in chunks)
                self._changed.notify(len(chunks))
                if deadline < self._watched:
                    os.eventfd_write(self._wake, 1)
        if dead is not None:
            ticket.finish("failed", PeerLost(f"{dead}; connect again"))

    def _cut(self, error: TransportError) -> list[_Post]:
        """Stop everything; return the posts that had not ended. The first error stands as the connection's."""
        with self._changed:
            posts, self._posts = list(self._posts.values()), {}
            self._queue.clear()
            if self._dead is None:
                self._dead = error
                for stream in self._streams if posts else ():
                    with contextlib.suppress(OSError):
                        stream.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                os.eventfd_write(self._wake, 1)
                self._changed.notify_all()
        for stream in self._streams:
            shut(stream.sock)
        return posts

    @staticmethod
    def _fail(posts: list[_Post], error: TransportError) -> None:
        for post in posts:
            post.ticket.finish("failed", error)

    def _send(self, stream: Stream) -> None:
        while (item := self._next()) is not None:
            ident, chunk = item
            head = frames.encode_head(ident, chunk.region.generation, chunk.pieces, chunk.nbytes, chunk.grant)
            vector = np.empty((len(chunk.pieces) + 1, 2), dtype=np.int64)
            vector[0] = (head.ctypes.data, len(head))
            vector[1:] = chunk.pieces[:, ::2]
            try:
                stream.send_vector(vector)
            except OSError as error:
                lost = PeerLost(f"the connection to {self._where} broke while sending: {error}")
                self._fail(self._cut(lost), lost)
                return
            del item, chunk, head, vector  # an idle thread must not keep a closed slab mapped

    def _next(self) -> tuple[int, Chunk] | None:
        """Wait for a chunk to send; None when the connection is dead. Chunks of refused posts are dropped."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._dead is not None)
                if self._dead is not None:
                    return None
                ident, chunk = self._queue.popleft()
                post = self._posts.get(ident)
                if post is not None and post.error is None:
                    post.ticket.advance(0)
                    return ident, chunk
                ended = self._settle(ident)
            if ended is not None:
                ended.ticket.finish("failed", ended.error)

    def _settle(self, ident: int) -> _Post | None:
        """Count one chunk of a post as over, under the lock; return the post if it was the last."""
        post = self._posts.get(ident)
        if post is None:
            return None
        post.waiting -= 1
        return self._posts.pop(ident) if post.waiting == 0 else None

    def _take(self) -> None:
        lanes = {each.sock.fileno(): (each, frames.AckReader()) for each in self._streams}
        poll = select.poll()
        for number in lanes:
            poll.register(number, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while (patience := self._patience()) is not None:
            ready = {fd for fd, _ in poll.poll(patience)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            try:
                for number in ready & lanes.keys():
                    self._hear(*lanes[number])
            except (OSError, ProtocolError) as error:
                lost = PeerLost(f"the connection to {self._where} broke: {error}")
                self._fail(self._cut(lost), lost)
            self._expire()
        for sender in self._senders:
            sender.join()
        with self._changed:
            for stream in self._streams:
                stream.sock.close()
            os.close(self._wake)

    def _patience(self) -> int | None:
        """Milliseconds until the next deadline (-1: there is none); None when the connection is dead."""
        with self._changed:
            if self._dead is not None:
                return None
            self._watched = min((post.deadline for post in self._posts.values()), default=float("inf"))
            if self._watched == float("inf"):
                return -1
            return max(0, min(1 << 30, int((self._watched - time.monotonic()) * 1000) + 1))

    def _hear(self, stream: Stream, reader: frames.AckReader) -> None:
        for ack in reader.feed(stream.take()):
            if ack.status == frames.MALFORMED:
                raise ProtocolError(f"the peer cannot read what this side sent: {ack.reason}")
            with self._changed:
                post = self._posts.get(ack.ticket)
                if post is None:
                    raise ProtocolError("the peer acknowledged what was not sent")
                if ack.status == frames.LANDED:
                    post.ticket.advance(ack.payload)
                else:
                    post.error = post.error or BoundsError(f"refused by {self._where}: {ack.reason}")
                ended = self._settle(ack.ticket)
            if ended is not None:
                ended.ticket.finish("landed" if ended.error is None else "failed", ended.error)

    def _expire(self) -> None:
        """Fail the posts that are late, and cut the connection: their bytes must not go on."""
        now = time.monotonic()
        with self._changed:
            late = [post for post in self._posts.values() if post.deadline <= now]
        if not late:
            return
        others = PeerLost(f"the connection to {self._where} was cut: another post passed its deadline; connect again")
        for post in self._cut(others):
            if post.deadline > now:
                post.ticket.finish("failed", others)
                continue
            text = f"{post.ticket.bytes_done} of {post.ticket.nbytes} bytes were acknowledged by {self._where} in time"
            post.ticket.finish("failed", DeadlineExceeded(f"{text}; the rest may still land until the peer is fenced"))
