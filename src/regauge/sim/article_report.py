"""The report on the published deployment as Markdown. Every figure in it is computed; `docs/article.md` is its output."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

from regauge.errors import ConfigError
from regauge.sim import article_money, article_plan
from regauge.sim.article import (
    HIT,
    MIXED,
    PICTURES,
    POINTS,
    RATE,
    STATED,
    Article,
    draw,
    iso_line,
    server_revenue,
)
from regauge.sim.claims import PLAUSIBLE, TOLERANCE, Findings, Traffic
from regauge.sim.model import Interval, exactly
from regauge.sim.report import LABEL, Cell, figures, interval, table

_SOURCE = "the article on a vendor's white paper of 2026-08-24; the white paper itself was not found"


def markdown(found: Article, command: str = "regauge plan article --markdown docs/article.md") -> str:
    """Return the report; ends in a line feed."""
    out = ["# The published deployment, questioned", "", f"Made by `{command}`. {LABEL}", ""]
    for head, lines in (
        ("In short", [f"* {line}" for line in short(found)]),
        ("What is claimed", _claimed(found)),
        ("What is assumed here", _assumed(found)),
        ("Which model", _models(found)),
        ("The cached share that the rates imply", _implied(found)),
        ("Weights", _weights(found)),
        ("KV on the network", _network(found)),
        ("KV in decode's memory", _memory(found)),
        ("What the planner says of it", article_plan.section(found.planned, POINTS)),
        ("Ports", _ports(found)),
        ("Revenue", article_money.revenue(found)),
        ("Cost", article_money.cost(found)),
        (
            "Figures and sources",
            figures(found.catalogue, (found.findings.claim.prefill, found.findings.claim.decode), found.likeliest.key),
        ),
    ):
        out += [f"## {head}", "", *lines, ""]
    return "\n".join(out)


def write(found: Article, path: Path) -> list[Path]:
    """Write the report, and its pictures beside it; return all paths. Raises ConfigError for what cannot be written or drawn."""
    try:
        path.write_text(markdown(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return [path, *draw(found, path.parent)]


# -- sections ----------------------------------------------------------------------------------------------------------


def short(found: Article) -> list[str]:
    """Return what matters most, a line each."""
    best, claim = found.likeliest, found.findings.claim
    fp8, room = best.layouts[0].traffic[0], dict(best.room)["FP8"]
    price = found.price
    return [
        (f"{RATE:,} tokens/s at 64K x 30 days x ({HIT} x {price.cached_input} + {1 - HIT} x {price.uncached_input}) CNY per million = "
        f"**{server_revenue(found):,.0f} CNY**: one prefill server, all month at full load, every token sold, {HIT:.0%} of them at the "
        "price of cached ones. The rate counts cached tokens, and the figure is of one server."),
        *_short_fit(found),
        f"Weights of {best.name}: " + "; ".join(
            f"{w.dtype} {w.nbytes / 1e9:,.0f} GB, " + ("fits" if w.prefill_servers == 1 else "does **not** fit")
            + f" the {found.findings.prefill_memory / 1e9:,.0f} GB of a prefill server" for w in best.weights
        ) + ".",
        f"Network: {fp8.egress / 1e9:.2f} GB/s from each prefill server, {fp8.line_load:.1%} of decode's line rate with FP8 KV"
        + _overloads(found.findings) + ".",
        f"Decode's memory: {claim.prefill_servers} servers at the 64K rate keep {interval(fp8.residents, ',.0f')} requests there, "
        f"{interval(fp8.resident_bytes, ',.0f', 1e9)} GB of KV. FP8 weights leave {room / 1e9:,.0f} GB of {found.findings.decode_memory / 1e9:,.0f}: "
        f"{interval(bearable(fp8, room), '.0%')} of the rate" + (". **It binds before the network.**" if bearable(fp8, room).value < 1.0 > fp8.line_load else "."),
        article_plan.short(found.planned),
        f"Ports: {found.findings.ports} of {found.findings.ports_of}, with {claim.nics} NICs a server.",
    ]  # fmt: skip


def _short_fit(found: Article) -> list[str]:
    best = found.likeliest
    none, most = (f.efficiency for f in best.fits)
    others = [c for c in found.findings.candidates if c.implied and c.key != best.key]
    shares = (
        "no cached share"
        if best.implied is None
        else f"any cached share from {best.implied[0]:.0%} to {best.implied[1]:.0%}"
    )
    over = ": impossible" if none.at[0] > 1.0 else ""
    rest = "No other candidate does so with one constant."
    if others:
        rest = f"Of the other candidates only {', '.join(c.name for c in others)} does so with one constant."
    return [
        (
            f"{best.name} without cached tokens asks for {none.at[0]:.0%} of the peak rate at 64K{over}. With {HIT:.0%} cached, one efficiency of "
            f"{most.fitted.value:.3f} gives both rates within {max(abs(r) for r in most.residuals):.0%}."
        ),
        (
            f"Within {TOLERANCE:.0%}, {shares} gives both rates at an efficiency of {PLAUSIBLE.low:g} to {PLAUSIBLE.high:g}: the rates alone do not fix it. "
            f"{rest} GLM-5 and 5.1 take 202,752 tokens of context: 300K is not theirs."
        ),
    ]


def _overloads(findings: Findings) -> str:
    over = [
        f"{c.name} in {layout.dtype}: {layout.traffic[0].line_load:.0%}"
        for c in findings.candidates
        for layout in c.layouts
        if layout.traffic[0].line_load > 1.0
    ]
    return f". What would not cross: {', '.join(over)}; that is what CONVERT is for" if over else ""


def _claimed(found: Article) -> list[str]:
    claim = found.findings.claim
    rows: list[tuple[Cell, ...]] = [
        ("prefill", f"{claim.prefill_servers} servers of 8 {found.catalogue.accelerators[claim.prefill].name}"),
        ("decode", f"{claim.decode_servers} server, of what is not said"),
        ("network for KV", "one switch of 128 ports of 400G"),
        *((f"tokens/s of a prefill server at {p.tokens:,} tokens", f"{p.tokens_per_s:,.1f}") for p in POINTS),
        ("tokens/s of a prefill server in agent mix", f"about {MIXED:,.0f}"),
        ("revenue of a month, CNY", f"about {STATED:,}"),
    ]
    return [*table(("what", "claim"), rows), "", f"Source: {_SOURCE}."]


def _assumed(found: Article) -> list[str]:
    claim, decode = found.findings.claim, found.catalogue.accelerators[found.findings.claim.decode]
    return table(
        ("what", "here", "why"),
        [
            ("decode server", f"8 {decode.name}", "not said; others below"),
            ("model", found.likeliest.name, "fits the rates best; its context of 1M takes 300K, GLM-5 and 5.1 end at 202,752"),
            ("NICs of a server", f"{claim.nics} of 400G", "13 servers on 128 ports have at most 9 each"),
            ("output of a request", f"{interval(claim.output, 'g')} tokens", "mean of the agent sessions in the stored traces"),
            ("time per output token", f"{interval(claim.tpot_s, 'g', 1e-3)} ms", "assumed"),
            ("price", f"{found.price.name}: {found.price.uncached_input:g}, cached {found.price.cached_input:g} CNY per million", f"{found.price.source}, {found.price.date}"),
            ("peak of a prefill server", f"{found.findings.peak.value / 1e15:g} PFLOPS in FP8", "8 x 1,000 TFLOPS, \"up to\"; 920 cooled by air"),
            ("KV", "all of a prompt's crosses, cached part too", "decode keeps no prefixes; if it did, a tenth would cross at 90 %"),
        ],
    )  # fmt: skip


def _models(found: Article) -> list[str]:
    rows: list[tuple[Cell, ...]] = []
    for c in found.findings.candidates:
        rows += [
            (c.name if not k else "", f"{c.active_b:g} / {c.total_b:g}" if not k else "", f"{f.hit:.0%}",
             *(f"{x:.3f}" + (" (over the peak)" if x > 1.0 else "") for x in f.efficiency.at),
             f"{f.efficiency.fitted.value:.3f}", *(f"{r:+.0%}" for r in f.efficiency.residuals))
            for k, f in enumerate(c.fits)
        ]  # fmt: skip
    head = (
        "model",
        "parameters, 10^9: active / all",
        "cached",
        "efficiency that 64K asks for",
        "300K",
        "best for both",
        "misses 64K by",
        "300K by",
    )
    said = [f"* {c.name}: {'; '.join(c.statements)}." for c in found.findings.candidates if c.statements]
    return [
        (
            "Operations of a prompt by the model's config (2 per active parameter, attention by its kind), cached tokens not computed, over the "
            "time that the rate leaves, over the peak rate. One constant for both rates by least squares of relative errors."
        ),
        "",
        *table(head, rows),
        "",
        f"![{PICTURES[0][1]}]({PICTURES[0][0]})",
        "",
        *said,
        "",
        f"Cards cooled by air (920 TFLOPS) would need {found.air:.3f} instead of {found.likeliest.fits[1].efficiency.fitted.value:.3f} at {HIT:.0%} cached.",
    ]


def _implied(found: Article) -> list[str]:
    best = found.likeliest
    low, high = best.implied or (0.0, 0.0)
    price_hit = iso_line(found.price)[0][3]
    rows = [
        (
            f"{h.efficiency:.2f}",
            "none needed" if h.hit is None else f"{h.hit:.1%}",
            "" if h.revenue is None else f"{h.revenue:,.0f}",
        )
        for h in found.implied
    ]
    return [
        (
            f"{best.name}, for each efficiency the cached share at which it fits both rates best, and what a month of one server would then "
            f"earn at {found.price.uncached_input:g} / {found.price.cached_input:g} CNY:"
        ),
        "",
        *table(("efficiency", "cached share", "CNY a month"), rows),
        "",
        (
            f"Within {TOLERANCE:.0%} of both rates at {PLAUSIBLE.low:g} to {PLAUSIBLE.high:g}: **{low:.1%} to {high:.1%}**. The stated revenue implies "
            f"{'no share' if price_hit is None else f'{price_hit:.2%}'} by price alone; {HIT:.0%} asks for an efficiency of {best.fits[1].efficiency.fitted.value:.3f}. The "
            "vendor's own figure of December 2025 for DeepSeek-V3 on this card, about 0.3, would need fewer hits and earn more."
        ),
        "",
        (
            f"The agent mix of about {MIXED:,.0f} tokens/s is a mean prompt of about {found.context:,.0f} tokens, if the time of a token is linear in "
            "the prompt's length; the agent sessions in the stored traces have a mean of 122,379, 96 % of it cached within a session."
        ),
    ]


def _weights(found: Article) -> list[str]:
    rows = [
        (c.name, w.dtype, f"{w.nbytes / 1e9:,.0f}", _servers(w.prefill_servers), _servers(w.decode_servers))
        for c in found.findings.candidates
        for w in c.weights
    ]
    return [
        (
            f"A prefill server has {found.findings.prefill_memory / 1e9:,.0f} GB, the decode server {found.findings.decode_memory / 1e9:,.0f} GB; "
            "nothing but weights is counted, and no scales."
        ),
        "",
        *table(("model", "weights", "GB", "prefill servers of an instance, at least", "decode servers"), rows),
    ]


def _network(found: Article) -> list[str]:
    claim = found.findings.claim
    rows: list[tuple[Cell, ...]] = [
        (c.name, layout.dtype, f"{t.request_bytes / t.tokens:,.0f}", f"{t.tokens:,}", f"{t.egress / 1e9:.2f}", f"{t.ingress / 1e9:.1f}",
         f"{t.line_load:.1%}" + (" **impossible**" if t.line_load > 1.0 else ""), interval(t.payload_load, ".0%"),
         f"{t.request_bytes / 1e9:.2f}", f"{t.one_nic_s * 1e3:,.0f} / {t.all_nics_s * 1e3:,.1f}")
        for c in found.findings.candidates
        for layout in c.layouts
        for t in layout.traffic
    ]  # fmt: skip
    head = (
        "model", "KV", "bytes of a token", "prompt", "GB/s of a prefill server", "GB/s into decode", "of its line rate",
        "of what payload reaches", "GB of a request", f"ms on 1 / {claim.nics} NICs",
    )  # fmt: skip
    return [
        (
            "Bytes of a token come from the layout as SGLang keeps it (packed records with scales for sparse attention in FP8; the index keys stay "
            "in FP8 where the latents are BF16; recurrent states are shared out over the prompt). GLM-4.6 and 4.7 keep what GLM-4.5 does, GLM-5.1 what GLM-5 "
            "does, 5.3 is taken to keep what 5.2 does. DeepSeek-V4 and MiMo-V2 have no layout preset and are not here."
        ),
        "",
        *table(head, rows),
        "",
        (
            f"Mean loads. {claim.prefill_servers * claim.nics} prefill NICs send into {claim.nics * claim.decode_servers} of decode, {found.findings.incast:g} to 1: "
            "what hurts is a burst, or a request whose KV lies on one card and goes through one NIC ([flow control](flow.md))."
        ),
    ]


def _memory(found: Article) -> list[str]:
    rows: list[tuple[Cell, ...]] = []
    for each in (found.findings, *found.decodes):
        best = next(c for c in each.candidates if c.key == found.likeliest.key)
        name = found.catalogue.accelerators[each.claim.decode].name
        for (dtype, room), weights in zip(best.room, best.weights, strict=True):
            rows += [
                (f"{weights.decode_servers} x 8 {name}", dtype, f"{room / 1e9:,.0f}", f"{t.tokens:,}", f"{t.requests_per_s:.1f}",
                 interval(t.residents, ",.0f"), interval(t.resident_bytes, ",.0f", 1e9), interval(bearable(t, room), ".0%"))
                for t in best.layouts[0].traffic
            ]  # fmt: skip
    head = (
        "decode", "weights", "room for KV, GB", "prompt", "requests/s claimed", "requests at a time", "their KV, GB",
        "of the claimed rate that fits",
    )  # fmt: skip
    fp8 = found.likeliest.layouts[0].traffic[0]
    part = Decimal(str(round(bearable(fp8, dict(found.likeliest.room)["FP8"]).value, 6)))
    return [
        (
            f"{found.likeliest.name}, FP8 KV, all {found.findings.claim.prefill_servers} prefill servers at the claimed rate. A request stays "
            "for its transfer and its output. Room is what weights leave, no reserve taken off; where they need more servers than one, "
            "that many are taken."
        ),
        "",
        *table(head, rows),
        "",
        (
            f"With the first of these, a prefill server's part of the {server_revenue(found):,.0f} CNY is {server_revenue(found) * part:,.0f}. This is "
            "memory alone."
        ),
    ]


def _ports(found: Article) -> list[str]:
    claim = found.findings.claim
    servers = claim.prefill_servers + claim.decode_servers
    rows = [
        (n, servers * n, "fits" if servers * n <= found.findings.ports_of else "does not fit")
        for n in (1, 2, 4, 8, 9, 10)
    ]
    return [
        f"{servers} servers x {claim.nics} NICs are **{found.findings.ports} of {found.findings.ports_of}** ports; {found.findings.ports_of - found.findings.ports} stay free.",
        "",
        *table(("NICs of a server", "ports", f"of {found.findings.ports_of}"), rows),
    ]


# -- small -------------------------------------------------------------------------------------------------------------


def bearable(traffic: Traffic, room: float) -> Interval:
    """Return what part of the claimed rate decode's memory allows: its room over the KV of all residents, at most 1."""
    held = exactly(max(room, 0.0)) / traffic.resident_bytes
    return Interval(min(held.low, 1.0), min(held.value, 1.0), min(held.high, 1.0))


def _servers(count: int) -> str:
    return "1" if count == 1 else f"{count}: does not fit one"
