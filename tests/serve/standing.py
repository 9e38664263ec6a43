"""A small HTTP server that stands for another one's API, as far as a client's test asks of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def listening(routes: Iterable[web.RouteDef]) -> AsyncIterator[str]:
    """Serve these routes at a port of loopback, whose URL is given."""
    app = web.Application()
    app.router.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
