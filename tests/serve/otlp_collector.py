"""A collector that takes OTLP over HTTP and decodes it by the official protocol's package."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """`status`: what it answers; `hangs`: it takes requests and does not answer until this is set."""

    url: str = ""
    status: int = 200
    hangs: asyncio.Event | None = None
    asked: int = 0
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        self.asked += 1
        assert request.content_type == "application/x-protobuf"
        body = ExportTraceServiceRequest.FromString(await request.read())
        if self.hangs is not None:
            await self.hangs.wait()
        if self.status == 200:
            for each in body.resource_spans:
                self.resources.append(values(each.resource.attributes))
                self.spans += [span for scope in each.scope_spans for span in scope.spans]
        return web.Response(status=self.status, body=ExportTraceServiceResponse().SerializeToString())

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for each in attributes:
        value: AnyValue = each.value
        found[each.key] = getattr(value, str(value.WhichOneof("value")))
    return found


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    taken = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", taken.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    taken.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield taken
    finally:
        if taken.hangs is not None:
            taken.hangs.set()
        await runner.cleanup()
