"""Receipts and what they come to, in a database: written in batches, read for usage, bills, and what must be asked again.

Every batch is one transaction: its receipts, and the entries of their requests as `reconcile` gives them. A receipt that is there
already changes nothing; another under the same request and side is kept beside the first, and the entry differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

from regauge.errors import StoreError
from regauge.meter import reconcile
from regauge.meter.database import connect
from regauge.meter.invoice import QUARTER_US, Open, Used
from regauge.meter.receipt import Receipt, Side, Signed, Verified, canonical, encode
from regauge.meter.reconcile import Arrival, Entry

Bucket = Literal["hour", "day"]
BUCKETS_US: Final[dict[Bucket, int]] = {"hour": 3_600_000_000, "day": 86_400_000_000}
END_US: Final = 1 << 60
"""After all times."""
_COUNTS: Final = (
    "prompt", "cached", "computed", "transferred", "converted", "generated", "direct_bytes", "remap_bytes", "convert_bytes",
)  # fmt: skip
_COLUMNS: Final = (
    "request", "status", "tenant", "model", "at_us", "ended_us", *_COUNTS, "charged_cached", "charged_uncached", "charged_output", "body",
)  # fmt: skip
_UPSERT: Final = (
    f"INSERT INTO entries ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))}) "  # noqa: S608  # constants
    f"ON CONFLICT (request) DO UPDATE SET {', '.join(f'{c} = excluded.{c}' for c in _COLUMNS[1:])}"
)


class Usage(NamedTuple):
    """What one tenant used of one model in one bucket of time; requests that differ or lack a side are in it."""

    at_us: int
    """The bucket's begin (UTC)."""
    tenant: str
    model: str
    requests: int
    prompt: int
    cached: int
    computed: int
    transferred: int
    converted: int
    generated: int
    direct_bytes: int
    remap_bytes: int
    convert_bytes: int


class Missing(NamedTuple):
    """A receipt that must be asked for again."""

    request: str
    side: Side
    worker: str
    """Who must have it; empty for the gateway: `reconcile.recover` makes it again."""


