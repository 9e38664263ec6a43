"""What `regauge top` shows, from one or two looks at a deployment. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from regauge import rates
from regauge.cli_top import plain
from regauge.cli_top_figures import figures
from regauge.cli_top_text import duration, per_second, size
from regauge.move.flow_types import LinkState as NicState
from regauge.move.protocol import LegState, TransferState
from regauge.move.state import LinkState, PoolState, Totals, WorkerState
from regauge.rates import Sample
from regauge.serve.debug import Live, Overview, WorkerView

BAR: Final = 12
"""Characters of a progress bar."""
WIDE: Final = 125
"""Characters of a line from which on all columns are shown."""
POOL_BAR: Final = 24
_BAD: Final = frozenset({"quarantined", "failed", "lost", "fencing", "closing", "relinking"})
_GOOD: Final = frozenset({"granted", "up"})
_POOL: Final = (("committed", "█", "green"), ("leased", "▓", "cyan"), ("quarantined", "▒", "red"), ("free", "░", "dim"))
"""State of pages, its mark (readable without colours), its style."""


def render(
    now: Overview, before: Overview | None = None, *, then: Live | None = None, note: str = "", width: int = WIDE
) -> RenderableType:
    """Return the view of a look. With an earlier one there are rates; with one from long `then`, percentiles of what came since; `note` says why the look is old.

    Lines of under `WIDE` characters leave out what is less often asked for.
    """
    head = Text.assemble(
        ("regauge ", "bold"), plain(now.version), f"   {plain(now.model)}   {plain(now.path)}",
        f"   {now.requests} requests   {_clock(now.unix_s)} UTC",
    )  # fmt: skip
    parts: list[RenderableType] = [head]
    if note:
        parts.append(Text(plain(note), style="bold red"))
    parts += [Text(plain(word), style="bold red") for word in now.silent]
    if isinstance(now, Live):
        parts += ["", *figures(now, then)]
    for worker in now.workers:
        parts += ["", *_worker(worker, _earlier(worker, before), wide=width >= WIDE)]
    return Group(*parts)


def _clock(unix_s: float) -> str:
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # the server's word for it, and no year that there is
        return "-"


def _earlier(worker: WorkerView, before: Overview | None) -> WorkerState | None:
    """Return the earlier look at the same process: a restarted one counts anew."""
    for old in before.workers if before is not None else ():
        if (
            old.name == worker.name
            and old.state is not None
            and worker.state is not None
            and old.state.pid == worker.state.pid
            and old.state.clock_s < worker.state.clock_s
        ):
            return old.state
    return None


def _worker(worker: WorkerView, before: WorkerState | None, *, wide: bool) -> list[RenderableType]:
    title = Text.assemble((plain(worker.name), "bold"), f" ({worker.role})  ")
    state = worker.state
    if state is None:
        known = "up" if worker.up else "down"
        why = f"no answer, {known} since {worker.since:%H:%M:%S} UTC: {plain(worker.reason)}"
        return [title.append(why, "bold red")]
    if not worker.up:
        title.append(f"down: {plain(worker.reason)}  ", "bold red")
    title.append(f"{_load(state, before)}  ")
    parts: list[RenderableType] = [
        _totals(title, state.totals), *(_pool(pool) for pool in state.pools), *(_nic(nic) for nic in state.nics),
    ]  # fmt: skip
    for table, shown, hidden in (
        (_links(state, wide=wide), len(state.links), state.hidden.links),
        (_transfers(state, before, wide=wide), len(state.transfers), state.hidden.transfers),
    ):
        if shown:
            parts.append(table)
        if hidden:
            parts.append(Text(f"and {hidden} older ones", style="dim"))
    parts += [Text(f"{_short(t)}: {plain(t.reason)}", style="red") for t in state.transfers if t.reason]
    return [parts[0], *(Padding(part, (0, 0, 0, 2)) for part in parts[1:])]


def _totals(line: Text, total: Totals) -> Text:
    line.append(f"{total.delivered} delivered, {size(total.wire_bytes)}", "dim")
    for what, count in (("resent", total.resent), ("resumed", total.resumed)):
        if count:
            line.append(f", {count} {what}", "yellow")
    if total.failed:
        why = ", ".join(f"{count} {plain(reason)}" for reason, count in sorted(total.failed.items()))
        line.append(f", {sum(total.failed.values())} failed: {why}", "red")
    return line


def _pool(pool: PoolState) -> Text:
    """Return one line: a bar, then pages by state."""
    line = Text("pages ")
    lent = pool.committed + pool.leased + pool.quarantined
    counts = {name: getattr(pool, name) for name, _, _ in _POOL} | {"free": pool.pages - lent}
    for (name, mark, style), cells in zip(_POOL, share([counts[n] for n, _, _ in _POOL], POOL_BAR), strict=True):
        line.append(mark * cells, style if name != "free" else "dim")
    for name, mark, style in _POOL:
        if counts[name] or name == "free":
            word = "not lent" if name == "free" and pool.free is None else name
            line.append(f"  {mark} ", style).append(f"{counts[name]} {word}")
    return line.append(f"  of {pool.pages} x {pool.page_size} tokens", "dim")


def _nic(nic: NicState) -> Text:
    """Return one line: what flow control knows of a receiving NIC."""
    line = Text(f"nic {plain(nic.nic)}  {size(nic.bytes_per_s)}/s, round trip {1e3 * nic.rtt_s:.2f} ms")
    line.append(f"  granted {size(nic.granted_bytes)} of {size(nic.window_bytes)}, queued {size(nic.queued_bytes)}")
    return line.append(f"  backlog {size(nic.backlog_bytes)} = {duration(nic.backlog_s)}", "dim")


def _links(state: WorkerState, *, wide: bool) -> Table:
    rows = [_link(link) for link in sorted(state.links, key=lambda x: x.peer)]
    return _table(
        {"link": "left", "state": "left", "path": "left", "modes": "left", "up": "right", "in flight": "right",
         "resent": "right", "resumed": "right", "free slots": "right", "session": "left"}, rows, 10 if wide else 8,
    )  # fmt: skip


def _link(link: LinkState) -> list[RenderableType]:
    slots = "-" if link.free_slots is None else str(link.free_slots)
    return [
        plain(link.peer), _state(link.state), plain(link.path), plain(", ".join(link.modes)), duration(link.up_s),
        str(link.in_flight), _count(link.resent), _count(link.resumed), slots, plain(link.session),
    ]  # fmt: skip


def _transfers(state: WorkerState, before: WorkerState | None, *, wide: bool) -> Table:
    """Return a row for each leg; the first of a transfer says what is the transfer's."""
    old = {t.transfer: t for t in before.transfers} if before is not None else {}
    rows: list[list[RenderableType]] = []
    for transfer in state.transfers:
        was = {leg.peer: leg for leg in old[transfer.transfer].legs} if transfer.transfer in old else {}
        first: list[RenderableType] = [
            _short(transfer), _state(transfer.state), str(transfer.tokens), duration(transfer.age_s),
        ]  # fmt: skip
        for leg in transfer.legs:
            rows.append([*first, *_leg(leg, was.get(leg.peer), state, before), duration(transfer.deadline_in_s)])
            first = [""] * len(first)
        if not transfer.legs:
            rows.append(first)
    return _table(
        {"transfer": "left", "state": "left", "tokens": "right", "age": "right", "with": "left", "progress": "left",
         "": "right", "bytes": "right", "rate": "right", "leg": "left", "chunks": "right", "resent": "right",
         "credit": "right", "left": "right"}, rows, 14 if wide else 9,
    )  # fmt: skip


