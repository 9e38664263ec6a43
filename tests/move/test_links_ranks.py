"""Several ranks and several state groups over real connections: every decode rank's memory ends as the reference says."""

from __future__ import annotations

import asyncio
import random
from itertools import cycle

import pytest
from links_rig import settle
from rank_rig import NAME, Ranks, joined, ranks

from regauge.errors import Refused, TransferFailed
from regauge.move.conformance import catalogue
from regauge.move.conformance.suite import source
from regauge.plan.ranks import crossings

QWEN, DEEPSEEK, GLM, OSS = "qwen3-30b-a3b ", "deepseek-v3 ", "glm-5 ", "gpt-oss-20b "
NEXT, KIMI = "qwen3-next-80b-a3b ", "kimi-linear-48b-a3b "
CASES = {
    "tp 4 to 2": (QWEN + "engine:vllm,pool=LBHNC,tp=4", QWEN + "engine:vllm,pool=LBNHC,page=32,tp=2", "tcp", "staged"),
    "tp 2 to 8": (QWEN + "engine:vllm,pool=cpu,tp=2", QWEN + "engine:vllm,pool=B2NHC,tp=8", "shm", "fused"),
    "tp 2 to 4, copied": (QWEN + "engine:vllm,pool=cpu,tp=2", QWEN + "engine:sglang,page=64,tp=4", "tcp", "mapped"),
    "stages to tp": (QWEN + "engine:vllm,pool=BLNHC,tp=2,pp=2", QWEN + "engine:sglang,page=64,tp=4", "tcp", "auto"),
    "stages to stages": (
        QWEN + "engine:vllm,pool=BLHNC,page=64,pp=2", QWEN + "engine:sglang,page=16,dtype=fp8_e5m2,pp=2", "shm", "auto",
    ),
    "stripes to tp": (
        QWEN + "engine:vllm,pool=LBNHC,tp=8,cp=2,stripe=16", QWEN + "engine:sglang,page=64,tp=4", "tcp", "auto",
    ),
    "stripes to stripes": (
        DEEPSEEK + "engine:vllm,tp=4,cp=4,stripe=8", DEEPSEEK + "engine:sglang,tp=2,cp=2", "shm", "auto",
    ),
    "latent, converted": (
        DEEPSEEK + "engine:sglang,tp=2", DEEPSEEK + "engine:vllm,dtype=fp8,calibrated,tp=4", "tcp", "auto",
    ),
    "indexer": (
        GLM + "engine:sglang,dtype=fp8_e4m3,tp=4", GLM + "engine:sglang,pool=page_first_direct,dtype=fp8_e4m3", "tcp", "auto",
    ),
    "window": (OSS + "engine:vllm,pool=LBNHC,page=32,tp=4", OSS + "engine:sglang,pool=hnd,page=16,pp=2", "shm", "auto"),
    "window, staged": (OSS + "engine:sglang,tp=2", OSS + "engine:sglang,page=64,tp=8,dtype=fp8_e4m3", "tcp", "auto"),
    "recurrent": (NEXT + "engine:vllm,pool=LBNHC,ssm-dtype=float32,tp=2", NEXT + "engine:sglang,page=32,pp=2", "shm", "auto"),
    "recurrent, staged": (KIMI + "engine:vllm,tp=4", KIMI + "engine:sglang,page=64,tp=2", "tcp", "auto"),
}  # fmt: skip


OTHERS = [name for name in catalogue.FORMS if not any(name in case[0] for case in CASES.values())]


@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES)
async def test_every_rank_gets_what_it_keeps(case: str) -> None:
    prefill, decode, kind, mode = CASES[case]
    async with ranks(prefill, decode, kind, mode=mode) as r:
        await whole(r)


@pytest.mark.anyio
@pytest.mark.parametrize(("model", "kind"), list(zip(OTHERS, cycle(["tcp", "shm"]), strict=False)))
async def test_a_sample_of_the_catalogue(model: str, kind: str) -> None:
    """One pair of each model that is carried, and has not too many ranks for a test."""
    draw = random.Random(f"{model} {kind} 4")
    while True:
        forms = draw.choice(catalogue.FORMS[model]), draw.choice(catalogue.FORMS[model])
        sides = [catalogue.build(catalogue.Entry(model, form)) for form in forms]
        if len(sides[0]) * len(sides[1]) > 8:
            continue
        try:
            crossings(*sides)
        except Refused:
            continue
        break
    async with joined(source(forms[0], sides[0], 1), sides[1], kind, seed=1) as r:
        await whole(r)


