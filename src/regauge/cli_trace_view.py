"""A request's time line for a terminal: a row for each step, with its place between the request's beginning and its end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from regauge.cli_top import plain
from regauge.cli_top_figures import seconds
from regauge.cli_top_text import size
from regauge.move.events import Event
from regauge.serve.recent import Try
from regauge.serve.tracing import Told, Traced

LEAST: Final = 12
MOST: Final = 72
"""Characters of the bar; where there are fewer, there is none."""
GAP: Final = 2
"""Between two columns."""
_MANY: Final = {
    "computed": "layer", "credit": "word{s} of credit", "gather": "chunk{s} gathered", "write": "chunk{s} written",
    "check": "chunk{s} checked", "step": "decode step{s}", "want": "word{s} of want", "written": "word{s} of chunks written",
}  # fmt: skip
"""Shown together, from the first one's beginning to the last one's end."""


@dataclass(frozen=True)
class Row:
    """A step, or several of a kind; seconds since the request came."""

    where: str
    what: str
    begin: float
    end: float
    style: str = ""


def render(line: Traced, width: int) -> RenderableType:
    """Return the view of a request."""
    parts: list[RenderableType] = [_head(line)]
    for tried in line.tries:
        told = [one for one in line.told if one.attempt == tried.name]
        parts += ["", _title(tried), _table(list(rows(tried, told)), width)]
    parts += [Text(plain(word), style="yellow") for word in (*line.missing, *line.doubts)]
    parts += _clocks(line.told)
    return Group(*parts)


def rows(tried: Try, told: Iterable[Told]) -> Iterator[Row]:
    """Yield the rows of an attempt, by when they began."""
    found = [
        Row(span.where, span.name, span.begin_s, span.end_s, "bold" if span.where == "gateway" else "")
        for span in tried.spans
    ]
    if tried.tokens_s:
        count = len(tried.tokens_s) + tried.more_tokens
        found.append(Row("gateway", _count(count, "token{s}"), tried.tokens_s[0], tried.tokens_s[-1]))
    found += chain.from_iterable(_rank(one) for one in told)
    return iter(sorted(found, key=lambda row: (row.begin, -row.end)))


def _rank(told: Told) -> Iterator[Row]:
    kinds: dict[str, list[Event]] = {}
    for event in told.events:
        kinds.setdefault(event.name, []).append(event)
    for name, events in kinds.items():
        begin, end = min(e.begin_s for e in events), max(e.end_s for e in events)
        if name in _MANY:
            yield Row(told.rank, _together(name, events), begin, end, "dim")
            continue
        for event in events:
            note = f" ({event.text})" if event.text not in ("", "sent", "taken") else ""
            yield Row(told.rank, f"{event.name}{note}", event.begin_s, event.end_s, "dim" if not note else "yellow")


def _together(name: str, events: list[Event]) -> str:
    if name == "computed":
        layers = max(e.layers[1] for e in events if e.layers) - min(e.layers[0] for e in events if e.layers)
        return f"{_count(layers, 'layer{s} computed')}, {_count(len({e.tokens for e in events}), 'chunk{s} of tokens')}"
    counted = _count(len(events), _MANY[name])
    if name in ("credit", "want"):
        return f"{counted}, {size(max(e.nbytes or 0 for e in events))}"
    nbytes = sum(e.nbytes or 0 for e in events)
    return counted + (f", {size(nbytes)}" if nbytes else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what.format(s='' if number == 1 else 's')}"


def _head(line: Traced) -> Text:
    told = line.request
    text = Text.assemble((plain(told.id), "bold"), f": {told.outcome}, {seconds(told.seconds)}")
    if told.ttft_s is not None:
        text.append(f", first token after {seconds(told.ttft_s)}")
    text.append(f"; {told.prompt_tokens} prompt tokens, {told.completion_tokens} generated")
    if told.error:
        text.append(f"\n{plain(told.error)}", "bold red")
    return text


def _title(tried: Try) -> Text:
    way = f"{plain(tried.prefill)} to {plain(tried.decode)}" if tried.prefill else f"{plain(tried.decode)} alone"
    text = Text.assemble((plain(tried.name), "bold"), f": {way}, {tried.outcome}")
    if tried.path:
        text.append(f", {plain(', '.join(filter(None, (tried.path, tried.mode))))}")
    if tried.wire_bytes:
        text.append(f", {size(tried.wire_bytes)}")
    if tried.error:
        text.append(f"\n{plain(tried.error)}", "red")
    return text


def _table(found: list[Row], width: int) -> Table:
    low = min([0.0, *(row.begin for row in found)])
    high = max([low + 1e-6, *(row.end for row in found)])
    cells = [
        (
            plain(row.where),
            plain(row.what),
            seconds(row.begin),
            seconds(row.end - row.begin) if row.end > row.begin else "",
        )
        for row in found
    ]
    titles = ("where", "what", "from", "for")
    used = sum(
        max(map(len, (title, *column))) + GAP for title, column in zip(titles, zip(*cells, strict=True), strict=True)
    )
    room = min(MOST, width - used)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for title in titles:
        table.add_column(title, justify="right" if title in titles[2:] else "left", no_wrap=True)
    if room >= LEAST:
        table.add_column("", no_wrap=True)
    for row, words in zip(found, cells, strict=True):
        drawn = bar((row.begin - low) / (high - low), (row.end - low) / (high - low), room) if room >= LEAST else ""
        table.add_row(*(Text(word, style=row.style) for word in (*words, *([drawn] if drawn else []))))
    return table


def bar(begin: float, end: float, cells: int) -> str:
    """Return a bar from one share of its cells to another; an instant has a mark."""
    first = min(int(begin * cells), cells - 1)
    if end <= begin:
        return " " * first + "╷"
    last = max(first + 1, min(cells, round(end * cells)))
    return " " * first + "█" * (last - first)


def _clocks(told: Iterable[Told]) -> Iterator[Text]:
    within = dict[str, float]()
    for one in told:
        within[one.rank] = max(within.get(one.rank, 0.0), one.uncertain_s)
    if within:
        known = ", ".join(f"{plain(rank)} within {1e3 * most:.2f} ms" for rank, most in sorted(within.items()))
        yield Text(f"clocks: {known} of the gateway's", style="dim")
