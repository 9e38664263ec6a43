"""A run as a time line for Perfetto (ui.perfetto.dev): Chrome's trace-event JSON, of the first requests.

Format: "Trace Event Format" of the Chromium project (catapult), as Perfetto reads it: `ts` and `dur` in microseconds; `ph` is X for a span, b and e for the ends
of an async one (joined by `cat` and `id`), s and f for a flow between spans, C for a counter, M for names.

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
from regauge.sim import series
from regauge.sim.log import FAILED, Log
from regauge.sim.summary import OUTCOMES

MOST = 5_000
"""Requests of a time line: some 10 events each, which a browser still shows well."""
BINS = 500
"""Points of a counter."""
LANDING_US = 1.0
PREFILL, DECODE, NICS, REQUESTS = 1, 2, 3, 4
GROUPS = {
    PREFILL: "prefill workers (simulated)",
    DECODE: "decode workers (simulated)",
    NICS: "NICs of decode, received (simulated)",
    REQUESTS: "requests (simulated)",
}
PHASES = (("queue", "at", "began"), ("prefill", "began", "computed"), ("transfer", "computed", "landed"),
          ("decode", "landed", "ended"))  # fmt: skip

Event = dict[str, Any]


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


def _us(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _names(log: Log, rows: NDArray[np.intp]) -> Iterator[Event]:
    for group, name in GROUPS.items():
        yield {"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": group, "tid": 0, "args": {"sort_index": group}}
    for group, column, letter in ((PREFILL, log.prefill, "p"), (DECODE, log.decode, "d")):
        for worker in _workers(column[rows]):
            yield {"ph": "M", "name": "thread_name", "pid": group, "tid": worker + 1,
                   "args": {"name": f"{letter}{worker}"}}  # fmt: skip


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
        at = {"pid": PREFILL, "tid": prefill + 1}
        yield {"ph": "X", "name": name, "cat": "prefill", "ts": _us(computed[0]),
               "dur": _us(computed[1] - computed[0]), **at, "args": told}  # fmt: skip
        if log.outcome[row] != FAILED and not np.isnan(log.landed[row]):
            yield {"ph": "s", "name": "kv", "cat": "transfer", "id": row, "ts": _us(computed[0]), **at}
            # A flow ends in a span of a thread, and decode's own are async: so the landing is one, too.
            yield {"ph": "X", "name": f"{name} landed", "cat": "transfer", "ts": _us(log.landed[row]), "dur": LANDING_US,
                   "pid": DECODE, "tid": decode + 1, "args": {}}  # fmt: skip
            yield {"ph": "f", "bp": "e", "name": "kv", "cat": "transfer", "id": row, "ts": _us(log.landed[row]),
                   "pid": DECODE, "tid": decode + 1}  # fmt: skip
    if decode >= 0:
        held = _interval(log, row, "landed", "ended")
        yield from _span(DECODE, decode + 1, "decode", name, name, held, told)


def _span(
    group: int, track: int, category: str, ident: str, name: str, interval: tuple[float, float] | None, told: Event
) -> Iterator[Event]:
    """An async span, nothing where a request never got so far."""
    if interval is None or np.isnan(interval).any():
        return
    same = {"cat": category, "id": f"{category} {ident}", "name": name, "pid": group, "tid": track}
    yield {"ph": "b", "ts": _us(interval[0]), **same, "args": told}
    yield {"ph": "e", "ts": _us(interval[1]), **same}


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
            yield {"ph": "C", "name": f"d{worker} GB/s", "pid": NICS, "tid": 0, "ts": _us(at),
                   "args": {"GB/s": round(float(load), 6)}}  # fmt: skip


def _workers(column: Iterable[Any]) -> list[int]:
    return sorted({int(worker) for worker in column if worker >= 0})
