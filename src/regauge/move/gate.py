"""Stopping a one-sided writer: a gate that each of its writes passes, and the owner's demand to close it.

After the table of regions, both directions of a session speak in words: the owner's `stop writing to this generation`,
and the writer's `I have stopped`. Where the owner cannot rely on the writer's word, its session says what proves more.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

from regauge.errors import BoundsError, PeerLost, TransportError
from regauge.move.listener import Hello, Session
from regauge.move.transport import instant

WORD = struct.Struct("<Q")
"""A generation, or EVERYTHING: `stop writing to it` from the owner, `I have stopped` from the writer."""
EVERYTHING = 0
_log = logging.getLogger(__name__)


class Gate:
    """Counts running writes by generation, and stops new ones for good."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[int] = Counter()
        self._stopped: set[int] = set()
        self._error: TransportError | None = None

    @contextlib.contextmanager
    def passing(self, generation: int) -> Iterator[None]:
        """Hold the gate for one write. Raises BoundsError for a withdrawn generation, PeerLost when all is stopped."""
        with self._changed:
            if self._error is not None:
                raise PeerLost(str(self._error))
            if generation in self._stopped:
                raise BoundsError(f"generation {generation} is over: the peer has withdrawn the slab; connect anew")
            self._running[generation] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[generation] -= 1
                self._changed.notify_all()

    def stop(self, generation: int, deadline: float, error: TransportError) -> bool:
        """Let no new write in, and wait for those inside. False when some are inside at the deadline."""
        with self._changed:
            if generation == EVERYTHING:
                self._error = self._error or error
            else:
                self._stopped.add(generation)
            return self._changed.wait_for(
                lambda: not (self._running[generation] if generation else self._running.total()),
                max(0.0, deadline - time.monotonic()),
            )

    @property
    def error(self) -> TransportError | None:
        """Why everything is stopped, if it is."""
        return self._error


class StoppingSession(Session):
    """The owner's end of a session whose writer stops on demand."""

    offer_s = 5.0
    """Most seconds that handing over the table may take."""

    def __init__(self, sock: socket.socket, hello: Hello) -> None:
        super().__init__(sock, hello)
        self._changed = threading.Condition()
        self._stopped: set[int] = set()
        self._table = threading.Lock()
        self._offered = False

    @abc.abstractmethod
    def _offer(self, deadline: float) -> None:
        """Hand over the table of regions. May raise as `run`."""

    @abc.abstractmethod
    def _is_proof(self) -> bool:
        """Whether the connection's end proves that nothing can land any more. Called once, after it."""

    def run(self) -> None:
        """Hand over the table, then take confirmations until the writer is gone."""
        try:
            with self._table:
                if not self.hung_up:
                    self.proven = False
                    self._offer(instant(self.offer_s))
                self._offered = True
            self.sock.settimeout(None)
            word = bytearray(WORD.size)
            with contextlib.suppress(ConnectionResetError):  # the writer's end closed with words unread
                while self.stream.fill(memoryview(word)):
                    with self._changed:
                        self._stopped.add(WORD.unpack(word)[0])
                        self._changed.notify_all()
        finally:
            proof = self.proven or self._is_proof()
            with self._changed:
                self.proven = proof
                self._changed.notify_all()

    def confirmed(self, generation: int) -> bool:
        """Whether the writer has said that it writes to that generation no more."""
        return not self._stopped.isdisjoint((generation, EVERYTHING))

    def stop(self, generation: int, deadline: float) -> bool:
        """Have the writer stop writing to one generation, or to everything. True once it has confirmed or is gone."""
        if not self._table.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        try:
            # Before the table is handed over the writer has nothing to write to, and a withdrawn generation will not be
            # in it; but a table that is to come must not be sent at all.
            if not self._offered:
                if generation == EVERYTHING:
                    self.hang_up()
                return True
            self.stream.send(WORD.pack(generation), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:  # it has not read for very long
            return False
        except OSError:  # its end is closed: `run` is about to see that
            _log.debug("a demand to stop found the connection closed", exc_info=True)
        finally:
            self._table.release()
        with self._changed:
            self._changed.wait_for(
                lambda: self.proven or self.confirmed(generation), max(0.0, deadline - time.monotonic())
            )
            return self.proven or self.confirmed(generation)
