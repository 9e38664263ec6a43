"""The figures of `incast.py` as one SVG: a column per mix, P99 over the ideal above, deadline misses below."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, GAP, LEFT, TOP = 260, 180, 46, 56, 56
COLOURS = {
    "regauge": "#c2410c", "regauge, late last": "#f59e0b", "no control, drops": "#6b7280", "no control, pauses": "#9ca3af",
    "FIFO per peer, pauses": "#2563eb", "fair share with ECN": "#059669", "ideal": "#111827",
}  # fmt: skip
Row = Mapping[str, object]


def number(row: Row, field: str) -> float:
    """Return a figure of a row."""
    return float(str(row[field]))


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#374151">{escape(words)}</text>'
    )


def panel(rows: Sequence[Row], field: str, x: float, y: float, low: float, high: float) -> list[str]:
    """One axes' worth: loads from left to right, `field` upwards, logarithmic if `low` is above 0."""
    loads = list(dict.fromkeys(str(r["load"]) for r in rows))

    def up(value: float) -> float:
        log = math.log(max(value, low) / low) / math.log(high / low) if low > 0 else 0.0
        part = log if low > 0 else (value - low) / (high - low)
        return y + HEIGHT - HEIGHT * min(max(part, 0.0), 1.0)

    out = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff" stroke="#9ca3af"/>']
    ticks = [v for v in (1, 2, 5, 10, 20, 50, 100) if low <= v <= high] if low > 0 else [high * i / 4 for i in range(5)]
    for tick in ticks:
        out.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" stroke="#e5e7eb"/>')
        out.append(text(x - 6, up(tick) + 4, f"{tick:g}x" if low > 0 else f"{tick:.0%}", anchor="end"))
    across = {load: x + WIDTH * (i + 0.5) / len(loads) for i, load in enumerate(loads)}
    out += [text(at, y + HEIGHT + 15, load, size=10) for load, at in across.items()]
    for name, colour in COLOURS.items():
        points = [(across[str(r["load"])], up(number(r, field))) for r in rows if r["control"] == name]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        dash = ' stroke-dasharray="4 3"' if name == "ideal" else ""
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        out += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"/>' for px, py in points]
    return out


def draw(rows: Sequence[Row]) -> str:
    """Return the SVG of rows as `incast.py` makes them."""
    mixes = list(dict.fromkeys(str(r["mix"]) for r in rows))
    shown = [r for r in rows if r["control"] in COLOURS]
    most = max(number(r, "P99") for r in shown)
    misses = math.ceil(10 * max(number(r, "miss") for r in shown)) / 10 or 0.1
    out: list[str] = []
    for i, mix in enumerate(mixes):
        own = [r for r in shown if r["mix"] == mix]
        x = LEFT + i * (WIDTH + GAP)
        out.append(text(x + WIDTH / 2, TOP - 8, mix, size=13))
        out += panel(own, "P99", x, TOP, 0.7, max(most * 1.1, 2.0))
        out += panel(own, "miss", x, TOP + HEIGHT + GAP, 0.0, misses)
    middle = TOP + HEIGHT / 2
    for at, words in ((middle, "P99 / ideal"), (middle + HEIGHT + GAP, "deadlines missed")):
        out.append(f'<g transform="translate(14,{at}) rotate(-90)">{text(0, 0, words)}</g>')
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 128
        out.append(f'<rect x="{x}" y="12" width="12" height="4" fill="{colour}"/>')
        out.append(text(x + 16, 18, name, anchor="start", size=10))
    width, height = LEFT + len(mixes) * (WIDTH + GAP), TOP + 2 * HEIGHT + GAP + 44
    out.append(text(LEFT, height - 8, "load of the receiver's NIC; simulated, 12 senders", anchor="start"))
    body = "\n".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(width, LEFT + 7 * 128)} {height}" '
        f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="#f9fafb"/>\n{body}\n</svg>\n'
    )
