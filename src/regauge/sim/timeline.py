"""A run as a time line of trace events (`regauge.perfetto`), of the first requests.

Processes are groups of tracks: 1 prefill (a track per worker: what it computes), 2 decode (each request an async span per worker), 3 NICs (a counter per decode
worker), 4 requests (queue, prefill, transfer, decode of each). Everything is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regauge.errors import ConfigError
from regauge.perfetto import Event, Track, process
from regauge.sim import series
from regauge.sim.log import FAILED, Log
from regauge.sim.summary import OUTCOMES

MOST = 5_000
"""Requests of a time line: some 10 events each, which a browser still shows well."""
BINS = 500
"""Points of a counter."""
LANDING_S = 1e-6
PREFILL, DECODE, NICS, REQUESTS = 1, 2, 3, 4
GROUPS = {
    PREFILL: "prefill workers (simulated)",
    DECODE: "decode workers (simulated)",
    NICS: "NICs of decode, received (simulated)",
    REQUESTS: "requests (simulated)",
}
PHASES = (("queue", "at", "began"), ("prefill", "began", "computed"), ("transfer", "computed", "landed"),
          ("decode", "landed", "ended"))  # fmt: skip


def events(log: Log, *, first: int = MOST, begin_s: float = 0.0, end_s: float = float("inf")) -> Iterator[Event]:
    """Yield the events of the first requests that came in [begin_s, end_s). Raises ConfigError for a window that is none."""
    if first < 1 or not begin_s < end_s:
        raise ConfigError(f"time line: one request or more, and {begin_s} s before {end_s} s")
    rows = chosen(log, first=first, begin_s=begin_s, end_s=end_s)
    yield from _names(log, rows)
    for row in rows:
        yield from _request(log, int(row))
    yield from _counters(log, rows)


def chosen(log: Log, *, first: int = MOST, begin_s: float = 0.0, end_s: float = float("inf")) -> NDArray[np.intp]:
    """Return the rows of the first requests that came in [begin_s, end_s)."""
    return np.flatnonzero((log.at >= begin_s) & (log.at < end_s))[:first]


def write(path: Path, log: Log, *, first: int = MOST, begin_s: float = 0.0, end_s: float = float("inf")) -> int:
    """Write a time line; return the number of events. Raises ConfigError where the file cannot be written."""
    count = 0
    try:
        with path.open("w", encoding="ascii") as file:
            file.write('{"displayTimeUnit":"ms","otherData":{"note":"simulated by regauge"},"traceEvents":[\n')
            for count, event in enumerate(events(log, first=first, begin_s=begin_s, end_s=end_s), 1):
                file.write((",\n" if count > 1 else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    return count


def _names(log: Log, rows: NDArray[np.intp]) -> Iterator[Event]:
    for group, name in GROUPS.items():
        yield from process(group, name)
    for group, column, letter in ((PREFILL, log.prefill, "p"), (DECODE, log.decode, "d")):
        for worker in _workers(column[rows]):
            yield Track(group, worker + 1).named(f"{letter}{worker}")


def _request(log: Log, row: int) -> Iterator[Event]:
    name, prefill, decode = f"r{row}", int(log.prefill[row]), int(log.decode[row])
    told = {"prompt tokens": int(log.prompt[row]), "cached": int(log.cached[row]), "output": int(log.output[row]),
            "KV bytes": float(log.nbytes[row]), "attempts": int(log.attempts[row]),
            "outcome": OUTCOMES[int(log.outcome[row])]}  # fmt: skip
    whole = (float(log.at[row]), float(log.ended[row]))
    yield from _span(REQUESTS, 0, "request", name, name, whole, told)
    for phase, begin, end in PHASES:
        yield from _span(REQUESTS, 0, "request", name, phase, _interval(log, row, begin, end), {})
    computed = _interval(log, row, "began", "computed")
    if prefill >= 0 and computed is not None:
        sends, takes = Track(PREFILL, prefill + 1), Track(DECODE, decode + 1)
        yield sends.span("prefill", name, *computed, told)
        if log.outcome[row] != FAILED and not np.isnan(log.landed[row]):
            landed = float(log.landed[row])
            yield sends.leaves("transfer", "kv", row, computed[0])
            # A flow ends in a span of a thread, and decode's own are async: so the landing is one, too.
            yield takes.span("transfer", f"{name} landed", landed, landed + LANDING_S)
            yield takes.comes("transfer", "kv", row, landed)
    if decode >= 0:
        held = _interval(log, row, "landed", "ended")
        yield from _span(DECODE, decode + 1, "decode", name, name, held, told)


def _span(
    group: int, track: int, category: str, ident: str, name: str, interval: tuple[float, float] | None, told: Event
) -> Iterator[Event]:
    """An async span, nothing where a request never got so far."""
    if interval is None or np.isnan(interval).any():
        return
    yield from Track(group, track).around(category, f"{category} {ident}", name, *interval, told)


def _interval(log: Log, row: int, begin: str, end: str) -> tuple[float, float] | None:
    first, last = float(getattr(log, begin)[row]), float(getattr(log, end)[row])
    if np.isnan(first):
        return None
    over = float(log.ended[row])  # a phase that was cut short lasts until the request was over
    return first, over if np.isnan(last) else last


def _counters(log: Log, rows: NDArray[np.intp]) -> Iterator[Event]:
    part = Log(*(getattr(log, name)[rows] for name in Log.__dataclass_fields__))
    edges = series.span(part, BINS + 1)
    for worker in _workers(part.decode):
        loads = series.inflow(part, edges, worker) / 1e9
        for at, load in zip(edges, [*loads, 0.0], strict=False):
            yield Track(NICS, 0).counter(f"d{worker} GB/s", float(at), {"GB/s": round(float(load), 6)})


def _workers(column: Iterable[Any]) -> list[int]:
    return sorted({int(worker) for worker in column if worker >= 0})
