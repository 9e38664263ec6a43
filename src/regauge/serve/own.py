"""What a gateway process keeps by itself, for its own answers and for its siblings' (`siblings.py`)."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from regauge.move.state import MAX_SHOWN
from regauge.serve.recent import Requests
from regauge.serve.relay import Service
from regauge.serve.siblings import OWN, Decision, Decisions, Kept


class Own:
    """What this process keeps by itself."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def newest(self, limit: int) -> Requests:
        """Return its newest requests."""
        return self._service.recent.newest(limit)

    def kept(self, name: str) -> Kept | None:
        """Return the request of a name; None: it is not kept here."""
        story = self._service.recent.of(name)
        return None if story is None else Kept(story.time_line(), story.arrived)

    def decisions(self, name: str) -> Decisions:
        """Return how the requests of a name were routed; none: it is not kept here."""
        journal = self._service.fleet.router.journal
        found = [record for each in self._service.names.of(name) if (record := journal.of(each)) is not None]
        return Decisions([Decision(each.began, {**each.data(), "text": each.text()}) for each in found])

    def routes(self) -> list[Route]:
        """Return what siblings are answered by; on the private socket alone."""
        return [
            Route(OWN + "/requests/{limit:int}", self._requests),
            Route(OWN + "/request/{id}", self._request),
            Route(OWN + "/decisions/{id}", self._decisions),
        ]

    async def _requests(self, request: Request) -> Response:
        return _json(self.newest(min(request.path_params["limit"], MAX_SHOWN)))

    async def _request(self, request: Request) -> Response:
        kept = self.kept(request.path_params["id"])
        return Response(status_code=404) if kept is None else _json(kept)

    async def _decisions(self, request: Request) -> Response:
        return _json(self.decisions(request.path_params["id"]))


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
