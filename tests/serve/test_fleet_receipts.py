"""The gateway's word on attempts whose workers, or clients, went away at an awkward moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serve_rig import MODEL, WAIT_S, EchoWorker, open_rig

from meter_cases import KEYS, trust
from regauge.config import LimitsConfig
from regauge.config_meter import MeterConfig
from regauge.meter.receipt import Receipt
from regauge.meter.store import Store
from regauge.observe import Metrics
from regauge.serve.metering import Meter
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
LIMITS = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=WAIT_S)


@pytest.fixture
def meter(tmp_path: Path) -> Iterator[Meter]:
    config = MeterConfig(store=str(tmp_path / "receipts.db"), keys=str(tmp_path))
    made = Meter(config, KEYS["gw-0"], trust(), Metrics.create("test"), name="gw-0", model=MODEL)
    yield made
    made.close()


def receipts(meter: Meter) -> list[Receipt]:
    """What is in the store, in the order in which it began."""
    meter.flush()
    store = Store(meter.config.store, create=False)
    try:
        return sorted((signed.receipt for signed in store.receipts()), key=lambda r: r.began_us)
    finally:
        store.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "hello"}], **fields}


async def test_a_client_that_leaves_while_its_answer_waits_for_a_worker_leaves_a_receipt(
    tokenizer: Tokenizer, meter: Meter
) -> None:
    async with open_rig(tokenizer, limits=LIMITS, billing=meter) as rig:
        held = asyncio.Event()

        async def pace(count: int) -> None:
            if count == 4:
                held.set()
                await asyncio.Event().wait()

        rig.decode.pace = pace
        data = msgspec.json.encode(chat(stream=True))
        async with rig.client.post(rig.base + CHAT, data=data) as answer:
            await answer.content.readline()
            await asyncio.wait_for(held.wait(), WAIT_S)
            await rig.decode.stop()
            await rig.until(lambda: not rig.fleet.workers["decode-0"].up)
            answer.close()
        await rig.until(lambda: bool(receipts(meter)))
        [said] = receipts(meter)
        assert (said.outcome, said.generated, said.silent) == ("resumed", 4, ())


async def test_cached_tokens_are_told_as_they_are_charged(tokenizer: Tokenizer, meter: Meter) -> None:
    async with open_rig(tokenizer, others=["decode-1"], limits=LIMITS, billing=meter) as rig:
        rig.prefill.cached = 3
        one, two = rig.decode, rig.others["decode-1"]

        def pace(other: EchoWorker) -> Callable[[int], Any]:
            async def died(_: int) -> None:
                rig.prefill.cached = 1  # as if another worker of the role had it next
                other.die_after = None

            return died

        for worker, other in ((one, two), (two, one)):
            worker.die_after, worker.pace = 0, pace(other)
        status, body, _ = await rig.post(CHAT, chat())
        assert status == 200
        await rig.until(lambda: bool(receipts(meter)) and receipts(meter)[-1].outcome == "complete")
        last = receipts(meter)[-1]
        assert [r.outcome for r in receipts(meter)] == ["failed", "complete"]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == last.cached == rig.prefill.cached


async def test_two_answers_to_a_prompt_pay_for_it_once_as_usage_says(tokenizer: Tokenizer, meter: Meter) -> None:
    async with open_rig(tokenizer, limits=LIMITS, billing=meter) as rig:
        rig.prefill.cached = 3
        status, body, _ = await rig.post(CHAT, chat(n=2))
        assert status == 200
        await rig.until(lambda: len(receipts(meter)) == 2)
        first, other = sorted(receipts(meter), key=lambda r: r.request)
        assert (first.resumes, other.resumes) == ("", first.request)
        assert (first.prompt, first.cached) == (body["usage"]["prompt_tokens"], 3)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
        assert (first.generated or 0) + (other.generated or 0) == body["usage"]["completion_tokens"]


async def test_decode_that_has_no_receipt_to_give_when_it_is_dropped_is_said_to_be_silent(
    tokenizer: Tokenizer, meter: Meter
) -> None:
    async with open_rig(tokenizer, limits=LIMITS, billing=meter) as rig:
        status, body, _ = await rig.post(CHAT, chat(stop=["hear"]))
        assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
        await rig.until(lambda: bool(receipts(meter)))
        [said] = receipts(meter)
        assert (said.outcome, said.silent) == ("cancelled", ("decode",))
