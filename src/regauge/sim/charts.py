"""Pictures of runs: time to the first token by case, and one run over time. PNG or SVG, the same bytes for the same runs.

Colours are Okabe and Ito's, which colour-blind people tell apart; each line has a dash pattern and a marker of its own, too, for prints without colour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.sim import series
from regauge.sim.log import Log
from regauge.sim.pictures import saved

if TYPE_CHECKING:
    from collections.abc import Iterable

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 1, 1, 2)), (0, (2, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MOSTLY = 0.95
"""A run over time is drawn until so many requests are over, if the rest take as long again."""
MOST_LINES = 8
"""More than that nobody tells apart: the rest are left out, and the picture says so."""


def ttft_by_case(path: Path, logs: Mapping[str, Log], *, subject: str, slo_s: float | None = None) -> None:
    """Draw the distribution of times to the first token, a line for each case. Raises ConfigError as `saved`."""
    with saved(path, (7.2, 4.4)) as figure:
        axes = figure.subplots()
        shown = list(logs.items())[:MOST_LINES]
        for number, (case, log) in enumerate(shown):
            values = np.sort(log.ttft())
            if len(values):
                share = np.arange(1, len(values) + 1) / len(log)
                _line(axes, number, values, share, case)
        if slo_s is not None:
            axes.axvline(slo_s, color="#555555", linewidth=1)
            axes.annotate(
                f"SLO {slo_s:g} s ", (slo_s, 1.01), ha="right", va="top", color="#555555", fontsize=8, rotation=90,
                bbox={"color": "white", "pad": 1},
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(left=_least(log for _, log in shown))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("time to the first token, seconds (logarithmic)")
        axes.set_ylabel("part of all requests")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        left_out = f"; {len(logs) - len(shown)} more cases not shown" if len(logs) > len(shown) else ""
        _title(axes, subject + left_out)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right", fontsize=8, frameon=True, framealpha=0.9)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the decode workers together can take."""

    bytes_per_token: float
    nics_bytes_per_s: float
    tokens: int
    """Whose KV they have room for."""


def over_time(path: Path, log: Log, *, subject: str, limits: Limits) -> None:
    """Draw one run over time: requests waiting and computed; what decode receives; KV that it holds. Raises ConfigError as `saved`."""
    at, whole = series.span(log, share=MOSTLY), series.span(log)
    if len(log) and whole[-1] - whole[0] < 2 * (at[-1] - at[0]):
        at = whole
    elif len(log):  # sessions that think for hours
        subject += f", until {MOSTLY:.0%} of the requests are over"
    with saved(path, (7.2, 6.4)) as figure:
        queue, nics, held = figure.subplots(3, sharex=True)
        _steps(queue, 0, at, series.waiting(log, at), "wait")
        _steps(queue, 1, at, series.computing(log, at), "prompt is being computed")
        load, resident = series.inflow(log, at) / 1e9, series.resident(log, at) * limits.bytes_per_token / 1e9
        _steps(nics, 0, at[:-1], load, "all decode workers")
        busiest = _busiest(log)
        if busiest is not None:
            _steps(nics, 1, at[:-1], series.inflow(log, at, busiest) / 1e9, f"d{busiest}, which receives most")
        _steps(held, 0, at, resident, "room of the requests that have a slot")
        _limit(nics, load, limits.nics_bytes_per_s / 1e9, "GB/s", "all NICs")
        _limit(held, resident, limits.tokens * limits.bytes_per_token / 1e9, "GB", "room of all")
        for axes, label in ((queue, "requests"), (nics, "KV into decode, GB/s"), (held, "KV in decode, GB")):
            axes.set_ylabel(label, fontsize=9)
            axes.margins(x=0)
            top = axes.dataLim.ymax
            axes.set_ylim(0, 1.3 * top if 0 < top < inf else 1.0)  # room for the legend
            axes.legend(loc="upper left", fontsize=8, ncols=2)
        held.set_xlabel("simulated time, seconds")
        _title(queue, subject)


def _limit(axes: Any, values: series.Array, limit: float, unit: str, what: str) -> None:
    """Draw a limit where the values come near it, and name it where they do not."""
    near = values.max(initial=0.0) > 0.25 * limit
    if near:
        axes.axhline(limit, color="#555555", linewidth=1)
    axes.annotate(
        f"{what}: {limit:,.0f} {unit}", (1, limit) if near else (1, 1), ha="right", va="bottom" if near else "top",
        xycoords=axes.get_yaxis_transform() if near else "axes fraction", fontsize=8, color="#555555",
        xytext=(-4, 2 if near else -5), textcoords="offset points",
    )  # fmt: skip


def _title(axes: Any, subject: str) -> None:
    axes.set_title("\n".join(wrap(f"Simulated: {subject}", 94)), loc="left", fontsize=9)


def _busiest(log: Log) -> int | None:
    workers = sorted({int(worker) for worker in log.decode if worker >= 0})
    if len(workers) < 2:
        return None
    return max(workers, key=lambda worker: float(log.nbytes[log.decode == worker].sum()))


def _least(logs: Iterable[Log]) -> float:
    """Where the axis begins: below the least of the times that is not nothing."""
    least = [float(np.percentile(ttft, 0.5)) for log in logs if len(ttft := log.ttft())]
    return max(min(least, default=1e-2) * 0.8, 1e-4)


def _line(axes: Any, number: int, x: series.Array, y: series.Array, label: str) -> None:
    style = number % len(COLOURS)
    thin = np.unique(np.linspace(0, len(x) - 1, min(len(x), 200)).astype(int))
    axes.plot(
        x[thin], y[thin], color=COLOURS[style], linestyle=DASHES[style], linewidth=1.6, marker=MARKERS[style],
        markersize=4, markevery=max(1, len(thin) // 9), label=label, drawstyle="steps-post",
    )  # fmt: skip


def _steps(axes: Any, number: int, x: series.Array, y: series.Array, label: str) -> None:
    axes.plot(x, y, color=COLOURS[number], linestyle=DASHES[number], linewidth=1.3, label=label, drawstyle="steps-post")
