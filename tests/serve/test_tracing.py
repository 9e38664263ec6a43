"""One request over gateway and workers on one time line: what real workers tell is whole, clocks are placed within what is said, and what is missing is said."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import Rig, open_rig
from worker_rig import LONG, ask, end, sampling, workers

from perfetto_format import check
from regauge.move.events import Event, Recorder, Trace
from regauge.serve import wire
from regauge.serve.perfetto import trace_events
from regauge.serve.recent import Story
from regauge.serve.text import Tokenizer
from regauge.serve.tracing import Told, Traced, doubts

CHAT = {"model": "echo-1", "messages": [{"role": "user", "content": "Tell me of the gauge."}], "max_tokens": 5}


async def traced(rig: Rig, name: str) -> Traced:
    status, body, _ = await rig.get(f"/debug/trace/{name}")
    assert status == 200, body
    return msgspec.convert(body, Traced)


async def asked(rig: Rig, name: str) -> str:
    """Have a request answered; return its transfer's name."""
    assert (await rig.post("/v1/chat/completions", CHAT, X_Request_Id=name))[0] == 200
    return rig.decode.generates[-1].transfer_id


@pytest.mark.anyio
@pytest.mark.parametrize("skew_s", [0.0, 5_000.0, -3.0])
async def test_a_workers_clock_is_placed_within_what_is_said(skew_s: float, tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        name = await asked(rig, "mine")
        now = time.monotonic()
        rig.decode.skew_s = skew_s
        rig.decode.events[name] = [Event("step", now - 0.2, now - 0.1)]
        rig.prefill.events[name] = [Event("computed", now - 0.3, now - 0.3, layers=(0, 1), tokens=(0, 9))]
        found = await traced(rig, "mine")
        assert found.missing == found.doubts == []
        prefill, decode = found.told
        assert (prefill.worker, prefill.role, decode.worker, decode.role) == (
            "prefill-0",
            "prefill",
            "decode-0",
            "decode",
        )
        assert abs(decode.offset_s - skew_s) <= decode.uncertain_s < 0.5
        [step] = decode.events
        [computed] = prefill.events
        assert step.begin_s - computed.begin_s == pytest.approx(0.1, abs=prefill.uncertain_s + decode.uncertain_s)
        assert step.end_s - step.begin_s == pytest.approx(0.1, abs=1e-6)


@pytest.mark.anyio
async def test_who_does_not_tell_is_named(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        name = await asked(rig, "mine")
        now = time.monotonic()
        rig.prefill.events[name] = [Event("computed", now, now)]
        found = await traced(rig, "mine")
        [missing] = found.missing
        assert missing.startswith("decode-0 keeps nothing of ")
        await rig.prefill.stop()
        found = await traced(rig, "mine")
        assert any(each.startswith("prefill-0 does not tell: ") for each in found.missing), found.missing
        assert (found.told, found.tries[0].outcome) == ([], "complete"), "what the gateway knows is there"
        rig.fleet.leave("prefill-0")
        found = await traced(rig, "mine")
        assert "prefill-0 is no worker of this gateway any more" in found.missing


@pytest.mark.anyio
async def test_a_worker_that_hangs_costs_two_seconds_and_no_more(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        await asked(rig, "mine")
        rig.decode.frozen = asyncio.Event()
        begun = time.monotonic()
        found = await traced(rig, "mine")
        assert time.monotonic() - begun < 6
        assert any("decode-0 does not tell" in each for each in found.missing)
        rig.decode.frozen.set()


@pytest.mark.anyio
async def test_real_workers_tell_all_of_a_request(tmp_path: Path) -> None:
    named: dict[str, tuple[wire.Role, str]] = {
        "p": ("prefill", "fp8_e4m3,page=64,hnd"),
        "d": ("decode", "fp32,page=16,nhd"),
    }
    async with workers(tmp_path, named) as both:
        events, said = await ask(both["p"], both["d"], "one", LONG, sampling(max_tokens=12))
        answered = end(events).completion_tokens
        [sent] = both["p"].core.events.of("t-one", "p")
        [came] = both["d"].core.events.of("t-one", "d")
        layers = both["p"].core.scheduler.layers
        computed = {
            (layer, token)
            for e in sent.events
            if e.name == "computed" and e.layers and e.tokens
            for layer in range(*e.layers)
            for token in range(*e.tokens)
        }
        assert computed == {(layer, token) for layer in range(layers) for token in range(len(LONG))}
        assert said.computed_tokens == len(LONG)
        assert sum(e.name == "step" for e in came.events) == answered - 1, "the first token is prefill's"
        [arrived] = [e for e in events if isinstance(e, wire.TransferEvent)]
        for told, name in ((sent, "gather"), (came, "written")):
            assert sum(e.nbytes or 0 for e in told.events if e.name == name) == arrived.wire_bytes
        for told in (sent, came):
            assert [e.name for e in told.events if e.name in ("pages", "grant", "commit", "delivered")] in (
                ["pages", "grant", "commit", "delivered"], ["pages", "grant", "delivered", "commit"],
            )  # fmt: skip
        steps = [e for e in came.events if e.name == "step"]
        assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(steps)), "one after the other"
        ready = [e for e in sent.events if e.name == "computed"]
        assert all(one.end_s <= other.begin_s for one, other in itertools.pairwise(ready))
        line = placed(sent, came)
        assert list(doubts(line.told)) == []
        body = trace_events(line)
        check(body)
        arrows = [e for e in body["traceEvents"] if e["ph"] == "s"]
        assert len(arrows) == sum(e.name == "check" for e in came.events)
        counted = [e["args"]["written"] for e in body["traceEvents"] if e["ph"] == "C" and e["pid"] == 2]
        assert max(counted) == arrived.wire_bytes


def placed(sent: Trace, came: Trace) -> Traced:
    """As the gateway makes it of what two workers of this process tell."""
    story = Story(arrived=min(e.begin_s for e in (*sent.events, *came.events)))
    tried = story.attempt("one", "p", "d", "CONVERT", "t-one")
    tried.end(time.monotonic(), "complete")
    story.end("", 1.0, len(LONG), 12)
    line = story.time_line()

    def back(trace: Trace) -> list[Event]:
        return [
            msgspec.structs.replace(e, begin_s=e.begin_s - story.arrived, end_s=e.end_s - story.arrived)
            for e in trace.events
        ]

    told = [
        Told("one", "p", "prefill", "p", 0.0, 0.0, back(sent), 0), Told("one", "d", "decode", "d", 0.0, 0.0, back(came), 0),
    ]  # fmt: skip
    return Traced(line.request, line.tries, told, [], [])


@given(st.floats(-0.01, 0.01), st.floats(0, 0.005), st.floats(0, 0.005))
def test_an_effect_before_its_cause_is_told_where_clocks_do_not_explain_it(
    late: float, one: float, other: float
) -> None:
    sends, takes = Recorder(), Recorder()
    sends.note("t", "grant", 1.0, None, "p", text="sent")
    takes.note("t", "grant", 1.0 + late, None, "d", text="taken")
    told = [
        Told("a", name, role, name, 0.0, uncertain, recorder.of("t", name)[0].events, 0)
        for name, role, uncertain, recorder in (("d", "decode", one, sends), ("p", "prefill", other, takes))
    ]
    found = list(doubts(told))
    assert bool(found) == (1.0 - (1.0 + late) > one + other)
    if found:
        assert found[0].startswith("a: p took grant ")
