"""What lies between two hosts: is the peer reached, how large a packet crosses whole, how fast, and what time has it.

The peer runs `regauge doctor --listen`; both sides prove that they have the transfer key (`move.auth`). Then, over that connection:

    T                                -> arrived u64, left u64                  nanoseconds of the peer's clock
    U                                -> token[16]                              probes over UDP with it are answered
    S limit_ms u32, then chunks u32 length + bytes, ended by length 0          -> bytes u64, nanoseconds u64
    R limit_ms u32                   -> chunks until then, ended by length 0
    E                                                                          the end

A probe is token, number u16 and padding, with the don't-fragment bit; the answer is token, number and the length that arrived, never more
than came. Without a listener, a host still answers a probe to a closed port, by ICMP: that it came through is then known as well.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from regauge.errors import AuthError, ConfigError, DeadlineExceeded, PeerLost
from regauge.move.auth import authenticate_socket, recv_exactly, send_all

PORT: Final = 15_990
"""Among those that the rendered rules let through on the compute plane."""
PURPOSE: Final = "doctor"
MAX_SECONDS: Final = 10.0
MAX_BYTES: Final = 256 << 30
_MAX_CLIENTS: Final = 8
_CHUNK: Final = 1 << 20
_CONNECT_S, _AUTH_S, _PROBE_S = 2.0, 5.0, 0.15
_IDLE_S: Final = 30.0
_TRIES: Final = 2
_SAMPLES: Final = 8
_TOKEN_BYTES: Final = 16
_IP_UDP_BYTES: Final = {4: 28, 6: 48}
_LEAST_MTU: Final = 576
_MTU_DISCOVER, _PROBE = 10, 3
"""IP_MTU_DISCOVER and IP_PMTUDISC_PROBE (ip(7)): set don't-fragment, and try also what is thought to be too large."""
_MTU_DISCOVER6: Final = 23
_LENGTH, _LIMIT, _TIMES, _ANSWER = struct.Struct("!I"), struct.Struct("!I"), struct.Struct("!QQ"), struct.Struct("!HI")
_NUMBER = struct.Struct("!H")
_ERRORS = (OSError, PeerLost, DeadlineExceeded)

Reach = Literal["listening", "refused", "silent", "stranger"]


@dataclass(frozen=True)
class Between:
    """What was seen between this host and a peer. None: not measured."""

    peer: str
    source: str
    """This host's address."""
    reach: Reach
    """`refused`: the host answers, and nobody listens there; `stranger`: another key."""
    error: str = ""
    path_mtu: int | None = None
    sent_bits: float | None = None
    """Per second, as the peer counted."""
    received_bits: float | None = None
    offset_s: float | None = None
    """The peer's clock less this one's."""
    uncertainty_s: float | None = None


