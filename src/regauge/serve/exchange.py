"""HTTP/1.1 to engines on kept connections, on asyncio's protocols and httptools: as much of a client as a gateway needs.

A request is written at once and whole; its answer is read as it comes, and what is not read holds the connection back. One time limit for all of an
answer, whoever waits for it, is set when it begins. An answer that was read to its end gives its connection back; any other ends it, which
an engine takes as an abort. Nothing is asked twice, no redirect is followed, nothing is unpacked: no `Accept-Encoding` is sent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from regauge.serve.deadlines import Deadline, Deadlines

MAX_HEAD: Final = 64 << 10
"""Most bytes of an answer's headers."""
MAX_WHOLE: Final = 64 << 20
"""Most bytes of an answer that is read as one."""
_LONG: Final = f"its headers have over {MAX_HEAD} bytes"
HELD: Final = 256 << 10
"""Bytes that have not been read, from which on the connection is held back."""


class Broken(ConnectionError):
    """A connection ended in the midst of an answer, or brought something that is none."""


class TooLong(Broken):
    """An answer that is wanted whole has more than MAX_WHOLE bytes."""


@dataclass(frozen=True)
class Origin:
    """Whom a connection goes to."""

    host: str
    port: int
    trust: ssl.SSLContext | None

    @classmethod
    def of(cls, url: str, trust: ssl.SSLContext | None) -> tuple[Origin, str]:
        """Return the origin and the target of a URL; `trust`: for https, else the system's authorities. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https URL")
        secure = parts.scheme == "https"
        if secure and trust is None:
            trust = ssl.create_default_context()
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.hostname, parts.port or (443 if secure else 80), trust if secure else None), target

    @property
    def authority(self) -> str:
        """As the Host header has it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Exchange:
    """One request and its answer. `status` and `headers` (lower-case) are there once `begin` has returned.

    Either one awaits it, or is told by `listener` of each change, without a task that waits: then one looks at what has come.
    """

    def __init__(self, wire: _Wire) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.gathers = False
        """The body is wanted whole: nothing holds the connection back, up to MAX_WHOLE bytes."""
        self.listener: Callable[[], None] | None = None
        self._wire = wire
        self._parts: list[bytes] = []
        self._held = 0
        self._read: bytes | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: Deadline | None = None

    @property
    def error(self) -> BaseException | None:
        """Why no more will come."""
        return self._error

    @property
    def has_body(self) -> bool:
        """Whether some of the body has come, and has not been read."""
        return bool(self._parts)

    @property
    def gathered(self) -> bytes:
        """What has come of the body and has not been read."""
        return b"".join(self._parts)

    @property
    def content_type(self) -> str:
        """Without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def limit(self, at: float, error: BaseException) -> None:
        """Have it fail with an error at a time of the loop's clock, unless it is over by then."""
        self._timer = self._wire.deadlines.add(at, lambda: self.fail(error))

    async def begin(self) -> None:
        """Wait for the headers. Raises Broken, or what `fail` was given."""
        while not self.status:
            await self._wait()

    async def readany(self) -> bytes:
        """Return what has come of the body, at least a byte; nothing at its end. Raises as `begin`."""
        while not self._parts:
            if self.complete:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if self._held > HELD and not self.gathers:
            self._wire.transport.resume_reading()
        self._held = 0
        return data

    async def read(self) -> bytes:
        """Return the rest of the body, the same another time. Raises as `begin`, and TooLong."""
        if self._read is not None:
            return self._read
        parts, size = [], 0
        while part := await self.readany():
            parts.append(part)
            size += len(part)
            if size > MAX_WHOLE:
                raise TooLong(f"an answer of over {MAX_WHOLE} bytes")
        self._read = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._read

    def release(self) -> None:
        """End it; twice does nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wire.leave(self)

    def fail(self, error: BaseException) -> None:
        """Have whoever reads it, now or later, get an error."""
        if not self.complete and self._error is None:
            self._error = error
            self._wake()

    def come(self, status: int, headers: dict[str, str]) -> None:
        """Take the headers."""
        self.status, self.headers = status, headers
        self._wake()

    def take(self, part: bytes) -> None:
        """Take a part of the body."""
        self._parts.append(part)
        before, self._held = self._held, self._held + len(part)
        if self.gathers:
            if self._held > MAX_WHOLE:
                self.fail(TooLong(f"an answer of over {MAX_WHOLE} bytes"))
            return  # who wants it whole need not know of a part
        if self._held > HELD >= before:
            self._wire.transport.pause_reading()
        self._wake()

    def end(self) -> None:
        """Take the body's end."""
        self.complete = True
        self._wake()

    def _wake(self) -> None:
        if self.listener is not None:
            self.listener()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._wire.loop.create_future()
        await self._waiter
        self._waiter = None
        if self._error is not None and not self._parts:
            raise self._error


