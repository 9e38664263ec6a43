"""A worker's process: its internal HTTP API, its start and its end.

Run as `python -m regauge.serve.worker_process SPEC.json` (`wire.WorkerSpec`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from regauge.engines.local.kv import allocate
from regauge.engines.local.model import LocalModel
from regauge.errors import ConfigError, ProtocolError, RegaugeError
from regauge.layout import files
from regauge.move.events import Traces
from regauge.move.plane import resolve
from regauge.move.state import shown
from regauge.move.transports import open_rails
from regauge.observe import setup_logging
from regauge.planes import listening
from regauge.serve import wire
from regauge.serve.cache_api import cache_news
from regauge.serve.local_worker import LocalWorker
from regauge.serve.registering import registered
from regauge.serve.server import listen
from regauge.serve.tied import die_with_parent
from regauge.serve.worker import DecodeWorker, PrefillWorker

log = structlog.get_logger()
Handler = Callable[[HttpRequest], Awaitable[Response]]


def routes(worker: LocalWorker) -> list[Route]:
    """Return the internal API of a worker; see `wire.py`."""
    api = _Api(worker)

    def guarded(handler: Handler) -> Handler:
        async def call(request: HttpRequest) -> Response:
            if not wire.authorized(request.headers.get("authorization"), worker.spec.token):
                return _reply(wire.ErrorEvent("unauthorized", "wrong or missing bearer token", worker.spec.name))
            try:
                return await handler(request)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ProtocolError) as error:
                return _reply(wire.ErrorEvent("bad_request", str(error), worker.spec.name))
            except ClientDisconnect:
                return _reply(
                    wire.ErrorEvent("aborted", "the connection closed before the body's end", worker.spec.name)
                )
            except RegaugeError as error:
                return _reply(worker.core.error(error))

        return call

    return [
        Route(wire.HEALTH_PATH, guarded(api.health)),
        Route(wire.DEBUG_PATH, guarded(api.debug)),
        Route(wire.TRACE_PATH + "/{transfer}", guarded(api.trace)),
        Route(wire.CACHE_PATH, guarded(partial(cache_news, worker.core)), methods=["GET", "DELETE"]),
        Route(wire.REQUESTS_PATH + "/{request_id}", guarded(api.delete), methods=["DELETE"]),
        Route(wire.RECEIPTS_PATH, guarded(api.receipts)),
        Route(wire.ROLE_PATH, guarded(api.role), methods=["POST"]),
        Route(wire.GENERATE_PATH, guarded(api.generate), methods=["POST"]),
        Route(wire.PREFILL_PATH, guarded(api.prefill), methods=["POST"]),
    ]


class _Api:
    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker

    async def health(self, _: HttpRequest) -> Response:
        return _json(self.worker.health())

    async def debug(self, request: HttpRequest) -> Response:
        return _json(self.worker.debug(shown(request.query_params.get("limit"))))

    async def trace(self, request: HttpRequest) -> Response:
        worker = self.worker
        return _json(Traces.of(worker.core.events.of(request.path_params["transfer"], worker.spec.name)))

    async def delete(self, request: HttpRequest) -> Response:
        name, core = request.path_params["request_id"], self.worker.core
        return _json(wire.Aborted(await core.abort(name), core.notary.line(name)))

    async def receipts(self, request: HttpRequest) -> Response:
        since = _whole(request, "since", 0, 0, 1 << 53)
        limit = _whole(request, "limit", wire.MAX_RECEIPTS, 1, wire.MAX_RECEIPTS)
        return _json(self.worker.core.notary.since(since, limit))

    async def role(self, request: HttpRequest) -> Response:
        return _json(self.worker.take(msgspec.json.decode(await request.body(), type=wire.Roles).roles))

    async def generate(self, request: HttpRequest) -> Response:
        return await _generate(self.worker.decode, request)

    async def prefill(self, request: HttpRequest) -> Response:
        return await _prefill(self.worker.prefill, request)


def _whole(request: HttpRequest, name: str, default: int, least: int, most: int) -> int:
    """Read a number of the query. Raises ProtocolError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise ProtocolError(f"{name} must be a whole number from {least} to {most}")
    return int(text)


