"""Requests that would be late are told so, and when to come again, by priority; what is taken is taken whole and kept."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from serve_rig import MODEL, WAIT_S, EchoWorker, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.config_gateway import GatewayConfig
from regauge.config_route import RouteConfig
from regauge.serve.tenants import Tenants, new_key
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
SPEED = 1_000
TWO_S = RouteConfig(ttft_s=2.0)
LIMITS = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=WAIT_S)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "hello"}], **fields}


async def tells(rig: Rig, worker: EchoWorker, **load: float) -> None:
    """Have a worker tell its load, and the gateway know of it."""
    worker.load = load
    state = rig.fleet.workers[worker.name]
    asked = state.begun + 1  # one that is under way may have been answered already
    await rig.until(lambda: state.answered > asked)


async def test_a_late_request_is_told_when_to_come_again_and_is_taken_then(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, route=TWO_S, limits=LIMITS) as rig:
        await tells(rig, rig.prefill, queued_tokens=6 * SPEED, prefill_tokens_per_s=SPEED)
        for stream in (False, True):
            status, body, headers = await rig.post(CHAT, chat(stream=stream))
            assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
            assert "and 1.60 s are allowed: come again in" in body["error"]["message"]
            assert 4 <= int(headers["retry-after"]) <= 5  # a queue of 6 s has to fall to 1.6
        assert not rig.prefill.prefills
        assert not rig.decode.generates
        assert rig.fleet.router.booked == 0
        await tells(rig, rig.prefill, queued_tokens=0, prefill_tokens_per_s=SPEED)
        assert (await rig.post(CHAT, chat()))[0] == 200
        await rig.metrics_text()
        decided = {each: rig.sample("regauge_route_decisions_total", decision=each) for each in ("placed", "deadline")}
        assert decided == {"placed": 1, "deadline": 2}


async def test_higher_priority_is_taken_longer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = {name: new_key() for name in ("low", "usual", "high")}
    priorities = {"low": -4, "usual": 0, "high": 2}
    lines = [f'[tenant.{name}]\nkeys = ["{keys[name][1]}"]\npriority = {priorities[name]}\n' for name in keys]
    (tmp_path / "tenants.toml").write_text("\n".join(lines))
    tenants = Tenants.load(tmp_path / "tenants.toml")
    async with open_rig(tokenizer, route=TWO_S, limits=LIMITS, tenants=tenants) as rig:
        for queued, taken in ((0.4, "low usual high"), (1.2, "usual high"), (1.9, "high"), (4.0, "")):
            await tells(rig, rig.prefill, queued_tokens=int(queued * SPEED), prefill_tokens_per_s=SPEED)
            found = {}
            for name in keys:
                rig.fleet.router.correction.at = (
                    -math.inf
                )  # these workers answer at once, whatever they tell: forgotten
                found[name] = await rig.post(CHAT, chat(), Authorization=f"Bearer {keys[name][0]}")
            assert [name for name in keys if found[name][0] == 200] == taken.split(), queued
            assert all("retry-after" in headers for status, _, headers in found.values() if status == 429)
            await rig.until(lambda: rig.fleet.router.booked == 0)


async def test_of_several_choices_all_are_taken_or_none_begins(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, route=TWO_S, limits=LIMITS) as rig:
        tokens = (await rig.post(CHAT, chat()))[1]["usage"]["prompt_tokens"]
        await tells(rig, rig.prefill, queued_tokens=0, prefill_tokens_per_s=tokens / 0.6)
        seen = len(rig.prefill.prefills), len(rig.decode.generates)
        status, _, headers = await rig.post(CHAT, chat(n=3))  # the third would come after 1.8 s
        assert (status, headers["retry-after"]) == (429, "1")
        assert (len(rig.prefill.prefills), len(rig.decode.generates)) == seen
        assert rig.fleet.router.booked == 0
        status, body, _ = await rig.post(CHAT, chat(n=2))
        assert (status, len(body["choices"])) == (200, 2)


async def test_what_was_taken_is_tried_elsewhere_however_late_it_will_be(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, others=["prefill-1"], route=TWO_S, limits=LIMITS) as rig:
        other = rig.others["prefill-1"]
        await tells(rig, rig.prefill, queued_tokens=0, prefill_tokens_per_s=SPEED)
        await tells(rig, other, queued_tokens=9 * SPEED, prefill_tokens_per_s=SPEED)
        rig.prefill.hold = asyncio.Event()
        asking = asyncio.create_task(rig.post(CHAT, chat()))
        await asyncio.wait_for(rig.prefill.arrivals.get(), WAIT_S)
        await rig.prefill.stop()
        status, _, headers = await asking
        assert (status, "prefill-1>" in headers["x-regauge-route"]) == (200, True)
        assert (await rig.post(CHAT, chat()))[0] == 429, "what comes now is not taken there"


async def test_a_limit_of_time_per_token_refuses_where_no_decode_worker_keeps_it(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, route=RouteConfig(tpot_s=0.05), limits=LIMITS) as rig:
        await tells(rig, rig.decode, tpot_s=0.08, running=3, slots=8)
        status, body, headers = await rig.post(CHAT, chat())
        assert (status, "s per token are predicted" in body["error"]["message"]) == (429, True)
        assert int(headers["retry-after"]) >= 1
        await tells(rig, rig.decode, tpot_s=0.02, running=3, slots=8)
        assert (await rig.post(CHAT, chat()))[0] == 200


@pytest.mark.parametrize("isolates", [None, True, False])
async def test_tenants_share_no_prefixes_unless_they_are_to(
    tokenizer: Tokenizer, tmp_path: Path, isolates: bool | None
) -> None:
    keys = {name: new_key() for name in ("one", "two")}
    (tmp_path / "tenants.toml").write_text("\n".join(f'[tenant.{n}]\nkeys = ["{keys[n][1]}"]\n' for n in keys))
    tenants = Tenants.load(tmp_path / "tenants.toml")
    rules = GatewayConfig(isolate_prefixes=isolates)
    async with open_rig(tokenizer, tenants=tenants, rules=rules, route=RouteConfig(block_tokens=4)) as rig:
        blocks = []
        for name in keys:
            assert (await rig.post(CHAT, chat(), Authorization=f"Bearer {keys[name][0]}"))[0] == 200
            blocks.append(rig.fleet.router.index.hashes)
        salts = ["", ""] if isolates is False else ["one", "two"]
        assert [call.salt for call in rig.prefill.prefills] == [call.salt for call in rig.decode.generates] == salts
        assert blocks[1] == blocks[0] * (1 if isolates is False else 2)


async def test_without_tenants_prefixes_are_everybodys(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        await rig.post(CHAT, chat())
        assert [call.salt for call in rig.prefill.prefills] == [""]


async def test_what_a_worker_tells_is_of_the_time_when_it_was_asked(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        state = rig.fleet.workers["prefill-0"]
        await tells(rig, rig.prefill)
        rig.prefill.frozen = asyncio.Event()
        begun = state.begun
        await rig.until(lambda: state.begun > begun)
        asked = rig.fleet.now()
        held, rig.prefill.frozen = rig.prefill.frozen, asyncio.Event()  # the poll after it has to wait, too
        held.set()
        await rig.until(lambda: state.answered == begun + 1)
        assert rig.fleet.router.workers["prefill-0"].reported < asked
        rig.prefill.frozen.set()
