"""Price books: TOML files that say what a million tokens cost, for whom, of which model, when, and beyond which volume.

    currency = "EUR"
    timezone = "Europe/Berlin"          # of dates, times of day and months; default UTC

    [[price]]
    name = "standard"
    cached_input = 0.10                  # per million tokens, as all prices
    uncached_input = 0.50
    output = 2.00

    [[price]]
    name = "night"
    tenant = "acme"                      # default "*": all
    model = "qwen3-32b"                  # default "*": all
    from = 2026-01-01                    # first day; default: always
    until = 2027-01-01                   # first day on which it no longer holds
    hours = "22:00-06:00"                # on the quarter; default: all day
    cached_input = 0.05
    uncached_input = 0.25
    output = 1.00

    [[price.tier]]
    above = 1_000_000_000                # tokens of a kind, of one tenant and model, in one month
    cached_input = 0.04                  # for those above, and no others
    uncached_input = 0.20
    output = 0.80

Of the prices that fit a request, the one for its tenant counts before one for all, then the one for its model before one for all. Two prices of
the same tenant and model must not hold at the same time.

Money is an integer of `UNIT` parts of the currency: a price has at most nine places, and is of a million tokens, so that every amount
is exact. It is rounded once, on each line of an invoice (`invoice.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from regauge import toml
from regauge.errors import ConfigError
from regauge.keys import read_bounded
from regauge.meter.receipt import MAX_TEXT

Kind = Literal["cached_input", "uncached_input", "output"]
KINDS: Final[tuple[Kind, ...]] = ("cached_input", "uncached_input", "output")
PLACES: Final = 9
"""Most digits of a price after the point."""
UNIT: Final = 10 ** (PLACES + 6)
"""So many parts of money are one of the currency: what one token costs is a whole number of them."""
QUARTERS: Final = 96
"""Quarters of an hour in a day. Prices change on a quarter, and so do the world's time zones."""
MAX_PRICES: Final = 2_000

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a million tokens cost."""

    cached_input: Decimal
    uncached_input: Decimal
    output: Decimal

    def units(self, kind: Kind) -> int:
        """Return what one token costs, in parts of which UNIT are one of the currency."""
        return int(getattr(self, kind).scaleb(PLACES))

    def check(self, where: str) -> None:
        """Raise ConfigError for a price that is negative, endless or finer than PLACES."""
        for kind in KINDS:
            price: Decimal = getattr(self, kind)
            exponent = price.as_tuple().exponent
            if not isinstance(exponent, int) or not 0 <= price <= 10**9:
                raise ConfigError(f"{where}.{kind}: must be from 0 to {10**9}, not {price}")
            if exponent < -PLACES:
                raise ConfigError(f"{where}.{kind}: {price} has more than {PLACES} places after the point")


class Tier(Rates, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What tokens above a month's volume cost."""

    above: Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
    """Tokens of one kind, of one tenant and model, since the month began."""


