"""A worker's process: its internal HTTP API, its start and its end.

Run as `python -m regauge.serve.worker_process SPEC.json` (`wire.WorkerSpec`).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
from regauge.errors import ConfigError, PeerLost, ProtocolError, RegaugeError
from regauge.layout import files
from regauge.move.state import shown
from regauge.move.transports import open_rails
from regauge.observe import setup_logging
from regauge.serve import wire
from regauge.serve.server import listen
from regauge.serve.tied import die_with_parent
from regauge.serve.worker import DecodeWorker, PrefillWorker

log = structlog.get_logger()
Handler = Callable[[HttpRequest], Awaitable[Response]]
WARM_TRIES = 120


def routes(worker: DecodeWorker | PrefillWorker) -> list[Route]:
    """Return the internal API of a worker; see `wire.py`."""

    def guarded(handler: Handler) -> Handler:
        async def call(request: HttpRequest) -> Response:
            if not wire.authorized(request.headers.get("authorization"), worker.spec.token):
                return _reply(wire.ErrorEvent("unauthorized", "wrong or missing bearer token", worker.spec.name))
            try:
                return await handler(request)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                return _reply(wire.ErrorEvent("bad_request", str(error), worker.spec.name))
            except ClientDisconnect:
                return _reply(
                    wire.ErrorEvent("aborted", "the connection closed before the body's end", worker.spec.name)
                )
            except RegaugeError as error:
                return _reply(worker.error(error))

        return call

    async def health(_: HttpRequest) -> Response:
        return _json(worker.health())

    async def debug(request: HttpRequest) -> Response:
        try:
            return _json(worker.debug(shown(request.query_params.get("limit"))))
        except ProtocolError as error:
            return _reply(wire.ErrorEvent("bad_request", str(error), worker.spec.name))

    async def delete(request: HttpRequest) -> Response:
        return _json(wire.Aborted(await worker.abort(request.path_params["request_id"])))

    async def work(request: HttpRequest) -> Response:
        return await (_generate(worker, request) if isinstance(worker, DecodeWorker) else _prefill(worker, request))

    return [
        Route(wire.HEALTH_PATH, guarded(health)),
        Route(wire.DEBUG_PATH, guarded(debug)),
        Route(wire.REQUESTS_PATH + "/{request_id}", guarded(delete), methods=["DELETE"]),
        Route(
            wire.GENERATE_PATH if worker.spec.role == "decode" else wire.PREFILL_PATH,
            guarded(work),
            methods=["POST"],
        ),
    ]


async def _generate(worker: DecodeWorker, request: HttpRequest) -> Response:
    body = msgspec.json.decode(await request.body(), type=wire.Generate)
    worker.admit(body.request_id, len(body.token_ids), worker.pages_for(len(body.token_ids), body.sampling))
    events: asyncio.Queue[wire.Event] = asyncio.Queue()
    job = worker.start(body.request_id, worker.generate(body, events))
    return StreamingResponse(_lines(job, events), media_type=wire.NDJSON)


async def _prefill(worker: PrefillWorker, request: HttpRequest) -> Response:
    body = msgspec.json.decode(await request.body(), type=wire.Prefill)
    worker.admit(body.request_id, len(body.token_ids), worker.pages_for(len(body.token_ids), body.sampling))
    job = worker.start(body.request_id, worker.prefill(body))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([job, gone], return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            await worker.abort(body.request_id)
        if job.cancelled():
            return _reply(wire.ErrorEvent("aborted", "the request was aborted", worker.spec.name))
        return _json(job.result())
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


async def _warm(worker: PrefillWorker) -> None:
    """Link to the decode workers before the first request does, once each of them is there."""
    for peer, address in worker.spec.peers.items():
        for _ in range(WARM_TRIES):
            try:
                await worker.links.connect(peer, address)
                break
            except PeerLost:
                await asyncio.sleep(1.0)  # it is still loading
            except RegaugeError as error:
                log.warning("no link yet", peer=peer, error=str(error))
                break


async def run(spec_: wire.WorkerSpec) -> None:
    """Load the model, open the links, serve until SIGTERM."""
    config = spec_.config
    engine = config.prefill if spec_.role == "prefill" else config.decode
    model = await asyncio.to_thread(LocalModel, Path(spec_.model_folder), engine.threads)
    memory = allocate(files.decode(spec_.layout, format="json"))
    key = bytes.fromhex(spec_.key)
    rails = await asyncio.to_thread(open_rails, config.transfer, key=key, name=spec_.name)
    rails.register(memory.slab)
    worker: DecodeWorker | PrefillWorker
    warming: asyncio.Task[None] | None = None
    if spec_.role == "decode":
        worker = DecodeWorker(spec_, memory, model, rails)
        await worker.links.start(config.transfer.control or config.transfer.host, spec_.control_port)
    else:
        worker = PrefillWorker(spec_, memory, model, rails)
        warming = asyncio.create_task(_warm(worker))
    sock = listen(wire.WORKER_HOST, spec_.port)
    server = _Server(uvicorn.Config(Starlette(routes=routes(worker)), log_config=None, log_level="warning",
                                    access_log=False, timeout_graceful_shutdown=5))  # fmt: skip
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    stopping = asyncio.create_task(stop.wait())
    log.info("ready", role=spec_.role, pages=worker.pool.pages, page_size=worker.pool.page_size)
    ends: list[asyncio.Future[Any]] = [serving, stopping, worker.engine.failed]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    if warming is not None:
        warming.cancel()
    await worker.close()
    await serving
    await worker.links.close()
    rails.close()
    memory.slab.close()
    if worker.engine.failed.done():
        worker.engine.failed.result()


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
