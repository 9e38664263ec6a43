"""Usage, prices and invoices as tables, CSV and HTML. Names come from elsewhere: every form takes them as text and nothing more."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import Any, Final

from regauge.meter.invoice import Invoice, money
from regauge.meter.prices import KINDS, Book, Kind, Party
from regauge.meter.store import Usage

KIND_WORDS: Final[dict[Kind, str]] = {"cached_input": "cached input", "uncached_input": "input", "output": "output"}
USAGE_HEAD: Final = ("from", *Usage._fields[1:])
INVOICE_HEAD: Final = ("model", "price", "tokens of", "above", "tokens", "per million", "amount")
PRICE_HEAD: Final = ("price", "tenant", "model", "from", "until", "hours", "above", *KIND_WORDS.values())

Rows = Sequence[Sequence[Any]]


def moment(at_us: int) -> str:
    """Return a time as ISO 8601, UTC, to the minute."""
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).strftime("%Y-%m-%dT%H:%MZ")


def months(usage: Iterable[Usage]) -> list[Usage]:
    """Return the sums of days (or hours) by calendar month (UTC), tenant and model."""
    return _sums(usage, lambda at: int(at.replace(day=1, hour=0).timestamp()) * 1_000_000)


def total(usage: Sequence[Usage]) -> list[Usage]:
    """Return the sums over all time by tenant and model; each from the first bucket of all on."""
    first = min((u.at_us for u in usage), default=0)
    return _sums(usage, lambda _: first)


def _sums(usage: Iterable[Usage], begin: Any) -> list[Usage]:
    found: dict[tuple[int, str, str], list[int]] = {}
    for u in usage:
        key = begin(datetime.fromtimestamp(u.at_us // 1_000_000, UTC)), u.tenant, u.model
        found[key] = [a + b for a, b in zip(found.get(key, [0] * len(u[3:])), u[3:], strict=True)]
    return [Usage(*key, *found[key]) for key in sorted(found)]


def usage_rows(usage: Iterable[Usage]) -> Rows:
    """Return rows under USAGE_HEAD."""
    return [(moment(u.at_us), *u[1:]) for u in usage]


def invoice_rows(invoice: Invoice) -> Rows:
    """Return the lines under INVOICE_HEAD, without the total."""
    return [
        (line.model, line.price, KIND_WORDS[line.kind], line.above, line.tokens, line.per_million, money(line.amount, invoice.places))
        for line in invoice.lines
    ]  # fmt: skip


def price_rows(book: Book) -> Rows:
    """Return a row for every price and tier, under PRICE_HEAD."""
    rows = []
    for p in book.price:
        who = (p.name, p.tenant, p.model, p.since or "", p.until or "", p.hours)
        for above, rates in ((0, p), *((tier.above, tier) for tier in p.tier)):
            rows.append((*who, above, *(f"{getattr(rates, kind):f}" for kind in KINDS)))
    return rows


def table(head: Sequence[str], rows: Rows) -> str:
    """Return columns of text; numbers to the right, with thin groups of three."""
    cells = [[f"{x:,}" if isinstance(x, int) else str(x) for x in row] for row in rows]
    right = [bool(rows) and all(isinstance(row[n], int) for row in rows) for n in range(len(head))]
    widths = [max(len(line[n]) for line in (head, *cells)) for n in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = (x.rjust(w) if r else x.ljust(w) for x, w, r in zip(row, widths, right, strict=True))
        return "  ".join(padded).rstrip()

    return "\n".join([line(head), *map(line, cells)])


def as_csv(head: Sequence[str], rows: Rows) -> str:
    """Return CSV (RFC 4180). Text that a spreadsheet would take for a formula gets an apostrophe before it."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    writer.writerows([_harmless(x) for x in row] for row in rows)
    return out.getvalue()


def _harmless(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def invoice_text(invoice: Invoice) -> str:
    """Return an invoice for a terminal."""
    head = f"invoice {invoice.number} for {invoice.tenant}, {invoice.since} to {last_day(invoice)}: {invoice.requests:,} requests"
    lines = [head, "", table(INVOICE_HEAD, invoice_rows(invoice)), ""]
    lines += [f"total {money(invoice.total, invoice.places)} {invoice.currency}", *notes(invoice)]
    return "\n".join(lines)


def last_day(invoice: Invoice) -> str:
    """Return the last day that is billed."""
    return str(invoice.until - timedelta(days=1))


def notes(invoice: Invoice) -> list[str]:
    """Return what is not in the total, and why, a sentence each."""
    found = [
        f"NOT BILLED: {u.tokens:,} tokens of {u.model} from {moment(u.first_us)} on: no price fits them"
        for u in invoice.unpriced
    ]
    for count, why in (
        (invoice.open.differs, "whose receipts differ"),
        (invoice.open.missing, "of which a side's receipt is missing"),
    ):
        if count:
            found.append(f"not billed: {count:,} request{'s' if count > 1 else ''} {why}")
    return found


def invoice_html(invoice: Invoice, book: Book, made: datetime) -> str:
    """Return one self-contained page, made to be printed on A4 or letter."""
    import jinja2

    template = resources.files("regauge.meter").joinpath("invoice.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(template).render(
        invoice=invoice, issuer=book.issuer, customer=book.customers.get(invoice.tenant, Party()),
        rows=invoice_rows(invoice), total=money(invoice.total, invoice.places), last_day=last_day(invoice),
        zone=book.timezone, notes=notes(invoice), made=made.astimezone(book.zone()).date(),
    )  # fmt: skip
