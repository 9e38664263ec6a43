"""The requests of a scenario: what the table says of a file, and of made ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regauge.errors import ConfigError
from regauge.sim import synthetic
from regauge.sim.arrivals import MADE, Requests, load
from regauge.sim.scenario import TraceTable
from regauge.sim.trace import Arrival


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    rows = [
        {"timestamp": 100 * i + 7 * (i % 3), "input_length": 1024, "output_length": 5, "hash_ids": [i // 2, 500 + i]}
        for i in range(60)
    ]
    path = tmp_path / "talk.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.fixture
def weka(tmp_path: Path) -> str:
    sessions = [{"id": f"s{i}", "bs": 64, "tool": 0, "sys": 0, "r": [[0, 640, 9, 0], [30, 1280, 9, 640]]} for i in range(20)]  # fmt: skip
    path = tmp_path / "agents.jsonl"
    path.write_text("\n".join(map(json.dumps, sessions)) + "\n")
    return str(path)


def times(requests: Requests, seed: int = 1) -> list[float]:
    return [each.at for each in requests.of(seed)]


def test_a_file_is_cut_and_paced(mooncake: str) -> None:
    whole = load(TraceTable(file=mooncake))
    assert (whole.name, whole.count, whole.block, len(list(whole.of(1)))) == ("talk", 60, 512, 60)
    fast = load(TraceTable(file=mooncake, scale=2.0))
    assert times(fast)[-1] == pytest.approx(times(whole)[-1] / 2)
    assert load(TraceTable(file=mooncake, slice="1:2")).count == 10
    assert load(TraceTable(file=mooncake, slice="20:40r", requests=5)).count == 5
    assert load(TraceTable(file=mooncake, requests=500)).count == 60


def test_a_trace_that_says_nothing_of_reuse_is_told_so(mooncake: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,100,5\n")
    assert load(TraceTable(file=str(path))).notes == (
        "lengths says nothing of prompts that begin alike, so nothing is cached",
    )
    assert load(TraceTable(file=mooncake)).notes == ()


def test_copies_are_other_users(mooncake: str) -> None:
    found = load(TraceTable(file=mooncake, copies=3))
    arrivals = list(found.of(1))
    assert len(arrivals) == found.count == 180
    assert times(found) == sorted(times(found))
    assert len({block for each in arrivals for block in each.blocks}) == 3 * 90


def test_sessions_begin_as_often_as_is_said(weka: str) -> None:
    found = load(TraceTable(file=weka, rate=0.5))
    arrivals = list(found.of(3))
    begins = [each.at for each in arrivals if each.after < 0]
    assert len(begins) == 20
    assert max(begins) / 20 == pytest.approx(2.0, rel=0.5)
    assert found.notes == ("agents: sessions begin at random, 0.5 a second",)
    assert times(found, 3) != times(found, 4)
    copied = list(load(TraceTable(file=weka, rate=0.5, copies=2)).of(3))
    turns = [(place, each.after) for place, each in enumerate(copied) if each.after >= 0]
    assert len(turns) == 40
    assert all(after < place for place, after in turns)


def test_made_requests_are_the_seeds(mooncake: str) -> None:
    made = load(TraceTable(requests=50, rate=4.0))
    assert list(made.of(1)) == list(made.of(1)) != list(made.of(2))
    assert len(list(made.of(1))) == made.count == 50
    assert load(TraceTable()).count == MADE
    like = load(TraceTable(like=mooncake, requests=40, rate=2.0))
    assert (like.name, len(list(like.of(1)))) == ("like talk", 40)
    assert all(isinstance(each, Arrival) for each in like.of(1))


def test_a_likeness_may_be_given_in_place_of_its_trace(mooncake: str, tmp_path: Path) -> None:
    from_trace = load(TraceTable(like=mooncake, requests=40))
    assert from_trace.like is not None
    (tmp_path / "talk.json").write_bytes(synthetic.dump(from_trace.like))
    assert list(load(TraceTable(like=str(tmp_path / "talk.json"), requests=40)).of(7)) == list(from_trace.of(7))


def test_what_does_not_go_together_is_refused(mooncake: str, weka: str, tmp_path: Path) -> None:
    for table, told in (
        (TraceTable(file=weka), r"trace\.rate: agents does not say when its sessions begin; say how many a second"),
        (
            TraceTable(file=weka, rate=1.0, scale=2.0),
            r"trace\.scale: sessions of this trace begin as often as trace\.rate",
        ),
        (TraceTable(like=weka), r"trace\.rate: agents does not say how often sessions begin"),
        (
            TraceTable(file=mooncake, rate=1.0),
            r"trace\.rate: talk says when its requests come; pace it by trace\.scale",
        ),
        (TraceTable(file=mooncake, slice="9:8"), "slice: '9:8' is no part of a trace; give begin:end"),
        (TraceTable(file=mooncake, slice="90:95"), "slice: nothing of talk is from 90 to 95"),
        (TraceTable(file=mooncake, format="mooncak"), "did you mean 'mooncake'"),
        (TraceTable(file=str(tmp_path / "gone")), "gone: No such file"),
    ):
        with pytest.raises(ConfigError, match=told):
            load(table)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(Path(mooncake).read_text() + '{"timestamp": -5}\n')
    with pytest.raises(ConfigError, match=r"broken\.jsonl, line 61"):
        load(TraceTable(file=str(broken), format="mooncake"))
