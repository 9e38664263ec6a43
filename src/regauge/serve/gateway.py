"""The gateway's process: an OpenAI-compatible front over one prefill and one decode worker.

The life of a request:

1. The body is read, up to `limits.max_body_bytes`, and checked (`openai.py`); the model's name must be ours.
2. The chat template is applied and the text tokenised (`text.py`).
3. Prompt and answer must fit the context. An answer length that the client did not give is cut to fit.
4. Admission: every choice counts against `limits.max_queue`, and both workers must be up.
5. Both workers get each choice at the same time, and the decode worker's tokens come back (`relay.py`).
6. They become text, whole or as server-sent events (`replies.py`). The HTTP status is sent with the first of it, so
   that a request which fails before its first token is answered with its own status, streamed or not.
7. A client that goes away ends its request on both workers.
8. One log line says what became of it.

Run as `python -m regauge.serve.gateway SPEC.json` (`wire.GatewaySpec`).
"""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from regauge import __version__, observe
from regauge.config import ServeConfig
from regauge.errors import ConfigError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.move.tls import from_config
from regauge.observe import Metrics, setup_logging
from regauge.serve import wire
from regauge.serve.access import Access
from regauge.serve.answer import Envelope, House, error_response
from regauge.serve.endpoints import Gateway
from regauge.serve.openai import SERVER_ERROR, ApiError
from regauge.serve.pairing import Pairing
from regauge.serve.tenants import Tenants
from regauge.serve.text import Tokenizer
from regauge.serve.workers import Workers

GRACE_S: Final = 10.0
"""Seconds that running requests get to end by themselves when the gateway shuts down."""
CLOSE_S: Final = 5.0
BACKLOG: Final = 1_024
PROXIES: Final = ["127.0.0.1", "::1", "::ffff:127.0.0.1"]
"""Whose X-Forwarded-For counts: this machine's, however it is spelled. Else what a proxy passes on would look like this machine."""


def build_app(
    config: ServeConfig,
    tokenizer: Tokenizer,
    workers: Workers,
    metrics: Metrics,
    *,
    model: str,
    verdict: wire.VerdictInfo,
    layouts: Mapping[str, Layout] | None = None,
    tenants: Tenants | None = None,
) -> Starlette:
    """Return the gateway as an ASGI app; `app.state.house` is its `House`. Without `tenants` anybody may ask."""
    tenants = Tenants() if tenants is None else tenants
    pairing = Pairing(workers, verdict, layouts)
    gateway = Gateway(config, tokenizer, workers, metrics, model=model, pairing=pairing)
    app = Starlette(
        routes=gateway.routes(),
        middleware=[Middleware(Envelope, metrics=metrics), Middleware(Access, tenants=tenants)],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug},
        lifespan=gateway.lifespan,
    )
    app.state.house = gateway.house
    app.state.tenants = tenants
    return app


class Server(uvicorn.Server):
    """uvicorn for the gateway's app.

    On a signal (or `should_exit`) it stops accepting; requests that outlive the grace get an error event, not a
    broken connection.
    """

    def __init__(self, app: Starlette, grace_s: float = GRACE_S) -> None:
        settings = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            forwarded_allow_ips=PROXIES,
            timeout_graceful_shutdown=int(grace_s + CLOSE_S),
        )
        super().__init__(settings)
        self._house: House = app.state.house
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listening sockets, drain the house, close the connections."""
        drain = asyncio.create_task(self._house.drain(self._grace_s))
        await super().shutdown(sockets)
        await drain


async def serve(app: Starlette, host: str, port: int, *, grace_s: float = GRACE_S) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError that names the port if it cannot be had."""
    await Server(app, grace_s).serve(sockets=[listen(host, port)])


def run_gateway(spec: wire.GatewaySpec) -> None:
    """Serve what a spec says until a signal. Raises ConfigError."""
    setup_logging("info", spec.log_json, "gateway")
    metrics = Metrics.create(__version__)
    config = spec.config
    tls = from_config(config.transfer.tls) if spec.key else None
    layouts = {name: files.decode(data, format="json") for name, data in spec.layouts.items()}

    async def run() -> None:
        app = build_app(
            config,
            Tokenizer.load(Path(spec.model_folder)),
            Workers.connect(
                spec.workers,
                spec.token,
                metrics,
                model=spec.model_name,
                key=bytes.fromhex(spec.key),
                tls=tls.client if tls else None,
            ),
            metrics,
            model=spec.model_name,
            verdict=spec.verdict,
            layouts=layouts,
        )
        await serve(app, config.host, config.port)

    uvloop.run(run())


def main(arguments: list[str]) -> int:
    """Run with the spec's file as the only argument; return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m regauge.serve.gateway SPEC.json\n")
        return 2
    try:
        run_gateway(wire.read_spec(Path(arguments[0])))
    except ConfigError as error:
        sys.stderr.write(f"regauge gateway: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130  # uvicorn raises SIGINT again once it has shut down
    return 0


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError: uvicorn would exit the process when the port is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for a host name that cannot be one
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"host {host!r}: {reason}; choose another with --host") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        reason = "is taken by another process" if taken else f"cannot be had: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {reason}; choose another with --port") from error
    return listener


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  # by registration
    request.scope["state"]["summary"] = {observe.ERROR: str(error)}
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the API's error body."""
    assert isinstance(error, HTTPException)  # noqa: S101  # by registration
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(ApiError(error.status_code, message, code=code))
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, _: Exception) -> Response:
    """Starlette logs and re-raises what it is; the client learns no inner details."""
    request_id: str = request.state.request_id
    response = error_response(
        ApiError(
            500,
            f"internal error; look for request {request_id} in the log",
            type=SERVER_ERROR,
            code="internal_error",
        )
    )
    response.headers["x-request-id"] = request_id
    return response


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
