"""Events of a time line for Perfetto (ui.perfetto.dev): Chrome's trace-event JSON.

Format: "Trace Event Format" of the Chromium project (catapult), as Perfetto reads it: `ts` and `dur` in microseconds; `ph` is X for a span, b and e for the ends
of an async one (joined by `cat` and `id`), i for an instant, s and f for the ends of a flow between spans, C for a counter, M for names.
A process (`pid`) is a group of tracks (`tid`); spans of one track lie within each other or apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Event = dict[str, Any]


def us(seconds: float) -> float:
    """Return microseconds, to the nanosecond."""
    return round(float(seconds) * 1e6, 3)


def process(pid: int, name: str) -> Iterator[Event]:
    """Name a process; they are shown in the order of their numbers."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}


@dataclass(frozen=True, slots=True)
class Track:
    """A track of a process."""

    pid: int
    tid: int

    def named(self, name: str) -> Event:
        """Name it."""
        return {"ph": "M", "name": "thread_name", "pid": self.pid, "tid": self.tid, "args": {"name": name}}

    def span(
        self, category: str, name: str, begin_s: float, end_s: float, told: Mapping[str, Any] | None = None
    ) -> Event:
        """Something that took time."""
        return {"ph": "X", "name": name, "cat": category, "ts": us(begin_s), "dur": us(max(end_s - begin_s, 0.0)),
                "pid": self.pid, "tid": self.tid, "args": dict(told or {})}  # fmt: skip

    def instant(self, category: str, name: str, at_s: float, told: Mapping[str, Any] | None = None) -> Event:
        """Something that happened."""
        return {"ph": "i", "s": "t", "name": name, "cat": category, "ts": us(at_s), "pid": self.pid, "tid": self.tid,
                "args": dict(told or {})}  # fmt: skip

    def around(
        self, category: str, ident: str, name: str, begin_s: float, end_s: float, told: Mapping[str, Any]
    ) -> Iterator[Event]:
        """Yield the ends of an async span: such may overlap."""
        same = {"cat": category, "id": ident, "name": name, "pid": self.pid, "tid": self.tid}
        yield {"ph": "b", "ts": us(begin_s), **same, "args": dict(told)}
        yield {"ph": "e", "ts": us(end_s), **same}

    def leaves(self, category: str, name: str, ident: object, at_s: float) -> Event:
        """Return the beginning of an arrow, in the span of this track that is there at that time."""
        return {"ph": "s", "name": name, "cat": category, "id": ident, "ts": us(at_s), "pid": self.pid, "tid": self.tid}

    def comes(self, category: str, name: str, ident: object, at_s: float) -> Event:
        """Return its end, likewise."""
        return {
            "ph": "f",
            "bp": "e",
            "name": name,
            "cat": category,
            "id": ident,
            "ts": us(at_s),
            "pid": self.pid,
            "tid": self.tid,
        }

    def counter(self, name: str, at_s: float, values: Mapping[str, float]) -> Event:
        """Return what is counted from then on; a counter is of its process, by its name."""
        return {"ph": "C", "name": name, "pid": self.pid, "tid": 0, "ts": us(at_s), "args": dict(values)}
