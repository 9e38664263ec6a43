"""Spans of requests at a real OTLP receiver: as the gateway's own time line, under the client's trace; and a collector that is down changes nothing."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_collector import Collector, collector, values
from serve_rig import Rig, free_port, open_rig

from regauge.config import LimitsConfig
from regauge.errors import ConfigError
from regauge.serve import wire
from regauge.serve.recent import TimeLine
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
SECRET = "Tell me of the gauge."
CHAT = {"model": "echo-1", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RENAMED = {"decodes": "decode"}
SPANS = 12
"""Of a request that is tried once."""
WORKERS_HAVE = ("traceparent", "tracestate")


async def ask(rig: Rig, name: str, **headers: str) -> tuple[int, TimeLine]:
    """Have a request take a while, and answered; return the gateway's time line of it."""
    rig.prefill.hold, begun = asyncio.Event(), time.monotonic()
    asking = asyncio.create_task(rig.post(PATH, CHAT, x_request_id=name, **headers))
    await rig.until(lambda: time.monotonic() > begun + 0.05)  # more than the workers say that they took
    rig.prefill.hold.set()
    status = (await asking)[0]
    found = await rig.get(f"/debug/trace/{name}")
    return status, msgspec.convert(found[1], TimeLine)


def whole(spans: list[Span], *, nested: bool = False) -> tuple[Span, dict[bytes, Span]]:
    """Return the first span, and all by id; each has one parent, of the same trace. `nested`: and lies within it, as where workers say what is so."""
    by = {span.span_id: span for span in spans}
    assert len(by) == len(spans)
    tops = [span for span in spans if span.parent_span_id not in by]
    assert [span.name for span in tops] == ["request"]
    for span in spans:
        assert span.trace_id == tops[0].trace_id
        above = by.get(span.parent_span_id)
        if above is not None and nested:
            slack = 2_000  # a float of seconds since 1970 is good to half a microsecond
            assert above.start_time_unix_nano <= span.start_time_unix_nano + slack, (above.name, span.name)
            assert span.end_time_unix_nano <= above.end_time_unix_nano + slack, (above.name, span.name)
    return tops[0], by


async def test_a_requests_spans_are_its_time_line(tokenizer: Tokenizer) -> None:
    async with collector() as taken:
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            status, line = await ask(rig, "mine")
        # the gateway has ended: what it had is here
        assert status == 200
        top, by = whole(taken.spans, nested=True)
        assert (top.parent_span_id, top.kind) == (b"", Span.SPAN_KIND_SERVER)
        [tried] = line.tries
        base = round(line.request.unix_s * 1e9)
        at = {(s.name, s.start_time_unix_nano - base, s.end_time_unix_nano - base) for s in taken.spans}
        for span in tried.spans:
            name = RENAMED.get(span.name, span.name)
            assert any(
                each[0] == name and abs(each[1] / 1e9 - span.begin_s) < 2e-6 and abs(each[2] / 1e9 - span.end_s) < 2e-6
                for each in at
            ), (span, at)
        above = {span.name: by[span.parent_span_id].name for span in taken.spans if span is not top}
        assert above == {
            "attempt": "request",
            "prefill": "attempt",
            "waits for its turn": "prefill",
            "computes the prompt": "prefill",
            "KV not yet across": "prefill",
            "transfer": "attempt",
            "expect to offer": "transfer",
            "grant to first byte": "transfer",
            "first byte to last": "transfer",
            "last byte to commit": "transfer",
            "decode": "attempt",
        }
        said = values(top.attributes)
        assert said["regauge.request_id"] == "mine"
        assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", "echo-1")
        assert said["gen_ai.usage.input_tokens"] == line.request.prompt_tokens
        assert said["gen_ai.usage.output_tokens"] == line.request.completion_tokens == 5
        assert said["gen_ai.response.time_to_first_chunk"] == line.request.ttft_s
        assert (said["http.route"], said["http.response.status_code"]) == (PATH, 200)
        [attempt] = taken.named("attempt")
        told = values(attempt.attributes)
        assert (told["regauge.prefill"], told["regauge.decode"]) == ("prefill-0", "decode-0")
        assert (told["regauge.outcome"], told["regauge.wire_bytes"]) == ("complete", tried.wire_bytes)
        assert told["regauge.transfer_id"] == rig.decode.generates[0].transfer_id
        [event] = attempt.events
        assert abs((event.time_unix_nano - base) / 1e9 - tried.tokens_s[0]) < 2e-6
        assert {each["service.name"] for each in taken.resources} == {"regauge"}
        assert all(SECRET not in str(span) for span in taken.spans)
        assert rig.sample("regauge_spans_lost_total", reason="not_taken") == 0


