"""A request's time line for Perfetto (ui.perfetto.dev): Chrome's trace-event JSON.

Format: "Trace Event Format" of the Chromium project (catapult): `ts` and `dur` in microseconds; `ph` is X for a span, i for an instant, s and f for the two
ends of a flow, M for names. The gateway and each worker are a process with a track for each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from regauge.serve.recent import TimeLine, Try

Event = dict[str, Any]
GATEWAY: Final = "gateway"


def trace_events(line: TimeLine) -> dict[str, Any]:
    """Return the file's content."""
    workers = dict.fromkeys(name for tried in line.tries for name in (tried.prefill, tried.decode) if name)
    places = {name: number for number, name in enumerate((GATEWAY, *workers), 1)}
    events = [*_names(line, places), *_request(line), *_tries(line, places)]
    note = "by the gateway's clock; of workers' steps the lengths are by theirs, placed by when their word came"
    return {"displayTimeUnit": "ms", "otherData": {"request": line.request.id, "note": note}, "traceEvents": events}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _names(line: TimeLine, places: dict[str, int]) -> Iterator[Event]:
    for name, place in places.items():
        yield {"ph": "M", "name": "process_name", "pid": place, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": place, "tid": 0, "args": {"sort_index": place}}
        for track, tried in enumerate(line.tries, 1):
            if name in (GATEWAY, tried.prefill, tried.decode):
                yield {"ph": "M", "name": "thread_name", "pid": place, "tid": track, "args": {"name": tried.name}}


def _request(line: TimeLine) -> Iterator[Event]:
    told = line.request
    detail = {
        "prompt tokens": told.prompt_tokens, "generated tokens": told.completion_tokens, "outcome": told.outcome,
        "error": told.error, "began (Unix s)": told.unix_s,
    }  # fmt: skip
    yield {
        "ph": "X",
        "name": told.id,
        "cat": "request",
        "ts": 0.0,
        "dur": _us(told.seconds),
        "pid": 1,
        "tid": 0,
        "args": detail,
    }


def _tries(line: TimeLine, places: dict[str, int]) -> Iterator[Event]:
    for track, tried in enumerate(line.tries, 1):
        detail = {"path": tried.path, "mode": tried.mode, "wire bytes": tried.wire_bytes, "outcome": tried.outcome}
        for span in tried.spans:
            yield {
                "ph": "X", "name": span.name, "cat": span.where, "ts": _us(span.begin_s), "dur": _us(span.end_s - span.begin_s),
                "pid": places[span.where], "tid": track, "args": detail,
            }  # fmt: skip
        for number, at in enumerate(tried.tokens_s, 1):
            yield {
                "ph": "i",
                "s": "t",
                "name": f"token {number}",
                "cat": "token",
                "ts": _us(at),
                "pid": places[tried.decode],
                "tid": track,
            }
        yield from _flow(tried, track, places)


def _flow(tried: Try, track: int, places: dict[str, int]) -> Iterator[Event]:
    """An arrow from the prompt's computation to the KV's coming into place."""
    begun = next((s for s in tried.spans if s.where == tried.prefill and s.name == "computes the prompt"), None)
    landed = next((s for s in reversed(tried.spans) if s.where == tried.decode and s.name != "decodes"), None)
    if begun is None or landed is None:
        return
    middle = (landed.begin_s + landed.end_s) / 2
    for phase, at, place in (("s", begun.begin_s, tried.prefill), ("f", max(middle, begun.begin_s), tried.decode)):
        yield {
            "ph": phase,
            "bp": "e",
            "name": "KV",
            "cat": "transfer",
            "id": track,
            "ts": _us(at),
            "pid": places[place],
            "tid": track,
        }
