"""Cost: what a deployment costs a month and a million tokens, as intervals, and where it breaks even.

    a month = capital / (12 x years) + kW x 720 h x PUE x price of a kWh + operating cost as given
    a million input tokens = that / (input tokens of the month / 10^6)

Prices come from the catalogue, in the currency of their source, and are converted at its rates of exchange. What has no price there is
named in `Bill.missing` and is not guessed: give it in a catalogue file of your own. Not counted: optics and cables, storage, building,
staff, software, interest, taxes, unless they are part of the operating cost that you give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite

from regauge.errors import ConfigError
from regauge.meter.prices import Rates
from regauge.sim.ask import known
from regauge.sim.devices import Accelerator, Catalogue, Figure
from regauge.sim.model import Interval, exactly, of
from regauge.sim.revenue import MONTH_DAYS, Mix, exact, hit_for, per_million, uncached_for

YEARS = Interval(3.0, 4.0, 5.0)
"""Over which capital is written off: 3 years at fp4.dev, 5 at aiinframap.com (2026)."""
PUE = Interval(1.2, 1.3, 1.6)
"""Power of the site over that of its machines: 1.2 in a modern one, 1.4 to 1.6 in an older one (aiinframap.com, 2026)."""
KWH_USD = 0.08
"""Price of a kWh, all in (aiinframap.com, 2026): give your own."""
_NOTHING = exactly(0.0)


@dataclass(frozen=True, slots=True)
class Bought:
    """Servers of one kind."""

    what: str
    device: str
    servers: int
    nics: int = 0
    """Of a server; 0: as the catalogue says. Bought apart only where the server's price is not known."""
    cards: int = 0
    """Of a server; 0: as the catalogue says. With another number the catalogue's server is another one: its price and power do not count."""
    nic: str = ""
    """Its key; none: as the catalogue says."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of a bill."""

    what: str
    count: int
    each: Interval
    source: str

    @property
    def total(self) -> Interval:
        """All of them."""
        return self.each * exactly(self.count)


@dataclass(frozen=True, slots=True)
class Bill:
    """What is bought, in one currency."""

    currency: str
    items: tuple[Item, ...]
    watts: Interval
    """Of what is known, at its limit."""
    missing: tuple[str, ...]
    """Prices and powers that nobody published."""

    @property
    def capital(self) -> Interval:
        """All items."""
        total = _NOTHING
        for item in self.items:
            total = total + item.total
        return total


@dataclass(frozen=True, slots=True)
class Terms:
    """How capital and power become cost. Raises ConfigError for what cannot be."""

    years: Interval = YEARS
    pue: Interval = PUE
    kwh: Interval | None = None
    """Price of a kWh in the bill's currency; none: `KWH_USD` at the catalogue's rate."""
    operating: Interval = _NOTHING
    """Further cost of a month, in the bill's currency."""

    def __post_init__(self) -> None:
        if not self.years.low > 0.0:
            raise ConfigError(f"years {self.years.low:g}: capital is written off over more than 0")
        if not self.pue.low >= 1.0:
            raise ConfigError(f"pue {self.pue.low:g}: a site draws at least what its machines do: 1 or more")
        if self.operating.low < 0.0 or (self.kwh is not None and self.kwh.low < 0.0):
            raise ConfigError("operating cost and price of a kWh: not negative")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a month, in the bill's currency."""

    capital: Interval
    energy: Interval
    operating: Interval

    @property
    def total(self) -> Interval:
        """All of it."""
        return self.capital + self.energy + self.operating


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where revenue is as much as cost: for the lowest, the likeliest and the highest cost."""

    utilisation: Interval
    """Share of the time at the stated rate; over 1: never. Cost is taken as fixed."""
    hits: tuple[Decimal | None, Decimal | None, Decimal | None]
    """Cached shares at the given prices; None: it earns more, or less, at every share."""
    prices: tuple[Decimal, Decimal, Decimal]
    """Of a million uncached input tokens at the given mix, cached ones costing the same part of it."""


def bill(bought: Sequence[Bought], switch: str, switches: int, catalogue: Catalogue, currency: str) -> Bill:
    """Return the bill of servers and switches. Raises ConfigError for an unknown device or currency, and for counts that cannot be."""
    items: list[Item] = []
    missing: list[str] = []
    watts = _NOTHING
    for each in bought:
        card = known(catalogue.accelerators, each.device, each.what)
        if not 0 <= each.servers <= 100_000:
            raise ConfigError(f"{each.what}: {each.servers} servers: give 0 to 100000")
        if each.servers:
            items += _servers(each, card, catalogue, currency, missing)
            watts = watts + _watts(each, card, missing)
    kind = known(catalogue.switches, switch, "switch")
    if not 0 <= switches <= 10_000:
        raise ConfigError(f"switches: {switches}: give 0 to 10000")
    if switches and kind.price is None:
        missing.append(f"price of the switch, {kind.name}")
    elif switches and kind.price is not None:
        items.append(
            Item(f"switch, {kind.name}", switches, price_in(kind.price, currency, catalogue), _source(kind.price))
        )
    if switches and kind.power_w is None:
        missing.append(f"power of the switch, {kind.name}")
    elif switches and kind.power_w is not None:
        watts = watts + of(kind.power_w) * exactly(switches)
    return Bill(currency, tuple(items), watts, tuple(dict.fromkeys(missing)))


def price_in(figure: Figure, currency: str, catalogue: Catalogue) -> Interval:
    """Return a price in another currency. Raises ConfigError naming a currency without a rate."""
    if figure.currency == currency:
        return of(figure)
    return of(figure) / _per_usd(figure.currency, catalogue) * _per_usd(currency, catalogue)


def month(bought: Bill, terms: Terms, catalogue: Catalogue) -> Cost:
    """Return what a month costs."""
    kwh = terms.kwh if terms.kwh is not None else exactly(KWH_USD) * _per_usd(bought.currency, catalogue)
    hours = 24.0 * MONTH_DAYS
    return Cost(
        bought.capital / (terms.years * exactly(12.0)),
        bought.watts * exactly(hours / 1e3) * terms.pue * kwh,
        terms.operating,
    )


def for_million(cost: Interval, tokens: float) -> Interval:
    """Return the cost of a million of the month's input tokens. Raises ConfigError for no tokens."""
    if not (isfinite(tokens) and tokens > 0.0):
        raise ConfigError(f"tokens {tokens:g}: a month has more than none")
    return cost / exactly(tokens / 1e6)


