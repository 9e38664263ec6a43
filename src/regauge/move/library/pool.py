"""The carriers into which peers write: one for each peer, or shared where registering memory is dear."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from regauge.errors import TransportError
from regauge.move.library.carrier import Carrier
from regauge.move.listener import Session


@dataclass
class _Entry:
    carrier: Carrier
    users: set[Session] = field(default_factory=set)


class Pool:
    """Hands out carriers to sessions, at most `limit` to each. Killing one ends all its sessions."""

    def __init__(self, spawn: Callable[[], Carrier], limit: int) -> None:
        self._spawn, self._limit = spawn, limit
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._closed = False

    @property
    def shares(self) -> bool:
        """Whether a carrier may serve several sessions."""
        return self._limit > 1

    def carriers(self) -> list[Carrier]:
        """Return the live carriers."""
        with self._lock:
            return [entry.carrier for entry in self._entries]

    def take(self, session: Session) -> Carrier:
        """Return a carrier for a session, not opened yet if it is new. Raises TransportError."""
        with self._lock:
            if self._closed:
                raise TransportError("the transport is closing")
            for entry in self._entries:
                if len(entry.users) < self._limit and entry.carrier.alive:
                    entry.users.add(session)
                    return entry.carrier
            entry = _Entry(self._spawn(), {session})
            self._entries.append(entry)
            return entry.carrier

    def leave(self, session: Session, *, clean: bool, deadline_s: float) -> bool:
        """Let a session go. `clean`: its writer has confirmed that nothing is under way.

        True when nothing can land through it any more: its carrier is dead unless others use it and it was clean.
        """
        with self._lock:
            entry = next((each for each in self._entries if session in each.users), None)
            if entry is None:
                return True
            if clean and len(entry.users) > 1 and entry.carrier.alive:
                entry.users.discard(session)
                return True
            others = entry.users - {session}
        if not entry.carrier.kill(deadline_s):
            return False
        with self._lock:
            if entry in self._entries:
                self._entries.remove(entry)
        for other in others:
            other.hang_up()
        return True

    def close(self) -> None:
        """Kill every carrier."""
        with self._lock:
            self._closed = True
            entries, self._entries = self._entries, []
        for entry in entries:
            entry.carrier.kill()