def _short(transfer: TransferState) -> str:
    return plain(transfer.transfer[:8])


def _leg(leg: LegState, was: LegState | None, state: WorkerState, before: WorkerState | None) -> list[RenderableType]:
    done = min(max(leg.progress, 0.0), 1.0)
    return [
        plain(leg.peer), ProgressBar(total=1.0, completed=done, width=BAR), f"{done:.0%}", size(leg.wire_bytes),
        rate(leg.wire_bytes, was.wire_bytes if was else None, state, before), _state(leg.state),
        f"{leg.chunks}+{leg.in_flight}" if leg.in_flight else str(leg.chunks), _count(leg.resent),
        "-" if leg.credit is None else size(leg.credit),
    ]  # fmt: skip


def _table(columns: dict[str, Literal["left", "right"]], rows: list[list[RenderableType]], count: int) -> Table:
    """Return a table of the first `count` columns."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in list(columns.items())[:count]:
        table.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        # A string would be taken for markup: names come from other processes.
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row[:count]))
    return table


def _state(word: str) -> Text:
    return Text(plain(word), style="red" if word in _BAD else "green" if word in _GOOD else "")


def _count(number: int) -> Text:
    return Text(str(number), style="yellow" if number else "")


def moved(state: WorkerState) -> int:
    """Return the bytes of all chunks that the worker has sent and received so far, whatever became of their transfers."""
    return state.totals.sent + sum(state.totals.landed.values())


def _load(state: WorkerState, before: WorkerState | None) -> str:
    """Return what the worker's transfers move, and of which line rate that is how much, where flow control was told it."""
    found = None if before is None else _rate(moved(state), moved(before), state, before)
    line = sum(nic.line_bytes_per_s for nic in state.nics)
    return per_second(found) + ("" if found is None or line <= 0 else f" = {found / line:.1%} of the line")


def _rate(now: int, then: int, state: WorkerState, before: WorkerState) -> float | None:
    return rates.rate(Sample(then, before.clock_s, before.pid), Sample(now, state.clock_s, state.pid))


def rate(now: int, then: int | None, state: WorkerState, before: WorkerState | None) -> str:
    """Return bytes per second between two looks; a dash where they say nothing of it (`rates`)."""
    if then is None or before is None:
        return "-"
    return per_second(_rate(now, then, state, before))


def share(counts: list[int], cells: int) -> list[int]:
    """Divide the cells of a bar among counts: in all exactly `cells`, and at least one for whatever is there.

    A single quarantined page among thousands must be seen. There must be no more counts than cells.
    """
    whole = sum(counts)
    if whole <= 0:
        return [0] * (len(counts) - 1) + [cells]
    out = [max(1, count * cells // whole) if count > 0 else 0 for count in counts]
    out[out.index(max(out))] += cells - sum(out)
    return out
