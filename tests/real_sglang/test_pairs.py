"""Real SGLang servers with regauge between them: what decode answers is what one server alone does, whatever the two sides keep their KV in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from by_transformers import agreeing, both_say, handed_over, load
from sglang_client import Answer, prompt
from sglang_servers import OURS, Pair, Peer, Router, Server, Side, Site, pair, settle

from regauge.testing.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(1_200)  # the first test of a pair waits for its servers
LENGTHS = (1, 16, 17, 246, 1_000)
PROMPTS = [prompt(n, tokens) for n, tokens in enumerate(LENGTHS)]
TOKENS = 16
MORE = [prompt(50 + n, 33 + 15 * n) for n in range(12)]
"""Where dtypes are compared: the longer a prompt, the sooner they say different things."""
AGREE = 0.5
"""Least share of the tokens that both dtypes say alone which has to come out of a pair that converts; of wrong KV next to none does."""
EXACT = {
    "16-to-16": (Side(), Side(), "DIRECT"),
    "16-to-64": (Side(), Side(page=64), "REMAP"),
    "64-to-16": (Side(page=64), Side(), "REMAP"),
    "1-to-16": (Side(page=1), Side(), "REMAP"),
}
CONVERTED = {
    "bf16-to-fp32": (Side("bfloat16"), Side(page=64), "CONVERT"),
    "fp32-to-bf16": (Side(), Side("bfloat16"), "CONVERT"),
}
DIRECT = pytest.mark.parametrize("both", ["16-to-16"], indirect=True)
Alone = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """What one server answers to each prompt, per dtype; both have ended."""
    folder, out = tmp_path_factory.mktemp("alone"), {}
    with ExitStack() as stack:
        servers = {
            dtype: stack.enter_context(Server(tiny_model("tiny-llama"), folder / dtype, Side(dtype)))
            for dtype in ("float32", "bfloat16")
        }
        for dtype, server in servers.items():
            server.ready()
            answers = [server.generate(ids, TOKENS) for ids in PROMPTS + MORE]
            assert all(answer.good for answer in answers), answers
            out[dtype] = [answer.ids for answer in answers]
    return out


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
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
def test_every_token_is_that_of_one_server(both: Pair, alone: Alone, stream: bool) -> None:
    """Streamed, each prompt is asked for again: prefill has all of it but the last page in its cache then."""
    answers = [both.through(ids, TOKENS, stream=stream) for ids in PROMPTS]
    assert ids_of([decode for _, decode in answers]) == alone["float32"][: len(PROMPTS)]
    assert ids_of([prefill for prefill, _ in answers]) == [ids[:1] for ids in alone["float32"][: len(PROMPTS)]]


@pytest.mark.parametrize("both", EXACT, indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_eight_at_once(both: Pair, alone: Alone, stream: bool) -> None:
    for server in (both.prefill, both.decode):
        settle(server.flush)
    order = [4, 3, 2, 1, 0, 4, 3, 2]
    begun = [both.begin(PROMPTS[n], TOKENS, stream=stream) for n in order]
    assert ids_of([decode.result() for _, decode in begun]) == [alone["float32"][n] for n in order]
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
def test_what_is_converted_says_what_both_dtypes_say(both: Pair, alone: Alone, request: pytest.FixtureRequest) -> None:
    prefill, decode, _ = CONVERTED[request.node.callspec.params["both"]]
    came = ids_of([both.through(ids, TOKENS)[1] for ids in PROMPTS + MORE])
    control = both_say(alone[decode.dtype], alone[prefill.dtype])
    one, two = (load(tiny_model("tiny-llama"), side.dtype) for side in (prefill, decode))
    cast = [handed_over(one, two, ids, TOKENS) for ids in PROMPTS + MORE]
    agree, of = agreeing(came, control)
    print(
        f"\n{prefill} to {decode}: of {of} tokens that both dtypes say alone, {agree} came; of transformers' KV, cast, "
        f"{agreeing(cast, control)[0]}; of {len(came)} answers {sum(c == k for c, k in zip(came, cast, strict=True))} are as these"
    )
    assert [ids[0] for ids in came] == [ids[0] for ids in alone[prefill.dtype]]  # in the hand-over
    assert agree >= AGREE * of > 0


@DIRECT
@pytest.mark.parametrize("stream", [False, True])
def test_behind_sglang_router(both: Pair, alone: Alone, tmp_path: Path, stream: bool) -> None:
    with Router(both, tmp_path / "router.log") as router:
        router.ready()
        answers = [router.generate(ids, TOKENS, stream=stream) for ids in PROMPTS]
        assert ids_of(answers) == alone["float32"][: len(PROMPTS)], router.said()


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
        assert both.through(PROMPTS[3], TOKENS)[1].ids == alone["float32"][3]
        settle(other.at_rest)
