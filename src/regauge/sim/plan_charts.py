"""Pictures of plans and claims, PNG or SVG, the same bytes for the same figures: revenue over price and mix, efficiency by model, loads, what-if.

Colours are Okabe and Ito's, which colour-blind people tell apart; markers and dashes differ too, for prints without colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from regauge.sim.claims import PLAUSIBLE, Findings
from regauge.sim.pictures import saved
from regauge.sim.plan_result import Plan
from regauge.sim.revenue import MILLION, tokens

BLUE, RED, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, slots=True)
class Marked:
    """A point of the surface that somebody claims or lists."""

    label: str
    hit: float
    uncached: float
    """Price of a million uncached input tokens."""


def revenue_surface(
    path: Path, tokens_per_s: Decimal, *, ratio: float, stated: float, currency: str, marked: Sequence[Marked],
    prices: Mapping[str, float],
) -> None:  # fmt: skip
    """Draw a month's revenue over hit share and uncached price, cached tokens costing `ratio` of it, with lines of equal revenue.

    `stated`: the revenue whose line is drawn bold. `prices`: list prices as dashed lines. Raises ConfigError as `saved`.
    """
    top = max([*prices.values(), *(m.uncached for m in marked)]) * 1.5
    hits, price = np.linspace(0.0, 1.0, 41), np.linspace(0.0, top, 49)
    scale = float(tokens(tokens_per_s) / MILLION)
    earned = scale * price[:, None] * (hits * ratio + 1.0 - hits)[None, :]
    with saved(path, (7.2, 4.8)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False)
        shade = axes.contourf(hits, price, earned / 1e3, levels=30, cmap="cividis")
        figure.colorbar(shade, ax=axes, label=f"thousand {currency} a month", pad=0.02, format="{x:,.0f}")
        levels = [x for x in _round_levels(float(earned.max()) / 1e3) if abs(x * 1e3 / stated - 1.0) > 0.15]
        for drawn, width in ((levels, 0.8), ([stated / 1e3], 2.6)):
            lines = axes.contour(hits, price, earned / 1e3, levels=drawn, colors="white", linewidths=width)
            at = [(0.5, x * 1e3 / scale / (0.5 * ratio + 0.5)) for x in drawn]
            axes.clabel(lines, fmt=lambda value: f"{value:,.0f}", fontsize=8, manual=[p for p in at if p[1] < top])
        for label, value in prices.items():
            axes.axhline(value, color="white", linewidth=0.8, linestyle=(0, (4, 3)))
            axes.annotate(
                f"{label}: {value:g}",
                (0.01, value),
                xytext=(0, 3),
                textcoords="offset points",
                color="white",
                fontsize=8,
                bbox={"facecolor": "#00224e", "edgecolor": "none", "alpha": 0.7, "pad": 1.5},
            )
        for number, point in enumerate(marked):
            axes.plot(
                point.hit,
                point.uncached,
                marker=MARKERS[number],
                color=RED,
                markersize=9,
                markeredgecolor="white",
                linestyle="",
                label=point.label,
            )
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(0.0, top)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xlabel("input tokens billed as cached")
        axes.set_ylabel(f"{currency} per million uncached input tokens (cached: {ratio:.0%} of it)")
        axes.set_title(
            f"Modelled: revenue of {float(tokens_per_s):,.1f} input tokens/s, a month of full load",
            loc="left",
            fontsize=10,
        )
        axes.legend(loc="upper right", fontsize=8, framealpha=0.95)


def efficiencies(path: Path, found: Findings) -> None:
    """Draw what part of the peak rate each candidate model asks for at each claimed rate. Raises ConfigError as `saved`."""
    claim = found.claim
    with saved(path, (7.2, 0.55 * len(found.candidates) + 1.6)) as figure:
        axes = figure.subplots()
        axes.axvspan(PLAUSIBLE.low, PLAUSIBLE.high, color="#eeeeee", zorder=0)
        axes.annotate(
            "plausible", ((PLAUSIBLE.low * PLAUSIBLE.high) ** 0.5, -0.75), ha="center", fontsize=8, color="#444444"
        )
        axes.axvline(1.0, color="#222222", linewidth=1.2)
        axes.annotate("the peak", (1.0, -0.75), xytext=(4, 0), textcoords="offset points", fontsize=8, color="#222222")
        for place, candidate in enumerate(found.candidates):
            for number, fit in enumerate(candidate.fits):
                at, colour = fit.efficiency.at, (RED, BLUE, GREEN)[number % 3]
                y = place + (number - (len(candidate.fits) - 1) / 2) * 0.3
                axes.plot(at, [y] * len(at), color=colour, linewidth=1.4)
                for k, value in enumerate(at):
                    label = f"{claim.points[k].tokens:,} tokens, {fit.hit:.0%} cached" if not place else None
                    axes.plot(value, y, marker=MARKERS[k], color=colour, markersize=6, linestyle="", label=label)
        axes.set_xscale("log")
        axes.set_ylim(len(found.candidates) - 0.4, -1.1)
        axes.set_yticks(range(len(found.candidates)), [c.name for c in found.candidates])
        axes.set_xticks([0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0], ["5%", "10%", "20%", "50%", "100%", "200%", "500%"])
        axes.minorticks_off()
        axes.set_xlabel("part of the peak rate that the claimed rate asks for (logarithmic)")
        axes.set_title(f"Modelled: {claim.name}, by model", loc="left", fontsize=10)
        figure.legend(loc="outside lower center", ncols=len(claim.hits), fontsize=8)


def loads(path: Path, plan: Plan) -> None:
    """Draw what each constraint asks for in servers, on both sides, with its range. Raises ConfigError as `saved`."""
    rows = [(pool, need) for pool in (plan.prefill, plan.decode) for need in pool.needs]
    most = 2.0 * max(max(min(need.exact, need.servers.value), pool.servers) for pool, need in rows)
    with saved(path, (7.2, 0.36 * len(rows) + 1.7)) as figure:
        axes = figure.subplots()
        axes.grid(visible=False, axis="y")
        seen: set[str] = set()

        def once(label: str) -> str | None:
            if label in seen:
                return None
            seen.add(label)
            return label

        for place, (pool, need) in enumerate(rows):
            asked, over = min(need.exact, most), need.exact > pool.servers
            axes.barh(
                place, asked, color=RED if over else BLUE, height=0.6, hatch="//" if over else None, edgecolor="white",
                label=once("more than there are" if over else "asked for"),
            )  # fmt: skip
            ends = [min(x, most) for x in (need.servers.low, need.servers.high)]
            axes.plot(ends, [place, place], color="#222222", linewidth=1.2, label=once("range, whole instances"))
            there = [pool.servers, pool.servers]
            axes.plot(there, [place - 0.4, place + 0.4], color="#222222", linewidth=2.4, label=once("servers there"))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0.0)
        axes.set_yticks(range(len(rows)), [f"{pool.side}: {need.what}" for pool, need in rows])
        axes.set_xlabel("servers")
        axes.set_title(f"Modelled: {plan.ask.model}, what each constraint asks for", loc="left", fontsize=10)
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)


def what_if(path: Path, plan: Plan) -> None:
    """Draw servers, and the rate that they bear, as planned and with one thing changed. Raises ConfigError as `saved`."""
    rows = [("as planned", plan.prefill.servers, plan.decode.servers, plan.most.value, plan.fits)]
    rows += [(w.change, w.prefill, w.decode, w.most, w.note.startswith("fits")) for w in plan.what_if]
    with saved(path, (8.4, 0.34 * len(rows) + 1.8)) as figure:
        servers, rate = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1))
        for axes in (servers, rate):
            axes.grid(visible=False, axis="y")
        for place, (_, prefill, decode, most, fits) in enumerate(rows):
            if not prefill and not decode:
                for axes in (servers, rate):
                    _beside(axes, 0.0, place, "cannot be")
                continue
            first = not place
            servers.barh(place, prefill, color=BLUE, height=0.65, edgecolor="white", label="prefill" if first else None)
            servers.barh(
                place, decode, left=prefill, color=ORANGE, height=0.65, hatch="..", edgecolor="white",
                label="decode" if first else None,
            )  # fmt: skip
            _beside(servers, prefill + decode, place, f"{prefill} + {decode}")
            rate.barh(
                place, most, color=GREEN if fits else RED, height=0.65, hatch=None if fits else "//", edgecolor="white"
            )
            _beside(rate, most, place, f"{most:.3g}" + ("" if fits else ", not met"))
        rate.axvline(plan.mix.rate, color="#222222", linewidth=1.2, linestyle=(0, (4, 2)), label="asked for")
        servers.set_ylim(len(rows) - 0.4, -0.6)
        servers.set_yticks(range(len(rows)), [row[0] for row in rows])
        for axes, label in ((servers, "servers"), (rate, "requests/s that these servers bear")):
            axes.set_xlim(0.0, axes.get_xlim()[1] * 1.25)
            axes.set_xlabel(label)
        figure.suptitle(f"Modelled: {plan.ask.model}, one thing changed at a time", fontsize=10)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8)


def _beside(axes: Any, x: float, place: int, text: str) -> None:
    axes.annotate(text, (x, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6})  # fmt: skip


def _round_levels(most: float) -> list[float]:
    """Five or so round numbers below the greatest."""
    step = 10.0 ** np.floor(np.log10(most / 2.0))
    step = next(step * k for k in (0.5, 1, 2, 2.5, 5, 10) if most / (step * k) <= 7.0)
    return [float(x) for x in np.arange(step, most, step)]
