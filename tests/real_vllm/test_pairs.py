"""Real vLLM on both sides, unlike in block size, dtype, heads per rank and kinds of layers: the same tokens as without a transfer."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import START_S, Engine, Pair, at_rest, config, empty, pair, prompt, settle
from regauge.testing.tiny_models import VOCABULARY, tiny_model

LENGTHS = (1, 32, 33, 128, 129, 150, 1_000)
ATTENTION_BYTES = 4 * 4 * 2 * 32 * 4
"""Per token of tiny-llama in fp32: 4 layers, 4 KV heads, K and V of 32 elements."""
ROUNDING = 1e-3
"""Of a logprob: vLLM's two kernels for MLA on the same latents, and transformers, were some 1e-5 apart."""


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """The largest difference of a logarithm of probability; both are of the whole vocabulary."""
    assert len(a) == len(b) == VOCABULARY
    return max(abs(a[token] - b[token]) for token in a)


def pages(block_p: int, block_d: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"block_size": block_p}, {"block_size": block_d}


@pytest.fixture(scope="module")
def llama() -> Path:
    return tiny_model("tiny-llama")


@pytest.fixture(scope="module", params=[(32, 128), (128, 32), (96, 64), (32, 32)], ids=lambda x: f"{x[0]}-{x[1]}")
def blocks(request: pytest.FixtureRequest) -> tuple[int, int]:
    pair_: tuple[int, int] = request.param
    return pair_


