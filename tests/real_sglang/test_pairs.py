"""Real SGLang servers with regauge between them: what decode answers is what one server alone does, whatever the two sides keep their KV in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from by_transformers import Reference, load
from sglang_client import Answer, prompt
from sglang_servers import OURS, Pair, Peer, Router, Server, Side, Site, pair, settle

from regauge.testing.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(1_200)  # the first test of a pair waits for its servers
LENGTHS = (1, 16, 17, 246, 1_000)
PROMPTS = [prompt(n, tokens) for n, tokens in enumerate(LENGTHS)]
TOKENS = 16
MORE = [prompt(50 + n, 33 + 15 * n) for n in range(12)]
"""Where dtypes are compared: the longer a prompt, the sooner they say different things."""
TWO_RANKS = Side(args=("--tp-size", "2"), environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"})
"""One processor for both: SGLang would else want a NUMA node for each."""
EXACT = {
    "16-to-16": (Side(), Side(), "DIRECT"),
    "16-to-64": (Side(), Side(page=64), "REMAP"),
    "64-to-16": (Side(page=64), Side(), "REMAP"),
    "1-to-16": (Side(page=1), Side(), "REMAP"),
    "2-ranks-to-1": (TWO_RANKS, Side(page=64), "REMAP"),
    "1-rank-to-2": (Side(page=64), TWO_RANKS, "REMAP"),
}
CONVERTED = {
    "bf16-to-fp32": (Side("bfloat16"), Side(page=64), "CONVERT"),
    "fp32-to-bf16": (Side(), Side("bfloat16"), "CONVERT"),
}
DIRECT = pytest.mark.parametrize("both", ["16-to-16"], indirect=True)
Alone = list[list[int]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one server answers to each of PROMPTS in float32; it has ended."""
    with Server(tiny_model("tiny-llama"), tmp_path_factory.mktemp("alone") / "log", Side()) as server:
        server.ready()
        return ids_of([server.generate(ids, TOKENS) for ids in PROMPTS])


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The pair that the parameter names."""
    prefill, decode, _ = (EXACT | CONVERTED)[request.param]
    with pair(Site(tiny_model("tiny-llama"), tmp_path_factory.mktemp("pair"), OURS), prefill, decode) as made:
        made.ready()
        yield made
        settle(made.at_rest)


def ids_of(answers: Sequence[Answer]) -> list[list[int]]:
    assert all(answer.good for answer in answers), answers
    return [answer.ids for answer in answers]


@pytest.mark.parametrize("both", EXACT, indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_every_token_is_that_of_one_server(alone: Alone, both: Pair, stream: bool) -> None:
    """Streamed, each prompt is asked for again: prefill has all of it but the last page in its cache then."""
    answers = [both.through(ids, TOKENS, stream=stream) for ids in PROMPTS]
    assert ids_of([decode for _, decode in answers]) == alone
    assert ids_of([prefill for prefill, _ in answers]) == [ids[:1] for ids in alone]


@pytest.mark.parametrize("both", EXACT, indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_eight_at_once(both: Pair, alone: Alone, stream: bool) -> None:
    for server in (both.prefill, both.decode):
        settle(server.flush)
    order = [4, 3, 2, 1, 0, 4, 3, 2]
    begun = [both.begin(PROMPTS[n], TOKENS, stream=stream) for n in order]
    assert ids_of([decode.result() for _, decode in begun]) == [alone[n] for n in order]
    assert all(prefill.result().good for prefill, _ in begun)


@pytest.mark.parametrize("both", EXACT | CONVERTED, indirect=True)
def test_the_path_is_told(both: Pair, request: pytest.FixtureRequest) -> None:
    path = (EXACT | CONVERTED)[request.node.callspec.params["both"]][2]
    named = both.bootstrapped()
    both.through(PROMPTS[3], 2, **named)
    for server, role in ((both.prefill, "prefill"), (both.decode, "decode")):
        code, end = server.tell(f"/transfers/room-{named['bootstrap_room']}?wait_s=30")
        assert (code, end["role"], end["error"], end["path"]) == (200, role, "", path)
        assert end["wire_bytes"] > 0


@pytest.mark.parametrize("both", CONVERTED, indirect=True)
def test_what_is_converted_comes_to_what_a_cast_can(both: Pair, request: pytest.FixtureRequest) -> None:
    prefill, decode, _ = CONVERTED[request.node.callspec.params["both"]]
    answers = [both.through(ids, TOKENS) for ids in PROMPTS + MORE]
    came = ids_of([two for _, two in answers])
    assert [ids[:1] for ids in came] == ids_of([one for one, _ in answers])  # in the hand-over
    with both.halted():
        one, two = (load(tiny_model("tiny-llama"), side.dtype) for side in (prefill, decode))
        verdict = Reference(one, two, PROMPTS + MORE, TOKENS).judge(came)
    print(f"\n{prefill} to {decode}: {verdict}")
    assert verdict.right


@DIRECT
@pytest.mark.parametrize("stream", [False, True])
def test_behind_sglang_router(both: Pair, alone: Alone, tmp_path: Path, stream: bool) -> None:
    with Router(both, tmp_path / "router.log") as router:
        router.ready()
        answers = [router.generate(ids, TOKENS, stream=stream) for ids in PROMPTS]
        assert ids_of(answers) == alone, router.said()


@DIRECT
def test_a_request_to_an_unlike_model_fails_with_the_reason(both: Pair, alone: Alone) -> None:
    """Decode is of another model: its request and prefill's fail, say why, and nothing else does."""
    with Peer(both.prefill.site, "decode", Side(), name="other", model=tiny_model("tiny-gemma3")) as other:
        other.ready()
        mixed = Pair(both.prefill, other)
        begun = time.monotonic()
        answers = mixed.through(PROMPTS[3], TOKENS)
        mixed.close()
        print(f"\nrefused within {time.monotonic() - begun:.2f} s: {[answer.error for answer in answers]}")
        for answer in answers:
            assert answer.status == 500
            assert "layers" in answer.error
        assert other.health() == 200
        assert both.through(PROMPTS[3], TOKENS)[1].ids == alone[3]
        settle(other.at_rest)