class Price(Rates, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One price and when it holds."""

    name: _Name
    tenant: _Name = "*"
    model: _Name = "*"
    since: date | None = msgspec.field(default=None, name="from")
    until: date | None = None
    hours: str = "00:00-24:00"
    tier: list[Tier] = []

    def __post_init__(self) -> None:
        where = f"price {self.name!r}"
        self.check(where)
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ConfigError(f"{where}.until: must be after from, {self.since}; it is the first day without")
        quarters(self.hours, where)
        last = 0
        for number, tier in enumerate(self.tier):
            tier.check(f"{where}.tier[{number}]")
            if tier.above <= last:
                raise ConfigError(f"{where}.tier[{number}].above: must grow from tier to tier, {tier.above} does not")
            last = tier.above

    def holds(self, day: date, quarter: int) -> bool:
        """Say whether it holds in that quarter of an hour of a day, both of the book's time zone."""
        return (
            (self.since is None or self.since <= day)
            and (self.until is None or day < self.until)
            and quarter in quarters(self.hours)
        )

    def steps(self, kind: Kind) -> list[tuple[int, int]]:
        """Return from how many tokens of a month on a token costs how many units, in growing order; the first from 0."""
        return [(0, self.units(kind)), *((tier.above, tier.units(kind)) for tier in self.tier)]

    def text(self) -> str:
        """Return who, what and when, as a line for people."""
        dates = f"{self.since or 'always'} to {self.until or 'further notice'}"
        return f"{self.name!r} ({self.tenant}, {self.model}, {dates}, {self.hours})"


class Party(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who bills, or is billed."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""
    address: list[Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]] = []
    """Lines."""
    note: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    """Terms of payment, numbers for tax, at the end of an invoice."""


class Book(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A price file, checked."""

    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
    """Code of ISO 4217."""
    price: Annotated[list[Price], msgspec.Meta(min_length=1, max_length=MAX_PRICES)]
    timezone: str = "UTC"
    places: Annotated[int, msgspec.Meta(ge=0, le=4)] = 2
    """Digits after the point of the currency: what an invoice's lines are rounded to."""
    issuer: Party = Party()
    customers: dict[str, Party] = {}
    """By tenant."""

    def __post_init__(self) -> None:
        self.zone()
        names = [p.name for p in self.price]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"price {twice!r}: is there twice; an invoice's lines are told apart by their names")
        for one, other in _overlaps(self.price):
            raise ConfigError(f"price {one.text()} and price {other.text()} hold at the same time: which is meant?")

    def zone(self) -> ZoneInfo:
        """Return the time zone. Raises ConfigError."""
        try:
            return ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ConfigError(
                f"timezone: {self.timezone!r} is not known here; give UTC, or install the package tzdata"
            ) from error

    def find(self, tenant: str, model: str, at: datetime) -> Price | None:
        """Return the price of a request that came then (with a time zone); None: there is none."""
        local = at.astimezone(self.zone())
        day, quarter = local.date(), (local.hour * 60 + local.minute) // 15
        fitting = [
            p for p in self.price if p.tenant in (tenant, "*") and p.model in (model, "*") and p.holds(day, quarter)
        ]
        return min(fitting, key=lambda p: (p.tenant == "*", p.model == "*"), default=None)


def load(data: bytes) -> Book:
    """Read a price file. Raises ConfigError that names the field."""
    try:
        return toml.decode(data, Book, exact=True)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(error)) from error


def read(path: Path) -> Book:
    """Read a price file. Raises ConfigError that names the file and the field."""
    data = read_bounded(path, toml.MAX_BYTES)
    try:
        return load(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@lru_cache(maxsize=MAX_PRICES)
def quarters(hours: str, where: str = "hours") -> frozenset[int]:
    """Return the quarters of an hour of a day, from 0, that `HH:MM-HH:MM` names; it may go past midnight. Raises ConfigError."""
    found = re.fullmatch(r"(\d\d):(00|15|30|45)-(\d\d):(00|15|30|45)", hours)
    if found:
        begin, end = (int(found[i]) * 4 + int(found[i + 1]) // 15 for i in (1, 3))
        if begin < QUARTERS and end <= QUARTERS and begin != end:
            spread = range(begin, end) if begin < end else range(begin, end + QUARTERS)
            return frozenset(quarter % QUARTERS for quarter in spread)
    raise ConfigError(f"{where}.hours: {hours!r} is no time of day; give 22:00-06:00, on the quarter of an hour")


def _overlaps(prices: list[Price]) -> Iterator[tuple[Price, Price]]:
    same: dict[tuple[str, str], list[Price]] = {}
    for price in prices:
        same.setdefault((price.tenant, price.model), []).append(price)
    for group in same.values():
        for one, other in combinations(group, 2):
            apart = (one.until and other.since and one.until <= other.since) or (
                other.until and one.since and other.until <= one.since
            )
            if not apart and quarters(one.hours) & quarters(other.hours):
                yield one, other
