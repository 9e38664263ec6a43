"""Several workers of each role: where requests go, and what becomes of them when workers die, leave, or come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from serve_rig import MODEL, WAIT_S, EchoWorker, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.config_route import RouteConfig
from regauge.serve import wire
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
LIMITS = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=WAIT_S)
EACH = RouteConfig(policy="round-robin")


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "hello"}], **fields}


def text(events: list[Any]) -> str:
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1] if event["choices"])


def decodes(rig: Rig) -> list[EchoWorker]:
    return [rig.decode, rig.others["decode-1"]]


async def test_requests_go_to_all_workers_in_turn_and_say_where(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["prefill-1", "decode-1"], route=EACH, limits=LIMITS) as rig:
        routes = {(await rig.post(CHAT, chat()))[2]["x-regauge-route"].split()[1] for _ in range(8)}
        assert {name for route in routes for name in route.split(">")} == {
            "prefill-0",
            "prefill-1",
            "decode-0",
            "decode-1",
        }


async def test_a_decode_worker_that_dies_in_mid_stream_is_made_good_unseen(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["decode-1"], limits=LIMITS) as rig:
        whole = await rig.stream(CHAT, chat(stream_options={"include_usage": True}))
        for worker in decodes(rig):
            worker.die_after = 4
        [first] = [worker for worker in decodes(rig) if worker.generates]
        [other] = [worker for worker in decodes(rig) if worker is not first]
        first.die_after, other.die_after = 4, None
        events = await rig.stream(CHAT, chat(stream_options={"include_usage": True}))
        if not other.generates:  # the router had chosen the other one
            first.die_after, other.die_after = None, 4
            events = await rig.stream(CHAT, chat(stream_options={"include_usage": True}))
        assert (text(events), events[-2]["usage"]) == (text(whole), whole[-2]["usage"])
        resumed = max(
            (call for worker in decodes(rig) for call in worker.generates), key=lambda call: len(call.generated)
        )
        assert len(resumed.generated) == 4
        assert rig.sample("regauge_resumed_answers_total") == 1


async def test_a_prefill_worker_that_fails_is_replaced_unseen(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["prefill-1"], route=EACH, limits=LIMITS) as rig:
        rig.prefill.die_after = 0
        for _ in range(4):
            status, body, headers = await rig.post(CHAT, chat())
            assert (status, body["choices"][0]["message"]["content"][:9]) == (200, "I heard: ")
            assert "prefill-1>" in headers["x-regauge-route"]
        assert len(rig.prefill.prefills) >= 1


async def test_sampling_that_nobody_can_go_on_with_ends_with_its_worker(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["decode-1"], limits=LIMITS) as rig:
        for worker in decodes(rig):
            worker.die_after = 4
        events = await rig.stream(CHAT, chat(temperature=1))
        assert events[-1]["error"]["code"] == "worker_unavailable"


async def test_a_seed_that_the_worker_tells_is_gone_on_with(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["decode-1"], limits=LIMITS) as rig:
        for worker in decodes(rig):
            worker.die_after = 4
        events = await rig.stream(CHAT, chat(temperature=1, seed=7))
        assert events[-1]["error"]["code"] == "request_stopped", "two workers died of it"
        assert [len(call.generated) for worker in decodes(rig) for call in worker.generates if call.generated] == [4]
        assert {call.sampling.seed for worker in decodes(rig) for call in worker.generates} == {7}


async def test_a_worker_that_is_full_is_passed_by_and_all_full_is_told_at_once(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["decode-1"], limits=LIMITS) as rig:
        full = wire.ErrorEvent("queue_full", "full", "decode-0")
        rig.decode.refuse = full
        assert (await rig.post(CHAT, chat()))[0] == 200
        rig.others["decode-1"].refuse = full
        status, body, headers = await rig.post(CHAT, chat())
        assert (status, body["error"]["code"], "retry-after" in headers) == (429, "rate_limit_exceeded", True)


async def test_workers_leave_and_join_while_requests_run(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["prefill-1", "decode-1"], limits=LIMITS) as rig:
        rig.decode.hold = asyncio.Event()
        rig.others["decode-1"].hold = asyncio.Event()
        asking = asyncio.create_task(rig.post(CHAT, chat()))
        arrivals = [asyncio.create_task(worker.arrivals.get()) for worker in decodes(rig)]
        done, pending = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        for task in pending:
            task.cancel()
        [busy] = [worker for worker, task in zip(decodes(rig), arrivals, strict=True) if task in done]
        [other] = [worker for worker in decodes(rig) if worker is not busy]
        assert other.hold is not None
        other.hold.set()
        rig.fleet.leave(busy.name)
        status, body, headers = await asking
        assert (status, body["choices"][0]["message"]["content"][:9]) == (200, "I heard: ")
        assert f">{other.name} " in headers["x-regauge-route"]
        assert busy.hold is not None
        busy.hold.set()
        rig.fleet.join(busy.address)
        rig.fleet.leave(other.name)
        await rig.until(lambda: rig.fleet.workers[busy.name].usable)
        assert f">{busy.name} " in (await rig.post(CHAT, chat()))[2]["x-regauge-route"]
        _, ready, _ = await rig.get("/ready")
        assert {worker["name"] for worker in ready["workers"]} == {"prefill-0", "prefill-1", busy.name}


async def test_without_any_worker_the_client_is_told_what_lacks(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, limits=LIMITS) as rig:
        rig.fleet.leave("decode-0")
        status, body, _ = await rig.post(CHAT, chat())
        assert (status, body["error"]["message"]) == (
            503,
            "no decode worker is known: start one, or name it under workers",
        )


async def test_why_names_the_choice_and_what_came_of_it(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["prefill-1"], route=EACH, limits=LIMITS) as rig:
        rig.prefill.die_after = 0
        rig.prefill.recovers = True
        for name in ("one", "two"):
            await rig.post(CHAT, chat(), X_Request_Id=name)
        told = [await rig.get(f"/debug/why/{name}") for name in ("one", "two")]
        texts = [body["requests"][0]["text"] for _, body, _ in told]
        assert any("worker_lost" in each and "prefill-1 > decode-0" in each for each in texts), texts
        status, body, _ = await rig.get("/debug/why/three")
        assert (status, body["error"]["code"]) == (404, "request_not_found")
