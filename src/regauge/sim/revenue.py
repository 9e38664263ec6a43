"""Revenue: tokens x price by mix, in exact decimals. A list price is one number, a mix is another; their product is a surface, never one figure.

    per million input tokens = hit x cached price + (1 - hit) x uncached price + output x output price
    revenue = input tokens per second x seconds x share of the time at that rate x the above / 10^6

`hit` is the part of input tokens that is billed as cached, `output` the generated tokens for each input token. A month has 30 days. Nothing is
rounded; what is printed is rounded where it is printed. Not counted: discounts, free tiers, charges for storing a cache, taxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib.resources import files
from typing import Annotated

import msgspec

from regauge import toml
from regauge.errors import ConfigError
from regauge.meter.prices import Book, Rates

MONTH_DAYS = 30
MILLION = Decimal(10) ** 6
_DAY = Decimal(86_400)
_ZERO, _ONE = Decimal(0), Decimal(1)
_MOST = Decimal(10) ** 18

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class Listed(Rates, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The list price of a model, who says so, and when."""

    name: _Text
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
    source: _Text
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}(-\d\d){0,2}$")]
    note: str = ""


class _Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prices: dict[str, Listed]


@dataclass(frozen=True, slots=True)
class Mix:
    """What is sold together."""

    hit: Decimal
    """Part of input tokens that is billed as cached, 0 to 1."""
    output: Decimal = _ZERO
    """Output tokens for each input token."""

    def __post_init__(self) -> None:
        if not self.hit.is_finite() or not _ZERO <= self.hit <= _ONE:
            raise ConfigError(f"mix: hit is the cached part of input, from 0 to 1, not {self.hit}")
        if not self.output.is_finite() or not _ZERO <= self.output <= MILLION:
            raise ConfigError(
                f"mix: output is the output tokens for each input token, from 0 to {MILLION}, not {self.output}"
            )


@dataclass(frozen=True, slots=True)
class Surface:
    """Revenue for every price and mix."""

    prices: tuple[Listed, ...]
    hits: tuple[Decimal, ...]
    revenue: tuple[tuple[Decimal, ...], ...]
    """By price, then hit share; in the currency of the price."""


def exact(value: str | float | Decimal, what: str = "number") -> Decimal:
    """Return a number as it is written: 95920.5 and not its nearest binary fraction. Raises ConfigError for none or endless ones."""
    try:
        found = Decimal(str(value))
    except InvalidOperation as error:
        raise ConfigError(f"{what}: {value!r} is no number") from error
    if not found.is_finite():
        raise ConfigError(f"{what}: must be finite, not {value}")
    return found


def per_million(rates: Rates, mix: Mix) -> Decimal:
    """Return what a million input tokens earn, with the output that goes with them."""
    return mix.hit * rates.cached_input + (_ONE - mix.hit) * rates.uncached_input + mix.output * rates.output


def tokens(tokens_per_s: Decimal, *, days: int = MONTH_DAYS, utilisation: Decimal = _ONE) -> Decimal:
    """Return the input tokens of so many days. Raises ConfigError for a rate, days or utilisation that cannot be."""
    if not tokens_per_s.is_finite() or not _ZERO < tokens_per_s <= _MOST:
        raise ConfigError(f"tokens per second: must be positive, not {tokens_per_s}")
    if not 1 <= days <= 3660:
        raise ConfigError(f"days: from 1 to 3660, not {days}")
    if not utilisation.is_finite() or not _ZERO < utilisation <= _ONE:
        raise ConfigError(f"utilisation: the part of the time at that rate, above 0 to 1, not {utilisation}")
    return tokens_per_s * _DAY * days * utilisation


def revenue(
    tokens_per_s: Decimal, rates: Rates, mix: Mix, *, days: int = MONTH_DAYS, utilisation: Decimal = _ONE
) -> Decimal:
    """Return what so many input tokens per second earn in so many days, in the currency of the rates, unrounded."""
    return tokens(tokens_per_s, days=days, utilisation=utilisation) * per_million(rates, mix) / MILLION


def needed(earned: Decimal, tokens_per_s: Decimal, *, days: int = MONTH_DAYS) -> Decimal:
    """Return what a million input tokens must earn for a stated revenue: the iso line, in one number."""
    if not earned.is_finite() or earned < 0:
        raise ConfigError(f"revenue: must not be negative, not {earned}")
    return earned * MILLION / tokens(tokens_per_s, days=days)


def hit_for(per_million_tokens: Decimal, rates: Rates, output: Decimal = _ZERO) -> Decimal | None:
    """Return the hit share at which a million input tokens earn that much; None: at none."""
    span = rates.uncached_input - rates.cached_input
    left = rates.uncached_input + output * rates.output - per_million_tokens
    if span == 0:
        return None
    found = left / span
    return found if _ZERO <= found <= _ONE else None


def uncached_for(per_million_tokens: Decimal, hit: Decimal, ratio: Decimal) -> Decimal:
    """Return the price of uncached input at which a million tokens earn that much, cached ones costing `ratio` of it, without output.

    Raises ConfigError where nothing is charged: all is cached and cached tokens are free.
    """
    if not ratio.is_finite() or not _ZERO <= ratio <= _ONE:
        raise ConfigError(f"ratio: cached over uncached price, from 0 to 1, not {ratio}")
    charged = Mix(hit).hit * ratio + (_ONE - hit)
    if charged == 0:
        raise ConfigError("no price earns anything where all input is cached and cached input is free")
    return per_million_tokens / charged


def surface(tokens_per_s: Decimal, prices: Sequence[Listed], hits: Sequence[Decimal]) -> Surface:
    """Return the revenue of a month for every price and hit share, input alone."""
    earned = tuple(tuple(revenue(tokens_per_s, p, Mix(h)) for h in hits) for p in prices)
    return Surface(tuple(prices), tuple(hits), earned)


@cache
def listed() -> dict[str, Listed]:
    """Return the list prices that come with regauge, by name. Raises ConfigError for a file that is broken."""
    data = (files("regauge.sim") / "catalogue" / "prices.toml").read_bytes()
    try:
        found = toml.decode(data, _Prices, exact=True).prices
    except msgspec.DecodeError as error:
        raise ConfigError(f"prices.toml: {error}") from error
    for key, price in found.items():
        price.check(f"prices.{key}")
    return found


def of_book(book: Book, model: str, *, tenant: str = "*", at: datetime | None = None) -> Listed:
    """Return the price of a model in a price book (`meter.prices`) at a time, now by default.

    Raises ConfigError where the book has none. Tiers are not counted: the price is that of a month's first token.
    """
    found = book.find(tenant, model, at or datetime.now(UTC))
    if found is None:
        raise ConfigError(f"the price book has no price of {model!r} for {tenant!r} at that time; add one for '*'")
    return Listed(
        name=found.name,
        currency=book.currency,
        source="your price book",
        date=str(at.date() if at else datetime.now(UTC).date()),
        cached_input=found.cached_input,
        uncached_input=found.uncached_input,
        output=found.output,
    )
