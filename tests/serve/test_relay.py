"""Requests that go wrong: who is told what, how soon, and that nothing is left behind on either worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from serve_rig import MODEL, WAIT_S, EchoWorker, Rig, open_rig, train

from regauge.config import LimitsConfig
from regauge.serve import wire
from regauge.serve.text import Tokenizer
from regauge.serve.workers import HealthPolicy

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
STREAMED = pytest.mark.parametrize("stream", [False, True])


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
async def fresh(tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    async with open_rig(tokenizer) as opened:
        yield opened


async def aborted(worker: EchoWorker) -> str:
    return await asyncio.wait_for(worker.aborts.get(), WAIT_S)


async def arrived(worker: EchoWorker) -> str:
    return await asyncio.wait_for(worker.arrivals.get(), WAIT_S)


async def nothing_left(rig: Rig) -> None:
    """Both workers were told to drop the request, and the gateway has forgotten it."""
    request_id = rig.decode.generates[-1].request_id
    assert await aborted(rig.decode) == await aborted(rig.prefill) == request_id
    await rig.until(lambda: not rig.decode.running and not rig.prefill.running)
    await rig.until(lambda: rig.sample("regauge_requests_in_flight") == 0)


@STREAMED
async def test_a_failed_prefill_ends_the_decode_leg_and_is_named(fresh: Rig, stream: bool) -> None:
    fresh.prefill.refuse = wire.ErrorEvent("engine_failed", "NaN in layer 3", "prefill-0")
    status, body, _ = await fresh.post(CHAT, chat(stream=stream))
    assert status == 500
    assert body["error"] == {
        "message": "prefill worker prefill-0: NaN in layer 3",
        "type": "server_error",
        "param": None,
        "code": "engine_failed",
    }
    await nothing_left(fresh)
    fresh.prefill.refuse = None
    assert (await fresh.post(CHAT, chat()))[0] == 200


@pytest.mark.parametrize(
    ("code", "status", "api_code"),
    [
        ("queue_full", 429, "rate_limit_exceeded"),
        ("prompt_too_large", 400, "context_length_exceeded"),
        ("draining", 503, "worker_unavailable"),
        ("aborted", 503, "worker_unavailable"),
        ("timeout", 504, "timeout"),
        ("transfer_failed", 502, "transfer_failed"),
        ("engine_failed", 500, "engine_failed"),
        ("duplicate_request", 500, "duplicate_request"),
        ("bad_request", 500, "bad_request"),
    ],
)
async def test_what_a_worker_says_becomes_the_apis_status(
    fresh: Rig, code: wire.Code, status: int, api_code: str
) -> None:
    fresh.decode.refuse = wire.ErrorEvent(code, "because", "decode-0")
    fresh.prefill.hold = asyncio.Event()
    got, body, headers = await fresh.post(CHAT, chat())
    assert (got, body["error"]["code"]) == (status, api_code)
    assert body["error"]["message"] == "decode worker decode-0: because"
    assert ("retry-after" in headers) == (code in ("queue_full", "draining", "aborted"))
    assert await aborted(fresh.prefill) == fresh.decode.generates[-1].request_id


async def test_a_prefill_worker_that_dies_is_named(fresh: Rig) -> None:
    fresh.prefill.die_after = 0
    status, body, _ = await fresh.post(CHAT, chat())
    assert (status, body["error"]["code"]) == (503, "worker_unavailable")
    assert "prefill worker prefill-0 is lost" in body["error"]["message"]
    await nothing_left(fresh)


async def test_a_death_explains_the_other_workers_complaint(fresh: Rig) -> None:
    fresh.prefill.hold = asyncio.Event()
    fresh.decode.refuse = wire.ErrorEvent("transfer_failed", "peer lost", "decode-0")

    async def die() -> None:
        await arrived(fresh.prefill)
        await fresh.prefill.stop()

    death = asyncio.create_task(die())
    status, body, _ = await fresh.post(CHAT, chat())
    await death
    assert status == 503
    assert "prefill worker prefill-0 is lost" in body["error"]["message"]


async def test_a_decode_worker_that_dies_in_mid_stream_ends_it_with_an_event_that_names_it(
    fresh: Rig,
) -> None:
    fresh.decode.die_after = 3
    async with asyncio.timeout(2):
        events = await fresh.stream(CHAT, chat())
    assert "[DONE]" not in events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == "I heard:"
    assert events[-1]["error"]["code"] == "worker_unavailable"
    assert "decode worker decode-0 is lost" in events[-1]["error"]["message"]
    await nothing_left(fresh)


async def test_an_error_in_mid_stream_is_the_last_event(fresh: Rig) -> None:
    fresh.decode.break_after = (2, wire.ErrorEvent("engine_failed", "out of pages", "decode-0"))
    events = await fresh.stream(CHAT, chat())
    assert events[-1]["error"]["message"] == "decode worker decode-0: out of pages"
    assert events[-2]["choices"][0]["delta"] == {"content": " heard"}
    status, body, _ = await fresh.post(CHAT, chat())
    assert (status, body) == (500, events[-1])
    assert fresh.sample("regauge_completion_tokens_total") == 0, "only whole answers are counted"


@STREAMED
async def test_a_hang_is_bounded_by_the_requests_time_limit(tokenizer: Tokenizer, stream: bool) -> None:
    async with open_rig(tokenizer, limits=LimitsConfig(request_timeout_s=0.2)) as rig:
        rig.decode.hold = asyncio.Event()
        async with asyncio.timeout(2):
            status, body, _ = await rig.post(CHAT, chat(stream=stream))
        assert (status, body["error"]["code"]) == (504, "timeout")
        assert "decode-0" in body["error"]["message"]
        await nothing_left(rig)


async def test_a_hang_in_mid_stream_ends_in_an_event(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, limits=LimitsConfig(request_timeout_s=0.3)) as rig:
        never = asyncio.Event()

        async def stall(count: int) -> None:
            if count == 2:
                await never.wait()

        rig.decode.pace = stall
        async with asyncio.timeout(2):
            events = await rig.stream(CHAT, chat())
        assert events[-1]["error"]["code"] == "timeout"
        never.set()
        await nothing_left(rig)


@STREAMED
async def test_a_client_that_goes_before_the_first_token_ends_its_request(fresh: Rig, stream: bool) -> None:
    fresh.prefill.hold = fresh.decode.hold = asyncio.Event()
    call = asyncio.create_task(fresh.post(CHAT, chat(stream=stream)))
    await arrived(fresh.prefill)
    await arrived(fresh.decode)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await nothing_left(fresh)
    await fresh.until(lambda: fresh.sample("regauge_requests_total", route=CHAT, status="499") == 1)


async def test_a_client_that_goes_in_mid_stream_ends_its_request(fresh: Rig) -> None:
    gate = asyncio.Event()

    async def stall(count: int) -> None:
        if count == 3:
            await gate.wait()

    fresh.decode.pace = stall
    async with aclosing(fresh.events(CHAT, chat())) as events:
        assert (await anext(events))["choices"][0]["delta"]["role"] == "assistant"
        assert (await anext(events))["choices"][0]["delta"]["content"] == "I"
    request_id = fresh.decode.generates[-1].request_id
    assert await aborted(fresh.decode) == request_id
    assert await aborted(fresh.prefill) == request_id
    gate.set()
    await fresh.until(lambda: fresh.sample("regauge_requests_in_flight") == 0)


async def test_one_answers_failure_ends_all_of_the_request(fresh: Rig) -> None:
    gate = asyncio.Event()

    async def stall(count: int) -> None:
        if fresh.decode.die_after is None:
            fresh.decode.die_after = 0  # the stream that comes here first dies, the others wait
        else:
            await gate.wait()

    fresh.decode.pace = stall
    status, body, _ = await fresh.post(CHAT, chat(n=3))
    assert status == 503
    assert "decode-0" in body["error"]["message"]
    ids = {call.request_id for call in fresh.decode.generates}
    assert len(ids) == 3
    assert {await aborted(fresh.decode) for _ in range(3)} == ids
    gate.set()


async def test_a_prefill_call_that_lingers_does_not_keep_the_client(fresh: Rig) -> None:
    fresh.prefill.linger = asyncio.Event()
    status, body, _ = await fresh.post(CHAT, chat())
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "stop"
    await nothing_left(fresh)


async def test_the_workers_own_fault_is_told_and_not_its_peers_complaint(fresh: Rig) -> None:
    fresh.prefill.refuse = wire.ErrorEvent("transfer_failed", "refused by decode-0", "prefill-0")
    fresh.decode.break_after = (0, wire.ErrorEvent("queue_full", "no pages", "decode-0"))
    fresh.decode.hold = asyncio.Event()
    call = asyncio.create_task(fresh.post(CHAT, chat()))
    await arrived(fresh.decode)
    await arrived(fresh.prefill)
    for call_ in fresh.decode.generates:
        fresh.decode._rail(call_.transfer_id).set_result(None)
    fresh.decode.hold.set()
    status, body, _ = await call
    assert (status, body["error"]["message"]) == (429, "decode worker decode-0: no pages")


async def test_a_client_that_does_not_read_is_given_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.serve.endpoints.SLOW_READER_S", 0.1)
    async with open_rig(tokenizer, limits=LimitsConfig(request_timeout_s=0.2)) as rig:
        body = msgspec.json.encode(chat(stream=True))
        never = asyncio.Event()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if not inbox:
                await never.wait()
            return inbox.pop()

        async def send(_: Any) -> None:
            await never.wait()

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
        async with asyncio.timeout(WAIT_S):
            await rig.server.config.loaded_app(scope, receive, send)
        assert rig.sample("regauge_requests_in_flight") == 0
        await rig.until(lambda: not rig.decode.running and not rig.prefill.running)


async def test_the_same_request_id_twice_at_once_is_two_requests(fresh: Rig) -> None:
    answers = await asyncio.gather(*(fresh.post(CHAT, chat(), x_request_id="same") for _ in range(2)))
    assert [status for status, _, _ in answers] == [200, 200]
    assert len({call.request_id for call in fresh.decode.generates}) == 2


async def ready(rig: Rig) -> tuple[int, dict[str, Any]]:
    status, body, _ = await rig.get("/ready")
    return status, {worker["name"]: worker for worker in body["workers"]}


async def ready_is(rig: Rig, status: int) -> dict[str, Any]:
    """Ask until /ready has this status; return its workers by name."""
    async with asyncio.timeout(WAIT_S):
        while True:
            got, workers = await ready(rig)
            if got == status:
                return workers


async def test_a_dead_worker_is_named_until_it_is_back(fresh: Rig) -> None:
    await fresh.decode.stop()
    workers = await ready_is(fresh, 503)
    assert (workers["decode-0"]["up"], workers["prefill-0"]["up"]) == (False, True)
    assert workers["decode-0"]["reason"]
    status, body, _ = await fresh.post(CHAT, chat())
    assert (status, body["error"]["type"], body["error"]["code"]) == (
        503,
        "server_error",
        "worker_unavailable",
    )
    since = workers["decode-0"]["since"][:19]
    assert body["error"]["message"].startswith(f"decode worker decode-0 is not available since {since}")
    assert fresh.sample("regauge_worker_up", worker="decode-0", role="decode") == 0
    assert (await fresh.get("/health"))[0] == 200, "the gateway itself is alive"
    await fresh.decode.start()
    await ready_is(fresh, 200)
    assert (await fresh.post(CHAT, chat()))[0] == 200


async def test_a_worker_that_is_not_there_at_the_start(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, prefill_up=False) as rig:
        status, workers = await ready(rig)
        assert (status, workers["prefill-0"]["up"]) == (503, False)
        await rig.prefill.start()
        await ready_is(rig, 200)


async def test_a_lost_request_has_its_worker_asked_at_once(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, policy=HealthPolicy(period_s=100 * WAIT_S)) as rig:
        rig.decode.hold = asyncio.Event()
        call = asyncio.create_task(rig.post(CHAT, chat()))
        await arrived(rig.decode)
        await rig.decode.stop()
        assert (await call)[0] == 503
        assert not (await ready_is(rig, 503))["decode-0"]["up"]


async def test_a_frozen_worker_is_given_up_and_its_requests_end(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, policy=HealthPolicy(period_s=0.05, limit_s=0.2)) as rig:
        rig.decode.hold = rig.decode.frozen = asyncio.Event()
        async with asyncio.timeout(5):
            status, body, _ = await rig.post(CHAT, chat())
        assert status == 503
        assert "decode worker decode-0 is lost: no answer to GET /health" in body["error"]["message"]
        assert not (await ready(rig))[1]["decode-0"]["up"]


async def test_a_draining_worker_gets_nothing_new(fresh: Rig) -> None:
    fresh.decode.status = "draining"
    await ready_is(fresh, 503)
    status, body, _ = await fresh.post(CHAT, chat())
    assert (status, body["error"]["code"]) == (503, "worker_unavailable")
    assert "decode-0 is shutting down" in body["error"]["message"]


async def refused(rig: Rig) -> None:
    """Return once the gateway accepts no new connection."""
    port = int(rig.base.rsplit(":", 1)[1])
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                return
            writer.close()
            await writer.wait_closed()


async def test_a_shutdown_lets_streams_finish_within_the_grace(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, grace_s=WAIT_S) as rig:
        gate = asyncio.Event()

        async def stall(count: int) -> None:
            if count == 2:
                await gate.wait()

        rig.decode.pace = stall
        async with aclosing(rig.events(CHAT, chat())) as events:
            await anext(events)
            rig.server.should_exit = True
            await refused(rig)
            gate.set()
            rest = [event async for event in events]
        assert rest[-1] == "[DONE]"
        await asyncio.wait_for(asyncio.shield(rig.serving), WAIT_S)


async def test_a_shutdown_ends_longer_streams_with_an_event(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, grace_s=0.1) as rig:
        gate = asyncio.Event()

        async def stall(count: int) -> None:
            if count == 2:
                await gate.wait()

        rig.decode.pace = stall
        async with aclosing(rig.events(CHAT, chat())) as events:
            await anext(events)
            rig.server.should_exit = True
            rest = [event async for event in events]
        assert rest[-1]["error"]["code"] == "shutting_down"
        await asyncio.wait_for(asyncio.shield(rig.serving), WAIT_S)
        request_id = rig.decode.generates[-1].request_id
        assert await aborted(rig.decode) == await aborted(rig.prefill) == request_id
        gate.set()


async def test_a_bug_is_a_500_that_points_to_the_log() -> None:
    async with open_rig(Tokenizer(train(), template="{{ 1 // 0 }}", max_context=64)) as rig:
        status, body, headers = await rig.post(CHAT, chat(), x_request_id="r-1")
        assert (status, body["error"]["code"], headers["x-request-id"]) == (500, "internal_error", "r-1")
        assert "r-1" in body["error"]["message"]
        assert rig.sample("regauge_requests_total", route=CHAT, status="500") == 1


async def test_a_template_that_refuses_is_the_clients_400() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    async with open_rig(Tokenizer(train(), template=template)) as rig:
        status, body, _ = await rig.post(CHAT, chat())
        assert (status, body["error"]["param"]) == (400, "messages")
        assert "roles must alternate" in body["error"]["message"]