async def whole(r: Ranks) -> None:
    """Carry the request, and see that it is there and that everybody has been told."""
    assert r.difference() != ""
    arrivals = await r.carry()
    assert r.difference() == ""
    first = [f"first token of p{i}".encode() for i in range(len(r.prefill))]
    for rank, arrived in zip(r.decode, arrivals, strict=True):
        assert arrived.handover in first
        assert arrived.wire_bytes > 0
        assert [pool.state(NAME) for pool in rank.links.pools] == ["committed"] * len(rank.links.pools)
        assert rank.links.transfers() == []
    for i, sender in enumerate(r.prefill):
        assert sender.freed == bool(r.of(i))
        assert sender.links.transfers() == []


TWO = (QWEN + "engine:vllm,pool=cpu,tp=2", QWEN + "engine:sglang,page=64,tp=4")
STAGES = (QWEN + "engine:vllm,pool=BLHNC,page=64,pp=2", QWEN + "engine:vllm,pool=LBHNC")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("offered_first", [False, True])
async def test_a_stage_that_is_left_out_is_noticed_and_named(kind: str, *, offered_first: bool) -> None:
    async with ranks(*STAGES, kind) as r:
        (decode,) = r.decode
        before = decode.pool.copy()
        if offered_first:
            sent = await r.prefill[0].offer([decode])
            await settle(lambda: bool(decode.links.receiver._early))
            arrival = decode.expect(["p0"])
        else:
            arrival = decode.expect(["p0"])
            sent = await r.prefill[0].offer([decode])
        missing = (
            r"p0 together do not send attention k, layers 1 to 1; attention v, layers 1 to 1: name every prefill rank"
        )
        with pytest.raises(TransferFailed, match=missing):
            await asyncio.wait_for(arrival, 20)
        with pytest.raises(TransferFailed, match=r"do not send|gave the transfer up"):
            await asyncio.wait_for(sent.done(), 20)
        assert (before.memory == decode.pool.memory).all()
        assert r.prefill[0].freed == 1
        assert [pool.state(NAME) for pool in decode.links.pools] == [None]


@pytest.mark.anyio
async def test_a_rank_that_sends_nothing_is_named() -> None:
    async with ranks(*TWO, "shm") as r:
        last = r.decode[3]
        assert last.peers == [1]
        with pytest.raises(Refused, match="nothing of what d3 keeps is sent from p0: leave it out of the transfer"):
            await r.prefill[0].offer([last])
        await whole(r)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["tcp", "shm"])
async def test_one_prefill_rank_that_gives_up_ends_the_transfer_on_every_rank(kind: str) -> None:
    async with ranks(*reversed(TWO), kind) as r:  # four prefill ranks, two decode ranks that get half each
        arrivals = [rank.expect() for rank in r.decode]
        sent = [await sender.offer(r.of(i)) for i, sender in enumerate(r.prefill)]
        for each in sent:
            await each.wait_granted()
        for sender, each in zip(r.prefill[:2], sent, strict=False):
            sender.compute(each)
        sent[3].cancel("the engine failed")
        with pytest.raises(TransferFailed, match="the engine failed"):
            await asyncio.wait_for(arrivals[1], 20)
        for each in sent[2:]:
            with pytest.raises(TransferFailed, match=r"the engine failed|gave the transfer up"):
                await asyncio.wait_for(each.done(), 20)
        await asyncio.wait_for(arrivals[0], 20)  # the other decode rank's half comes from others
        await settle(lambda: not any(rank.links.transfers() for rank in r.decode))
        assert [[pool.state(NAME) for pool in rank.links.pools] for rank in r.decode] == [["committed"], [None]]
        for each in sent[:2]:
            await asyncio.wait_for(each.done(), 20)
        assert [sender.freed for sender in r.prefill] == [1, 1, 1, 1]


@pytest.mark.anyio
async def test_a_link_that_breaks_is_made_anew_and_other_links_go_on() -> None:
    async with ranks(*STAGES, "tcp") as r:
        (decode,) = r.decode
        arrival = decode.expect()
        sent = [await sender.offer([decode]) for sender in r.prefill]
        for each in sent:
            await each.wait_granted()
        r.prefill[0].compute(sent[0])
        decode.links._links["p1"].channel.close()
        r.prefill[1].compute(sent[1])
        await asyncio.wait_for(arrival, 20)
        for each in sent:
            await each.done()
        assert r.difference() == ""
