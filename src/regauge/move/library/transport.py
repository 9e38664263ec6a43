"""What every transport over a foreign library shares: sessions, carriers, and the fence that needs nobody's word.

A peer connects to our `Listener` first: it proves the key, and that somebody is there. Then the owner makes a carrier for
it, registers its slabs there, and sends the table of addresses. The writer has a carrier for each peer of its own, so
that one that is silent keeps nobody else waiting.

Fence. The owner kills the carrier that the writer writes to. Once the kernel has reaped it, no thread of it runs, its
sockets, mappings and RDMA registrations are gone, and nothing can land through it, whatever the writer, frozen or mad,
sends later. Where a carrier is shared, the writer is asked first, and believed only if all its writes have succeeded.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from regauge.errors import DeadlineExceeded, PeerLost, TransportError
from regauge.move.dial import Endpoint, tune
from regauge.move.gate import EVERYTHING, StoppingSession
from regauge.move.library import wire
from regauge.move.library.carrier import Carrier, Limit
from regauge.move.library.peer import LibraryPeer
from regauge.move.library.pool import Pool
from regauge.move.library.sockets import listening
from regauge.move.listener import (
    MAX_MESSAGE,
    VERSION,
    Hello,
    Listener,
    ListeningTransport,
    recv_message,
    send_message,
)
from regauge.move.memory import Slab
from regauge.move.tls import Tls
from regauge.move.transport import Caps, Exported, Region, decode_export, instant, new_session

MAX_REGIONS = 256
"""Mooncake takes 13 s to register 4,000 regions and 96 s for 8,000; a hundred cost nothing."""
TRIAL_S = 30.0
ASK_S = 2.0
"""How long a writer may take to confirm that it has stopped, before its carrier is killed."""
_log = logging.getLogger(__name__)

CAPS = Caps(
    one_sided=True,
    max_pieces=wire.MAX_PIECES,
    max_bytes=64 << 20,
    needs_registration=True,
    can_fence=True,
    verifies_receiver_bounds=True,
    maps_memory=False,
)


class Landing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a region lies in the carrier."""

    generation: int
    base: int


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a writer's carrier must know of the owner's."""

    address: bytes
    scratch: int
    landings: tuple[Landing, ...]


class LibraryTransport(ListeningTransport):
    """Moves bytes with the library that `request` names, between addresses of the plane that `host` names.

    `tls` is for the sessions; the library's own connections stay as they are. Raises ConfigError for a host that cannot be
    bound, TransportError where the library does not start.
    """

    def __init__(
        self,
        *,
        key: bytes,
        name: str,
        host: str,
        port: int,
        tls: Tls | None,
        request: wire.Open,
        environment: dict[str, str],
        peers_per_carrier: int,
    ) -> None:
        super().__init__(name)
        purpose = f"regauge-{self.kind}"
        self._end = Endpoint(key, purpose, host, tls=tls, ready=_bound_sends)
        self._request = msgspec.structs.replace(request, host=self._end.address)
        self._environment = environment
        self._spare: list[Carrier] = []
        self._spawning = threading.Lock()
        self._peers: weakref.WeakSet[LibraryPeer] = weakref.WeakSet()
        self.pool = Pool(self._spawn, peers_per_carrier)
        sock, self._address = self._end.listen(port)
        try:
            self.exposed = self._try_out()
            """Where a carrier listens, (address, port), other than on this side's address."""
        except BaseException:  # closed whatever broke, also by an interrupt
            sock.close()
            raise
        self._listener = Listener(
            sock, key=key, purpose=purpose, transport=self.session, admit=self._admit, secure=self._end.secure
        )

    @property
    def medium(self) -> str:
        """See `Transport.medium`: what carries the bytes costs, not the library."""
        return "rdma" if self._request.protocol == "rdma" else self.kind

    @property
    def address(self) -> str:
        """`host:port`, or `[host]:port`, of the sessions; the library's own ports are told to peers there."""
        return self._address

    def register(self, slab: Slab) -> Region:
        """See `Transport.register`. Raises TransportError also beyond MAX_REGIONS."""
        if len(self._live) >= MAX_REGIONS:
            raise TransportError(
                f"{len(self._live)} slabs are registered already, and the time that {self.kind} takes for each grows with "
                "their number; register few, large ones"
            )
        return super().register(slab)

    def connect(self, exported: bytes, deadline_s: float) -> LibraryPeer:
        """Connect to what a peer exported; see `Transport.connect`. The library learns of it last."""
        target, deadline, session = decode_export(exported, self.kind), instant(deadline_s), new_session()
        stream = self._end.dial(target, Hello(VERSION, "data", session, target.session, self.name), deadline)
        carrier: Carrier | None = None
        try:
            carrier = self._spawn()  # starts while the owner makes its own
            table = recv_message(stream, Table, deadline, MAX_MESSAGE)
            carrier.open(deadline)
            self._check_address(table.address, target.address)
            carrier.ask(wire.Connect(table.address, table.scratch), deadline)
            lent = {each.generation for each in self.lend(carrier, deadline)}
            stream.settimeout(None)
            bases = {each.generation: each.base for each in table.landings}
            peer = LibraryPeer(self, target, session, stream, carrier, bases, lent, self._asker(target, session))
        except BaseException:  # undone whatever broke, also an interrupt
            stream.sock.close()
            if carrier is not None:
                carrier.kill()
            raise
        self._peers.add(peer)
        return peer

    def _asker(self, target: Exported, session: str) -> Callable[[float], bool]:
        return lambda limit: self._end.is_gone(target, session, self.name, limit)

    def lend(self, carrier: Carrier, limit: Limit) -> tuple[Landing, ...]:
        """Map and register every slab in a carrier. Raises as `Carrier.ask`."""
        shared = self.slabs()
        try:
            return tuple(Landing(region.generation, carrier.lend(region, fd, limit)) for region, fd in shared)
        finally:
            for _, fd in shared:
                os.close(fd)

    def close(self) -> None:
        """End all incoming connections with their carriers, and stop listening. Peers are closed by who opened them."""
        super().close()
        self.pool.close()
        with self._spawning:
            spare, self._spare = self._spare, []
        for carrier in spare:
            carrier.kill()

    def _check_address(self, theirs: bytes, control: str) -> None:
        """Refuse an address of a peer's engine that is not where the peer itself is. Raises TransportError."""

    def _spawn(self) -> Carrier:
        with self._spawning:
            if self._spare and self._spare[-1].alive:
                return self._spare.pop()
        return Carrier(self._request, self._environment)

    def _try_out(self) -> list[tuple[str, int]]:
        """Start the library, so that what is wrong with it is said now; the carrier is kept for the first who needs one."""
        carrier = Carrier(self._request, self._environment)
        try:
            carrier.open(instant(TRIAL_S))
            exposed = [each for each in listening(carrier.pid) if each[0] != self._request.host]
        except BaseException:  # a process is never left behind, whatever broke
            carrier.kill()
            raise
        self._spare.append(carrier)
        return exposed

    def _admit(self, sock: socket.socket, hello: Hello) -> LibrarySession:
        tune(sock)
        _bound_sends(sock)
        return LibrarySession(sock, hello, self)

    def _revoke(self, generation: int) -> None:
        deadline = instant(self.close_s)
        for session in self._listener.sessions():
            if not isinstance(session, LibrarySession) or session.stop(generation, min(deadline, instant(ASK_S))):
                continue
            if not session.fence(deadline):
                raise DeadlineExceeded(
                    f"neither peer {session.peer!r} nor the carrier it writes to has ended within {self.close_s} s; keep "
                    "the memory until fence_inbound of its session is true"
                )
        for carrier in self.pool.carriers():
            try:
                carrier.take_back(generation, deadline)
            except TransportError as error:  # it is dead, or keeps memory that nobody writes to
                _log.warning("%s: a withdrawn slab was not given back: %s", self.kind, error)
        for peer in list(self._peers):
            peer.forget(generation)


