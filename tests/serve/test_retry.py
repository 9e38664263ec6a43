"""A request that has lost a worker begins again, within bounds, where there is one pair of workers alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from serve_rig import MODEL, WAIT_S, EchoWorker, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.errors import ProtocolError
from regauge.route.cluster import Request
from regauge.route.request import Life, Start, Wait
from regauge.serve import wire
from regauge.serve.lives import settled
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
STREAMED = pytest.mark.parametrize("stream", [False, True])


def chat() -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


async def aborted(worker: EchoWorker) -> str:
    return await asyncio.wait_for(worker.aborts.get(), WAIT_S)


async def arrived(worker: EchoWorker) -> str:
    return await asyncio.wait_for(worker.arrivals.get(), WAIT_S)


@pytest.fixture
async def waiting(tokenizer: Tokenizer) -> AsyncIterator[Rig]:
    """A gateway that waits for a prefill worker to come back."""
    limits = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=WAIT_S)
    async with open_rig(tokenizer, limits=limits) as opened:
        yield opened


@STREAMED
async def test_a_request_begins_again_when_its_prefill_worker_is_back(waiting: Rig, stream: bool) -> None:
    waiting.prefill.hold = asyncio.Event()
    asking = asyncio.create_task(waiting.stream(CHAT, chat()) if stream else waiting.post(CHAT, chat()))
    first = await arrived(waiting.prefill)
    await waiting.prefill.stop()
    assert await aborted(waiting.decode) == first, "decode is told at once"
    await waiting.until(lambda: waiting.sample("regauge_worker_up", worker="prefill-0", role="prefill") == 0)
    assert (await waiting.post(CHAT, chat()))[0] == 503, "what comes meanwhile does not wait"
    waiting.prefill.hold = None
    await waiting.prefill.start()
    if stream:
        events: Any = await asking
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]).startswith("I heard: ")
    else:
        status, body, _ = await asking
        assert (status, body["choices"][0]["message"]["content"][:9]) == (200, "I heard: ")
    assert await arrived(waiting.prefill) != first
    first_call, second_call = waiting.decode.generates
    assert first_call.transfer_id != second_call.transfer_id
    assert waiting.sample("regauge_retries_total") == 1


async def test_a_request_with_which_two_workers_died_is_stopped(waiting: Rig) -> None:
    waiting.prefill.die_after = 0
    status, body, _ = await waiting.post(CHAT, chat())
    assert (status, body["error"]["code"], len(waiting.prefill.prefills)) == (500, "request_stopped", 2)
    assert body["error"]["message"] == "2 workers died with this request in hand, so it is not tried again"


@pytest.mark.parametrize(("code", "attempts"), [("engine_failed", 4), ("transfer_failed", 4), ("prompt_too_large", 1), ("queue_full", 1)])  # fmt: skip
async def test_what_others_would_say_as_well_is_not_tried_again(waiting: Rig, code: wire.Code, attempts: int) -> None:
    waiting.prefill.refuse = wire.ErrorEvent(code, "no", "prefill-0")
    status, body, _ = await waiting.post(CHAT, chat())
    assert (status >= 400, body["error"]["message"]) == (True, "prefill worker prefill-0: no")
    assert len(waiting.prefill.prefills) == attempts


async def test_a_prefill_worker_that_stays_away_is_waited_for_so_long(tokenizer: Tokenizer) -> None:
    limits = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=0.2)
    async with open_rig(tokenizer, limits=limits) as rig:
        rig.prefill.hold = asyncio.Event()
        asking = asyncio.create_task(rig.post(CHAT, chat()))
        await arrived(rig.prefill)
        await rig.prefill.stop()
        status, body, _ = await asking
        assert (status, body["error"]["code"]) == (503, "worker_unavailable")
        assert rig.sample("regauge_retries_total") == 0


async def test_nothing_begins_again_once_the_client_has_seen_some_of_it(waiting: Rig) -> None:
    waiting.decode.break_after = (2, wire.ErrorEvent("transfer_failed", "lost", "decode-0"))
    events = await waiting.stream(CHAT, chat())
    assert events[-1]["error"]["code"] == "transfer_failed"
    assert len(waiting.decode.generates) == 1


async def test_a_worker_that_is_there_is_not_asked_in_a_circle(waiting: Rig) -> None:
    """Every poll finds it at once; the request comes again when its life says so."""
    fleet = waiting.fleet
    life = Life(Request("r", model=MODEL), fleet.router)
    assert isinstance(life.begin(fleet.now()), Start)
    step = life.failure("failed", "prefill-0", "prefill", fleet.now())
    assert isinstance(step, Wait)
    found = await settled(step, life, fleet, "failed", ProtocolError("no"))
    assert (found.route.prefill, fleet.now() >= step.earliest) == ("prefill-0", True)
    life.finished(fleet.now())
