"""What becomes of requests to SGLang on decode when prefill dies, or their clients go, behind the gateway."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sides import DECODE, PREFILL, prompt

from regauge.testing.tiny_models import tiny_model
from served import ANSWER_S, Served, served

pytestmark = pytest.mark.timeout(900)
WAIT_S = 120.0
GONE = 60


async def workers(pair: Served, session: aiohttp.ClientSession) -> dict[str, Any]:
    told = (await pair.get(session, "/debug/transfers"))["workers"]
    return {worker["role"]: worker["state"] for worker in told}


async def at_rest(pair: Served, session: aiohttp.ClientSession) -> None:
    """Wait until no transfer is under way and no page is lent."""
    limit = time.monotonic() + WAIT_S
    while True:
        state = await workers(pair, session)
        lent = [pool["leased"] + pool["quarantined"] for pool in state["decode"]["pools"]]
        if not any((*lent, *state["decode"]["transfers"], *state["prefill"]["transfers"])):
            return
        assert time.monotonic() < limit, state
        await asyncio.sleep(0.1)


async def storm(pair: Served, session: aiohttp.ClientSession) -> None:
    """Clients that go at random, streaming or not; who stays gets its own answer."""
    rng = random.Random(6)  # when they go
    prompts = [prompt(1_000 + i, 20 + 9 * i) for i in range(4)]
    want = [(await pair.ask(session, ids))["choices"][0]["text"] for ids in prompts]

    async def one(i: int) -> None:
        ids, leaves = prompts[i % 4], i % 4 != 3
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.6) if leaves else ANSWER_S):
                if i % 2:
                    text = (await pair.ask(session, ids))["choices"][0]["text"]
                else:
                    text = await pair.stream(session, "/v1/completions", prompt=ids)
        except TimeoutError:
            assert leaves
            return
        assert text == want[i % 4]

    for first in range(0, GONE, 6):
        await asyncio.gather(*(one(i) for i in range(first, first + 6)))
    await at_rest(pair, session)


async def killed(pair: Served, session: aiohttp.ClientSession) -> float:
    """Kill prefill under a request; return the seconds until its answer, which is the one of a request that nothing befell."""
    ids = prompt(5, 1_400)
    asking = asyncio.create_task(pair.ask(session, ids))
    while not (await workers(pair, session))["decode"]["transfers"]:
        assert not asking.done(), "the request was over too soon to lose anything"
    os.kill((await workers(pair, session))["prefill"]["pid"], signal.SIGKILL)
    begun = time.monotonic()
    got = (await asking)["choices"][0]["text"]
    took = time.monotonic() - begun
    assert await pair.metric(session, "regauge_retries_total") == 1
    assert (await pair.ask(session, ids))["choices"][0]["text"] == got
    return took


def test_an_answer_is_right_or_there_is_none_and_sglang_stays(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    async def check(pair: Served) -> float:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            await storm(pair, session)
            before = (await workers(pair, session))["decode"]["pid"]
            took = await killed(pair, session)
            await at_rest(pair, session)
            assert (await workers(pair, session))["decode"]["pid"] == before
        return took

    model = tiny_model("tiny-llama")
    with served(tmp_path, model, PREFILL["local"], DECODE["sglang"], {"prefill_wait_s": WAIT_S}) as pair:
        took = asyncio.run(check(pair))
    record_property(
        "lost", f"local -> sglang: {GONE} clients of which most left; prefill killed, the answer {took:.1f} s later"
    )