def split(text: str) -> tuple[str, int]:
    """Read ADDRESS or ADDRESS:PORT, [ADDRESS]:PORT. Raises ConfigError."""
    host, port = text, PORT
    if text.startswith("[") or text.count(":") == 1:
        host, _, digits = text.rpartition(":")
        if not digits.isdigit() or not 0 <= int(digits) <= 65_535:
            raise ConfigError(f"{text!r}: the port is no number up to 65535")
        port = int(digits)
    try:
        return str(ipaddress.ip_address(host.strip("[]"))), port
    except ValueError as error:
        raise ConfigError(f"{text!r}: give a numeric address, or ADDRESS:PORT: {error}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# -- asking ------------------------------------------------------------------------------------------------------------


def measure(peer: str, port: int, key: bytes | None, mtu: int, *, source: str = "", seconds: float = 1.0) -> Between:
    """Look at the way to a peer, for some `seconds` in each direction. `mtu` is the largest that is tried; without a key only reach and MTU."""
    try:
        sock = socket.create_connection((peer, port), _CONNECT_S, (source, 0) if source else None)
    except ConnectionRefusedError:
        own = source or _source(peer, port)
        return Between(peer, own, "refused", path_mtu=_mtu_of_closed(peer, own, mtu))
    except OSError as error:
        return Between(peer, source, "silent", error.strerror or "no answer")
    with sock:
        own = sock.getsockname()[0]
        if key is None:
            return Between(peer, own, "listening", path_mtu=_mtu_of_closed(peer, own, mtu))
        try:
            authenticate_socket(sock, key, "initiator", PURPOSE, time.monotonic() + _AUTH_S)
        except (AuthError, *_ERRORS) as error:
            return Between(peer, own, "stranger", str(error))
        return _measure(sock, peer, own, mtu, min(seconds, MAX_SECONDS))


def _measure(sock: socket.socket, peer: str, own: str, mtu: int, seconds: float) -> Between:
    try:
        offset, uncertainty = _clock(sock)
        found = _path_mtu(sock, peer, own, mtu)
        sent = _send(sock, seconds) if seconds > 0 else None
        received = _receive(sock, seconds) if seconds > 0 else None
        send_all(sock, b"E", time.monotonic() + _AUTH_S)
    except _ERRORS as error:
        return Between(peer, own, "listening", str(error))
    return Between(peer, own, "listening", "", found, sent, received, offset, uncertainty)


def _source(peer: str, port: int) -> str:
    with socket.socket(_family(peer), socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((peer, port))
        except OSError:
            return ""
        return str(sock.getsockname()[0])


def _clock(sock: socket.socket) -> tuple[float, float]:
    """Return offset and uncertainty in seconds: of the quickest of some exchanges, half of what it took (as RFC 5905, section 8)."""
    best = (0.0, float("inf"))
    for _ in range(_SAMPLES):
        left = time.time_ns()
        send_all(sock, b"T", time.monotonic() + _AUTH_S)
        arrived, answered = _TIMES.unpack(recv_exactly(sock, _TIMES.size, time.monotonic() + _AUTH_S))
        back = time.time_ns()
        took = (back - left) - (answered - arrived)
        best = min(best, (((arrived - left) + (answered - back)) / 2e9, max(took, 0) / 2e9), key=lambda each: each[1])
    return best


def _probe_socket(peer: str, own: str) -> socket.socket:
    sock = socket.socket(_family(peer), socket.SOCK_DGRAM)
    level, option = (socket.IPPROTO_IPV6, _MTU_DISCOVER6) if ":" in peer else (socket.IPPROTO_IP, _MTU_DISCOVER)
    sock.setsockopt(level, option, _PROBE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
    if own:
        sock.bind((own, 0))
    return sock


def _path_mtu(sock: socket.socket, peer: str, own: str, most: int) -> int | None:
    """Return the largest packet that arrives whole, up to `most`; None: not even a small one does."""
    send_all(sock, b"U", time.monotonic() + _AUTH_S)
    token = recv_exactly(sock, _TOKEN_BYTES, time.monotonic() + _AUTH_S)
    with _probe_socket(peer, own) as udp:
        udp.connect((peer, sock.getpeername()[1]))
        head = _IP_UDP_BYTES[ipaddress.ip_address(peer).version]
        numbers = iter(range(1, 1 << 16))
        return _largest(most, lambda size: _arrives(udp, token, size - head, numbers))


def _largest(most: int, arrives: Callable[[int], bool]) -> int | None:
    if arrives(most):
        return most
    if not arrives(_LEAST_MTU):
        return None
    low, high = _LEAST_MTU, most  # low arrives, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if arrives(middle) else (low, middle)
    return low


def _arrives(udp: socket.socket, token: bytes, payload: int, numbers: Iterator[int]) -> bool:
    for _ in range(_TRIES):
        number = next(numbers)
        probe = token + _NUMBER.pack(number)
        probe += bytes(max(0, payload - len(probe)))
        try:
            udp.send(probe)
        except OSError:  # EMSGSIZE: larger than this side's own interface
            return False
        end = time.monotonic() + _PROBE_S
        while (left := end - time.monotonic()) > 0 and select.select([udp], [], [], left)[0]:
            try:
                answer = udp.recv(256)
            except OSError:
                return False
            if answer == token + _ANSWER.pack(number, len(probe)):
                return True
    return False


def _mtu_of_closed(peer: str, own: str, mtu: int) -> int | None:
    """Return `mtu` if a packet of that size is answered by ICMP, as a closed port's host does; None: nobody says."""
    head = _IP_UDP_BYTES[ipaddress.ip_address(peer).version]
    with _probe_socket(peer, own) as udp:
        udp.connect((peer, 33_434))  # as traceroute: nobody listens there
        try:
            udp.send(bytes(max(0, mtu - head)))
            if select.select([udp], [], [], 1.0)[0]:
                udp.recv(1)
        except ConnectionRefusedError:
            return mtu
        except OSError:
            return None
    return None


def _send(sock: socket.socket, seconds: float) -> float:
    """Send for a time; return bits per second as the peer counted them."""
    send_all(sock, b"S" + _LIMIT.pack(int(seconds * 1_000)), time.monotonic() + _AUTH_S)
    _pour(sock, seconds)
    count, took = _TIMES.unpack(recv_exactly(sock, _TIMES.size, time.monotonic() + _AUTH_S + MAX_SECONDS))
    return float(count * 8e9 / max(took, 1))


def _receive(sock: socket.socket, seconds: float) -> float:
    send_all(sock, b"R" + _LIMIT.pack(int(seconds * 1_000)), time.monotonic() + _AUTH_S)
    count, took = _drain(sock, time.monotonic() + seconds + _AUTH_S)
    return count * 8e9 / max(took, 1)


def _pour(sock: socket.socket, seconds: float) -> None:
    chunk = _LENGTH.pack(_CHUNK) + bytes(_CHUNK)
    start, sent = time.monotonic(), 0
    while time.monotonic() - start < seconds and sent < MAX_BYTES:
        send_all(sock, chunk, start + seconds + _AUTH_S)
        sent += _CHUNK
    send_all(sock, _LENGTH.pack(0), time.monotonic() + _AUTH_S)


def _drain(sock: socket.socket, deadline: float) -> tuple[int, int]:
    """Return how many bytes came and how many nanoseconds that took."""
    count, start, room = 0, time.monotonic_ns(), memoryview(bytearray(_CHUNK))
    while length := _LENGTH.unpack(recv_exactly(sock, _LENGTH.size, deadline))[0]:
        if length > _CHUNK or count > MAX_BYTES:
            raise PeerLost("the peer sent a chunk that is too long")
        left = length
        while left:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            got = sock.recv_into(room[:left])
            if not got:
                raise PeerLost("the peer closed the connection")
            left -= got
        count += length
    return count, time.monotonic_ns() - start


# -- answering ---------------------------------------------------------------------------------------------------------


class Listener:
    """Answers peers at an address, over TCP and UDP, until closed. Raises OSError where the address cannot be bound."""

    def __init__(self, address: str, port: int, key: bytes) -> None:
        self._key = key
        self._tokens: set[bytes] = set()
        self._slots = threading.BoundedSemaphore(_MAX_CLIENTS)
        self._tcp = socket.create_server((address, port), family=_family(address))
        self.address, self.port = self._tcp.getsockname()[:2]
        self._udp = socket.socket(_family(address), socket.SOCK_DGRAM)
        self._udp.bind((address, self.port))
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._loop, name="doctor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._wake.close()
        self._thread.join()
        self._tcp.close()
        self._udp.close()
        self._woken.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _loop(self) -> None:
        while True:
            ready, _, _ = select.select([self._tcp, self._udp, self._woken], [], [])
            if self._woken in ready:
                return
            if self._udp in ready:
                self._answer_probe()
            if self._tcp in ready:
                with contextlib.suppress(OSError):
                    self._take(self._tcp.accept()[0])

    def _answer_probe(self) -> None:
        with contextlib.suppress(OSError):
            probe, sender = self._udp.recvfrom(1 << 16)
            token, rest = probe[:_TOKEN_BYTES], probe[_TOKEN_BYTES:]
            if token in self._tokens and len(probe) >= _TOKEN_BYTES + _ANSWER.size:
                self._udp.sendto(token + _ANSWER.pack(_NUMBER.unpack_from(rest)[0], len(probe)), sender)

    def _take(self, sock: socket.socket) -> None:
        if not self._slots.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._serve, args=(sock,), name="doctor peer", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        token = os.urandom(_TOKEN_BYTES)
        try:
            with sock, contextlib.suppress(AuthError, *_ERRORS):
                authenticate_socket(sock, self._key, "acceptor", PURPOSE, time.monotonic() + _AUTH_S)
                while self._one(sock, token):
                    pass
        finally:
            self._tokens.discard(token)
            self._slots.release()

    def _one(self, sock: socket.socket, token: bytes) -> bool:
        """Do what is asked; return whether more may come."""
        word = recv_exactly(sock, 1, time.monotonic() + _IDLE_S)
        soon = time.monotonic() + _AUTH_S
        if word == b"T":
            arrived = time.time_ns()
            send_all(sock, _TIMES.pack(arrived, time.time_ns()), soon)
        elif word == b"U":
            self._tokens.add(token)
            send_all(sock, token, soon)
        elif word in (b"S", b"R"):
            seconds = min(_LIMIT.unpack(recv_exactly(sock, _LIMIT.size, soon))[0] / 1_000, MAX_SECONDS)
            if word == b"R":
                _pour(sock, seconds)
            else:
                send_all(sock, _TIMES.pack(*_drain(sock, time.monotonic() + seconds + _AUTH_S)), soon + seconds)
        return word in (b"T", b"U", b"S", b"R")
