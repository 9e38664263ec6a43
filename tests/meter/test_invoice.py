"""Bills: exact against a reference that prices token by token, rounded once per line, tiers and nights and months included."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meter_cases import DAY_US, HOUR_US
from regauge.errors import ConfigError
from regauge.meter.invoice import QUARTER_US, Invoice, Line, Open, Used, begin_us, bill, money, rounded, window
from regauge.meter.prices import KINDS, UNIT, load

BOOK = load(
    b"""currency = "EUR"
    timezone = "Europe/Berlin"
    [[price]]
    name = "day"
    hours = "06:00-22:00"
    cached_input = 0.1
    uncached_input = 0.512345678
    output = 2
    [[price.tier]]
    above = 1000
    cached_input = 0.05
    uncached_input = 0.3
    output = 1.5
    [[price.tier]]
    above = 2500
    cached_input = 0.01
    uncached_input = 0.2
    output = 1
    [[price]]
    name = "night"
    hours = "22:00-06:00"
    cached_input = 0
    uncached_input = 0.1
    output = 0.9
    [[price]]
    name = "cheap"
    model = "small"
    cached_input = 0.000000001
    uncached_input = 0.000000002
    output = 0.000000003
    """
)
ZONE = ZoneInfo("Europe/Berlin")
OCTOBER = (date(2026, 10, 1), date(2026, 11, 1))
START_US = begin_us(OCTOBER[0], ZONE)


def test_a_days_begin_is_local() -> None:
    assert datetime(2026, 9, 30, 22, tzinfo=ZoneInfo("UTC")).timestamp() * 1_000_000 == START_US
    assert window(date(2026, 10, 15), date(2026, 11, 1), ZONE) == (START_US, begin_us(date(2026, 11, 1), ZONE))
    with pytest.raises(ConfigError, match="--until: must be after --from, 2026-10-01"):
        window(OCTOBER[0], OCTOBER[0], ZONE)
    with pytest.raises(ConfigError, match="more than 120 months"):
        window(date(1990, 1, 1), date(2026, 1, 1), ZONE)


uses = st.lists(
    st.builds(
        Used,
        at_us=st.integers(0, 31 * 96 + 3).map(lambda n: START_US + n * QUARTER_US),  # the month has an hour more
        model=st.sampled_from(("big", "small")),
        requests=st.just(1),
        cached_input=st.integers(0, 700), uncached_input=st.integers(0, 700), output=st.integers(0, 700),
    ),
    max_size=12,
)  # fmt: skip


@settings(max_examples=40)
@given(uses, st.sampled_from((1, 10, 31)))
def test_a_bill_is_what_every_token_costs(usage: list[Used], first_day: int) -> None:
    """The reference: one token after the other, in exact fractions of the currency, summed by line, then rounded."""
    days = (date(2026, 10, first_day), OCTOBER[1])
    sums: dict[tuple[str, str, str, int], Fraction] = {}
    seen: dict[tuple[str, str], int] = {}
    for used in sorted(usage):
        price = BOOK.find("acme", used.model, datetime.fromtimestamp(used.at_us / 1e6, ZONE))
        assert price is not None
        for kind in KINDS:
            for _ in range(getattr(used, kind)):
                before = seen.get((used.model, kind), 0)
                seen[used.model, kind] = before + 1
                tier = max((t.above for t in price.tier if before >= t.above), default=0)
                rates = next((t for t in price.tier if t.above == tier), price)
                if used.at_us >= begin_us(days[0], ZONE):
                    key = (used.model, price.name, kind, tier)
                    sums[key] = sums.get(key, Fraction(0)) + Fraction(getattr(rates, kind)) / 10**6
    found = bill("N", "acme", days, BOOK, usage)
    assert {(line.model, line.price, line.kind, line.above) for line in found.lines} == set(sums)
    for line in found.lines:
        exact = sums[line.model, line.price, line.kind, line.above]
        assert line.amount == int(exact * 100 + Fraction(1, 2))
        assert Fraction(Decimal(line.per_million)) * line.tokens == exact * 10**6
    assert found.total == sum(line.amount for line in found.lines)
    assert found.requests == sum(used.at_us >= begin_us(days[0], ZONE) for used in usage)


@given(uses, st.randoms(use_true_random=False))
def test_how_usage_is_cut_and_ordered_changes_nothing(usage: list[Used], random: object) -> None:
    parts = [u._replace(requests=0, output=0) for u in usage] + [
        u._replace(cached_input=0, uncached_input=0) for u in usage
    ]
    assert bill("N", "acme", OCTOBER, BOOK, parts) == bill("N", "acme", OCTOBER, BOOK, usage)
    assert bill("N", "acme", OCTOBER, BOOK, reversed(usage)) == bill("N", "acme", OCTOBER, BOOK, usage)


def test_a_months_volume_begins_anew() -> None:
    usage = [
        Used(START_US + 12 * HOUR_US, "big", 1, 0, 0, 2_000_000),
        Used(START_US + 31 * DAY_US + 13 * HOUR_US, "big", 1, 0, 0, 2_000_000),
    ]
    november = bill("N", "acme", (date(2026, 11, 1), date(2026, 12, 1)), BOOK, usage[1:])
    both = bill("N", "acme", (date(2026, 10, 1), date(2026, 12, 1)), BOOK, usage)
    assert [(line.above, line.tokens) for line in november.lines] == [(0, 1_000), (1_000, 1_500), (2_500, 1_997_500)]
    assert [(line.above, line.tokens) for line in both.lines] == [(0, 2_000), (1_000, 3_000), (2_500, 3_995_000)]


@pytest.mark.parametrize(
    ("units", "places", "pieces"),
    [(0, 2, 0), (UNIT // 200 - 1, 2, 0), (UNIT // 200, 2, 1), (3 * UNIT // 200, 2, 2), (UNIT // 2, 0, 1), (5 * UNIT // 2, 0, 3),
     (UNIT // 2000, 3, 1), (10**30, 2, 10**17)],
)  # fmt: skip
def test_half_a_piece_is_a_whole_one(units: int, places: int, pieces: int) -> None:
    assert rounded(units, places) == pieces


def test_amounts_larger_than_any_float_are_exact() -> None:
    tokens = (1 << 53) + 1
    (line,) = bill("N", "acme", OCTOBER, BOOK, [Used(START_US, "small", 1, 0, 0, tokens)]).lines
    assert (line.tokens, line.per_million) == (tokens, "0.000000003")
    assert line.amount == (tokens * 3 * 100 + 5 * 10**14) // 10**15


def test_what_has_no_price_is_told_and_not_billed() -> None:
    book = load(
        b'currency = "JPY"\nplaces = 0\n[[price]]\nname = "m"\nmodel = "m"\ncached_input = 1\nuncached_input = 2\noutput = 3\n'
    )
    usage = [Used(START_US + HOUR_US * n, model, 2, 0, 1_000_000, 7) for n in (9, 10) for model in ("m", "n")]
    found = bill("N", "acme", OCTOBER, book, usage, uncharged=Open(missing=1))
    assert [(u.model, u.first_us, u.tokens) for u in found.unpriced] == [("n", START_US + 9 * HOUR_US, 2_000_014)]
    assert found.lines == [
        Line("m", "m", "uncached_input", 0, 2_000_000, "2.00", 4),
        Line("m", "m", "output", 0, 14, "3.00", 0),
    ]
    assert isinstance(found, Invoice)
    assert (found.total, found.requests, found.open.missing) == (4, 8, 1)


@pytest.mark.parametrize(
    ("amount", "places", "text"), [(0, 2, "0.00"), (5, 2, "0.05"), (123_456, 2, "1234.56"), (7, 0, "7")]
)
def test_amounts_are_shown_with_their_places(amount: int, places: int, text: str) -> None:
    assert money(amount, places) == text
