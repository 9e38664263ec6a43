"""What `regauge sim` shows at the end: one case as a list of figures, several as a table. All of it is headed "simulated"."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from math import isfinite, nan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from regauge.sim.confidence import Estimate
    from regauge.sim.results import Report

WIDTH = 200
"""More than any table is wide: what does not fit a terminal is wrapped by it, not cut by us."""
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def show(report: Report, width: int = WIDTH) -> str:
    """Return the report as text."""
    from rich.console import Console

    console = Console(file=StringIO(), width=width, no_color=True)
    console.print(f"simulated: {subject(report)}", highlight=False, markup=False)
    for table in _tables(report):
        console.print(table)
    if report.scenario.run.seeds > 1:
        console.print(
            f"x ± y: mean of {report.scenario.run.seeds} seeds, and half of its 95 % interval (Student's t)",
            highlight=False,
        )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    out = console.file
    assert isinstance(out, StringIO)  # noqa: S101
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def subject(report: Report) -> str:
    """Return what was simulated, in a line."""
    scenario = report.scenario
    prefill, decode = (
        f"{pool.servers} x {pool.device or role}"
        for role, pool in (("prefill", scenario.prefill), ("decode", scenario.decode))
    )
    return (
        f"{prefill} to {decode}, {scenario.model.name}; {report.trace['name']}, {report.trace['requests']:,} requests"
    )


def _tables(report: Report) -> list[Table]:
    if len(report.pooled) == 1:
        return _one(report)
    return [_many(report)]


def _one(report: Report) -> list[Table]:
    found = report.pooled[0].figures
    times = _table("", "mean", "P50", "P90", "P99")
    for what, name, unit, scale in (("TTFT", "ttft", "s", 1.0), ("TPOT", "tpot", "ms", 1e3)):
        times.add_row(f"{what}, {unit}", *(_figure(found.get(f"{name}_{which}"), scale) for which in _SPREAD))
    rest = _table("", "")
    slo, busiest = report.scenario.slo, report.runs[0].summary.busiest
    rest.add_row(
        "goodput",
        f"{_percent(found, 'goodput')} of the requests, {_figure(found.get('goodput_per_s'))} a second, within TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s * 1e3:g} ms",
    )
    rest.add_row(
        "served", f"{_figure(found.get('requests_per_s'))} requests and {_figure(found.get('output_tokens_per_s'))} output tokens a second"
    )  # fmt: skip
    rest.add_row("prefix cache", f"{_percent(found, 'hit')} of the prompt tokens")
    rest.add_row("KV moved", _size(found.get("nbytes")))
    rest.add_row("busy", ", ".join(_busy(found)))
    rest.add_row("busiest", f"{busiest[0]}, {busiest[1]:.0%}")
    rest.add_row("not served", _refused(report))
    return [times, rest]


def _busy(found: Mapping[str, Estimate]) -> list[str]:
    words = {"prefill_busy": "prefill", "decode_busy": "decode", "decode_nics": "NICs of decode"}
    return [f"{word} {_percent(found, name)}" for name, word in words.items() if name in found]


def _refused(report: Report) -> str:
    """Requests of all seeds that were not served, the router's reasons with them."""
    outcomes: dict[str, int] = {}
    reasons: dict[str, int] = {}
    for run in report.runs:
        for name, count in run.summary.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
        for name, count in run.events.items():
            if name not in ("placed", "events"):
                reasons[name] = reasons.get(name, 0) + count
    text = ", ".join(f"{name} {count:,}" for name, count in outcomes.items() if name != "complete")
    told = ", ".join(f"{name} {count:,}" for name, count in reasons.items() if count)
    return text + (f" (the router, warm requests too: {told})" if told else "")


def _many(report: Report) -> Table:
    table = _table(
        "", "TTFT mean, s", "P90, s", "P99, s", "TPOT, ms", "goodput, %", "hits, %", "KV moved", "NICs, %", "refused"
    )  # fmt: skip
    for each in report.pooled:
        found = each.figures
        refused = sum(found[name].mean for name in ("limited", "refused", "failed"))
        table.add_row(
            each.case,
            *(_figure(found.get(f"ttft_{which}")) for which in ("mean", "p90", "p99")),
            _figure(found.get("tpot_mean"), 1e3),
            *(_figure(found.get(name), 100) for name in ("goodput", "hit")),
            _size(found.get("nbytes")),
            _figure(found.get("decode_nics"), 100),
            f"{refused:,.0f}",
        )
    return table


_SPREAD = ("mean", "p50", "p90", "p99")


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if any(columns[1:]) else None, pad_edge=False, show_header=any(columns))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or not any(columns) else "right", no_wrap=True)
    return table


def _figure(value: Estimate | None, scale: float = 1.0) -> str:
    if value is None:
        return "-"
    mean, half = value.mean * scale, value.half * scale
    places = next((places for places, least in enumerate((1000, 10, 0.1, 0.01)) if abs(mean) >= least or mean == 0), 4)
    return f"{mean:,.{places}f}" + (f" ± {half:,.{places}f}" if isfinite(half) else "")


def _percent(found: Mapping[str, Estimate], name: str) -> str:
    return f"{_figure(found.get(name), 100)} %"


def _size(value: Estimate | None) -> str:
    mean = nan if value is None else value.mean
    for least, unit in SIZES:
        if mean >= least:
            return f"{mean / least:,.2f} {unit}"
    return "-" if value is None else f"{mean:.0f} B"
