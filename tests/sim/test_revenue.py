"""The article's revenue to the yuan, decimals that lose nothing, a surface that is monotone."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.meter.prices import Rates, load
from regauge.sim.revenue import (
    Mix,
    exact,
    hit_for,
    listed,
    needed,
    of_book,
    per_million,
    revenue,
    surface,
    tokens,
    uncached_for,
)

D = Decimal
GLM = listed()["glm-5.3"]
RATE = D("95920.5")

prices = st.decimals(0, 1000, places=4)
shares = st.decimals(0, 1, places=3)


@st.composite
def rates(draw: st.DrawFn) -> Rates:
    cached, more, output = draw(prices), draw(prices), draw(prices)
    return Rates(cached_input=cached, uncached_input=cached + more, output=output)


def test_the_article_to_the_yuan() -> None:
    assert tokens(RATE) == D("248625936000.0")
    assert per_million(GLM, Mix(D("0.9"))) == D("2.60")
    assert revenue(RATE, GLM, Mix(D("0.9"))) == D("646427.4336")
    assert round(revenue(RATE, GLM, Mix(D("0.9")))) == 646_427


def test_what_else_would_give_646_thousand() -> None:
    assert round(needed(D(646_000), D(58_412)), 2) == D("4.27")
    assert round(needed(D(646_000), D(83_670)), 2) == D("2.98")
    found = hit_for(needed(D(646_000), D(58_412)), GLM)
    assert found is not None
    assert round(found, 2) == D("0.62")
    assert hit_for(D(9), GLM) is None  # dearer than all uncached
    assert hit_for(D(1), GLM) is None  # cheaper than all cached


@given(rates(), shares, st.decimals(0, 2, places=2), st.integers(1, 10**9), st.integers(1, 60))
def test_nothing_is_rounded(price: Rates, hit: Decimal, output: Decimal, tenths: int, days: int) -> None:
    found = revenue(D(tenths) / 10, price, Mix(hit, output), days=days)
    h, one = Fraction(hit), Fraction(1)
    blended = (
        h * Fraction(price.cached_input)
        + (one - h) * Fraction(price.uncached_input)
        + Fraction(output) * Fraction(price.output)
    )
    assert Fraction(found) == Fraction(tenths, 10) * 86_400 * days * blended / 10**6


@given(rates(), shares, shares)
def test_more_hits_never_earn_more_and_dearer_prices_never_less(price: Rates, one: Decimal, other: Decimal) -> None:
    few, many = sorted((one, other))
    assert revenue(RATE, price, Mix(few)) >= revenue(RATE, price, Mix(many))
    dearer = Rates(cached_input=price.cached_input, uncached_input=price.uncached_input + 1, output=price.output)
    assert revenue(RATE, dearer, Mix(one)) >= revenue(RATE, price, Mix(one))


@given(rates(), shares)
def test_the_hit_share_is_found_again(price: Rates, hit: Decimal) -> None:
    found = hit_for(per_million(price, Mix(hit)), price)
    if price.uncached_input == price.cached_input:
        assert found is None
    else:
        assert found is not None
        assert abs(found - hit) < D("1e-18")


@given(st.decimals("0.01", 100, places=2), shares, st.decimals("0.01", 1, places=2))
def test_the_iso_line_is_one_of_constant_revenue(earns: Decimal, hit: Decimal, ratio: Decimal) -> None:
    dear = uncached_for(earns, hit, ratio)
    blended = hit * dear * ratio + (1 - hit) * dear
    assert abs(blended - earns) < D("1e-18")


def test_the_surface_has_a_row_for_each_price() -> None:
    hits = tuple(D(k) / 10 for k in range(11))
    found = surface(RATE, list(listed().values()), hits)
    assert len(found.revenue) == len(listed())
    assert all(len(row) == 11 and list(row) == sorted(row, reverse=True) for row in found.revenue)
    assert found.revenue[found.prices.index(GLM)][9] == D("646427.4336")


def test_prices_of_ones_own_book() -> None:
    book = load(
        b'currency = "EUR"\n[[price]]\nname = "all"\ncached_input = 0.1\nuncached_input = 0.5\noutput = 2.0\n'
        b'[[price]]\nname = "old"\nmodel = "m"\nuntil = 2020-01-01\ncached_input = 1\nuncached_input = 1\noutput = 1\n'
    )
    found = of_book(book, "m", at=datetime(2026, 1, 1, tzinfo=UTC))
    assert (found.currency, found.cached_input, found.output) == ("EUR", D("0.1"), D("2.0"))
    assert of_book(book, "m", at=datetime(2019, 1, 1, tzinfo=UTC)).name == "old"
    only = load(
        b'currency = "EUR"\n[[price]]\nname = "x"\nmodel = "m"\ncached_input = 1\nuncached_input = 1\noutput = 1\n'
    )
    with pytest.raises(ConfigError, match="no price of 'other'"):
        of_book(only, "other")


@pytest.mark.parametrize("text", ["nan", "inf", "many", ""])
def test_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rate: "):
        exact(text, "rate")


@pytest.mark.parametrize(
    ("hit", "output", "said"),
    [("1.01", "0", "hit"), ("-0.1", "0", "hit"), ("nan", "0", "hit"), ("0.5", "-1", "output")],
)
def test_impossible_mixes_are_refused(hit: str, output: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"mix: {said}"):
        Mix(D(hit), D(output))


def test_impossible_rates_are_refused() -> None:
    for rate in (D(0), D(-1), D("nan")):
        with pytest.raises(ConfigError, match="tokens per second: must be positive"):
            tokens(rate)
    with pytest.raises(ConfigError, match="days"):
        tokens(RATE, days=0)
    with pytest.raises(ConfigError, match="utilisation"):
        tokens(RATE, utilisation=D("1.2"))
    with pytest.raises(ConfigError, match="revenue: must not be negative"):
        needed(D(-1), RATE)
    with pytest.raises(ConfigError, match="no price earns anything"):
        uncached_for(D(1), D(1), D(0))
    with pytest.raises(ConfigError, match="ratio"):
        uncached_for(D(1), D(1), D(2))