class _Wire(asyncio.Protocol):
    """One connection."""

    def __init__(self, pool: deque[_Wire], deadlines: Deadlines) -> None:
        self.loop = asyncio.get_running_loop()
        self.deadlines = deadlines
        self.transport: asyncio.Transport
        self.since = 0.0
        """When it was given back."""
        self.dead = False
        self._pool = pool
        self._exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser
        self._headers: dict[str, str] = {}
        self._head = 0
        """Bytes that came before the headers' end was seen."""
        self._size = 0
        """Bytes of the headers."""
        self._again = False

    def ask(self, data: bytes) -> Exchange:
        """Send a request."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers, self._head, self._size, self._again = {}, 0, 0, False
        self._exchange = exchange = Exchange(self)
        self.transport.write(data)
        return exchange

    def leave(self, exchange: Exchange) -> None:
        if self._exchange is not exchange:
            return
        self._exchange = None
        if exchange.complete and not self.dead and self._again:
            self.since = self.loop.time()
            self._pool.append(self)
        else:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # nobody has asked for anything
            self.transport.abort()
            return
        if not exchange.status:
            self._head += len(data)  # also of what the parser keeps for itself
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(Broken(f"no HTTP answer: {error.__context__ or error}"))
            return
        if not exchange.status and self._head > MAX_HEAD:
            self._end(Broken(f"no HTTP answer: {_LONG}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.dead = True
        exchange = self._exchange
        if exchange is not None and not exchange.complete:
            if exchange.status and not {"content-length", "transfer-encoding"} & self._headers.keys():
                exchange.end()  # which is how an answer without a length ends
            else:
                exchange.fail(Broken(str(exc) if exc else "the connection was closed"))
        elif self in self._pool:
            self._pool.remove(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size += len(name) + len(value)
        if self._size > MAX_HEAD:
            raise ValueError(_LONG)
        text = name.decode("latin-1").lower()
        given = value.decode("latin-1")
        self._headers[text] = f"{self._headers[text]}, {given}" if text in self._headers else given

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
        elif self._headers.get("content-encoding", "identity") != "identity":
            raise ValueError("the answer is packed, which nobody has asked for")
        elif self._exchange is not None:
            self._exchange.come(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.take(body)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status:
            self._again = self._parser.should_keep_alive()  # it forgets
            self._exchange.end()

    def _end(self, error: Broken) -> None:
        self.dead = True
        if self._exchange is not None:
            self._exchange.fail(error)
        self.transport.abort()


class Exchanges:
    """Connections to any number of origins, in one event loop."""

    def __init__(self, *, keep_s: float) -> None:
        """`keep_s`: an idle connection is not used again after so long, so that its other end does not drop it just then."""
        self._keep_s = keep_s
        self._idle: dict[Origin, deque[_Wire]] = {}
        self._bases: dict[tuple[str, int], tuple[Origin, str]] = {}
        self._deadlines = Deadlines()

    def origin(self, url: str, trust: ssl.SSLContext | None) -> tuple[Origin, str]:
        """Return the origin and the target of a URL, remembered: there are few. Raises ValueError."""
        known = self._bases.get(key := (url, id(trust)))
        if known is None:
            if len(self._bases) > 1_000:  # a target may hold an id
                self._bases.clear()
            known = self._bases[key] = Origin.of(url, trust)
        return known

    def kept(self, origin: Origin) -> _Wire | None:
        """Return a connection that is there already, the one used last."""
        pool = self._idle.get(origin)
        now = asyncio.get_running_loop().time()
        while pool:
            wire = pool.pop()
            if not wire.dead and now - wire.since < self._keep_s:
                return wire
            wire.transport.abort()
        return None

    async def connect(self, origin: Origin) -> _Wire:
        """Make a connection. Raises OSError."""
        pool = self._idle.setdefault(origin, deque())
        make = asyncio.get_running_loop().create_connection
        _, wire = await make(lambda: _Wire(pool, self._deadlines), origin.host, origin.port, ssl=origin.trust)
        return wire

    def close(self) -> None:
        """End those that are idle, and all time limits."""
        self._deadlines.close()
        for pool in self._idle.values():
            while pool:
                pool.pop().transport.abort()


def request(method: str, origin: Origin, target: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """Return the bytes of a request. Raises ValueError for a header that would be more than one."""
    lines = [f"{method} {target} HTTP/1.1\r\nHost: {origin.authority}\r\n"]
    lines += [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = "".join(lines)
    if head.count("\n") != len(lines) + 1 or head.count("\r") != len(lines) + 1:
        raise ValueError("a header holds the end of a line")
    return head.encode("latin-1") + (b"\r\n" if body is None else b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