def break_even(cost: Interval, rates: Rates, mix: Mix) -> BreakEven:
    """Return where a million input tokens earn what they cost; `cost` is of a million at full load.

    Raises ConfigError for a mix that earns nothing at these prices.
    """
    earned = per_million(rates, mix)
    if earned <= 0:
        raise ConfigError("break-even: at these prices and this mix nothing is earned")
    ratio = rates.cached_input / rates.uncached_input if rates.uncached_input else Decimal(0)
    levels = tuple(exact(x) for x in (cost.low, cost.value, cost.high))
    spent = [level - mix.output * rates.output for level in levels]
    return BreakEven(
        cost / exactly(float(earned)),
        tuple(hit_for(level, rates, mix.output) for level in levels),  # type: ignore[arg-type]  # three of them
        tuple(uncached_for(max(level, Decimal(0)), mix.hit, ratio) for level in spent),  # type: ignore[arg-type]
    )


def _servers(each: Bought, card: Accelerator, catalogue: Catalogue, currency: str, missing: list[str]) -> list[Item]:
    name = f"{each.what}: server of {card.name}"
    usual = int(card.cards.value) if card.cards is not None else 0
    cards = each.cards or usual
    if card.server_price is not None and cards == usual:
        return [Item(name, each.servers, price_in(card.server_price, currency, catalogue), _source(card.server_price))]
    if card.price is None or not cards:
        missing.append(f"price of {card.name}, its card or its server")
        return []
    missing.append(f"price of the server around {cards} {card.name}")
    items = [
        Item(
            f"{each.what}: card {card.name}",
            each.servers * cards,
            price_in(card.price, currency, catalogue),
            _source(card.price),
        )
    ]
    nic = catalogue.nics.get(each.nic or card.nic or "400g")
    nics = each.nics or (int(card.nics.value) if card.nics is not None else 0)
    if nic is None or nic.price is None:
        missing.append(f"price of the NICs of {card.name}")
    elif nics:
        items.append(
            Item(
                f"{each.what}: NIC, {nic.name}",
                each.servers * nics,
                price_in(nic.price, currency, catalogue),
                _source(nic.price),
            )
        )
    return items


def _watts(each: Bought, card: Accelerator, missing: list[str]) -> Interval:
    usual = int(card.cards.value) if card.cards is not None else 0
    cards = each.cards or usual
    if card.server_power_w is not None and cards == usual:
        return of(card.server_power_w) * exactly(each.servers)
    if card.power_w is None or not cards:
        missing.append(f"power of {card.name}")
        return _NOTHING
    missing.append(f"power of the server around {cards} {card.name}")
    return of(card.power_w) * exactly(cards * each.servers)


def _per_usd(currency: str, catalogue: Catalogue) -> Interval:
    if currency == "USD":
        return exactly(1.0)
    rate = known(catalogue.currencies, currency, "currency").per_usd
    if rate is None:
        raise ConfigError(f"currencies.{currency}: no per_usd")
    return of(rate)


def _source(figure: Figure) -> str:
    return f"{figure.source}, {figure.date}" + (f"; {figure.note}" if figure.note else "")
