"""Sessions: which turn waits for which, how long, and what it shares with those before it and with nobody else."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import DATA, check, lines

from regauge.errors import ConfigError
from regauge.sim.trace import Arrival, read
from regauge.sim.trace_prefix import History, Numbers, Prefixes
from regauge.sim.trace_stats import hit


def request(t: float, blocks: list[int], **more: object) -> dict[str, object]:
    return {"t": t, "type": "n", "in": 64 * len(blocks), "out": 9, "hash_ids": blocks, "api_time": 2.0} | more


def session(name: str, *requests: object, scope: str = "local") -> dict[str, object]:
    return {"id": name, "block_size": 64, "hash_id_scope": scope, "requests": requests}


def links(arrivals: tuple[Arrival, ...]) -> list[tuple[int, float]]:
    return [(each.after, each.think_s) for each in arrivals]


def test_a_turn_comes_its_think_time_after_the_one_before(tmp_path: Path) -> None:
    turns = [request(5, [1, 2]), request(20, [1, 2, 3], think_time=13.0), request(40, [1, 2, 9])]
    path = lines(tmp_path / "w.jsonl", [session("a", *turns), session("b", *turns)])
    trace = read(path, block=64)
    assert links(trace.arrivals) == [(-1, 0.0), (0, 13.0), (1, 18.0), (-1, 0.0), (3, 13.0), (4, 18.0)]
    first, second = (
        {name for each in part for name in each.blocks} for part in (trace.arrivals[:3], trace.arrivals[3:])
    )
    assert not first & second
    assert hit(trace.arrivals, 64) == pytest.approx(4 / 8)
    recorded = read(path, block=64, closed=False).arrivals
    assert [(each.at, each.after) for each in recorded] == [(t, -1) for t in (5, 5, 20, 20, 40, 40)]


def test_ids_of_global_scope_are_shared(tmp_path: Path) -> None:
    both = [session(name, request(0, [1, 2]), scope="global") for name in "ab"]
    assert hit(read(lines(tmp_path / "w.jsonl", both), block=64).arrivals, 64) == 0.5


def test_the_next_turn_waits_for_the_last_subagent_and_not_for_one_left_alone(tmp_path: Path) -> None:
    def agent(*requests: object) -> dict[str, object]:
        return {"t": 3, "type": "subagent", "agent_id": "x", "status": "completed", "requests": requests}

    turns = (
        request(0, [1]),
        agent(request(3, [50]), request(7, [50, 51])),
        agent(request(4, [60], api_time=30.0)),
        agent(request(5, [70], api_time=900.0)),
        request(36, [1, 2], think_time=34.0),
    )
    trace = read(lines(tmp_path / "w.jsonl", [session("a", *turns)]), block=64)
    # 0 main; 1, 2 the first agent; 3 the second, until 34; 4 the third, long after; 5 main
    assert links(trace.arrivals) == [(-1, 0.0), (0, 1.0), (1, 2.0), (0, 2.0), (0, 3.0), (3, 2.0)]


def test_a_folder_has_a_session_in_each_file(tmp_path: Path) -> None:
    rows = (DATA / "weka_agent_sample.jsonl").read_text().splitlines()
    for row in rows:
        (tmp_path / f"{json.loads(row)['id']}.json").write_text(json.dumps(json.loads(row), indent=1))
    names = sorted(rows, key=lambda row: str(json.loads(row)["id"]))
    assert read(tmp_path).arrivals == read(lines(tmp_path / "w.jsonl", names)).arrivals
    (tmp_path / "x.json").write_text('{"id": 3}')
    with pytest.raises(ConfigError, match=r"x\.json: .*id"):
        read(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no \*\.json in it; a folder holds Weka sessions"):
        read(tmp_path / "empty")


def test_the_compact_form_is_the_session_but_for_its_service_times(tmp_path: Path) -> None:
    whole = read(DATA / "weka_agent_sample.jsonl", block=64)
    seen: list[set[int]] = []
    rows: list[dict[str, object]] = []
    for each in whole.arrivals:
        if each.after < 0:
            rows.append({"id": "x", "bs": 64, "r": []})
            seen.append(set())
        before = next((k for k, name in enumerate(each.blocks) if name not in seen[-1]), len(each.blocks))
        rows[-1]["r"].append([0.0, each.tokens, each.output, 64 * before])  # type: ignore[attr-defined]
        seen[-1].update(each.blocks)
    compact = read(lines(tmp_path / "c.jsonl", rows), block=64)
    assert hit(compact.arrivals, 64) == hit(whole.arrivals, 64)
    assert [each.after for each in compact.arrivals] == [each.after for each in whole.arrivals]


def test_tracelabs_rounds_share_what_the_cache_had_of_prompts() -> None:
    trace = read(DATA / "tracelab_example.jsonl")
    at = next(k for k, each in enumerate(trace.arrivals) if each.tokens == 32_272)
    rounds = trace.arrivals[at : at + 4]
    assert [each.after for each in rounds] == [-1, at, at + 1, at + 2]
    assert [each.think_s for each in rounds] == pytest.approx([0.0, 0.049, 12.688, 21.467], abs=1e-3)
    shared = [len(set(one.blocks) & set(other.blocks)) for one, other in pairwise(rounds)]
    assert shared == [29_380 // 512, 35_738 // 512, 38_590 // 512]
    check(trace.arrivals)
    assert all(each.after < 0 for each in read(DATA / "tracelab_example.jsonl", closed=False).arrivals)


def test_sessions_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    one = {"session_id": "s", "round_index": 0, "input_tokens_total": 5, "prefix_tokens": 9, "output_tokens": 1}
    event = {"timestamp": "2026-06-01T05:40:20.151Z"}
    cases: dict[str, list[object]] = {
        "line 2: block_size: 32 where the sessions before have 64": [
            session("a", request(0, [1])),
            session("b") | {"block_size": 32},
        ],
        "line 1: block_size: 0; a block has 1 token or more": [session("a") | {"block_size": 0}],
        "line 1: t: -2.0; times are finite and not negative": [session("a", request(-2, [1]))],
        r"line 1: r\[0\]: 99 tokens came before, of a prompt of 9": [{"id": "a", "bs": 64, "r": [[0, 9, 1, 99]]}],
        "line 1: Expected `array` of length 4": [{"id": "a", "bs": 64, "r": [[0, 9, 1]]}],
        "line 1: timing_events: empty": [one],
        "line 1: prefix_tokens: 9 of a prompt of 5": [one | {"timing_events": [event]}],
    }
    for match, rows in cases.items():
        with pytest.raises(ConfigError, match=match):
            read(lines(path, rows))


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8), st.integers(1, 3))
def test_prompts_share_names_as_far_as_they_are_equal(prompts: list[list[int]], step: int) -> None:
    names = Prefixes()
    chained = [names.chain(prompt, step) for prompt in prompts]
    for one, names_of_one in zip(prompts, chained, strict=True):
        assert len(names_of_one) == len(one) // step
        for other, names_of_other in zip(prompts, chained, strict=True):
            for k, (a, b) in enumerate(zip(names_of_one, names_of_other, strict=False), 1):
                assert (a == b) == (one[: k * step] == other[: k * step])


@given(st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), min_size=1, max_size=10), st.integers(1, 8))
def test_a_history_shares_what_it_is_told_as_far_as_prompts_went(turns: list[tuple[int, float]], block: int) -> None:
    history = History(Numbers(), block)
    seen: set[int] = set()
    longest = 0
    for tokens, share in turns:
        before = int(share * tokens)
        names = history.prompt(tokens, before)
        assert len(names) == tokens // block
        known = next((k for k, name in enumerate(names) if name not in seen), len(names))
        assert known == min(before // block, longest)
        seen.update(names)
        longest = max(longest, len(names))
