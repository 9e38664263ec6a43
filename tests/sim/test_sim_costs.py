"""Bills by hand arithmetic, in one currency; what has no price is said and not guessed."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.meter.prices import Rates
from regauge.sim.costs import Bill, Bought, Item, Terms, bill, break_even, for_million, month, price_in
from regauge.sim.devices import Catalogue, Figure, load, shipped
from regauge.sim.model import Interval, exactly
from regauge.sim.revenue import Mix, listed, per_million

MINE = """
[accelerators.card]
name = "Card"
memory_gb = { value = 80, source = "a", date = "2026" }
memory_gb_per_s = { value = 1000, source = "a", date = "2026" }
cards = { value = 8, source = "a", date = "2026" }
nics = { value = 4, source = "a", date = "2026" }
nic = "400g"
price = { value = 1000, low = 900, high = 1200, currency = "USD", source = "shop", date = "2026" }
power_w = { value = 500, source = "a", date = "2026" }

[accelerators.whole]
name = "Whole"
memory_gb = { value = 80, source = "a", date = "2026" }
memory_gb_per_s = { value = 1000, source = "a", date = "2026" }
cards = { value = 8, source = "a", date = "2026" }
server_price = { value = 70000, currency = "CNY", source = "shop", date = "2026" }
server_power_w = { value = 6000, source = "a", date = "2026" }

[nics.400g]
price = { value = 100, currency = "USD", source = "shop", date = "2026" }

[switches.64x400g]
price = { value = 5000, currency = "USD", source = "shop", date = "2026" }
power_w = { value = 1000, source = "a", date = "2026" }

[currencies.CNY]
per_usd = { value = 7, source = "a", date = "2026" }
"""


@pytest.fixture
def mine(tmp_path: Path) -> Catalogue:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return load([path])


def test_a_bill_by_hand(mine: Catalogue) -> None:
    found = bill([Bought("prefill", "card", 2), Bought("decode", "whole", 1)], "64x400g", 1, mine, "USD")
    cards, nics, server, switch = (item.total for item in found.items)
    assert cards == Interval(14_400, 16_000, 19_200)
    assert nics == exactly(800)
    assert server.value == 10_000
    assert switch == exactly(5_000)
    assert found.capital.value == 31_800
    assert found.watts == exactly(2 * 8 * 500 + 6000 + 1000)
    assert found.missing == ("price of the server around 8 Card", "power of the server around 8 Card")


def test_a_month_by_hand(mine: Catalogue) -> None:
    bought = bill([Bought("decode", "whole", 12)], "64x400g", 0, mine, "CNY")
    terms = Terms(years=exactly(5.0), pue=exactly(1.5), kwh=exactly(0.5), operating=exactly(1000.0))
    cost = month(bought, terms, mine)
    assert cost.capital.value == 12 * 70_000 / 60
    assert cost.energy.value == pytest.approx(12 * 6 * 720 * 1.5 * 0.5)
    assert cost.total.value == pytest.approx(14_000 + 38_880 + 1_000)
    assert for_million(cost.total, 2e6).value == pytest.approx(53_880 / 2)


def test_the_usual_price_of_a_kwh_is_converted(mine: Catalogue) -> None:
    bought = bill([Bought("decode", "whole", 1)], "64x400g", 0, mine, "CNY")
    cost = month(bought, Terms(pue=exactly(1.0)), mine)
    assert cost.energy.value == pytest.approx(6 * 720 * 0.08 * 7)


def test_break_even_is_where_revenue_is_cost() -> None:
    price = listed()["glm-5.3"]
    mix = Mix(Decimal("0.9"))
    found = break_even(Interval(1.3, 2.6, 5.2), price, mix)
    assert found.utilisation.value == pytest.approx(1.0)
    assert found.hits[0] is None  # all cached earns 2, over 1.3
    assert found.hits[1] == Decimal("0.9")
    assert found.prices == (Decimal(4), Decimal(8), Decimal(16))


@given(
    st.decimals("0.1", 50, places=2),
    st.decimals(0, 1, places=2),
    st.decimals(0, 1, places=2),
    st.decimals(0, 3, places=2),
)
def test_the_break_even_price_earns_the_cost(price: Decimal, hit: Decimal, ratio: Decimal, output: Decimal) -> None:
    rates = Rates(cached_input=price * ratio, uncached_input=price, output=price)
    mix = Mix(hit, output)
    if hit * ratio + 1 - hit == 0:
        return
    cost = float(per_million(rates, mix)) * 1.5 + 0.01
    dear = break_even(exactly(cost), rates, mix).prices[1]
    earned = hit * dear * ratio + (1 - hit) * dear + output * rates.output
    assert float(earned) == pytest.approx(cost)


def test_a_price_in_another_currency_carries_the_rate_s_range() -> None:
    figure = Figure(100.0, "a", "2026", currency="USD")
    rate = shipped().currencies["CNY"].per_usd
    assert rate is not None
    found = price_in(figure, "CNY", shipped())
    assert (found.low, found.value) == (100 * (rate.low or rate.value), pytest.approx(100 * rate.value))
    assert price_in(figure, "USD", shipped()) == exactly(100.0)
    with pytest.raises(ConfigError, match=r"currency: no 'CNX' in the catalogue; did you mean 'CNY'"):
        price_in(figure, "CNX", shipped())


def test_what_nobody_published_is_said() -> None:
    found = bill([Bought("prefill", "ascend-950pr", 2)], "64x800g", 1, shipped(), "CNY")
    assert found.items == ()
    assert found.missing == (
        "price of Ascend 950PR, its card or its server",
        "power of Ascend 950PR",
        "price of the switch, 64 ports of 800G",
        "power of the switch, 64 ports of 800G",
    )


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill: no 'h20O'.*did you mean 'h20'"):
        bill([Bought("prefill", "h20O", 1)], "64x400g", 1, shipped(), "CNY")
    with pytest.raises(ConfigError, match="-1 servers"):
        bill([Bought("prefill", "h200", -1)], "64x400g", 1, shipped(), "CNY")
    with pytest.raises(ConfigError, match="years 0"):
        Terms(years=exactly(0.0))
    with pytest.raises(ConfigError, match=r"pue 0\.9"):
        Terms(pue=exactly(0.9))
    with pytest.raises(ConfigError, match="not negative"):
        Terms(operating=exactly(-1.0))
    with pytest.raises(ConfigError, match="more than none"):
        for_million(exactly(1.0), 0.0)
    free = Rates(cached_input=Decimal(0), uncached_input=Decimal(0), output=Decimal(0))
    with pytest.raises(ConfigError, match="nothing is earned"):
        break_even(exactly(1.0), free, Mix(Decimal(0)))


def test_a_bill_adds_its_items() -> None:
    items = (Item("a", 2, Interval(1, 2, 3), "x"), Item("b", 1, exactly(5), "y"))
    assert Bill("CNY", items, exactly(0), ()).capital == Interval(7, 9, 11)
