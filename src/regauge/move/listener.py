"""The accepting half that the shm and tcp transports share: authenticated sessions, bounded in number and in time.

Every connection proves the key, then says in one message what it wants: to write (`data`), or to learn that an
earlier session is over (`fence`). Strangers hold one thread and a few bytes each until a deadline cuts them.
"""

from __future__ import annotations

import abc
import logging
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from regauge.errors import ProtocolError, TransportError
from regauge.move.auth import Wire, authenticate_socket, recv_exactly, send_all
from regauge.move.stream import Stream
from regauge.move.transport import Inbound, Transport, instant

HELLO_DEADLINE_S = 5.0
MAX_SESSIONS = 1024
"""Connections that are served at once, lanes counted one by one."""
MAX_LANES = 16
MAX_STRANGERS = 64
MAX_FENCE_S = 60.0
MAX_NAME = 256
MAX_MESSAGE = 1 << 20
VERSION = 2
_REMEMBERED = 4096
_LENGTH = struct.Struct("<I")
_log = logging.getLogger(__name__)

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a connection says after authentication."""

    version: int
    want: Literal["data", "fence"]
    session: str
    transport: str
    """The transport that the connector means to talk to; a restarted process is another one."""
    peer: str
    deadline_s: float = 0.0
    lane: int = 0
    """Which of the session's connections this is: a peer may write through several at once."""


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer. For `fence`, `ok` means that the session is over for good."""

    ok: bool
    reason: str = ""


def send_message(sock: Wire, message: msgspec.Struct, deadline: float) -> None:
    """Send one length-prefixed msgpack message. Raises PeerLost or DeadlineExceeded."""
    data = msgspec.msgpack.encode(message)
    send_all(sock, _LENGTH.pack(len(data)) + data, deadline)


def recv_message(sock: Wire, kind: type[T], deadline: float, limit: int = 4096) -> T:
    """Receive one message of at most `limit` bytes. Raises ProtocolError, PeerLost or DeadlineExceeded."""
    (length,) = _LENGTH.unpack(recv_exactly(sock, _LENGTH.size, deadline))
    if length > limit:
        raise ProtocolError(f"a message of {length} bytes; at most {limit} are taken")
    try:
        return msgspec.msgpack.decode(recv_exactly(sock, length, deadline), type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a malformed message: {error}") from error


class Session(abc.ABC):
    """One live incoming connection."""

    def __init__(self, sock: socket.socket, hello: Hello) -> None:
        self.sock = sock
        self.stream = Stream(sock)
        """How to talk over the socket; the listener replaces it where the transport secures its connections."""
        self.session = hello.session
        self.lane = hello.lane
        self.peer = hello.peer
        self.nbytes = 0
        self.ended = threading.Event()
        """Set when `run` has returned and the socket is closed."""
        self.proven = True
        """Whether nothing can land any more once it has ended."""
        self.hung_up = False

    @abc.abstractmethod
    def run(self) -> None:
        """Serve until the connection ends. May raise OSError, ProtocolError or TransportError."""

    @abc.abstractmethod
    def fence(self, deadline: float) -> bool:
        """End it; True only when nothing can land any more."""

    def hang_up(self) -> None:
        """Wake whoever waits on the socket and let it end; callable from any thread."""
        self.hung_up = True
        shut(self.sock)


class Listener:
    """Accepts connections in a thread of its own, and serves each session in another.

    `admit(sock, hello)` makes the session; `vet(sock)` may refuse a connection before anything is read from it, by
    raising TransportError; `secure(sock, deadline)` returns the stream over which everything goes.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        key: bytes,
        purpose: str,
        transport: str,
        admit: Callable[[socket.socket, Hello], Session],
        vet: Callable[[socket.socket], None] | None = None,
        secure: Callable[[socket.socket, float], Stream] | None = None,
    ) -> None:
        self._sock, self._key, self._purpose, self._transport = sock, key, purpose, transport
        self._admit, self._vet, self._secure = admit, vet, secure
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, int], Session] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self._doubtful: dict[str, list[Session]] = {}  # ended without proof that their writer has stopped
        self._strangers: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = False
        self._acceptor = threading.Thread(target=self._accept, name=f"{purpose}-accept", daemon=True)
        self._acceptor.start()

    def sessions(self) -> list[Session]:
        """Return the live sessions, one for each lane."""
        with self._lock:
            return list(self._sessions.values())

    def inbound(self) -> list[Inbound]:
        """Return the live sessions as plain facts, their lanes taken together."""
        found: dict[str, Inbound] = {}
        for each in self.sessions():
            before = found[each.session].nbytes if each.session in found else 0
            found[each.session] = Inbound(each.session, each.peer, before + each.nbytes)
        return list(found.values())

    def fence(self, session: str, deadline: float) -> bool:
        """End a session, and refuse its name from now on. True when nothing can land through it any more."""
        with self._lock:
            self._over[session] = None
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
            live = [each for (name, _), each in self._sessions.items() if name == session]
            live += self._doubtful.get(session, [])  # proof may come late: a process takes its time to die
        answers = [each.fence(deadline) for each in live]  # every lane is told, whatever the first says
        if not all(answers):
            return False
        with self._lock:
            self._doubtful.pop(session, None)
        return True

    def close(self, deadline: float) -> None:
        """End every session, then stop listening: who finds nobody listening knows that nothing can land."""
        with self._lock:
            self._closing = True
            sessions, strangers = list(self._sessions.values()), list(self._strangers)
        for session in sessions:
            session.fence(deadline)
        for session in sessions:
            session.hang_up()
        for sock in strangers:
            shut(sock)
        with self._lock:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        shut(self._sock)  # wakes accept()
        self._acceptor.join()
        self._sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closing:
                    return
                _log.warning("accept failed", exc_info=True)
                if self._sock.fileno() < 0:
                    return
                threading.Event().wait(0.05)  # out of descriptors, most likely: do not spin
                continue
            if not self._take_in(sock):
                sock.close()

    def _take_in(self, sock: socket.socket) -> bool:
        """Serve a connection in a thread of its own; False where there is no room for it."""
        thread = threading.Thread(target=self._serve, args=(sock,), name=f"{self._purpose}-in", daemon=True)
        with self._lock:  # `close` sees no thread that it could not join
            if self._closing or len(self._strangers) >= MAX_STRANGERS:
                return False
            try:
                thread.start()
            except RuntimeError:  # the process has no thread left to give
                _log.warning("cannot serve a connection", exc_info=True)
                return False
            self._strangers.add(sock)
            self._threads.add(thread)
        return True

    def _serve(self, sock: socket.socket) -> None:
        try:
            if (session := self._greet(sock)) is not None:
                session.run()
        except (OSError, TransportError, ProtocolError) as error:
            _log.info("%s: a connection ended: %s", self._purpose, error)
        finally:
            with self._lock:
                self._strangers.discard(sock)
                self._threads.discard(threading.current_thread())
                sock.close()
                for each in [each for each in self._sessions.values() if each.sock is sock]:
                    del self._sessions[each.session, each.lane]
                    if not each.proven:
                        self._doubtful.setdefault(each.session, []).append(each)
                    each.ended.set()  # under the lock: a session that is no longer listed has ended

    def _greet(self, sock: socket.socket) -> Session | None:
        deadline = time.monotonic() + HELLO_DEADLINE_S
        if self._vet is not None:
            self._vet(sock)
        stream = Stream(sock) if self._secure is None else self._secure(sock, deadline)
        authenticate_socket(stream, self._key, "acceptor", self._purpose + stream.binding, deadline)
        hello = recv_message(stream, Hello, deadline)
        if hello.version != VERSION:
            send_message(stream, Welcome(False, f"version {hello.version}; this side speaks {VERSION}"), deadline)
            return None
        if hello.want == "fence":
            # Another transport at this address means that the one asked about has stopped listening, which it does last.
            wait_s = hello.deadline_s if 0 <= hello.deadline_s <= MAX_FENCE_S else MAX_FENCE_S
            gone = hello.transport != self._transport or self.fence(hello.session, time.monotonic() + wait_s)
            send_message(stream, Welcome(gone), time.monotonic() + HELLO_DEADLINE_S)
            return None
        return self._open(stream, hello, deadline)

    def _open(self, stream: Stream, hello: Hello, deadline: float) -> Session | None:
        session, reason = None, ""
        if hello.transport != self._transport:
            reason = "this process has been restarted, or is not the one meant; take its present export"
        elif not 16 <= len(hello.session) <= 64 or len(hello.peer) > MAX_NAME:
            reason = "the session's or the peer's name has a wrong length"
        elif not 0 <= hello.lane < MAX_LANES:
            reason = f"lane {hello.lane}; at most {MAX_LANES} are taken"
        else:
            with self._lock:
                if self._closing or hello.session in self._over or (hello.session, hello.lane) in self._sessions:
                    reason = "this session is over, or the transport is closing"
                elif len(self._sessions) >= MAX_SESSIONS:
                    reason = f"it serves {MAX_SESSIONS} connections already; close idle ones"
                else:
                    session = self._sessions[hello.session, hello.lane] = self._admit(stream.sock, hello)
                    session.stream = stream
                    self._strangers.discard(stream.sock)
        send_message(stream, Welcome(session is not None, reason), deadline)
        return session


