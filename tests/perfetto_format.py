"""What the trace-event format asks of a time line, as Perfetto reads it."""

from __future__ import annotations

from typing import Any

SLACK = 0.01
"""Microseconds: times are rounded to the nanosecond."""


def check(body: dict[str, Any]) -> None:
    """Spans have lengths and, on one track, lie within each other or apart; ends of flows lie in spans, and are paired."""
    events = body["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "i"} <= named
    ends: dict[object, list[str]] = {}
    for e in events:
        if e["ph"] in "sf":
            ends.setdefault((e["cat"], e["name"], e["id"]), []).append(e["ph"])
            near = tracks.get((e["pid"], e["tid"]), [])
            assert any(begin - SLACK <= e["ts"] <= end + SLACK for begin, end in near), e
    assert all(sorted(pair) == ["f", "s"] for pair in ends.values()), "an arrow has two ends"
    for spans in tracks.values():
        open_: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1] <= begin + SLACK:
                open_.pop()
            assert not open_ or end <= open_[-1] + SLACK, "spans of a track cross"
            open_.append(end)
