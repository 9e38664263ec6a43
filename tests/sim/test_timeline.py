"""The time line: fields as the trace-event format has them, spans that are what the log says."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_logs import DONE, LATE, NO_ROOM, log, random_log

from regauge.errors import ConfigError
from regauge.sim import timeline
from regauge.sim.timeline import DECODE, NICS, PREFILL, REQUESTS, events

NEEDED = {
    "M": {"name", "pid", "tid", "args"}, "X": {"name", "cat", "ts", "dur", "pid", "tid"}, "b": {"name", "cat", "id", "ts", "pid", "tid"},
    "e": {"name", "cat", "id", "ts", "pid", "tid"}, "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"}, "C": {"name", "ts", "pid", "args"},
}  # fmt: skip
"""Fields that the format asks for, by phase ("Trace Event Format", sections on each)."""


def spans(made: list[dict[str, Any]], group: int, name: str) -> list[float]:
    return [event["ts"] for event in made if event["pid"] == group and event["name"] == name and event["ph"] in "be"]


@given(st.integers(0, 500), st.integers(0, 12))
def test_every_event_has_the_fields_of_its_phase(seed: int, count: int) -> None:
    opened: Counter[tuple[Any, ...]] = Counter()
    flows: Counter[tuple[Any, ...]] = Counter()
    for event in events(random_log(seed, count)):
        assert NEEDED[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        key = (event["pid"], event.get("cat"), event.get("id"), event["name"])
        opened[key] += {"b": 1, "e": -1}.get(event["ph"], 0)
        flows[event.get("id")] += {"s": 1, "f": -1}.get(event["ph"], 0)
    assert not any(opened.values())  # every span that begins ends
    assert not any(flows.values())


def test_a_request_is_what_its_row_says() -> None:
    made = list(events(log(DONE)))
    assert spans(made, REQUESTS, "r0") == [0.0, 3.5e6]
    assert spans(made, REQUESTS, "queue") == [0.0, 1.0e6]
    assert spans(made, REQUESTS, "prefill") == [1.0e6, 2.0e6]
    assert spans(made, REQUESTS, "transfer") == [2.0e6, 2.5e6]
    assert spans(made, REQUESTS, "decode") == spans(made, DECODE, "r0") == [2.5e6, 3.5e6]
    computed, landing = (event for event in made if event["ph"] == "X")
    assert (landing["pid"], landing["tid"], landing["ts"]) == (DECODE, 1, 2.5e6)  # what the flow ends in
    assert (computed["pid"], computed["tid"], computed["ts"], computed["dur"]) == (PREFILL, 1, 1e6, 1e6)
    assert computed["args"]["cached"] == 400
    start, finish = (event for event in made if event["ph"] in "sf")
    assert (start["ts"], finish["ts"], finish["pid"]) == (1e6, 2.5e6, DECODE)
    counters = [event["args"]["GB/s"] for event in made if event["ph"] == "C"]
    assert max(counters) == pytest.approx(0.4, rel=0.02)  # 0.6 GB in 1.5 s
    assert {event["pid"] for event in made if event["ph"] == "C"} == {NICS}


def test_tracks_are_named_and_simulated() -> None:
    named = {
        (event["pid"], event["tid"]): event["args"].get("name") for event in events(log(DONE, LATE)) if event["name"].endswith("_name")
    }  # fmt: skip
    assert named[PREFILL, 1] == "p0"
    assert named[DECODE, 2] == "d1"
    assert all("simulated" in name for (_, track), name in named.items() if track == 0)


def test_a_refused_request_waits_until_it_is_refused() -> None:
    assert spans(list(events(log(NO_ROOM))), REQUESTS, "r0") == [3e6, 3e6]


def test_it_is_bounded() -> None:
    made = random_log(1, 60)
    whole = [event for event in events(made, first=7) if event["ph"] == "b" and event["name"].startswith("r")]
    assert {event["name"] for event in whole if event["pid"] == REQUESTS} == {f"r{i}" for i in range(7)}
    part = [
        event
        for event in events(made, begin_s=20, end_s=40)
        if event["pid"] == REQUESTS and event["name"][1:].isdigit()
    ]
    begun = [event["ts"] for event in part if event["ph"] == "b"]
    assert begun
    assert all(20e6 <= ts < 40e6 for ts in begun)
    for wrong in ({"first": 0}, {"begin_s": 3.0, "end_s": 3.0}, {"begin_s": float("nan")}):
        with pytest.raises(ConfigError, match="time line: one request or more"):
            list(events(made, **wrong))  # type: ignore[arg-type]


def test_the_file_is_json(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    count = timeline.write(path, random_log(4, 30))
    told = json.loads(path.read_text())
    assert len(told["traceEvents"]) == count
    assert told["otherData"] == {"note": "simulated by regauge"}
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        timeline.write(tmp_path / "no" / "run.json", log(DONE))