@pytest.fixture(scope="module")
def both(blocks: tuple[int, int], llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(llama, tmp_path_factory.mktemp("pair"), *pages(*blocks)) as made:
        yield made


class TestBlockSizes:
    """Stock connectors accept 32 to 128 and answer garbage, or refuse."""

    def test_tokens_are_those_without_a_transfer(self, both: Pair, blocks: tuple[int, int]) -> None:
        for n in LENGTHS:
            ids = prompt(n, n)
            want = both.decode.alone(ids)
            empty(both.prefill)
            before = both.decode.stats()
            assert both.through(ids)["tokens"] == want, f"{n} tokens"
            after = both.decode.stats()
            assert after["bytes_in"] - before["bytes_in"] == n * ATTENTION_BYTES
            assert after["path"] == ("DIRECT" if blocks[0] == blocks[1] else "REMAP")

    def test_eight_at_once(self, both: Pair) -> None:
        prompts = [prompt(100 + i, 40 + 31 * i) for i in range(8)]
        want = [both.decode.alone(ids) for ids in prompts]
        empty(both.prefill)
        begun = [both.begin(ids) for ids in prompts]
        got = [both.decode.answer(d)["tokens"] for _, _, d in begun]
        for _, p, _ in begun:
            both.prefill.answer(p)
        assert got == want
        settle(lambda: at_rest(both.prefill) and at_rest(both.decode))

    def test_a_second_turn_brings_only_what_is_new(self, both: Pair, blocks: tuple[int, int]) -> None:
        first, more = prompt(7, 300), prompt(8, 120)
        want = both.decode.alone([*first, *more])
        empty(both.prefill)
        both.through(first, tokens=1)
        before = both.decode.stats()["bytes_in"]
        assert both.through([*first, *more])["tokens"] == want
        kept = 300 // blocks[1] * blocks[1]
        assert both.decode.stats()["bytes_in"] - before == (420 - kept) * ATTENTION_BYTES

    def test_a_prompt_that_is_there_brings_nothing_and_the_first_token_is_right(self, both: Pair) -> None:
        ids = prompt(9, 400)
        want = both.decode.alone(ids)
        assert both.through(ids)["tokens"] == want
        before = both.decode.stats()["bytes_in"]
        assert both.through(ids)["tokens"] == want
        assert both.decode.stats()["bytes_in"] == before
        settle(lambda: at_rest(both.prefill) and at_rest(both.decode))


def test_two_hundred_aborts_leave_no_block_behind_and_no_answer_wrong(llama: Path, tmp_path: Path) -> None:
    rng = random.Random(1)
    with pair(llama, tmp_path, *pages(32, 64), max_num_batched_tokens=64, transfer={"offer_s": 5.0}) as both:
        ids = prompt(3, 200)
        want = both.decode.alone(ids)
        empty(both.prefill)
        for number in range(200):
            _, p, d = both.begin(prompt(1_000 + number, rng.randrange(1, 300)), tokens=4)
            time.sleep(rng.choice((0, 0, 0.005, 0.02, 0.05)))
            side, name = rng.choice(((both.prefill, p), (both.decode, d)))
            side.say(abort=name)
            side.wait("aborted", name)
            if number % 25 == 0:
                assert both.through(ids)["tokens"] == want
                for each in (both.prefill, both.decode):
                    empty(each)
        settle(lambda: at_rest(both.prefill) and at_rest(both.decode), limit_s=120)
        assert both.through(ids)["tokens"] == want


CONVERTED = [
    ("float16", "float32", 1.0),
    ("float32", "float16", 0.9),
    ("bfloat16", "float32", 0.3),
    ("float32", "bfloat16", 0.3),
]


@pytest.mark.parametrize(("source", "target", "least"), CONVERTED, ids=str)
def test_another_dtype_is_converted(source: str, target: str, least: float, llama: Path, tmp_path: Path) -> None:
    with pair(llama, tmp_path, {"dtype": source, "block_size": 32}, {"dtype": target, "block_size": 64}) as both:
        agree = total = 0
        for n in (33, 150, 400):
            ids = prompt(n, n)
            want = both.decode.alone(ids, tokens=8)
            got = both.through(ids, tokens=8)["tokens"]
            agree, total = agree + sum(a == b for a, b in zip(got, want, strict=True)), total + len(want)
        assert both.decode.stats()["path"] == "CONVERT"
        print(f"{source} to {target}: {agree} of {total} tokens as {target} alone")
        assert agree >= least * total


def test_window_layers_beside_full_ones(tmp_path: Path) -> None:
    with pair(tiny_model("tiny-gemma3"), tmp_path, *pages(32, 64)) as both:
        for n in (1, 100, 128, 129, 400):
            ids = prompt(n, n)
            want = both.decode.alone(ids)
            empty(both.prefill)
            assert both.through(ids)["tokens"] == want, f"{n} tokens"
        settle(lambda: at_rest(both.prefill) and at_rest(both.decode))


def test_latents_give_the_tokens_and_probabilities_of_no_transfer(tmp_path: Path) -> None:
    """Decode computes the last prompt token with vLLM's kernel for decode, an engine alone with that for prefill.

    The control is the engine alone that comes to the same prompt by generating its last token: the kernel for decode without a transfer.
    """
    with pair(tiny_model("tiny-mla"), tmp_path, {}, {}, max_logprobs=-1) as both:
        for n in (1, 16, 17, 150):
            generated = both.decode.answer_alone(prompt(n, n - 1), tokens=2, logprobs=-1) if n > 1 else None
            ids = prompt(n, n) if generated is None else [*prompt(n, n - 1), generated["tokens"][0]]
            alone = both.decode.answer_alone(ids, logprobs=-1)
            before = both.decode.stats()["bytes_in"]
            answer = both.through(ids, logprobs=-1)
            stats = both.decode.stats()
            assert (stats["path"], stats["bytes_in"] - before) == ("DIRECT", n * 3 * (512 + 64) * 4)
            assert answer["tokens"] == alone["tokens"], f"{n} tokens"
            first, second = answer["logprobs"][0], alone["logprobs"][0]
            control = second if generated is None else generated["logprobs"][1]
            told = f"pair to alone {distance(first, second):.1g}, to control {distance(first, control):.1g}"
            print(f"{n} tokens, logprobs: {told}, control to alone {distance(control, second):.1g}")
            assert max(distance(first, second), distance(first, control), distance(control, second)) <= ROUNDING
        other = both.decode.answer_alone([ids[0] ^ 1, *ids[1:]], tokens=1, logprobs=-1)["logprobs"][0]
        print(f"one token of {len(ids)} changed: {distance(other, second):.1g}")
        assert distance(other, second) > 100 * ROUNDING  # what a latent that is wrong does
        settle(lambda: at_rest(both.prefill) and at_rest(both.decode))


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=["1-2", "2-1"])
def test_heads_on_another_number_of_ranks(ranks: tuple[int, int], llama: Path, tmp_path: Path) -> None:
    sides = [{"block_size": size, "tensor_parallel_size": tp} for size, tp in zip((32, 64), ranks, strict=True)]
    with pair(llama, tmp_path, *sides, ranks=ranks) as both:
        for n in (1, 33, 150, 400):
            ids = prompt(n, n)
            want = both.decode.alone(ids)
            empty(both.prefill)
            assert both.through(ids)["tokens"] == want, f"{n} tokens"


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prefill_that_is_killed_costs_time_and_no_answer(policy: str, llama: Path, tmp_path: Path) -> None:
    with pair(
        llama,
        tmp_path,
        *pages(32, 64),
        policy=policy,
        max_num_batched_tokens=64,
        transfer={"resume_s": 1.0, "lease_s": 3.0, "offer_s": 5.0},
    ) as both:
        ids = prompt(5, 1_000)
        want = both.decode.alone(ids)
        _, _, d = both.begin(ids)
        settle(lambda: bool(both.decode.stats()["known"]))
        both.prefill.process.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        got = both.decode.answer(d)
        assert time.monotonic() - begun < 30
        assert (got["tokens"] == want) if policy == "recompute" else (got["reason"] == "error")
        settle(lambda: at_rest(both.decode))


