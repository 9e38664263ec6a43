"""What a deployment earns and costs: list price x mix against hardware, power and what else is given, for a rate or for a plan.

Revenue is an upper bound: every token of the stated rate is sold at the list price, all month. Cost leaves out what `costs` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from regauge.sim.costs import Bill, Bought, BreakEven, Cost, Terms, bill, break_even, for_million, month
from regauge.sim.devices import Catalogue
from regauge.sim.model import Interval
from regauge.sim.plan_result import Plan
from regauge.sim.revenue import MONTH_DAYS, Listed, Mix, Surface, exact, listed, per_million, revenue, surface, tokens

HITS = tuple(Decimal(k) / 10 for k in range(11))
USUAL = Terms()


@dataclass(frozen=True, slots=True)
class Money:
    """A month of 30 days at a rate."""

    price: Listed
    mix: Mix
    tokens_per_s: Decimal
    """Input tokens, cached ones counted."""
    tokens: Decimal
    """Of the month."""
    per_million: Decimal
    """That a million input tokens earn, in the currency of the price."""
    revenue: Decimal
    bill: Bill
    terms: Terms
    cost: Cost
    cost_per_million: Interval
    even: BreakEven
    surface: Surface
    """Revenue of a month for all list prices of that currency, over hit shares."""
    note: str = ""
    """What the rate is, where it is not the one that was asked for."""


def at_rate(
    tokens_per_s: Decimal, price: Listed, mix: Mix, bought: Sequence[Bought], *, switch: str, switches: int,
    catalogue: Catalogue, terms: Terms = USUAL,
) -> Money:  # fmt: skip
    """Return a month's revenue and cost at a rate of all servers together. Raises ConfigError for what cannot be."""
    spent = bill(bought, switch, switches, catalogue, price.currency)
    cost = month(spent, terms, catalogue)
    sold = tokens(tokens_per_s)
    each = for_million(cost.total, float(sold))
    beside = [p for p in listed().values() if p.currency == price.currency and p != price]
    return Money(
        price, mix, tokens_per_s, sold, per_million(price, mix), revenue(tokens_per_s, price, mix, days=MONTH_DAYS),
        spent, terms, cost, each, break_even(each, price, mix), surface(tokens_per_s, [price, *beside], HITS),
    )  # fmt: skip


def of_plan(plan: Plan, price: Listed, terms: Terms = USUAL) -> Money | None:
    """Return a month's revenue and cost of a plan at the rate that it was asked for, or what its servers bear of it; None: they bear none.

    Servers are counted with the plan's own cards and NICs, switches by their ports; what joins several switches is named as missing.
    """
    asked, most = plan.mix.rate, plan.most.low if plan.ask.sure else plan.most.value
    borne = asked if plan.fits else min(asked, most)
    if borne <= 0.0:
        return None
    rate = exact(borne * plan.mix.prompt, "tokens per second")
    mix = Mix(exact(round(plan.mix.hit, 6)), exact(round(plan.mix.output / plan.mix.prompt, 6)))
    sides = [Bought(p.side, p.device, p.servers, p.nics, p.cards, p.nic) for p in (plan.prefill, plan.decode)]
    switches = -(-plan.network.ports // plan.network.ports_of)
    found = at_rate(
        rate, price, mix, sides, switch=plan.ask.switch, switches=switches, catalogue=plan.ask.catalogue, terms=terms
    )
    if borne < asked:
        found = replace(found, note=f"at {borne:.4g} requests/s, what these servers bear of the {asked:.4g} asked")
    if switches > 1:
        more = f"ports and switches that join {switches} of {plan.network.switch}"
        found = replace(found, bill=replace(found.bill, missing=(*found.bill.missing, more)))
    return found