class LibrarySession(StoppingSession):
    """The owner's end of one peer: its carrier, and the demand to stop."""

    offer_s = 30.0  # a process starts, and memory is registered

    def __init__(self, sock: socket.socket, hello: Hello, transport: LibraryTransport) -> None:
        super().__init__(sock, hello)
        self._transport, self._pool = transport, transport.pool

    def fence(self, deadline: float) -> bool:
        """Believe a writer whose carrier others use, if it says in time that it has stopped; else kill the carrier."""
        if self._pool.shares:
            self.stop(EVERYTHING, min(deadline, instant(ASK_S)))
        self.hang_up()
        if not self._table.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False  # the carrier is still being made: hanging up ends that
        self._table.release()
        if self._leave(deadline - time.monotonic()):
            self.proven = True
            self.ended.wait(max(0.0, deadline - time.monotonic()))  # only tidiness: a dead carrier is proof enough
        return self.proven

    def _is_proof(self) -> bool:
        """A writer that has gone may have left bytes under way: its carrier goes too, unless it has said otherwise."""
        return self._leave(self._transport.close_s)

    def _leave(self, left_s: float) -> bool:
        return self._pool.leave(self, clean=self.confirmed(EVERYTHING), deadline_s=left_s)

    def _offer(self, deadline: float) -> None:
        def limit() -> float:
            if self.hung_up:
                raise PeerLost("the session was ended while its carrier started")
            return deadline

        carrier = self._pool.take(self)
        carrier.open(limit)
        landings = self._transport.lend(carrier, limit)
        about = carrier.ask(wire.Describe(), limit)
        limit()
        send_message(self.stream, Table(about.data, about.value, landings), deadline)


def _bound_sends(sock: socket.socket) -> None:
    """Let no demand of a few bytes wait for a peer that does not read."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))  # struct timeval
