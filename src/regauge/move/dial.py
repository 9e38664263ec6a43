"""One side's end of a data plane on TCP: where it listens, how it connects, and how it asks whether a session is over."""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
import time
from collections.abc import Callable

from regauge.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolError, TransportError
from regauge.move.listener import VERSION, Hello, greet
from regauge.move.plane import Plane, resolve
from regauge.move.stream import Stream
from regauge.move.tls import Tls
from regauge.move.transport import Exported

_PORT = re.compile(r"[0-9]{1,5}")


class NobodyListensError(PeerLost):
    """Nobody listens at the peer's address any more."""


class Endpoint:
    """Listens on, and connects from, the plane that `host` names (see `plane`).

    A wildcard lies on every plane; it is taken only together with `advertise`, the numeric address that peers are told. With
    `tls` every connection is TLS on both sides. `ready` is called with every socket that has connected to a peer. Raises
    ConfigError.
    """

    def __init__(
        self,
        key: bytes,
        purpose: str,
        host: str,
        *,
        advertise: str | None = None,
        tls: Tls | None = None,
        ready: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        self.key, self.purpose = key, purpose
        self._host, self._advertise, self._tls, self._ready = host, advertise, tls, ready
        self.plane = _plane(host, advertise)
        """None for a wildcard."""
        self.address = host if self.plane is None else self.plane.address
        """What this side binds: numeric, without a port."""

    def listen(self, port: int, backlog: int = 64) -> tuple[socket.socket, str]:
        """Return a listening socket and the address that peers are told; port 0 picks one. Raises ConfigError."""
        sock = socket.socket(socket.AF_INET6 if ":" in self.address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.plane is None:
                sock.bind((self.address, port))
            else:
                self.plane.claim(sock, port)
            sock.listen(backlog)
        except OSError as error:
            sock.close()
            raise ConfigError(
                f"cannot listen on {self._host} port {port}: {error}; give an address of this host"
            ) from error
        shown, bound = self._advertise or self.address, sock.getsockname()[1]
        return sock, f"[{shown}]:{bound}" if ":" in shown else f"{shown}:{bound}"

    def secure(self, sock: socket.socket, deadline: float) -> Stream:
        """Return the accepting end's stream over a connected socket. Raises AuthError, PeerLost or DeadlineExceeded."""
        return Stream(sock) if self._tls is None else self._tls.wrap(sock, deadline, server=True)

    def dial(self, target: Exported, hello: Hello, deadline: float) -> Stream:
        """Connect and greet. Raises NobodyListensError, which is a PeerLost, when nobody listens there; else as `greet`."""
        host, port = split(target.address)
        if self.plane is not None:
            self.plane.check(host)
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError as error:
            raise TransportError(f"cannot make a socket: {error}; raise the limit on open files") from error
        try:
            tune(sock)
            if self.plane is not None:
                self.plane.claim(sock)
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            sock.connect((host, port))
            self._ready(sock)
            stream = Stream(sock) if self._tls is None else self._tls.wrap(sock, deadline, server=False)
            greet(stream, self.key, self.purpose + stream.binding, hello, deadline)
        except TimeoutError as error:
            sock.close()
            raise DeadlineExceeded(f"{target.address} did not accept a connection in time") from error
        except OSError as error:
            sock.close()
            lost = NobodyListensError if isinstance(error, ConnectionRefusedError) else PeerLost
            raise lost(f"cannot connect from {self.address} to {target.address}: {error}") from error
        except BaseException:  # closed whatever broke, also by an interrupt
            sock.close()
            raise
        return stream

    def is_gone(self, target: Exported, session: str, name: str, deadline: float) -> bool:
        """Ask the peer to end a session and to confirm it. False when no confirmation came by `deadline`."""
        pause = threading.Event()
        while (left := deadline - time.monotonic()) > 0:
            try:
                self.dial(target, Hello(VERSION, "fence", session, target.session, name, left), deadline).sock.close()
            except NobodyListensError:
                return True
            except PeerLost:
                pause.wait(min(0.05, left))  # it is closing, or full: ask again
            except (TransportError, ProtocolError):
                return False
            else:
                return True
        return False


def _plane(host: str, advertise: str | None) -> Plane | None:
    """Return the plane; None for a wildcard that was asked for."""
    if advertise is not None:
        try:
            ipaddress.ip_address(advertise)
        except ValueError as error:
            raise ConfigError(f"advertise {advertise!r} is not a numeric address: peers look no names up") from error
    if host not in ("0.0.0.0", "::"):  # noqa: S104  # compared with, to ask for the address to advertise
        return resolve(host)
    if advertise is None:
        raise ConfigError(f"host {host} is a wildcard; say with `advertise` which address peers connect to")
    return None


def split(address: str) -> tuple[str, int]:
    """Read host:port of an export. Only numbers: to look a name up takes as long as its server likes.

    Raises ProtocolError.
    """
    host, _, port = address.rpartition(":")
    try:
        numeric = str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        numeric = ""
    if not numeric or not _PORT.fullmatch(port) or int(port) > 65535:
        raise ProtocolError(f"a transport's export has the address {address[:300]!r}, which is not host:port")
    return numeric, int(port)


def tune(sock: socket.socket) -> None:
    """Send small messages at once, not 40 ms later behind an unacknowledged one, and notice a dead host within seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
