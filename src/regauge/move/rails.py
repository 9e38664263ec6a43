"""The compute-plane NICs of one side: a transport on each, the same slabs on all of them, and a connection to a peer over each pair.

The i-th NIC of the decode side is reached from the i-th NIC of the prefill side, as rail-optimized networks are wired; where
prefill has fewer, they take turns, and where it has more, its peers do. Flow control says which of them a transfer comes over.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Sequence
from typing import Self

from regauge.errors import ConfigError, ProtocolError
from regauge.move.memory import Slab
from regauge.move.pieces import Int64s
from regauge.move.transport import Inbound, Peer, Region, Transport, instant

MAX_NICS = 16


class Rails:
    """One transport for each NIC, all of one kind. Close it, which closes them.

    `names` are for people: what flow control and its figures call each NIC. Raises ConfigError for no transport, too many,
    or names that do not tell them apart.
    """

    def __init__(self, transports: Sequence[Transport], names: Sequence[str] = ()) -> None:
        self.transports = tuple(transports)
        self.names = tuple(names) or tuple(f"nic{i}" for i in range(len(self.transports)))
        if not 1 <= len(self.transports) <= MAX_NICS or len({each.kind for each in self.transports}) != 1:
            raise ConfigError(f"{len(self.transports)} transports; give 1 to {MAX_NICS} of one kind, one for each NIC")
        if len(set(self.names)) != len(self.transports):
            raise ConfigError(f"NICs {', '.join(self.names)}: give each of them once")
        self.caps = self.transports[0].caps
        self.medium = self.transports[0].medium
        self.kind = self.transports[0].kind
        self.session = self.transports[0].session
        """Identity of this side; a restarted process has another."""

    def register(self, slab: Slab) -> tuple[Region, ...]:
        """Make a slab reachable over every NIC, or over none. Raises as `Transport.register`."""
        done: list[Region] = []
        try:
            for transport in self.transports:
                done.append(transport.register(slab))  # noqa: PERF401  # what is done so far counts when one fails
        except BaseException:  # undone, whatever broke
            self.unregister(done)
            raise
        return tuple(done)

    def unregister(self, regions: Sequence[Region]) -> None:
        """Withdraw what `register` returned. Raises as `Transport.unregister`, once every NIC has been told."""
        with contextlib.ExitStack() as stack:
            for transport, region in zip(self.transports, regions, strict=False):
                stack.callback(transport.unregister, region)

    def export(self) -> list[bytes]:
        """Describe each NIC to a peer: see `Transport.export`."""
        return [transport.export() for transport in self.transports]

    def connect(self, exports: Sequence[bytes], deadline_s: float, *, peer: str) -> Connections:
        """Connect to every NIC that a peer exports. Raises as `Transport.connect`; ProtocolError for none or too many."""
        if not 1 <= len(exports) <= MAX_NICS:
            raise ProtocolError(f"{peer} exports {len(exports)} NICs; 1 to {MAX_NICS} are taken")
        count, deadline = len(self.transports), instant(deadline_s)
        turn = zlib.crc32(peer.encode()) if len(exports) < count else 0
        ways = tuple((turn + i) % count for i in range(len(exports)))
        peers: list[Peer] = []
        try:
            for way, exported in zip(ways, exports, strict=True):
                peers.append(self.transports[way].connect(exported, max(0.0, deadline - time.monotonic())))
        except BaseException:  # undone, whatever broke
            Connections(peers, ways).close()
            raise
        return Connections(peers, ways)

    def inbound(self) -> list[Inbound]:
        """Return the live incoming connections of all NICs."""
        return [each for transport in self.transports for each in transport.inbound()]

    def allow(self, sessions: Sequence[str], grant: int, ranges: Int64s) -> None:
        """Let a peer's connections write: see `Transport.allow`."""
        for transport, session in zip(self.transports, sessions, strict=True):
            transport.allow(session, grant, ranges)

    def revoke(self, sessions: Sequence[str], grant: int, deadline_s: float) -> bool:
        """Withdraw a grant from a peer's connections: see `Transport.revoke`. All are asked, whatever the first says."""
        told = [t.revoke(session, grant, deadline_s) for t, session in zip(self.transports, sessions, strict=True)]
        return all(told)

    def fence_inbound(self, sessions: Sequence[str], deadline_s: float) -> bool:
        """End a peer's connections. True only when nothing can land through any of them any more."""
        deadline = instant(deadline_s)
        told = [
            transport.fence_inbound(session, max(0.0, deadline - time.monotonic()))
            for transport, session in zip(self.transports, sessions, strict=True)
        ]
        return all(told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every transport; see `Transport.close`."""
        with contextlib.ExitStack() as stack:
            for transport in self.transports:
                stack.callback(transport.close)


class Connections:
    """The connections to one peer: one for each of its NICs, in its order."""

    def __init__(self, peers: Sequence[Peer], ways: Sequence[int]) -> None:
        self.peers = tuple(peers)
        self.ways = tuple(ways)
        """Which of this side's NICs each goes over."""

    @property
    def sessions(self) -> list[str]:
        """Their names, known to both ends."""
        return [peer.session for peer in self.peers]

    def fence(self, deadline_s: float) -> bool:
        """End all of them. True only when nothing posted on any can land any more; may be asked again."""
        deadline = instant(deadline_s)
        told = [peer.fence(max(0.0, deadline - time.monotonic())) for peer in self.peers]
        return all(told)

    def close(self) -> None:
        """End all of them; see `Peer.close`. Not a fence."""
        with contextlib.ExitStack() as stack:
            for peer in self.peers:
                stack.callback(peer.close)