class Store:
    """The receipts' database. For one thread; several processes may have one each."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        """Open it (see `database.connect`). Raises StoreError, ConfigError."""
        self._database = connect(url, create=create)

    def close(self) -> None:
        """Close it."""
        self._database.close()

    def add(self, batch: Sequence[tuple[Verified, int]]) -> int:
        """Write receipts, each with when it came (microseconds since 1970); return how many were new. Raises StoreError: none was written."""
        requests = sorted({signed.receipt.request for signed, _ in batch})
        new = 0
        with self._database.transaction():
            for signed, received_us in batch:
                r = signed.receipt
                row = (r.request, r.side, r.by, r.ended_us, received_us, _digest(r), encode(signed).decode())
                new += len(
                    self._database.execute(
                        "INSERT INTO receipts (request, side, signer, ended_us, received_us, digest, body) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING request",
                        row,
                    )
                )
            for request in requests:
                self._database.execute(_UPSERT, _row(reconcile.reconcile(self._arrivals(request))))
        return new

    def entry(self, request: str) -> Entry | None:
        """Return what is known of a request. Raises StoreError."""
        rows = self._database.execute("SELECT body FROM entries WHERE request = ?", (request,))
        return _entry(rows[0][0]) if rows else None

    def entries(self, name: str, tenant: str, limit: int = 1_000) -> list[Entry]:
        """Return the oldest `limit` entries of a tenant whose request is `name`, or a part of it (`name-...`). Raises StoreError."""
        rows = self._database.execute(
            "SELECT body FROM entries WHERE tenant = ? AND (request = ? OR (request >= ? AND request < ?)) ORDER BY at_us, request LIMIT ?",
            (tenant, name, f"{name}-", f"{name}.", limit),  # "." comes after "-"
        )
        return [_entry(row[0]) for row in rows]

    def receipts(self, since_us: int = 0, until_us: int = END_US, tenant: str | None = None) -> Iterator[Signed]:
        """Yield the receipts of requests that arrived in [since, until), a request's together. Raises StoreError."""
        where, values = _where(since_us, until_us, tenant)
        tables = "receipts JOIN entries ON receipts.request = entries.request"
        order = "entries.at_us, receipts.request, receipts.side, receipts.digest"
        statement = f"SELECT receipts.body FROM {tables} WHERE {where} ORDER BY {order}"  # noqa: S608  # constants
        for (body,) in self._database.stream(statement, values):
            yield _signed(body)

    def usage(
        self,
        since_us: int,
        until_us: int,
        *,
        tenant: str | None = None,
        model: str | None = None,
        bucket: Bucket = "day",
    ) -> list[Usage]:
        """Return what was used in [since, until), by bucket, tenant and model in order; void requests count nothing. Raises StoreError."""
        where, values = _where(since_us, until_us, tenant, model)
        size = BUCKETS_US[bucket]
        sums = ", ".join(f"SUM({name})" for name in _COUNTS)
        rows = self._database.execute(
            f"SELECT at_us / {size} * {size} AS bucket, tenant, model, COUNT(*), {sums} FROM entries "  # noqa: S608  # constants
            f"WHERE {where} AND status <> 'void' GROUP BY bucket, tenant, model ORDER BY bucket, tenant, model",
            values,
        )
        return [Usage(int(row[0]), row[1], row[2], *map(int, row[3:])) for row in rows]

    def charged(self, tenant: str, since_us: int, until_us: int) -> list[Used]:
        """Return what a tenant is to pay for, by quarters of an hour and models. Raises StoreError."""
        rows = self._database.execute(
            f"SELECT at_us / {QUARTER_US} * {QUARTER_US} AS quarter, model, COUNT(*), SUM(charged_cached), "  # noqa: S608  # constants
            "SUM(charged_uncached), SUM(charged_output) FROM entries WHERE tenant = ? AND at_us >= ? AND at_us < ? "
            "AND status = 'agreed' GROUP BY quarter, model ORDER BY quarter, model",
            (tenant, since_us, until_us),
        )
        return [Used(int(row[0]), row[1], *map(int, row[2:])) for row in rows]

    def uncharged(self, tenant: str, since_us: int, until_us: int) -> Open:
        """Count the tenant's requests that are not charged. Raises StoreError."""
        rows = self._database.execute(
            "SELECT status, COUNT(*) FROM entries WHERE tenant = ? AND at_us >= ? AND at_us < ? "
            "AND status <> 'agreed' GROUP BY status",
            (tenant, since_us, until_us),
        )
        return Open(**{status: int(count) for status, count in rows})

    def tenants(self, since_us: int, until_us: int) -> list[str]:
        """Return who had requests in [since, until); '' stands for requests whose tenant is not known yet. Raises StoreError."""
        rows = self._database.execute(
            "SELECT DISTINCT tenant FROM entries WHERE at_us >= ? AND at_us < ? ORDER BY tenant", (since_us, until_us)
        )
        return [row[0] for row in rows]

    def troubled(self, since_us: int, until_us: int, *, tenant: str | None = None, limit: int = 1_000) -> list[Entry]:
        """Return the oldest `limit` entries that differ or lack a side. Raises StoreError."""
        where, values = _where(since_us, until_us, tenant)
        rows = self._database.execute(
            f"SELECT body FROM entries WHERE {where} AND status IN ('differs', 'missing') "  # noqa: S608  # constants
            "ORDER BY at_us, request LIMIT ?",
            (*values, limit),
        )
        return [_entry(row[0]) for row in rows]

    def missing(self, since_us: int = 0, *, ended_before_us: int = END_US, limit: int = 100_000) -> list[Missing]:
        """Return what must be asked again of requests that arrived since then: after a kill, what the lost batch held.

        `ended_before_us` leaves out requests whose receipts may still be on their way. Requests of which no receipt at all is here are
        found by asking every worker for all since `newest`. Raises StoreError.
        """
        rows = self._database.execute(
            "SELECT body FROM entries WHERE status IN ('missing', 'differs') AND at_us >= ? AND ended_us < ? "
            "ORDER BY at_us, request LIMIT ?",
            (since_us, ended_before_us, limit),
        )
        found = []
        for (body,) in rows:
            entry = _entry(body)
            workers = {"gateway": "", "prefill": entry.prefill, "decode": entry.decode}
            found += [Missing(entry.request, side, workers[side]) for side in entry.missing]
        return found

    def newest(self) -> dict[str, int]:
        """Return, for everybody who signed a receipt, when the last of their requests ended (their clock). Raises StoreError."""
        rows = self._database.execute("SELECT signer, MAX(ended_us) FROM receipts GROUP BY signer ORDER BY signer")
        return {signer: int(ended) for signer, ended in rows}

    def recover(self, request: str, by: str, dumb: Collection[str] = frozenset()) -> Receipt | None:
        """Return the gateway's lost receipt of a request, to be signed and added; see `reconcile.recover`. Raises StoreError."""
        arrivals = self._arrivals(request)
        if not arrivals:
            return None
        sides: dict[Side, Receipt] = {a.receipt.side: a.receipt for a in arrivals}
        return reconcile.recover(reconcile.reconcile(arrivals), sides, by, dumb)

    def _arrivals(self, request: str) -> list[Arrival]:
        rows = self._database.execute("SELECT body, received_us FROM receipts WHERE request = ?", (request,))
        return [Arrival(_signed(body).receipt, int(received)) for body, received in rows]


def _digest(receipt: Receipt) -> str:
    return hashlib.sha256(canonical(receipt)).hexdigest()


def _row(entry: Entry) -> tuple[Any, ...]:
    paths = (entry.wire_bytes.get("DIRECT", 0), entry.wire_bytes.get("REMAP", 0), entry.wire_bytes.get("CONVERT", 0))
    return (
        entry.request, entry.status, entry.tenant, entry.model, entry.at_us, entry.ended_us, entry.prompt, entry.cached,
        entry.computed, entry.transferred, entry.converted, entry.generated, *paths, *entry.charged,
        msgspec.json.encode(entry).decode(),
    )  # fmt: skip


def _where(since_us: int, until_us: int, tenant: str | None, model: str | None = None) -> tuple[str, list[Any]]:
    where, values = "at_us >= ? AND at_us < ?", [since_us, until_us]
    given: Iterable[tuple[str, str | None]] = (("tenant", tenant), ("model", model))
    more = [(name, value) for name, value in given if value is not None]
    return " AND ".join([where, *(f"{name} = ?" for name, _ in more)]), [*values, *(value for _, value in more)]


def _entry(body: str) -> Entry:
    try:
        return msgspec.json.decode(body, type=Entry)
    except msgspec.DecodeError as error:
        raise StoreError(f"an entry of the store cannot be read: {error}") from error


def _signed(body: str) -> Signed:
    try:
        return msgspec.json.decode(body, type=Signed)
    except msgspec.DecodeError as error:
        raise StoreError(f"a receipt of the store cannot be read: {error}") from error
