"""The newest requests and their time lines, as the gateway's endpoints tell them."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import STEADY, Rig, open_rig

from perfetto_format import check
from regauge.move.protocol import Stages
from regauge.serve import wire
from regauge.serve.perfetto import trace_events
from regauge.serve.recent import MOST_TOKENS, MOST_TRIES, Recent, Story, TimeLine, Tried
from regauge.serve.text import Tokenizer
from regauge.serve.tracing import Traced

CHAT = {"model": "echo-1", "messages": [{"role": "user", "content": "Tell me of the gauge."}], "max_tokens": 5}
LENGTH = st.floats(0, 100)


async def trace(rig: Rig, name: str) -> TimeLine:
    status, body, _ = await rig.get(f"/debug/trace/{name}")
    assert status == 200, body
    return msgspec.convert(body, TimeLine)


@pytest.mark.anyio
async def test_a_request_has_a_line_and_a_time_line(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        assert (await rig.post("/v1/chat/completions", CHAT, X_Request_Id="mine"))[0] == 200
        _, listed, _ = await rig.get("/debug/requests")
        [line] = listed["requests"]
        assert (line["id"], line["outcome"], line["completion_tokens"], line["attempts"]) == ("mine", "complete", 5, 1)
        assert (line["prefill"], line["decode"], line["path"]) == ("prefill-0", "decode-0", "CONVERT")
        assert 0 < line["ttft_s"] <= line["seconds"] < 10
        assert abs(line["unix_s"] - time.time()) < 60
        told = await trace(rig, "mine")
        assert msgspec.to_builtins(told.request) == line
        [tried] = told.tries
        assert (tried.outcome, len(tried.tokens_s)) == ("complete", 5)
        assert tried.tokens_s == sorted(tried.tokens_s)
        assert tried.tokens_s[0] == pytest.approx(line["ttft_s"], abs=0.01)
        assert {span.where for span in tried.spans} == {"gateway", "prefill-0", "decode-0"}
        assert (await trace(rig, tried.name)).request == told.request, "by the name of its attempt, too"


@pytest.mark.anyio
async def test_what_fails_is_said(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.break_after = 0, wire.ErrorEvent("engine_failed", "the pool broke", "decode-0")
        status, _, _ = await rig.post("/v1/chat/completions", CHAT, X_Request_Id="lost")
        assert status >= 500
        [line] = (await rig.get("/debug/requests"))[1]["requests"]
        assert (line["id"], line["outcome"], line["ttft_s"]) == ("lost", "failed", None)
        assert "the pool broke" in line["error"]
        told = await trace(rig, "lost")
        assert len(told.tries) == line["attempts"]
        assert all((t.outcome, "the pool broke" in t.error) == ("failed", True) for t in told.tries)


@pytest.mark.anyio
async def test_what_is_not_known_is_not_made_up(rig: Rig) -> None:
    status, body, _ = await rig.get("/debug/trace/nobody")
    assert (status, body["error"]["code"]) == (404, "request_not_found")
    status, body, _ = await rig.get("/debug/trace/nobody?format=xml")
    assert (status, body["error"]["param"]) == (400, "format")
    assert (await rig.get("/debug/requests?limit=0"))[0] == 400


@pytest.mark.anyio
async def test_perfetto_gets_a_file(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        assert (await rig.post("/v1/chat/completions", CHAT, X_Request_Id="mine"))[0] == 200
        _, body, headers = await rig.get("/debug/trace/mine?format=perfetto")
        assert headers["content-disposition"] == 'attachment; filename="regauge-trace.json"'
        check(body)
        assert {e["args"]["name"] for e in body["traceEvents"] if e["name"] == "process_name"} == {"gateway", "prefill-0", "decode-0"}  # fmt: skip


@STEADY
@given(st.builds(Stages, *[LENGTH] * 5), LENGTH, LENGTH, LENGTH, LENGTH, st.integers(0, 20))
def test_steps_follow_each_other_and_are_as_long_as_was_told(
    stages: Stages, waited: float, queued: float, computed: float, after: float, tokens: int
) -> None:
    story = Story(arrived=0.0)
    tried = story.attempt("a", "p", "d", "REMAP")
    tried.began = 1.0
    tried.prefilled = 50.0, wire.Prefilled(1, 1, 0, computed, after, queue_seconds=queued)
    for number in range(tokens):
        tried.token(60.0 + number, wire.TransferEvent("REMAP", "mapped", 10, 1, 3.0, stages=stages))
    tried.end(99.0, "complete", wire.FinishEvent("stop", 1, tokens, queue_seconds=waited))
    view = tried.view(0.0, 99.0)
    for where, end, told in (
        ("p", 50.0, [queued, computed, after]),
        ("d", 60.0, [waited, *msgspec.to_builtins(stages).values()] if tokens else []),
    ):
        steps = [span for span in view.spans if span.where == where and span.name != "decodes"]
        assert [s.end_s - s.begin_s for s in steps] == pytest.approx(
            [length for length in told if length > 0], abs=1e-9
        )
        assert all(one.end_s == pytest.approx(next_.begin_s) for one, next_ in itertools.pairwise(steps))
        assert not steps or steps[-1].end_s == pytest.approx(end, abs=1e-9) or told[-1] == 0
    story.end("", 1.0, 1, tokens)
    recent = Recent()
    recent.add("a", story)
    found = recent.of("a")
    assert found is not None
    line = found.time_line()
    check(trace_events(Traced(line.request, line.tries, [], [], [])))


def test_all_of_it_is_bounded() -> None:
    recent = Recent(3)
    for number in range(5):
        recent.add(f"r{number}", Story())
    assert [line.id for line in recent.newest(2).requests] == ["r4", "r3"]
    assert recent.newest(2).hidden == 1
    assert recent.of("r1") is None
    story = Story()
    for number in range(MOST_TRIES + 5):
        tried = story.attempt(f"t{number}", None, "d", "NONE")
    assert (len(story.tries), story.line(time.monotonic()).attempts) == (MOST_TRIES, MOST_TRIES + 5)
    for _ in range(MOST_TOKENS + 7):
        tried.token(time.monotonic())
    assert (len(tried.tokens), tried.more_tokens) == (MOST_TOKENS, 7)
    story.end("x" * 10_000, None, 1, 1)
    assert len(story.line(time.monotonic()).error) == 500


def test_a_name_that_is_used_again_is_of_the_newer_request() -> None:
    recent = Recent()
    first, second = Story(), Story(prompt_tokens=2)
    for story in (first, second):
        recent.add("same", story)
    assert [line.id for line in recent.newest(9).requests] == ["same"]
    found = recent.of("same")
    assert found is second


def test_a_running_request_counts_its_tokens() -> None:
    story = Story()
    tried: Tried = story.attempt("a", "p", "d", "DIRECT")
    tried.token(story.arrived + 0.25)
    line = story.line(story.arrived + 2.0)
    assert (line.outcome, line.completion_tokens, line.ttft_s, line.seconds) == ("running", 1, 0.25, 2.0)
