"""Markdown reports: a plan, what it earns and costs, and the figures that it rests on, each with its source.

Everything in a report is modelled unless a line says otherwise. An interval is written `likeliest (lowest to highest)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path

from regauge.sim.devices import Catalogue, Figure
from regauge.sim.model import Interval
from regauge.sim.money import Money
from regauge.sim.plan_result import ENDLESS, Plan, PoolPlan, Times

Cell = str | int
_NUMBER = re.compile(r"[+-]?[\d,.]+[%x]?( \([^a-z]*( to [^a-z]*)?\))?( [A-Z]{3})?( / [\d,.]+)*")
LABEL = "Modelled: arithmetic on the figures named below. Nothing here was measured on this deployment."


def plan(found: Plan, money: Money | None = None, pictures: Sequence[tuple[str, Path]] = ()) -> str:
    """Return the report of a plan; `pictures`: captions and files, linked by name. Ends in a line feed."""
    ask = found.ask
    devices = dict.fromkeys((found.prefill.device, found.decode.device))
    assumed = [(a.what, interval(a.value, "g"), a.source) for a in found.assumed]
    sections = [
        ("## Answer", _answer(found)),
        ("## Asked", table(("what", "value"), _asked(found))),
        ("## Servers", _pools(found)),
        *(
            (f"### What binds {pool.side}", [*_needs(pool), "", *_memory(pool)])
            for pool in (found.prefill, found.decode)
        ),
        ("## Network", _network(found)),
        ("## Times", _times(found)),
        ("## Which prompts to prefill where", _offload(found)),
        ("## What if", _what_if(found) if found.what_if else []),
        ("## Money", [*earnings(money), "", *spendings(money)] if money is not None else []),
        ("## Pictures", [f"![{caption}]({path.name})" for caption, path in pictures]),
        ("## Fit to the given rates", _fit(found)),
        ("## Assumed", table(("what", "value", "source"), assumed)),
        ("## Figures of the devices", figures(ask.catalogue, devices, ask.model)),
    ]
    out = [f"# Plan: {ask.model}, {found.prefill.name} to {found.decode.name}", "", LABEL, ""]
    for head, lines in sections:
        out += [head, "", *lines, ""] if lines else []
    return "\n".join(out)


# -- money -------------------------------------------------------------------------------------------------------------


def earnings(money: Money) -> list[str]:
    """Return revenue at the mix, and over every list price and hit share."""
    price, mix = money.price, money.mix
    unit = price.currency
    out = [
        (f"Rate: {money.note}. " if money.note else "")
        + f"{money.tokens_per_s:,f} input tokens/s for 30 days are {money.tokens / 10**6:,.0f} M tokens. At {_share(mix.hit)} cached"
        + (f" and {mix.output:g} output tokens for each input token" if mix.output else "")
        + f", {price.name} ({price.cached_input:g} / {price.uncached_input:g} / {price.output:g} {unit} per million cached, "
        f"uncached, output; {price.source}, {price.date}) earns {money.per_million:.4f} {unit} per million input tokens: "
        f"**{money.revenue:,.0f} {unit} a month**, if all of it is sold.",
        "",
        f"Input alone, thousand {unit} a month, by the share that is billed as cached:",
        "",
    ]
    rows = [
        (f"{p.name}, {p.cached_input:g} / {p.uncached_input:g}", *(thousands(x) for x in earned))
        for p, earned in zip(money.surface.prices, money.surface.revenue, strict=True)
    ]
    return out + table(("price, cached / uncached", *(_share(h) for h in money.surface.hits)), rows)


def spendings(money: Money) -> list[str]:
    """Return the bill, the cost of a month and of a million tokens, and where both meet."""
    unit, bought, even = money.price.currency, money.bill, money.even
    out = table(
        ("bought", "number", f"each, thousand {unit}", f"together, thousand {unit}", "source"),
        [
            (i.what, i.count, interval(i.each, ",.0f", 1e3), interval(i.total, ",.0f", 1e3), i.source)
            for i in bought.items
        ],
    )
    if bought.missing:
        out += ["", f"Not known, and not counted: {'; '.join(bought.missing)}. Give them in a catalogue file."]
    out += [
        "",
        "Not counted either: optics and cables, storage, building, staff, software, interest, taxes.",
        "",
        *table(
            (f"{unit} a month", "value"),
            [
                (f"capital over {interval(money.terms.years, 'g')} years", interval(money.cost.capital, ",.0f")),
                (
                    f"power, {interval(bought.watts, ',.1f', 1e3)} kW known, PUE {interval(money.terms.pue, 'g')}",
                    interval(money.cost.energy, ",.0f"),
                ),
                ("operating cost as given", interval(money.cost.operating, ",.0f")),
                ("together", interval(money.cost.total, ",.0f")),
                ("per million input tokens", interval(money.cost_per_million, ".4f")),
            ],
        ),
        "",
        f"It breaks even at {interval(even.utilisation, '.1%')} of that rate; or, at full load, at {_even_prices(money)} {unit} per million "
        "uncached input tokens (for the lowest, likeliest, highest cost), " + _even_hits(money),
    ]
    return out


def _even_prices(money: Money) -> str:
    return " / ".join(f"{p:.3f}" if p > 0 else "0 (output alone pays for it)" for p in money.even.prices)


def _even_hits(money: Money) -> str:
    hits = money.even.hits
    if any(h is not None for h in hits):
        return f"or with {' / '.join('none' if h is None else _share(h) for h in hits)} of input cached."
    more = money.cost_per_million.value < float(money.per_million)
    return f"and at no cached share: at these prices it earns {'more' if more else 'less'} than it costs at every one."


# -- a plan's sections -------------------------------------------------------------------------------------------------


def _answer(found: Plan) -> list[str]:
    prefill, decode = found.prefill, found.decode
    verdict = "meets what is asked" if found.fits else "**does not meet what is asked**"
    out = [
        f"{prefill.servers} prefill and {decode.servers} decode servers: {verdict}. Prefill is bound by {prefill.binds}, decode by "
        f"{decode.binds}. The work asks for {found.ratio:.2f} prefill servers per decode server."
        + (f" {found.idle[0].upper()}{found.idle[1:]}." if found.idle else ""),
        "",
        (
            f"Goodput at the asked rate: {interval(found.goodput, '.2f')} requests/s within both limits of {found.mix.rate:g}; these servers "
            f"bear at most {interval(found.most, '.2f')}."
        ),
    ]
    for head, lines in (("Problems", found.problems), ("What would mend it", found.remedies)):
        if lines:
            out += ["", f"{head}:", "", *(f"* {line}" for line in lines)]
    return out


def _asked(found: Plan) -> list[tuple[Cell, ...]]:
    ask, mix = found.ask, found.mix
    return [
        ("workload", mix.name),
        ("requests/s", f"{mix.rate:g}"),
        ("prompt tokens, mean / P99", f"{mix.prompt:,.0f} / {mix.prompt_p99:,.0f}"),
        ("cached share of prompts", f"{mix.hit:.1%}"),
        ("output tokens, mean", f"{mix.output:,.1f}"),
        (
            "tokens/s: prompt / cached / output",
            f"{mix.prompt_tokens_per_s:,.0f} / {mix.cached_tokens_per_s:,.0f} / {mix.output_tokens_per_s:,.0f}",
        ),
        ("time to first token, s", f"{ask.slo.ttft_s:g} for {ask.slo.share:.0%}"),
        ("time per output token, s", f"{ask.slo.tpot_s:g} for {ask.slo.share:.0%}"),
        ("KV, prefill / decode", f"{ask.prefill.kv} / {ask.decode.kv}"),
        ("bits per weight, prefill / decode", f"{ask.prefill.weight_bits:g} / {ask.decode.weight_bits:g}"),
    ]


def _pools(found: Plan) -> list[str]:
    head = (
        "side",
        "device",
        "servers",
        "cards each",
        "servers per instance",
        "NICs each",
        "binds",
        "margin to the next",
        "load",
        "busy",
    )
    rows = [
        (p.side, p.name, p.servers, p.cards, p.span, f"{p.nics} x {p.nic}", p.binds, f"{p.margin:.2f}x", interval(p.load, ".0%"), interval(p.busy, ".0%"))
        for p in (found.prefill, found.decode)
    ]  # fmt: skip
    return table(head, rows)


def _needs(pool: PoolPlan) -> list[str]:
    rows = [(n.what, interval(n.servers, ".0f"), f"{n.exact:.2f}", n.why) for n in pool.needs]
    return table(("constraint", "servers", "before rounding", "why"), rows)


def _memory(pool: PoolPlan) -> list[str]:
    m = pool.memory
    rows = [
        (f"{x / 1e9:,.0f}" if isinstance(x, float) else interval(x, ",.0f", 1e9))
        for x in (m.capacity, m.weights, m.reserve, m.room, m.resident, m.peak)
    ]  # fmt: skip
    head = ("GB of an instance: all", "weights", "reserve", "room for KV", "KV in work, mean", "KV in work, P99")
    return table(head, [tuple(rows)])


def _network(found: Plan) -> list[str]:
    n = found.network
    rows: list[tuple[Cell, ...]] = [
        ("path of the two layouts", n.path + (f": {'; '.join(n.reasons)}" if n.reasons else "")),
        ("KV bytes of a token: prefill / wire / decode", f"{n.prefill_token_bytes:,.0f} / {n.wire_token_bytes:,.0f} / {n.decode_token_bytes:,.0f}"),
        ("KV of the mean request that crosses, GB", f"{n.request_bytes / 1e9:.3f}"),
        ("out of a prefill server, GB/s", interval(n.egress, ".2f", 1e9)),
        ("its NICs' load, of what payload reaches", interval(n.egress_load, ".1%")),
        ("into a decode server, GB/s", interval(n.ingress, ".2f", 1e9)),
        ("its NICs' load, of what payload reaches", interval(n.ingress_load, ".1%")),
        ("of the line rate", interval(n.ingress_line_load, ".1%")),
        ("prefill NICs for each decode NIC", f"{n.incast:.1f}"),
        ("the mean request's KV alone, ms", seconds(n.alone_s, ".1f", 1e-3)),
        ("at the mean load (M/G/1-PS), mean / P99, ms", f"{seconds(n.mean_s, '.1f', 1e-3)} / {seconds(n.p99_s, '.1f', 1e-3)}"),
        ("a burst, one from each prefill server, ms", seconds(n.burst_s, ".1f", 1e-3)),
        ("conversion, ms", f"{interval(n.conversion_s, '.1f', 1e-3)} ({n.conversion_source})"),
        ("inside a prefill instance, GB/s", interval(n.inner, ".2f", 1e9)),
        ("switch ports", f"{n.ports} of {n.ports_of} ({n.switch})"),
    ]  # fmt: skip
    return table(("what", "value"), rows)


def _times(found: Plan) -> list[str]:
    def row(name: str, t: Times, unit: float, form: str) -> tuple[Cell, ...]:
        return (name, *(seconds(x, form, unit) for x in (t.mean, t.p50, t.p90, t.p99)), interval(t.met, ".1%"))

    head = ("time", "mean", "P50", "P90", "P99", "within the limit")
    return table(
        head, [row("to first token, s", found.ttft, 1.0, ".2f"), row("per output token, ms", found.tpot, 1e-3, ".1f")]
    )


def _offload(found: Plan) -> list[str]:
    o = found.offload
    return [
        (
            f"In balance, decode servers prefill prompts of up to {o.tokens:,.0f} uncached tokens themselves ({o.share:.1%} of requests). With "
            f"nothing waiting, decode alone has the first token sooner up to {o.quicker:,.0f}. {o.why}"
        )
    ]


def _what_if(found: Plan) -> list[str]:
    rows = [
        (w.change, f"{w.prefill} + {w.decode}" if w.prefill or w.decode else "none do", seconds(w.ttft, ".2f"), seconds(w.tpot, ".1f", 1e-3), f"{w.most:.2f}", w.note)
        for w in found.what_if
    ]  # fmt: skip
    return table(("change", "servers", "TTFT, s", "TPOT, ms", "most requests/s", "note"), rows)


def _fit(found: Plan) -> list[str]:
    if found.fit is None:
        return []
    rows = [
        (
            f"{p.tokens:,}",
            f"{p.tokens_per_s:,.1f}",
            f"{p.hit:.0%}",
            f"{at:.3f}" + (" (over the peak)" if at > 1.0 else ""),
            f"{r:+.0%}",
        )
        for p, at, r in zip(found.ask.points, found.fit.at, found.fit.residuals, strict=True)
    ]
    head = ("prompt", "tokens/s of a prefill server", "cached", "efficiency that it asks for", "missed by")
    return [f"One efficiency for all: {interval(found.fit.fitted, '.3f')}.", "", *table(head, rows)]


# -- figures -----------------------------------------------------------------------------------------------------------


def figures(catalogue: Catalogue, devices: Iterable[str], model: str = "") -> list[str]:
    """Return every figure of some devices, of the NICs that they have and, if it is known, of a model, with source, date and note."""
    rows: list[tuple[Cell, ...]] = []
    nics: dict[str, None] = {}
    for key in devices:
        card = catalogue.accelerators[key]
        rows += _rows(card.name, card)
        nics |= {card.nic: None} if card.nic else {}
    for nic in nics:
        rows += _rows(catalogue.nics[nic].name, catalogue.nics[nic])
    if model in catalogue.models:
        rows += _rows(catalogue.models[model].name, catalogue.models[model])
    return table(("device", "figure", "value", "source", "note"), rows)


def _rows(name: str, device: object) -> list[tuple[Cell, ...]]:
    fields = getattr(device, "__struct_fields__", ())
    found: list[tuple[str, Figure]] = [(f, v) for f in fields if isinstance(v := getattr(device, f), Figure)]
    return [(name, field, _figure(figure), f"{figure.source}, {figure.date}", figure.note) for field, figure in found]


def _figure(figure: Figure) -> str:
    low, high = (figure.value if x is None else x for x in (figure.low, figure.high))
    spread = f" ({low:,.10g} to {high:,.10g})" if low != high else ""
    return f"{figure.value:,.10g}{spread}" + (f" {figure.currency}" if figure.currency else "")


# -- text --------------------------------------------------------------------------------------------------------------


def interval(found: Interval, form: str, unit: float = 1.0) -> str:
    """Return `likeliest (lowest to highest)` in a unit, or one figure where all three read alike."""
    low, value, high = (format(x / unit, form) for x in (found.low, found.value, found.high))
    return value if low == value == high else f"{value} ({low} to {high})"


def seconds(found: Interval, form: str, unit: float = 1.0) -> str:
    """Return an interval of times, where `ENDLESS` is a word."""
    if found.low >= ENDLESS:
        return "endless"
    if found.high < ENDLESS:
        return interval(found, form, unit)
    low, value = (format(x / unit, form) if x < ENDLESS else "endless" for x in (found.low, found.value))
    return f"{value} ({low} to endless)"


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a Markdown table's lines: columns of numbers to the right, pipes in text escaped."""
    right = []
    for column in range(len(head)):
        cells = [str(row[column]) for row in rows]
        right.append(any(cells) and all(not c or _NUMBER.fullmatch(c) for c in cells))
    lines = [head, ["--:" if r else "---" for r in right], *rows]
    return [
        f"| {' | '.join(str(c).replace('|', chr(92) + '|').replace(chr(10), ' ') for c in line)} |" for line in lines
    ]


def thousands(amount: Decimal) -> str:
    """Return an amount of money in thousands, to the nearest."""
    return f"{amount / 1000:,.0f}"


def _share(value: Decimal) -> str:
    return f"{value:.0%}" if value * 100 == round(value * 100) else f"{value:.1%}"
