"""The gateway as an ASGI app. The routes that generate come before Starlette: its layers for each request cost as much as a call to an engine.

A request for one of them goes from the access check to its endpoint and nowhere else. All other paths and methods are Starlette's, which has
these routes too, and so knows what else could be asked of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from regauge import observe
from regauge.observe import Metrics
from regauge.serve.access import Access
from regauge.serve.answer import Envelope, Spans, error_response
from regauge.serve.openai import SERVER_ERROR, ApiError
from regauge.serve.protocol import WHOLE
from regauge.serve.tenants import Tenant, Tenants


class Asking:
    """A request that has been let in."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self.receive = receive
        self.tenant: Tenant = scope["state"]["tenant"]
        self.request_id: str = scope["state"]["request_id"]

    @property
    def whole(self) -> bool:
        """Whether all of its body is known to be there."""
        told = self.scope.get("extensions", {}).get(WHOLE)
        return told is not None and bool(told())

    async def read(self) -> tuple[bytes, bool]:
        """Return a part of the body, and whether there is more. Raises ApiError where the client has gone."""
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the connection closed before the body's end")
        return message.get("body", b""), message.get("more_body", False)

    def header(self, name: bytes) -> str:
        """Return the first header of a (lower-case) name; empty: there is none."""
        return next((value.decode("latin-1") for each, value in self.scope["headers"] if each == name), "")


class Endpoint:
    """An ASGI app of what answers a request with another app. It lets ApiError through."""

    def __init__(self, answer: Callable[[Asking], Awaitable[ASGIApp]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        answer = await self._answer(Asking(scope, receive))
        await answer(scope, receive, send)


class Front:
    """The app: every request in its envelope and past the access check; then some routes' POST requests by themselves, all else by Starlette."""

    def __init__(
        self, app: Starlette, routes: Iterable[Route], metrics: Metrics, tenants: Tenants, spans: Spans | None = None
    ) -> None:
        self.state = app.state
        self.starlette = app
        self._hot = {route.path: route.endpoint for route in routes if isinstance(route.endpoint, Endpoint)}
        self._layers = Envelope(Access(self._inner, tenants), metrics, spans)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        await self._layers(scope, receive, send)

    async def _inner(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._hot.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await self.starlette(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except ApiError as error:
            scope["state"]["summary"] = {observe.ERROR: str(error)}
            await error_response(error, scope["path"], scope["state"]["request_id"])(scope, receive, send)
        except Exception:  # whatever broke, the client is told that something did
            if not scope["state"]["begun"]:
                request_id: str = scope["state"]["request_id"]
                await error_response(bug(request_id), scope["path"], request_id)(scope, receive, send)
            raise  # the server logs what it is


def bug(request_id: str) -> ApiError:
    """Return what a client learns of a fault in here: no inner details."""
    message = f"internal error; look for request {request_id} in the log"
    return ApiError(500, message, type=SERVER_ERROR, code="internal_error")
