"""Money of a plan agrees with its parts."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from regauge.sim.answer import answer
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.costs import Bought, Terms
from regauge.sim.devices import shipped
from regauge.sim.model import exactly
from regauge.sim.money import at_rate, of_plan
from regauge.sim.revenue import Mix, listed, revenue
from regauge.sim.workload import Lengths, of_lengths

PRICE = listed()["glm-5.3"]


def test_a_rate_s_money_by_hand() -> None:
    terms = Terms(years=exactly(5.0), pue=exactly(1.0), kwh=exactly(0.0), operating=exactly(10_000.0))
    found = at_rate(
        Decimal(1000), PRICE, Mix(Decimal("0.5")), [Bought("prefill", "h20", 2)], switch="64x400g", switches=0,
        catalogue=shipped(), terms=terms,
    )  # fmt: skip
    assert found.tokens == 1000 * 2_592_000
    assert found.revenue == Decimal(2592) * 5
    assert found.cost.total.value == pytest.approx(2 * 1_200_000 / 60 + 10_000)
    assert found.cost_per_million.value == pytest.approx(50_000 / 2592)
    assert found.even.utilisation.value == pytest.approx(50_000 / 2592 / 5)
    assert found.surface.revenue[0][5] == found.revenue


def test_a_plan_s_money_is_of_its_rate_mix_and_servers() -> None:
    load = of_lengths(Lengths(8_000), Lengths(400), 4.0, hit=0.25)
    plan = answer(Ask("glm-4.5-air", Pool("h200", kv="fp8_e4m3,page=64"), Pool("h200", kv="fp8_e4m3,page=64"), load, Slo(3.0, 0.05)), changes=False)  # fmt: skip
    found = of_plan(plan, PRICE)
    assert found is not None
    assert found.tokens_per_s == Decimal("32000.0")
    assert found.mix == Mix(Decimal("0.25"), Decimal("0.05"))
    assert found.revenue == revenue(Decimal(32_000), PRICE, found.mix)
    assert [item.count for item in found.bill.items] == [plan.prefill.servers, plan.decode.servers, 1]
    assert found.cost_per_million.low <= found.cost_per_million.value <= found.cost_per_million.high


def test_servers_that_bear_less_earn_less() -> None:
    load = of_lengths(Lengths(8_000), Lengths(400), 40.0)
    ask = Ask("glm-4.5-air", Pool("h200", 1), Pool("h200", 1, cards=4), load, Slo(3.0, 0.05))
    plan = answer(ask, changes=False)
    found = of_plan(plan, PRICE)
    assert found is not None
    assert not plan.fits
    assert float(found.tokens_per_s) == pytest.approx(plan.most.value * 8_000)
    assert found.note == f"at {plan.most.value:.4g} requests/s, what these servers bear of the 40 asked"
    # The catalogue prices a server of 8 H200; decode's has 4, which are bought as cards.
    assert [(i.what, i.count) for i in found.bill.items][1] == ("decode: card NVIDIA H200 SXM", 4)
    assert "price of the server around 4 NVIDIA H200 SXM" in found.bill.missing
    never = answer(replace(ask, slo=Slo(1e-6, 0.05)), changes=False)
    assert of_plan(never, PRICE) is None
