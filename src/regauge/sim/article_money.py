"""The part of the report on the published deployment that is about money."""

from __future__ import annotations

from regauge.sim.article import HIT, PICTURES, POINTS, RATE, STATED, Article, iso_line, pairs, server_revenue
from regauge.sim.model import Interval
from regauge.sim.money import HITS
from regauge.sim.report import interval, spendings, table, thousands
from regauge.sim.revenue import exact, listed, surface

SECONDS = 30 * 86_400


def revenue(found: Article) -> list[str]:
    """Return the published revenue to the yuan, and what else price and mix give."""
    price = found.price
    own = [p for p in listed().values() if p.currency == price.currency]
    shown = surface(RATE, own, HITS)
    rows = [
        (f"{p.name}, {p.cached_input:g} / {p.uncached_input:g}", *(thousands(x) for x in earned))
        for p, earned in zip(shown.prices, shown.revenue, strict=True)
    ]
    needs = [
        (name, f"{rate:,}", f"{each:.2f}", "none" if hit is None else f"{hit:.1%}")
        for name, rate, each, hit in iso_line(price)
    ]
    lines = [
        (f"{hit:.0%}", f"{dear:.2f}", f"{dear * price.cached_input / price.uncached_input:.2f}")
        for hit, dear in pairs(price)
    ]
    return [
        f"    {RATE:,} tokens/s x 2,592,000 s = {RATE * 2_592_000:,.0f} tokens",
        f"    x ({HIT} x {price.cached_input} + {1 - HIT} x {price.uncached_input}) CNY / 10^6 = {server_revenue(found):,} CNY",
        "",
        (
            "One figure hides two choices, price and mix. Thousand CNY a month of one prefill server at the 64K rate, input alone, by list price (cached / "
            "uncached) and by the share that is billed as cached:"
        ),
        "",
        *table(("price", *(f"{h:.0%}" for h in HITS)), rows),
        "",
        f"![{PICTURES[1][1]}]({PICTURES[1][0]})",
        "",
        f"What {STATED:,} CNY a month needs at each published rate, and the cached share at which {price.name}'s price gives it:",
        "",
        *table(
            (
                "rate",
                "tokens/s",
                "CNY per million input tokens",
                f"cached share at {price.uncached_input:g} / {price.cached_input:g}",
            ),
            needs,
        ),
        "",
        f"Pairs that give {STATED:,} CNY at the 64K rate, cached input costing {price.cached_input / price.uncached_input:.0%} of uncached:",
        "",
        *table(("cached share", "CNY per million uncached", "cached"), lines),
        "",
        "Sources of the prices:",
        "",
        *(f"* {p.name}: {p.source}, {p.date}" + (f" ({p.note})" if p.note else "") for p in own),
        "",
        (
            f"Output is not in the claim. At {found.findings.claim.output.value:g} output tokens for 65,536 of input and {price.output:g} CNY, it would add "
            f"{_output_share(found):.1%}."
        ),
    ]


def cost(found: Article) -> list[str]:
    """Return what the whole deployment costs beside what it earns."""
    n, one = found.findings.claim.prefill_servers, found.planned[0]
    bear = one.plan.most
    tokens = Interval(*(max(x, 1e-9) * one.tokens * SECONDS / 1e6 for x in (bear.low, bear.value, bear.high)))
    each = found.money.cost.total / tokens
    earned = found.money.per_million * exact(round(tokens.value, 3))
    return [
        (
            f"The whole deployment, its {n} prefill servers at the 64K rate, all month: {found.money.tokens / 10**6:,.0f} M tokens and "
            f"{found.money.revenue:,.0f} CNY. Full load at list price is a bound, not a forecast: at the {interval(bear, '.1f')} requests/s of 64K that the "
            f"planner gives these {one.plan.prefill.servers} + {one.plan.decode.servers} servers, a million input tokens cost {interval(each, '.2f')} CNY and a "
            f"month earns {earned:,.0f}, every token sold."
        ),
        "",
        *spendings(found.money),
    ]


def _output_share(found: Article) -> float:
    outputs = found.findings.claim.output.value / POINTS[0].tokens
    return outputs * float(found.price.output) / float(found.money.per_million)
