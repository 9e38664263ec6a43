"""The gateway's process: the APIs that clients speak, over a fleet of prefill and decode workers.

The life of a request:

1. The API key says who asks (`access.py`). The body is read, up to `limits.max_body_bytes`, and checked (`openai.py`, `anthropic.py`); the
   model's name must be ours.
2. The chat template is applied and the text tokenised (`text.py`).
3. Prompt and answer must fit the context. An answer length that the client did not give is cut to fit.
4. Admission: the tenant's limits (`tenants.py`), then every choice counts against `limits.max_queue`.
5. The router (`route/`) places each choice on a prefill and a decode worker, or refuses it; both get it at the same time, and the decode
   worker's tokens come back (`relay.py`, `attempt.py`). Where a worker fails it, it is tried elsewhere, or another goes on with it.
6. They become text, whole or as server-sent events (`dialects.py`). The HTTP status is sent with the first of it, so
   that a request which fails before its first token is answered with its own status, streamed or not.
7. A client that goes away ends its request on both workers.
8. One log line says what became of it, and receipts what it used (`metering.py`).

Run as `python -m regauge.serve.gateway SPEC.json` (`wire.GatewaySpec`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from regauge import __version__, observe
from regauge.config import ServeConfig
from regauge.errors import ConfigError, StoreError
from regauge.layout import files
from regauge.move.tls import from_config
from regauge.observe import Metrics, get_logger, setup_logging
from regauge.planes import here
from regauge.route.router import Router
from regauge.serve import reload, wire
from regauge.serve.answer import House, Spans, error_response
from regauge.serve.collector import Collector
from regauge.serve.discovery import Source
from regauge.serve.endpoints import Gateway
from regauge.serve.fleet import Fleet, dialer
from regauge.serve.front import Front, bug
from regauge.serve.metering import Meter, from_spec
from regauge.serve.names import Names
from regauge.serve.openai import ApiError
from regauge.serve.operations import Operations, public
from regauge.serve.pairing import Pairs
from regauge.serve.place import ALONE, Place, is_open, share
from regauge.serve.pools import follow, sources
from regauge.serve.registration import Desk, Shelf
from regauge.serve.relay import Service
from regauge.serve.reload import Part, Reloader
from regauge.serve.server import GRACE_S, Server, load_chain, tls_context
from regauge.serve.tenants import Tenants
from regauge.serve.text import Tokenizer
from regauge.serve.usage import UsageApi, used_this_month


def build_app(
    config: ServeConfig,
    tokenizer: Tokenizer,
    fleet: Fleet,
    metrics: Metrics,
    *,
    model: str,
    tenants: Tenants | None = None,
    meter: Meter | None = None,
    pools: Sequence[Source] = (),
) -> Front:
    """Return the gateway as an ASGI app; `app.state.house` is its `House`. Without `tenants` anybody may ask, without `meter` nothing is billed.

    `pools` tell of workers beside those that the fleet has.
    """
    tenants = Tenants() if tenants is None else tenants
    house = House(config.limits.max_queue, metrics)
    spans = _spans(config, metrics, model)
    service = Service(
        fleet, tokenizer, metrics, meter, Names(config.route.keep_routes), model, house.spawn,
        limit_s=config.limits.request_timeout_s, wait_s=config.limits.prefill_wait_s,
    )  # fmt: skip
    gateway = Gateway(config, service, house, tenants, records=spans is not None)
    operations = Operations(service, house, metrics, keys=not tenants.open)
    own = operations.routes()
    routes = [*gateway.routes(), *UsageApi(config.meter.store).routes()]
    routes += public(own) if config.planes.management else own
    routes += [route for source in pools if isinstance(source, Desk) for route in source.routes()]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        """Watch the workers while the app runs; end what is left when it stops."""
        await fleet.start()
        beside = [asyncio.create_task(follow(fleet, pools, [*fleet.workers], here(config.planes)))]
        if meter is not None and meter.looks:
            beside.append(asyncio.create_task(Collector(fleet, meter).run()))
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await house.drain(0)
            await fleet.close()
            if meter is not None:
                await asyncio.to_thread(meter.close)
            if spans is not None:
                await asyncio.to_thread(spans.close)

    handlers: dict[Any, ExceptionHandler] = {
        ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug
    }  # fmt: skip
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    app.state.management = operations.app(handlers)
    app.state.operations = operations
    app.state.house = house
    app.state.gateway = gateway
    app.state.router = fleet.router
    app.state.tenants = tenants
    app.state.metrics = metrics
    return Front(app, routes, metrics, tenants, spans)


async def serve(app: Front, config: ServeConfig, place: Place = ALONE, *, grace_s: float = GRACE_S) -> None:
    """Serve until SIGINT or SIGTERM; read files anew on SIGHUP. Raises ConfigError that names the port if it cannot be had."""
    rules = config.gateway
    tls = None if rules.tls is None else tls_context(rules.tls)
    listener = place.listener(config)
    if is_open(listener.getsockname()[0], rules):
        get_logger().warning(
            "anybody who reaches this address may use all of it: give gateway.tenants",
            address=listener.getsockname()[0],
        )
    management = place.management_listener(config)
    beside = None if management is None else (app.state.management, management)
    operations: Operations = app.state.operations
    operations.siblings = place.siblings(config)
    private = None if place.private is None else (operations.private(), place.private)
    server = Server(app, grace_s, rules=rules, tls=tls, private=private, beside=beside)
    tenants: Tenants = app.state.tenants
    gateway: Gateway = app.state.gateway

    def certificate(new: ServeConfig) -> Callable[[], None]:
        if tls is None or new.gateway.tls is None:
            return lambda: None
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), new.gateway.tls)
        return partial(load_chain, tls, new.gateway.tls)

    parts: dict[str, Part] = {
        "tenants": lambda new: tenants.prepare(Path(new.gateway.tenants) if new.gateway.tenants else None),
        "tls": certificate,
        "rules": lambda new: partial(setattr, server.door, "rules", new.gateway),
        "limits": lambda new: partial(gateway.set_limits, share(new)),
        "route": lambda new: partial(setattr, app.state.router, "config", new.route),
    }
    folder = place.folder
    reloader = Reloader(parts)
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGHUP, reloader.reload, (lambda: config) if folder is None else partial(reload.read, folder, config)
    )
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    await server.serve(sockets=[listener])


def run_gateway(spec: wire.GatewaySpec, place: Place = ALONE) -> None:
    """Serve what a spec says until a signal. Raises ConfigError."""
    config = spec.config
    setup_logging("info", spec.log_json, "gateway" if config.gateway.processes == 1 else f"gateway-{place.number}")
    config = msgspec.structs.replace(config, limits=share(config))
    metrics = place.metrics(config)
    tenants = Tenants.load(Path(config.gateway.tenants) if config.gateway.tenants else None, place.buckets())
    tls = from_config(config.transfer.tls) if spec.key else None
    layouts = {name: files.decode(data, format="json") for name, data in spec.layouts.items()}

    pools = sources(config)
    if config.meter.store and place.number == 0:
        tenants.count_month(used_this_month(config.meter.store))

    async def run() -> None:
        if config.discovery.register:
            pools.append(_desk(spec, place))
        fleet = Fleet(
            spec.workers,
            dialer(spec.token, spec.model_name, bytes.fromhex(spec.key), tls.client if tls else None),
            metrics,
            Router(config.route, max_queue=config.limits.max_queue),
            pairs=Pairs(layouts, spec.verdict),
        )
        app = build_app(
            config, Tokenizer.load(Path(spec.model_folder)), fleet, metrics, model=spec.model_name, tenants=tenants,
            meter=from_spec(spec, metrics, looks=place.number == 0), pools=pools,
        )  # fmt: skip
        await serve(app, config, place)

    uvloop.run(run())


def _spans(config: ServeConfig, metrics: Metrics, model: str) -> Spans | None:
    """Return what takes spans; None: nothing does. Raises ConfigError where what it needs is not installed."""
    if not config.observe.otlp:
        return None
    try:
        from regauge.serve.otlp import Otlp
    except ImportError as error:
        raise ConfigError(f"observe.otlp: needs OpenTelemetry ({error}): pip install 'regauge[otlp]'") from error
    instance = f"{socket.gethostname()}-{os.getpid()}"
    return Otlp(config.observe.traces, metrics, model=model, instance=instance, version=__version__)


def _desk(spec: wire.GatewaySpec, place: Place) -> Desk:
    rules, folder = spec.config.discovery, place.folder
    if folder is None or not spec.key:
        raise ConfigError("discovery.register: workers sign with the transfer plane's key: give transfer.key_file")
    shelf = Shelf(folder / "workers", rules.max_workers)
    taken = frozenset(address.name for address in spec.workers)
    return Desk(shelf, bytes.fromhex(spec.key), rules.lease_s, rules.max_workers, taken)


def main(arguments: list[str]) -> int:
    """Run with the spec's file as the only argument, or also a process's number and listening sockets; return the exit code."""
    if len(arguments) not in (1, 3, 4) or not all(word.isascii() and word.isdigit() for word in arguments[1:]):
        sys.stderr.write("usage: python -m regauge.serve.gateway SPEC.json [NUMBER SOCKET [MANAGEMENT-SOCKET]]\n")
        return 2
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGHUP}
    )  # one that comes while this starts waits until it is served
    path = Path(arguments[0])
    place = Place(path.parent, *map(int, arguments[1:]))
    try:
        run_gateway(wire.read_spec(path), place)
    except (ConfigError, StoreError) as error:
        sys.stderr.write(f"regauge gateway: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130  # uvicorn raises SIGINT again once it has shut down
    return 0


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)  # noqa: S101  # by registration
    request.scope["state"]["summary"] = {observe.ERROR: str(error)}
    return error_response(error, request.url.path, request.state.request_id)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the API's error body."""
    assert isinstance(error, HTTPException)  # noqa: S101  # by registration
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    told = ApiError(error.status_code, message, code=code)
    response = error_response(told, request.url.path, request.state.request_id)
    response.headers.update(error.headers or {})
    return response


async def _on_bug(request: Request, _: Exception) -> Response:
    """Starlette logs and re-raises what it is."""
    return error_response(bug(request.state.request_id), request.url.path, request.state.request_id)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
