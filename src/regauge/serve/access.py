"""Who may ask: ASGI middleware that finds the tenant of a request, and ends what it was charged.

A request for `/v1/*` goes on with `scope["state"]["tenant"]` (Starlette's `request.state.tenant`), or is answered 401 or 403 here, before
its body is read. An endpoint that charges puts its `Grant` into `scope["state"]["grant"]` and notes in `grant.used` what was used; however
the request ends, the rest is given back here.

`/health`, `/ready` and `/version` are for everybody. `/metrics` are of all tenants together: for this machine, for keys of operators, and for
everybody where there are no keys.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regauge import observe
from regauge.serve.answer import error_response
from regauge.serve.debug import is_loopback
from regauge.serve.openai import ApiError
from regauge.serve.tenants import PERMISSION, Grant, Tenant, Tenants

GUARDED: Final = "/v1/"
METRICS: Final = "/metrics"


class Access:
    """The middleware."""

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            tenant = self._enter(scope)
        except ApiError as error:
            state["summary"] = {observe.ERROR: str(error)}
            response = error_response(error, scope["path"], state.get("request_id", ""))
            if error.status == 401:
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        if tenant is None:
            await self._app(scope, receive, send)
            return
        state["tenant"] = tenant

        async def send_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and isinstance(granted := state.get("grant"), Grant):
                message["headers"] = [*message["headers"], *granted.headers()]
            await send(message)

        try:
            await self._app(scope, receive, send_limits)
        finally:
            if isinstance(granted := state.get("grant"), Grant):
                self._tenants.settle(granted)

    def _enter(self, scope: Scope) -> Tenant | None:
        path: str = scope["path"]
        if path.startswith(GUARDED):
            return self._tenants.authenticate(scope["headers"])
        if path != METRICS or self._tenants.open or is_loopback((scope.get("client") or ("",))[0]):
            return None
        if not self._tenants.authenticate(scope["headers"]).operator:
            raise ApiError(
                403, "/metrics are of all tenants: for keys of an operator", type=PERMISSION, code="operator_only"
            )
        return None
