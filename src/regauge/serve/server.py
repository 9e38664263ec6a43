"""The HTTP server of a gateway process: uvicorn with our protocol, TLS that can be read anew, and an end in order."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import uvicorn
from starlette.types import ASGIApp

from regauge.config_gateway import ClientTlsConfig, GatewayConfig
from regauge.errors import ConfigError
from regauge.move.plane import Plane
from regauge.observe import Metrics
from regauge.serve.answer import House
from regauge.serve.front import Front
from regauge.serve.protocol import SWEEP_S, Door, Protocol

GRACE_S: Final = 10.0
"""Seconds that running requests get to end by themselves when the gateway shuts down."""
CLOSE_S: Final = 5.0
BACKLOG: Final = 1_024
SPARE: Final = 64
"""Connections of the management plane, or of supervisor and siblings, beyond `gateway.max_connections`."""
PROXIES: Final = ["127.0.0.1", "::1", "::ffff:127.0.0.1"]
"""Whose X-Forwarded-For counts: this machine's, however it is spelled. Else what a proxy passes on would look like this machine."""
_TICKS: Final = round(SWEEP_S / 0.1)
"""uvicorn's ticks, ten a second, between two sweeps."""


class Server(uvicorn.Server):
    """uvicorn for the gateway's app.

    On a signal (or `should_exit`) it stops accepting; requests that outlive the grace get an error event, not a
    broken connection. `private`: another app, on this Unix socket, without TLS, for whoever may enter its folder: the supervisor and the siblings. `beside`:
    likewise on a listening socket of its own: the management plane's.
    """

    def __init__(
        self,
        app: Front,
        grace_s: float = GRACE_S,
        *,
        rules: GatewayConfig | None = None,
        tls: ssl.SSLContext | None = None,
        private: tuple[ASGIApp, Path] | None = None,
        beside: tuple[ASGIApp, socket.socket] | None = None,
    ) -> None:
        metrics: Metrics = app.state.metrics
        self.door = Door(GatewayConfig() if rules is None else rules, metrics)
        self._protocol: Any = partial(Protocol, door=self.door)
        settings = uvicorn.Config(
            app,
            http=cast("Any", self._protocol),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            forwarded_allow_ips=PROXIES,
            timeout_keep_alive=self.door.rules.idle_s,  # type: ignore[arg-type]  # it goes to call_later
            timeout_graceful_shutdown=int(grace_s + CLOSE_S),
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        super().__init__(settings)
        self._house: House = app.state.house
        self._grace_s = grace_s
        self._private = private
        self._beside = beside

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        loop = asyncio.get_running_loop()
        if self._private is not None:
            app, path = self._private
            path.unlink(missing_ok=True)  # of the process before this one
            self.servers.append(await loop.create_unix_server(self._of(app, local=True), path))
            path.chmod(0o600)
        if self._beside is not None:
            app, listener = self._beside
            self.servers.append(await loop.create_server(self._of(app), sock=listener))

    def _of(self, app: ASGIApp, *, local: bool = False) -> Any:
        """Return what makes a connection to another app than the clients'."""
        config = uvicorn.Config(app, lifespan="off", log_config=None, server_header=False, proxy_headers=False)
        config.load()
        state = self.lifespan.state
        return partial(
            self._protocol, spare=SPARE, local=local, config=config, server_state=self.server_state, app_state=state
        )

    async def on_tick(self, counter: int) -> bool:
        """Look at all connections, now and then."""
        if counter % _TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in [*self.server_state.connections]:
                if isinstance(connection, Protocol):
                    connection.sweep(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets, drain the house, close the connections."""
        drain = asyncio.create_task(self._house.drain(self._grace_s))
        await super().shutdown(sockets)
        await drain


def listen(
    host: str, port: int, *, shared: bool = False, plane: Plane | None = None, setting: str = "--port"
) -> socket.socket:
    """Return a listening socket. Raises ConfigError that names the port's setting: uvicorn would exit the process when the port is taken.

    `shared`: others of this user may listen on the same port, too (SO_REUSEPORT), and the system deals connections out to all. `plane`: listen at its
    address, and only for what comes in there.
    """
    try:
        where = host if plane is None else plane.address
        family, _, _, _, address = socket.getaddrinfo(where, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for a host name that cannot be one
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"host {host!r}: {reason}; choose another with --host") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        if plane is None:
            listener.bind(address)
        else:
            plane.claim(listener, port)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is taken by another process" if taken else f"cannot be had: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {reason}; choose another with {setting}") from error
    return listener


def listeners(
    host: str, port: int, count: int, plane: Plane | None = None, setting: str = "--port"
) -> list[socket.socket]:
    """Return a listening socket for each of so many processes, all on one port. Raises ConfigError.

    Each process has one of its own, so that the system deals connections out evenly by their addresses; one socket for all would give most of them to
    whichever process wakes first. The supervisor makes and keeps them: a process that dies leaves its queue of connections to the next one, and
    none is refused meanwhile.
    """
    if count == 1:
        return [listen(host, port, plane=plane, setting=setting)]
    listen(
        host, port, plane=plane, setting=setting
    ).close()  # without sharing: a port that something else listens on is taken
    made: list[socket.socket] = []
    try:
        made.extend(
            listen(host, port, shared=True, plane=plane, setting=setting) for _ in range(count)
        )  # what is made is kept, also where one fails
    except BaseException:  # closed, whatever broke
        for each in made:
            each.close()
        raise
    return made


def tls_context(config: ClientTlsConfig) -> ssl.SSLContext:
    """Return the context for clients. Raises ConfigError that names the setting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_chain(context, config)
    if config.authority:
        try:
            context.load_verify_locations(config.authority)
        except OSError as error:
            raise ConfigError(f"gateway.tls.authority {config.authority!r}: {error.strerror or error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_chain(context: ssl.SSLContext, config: ClientTlsConfig) -> None:
    """Put certificate and key into a context, for connections that come from now on. Raises ConfigError.

    OpenSSL keeps a certificate whose key does not fit: try it on a context of no use first.
    """
    try:
        context.load_cert_chain(config.certificate, config.key, password=_no_password)
    except (OSError, ValueError) as error:
        what = f"gateway.tls.certificate {config.certificate!r} and key {config.key!r}"
        raise ConfigError(f"{what}: {getattr(error, 'strerror', None) or error}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; give it without a password, readable for this user alone")
