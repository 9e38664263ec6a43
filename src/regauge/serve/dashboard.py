"""The live page: its files, as they lie in `page/`. What it shows comes from `/debug/live`, made of the registry that
`/metrics` is written from, and of single requests from `/debug/requests` and `/debug/trace`.

No file comes from elsewhere, and the page may ask nobody but its gateway (Content-Security-Policy).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH: Final = "/dashboard"
MODULES: Final = ("charts", "looks", "main", "sections", "series", "svg", "table", "text", "timeline", "topology")
FILES: Final = {
    **{f"{name}.js": "text/javascript" for name in MODULES}, "uplot/uPlot.esm.js": "text/javascript",
    "style.css": "text/css", "uplot/uPlot.min.css": "text/css",
}  # fmt: skip
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
}  # fmt: skip


class Dashboard:
    """The page's endpoints. `allow(request, path)` raises for whoever may not see them."""

    def __init__(self, allow: Callable[[Request, str], None]) -> None:
        self._allow = allow
        page = files("regauge.serve") / "page"
        self._files = {name: page.joinpath(name).read_bytes() for name in FILES}
        self._index = page.joinpath("index.html").read_bytes()

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [Route(PATH, self.index), Route(f"{PATH}/{{file:path}}", self.file)]

    async def index(self, request: Request) -> Response:
        """`GET /dashboard`."""
        self._allow(request, PATH)
        return Response(self._index, media_type="text/html", headers=_HEADERS)

    async def file(self, request: Request) -> Response:
        """`GET /dashboard/FILE`: one of `FILES`."""
        self._allow(request, PATH)
        name = request.path_params["file"]
        if name not in FILES:
            return Response(f"no such file: {name[:100]}\n", 404, media_type="text/plain", headers=_HEADERS)
        return Response(self._files[name], media_type=FILES[name], headers=_HEADERS)
