"""What a worker tells of its prefix cache: `GET` and `DELETE /internal/cache`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from regauge.serve import wire
from regauge.serve.core import Core, RefusalError


async def cache_news(worker: Core, request: Request) -> Response:
    """Answer with `CacheNews` since the query's `since` of `instance`; a DELETE first gives up all that nobody reads."""
    since = request.query_params.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) < 20):
        raise RefusalError("bad_request", "since must be a whole number: the last event that is known, or 0")
    if request.method == "DELETE":
        worker.cache.clear()
        worker.admission.pump()
    news = worker.cache.news(int(since), request.query_params.get("instance", ""))
    return Response(wire.encode(news), media_type="application/json")