def test_a_decode_that_is_killed_costs_prefill_no_block(llama: Path, tmp_path: Path) -> None:
    with pair(llama, tmp_path, *pages(32, 64), max_num_batched_tokens=64, transfer={"resume_s": 1.0}) as both:
        _, p, _ = both.begin(prompt(6, 1_000))
        os.kill(both.decode.process.pid, signal.SIGKILL)
        both.prefill.answer(p)
        settle(lambda: at_rest(both.prefill), limit_s=30)


def test_wrong_parameters_are_one_requests_error(llama: Path, tmp_path: Path) -> None:
    with pair(llama, tmp_path, *pages(32, 64), policy="fail") as both:
        bad = both.decode.ask(prompt(1, 40), params={"regauge": {"transfer": "x", "from": []}})
        assert both.decode.answer(bad)["reason"] == "error"
        bad = both.prefill.ask(prompt(1, 40), tokens=1, params={"regauge": {"transfer": "x"}})
        assert both.prefill.answer(bad)["reason"] == "error"  # it could as well be for decode, and is not computed then
        bad = both.prefill.ask(prompt(1, 40), tokens=1, params={"regauge": {"transfer": "x", "to": {}}})
        answer = both.prefill.answer(bad)
        assert answer["reason"] == "length"
        assert "$.to" in answer["params"]["regauge"]["error"]
        ids = prompt(2, 40)
        assert both.through(ids)["tokens"] == both.decode.alone(ids)


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
def test_over_another_transport(transport: str, llama: Path, tmp_path: Path) -> None:
    """vLLM's cache is memory of its own, which no transport reaches: chunks go by way of the staging slabs."""
    if transport == "mooncake":
        pytest.importorskip(
            "mooncake.engine", reason="Mooncake is not installed here: scripts/install-transports says why"
        )
    with pair(llama, tmp_path, *pages(32, 64), transfer={"transport": transport}) as both:
        for n in (33, 400):
            ids = prompt(n, n)
            want = both.decode.alone(ids)
            assert both.through(ids)["tokens"] == want, f"{n} tokens"
            assert both.decode.stats()["path"] == "REMAP"
        assert both.decode.stats()["bytes_in"] == (33 + 400) * ATTENTION_BYTES
        settle(lambda: at_rest(both.prefill) and at_rest(both.decode))


@pytest.mark.skipif(torch.cpu._is_avx512_supported(), reason="vLLM's CPU backend takes 8-bit caches with AVX-512")
def test_vllm_refuses_an_eight_bit_cache_on_this_processor(llama: Path, tmp_path: Path) -> None:
    engine = Engine(config(llama, kv_cache_dtype="fp8_e4m3"), tmp_path / "log")
    try:
        with pytest.raises(RuntimeError, match="FP8 KV cache on CPU requires x86 with AVX-512 or AMX"):
            engine.wait("ready", limit_s=START_S)
    finally:
        engine.end()
