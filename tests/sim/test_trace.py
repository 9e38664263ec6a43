"""Readers of published traces: what a line becomes, and what is said of one that is broken."""

from __future__ import annotations

import gc
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_cases import DATA, check, lines

from regauge.errors import ConfigError
from regauge.sim import trace_files
from regauge.sim.trace import Arrival, read
from regauge.sim.trace_forms import forms
from regauge.sim.trace_mooncake import write


@pytest.mark.parametrize(
    ("name", "count", "block", "sessions"),
    [
        ("mooncake_conversation.jsonl", 60, 512, 60),
        ("mooncake_synthetic.jsonl", 40, 512, 40),
        ("azure2023_code.csv", 40, 0, 40),
        ("weka_agent_sample.jsonl", 9, 512, 2),
        ("weka_agent_compact.jsonl", 36, 512, 6),
        ("tracelab_example.jsonl", 8, 512, 2),
    ],
)
def test_formats_are_known_by_their_first_line(name: str, count: int, block: int, sessions: int) -> None:
    trace = read(DATA / name)
    assert (trace.name, trace.block, len(trace)) == (name.partition(".")[0], block, count)
    assert sum(each.after < 0 for each in trace.arrivals) == sessions
    assert all(len(each.blocks) <= each.tokens // max(1, block) for each in trace.arrivals)
    check(trace.arrivals)


def test_a_format_can_be_named_and_a_file_packed(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress((DATA / "azure2023_code.csv").read_bytes()))
    assert read(path, form="azure").arrivals == read(DATA / "azure2023_code.csv").arrivals
    assert len(read(path, limit=7)) == 7


def test_mooncakes_partial_blocks_are_left_out_and_ticks_found(tmp_path: Path) -> None:
    assert read(DATA / "mooncake_conversation.jsonl").tick_s == 3.0
    assert read(DATA / "mooncake_synthetic.jsonl").tick_s == 0.0
    row = {"timestamp": 1500, "input_length": 1500, "output_length": 0, "hash_ids": [0, 5, 6]}
    path = lines(tmp_path / "m.jsonl", [row])
    assert read(path).arrivals == (Arrival(1.5, 1500, 1, (0, 5)),)
    assert read(path, block=1024).arrivals[0].blocks == (5,)
    with pytest.raises(ConfigError, match=r"block: 1000 is no multiple of the trace's own 512 tokens"):
        read(path, block=1000)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    trace = read(DATA / "mooncake_synthetic.jsonl")
    assert write(trace.arrivals, tmp_path / "again.jsonl") == 40
    assert read(tmp_path / "again.jsonl").arrivals == trace.arrivals
    with pytest.raises(ConfigError, match="arrival 2 waits for another"):
        write(read(DATA / "weka_agent_sample.jsonl").arrivals, tmp_path / "no.jsonl")


def test_azures_times_have_zones_and_fractions(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "azure.csv",
        [
            "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
            "2024-05-10 00:00:01.2500000+00:00,2,700,3",
            "2024-05-10 02:00:00+02:00,0,0,9",
        ],
    )
    trace = read(path)
    assert trace.arrivals == (Arrival(0.0, 1, 9, ()), Arrival(1.25, 700, 3, ()))
    assert trace.notes == (
        "1 requests without a prompt are read with one token",
        "images are left out: the trace has their number, not their tokens",
    )


BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def test_burstgpts_failures_are_left_out_and_sessions_wait_if_asked(tmp_path: Path) -> None:
    rows = [
        BURST,
        "100,a,4,GPT-4,10,5,15,Conversation log",
        "103,,2,ChatGPT,7,1,8,API log",
        "110.5,a,3,GPT-4,30,5,35,Conversation log",
    ]
    path = lines(tmp_path / "b.csv", [*rows, "111,,0,ChatGPT,9,0,9,API log"])
    trace = read(path)
    assert trace.arrivals == (Arrival(0.0, 10, 5, ()), Arrival(3.0, 7, 1, ()), Arrival(10.5, 30, 5, ()))
    assert trace.notes == ("1 failed requests (no tokens) are left out",)
    first, second, _ = read(path, closed=True).arrivals
    assert (second.after, second.at, second.think_s) == (0, first.at, 6.5)
    first_release = lines(
        tmp_path / "b1.csv",
        [
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,ChatGPT,472,18,490,Conversation log",
        ],
    )
    assert read(first_release).arrivals == (Arrival(0.0, 472, 18, ()),)


def test_qwens_equal_blocks_behind_unlike_prefixes_are_unlike(tmp_path: Path) -> None:
    def row(chat: int, ids: list[int]) -> dict[str, object]:
        return {"chat_id": chat, "parent_chat_id": -1, "timestamp": chat / 2, "input_length": 16 * len(ids), "output_length": 3,
                "type": "text", "turn": 1, "hash_ids": ids}  # fmt: skip

    path = lines(tmp_path / "q.jsonl", [row(0, [7, 8, 9]), row(1, [5, 8, 9]), row(2, [7, 8, 4])])
    first, second, third = (each.blocks for each in read(path).arrivals)
    assert not set(first) & set(second)
    assert third[:2] == first[:2]
    assert third[2] != first[2]
    assert [len(each.blocks) for each in read(path, block=32).arrivals] == [1, 1, 1]


def test_errors_name_file_line_and_remedy(tmp_path: Path) -> None:
    good = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}
    cases = {
        r"m\.jsonl, line 2: .*input_length": [good, {"timestamp": 0}],
        r"m\.jsonl, line 2: input_length: -3 is no number of tokens; 0 to 100,000,000 are": [good, good | {"input_length": -3}],
        r"m\.jsonl, line 1: timestamp: -1.0; times are finite and not negative": [good | {"timestamp": -1}],
        r"m\.jsonl, line 2: JSON is malformed": [good, "nonsense"],
        r"m\.jsonl, line 1: .*>= 0": [good | {"hash_ids": [-4]}],
        r"m\.jsonl, line 1: of no known format of traces \(fields prompt\)\. Known are, by their fields: mooncake: hash_ids": [{"prompt": "x"}],
        r"m\.jsonl, line 1: of no known format of traces \(columns a, b\)": ["a,b"],
        r"m\.jsonl, line 1: of no known format of traces \(columns \?\[31ma, b\)": ["\x1b[31ma,b"],
        r"m\.jsonl: the file is empty": [],
        r"m\.jsonl, line 2: TIMESTAMP: 'yesterday' is no date and time; they are like": ["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"],
        r"m\.jsonl, line 2: ContextTokens: 'many' is no number of tokens": ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,many,2"],
        r"m\.jsonl, line 3: 2 columns where the header has 3": ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,1,2", "2023-11-16,1"],
        r"m\.jsonl, line 2: Timestamp: nan; times are finite": [BURST, "nan,a,4,GPT-4,10,5,15,Conversation log"],
        r"m\.jsonl: no request in it": [BURST],
    }  # fmt: skip
    for match, rows in cases.items():
        with pytest.raises(ConfigError, match=match):
            read(lines(tmp_path / "m.jsonl", rows))