def greet(sock: Wire, key: bytes, purpose: str, hello: Hello, deadline: float) -> None:
    """The connecting half: prove the key, say hello. Raises TransportError when refused, and as `recv_message`."""
    authenticate_socket(sock, key, "initiator", purpose, deadline)
    send_message(sock, hello, deadline)
    answer = recv_message(sock, Welcome, deadline)
    if not answer.ok:
        raise TransportError(f"the peer refused the connection: {answer.reason}")


def shut(sock: socket.socket) -> None:
    """Shut a socket down in both directions, if it still is open. Wakes threads that block on it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class ListeningTransport(Transport):
    """A transport that accepts its peers at a `Listener`."""

    _listener: Listener
    close_s = 5.0
    """Most seconds that closing, or withdrawing a slab, waits for peers."""

    def inbound(self) -> list[Inbound]:
        """Return the live incoming connections; `nbytes` is 0 where writes are one-sided."""
        return self._listener.inbound()

    def fence_inbound(self, session: str, deadline_s: float) -> bool:
        """End a writer's connection and make sure of it; see `Transport.fence_inbound`."""
        return self._listener.fence(session, instant(deadline_s))

    def close(self) -> None:
        """End all incoming connections and stop listening. Peers are closed by who opened them."""
        self._listener.close(instant(self.close_s))
        self._forget()
