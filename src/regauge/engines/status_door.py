"""Answers for the ends of a rank as `status.py` says."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import msgspec
import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

import regauge
from regauge.config import TransferConfig
from regauge.engines.bridge import CLOSE_S, START_S, Bridge
from regauge.engines.status import (
    MAX_WAIT_S,
    STATUS_PATH,
    TRACE_PATH,
    TRANSFERS_PATH,
    Problem,
    Status,
    TransferEnd,
    token,
)
from regauge.errors import ConfigError, ProtocolError, RegaugeError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.move import tls
from regauge.move.channel import Door
from regauge.move.events import Traces
from regauge.move.plane import resolve
from regauge.move.state import shown

log = structlog.get_logger()
T = TypeVar("T")

MAX_CONNECTIONS: Final = 64
"""One more is closed; whoever asks keeps its connection or comes again."""
GREET_S: Final = 10.0
"""Seconds in which a connection must have shown the token."""
MAX_ERROR: Final = 4_000
"""Characters of a reason; longer ones are cut."""
MAX_NAME: Final = 200
_IDLE_S = 75.0
_END_S = 0.1
"""Seconds that answers under way have when the door closes."""
_JSON = "application/json"


class StatusDoor:
    """Answers for the ends of one rank, in the loop of the first of them. Close it before them."""

    def __init__(
        self, ends: Sequence[Bridge], layout: Layout, key: bytes, config: TransferConfig, *, engine: str, port: int
    ) -> None:
        """Listen on the control plane at `port`; 0: at any. Raises ConfigError where that cannot be."""
        self._ends = tuple(ends)
        self._home = ends[0]
        self._engine = engine
        unbound = msgspec.structs.replace(layout, regions=[])
        self._layout = msgspec.Raw(files.encode(unbound, format="json"))
        self._header = f"Bearer {token(key)}".encode()
        self._tls = tls.from_config(config.tls)
        self._strangers: dict[RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have not shown the token."""
        self._opening: dict[asyncio.Task[None], RequestHandler] = {}
        """Connections that are being taken over; for a moment they are among the server's, too."""
        self._server: web.Server
        self._door: Door
        self.address: tuple[str, int] = self._home.run(self._open(config.control or config.host, port), START_S)
        """Where it listens."""

    def close(self) -> None:
        """End all connections, and listen no more. Raises nothing, as `Bridge.close`."""
        try:
            self._home.run(self._close(), CLOSE_S)
        except (RegaugeError, OSError) as error:
            log.warning("the status did not end cleanly", error=str(error))

    async def _open(self, plane: str, port: int) -> tuple[str, int]:
        self._server = web.Server(
            self._answer, handler_cancellation=True, access_log=None, keepalive_timeout=_IDLE_S, lingering_time=_END_S
        )
        try:
            self._door = Door(self._let_in, await asyncio.to_thread(resolve, plane), port)
        except OSError as error:
            raise ConfigError(f"status_port {port} on {plane}: {error.strerror}; choose another") from error
        return self._door.address

    async def _close(self) -> None:
        await self._door.close()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for timer in self._strangers.values():
            timer.cancel()
        await self._server.shutdown(_END_S)

    def _let_in(self, sock: socket.socket) -> None:
        if len({*self._server.connections, *self._opening.values()}) >= MAX_CONNECTIONS:
            sock.close()
            return
        handler = self._server()
        task = asyncio.get_running_loop().create_task(self._serve(sock, handler))
        self._opening[task] = handler
        task.add_done_callback(self._opening.pop)

    async def _serve(self, sock: socket.socket, handler: RequestHandler) -> None:
        loop = asyncio.get_running_loop()
        self._strangers[handler] = loop.call_later(GREET_S, self._cut, handler)
        secure = None if self._tls is None else self._tls.server
        with contextlib.suppress(OSError):  # also where a stranger does not speak TLS, or not in time
            await loop.connect_accepted_socket(
                lambda: handler, sock, ssl=secure, ssl_handshake_timeout=GREET_S if secure else None
            )

    def _cut(self, handler: RequestHandler) -> None:
        del self._strangers[handler]
        if handler.transport is not None:
            handler.transport.abort()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, self._header):
            refusal = _json(Problem("wrong or missing bearer token"), 401)
            refusal.force_close()
            return refusal
        timer = self._strangers.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        if request.method != "GET":
            return _json(Problem(f"{request.method}: only GET is known here"), 405)
        try:
            return await self._get(request.rel_url.raw_path, request.query)
        except ProtocolError as error:
            return _json(Problem(str(error)), 400)

    async def _get(self, path: str, query: Any) -> web.Response:
        if path == STATUS_PATH:
            limit = shown(query.get("limit"))
            states = await asyncio.gather(*(_at(end, partial(end.state, limit)) for end in self._ends))
            return _json(Status(self._home.name, self._engine, regauge.__version__, self._layout, states))
        if path.startswith(TRANSFERS_PATH):
            name, wait_s = unquote(path.removeprefix(TRANSFERS_PATH)), _seconds(query.get("wait_s"))
            end = await self._end(name, wait_s)
            if end is not None:
                return _json(end)
            return _json(Problem(f"no end of a transfer {name[:MAX_NAME]!r} is known"), 404)
        if path.startswith(TRACE_PATH):
            name = unquote(path.removeprefix(TRACE_PATH))
            told = await asyncio.gather(*(_at(end, partial(end.traces_of, name)) for end in self._ends))
            return _json(Traces.of([trace for traces in told for trace in traces]))
        return _json(Problem(f"there is {STATUS_PATH}, {TRANSFERS_PATH}NAME and {TRACE_PATH}NAME"), 404)

    async def _end(self, transfer: str, wait_s: float) -> TransferEnd | None:
        """Return what the first end has to say that knows the transfer."""
        asked = [asyncio.create_task(_end_at(end, transfer, wait_s)) for end in self._ends]
        try:
            for answer in asyncio.as_completed(asked):
                if (found := await answer) is not None:
                    return found
            return None
        finally:
            for task in asked:
                task.cancel()


async def _end_at(end: Bridge, transfer: str, wait_s: float) -> TransferEnd | None:
    x = await _at(end, partial(end.end_of, transfer, wait_s))
    return (
        None
        if x is None
        else TransferEnd(
            transfer,
            end.role,
            x.error[:MAX_ERROR],
            x.reason,
            x.path,
            x.mode,
            x.wire_bytes,
            x.seconds,
            x.stages,
            x.spans,
        )
    )


async def _at(end: Bridge, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run what belongs to an end's loop there. It is made here: whoever asked may have gone before this began."""
    return await asyncio.wrap_future(end.start(work()))


def _seconds(text: str | None) -> float:
    """Read the query's `wait_s`. Raises ProtocolError unless it is from 0 to MAX_WAIT_S."""
    try:
        wait_s = 0.0 if text is None else float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MAX_WAIT_S:  # nor NaN
        raise ProtocolError(f"wait_s must be a number of seconds from 0 to {MAX_WAIT_S:g}")
    return wait_s


def _json(value: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=_JSON)
