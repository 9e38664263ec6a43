"""Worker processes that die, are late, slow or cannot be understood: whoever waits is told, and none is left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from regauge.config import TransferConfig
from regauge.testing.child import Child
from regauge.testing.endings import SIDES, Pair, Shape, Side
from regauge.testing.violation import Violation

pytestmark = [pytest.mark.process, pytest.mark.anyio]
READY = "import json, sys\nsys.stdin.readline()\nprint(json.dumps({'id': 0, 'answer': 7}), flush=True)\n"
EVER = "import signal\nsignal.pause()\n"


class Role(msgspec.Struct):
    """What these processes are told, and do not read."""


async def start(program: str, limit_s: float = 20.0) -> Child:
    return await Child.start(Role(), command=("-c", program), limit_s=limit_s)


def children() -> set[str]:
    return {pid for each in Path("/proc/self/task").glob("*/children") for pid in each.read_text("ascii").split()}


async def test_a_process_that_dies_at_its_start_is_noticed_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(Violation, match="the process has ended with exit code 3"):
        await start("raise SystemExit(3)", limit_s=60.0)
    assert time.monotonic() - began < 30


async def test_a_process_that_is_not_ready_in_time_is_ended() -> None:
    before = children()
    with pytest.raises(Violation, match=r"its start: no answer within 0\.3 s"):
        await start(EVER, limit_s=0.3)
    assert children() == before


async def test_an_answer_that_comes_too_late_hurts_no_later_order() -> None:
    late = "first, second = (json.loads(sys.stdin.readline())['id'] for _ in 'ab')\n"
    both = "for each in (first, second, 99):\n    print(json.dumps({'id': each, 'answer': each}), flush=True)\n"
    child = await start(READY + late + both)
    try:
        assert child.facts == 7
        with pytest.raises(Violation, match=r"one: no answer within 0\.1 s"):
            await child.ask("one", limit_s=0.1)
        assert await child.ask("two") == 2
    finally:
        await child.close()


async def test_who_waits_for_a_process_that_dies_is_told() -> None:
    child = await start(READY + "sys.stdin.readline()\nraise SystemExit(4)\n")
    try:
        early = child.event("ended", "t")
        with pytest.raises(Violation, match="exit code 4"):
            await child.ask("anything")
        for event in (early, child.event("ended", "u")):
            with pytest.raises(Violation, match="exit code 4"):
                await event
        with pytest.raises(Violation, match="more: the process has ended with exit code 4"):
            await child.ask("more")
    finally:
        await child.close()


@pytest.mark.parametrize("broken", SIDES)
async def test_a_pair_ends_both_though_ending_one_fails(broken: Side) -> None:
    before = children()
    pair = Pair(Shape(TransferConfig(), pages=1, spare=0))
    for side in SIDES:
        pair.children[side] = await start(READY + "print('no JSON')\n" * (side == broken))
    with pytest.raises(json.JSONDecodeError):
        await pair.close()
    assert children() == before