async def _generate(worker: DecodeWorker, request: HttpRequest) -> Response:
    body = msgspec.json.decode(await request.body(), type=wire.Generate)
    events: asyncio.Queue[wire.Event] = asyncio.Queue()
    job = worker.start(body, worker.generate(body, events))
    return StreamingResponse(_lines(job, events), media_type=wire.NDJSON)


async def _prefill(worker: PrefillWorker, request: HttpRequest) -> Response:
    body = msgspec.json.decode(await request.body(), type=wire.Prefill)
    job = worker.start(body, worker.prefill(body))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([job, gone], return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            await worker.core.abort(body.request_id)
        if job.cancelled():
            return _reply(worker.core.error(asyncio.CancelledError(), worker.notary.line(body.request_id)))
        return _json(job.result())
    except RegaugeError as error:
        return _reply(worker.core.error(error, worker.notary.line(body.request_id)))
    finally:
        gone.cancel()


async def _lines(job: asyncio.Task[None], events: asyncio.Queue[wire.Event]) -> AsyncIterator[bytes]:
    """Relay a request's events; a reader that goes away ends the request."""
    try:
        while True:
            event = await events.get()
            yield wire.encode_line(event)
            if isinstance(event, wire.FinishEvent | wire.ErrorEvent):
                return
    finally:
        job.cancel()


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(wire.encode(value), status, media_type="application/json")


def _reply(error: wire.ErrorEvent) -> Response:
    return _json(error, wire.STATUS[error.code])


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: they would end the process before the engine and the links are closed."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `run`."""
        yield


async def run(spec_: wire.WorkerSpec) -> None:
    """Load the model, open the links, serve until SIGTERM."""
    config = spec_.config
    model = await asyncio.to_thread(LocalModel, Path(spec_.model_folder), config.threads(spec_.role))
    memory = allocate(files.decode(spec_.layout, format="json"))
    key = bytes.fromhex(spec_.key)
    rails = await asyncio.to_thread(open_rails, config.transfer, key=key, name=spec_.name)
    rails.register(memory.slab)
    worker = LocalWorker(spec_, memory, model, rails)
    await worker.core.measure()
    await worker.start()
    host = config.discovery.advertise or wire.WORKER_HOST
    sock = listen(host, spec_.port, plane=listening(config.planes.business, host), setting="planes.worker_port")
    server = _Server(uvicorn.Config(Starlette(routes=routes(worker)), log_config=None, log_level="warning",
                                    access_log=False, timeout_graceful_shutdown=5))  # fmt: skip
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    pool, failed = worker.core.pool, worker.core.engine.failed
    log.info("ready", role=spec_.role, pages=pool.pages, page_size=pool.page_size)
    ends: list[asyncio.Future[Any]] = [serving, stopping, failed]
    plane = await asyncio.to_thread(resolve, config.transfer.control or config.transfer.host)
    async with registered(spec_, plane.address):
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await worker.close()
    await serving
    rails.close()
    memory.slab.close()
    if failed.done():
        failed.result()


def main(arguments: list[str]) -> int:
    """Run a worker from its spec file; the exit code is 0, 1 (failed) or 2 (misuse)."""
    if len(arguments) != 1:
        print("usage: python -m regauge.serve.worker_process SPEC.json", file=sys.stderr)
        return 2
    die_with_parent()
    try:
        spec_ = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=wire.WorkerSpec)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 2
    setup_logging("INFO", spec_.log_json, spec_.name)
    try:
        asyncio.run(run(spec_))
    except ConfigError as error:  # to be started again would not help
        log.error("the worker cannot start", error=str(error))
        return 2
    except (RegaugeError, OSError) as error:
        log.error("the worker ended", error=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
