"""What a tenant used, told to itself: `GET /v1/usage`, and of one request `GET /v1/usage/{id}`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from regauge.errors import StoreError
from regauge.meter.invoice import Used
from regauge.meter.reconcile import Entry
from regauge.meter.store import Store
from regauge.serve.answer import JSON
from regauge.serve.failures import unavailable
from regauge.serve.openai import ApiError, bad
from regauge.serve.tenants import Tenant

PATH: Final = "/v1/usage"
By = Literal["hour", "day", "month", "total"]
MOST: Final = 10_000
"""Most rows of an answer."""


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one model that are charged in one bucket of time, which begins at `start` (UTC)."""

    start: datetime
    model: str
    requests: int
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int


class UsageList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/usage`."""

    object: Literal["list"] = "list"
    data: list[UsageRow]


class RequestUsage(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its receipts have it, and what is charged of it; `status`: agreed, missing, differs, void."""

    id: str
    status: str
    outcome: str
    model: str
    at: datetime
    route: str
    input_tokens: int
    input_cached_tokens: int
    output_tokens: int
    resumes: str


class RequestUsageList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/usage/{id}`: the requests to workers that a client's request became."""

    object: Literal["list"] = "list"
    data: list[RequestUsage]


class UsageApi:
    """The endpoints. `store` as in `meter.store`; empty: nothing is metered."""

    def __init__(self, store: str) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        """Return the routes; `observe.ROUTES` lists the same for the metrics' labels."""
        return [Route(PATH, self.usage), Route(f"{PATH}/{{id}}", self.request)]

    async def usage(self, request: Request) -> Response:
        """`GET /v1/usage?from=2026-10-01&until=2026-11-01&by=day`: the tenant's own; by default of this month, by day."""
        query = request.query_params
        if unknown := set(query) - {"from", "until", "by", "model"}:
            raise bad(min(unknown), "is not known here; give from, until, by, model")
        by = query.get("by", "day")
        if by not in get_args(By):
            raise bad("by", "must be hour, day, month or total")
        since = _time(query.get("from"), "from", _month(datetime.now(UTC)))
        until = _time(query.get("until"), "until", datetime.now(UTC) + timedelta(days=1))
        tenant: Tenant = request.state.tenant
        used = await asyncio.to_thread(self._charged, tenant.name, _us(since), _us(until))
        rows = _rows([each for each in used if query.get("model") in (None, each.model)], by, since)
        if len(rows) > MOST:
            raise bad("from", f"asks for {len(rows)} rows; at most {MOST} are told at once")
        return _json(UsageList(data=rows))

    async def request(self, request: Request) -> Response:
        """`GET /v1/usage/{id}`: a request of the tenant's own, by its X-Request-Id."""
        name, tenant = request.path_params["id"], request.state.tenant.name
        found = await asyncio.to_thread(self._request, name, tenant)
        if not found:
            raise ApiError(404, f"there are no receipts of a request {name!r} of yours", code="request_not_found")
        return _json(RequestUsageList(data=list(map(_entry, found))))

    def _open(self) -> Store:
        if not self._store:
            raise ApiError(404, "nothing is metered here: meter.store is not set", code="not_metered")
        try:
            return Store(self._store, create=False)
        except StoreError as error:
            raise unavailable(f"the receipts cannot be read: {error}") from error

    def _charged(self, tenant: str, since_us: int, until_us: int) -> list[Used]:
        store = self._open()
        try:
            return store.charged(tenant, since_us, until_us)
        except StoreError as error:
            raise unavailable(f"the receipts cannot be read: {error}") from error
        finally:
            store.close()

    def _request(self, name: str, tenant: str) -> list[Entry]:
        store = self._open()
        try:
            return store.entries(name, tenant)
        except StoreError as error:
            raise unavailable(f"the receipts cannot be read: {error}") from error
        finally:
            store.close()


def used_this_month(url: str) -> dict[str, int]:
    """Return the tokens, prompt and answer, that every tenant is charged since the month (UTC) began. Raises StoreError, ConfigError."""
    now = datetime.now(UTC)
    period = _us(_month(now)), _us(now + timedelta(days=1))
    store = Store(url)
    try:
        return {
            tenant: sum(u.cached_input + u.uncached_input + u.output for u in store.charged(tenant, *period))
            for tenant in store.tenants(*period)
        }
    finally:
        store.close()


def _month(now: datetime) -> datetime:
    return now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _rows(used: Iterable[Used], by: str, since: datetime) -> list[UsageRow]:
    """Add quarters of an hour up to buckets; `since` is where the one bucket of "total" begins."""
    found: dict[tuple[datetime, str], list[int]] = {}
    for each in used:
        at = _at(each.at_us)
        start = {
            "hour": at.replace(minute=0), "day": at.replace(hour=0, minute=0), "month": at.replace(day=1, hour=0, minute=0),
        }.get(by, since)  # fmt: skip
        sums = found.setdefault((start, each.model), [0, 0, 0, 0])
        for place, count in enumerate((each.requests, each.cached_input, each.uncached_input, each.output)):
            sums[place] += count
    return [
        UsageRow(
            start=start, model=model, requests=requests, input_tokens=cached + uncached, input_cached_tokens=cached, output_tokens=output
        )
        for (start, model), (requests, cached, uncached, output) in sorted(found.items())
    ]  # fmt: skip


def _entry(entry: Entry) -> RequestUsage:
    cached, uncached, output = entry.charged
    return RequestUsage(
        id=entry.request, status=entry.status, outcome=entry.outcome, model=entry.model, at=_at(entry.at_us), route=entry.route,
        input_tokens=cached + uncached, input_cached_tokens=cached, output_tokens=output, resumes=entry.resumes,
    )  # fmt: skip


def _time(text: str | None, name: str, default: datetime) -> datetime:
    if text is None:
        return default
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise bad(name, "must be a day or time as in 2026-10-31 or 2026-10-31T12:00:00Z") from None
    found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    if not 1970 < found.year < 3000:
        raise bad(name, "must be of a year from 1971 to 2999")
    return found


def _us(moment: datetime) -> int:
    return int(moment.timestamp() * 1e6)


def _at(us: int) -> datetime:
    return datetime.fromtimestamp(us / 1e6, UTC)


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
