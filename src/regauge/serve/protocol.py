"""HTTP/1.1 from clients that nobody has to trust: uvicorn's protocol on httptools, with bounds on what a connection can take.

httptools checks the grammar, and with it what request smuggling needs: two lengths, a length beside chunks, a broken chunk are answered 400, and
the connection ends. It bounds neither sizes nor times, and uvicorn bounds only the time between requests. So here: bytes of a head, seconds until a
head and a body are whole, seconds without progress of a reader, and connections of a process. Deadlines are looked at by one sweep over all
connections (`Server.on_tick`), not by a timer for each request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from regauge.config_gateway import GatewayConfig
from regauge.observe import Metrics
from regauge.serve.openai import SERVER_ERROR, ApiError
from regauge.serve.outbox import Gathered, Outbox

SWEEP_S: Final = 0.5
GONE: Final = "regauge.gone"
"""Of a scope's extensions: takes what to call when the client has gone, and returns what takes that back. A task that awaits `receive` costs more."""
WHOLE: Final = "regauge.whole"
"""Of a scope's extensions: returns whether the request's body has come."""
_PER_HEADER: Final = 32
"""Bytes that a header counts for beside its own, as HTTP/2 counts them (RFC 9113, 6.5.2): what it takes to keep it."""


class _TooLarge(Exception):
    """The head of a message is larger than allowed: ends the parser's work, which takes it for a fault of the message."""


class Door:
    """What all connections of a process keep to; `rules` may be put in anew."""

    def __init__(self, rules: GatewayConfig, metrics: Metrics) -> None:
        self.rules = rules
        self.metrics = metrics
        self.outbox = Outbox()


class Protocol(HttpToolsProtocol):
    """One connection. `local`: over a Unix socket of ours, so that whoever it is counts as of this machine. `spare`: so many connections more are
    taken, that those of clients do not keep an operator out."""

    def __init__(self, *, door: Door, local: bool = False, spare: int = 0, **given: Any) -> None:
        super().__init__(**given)
        self._local = local
        self._spare = spare
        self._door = door
        self._since = self.loop.time()
        """When what is awaited now was begun."""
        self._in_head = True
        self._raw = 0
        """Bytes since the last message's end, while a head is awaited."""
        self._head = 0
        """Bytes of names and values of this message, trailers included."""
        self._over = False
        self._unsent = 0
        self._unsent_since = 0.0
        self._watchers: set[Callable[[], None]] = set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take a connection, unless there are too many."""
        super().connection_made(Gathered(transport, self._door.outbox))
        if self._local:
            self.client = ("127.0.0.1", 0)
        if len(self.connections) > self._door.rules.max_connections + self._spare:
            message = "too many connections; try again"
            self._refuse("connections", ApiError(503, message, type=SERVER_ERROR, code="busy", retry_after_s=1))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers."""
        super().connection_lost(exc)
        self._tell()

    def data_received(self, data: bytes) -> None:
        """Parse; what is no HTTP, or too large, ends the connection."""
        if self._over:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            if not self._raw:
                self._since = self.loop.time()
            self._raw += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            if self._head > self._door.rules.max_header_bytes:
                self._too_large()
            else:
                self._refuse("malformed", ApiError(400, "this is no HTTP request that this server reads"))
        except httptools.HttpParserUpgrade:
            if self.cycle is not None:  # answered as a request like others; what follows would be of another protocol
                self.cycle.keep_alive = False
        else:
            if self._in_head and self._raw > self._door.rules.max_header_bytes:
                self._too_large()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        extensions: dict[str, Any] = {GONE: self._watch, WHOLE: self._is_whole}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Those after the body are dropped: the request has been let in without them."""
        self._count(len(name) + len(value) + _PER_HEADER)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request."""
        super().on_headers_complete()
        self._in_head = False
        self._since = self.loop.time()

    def on_message_complete(self) -> None:
        """Await the next head."""
        super().on_message_complete()
        self._in_head, self._raw, self._head = True, 0, 0

    def on_response_complete(self) -> None:
        """Count the time anew of what has come of the next request meanwhile."""
        self._since = self.loop.time()
        super().on_response_complete()

    def sweep(self, now: float) -> None:
        """End the connection if something is overdue."""
        rules = self._door.rules
        if self._stalled(now, rules.write_s):
            self._door.metrics.client_fault("write")
            self.transport.abort()
        elif self._over or self.pipeline:
            return  # of requests in a row, the first one's time counts
        elif not self._in_head:
            if self.cycle.more_body and not self.cycle.response_complete and now - self._since > rules.body_s:
                self._refuse("body", ApiError(408, "the body did not arrive in time", code="timeout"))
        elif (
            self.cycle is None or (self._raw and self.cycle.response_complete)
        ) and now - self._since > rules.header_s:
            self._refuse("header", ApiError(408, "the headers did not arrive in time", code="timeout"))

    def _stalled(self, now: float, limit_s: float) -> bool:
        """Whether bytes wait to be read by the client, and for so long have not become fewer."""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if not self._unsent:
            return False
        if not before or self._unsent < before:
            self._unsent_since = now
        return now - self._unsent_since > limit_s

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self._door.rules.max_header_bytes:
            raise _TooLarge

    def _too_large(self) -> None:
        message = f"the request's head is larger than {self._door.rules.max_header_bytes} bytes"
        self._refuse("head", ApiError(431, message, code="request_too_large"))

    def _refuse(self, reason: str, error: ApiError) -> None:
        """Answer, where no answer has begun, and close."""
        if self._over:
            return
        self._over = True
        self._door.metrics.client_fault(reason)
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error.body()
            lines = [
                STATUS_LINE[error.status],
                b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body),
                *(f"{name}: {value}\r\n".encode() for name, value in error.headers().items()),
                b"\r\n",
                body,
            ]
            self.transport.write(b"".join(lines))
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # so that nothing of its own answer follows this one
            cycle.message_event.set()
            self._tell()
        self.transport.close()

    def _watch(self, told: Callable[[], None]) -> Callable[[], None]:
        self._watchers.add(told)
        if self.transport.is_closing():
            self.loop.call_soon(self._tell)
        return partial(self._watchers.discard, told)

    def _is_whole(self) -> bool:
        """Whether all requests that have begun have come."""
        return not self.cycle.more_body

    def _tell(self) -> None:
        for told in [*self._watchers]:
            told()
