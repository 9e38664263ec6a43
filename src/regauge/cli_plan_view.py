"""What `regauge plan` shows in a terminal. Intervals are written `likeliest (lowest to highest)`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from regauge.sim.article_plan import Planned
from regauge.sim.ask import NETWORK_MOST
from regauge.sim.devices import Catalogue, Figure
from regauge.sim.model import Interval
from regauge.sim.money import Money
from regauge.sim.plan_result import ENDLESS, Need, Plan, PoolPlan
from regauge.sim.plan_run import Simulated
from regauge.sim.words import seconds

Format = Callable[[float], str]
_HIT_OFF = 0.02
WIDTH = 140
"""Characters of a line where the output is no terminal."""


def show(plan: Plan, money: Money | None, run: Simulated | None = None, written: Sequence[Path] = ()) -> None:
    """Print a plan."""
    console = _console()
    ask = plan.ask
    console.print(
        Text.assemble(
            (f"{ask.model}: ", "bold"), f"{plan.prefill.servers} x {plan.prefill.cards} {plan.prefill.name} prefill, ",
            f"{plan.decode.servers} x {plan.decode.cards} {plan.decode.name} decode   ",
            ("fits", "bold green") if plan.fits else ("does not fit", "bold red"), ("   modelled, not measured", "dim"),
        )
    )  # fmt: skip
    for line in plan.problems:
        console.print(Text(f"  {line}", style="red"))
    for line in plan.remedies:
        console.print(Text(f"  would help: {line}"))
    parts: list[tuple[str, RenderableType]] = [
        ("Workload", _workload(plan)),
        ("Servers", _servers(plan)),
        ("What binds", _needs(plan)),
        ("Memory of an instance", _memory(plan)),
    ]
    parts += [("Times", _times(plan, run)), ("Network", _network(plan))]
    if plan.what_if:
        parts.append(("What if", _what_if(plan)))
    if money is not None:
        parts.append(("Money", _money(money)))
    parts.append(("Assumed", _assumed(plan)))
    for title, table in parts:
        console.print()
        console.print(Text(title, style="bold"))
        console.print(table)
    if run is not None:
        console.print(Text(_said(plan, run)))
    for path in written:
        console.print(f"written: {path}")


def _said(plan: Plan, run: Simulated) -> str:
    """What a simulated run adds in words."""
    text = (
        f"SIMULATED: {run.requests} requests, real router, fluid network: {run.complete:.1%} complete, prefill busy {run.prefill_busy:.1%}, "
        f"{run.hit:.1%} cached"
    )
    if plan.mix.hit - run.hit > _HIT_OFF:
        text += f" where the plan counts {plan.mix.hit:.1%}, as of one cache of all servers: the servers' own hold less; --hit {run.hit:.2f} plans for that"
    return text


def show_article(summary: Sequence[str], planned: Sequence[Planned], written: Sequence[Path]) -> None:
    """Print the summary of the published deployment, and what the planner says of it."""
    console = _console()
    console.print(Text.assemble(("The published deployment   ", "bold"), ("modelled, not measured", "dim")))
    for line in summary:
        console.print(Text("  * " + line.replace("**", "")))
    table = _table("prompt", "decode", "servers", "claimed", "within the SLO", "prefill is bound by", "decode by")
    for each in planned:
        plan = each.plan
        table.add_row(
            f"{each.tokens:,}", each.what, f"{plan.prefill.servers} + {plan.decode.servers}", _per_s(each.claimed),
            _range(plan.most, _per_s), plan.prefill.binds, plan.decode.binds,
        )  # fmt: skip
    console.print()
    console.print(Text("What the planner says", style="bold"))
    console.print(table)
    for path in written:
        console.print(f"written: {path}")
    if not written:
        console.print("--markdown FILE writes the whole report, with the revenue surface")


def show_devices(catalogue: Catalogue) -> None:
    """Print the catalogue: every figure with its source."""
    console = _console()
    for kind in catalogue.__struct_fields__:
        table = _table("device", "figure", "value", "source", "date", "note")
        for key, device in sorted(getattr(catalogue, kind).items()):
            name = key
            for field in device.__struct_fields__:
                if isinstance(figure := getattr(device, field), Figure):
                    table.add_row(name, field, _figure(figure), figure.source, figure.date, figure.note)
                    name = ""
        console.print(Text(kind, style="bold"))
        console.print(table)


def _figure(figure: Figure) -> str:
    low, high = (figure.value if x is None else x for x in (figure.low, figure.high))
    unit = f" {figure.currency}" if figure.currency else ""
    return f"{figure.value:g}{unit}" + (f" ({low:g} to {high:g})" if low != high else "")


# -- sections ----------------------------------------------------------------------------------------------------------


def _workload(plan: Plan) -> RenderableType:
    mix, slo = plan.mix, plan.ask.slo
    return _pairs(
        ("requests", f"{mix.rate:.4g}/s   {mix.name}"),
        ("prompt", f"{mix.prompt:,.0f} tokens, P99 {mix.prompt_p99:,.0f}; {mix.hit:.1%} cached, {mix.uncached:,.0f} computed"),
        ("answer", f"{mix.output:,.0f} tokens"),
        ("asked", f"first token within {seconds(slo.ttft_s)}, a token each {seconds(slo.tpot_s)}, for {slo.share:.0%} of the requests"),
    )  # fmt: skip


def _servers(plan: Plan) -> Table:
    table = _table("", "servers", "span", "NICs", "load", "busy", "binds")
    for pool in (plan.prefill, plan.decode):
        table.add_row(
            pool.side, f"{pool.servers}", f"{pool.span}", _nics(plan, pool), _range(pool.load, _percent),
            _range(pool.busy, _percent), f"{pool.binds}, {pool.margin:.2g} x the next",
        )  # fmt: skip
    table.add_row("P:D", f"{plan.ratio:.3g}", "", "", "", "", plan.idle)
    offload = plan.offload
    said = f"{offload.tokens:,.0f} tokens" if offload.tokens else "none"
    table.add_row(
        "decode prefills", said, "", "", "", "", f"uncached, {offload.share:.0%} of the requests: {offload.why}"
    )
    return table


def _nics(plan: Plan, pool: PoolPlan) -> str:
    """NICs of a server, and how many would bear the mean load."""
    load = plan.network.egress_load if pool.side == "prefill" else plan.network.ingress_load
    enough = max(ceil(pool.nics * load.high / NETWORK_MOST.value), 1)
    return f"{pool.nics} x {pool.nic}" + (f" ({enough} would do)" if enough < pool.nics else "")


def _needs(plan: Plan) -> Table:
    table = _table("", "constraint", "servers", "exactly", "why")
    for pool in (plan.prefill, plan.decode):
        for place, need in enumerate(pool.needs):
            table.add_row(
                pool.side if not place else "", need.what, _range(need.servers, _count), _exact(need), need.why
            )
    return table


def _exact(need: Need) -> str:
    return "-" if need.exact >= ENDLESS else f"{need.exact:.2f}"


def _memory(plan: Plan) -> Table:
    table = _table("", "cards", "weights", "reserve", "room for KV", "KV in work", "99 % of the time under")
    for pool in (plan.prefill, plan.decode):
        memory = pool.memory
        table.add_row(
            pool.side, _gb(memory.capacity), _gb(memory.weights), _gb(memory.reserve), _gb(memory.room),
            _range(memory.resident, _gb), _range(memory.peak, _gb),
        )  # fmt: skip
    return table


def _times(plan: Plan, run: Simulated | None) -> Table:
    table = _table("", "mean", "P50", "P90", "P99", "within")
    for name, times in (("first token", plan.ttft), ("per token", plan.tpot)):
        columns = (times.mean, times.p50, times.p90, times.p99)
        table.add_row(name, *(_range(x, seconds) for x in columns), _range(times.met, _percent))
    if run is not None:
        for name, found in (("first token, simulated", run.ttft), ("per token, simulated", run.tpot)):
            table.add_row(
                name, *(seconds(x) for x in (found.mean, found.p50, found.p90, found.p99)), _percent(found.met)
            )
    table.add_row("goodput", _range(plan.goodput, _per_s), "", "", "", f"highest rate {_range(plan.most, _per_s)}")
    return table


def _network(plan: Plan) -> RenderableType:
    net = plan.network
    reasons = f": {', '.join(net.reasons)}" if net.reasons else ""
    rows = [
        ("path", f"{net.path}{reasons}"),
        ("KV of a token", f"{net.prefill_token_bytes:,.0f} B at prefill, {net.wire_token_bytes:,.0f} on the wire, {net.decode_token_bytes:,.0f} at decode"),
        ("of a request", f"{net.request_bytes / 1e9:.3g} GB cross: alone {_range(net.alone_s, seconds)}, at this load {_range(net.mean_s, seconds)}, P99 {_range(net.p99_s, seconds)}"),
        ("a prefill server", f"{_range(net.egress, _gbps)} out, {_range(net.egress_load, _percent)} of the payload rate"),
        ("a decode server", f"{_range(net.ingress, _gbps)} in, {_range(net.ingress_load, _percent)} of the payload rate, {_range(net.ingress_line_load, _percent)} of the line"),
        ("incast", f"{net.incast:.3g} : 1; one from every prefill server into one NIC: {_range(net.burst_s, seconds)}"),
        ("kernels", f"{_range(net.conversion_s, seconds)} a request, over {plan.prefill.cards * plan.prefill.span} cards; {net.conversion_source}"),
        ("ports", f"{net.ports} of {net.ports_of}, {net.switch}"),
    ]  # fmt: skip
    if net.inner.value:
        rows.append(("inside a prefill instance", f"{_range(net.inner, _gbps)} of activations between its servers"))
    return _pairs(*rows)


def _what_if(plan: Plan) -> Table:
    table = _table("change", "prefill", "decode", "first token", "per token", "most", "")
    for row in plan.what_if:
        if not row.prefill:
            table.add_row(row.change, "-", "-", "-", "-", "-", row.note)
            continue
        table.add_row(
            row.change,
            f"{row.prefill}",
            f"{row.decode}",
            seconds(row.ttft.value),
            seconds(row.tpot.value),
            _per_s(row.most),
            row.note,
        )
    return table


def _money(money: Money) -> RenderableType:
    unit = money.price.currency
    cost = money.cost_per_million
    rows = [
        ("price", f"{money.price.name}: {money.price.cached_input} / {money.price.uncached_input} / {money.price.output} {unit} a million cached, uncached, output"),
        ("a month sold whole", f"{money.revenue:,.0f} {unit}, {money.per_million:.4g} a million input tokens at {money.mix.hit:.1%} cached"),
        ("cost of a million input tokens", _range(cost, lambda x: f"{x:.3g}") + f" {unit}"),
        ("break-even", f"{_range(money.even.utilisation, _percent)} of the time at this rate" + ("; over 100%: never" if money.even.utilisation.high > 1.0 else "")),
    ]  # fmt: skip
    if money.note:
        rows.insert(1, ("rate", money.note))
    if money.bill.missing:
        rows.append(("a lower bound, without", "; ".join(money.bill.missing)))
    return _pairs(*rows)


def _assumed(plan: Plan) -> Table:
    table = _table("what", "value", "source")
    for each in plan.assumed:
        table.add_row(each.what, _range(each.value, lambda x: f"{x:g}"), each.source)
    if plan.fit is not None:
        off = ", ".join(
            f"{p.tokens:,} tokens {r:+.1%}" for p, r in zip(plan.ask.points, plan.fit.residuals, strict=True)
        )
        table.add_row(
            "prefill's efficiency, fitted", _range(plan.fit.fitted, lambda x: f"{x:.3f}"), f"rates missed by: {off}"
        )
    return table


# -- words and tables --------------------------------------------------------------------------------------------------


def _console() -> Console:
    """A terminal's width, and enough where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pairs(*rows: tuple[str, str]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _range(value: Interval, text: Format) -> str:
    likely, low, high = text(value.value), text(value.low), text(value.high)
    return likely if low == high else f"{likely} ({low} to {high})"


def _count(value: float) -> str:
    return "none" if value >= ENDLESS else f"{value:.0f}"


def _percent(value: float) -> str:
    return "over 1000%" if value > 10.0 else f"{100 * value:.3g}%"


def _per_s(value: float) -> str:
    return f"{value:.4g}/s"


def _gb(value: float) -> str:
    return f"{value / 1e9:,.0f} GB" if value >= 1e10 else f"{value / 1e9:.2g} GB"


def _gbps(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"
