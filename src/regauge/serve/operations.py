"""The gateway's endpoints for whoever runs it: health, metrics, how workers stand, and why a request went where it went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from regauge import __version__
from regauge.errors import ProtocolError
from regauge.move.state import shown
from regauge.observe import Metrics
from regauge.serve import live, openapi, siblings, wire
from regauge.serve.answer import JSON, Envelope, House
from regauge.serve.cards import Health, Ready, Verdict, Version, WorkerHealth
from regauge.serve.dashboard import Dashboard
from regauge.serve.debug import Live, is_loopback
from regauge.serve.openai import ApiError, bad
from regauge.serve.own import Own
from regauge.serve.perfetto import trace_events
from regauge.serve.recent import MOST_REQUESTS
from regauge.serve.relay import Service
from regauge.serve.siblings import Siblings
from regauge.serve.tracing import trace

WHY_PATH: Final = "/debug/why"
REQUESTS_PATH: Final = "/debug/requests"
TRACE_PATH: Final = "/debug/trace"
MANAGEMENT: Final = "regauge.management"
"""Of a scope's state: the request came in by the management plane's listener."""


class Operations:
    """The endpoints."""

    def __init__(self, service: Service, house: House, metrics: Metrics, *, keys: bool = False) -> None:
        """`keys`: whether API keys are wanted, which the OpenAPI document tells."""
        self._service = service
        self._house = house
        self._metrics = metrics
        self._document = openapi.document(service.model, keys=keys)
        self._own = Own(service)
        self.siblings = Siblings()
        """Whom it asks for what it does not keep itself."""

    def app(self, handlers: Mapping[Any, ExceptionHandler]) -> ASGIApp:
        """Return what the management plane's listener answers: the same routes and nothing else, for whoever reaches it."""
        inner = Envelope(Starlette(routes=self.routes(), exception_handlers=handlers), self._metrics)

        async def marked(scope: Scope, receive: Receive, send: Send) -> None:
            scope.setdefault("state", {})[MANAGEMENT] = True
            await inner(scope, receive, send)

        return marked

    def private(self) -> ASGIApp:
        """Return what supervisor and siblings are answered by, on the private socket: neither counted nor logged."""
        asked = [Route("/health", self.health), Route("/ready", self.ready), Route("/metrics", self.scrape)]
        return Starlette(routes=[*asked, *self._own.routes()])

    def routes(self) -> list[Route]:
        """Return the routes; `observe.ROUTES` lists the same for the metrics' labels."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.scrape),
            Route("/version", self.version),
            Route(openapi.PATH, self.document),
            Route(wire.DEBUG_PATH, self.debug),
            Route(live.PATH, self.live),
            Route(REQUESTS_PATH, self.requests),
            Route(f"{TRACE_PATH}/{{id}}", self.trace),
            Route(f"{WHY_PATH}/{{id}}", self.why),
            *Dashboard(_need_loopback).routes(),
        ]

    async def health(self, _: Request) -> Response:
        """`GET /health`: this process is alive."""
        return _json(Health())

    async def ready(self, _: Request) -> Response:
        """`GET /ready`: requests can be served; else 503. The body names workers that do not answer, and since when.

        Where a worker is missing and others do its work, the status is "degraded".
        """
        fleet = self._service.fleet
        workers = [
            WorkerHealth(worker.client.name, worker.client.role, worker.up, worker.since, worker.reason)
            for worker in fleet.ordered()
        ]
        ready = not (self._house.draining or fleet.fault())
        if not ready:
            return _json(Ready("draining" if self._house.draining else "unavailable", workers), 503)
        return _json(Ready("ready" if fleet.whole else "degraded", workers))

    async def scrape(self, _: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        self._service.fleet.count()
        text, kind = self._metrics.exposition()
        return Response(text, media_type=kind)

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        verdict = self._service.fleet.verdict
        return _json(Version(__version__, self._service.model, Verdict(verdict.path, verdict.text)))

    async def document(self, _: Request) -> Response:
        """`GET /openapi.json`."""
        return Response(self._document, media_type=JSON)

    async def debug(self, request: Request) -> Response:
        """`GET /debug/transfers`: how transfers, links and pools of all workers stand; for this machine only."""
        _need_loopback(request, wire.DEBUG_PATH)
        return _json(live.overview(await self._look(request)))

    async def live(self, request: Request) -> Response:
        """`GET /debug/live`: the metrics, and how all workers stand, in one answer; for this machine only."""
        _need_loopback(request, live.PATH)
        return _json(await self._look(request))

    async def why(self, request: Request) -> Response:
        """`GET /debug/why/{id}`: how a request was routed, by its X-Request-Id or a receipt's id; for this machine only."""
        _need_loopback(request, WHY_PATH)
        name = request.path_params["id"]
        heard = await self.siblings.decisions(name)
        found = siblings.routed([self._own.decisions(name), *heard.answers], heard.silent)
        if not found.requests:
            raise _unknown(name, "route.keep_routes", heard.silent)
        return _json(found)

    async def requests(self, request: Request) -> Response:
        """`GET /debug/requests`: the newest requests; for this machine only."""
        _need_loopback(request, REQUESTS_PATH)
        limit = _limit(request)
        heard = await self.siblings.newest(limit)
        return _json(siblings.newest([self._own.newest(limit), *heard.answers], limit, heard.silent))

    async def trace(self, request: Request) -> Response:
        """`GET /debug/trace/{id}`: a request's time line, with `?format=perfetto` for ui.perfetto.dev; for this machine only."""
        _need_loopback(request, TRACE_PATH)
        name, kind = request.path_params["id"], request.query_params.get("format", "json")
        if kind not in ("json", "perfetto"):
            raise bad("format", "format must be json or perfetto")
        heard, own = await self.siblings.kept(name), self._own.kept(name)
        kept = siblings.latest([*([own] if own else []), *heard.answers])
        if kept is None:
            raise _unknown(name, str(MOST_REQUESTS), heard.silent)
        found = await trace(kept, self._service.fleet.workers)
        found = msgspec.structs.replace(found, missing=[*found.missing, *heard.silent])
        if kind == "json":
            return _json(found)
        answer = _json(trace_events(found))
        answer.headers["content-disposition"] = 'attachment; filename="regauge-trace.json"'
        return answer

    async def _look(self, request: Request) -> Live:
        service = self._service
        return await live.look(service.fleet, self._metrics, service.model, self.siblings, _limit(request))


def public(routes: Iterable[Route]) -> list[Route]:
    """Return those that stay for clients where the management plane has a listener of its own."""
    return [route for route in routes if route.path in ("/health", "/ready", "/version", openapi.PATH)]


def _unknown(name: str, most: str, silent: Sequence[str]) -> ApiError:
    said = "; ".join([f"request {name!r} is not known: a gateway process keeps the newest {most} alone", *silent])
    return ApiError(404, said, code="request_not_found")


def _limit(request: Request) -> int:
    """Return the query's `limit`. Raises ApiError."""
    try:
        return shown(request.query_params.get("limit"))
    except ProtocolError as error:
        raise bad("limit", str(error)) from error


def _need_loopback(request: Request, path: str) -> None:
    if request.scope["state"].get(MANAGEMENT):
        return
    if not is_loopback(request.client.host if request.client else ""):
        message = f"{path} answers on loopback alone: ask on the gateway's machine, as by ssh"
        raise ApiError(403, message, code="loopback_only")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
