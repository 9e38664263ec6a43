"""Draws which bytes of one page go where, as SVG: source page to the left, target pages to the right.

Every cell is a byte range that is contiguous on both sides, drawn in memory order, with its byte offset in the page. Cells without a gap between
them cross as one copy. Long rows and pages are shortened. No scripts, no external fonts; colours suit a light and a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from regauge.layout.spec import Layout, format_layers
from regauge.plan.cells import MAX_DEALT, Array, Cell, Picture, page_cells
from regauge.plan.planner import Plan, compile
from regauge.plan.sample import roomy

CELL_W, CELL_H, LINE_H, GAP = 62, 30, 11, 4
"""`LINE_H` more where labels have a line for the dims."""
COLUMNS, ROWS = 8, 6
"""Most cells of a row, and rows of a panel, that are drawn."""
PAGES = 4
LEFT, GUTTER, OFFSET_W = 16, 150, 66
PANEL_W = OFFSET_W + (CELL_W + GAP) * (COLUMNS + 1)
LINKS = 7
"""Cells of each array that are joined to their place on the other side."""

Hue = Literal["array", "head", "token"]

_STYLE = """
svg{color-scheme:light dark;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.page{fill:#ffffff}.ink{fill:#1f2328}.dim{fill:#59636e}.frame{fill:none;stroke:#d0d7de}
.none{fill:none;stroke:#afb8c1;stroke-dasharray:3 3}.cell{stroke:#00000033}.on{fill:#14171a}
.line{fill:none;stroke-width:1.8;opacity:.75}.linked{stroke-width:2.5}
.off{fill:#59636e;stroke:#ffffff;stroke-width:5px;paint-order:stroke}
.h1{font-size:16px;font-weight:600}.h2{font-size:12px;font-weight:600}.t{font-size:11px}.s{font-size:9.5px}
@media (prefers-color-scheme:dark){.page{fill:#0d1117}.ink{fill:#e6edf3}.dim{fill:#9198a1}.frame{stroke:#3d444d}
.none{stroke:#59636e}.cell{stroke:#ffffff40}.off{fill:#9198a1;stroke:#0d1117}}
"""


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[Cell | None, ...]
    """None: a place that other source pages fill."""
    skipped: int
    """Cells left out before the last ones."""
    tail: int
    """How many cells follow the gap."""


def svg(prefill: Layout, decode: Layout) -> str:
    """Draw one source page of every pair of state groups. Raises Refused where no path exists."""
    return draw(compile(roomy(prefill, MAX_DEALT), roomy(decode, MAX_DEALT)))


def draw(plan: Plan) -> str:
    """Draw one source page of every pair of groups of a plan."""
    body: list[str] = []
    y = 60
    for pair in plan.pairs:
        section, y = _section(plan, pair, y)
        body += section
    width = LEFT * 2 + PANEL_W * 2 + GUTTER
    head = [
        _text(LEFT, 28, "h1 ink", f"{plan.decode.model.name}: {plan.verdict.path}"),
        _text(LEFT, 46, "t dim", "cells in memory order, +N is the byte offset in the page; cells that touch cross as one copy; "
              "dashed: filled from other pages"),
    ]  # fmt: skip
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 8}" width="{width}" height="{y + 8}" role="img">',
            f"<title>{escape(plan.decode.model.name)}: which bytes of a page go where</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{y + 8}"/>',
            *head, *body, "</svg>", "",
        ]
    )  # fmt: skip


def _section(plan: Plan, pair: tuple[int, int], y: int) -> tuple[list[str], int]:
    picture = page_cells(plan, pair)
    src, dst = plan.prefill.groups[pair[0]], plan.decode.groups[pair[1]]
    paint = _Paint.of(picture)
    layers = plan.layers_of(pair)
    shown = f", layer {layers[0]} of {format_layers(layers)}"
    out = [_text(LEFT, y + 16, "h2 ink", f"{dst.kind}{shown}; colour: {paint.told()}")]
    y += 34
    ends: list[int] = []
    columns: list[list[str]] = []
    places: list[dict[int, _Spot]] = []
    for x, cells, side, group in (
        (LEFT, picture.source, 0, src),
        (LEFT + PANEL_W + GUTTER, picture.target, 1, dst),
    ):
        spots: dict[int, _Spot] = {}
        at = y
        column: list[str] = []
        name = "prefill" if side == 0 else "decode"
        column.append(_text(x, at, "h2 ink", f"{name}: pages of {group.page_size} tokens"))
        at += 12
        for panel in _panels(cells, picture.arrays, side, _Page(group.page_size, picture.tokens)):
            drawn, at = _panel(x, at, panel, paint, spots)
            column += drawn
        columns.append(column)
        places.append(spots)
        ends.append(at)
    beneath, above = _links(picture, places[0], places[1], paint)
    return [*out, *beneath, *columns[0], *columns[1], *above], max(ends) + 18


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a cell has been drawn."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class _Page:
    size: int
    tokens: int
    """Tokens that the source page brings."""


@dataclass(frozen=True, slots=True)
class _Paint:
    """What a cell's colour says."""

    hue: Hue
    picture: Picture
    dims: int
    """Most ranges that the dims of one head are cut into."""
    names: bool = False
    """Label cells with their array's name: several share the panel."""
    shift: int = 0
    """What offsets are told from: where the page's block begins in its region."""

    @classmethod
    def of(cls, picture: Picture) -> _Paint:
        dims = 1 + max((c.dim for c in picture.source), default=0)
        if dims > 1:
            return cls("token", picture, dims)
        if any(c.head for c in picture.source if c.span >= 0):
            return cls("head", picture, dims)
        shared = any(len({a.regions[i] for a in picture.arrays}) < len(picture.arrays) for i in (0, 1))
        return cls("array" if shared else "token", picture, dims)

    def told(self) -> str:
        """Return the legend."""
        darker = {"array": ", darker with the token", "head": ", darker with the token", "token": ""}[self.hue]
        return self.hue.replace("head", "KV head") + (", darker with the dim" if self.dims > 1 else darker)

    def lines(self, cell: Cell) -> list[str]:
        """Return a cell's label in lines that fit: array and dims have their own."""
        name = [self.picture.arrays[cell.array].name.split(" ")[-1]] if self.names else []
        head, space, dims = cell.label.partition(" d")
        return [*name, head, f"d{dims}"] if space else [*name, head]

    def fill(self, cell: Cell, *, strong: bool = False) -> str:
        value = {"array": cell.array, "head": cell.head, "token": cell.token}[self.hue]
        angle = f"{(205 + value * 137.5) % 360:.0f}"
        if strong:
            return f"hsl({angle} 70% 48%)"
        by_dim, by_token = cell.dim / max(self.dims - 1, 1), min(1.0, cell.token / max(self.picture.tokens - 1, 1))
        shade = 0.0 if self.hue == "token" and self.dims == 1 else by_dim if self.hue == "token" else by_token
        return f"hsl({angle} 62% {82 - 22 * shade:.0f}%)"


@dataclass(frozen=True, slots=True)
class _Panel:
    """The cells of one page in one block of memory."""

    title: str
    rows: list[_Row | str]
    shift: int = 0
    """Where the block of the page begins in its region, besides the page's own place."""


def _panels(cells: Sequence[Cell], arrays: Sequence[Array], side: int, page: _Page) -> Iterable[_Panel]:
    """Group a side's cells by page and block of memory; arrays that interleave (packed records) share a panel."""
    pages = sorted({c.page for c in cells})
    for number in pages[:PAGES]:
        for group in _blocks([c for c in cells if c.page == number], arrays, side):
            names = " + ".join(dict.fromkeys(f"{arrays[c.array].name} {arrays[c.array].dtypes[side]}" for c in group))
            sizes = sorted({c.nbytes for c in group})
            region = arrays[group[0].array].regions[side]
            each = f"{sizes[0]} B a cell" if len(sizes) == 1 else "cells of " + ", ".join(map(str, sizes)) + " B"
            rows = _rows(group, page)
            told = _shorten(rows)
            if page.size > page.tokens and not any(c is None for row in rows for c in row):
                told.append("... the rest of the page is filled from other pages")
            stride = arrays[group[0].array].strides[side]
            shift = group[0].offset // stride * stride if stride else 0
            yield _Panel(f"page {number} in {region}: {names}, {each}", told, shift)
    if len(pages) > PAGES:
        yield _Panel(f"and {len(pages) - PAGES} more pages alike", [])


def _blocks(cells: list[Cell], arrays: Sequence[Array], side: int) -> list[list[Cell]]:
    by_array: dict[int, list[Cell]] = {}
    for c in cells:
        by_array.setdefault(c.array, []).append(c)
    out: list[list[Cell]] = []
    for index, mine in by_array.items():
        region = arrays[index].regions[side]
        low, high = min(c.offset for c in mine), max(c.offset + c.nbytes for c in mine)
        for block in out:
            near = arrays[block[0].array].regions[side] == region
            if near and low < max(c.offset + c.nbytes for c in block) and min(c.offset for c in block) < high:
                block += mine
                break
        else:
            out.append(list(mine))
    for block in out:
        block.sort(key=lambda c: c.offset)
    return out


def _rows(cells: list[Cell], page: _Page) -> list[list[Cell | None]]:
    """Cut cells in memory order into rows: the coordinate that changes first runs along a row."""
    coordinates = [(c.array, c.token, c.head, c.dim) for c in cells]
    if len(cells) == 1:
        return [list(cells)]
    axis = next((i for i in range(4) if coordinates[0][i] != coordinates[1][i]), 1)
    rows: list[list[Cell | None]] = [[cells[0]]]
    for cell, old, new in zip(cells[1:], coordinates, coordinates[1:], strict=False):
        turns = any(old[i] != new[i] for i in range(4) if i != axis) or (axis > 0 and new[axis] < old[axis])
        if turns:
            rows.append([])
        rows[-1].append(cell)
    if axis == 1 and page.size > page.tokens:  # places along the row that other source pages fill
        rows = [[*row, *[None] * (page.size - page.tokens)] for row in rows]
    if len(rows) == 1 and len(rows[0]) > COLUMNS:
        rows = [rows[0][i : i + COLUMNS] for i in range(0, len(rows[0]), COLUMNS)]
    return rows


def _shorten(rows: list[list[Cell | None]]) -> list[_Row | str]:
    """Keep the first and the last of long rows and of many rows."""
    short: list[_Row] = []
    for row in rows:
        over = len(row) - COLUMNS
        if over > 0:
            short.append(_Row((*row[: COLUMNS - 2], *row[-2:]), over, 2))
        else:
            short.append(_Row(tuple(row), 0, 0))
    if len(short) <= ROWS:
        return list(short)
    return [*short[: ROWS - 2], f"... {len(short) - ROWS + 1} more rows", short[-1]]


def _panel(x: int, y: int, panel: _Panel, paint: _Paint, spots: dict[int, _Spot]) -> tuple[list[str], int]:
    out = [_text(x, y + 12, "t off", panel.title)]
    rows, shift = panel.rows, panel.shift
    y += 20
    drawn = [c for row in rows if isinstance(row, _Row) for c in row.cells if c is not None]
    paint = replace(paint, names=len({c.array for c in drawn}) > 1, shift=shift)
    lines = max((len(paint.lines(c)) for c in drawn), default=1)
    height = CELL_H + LINE_H * (lines - 1)
    for row in rows:
        if isinstance(row, str):
            out.append(_text(x + OFFSET_W, y + 14, "t off", row))
            y += 22
            continue
        first = next((c for c in row.cells if c is not None), None)
        if first is not None:
            out.append(_text(x + OFFSET_W - 8, y + height / 2 + 4, "t off", f"+{first.offset - shift}", anchor="end"))
        out += _draw_row(x + OFFSET_W, y, height, row, paint, spots)
        y += height + GAP
    return out, y + 8


def _draw_row(x: int, y: int, height: int, row: _Row, paint: _Paint, spots: dict[int, _Spot]) -> list[str]:
    out: list[str] = []
    at = float(x)
    for i, cell in enumerate(row.cells):
        if row.skipped and i == len(row.cells) - row.tail:
            out.append(f'<rect class="page" x="{at + 8:g}" y="{y}" width="{CELL_W - 16}" height="{height}"/>')
            out.append(_text(at + CELL_W / 2, y + height / 2 + 4, "s dim", f"{row.skipped} more", anchor="middle"))
            at += CELL_W + GAP
        if cell is None:
            out.append(f'<rect class="none" x="{at:g}" y="{y}" width="{CELL_W}" height="{height}" rx="3"/>')
            at += CELL_W + GAP
            continue
        after = row.cells[i + 1] if i + 1 < len(row.cells) else None
        gapless = after is not None and after.span == cell.span and cell.span >= 0
        gapless = gapless and not (row.skipped and i + 1 == len(row.cells) - row.tail)
        spot = _Spot(at, y, CELL_W + (GAP if gapless else 0), height)
        out.append(
            f'<rect class="cell" x="{at:g}" y="{y}" width="{spot.width:g}" height="{height}" rx="{0 if gapless else 3}" '
            f'fill="{paint.fill(cell)}"><title>{escape(_told(cell, paint.picture))}</title></rect>'
        )
        for line, text in enumerate([*paint.lines(cell), f"+{cell.offset - paint.shift}"]):
            out.append(_text(at + CELL_W / 2, y + 13 + LINE_H * line, "s on", text, anchor="middle"))
        spots[cell.key] = spot
        at += CELL_W + GAP
    return out


def _told(cell: Cell, picture: Picture) -> str:
    return f"{picture.arrays[cell.array].name} {cell.label}: {cell.nbytes} bytes at +{cell.offset} of page {cell.page}"


def _links(
    picture: Picture, left: dict[int, _Spot], right: dict[int, _Spot], paint: _Paint
) -> tuple[list[str], list[str]]:
    """Join some cells with their place on the other side: lines that lie beneath the cells, and frames around both."""
    beneath: list[str] = []
    above: list[str] = []
    for index in range(len(picture.arrays)):
        both = [c for c in picture.source if c.array == index and c.span >= 0 and c.key in left and c.key in right]
        few = both if len(both) <= LINKS else [both[i * (len(both) - 1) // (LINKS - 1)] for i in range(LINKS)]
        for cell in few:
            a, b = left[cell.key], right[cell.key]
            x1, y1, x2, y2 = a.x + a.width, a.y + a.height / 2, b.x, b.y + b.height / 2
            edge = LEFT + PANEL_W + GUTTER / 2
            colour = paint.fill(cell, strong=True)
            path = f"M{x1:g} {y1:g}H{edge - GUTTER / 2:g}C{edge:g} {y1:g} {edge:g} {y2:g} {edge + GUTTER / 2:g} {y2:g}H{x2:g}"
            beneath.append(f'<path class="line" stroke="{colour}" d="{path}"/>')
            above += [
                f'<rect class="linked" fill="none" stroke="{colour}" x="{s.x:g}" y="{s.y:g}" width="{s.width:g}" '
                f'height="{s.height:g}" rx="3"/>' for s in (a, b)
            ]  # fmt: skip
    return beneath, above


def _text(x: float, y: float, style: str, text: str, *, anchor: str = "") -> str:
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{style}" x="{x:g}" y="{y:g}"{where}>{escape(text)}</text>'