async def test_the_clients_trace_goes_on_to_the_workers(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"00-{TRACE}-{PARENT}-01"
    async with collector() as taken:
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            await rig.post(PATH, CHAT, traceparent=given, tracestate="a=1,b=2")
            heard = [
                {name: worker.headers[-1].get(name) for name in WORKERS_HAVE} for worker in (rig.prefill, rig.decode)
            ]
        top, _ = whole(taken.spans)
        assert (top.trace_id.hex(), top.parent_span_id.hex(), top.trace_state) == (TRACE, PARENT, "a=1,b=2")
        [attempt] = taken.named("attempt")
        told = {"traceparent": f"00-{TRACE}-{attempt.span_id.hex()}-01", "tracestate": "a=1,b=2"}
        assert heard == [told, told]
        assert TRACE in capsys.readouterr().out


async def test_what_the_client_does_not_sample_is_not_exported(tokenizer: Tokenizer) -> None:
    given = f"00-{TRACE}-{PARENT}-00"
    async with collector() as taken:
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            await rig.post(PATH, CHAT, traceparent=given)
            assert rig.decode.headers[-1]["traceparent"] == given
        assert taken.spans == []


async def test_without_a_collector_the_clients_trace_goes_through(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        await rig.post(PATH, CHAT, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=1")
        told = {name: rig.decode.headers[-1].get(name) for name in WORKERS_HAVE}
        assert told == {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=1"}
        await rig.post(PATH, CHAT, traceparent="junk", tracestate="a=1")
        assert not any(name in rig.decode.headers[-1] for name in WORKERS_HAVE)


async def test_a_retried_and_a_failed_request(tokenizer: Tokenizer) -> None:
    async with collector() as taken:
        limits = LimitsConfig(request_timeout_s=10.0, prefill_wait_s=10.0)
        async with open_rig(tokenizer, otlp=taken.url, limits=limits) as rig:
            rig.prefill.die_after, rig.prefill.recovers = 0, True
            status, line = (await rig.post(PATH, CHAT, x_request_id="again"))[0], await rig.get("/debug/trace/again")
            assert status == 200
        tries = msgspec.convert(line[1], TimeLine).tries
        top, _ = whole(taken.spans)
        attempts = taken.named("attempt")
        assert [values(each.attributes)["regauge.request_id"] for each in attempts] == [each.name for each in tries]
        assert top.status.code == Status.STATUS_CODE_UNSET
        assert [each.outcome for each in tries] == ["failed", "complete"]
        for span, tried in zip(attempts, tries, strict=True):
            failed = tried.outcome == "failed"
            assert (span.status.code == Status.STATUS_CODE_ERROR, span.status.message) == (failed, tried.error)
        assert len({each.span_id for each in attempts}) == len(attempts)
    async with collector() as taken:
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            rig.decode.refuse = wire.ErrorEvent("engine_failed", "the engine broke", "decode-0")
            status = (await rig.post(PATH, CHAT))[0]
        top, _ = whole(taken.spans)
        assert status >= 500
        assert top.status.code == Status.STATUS_CODE_ERROR
        assert "the engine broke" in top.status.message
        said: dict[str, Any] = values(top.attributes)
        assert said["http.response.status_code"] == status == int(said["error.type"])


async def slowest(rig: Rig) -> float:
    times = []
    for _ in range(5):
        begun = time.monotonic()
        assert (await rig.post(PATH, CHAT))[0] == 200
        times.append(time.monotonic() - begun)
    return max(times)


async def ended(rig: Rig) -> float:
    """End the gateway; return the seconds that it took."""
    begun = time.monotonic()
    rig.server.should_exit = True
    await rig.serving
    return time.monotonic() - begun


async def test_a_collector_that_is_down_changes_nothing(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, otlp=f"http://127.0.0.1:{free_port()}") as rig:
        assert await slowest(rig) < 1.0
        assert await ended(rig) < 5.0
        assert rig.sample("regauge_spans_lost_total", reason="not_taken") == 5 * SPANS


async def test_a_collector_that_hangs_changes_nothing(tokenizer: Tokenizer) -> None:
    async with collector() as taken:
        taken.hangs = asyncio.Event()
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            await rig.post(PATH, CHAT)
            await rig.until(lambda: taken.asked > 0)
            assert await slowest(rig) < 1.0, "while a batch is on its way"
            assert await ended(rig) < 5.0, "CLOSE_S, and what the server takes"
            assert rig.sample("regauge_spans_lost_total", reason="not_taken") == 6 * SPANS


async def test_what_a_collector_refuses_is_counted(tokenizer: Tokenizer) -> None:
    async with collector() as taken:
        taken.status = 400
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            await rig.post(PATH, CHAT)
            await ended(rig)
            assert rig.sample("regauge_spans_lost_total", reason="not_taken") == SPANS
        assert taken.spans == []


async def test_with_too_many_waiting_whole_requests_are_lost(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge.serve.otlp.MOST_WAITING", 2 * SPANS + 1)
    taken: Collector
    async with collector() as taken:
        taken.hangs = asyncio.Event()
        async with open_rig(tokenizer, otlp=taken.url) as rig:
            for _ in range(5):
                await rig.post(PATH, CHAT)
            await rig.until(lambda: rig.sample("regauge_spans_lost_total", reason="queue_full") == 3 * SPANS)
            taken.hangs.set()
        assert len(taken.named("request")) == 2
        assert len(taken.spans) == 2 * SPANS


async def test_without_the_extra_the_gateway_does_not_start(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "regauge.serve.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"observe\.otlp: needs OpenTelemetry .*pip install 'regauge\[otlp\]'"):
        async with open_rig(tokenizer, otlp="http://127.0.0.1:4318"):
            pass