def test_reading_leaves_the_garbage_collector_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for switch in (gc.disable, gc.enable):
        switch()
        before = gc.isenabled()
        with pytest.raises(ConfigError, match="the file is empty"):
            read(tmp_path / "empty.jsonl")
        assert gc.isenabled() == before


def test_names_of_formats_are_checked(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", [{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}])
    with pytest.raises(ConfigError, match=r"format: 'moncake' is none of traces; did you mean 'mooncake'\?"):
        read(path, form="moncake")
    with pytest.raises(ConfigError, match="closed: mooncake does not say who waits for whom; burstgpt, tracelab"):
        read(path, closed=True)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="is a folder; only Weka's sessions are one"):
        read(tmp_path, form="azure")
    with pytest.raises(ConfigError, match="limit: -1"):
        read(path, limit=-1)
    assert len(forms()) == 7


def test_lines_and_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes((DATA / "mooncake_synthetic.jsonl").read_bytes())
    limits = {
        "MAX_BLOCKS": (100, "more than 100 blocks so far: give a limit of rows, or a larger block"),
        "MAX_FILE": (4_000, r"line \d+: the file has more than 4,000 bytes: cut it"),
        "MAX_LINE": (90, "line 1: longer than 90 bytes"),
    }
    for name, (most, match) in limits.items():
        with monkeypatch.context() as patch:
            patch.setattr(trace_files, name, most)
            with pytest.raises(ConfigError, match=match):
                read(path)
    path.write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(ConfigError, match="ended before the end-of-stream"):
        read(path)


@given(st.sampled_from(sorted(DATA.glob("*.*l")) + sorted(DATA.glob("*.csv"))), st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_broken_files_are_refused_or_read_and_nothing_else(tmp_path: Path, source: Path, data: st.DataObject) -> None:
    raw = bytearray(source.read_bytes()[:3_000])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.binary(max_size=3)
            | st.sampled_from([b"-", b"1e999", b"9" * 400, b"null", b"[", b"\n", b"NaN", b'"', b","])
        )
    path = tmp_path / "broken"
    path.write_bytes(bytes(raw))
    try:
        check(read(path).arrivals)
    except ConfigError as error:
        assert str(error).startswith(str(path))  # noqa: PT017
