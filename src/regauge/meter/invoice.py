"""Usage and a price book -> the lines of an invoice. Pure; money is exact, and rounded once.

The rounding rule: each line's amount is rounded to the currency's places, half up (0.005 is 0.01). The total is the sum of the
rounded lines, so that a reader who adds them up finds it. Nothing else is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, datetime, timedelta
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from regauge.errors import ConfigError
from regauge.meter.prices import KINDS, UNIT, Book, Kind, Price

QUARTER_US: Final = 15 * 60 * 1_000_000
MAX_MONTHS: Final = 120


class Used(NamedTuple):
    """What one tenant is to pay for of one model in one quarter of an hour."""

    at_us: int
    """The quarter's begin."""
    model: str
    requests: int
    cached_input: int
    uncached_input: int
    output: int


class Line(msgspec.Struct, frozen=True):
    """Tokens of one kind at one price."""

    model: str
    price: str
    """Name of the price."""
    kind: Kind
    above: int
    """Tokens of the month beyond which this price holds; 0: from the first."""
    tokens: int
    per_million: str
    """The price, as written in a book: exact."""
    amount: int
    """In the smallest piece that the currency's places allow (cents)."""


class Unpriced(msgspec.Struct, frozen=True):
    """Tokens that no price fits."""

    model: str
    first_us: int
    tokens: int


class Open(msgspec.Struct, frozen=True):
    """Requests of the period that are not charged, or not yet, by why."""

    missing: int = 0
    """A side has not spoken."""
    differs: int = 0
    """Two sides say different things."""
    void: int = 0
    """Failed or cancelled before a token: never charged."""


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant owes for the days [since, until) of the book's time zone."""

    number: str
    tenant: str
    since: date
    until: date
    currency: str
    places: int
    requests: int
    lines: list[Line]
    total: int
    """In the smallest piece, like a line's amount."""
    unpriced: list[Unpriced]
    open: Open


def begin_us(day: date, zone: ZoneInfo) -> int:
    """Return when a day begins there, in microseconds since 1970; exact for days that begin with a whole second."""
    return int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) * 1_000_000


def window(since: date, until: date, zone: ZoneInfo) -> tuple[int, int]:
    """Return the microseconds [from, to) whose usage an invoice needs: from the first of the month on, whose volume decides on the tier.

    Raises ConfigError for days in the wrong order, and for too many of them.
    """
    if not since < until:
        raise ConfigError(f"--until: must be after --from, {since}; it is the first day that is not billed")
    if (until - since) > timedelta(days=31 * MAX_MONTHS):
        raise ConfigError(f"--until: more than {MAX_MONTHS} months after --from, {since}")
    return begin_us(since.replace(day=1), zone), begin_us(until, zone)


def bill(
    number: str,
    tenant: str,
    days: tuple[date, date],
    book: Book,
    usage: Iterable[Used],
    *,
    uncharged: Open | None = None,
) -> Invoice:
    """Price a tenant's usage, given for all of `window`, in any order and with any quarters apart or together."""
    zone = book.zone()
    first_us = begin_us(days[0], zone)
    sums: dict[tuple[str, str, Kind, int], tuple[int, int]] = {}
    volume: dict[tuple[date, str, Kind], int] = {}
    unpriced: dict[str, Unpriced] = {}
    requests = 0
    for used in sorted(usage):
        at = datetime.fromtimestamp(used.at_us // 1_000_000, zone)
        counts = {kind: getattr(used, kind) for kind in KINDS}
        price = book.find(tenant, used.model, at)
        for kind in KINDS:
            month = (at.date().replace(day=1), used.model, kind)
            before = volume.get(month, 0)
            volume[month] = before + counts[kind]
            if used.at_us < first_us or price is None:
                continue
            for above, tokens, units in _split(price, kind, before, counts[kind]):
                key = (used.model, price.name, kind, above)
                sums[key] = (sums.get(key, (0, 0))[0] + tokens, units)
        if used.at_us >= first_us:
            requests += used.requests
            if price is None and (missing := sum(counts.values())):
                old = unpriced.get(used.model, Unpriced(used.model, used.at_us, 0))
                unpriced[used.model] = Unpriced(used.model, old.first_us, old.tokens + missing)
    order = {kind: place for place, kind in enumerate(KINDS)}
    lines = [
        Line(*key, tokens, _plain(units), rounded(tokens * units, book.places))
        for key, (tokens, units) in sorted(sums.items(), key=lambda item: (*item[0][:2], order[item[0][2]], item[0][3]))
    ]
    return Invoice(
        number=number, tenant=tenant, since=days[0], until=days[1], currency=book.currency, places=book.places,
        requests=requests, lines=lines, total=sum(line.amount for line in lines),
        unpriced=[unpriced[model] for model in sorted(unpriced)], open=uncharged or Open(),
    )  # fmt: skip


def rounded(units: int, places: int) -> int:
    """Return money (UNIT parts of the currency, not negative) in pieces of `places` digits after the point, half up."""
    piece = UNIT // int(10**places)
    return (2 * units + piece) // (2 * piece)


def money(amount: int, places: int) -> str:
    """Return an amount in the smallest piece as digits with a point: 1234 is 12.34."""
    return f"{amount // 10**places}.{amount % 10**places:0{places}}" if places else str(amount)


def _plain(units: int) -> str:
    """Return the price of a million tokens as digits, at least two after the point."""
    whole, part = divmod(units * 1_000_000, UNIT)
    digits = f"{part:015}".rstrip("0")
    return f"{whole}.{digits:0<2}"


def _split(price: Price, kind: Kind, before: int, count: int) -> Iterable[tuple[int, int, int]]:
    """Yield (above, tokens, units of one) for the tiers that `count` tokens fall into after `before` others of the month."""
    steps = price.steps(kind)
    for place, (above, units) in enumerate(steps):
        end = steps[place + 1][0] if place + 1 < len(steps) else before + count
        tokens = min(before + count, end) - max(before, above)
        if tokens > 0:
            yield above, tokens, units
