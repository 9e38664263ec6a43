"""The shm transport: processes of one user on one host map each other's slabs and copy.

A listener on an abstract Unix socket (unguessable name, gone with the process) passes the slabs' descriptors to peers
that run under the same user and hold the key. A write is a copy by the initiator: it lands at once, the receiver takes
no part in it and **does not check it** (`caps.verifies_receiver_bounds` is False): the initiator's own bounds check is
the only one, as nothing can stop a process that has the memory mapped. Kernels may write a peer's region directly,
inside `ShmPeer.writing`.

Failure. A fence needs no guess: the initiator stops its own copies, and on the receiver's demand confirms over the
socket that they have stopped. A socket that the kernel has closed means a writer that is dead, or has closed the peer
after its last copy. A stopped (SIGSTOP) writer is neither, so the receiver's fence is False while that lasts.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time

import msgspec

from regauge.errors import AuthError, DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move.gate import EVERYTHING, StoppingSession
from regauge.move.listener import (
    MAX_MESSAGE,
    VERSION,
    Hello,
    Listener,
    ListeningTransport,
    greet,
    recv_message,
    send_message,
)
from regauge.move.memory import Slab, attach
from regauge.move.shm_peer import ShmPeer
from regauge.move.transport import (
    Caps,
    Region,
    decode_export,
    instant,
    new_session,
)

_PURPOSE = "regauge-shm"
_FDS = 64  # descriptors per message; the kernel allows 253
_CREDENTIALS = struct.Struct("iII")  # struct ucred, unix(7)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The regions whose descriptors follow."""

    regions: tuple[Region, ...]


class ShmTransport(ListeningTransport):
    """Shares this process's slabs with processes of the same user on this host."""

    kind = "shm"
    caps = Caps(
        one_sided=True,
        max_pieces=4096,  # bounds how long small copies hold the GIL
        max_bytes=32 << 20,
        needs_registration=True,
        can_fence=True,
        verifies_receiver_bounds=False,
        maps_memory=True,
    )

    def __init__(self, *, key: bytes, name: str) -> None:
        super().__init__(name)
        self._key = key
        self._address = f"regauge-{secrets.token_hex(16)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind("\0" + self._address)
            sock.listen(64)
        except OSError as error:
            sock.close()
            raise TransportError(f"cannot listen on an abstract Unix socket: {error}") from error
        self._listener = Listener(
            sock, key=key, purpose=_PURPOSE, transport=self.session, admit=self._admit, vet=_same_user
        )

    @property
    def address(self) -> str:
        """The abstract socket's name, without its leading zero byte."""
        return self._address

    def connect(self, exported: bytes, deadline_s: float) -> ShmPeer:
        """Connect to what a peer exported, and map its regions; see `Transport.connect`.

        Regions of the export that the peer has withdrawn since are refused when they are written to.
        """
        target, deadline, session = decode_export(exported, self.kind), instant(deadline_s), new_session()
        hello = Hello(VERSION, "data", session, target.session, self.name)
        slabs: dict[int, Slab] = {}
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise TransportError(f"cannot make a socket: {error}; raise the limit on open files") from error
        try:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.connect("\0" + target.address)
            _same_user(sock)
            greet(sock, self._key, _PURPOSE, hello, deadline)
            wanted = {region.generation: region for region in target.regions}
            _receive_slabs(sock, wanted, slabs, deadline)
            return ShmPeer(self, target, session, sock, slabs)
        except BaseException as error:  # undone whatever broke, also an interrupt
            sock.close()
            for slab in slabs.values():
                slab.close()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{target.address} did not accept a connection in time") from error
            if isinstance(error, OSError):
                raise PeerLost(
                    f"cannot connect to {target.address}: {error}; is the peer alive on this host?"
                ) from error
            raise

    def _admit(self, sock: socket.socket, hello: Hello) -> ShmSession:
        return ShmSession(sock, hello, self)

    def _revoke(self, generation: int) -> None:
        deadline = instant(self.close_s)
        for session in self._listener.sessions():
            if isinstance(session, ShmSession) and not session.stop(generation, deadline):
                raise DeadlineExceeded(
                    f"peer {session.peer!r} did not confirm within {self.close_s} s that it has stopped writing to a "
                    "withdrawn slab; keep the memory until fence_inbound of its session is true"
                )


class ShmSession(StoppingSession):
    """The owner's end of one mapping."""

    def __init__(self, sock: socket.socket, hello: Hello, transport: ShmTransport) -> None:
        super().__init__(sock, hello)
        self._transport = transport

    def fence(self, deadline: float) -> bool:
        """Have the writer stop; hang up once it has confirmed."""
        if not self.stop(EVERYTHING, deadline):
            return False
        self.proven = True
        self.hang_up()
        self.ended.wait(max(0.0, deadline - time.monotonic()))  # only tidiness: the writer's word is proof enough
        return True

    def _is_proof(self) -> bool:
        """The writer's end was closed, by itself after its last copy or by the kernel; unless it was this side."""
        return not self.hung_up

    def _offer(self, deadline: float) -> None:
        shared = self._transport.slabs()
        try:
            send_message(self.sock, Table(tuple(region for region, _ in shared)), deadline)
            for at in range(0, len(shared), _FDS):
                self.sock.settimeout(max(deadline - time.monotonic(), 1e-3))
                socket.send_fds(self.sock, [b"F"], [fd for _, fd in shared[at : at + _FDS]])
        finally:
            for _, fd in shared:
                os.close(fd)


def _receive_slabs(sock: socket.socket, wanted: dict[int, Region], slabs: dict[int, Slab], deadline: float) -> None:
    """Map the wanted generations into `slabs`, whose entries the caller closes whatever happens.

    Raises ProtocolError for a slab that is not as exported: posts are checked against the export, and would leave the mapping.
    """
    regions = recv_message(sock, Table, deadline, MAX_MESSAGE).regions
    for at in range(0, len(regions), _FDS):
        batch = regions[at : at + _FDS]
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        _, fds, _, _ = socket.recv_fds(sock, 1, _FDS, socket.MSG_CMSG_CLOEXEC)
        try:
            if len(fds) != len(batch):
                raise PeerLost("the peer closed the connection while it passed its slabs")
            for region, fd in zip(batch, fds, strict=True):
                exported = wanted.pop(region.generation, None)
                if exported is not None and exported != region:
                    raise ProtocolError(f"the peer's slab {region} is not what it exported, {exported}")
                if exported is not None:
                    slabs[region.generation] = attach(fd, region.nbytes, region.name)
        finally:
            for fd in fds:
                os.close(fd)
    sock.settimeout(None)


def _same_user(sock: socket.socket) -> None:
    """Refuse another user's process: the kernel says whose it is. Raises AuthError."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise AuthError(f"the peer runs as user {uid}, this side as {os.geteuid()}; run both as one user, or use tcp")
