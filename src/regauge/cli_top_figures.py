"""The lines of `regauge top` that are made of metrics: latencies, paths, planes, receipts, trouble; of the newest look and an earlier one. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from regauge import rates
from regauge.cli_top import plain
from regauge.cli_top_text import duration, per_second, size
from regauge.percentiles import percentile
from regauge.rates import Sample
from regauge.serve.debug import Live, Series

QUANTILES: Final = (0.5, 0.9, 0.99)
_LATENCIES: Final = (
    ("first token", "regauge_time_to_first_token_seconds"),
    ("per output token", "regauge_time_per_output_token_seconds"),
    ("token to token", "regauge_inter_token_seconds"),
)
_TROUBLE: Final = (
    ("regauge_off_plane_bytes", "bytes of KV off the compute plane"),
    ("regauge_receipts_troubled", "receipts in trouble"),
    ("regauge_receipts_refused_total", "receipts refused"),
    ("regauge_retries_total", "answers begun again"),
    ("regauge_resumed_answers_total", "answers gone on elsewhere"),
    ("regauge_client_faults_total", "connections ended for the client's fault"),
)
"""Beside what each worker says of its transfers."""


def figures(now: Live, before: Live | None) -> Iterator[RenderableType]:
    """Yield the lines; of what has come since `before`, or, without it, since the gateway began."""
    since = (
        f"of the last {now.unix_s - before.unix_s:.0f} s"
        if before is not None and now.unix_s > before.unix_s
        else "since the gateway began"
    )
    yield _latencies(now, before, since)
    yield from _paths(now, before, since)
    yield from _planes(now, before)
    yield _receipts(now)
    yield from _trouble(now)


def all_of(live: Live | None, name: str, **labels: str) -> list[Series]:
    """Return the series of a name that have these labels."""
    found = live.metrics.get(name, []) if live is not None else []
    return [one for one in found if labels.items() <= one.labels.items()]


def total(live: Live | None, name: str, **labels: str) -> float:
    """Return their sum."""
    return sum(one.value for one in all_of(live, name, **labels))


def _latencies(now: Live, before: Live | None, since: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"latency {since}")
    for q in QUANTILES:
        table.add_column(f"P{100 * q:.0f}", justify="right")
    for title, name in _LATENCIES:
        counts = [_buckets(look, name) for look in (before, now)]
        table.add_row(title, *("-" if (found := percentile(q, *counts)) is None else seconds(found) for q in QUANTILES))
    return table


def _buckets(live: Live | None, name: str) -> dict[float, float]:
    found: dict[float, float] = {}
    for one in all_of(live, f"{name}_bucket"):
        try:
            bound = float(one.labels.get("le", ""))
        except ValueError:  # the server's word for it
            continue
        if not math.isnan(bound):
            found[bound] = found.get(bound, 0.0) + one.value
    return found


def _paths(now: Live, before: Live | None, since: str) -> Iterator[Text]:
    for one in all_of(now, "regauge_transfer_bytes_count"):
        if not one.value:
            continue
        count, nbytes, length = (
            total(now, name, **one.labels) - total(before, name, **one.labels)
            for name in ("regauge_transfer_bytes_count", "regauge_transfer_bytes_sum", "regauge_transfer_seconds_sum")
        )
        way = f"{plain(one.labels.get('path', ''))}, {plain(one.labels.get('mode', ''))}"
        line = Text.assemble(
            (way, "bold"),
            f"  {_landing(now, before, one.labels.get('path', ''))}  {count:.0f} transfers {since}, {size(nbytes)}",
        )
        if count > 0:
            line.append(f", {seconds(length / count)} each")
        yield line.append(
            f"  {one.value:.0f} in all, {size(total(now, 'regauge_transfer_bytes_sum', **one.labels))}", "dim"
        )


def _landing(now: Live, before: Live | None, path: str) -> str:
    """Return the rate at which KV lands by a path: of each worker bytes and seconds of the same pairs of its answers."""
    found = []
    for one in all_of(now, "regauge_kv_landed_bytes_total", path=path):
        worker = one.labels.get("worker", "")
        samples = [
            Sample(int(total(look, "regauge_kv_landed_bytes_total", path=path, worker=worker)), total(look, "regauge_worker_observed_seconds_total", worker=worker))
            for look in (before, now)
        ]  # fmt: skip
        found.append(None if before is None else rates.rate(*samples))
    known = [rate for rate in found if rate is not None]
    return per_second(sum(known) if known else None)


def _planes(now: Live, before: Live | None) -> Iterator[Text]:
    """Yield a line for each direction of each interface, with its load of the line's rate."""
    for one in all_of(now, "regauge_plane_bytes_total"):
        where = {name: one.labels.get(name, "") for name in ("host", "plane", "interface")}
        was = all_of(before, "regauge_plane_bytes_total", **one.labels)
        after, then = (
            Sample(int(nbytes), total(look, "regauge_plane_observed_seconds_total", **where))
            for nbytes, look in ((one.value, now), (was[0].value if was else 0.0, before))
        )
        rate = rates.rate(then, after) if was else None
        speed = total(now, "regauge_plane_speed_bytes_per_second", **where)
        named = "  ".join(plain(word) for word in (*where.values(), one.labels.get("direction", "")))
        line = Text.assemble((f"{named}  ", ""), f"{per_second(rate)}")
        if speed > 0:
            load = "" if rate is None else f" = {rate / speed:.1%}"
            line.append(f" of {size(speed)}/s{load}", "yellow" if rate is not None and rate > 0.8 * speed else "")
        yield line.append(f"  {size(one.value)} in all", "dim")


def _receipts(now: Live) -> Text:
    return Text(f"{total(now, 'regauge_receipts_total'):.0f} receipts handed over", "dim")


def _trouble(now: Live) -> Iterator[Text]:
    for name, what in _TROUBLE:
        for one in all_of(now, name):
            if one.value:
                where = ", ".join(plain(value) for value in one.labels.values())
                yield Text(f"{one.value:.0f} {what}" + (f": {where}" if where else ""), "yellow")


def seconds(value: float) -> str:
    """Return seconds, in milliseconds below one."""
    return (
        f"{1e3 * value:.{1 if value < 0.1 else 0}f} ms"
        if value < 1
        else duration(value)
        if value >= 60
        else f"{value:.2f} s"
    )
