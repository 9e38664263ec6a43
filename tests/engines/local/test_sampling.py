"""Sampling against plain references: exact candidate sets and probabilities, exact continuation."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from regauge.engines.local.sampling import Sampler, SamplingError, SamplingParams, candidates, waits
from regauge.errors import EngineError

logits_of = hnp.arrays(
    np.float32,
    st.integers(1, 40),
    # A coarse grid makes ties, which the cuts must break by id.
    elements=st.integers(-12, 12).map(lambda n: n / 4),
)


def reference(scores: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """The cuts as their definitions say, one token at a time."""
    high = max(float(s) for s in scores)
    weight = {i: math.exp((float(s) - high) / params.temperature) for i, s in enumerate(scores)}
    left = sorted((i for i in weight if weight[i] >= params.min_p), key=lambda i: (-weight[i], i))
    if params.top_k:
        left = left[: params.top_k]
    total = math.fsum(weight[i] for i in left)
    kept, mass = [], 0.0
    for i in left:
        kept.append(i)
        mass += weight[i]
        if params.top_p < 1 and mass >= params.top_p * total:
            break
    total = math.fsum(weight[i] for i in kept)
    return {i: weight[i] / total for i in sorted(kept)}


@given(
    logits_of,
    st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    st.sampled_from([0.011, 0.31, 0.513, 0.87, 0.993, 1.0]),
    st.integers(0, 45),
    st.sampled_from([0.0, 0.053, 0.37]),
)
@settings(max_examples=200, deadline=None)
def test_candidates_are_those_of_the_definition(
    logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    ids, shares = candidates(logits, params)
    expected = reference(logits, params)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(shares, list(expected.values()), rtol=1e-12)


@pytest.mark.parametrize("top_p", [0.05, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_agrees_with_a_full_sort(top_p: float) -> None:
    """The nucleus is first sought among the likeliest 1024 tokens; it must not matter whether it lies there."""
    logits = np.random.default_rng(3).normal(0, 1, 5000).astype(np.float32)
    params = SamplingParams(max_tokens=1, top_p=top_p)
    ids, _ = candidates(logits, params)
    assert ids.tolist() == list(reference(logits, params))
    assert (len(ids) > 1024) == (top_p > 0.4)


def test_each_token_is_drawn_with_the_chance_of_its_share() -> None:
    """The first of a race whose rates are the shares: counts within five standard deviations, each draw as its times say."""
    shares = np.array([0.1, 0.2, 0.3, 0.4])
    sampler = Sampler(SamplingParams(max_tokens=4_000, seed=11))
    drawn = [sampler.sample(np.log(shares).astype(np.float32)).token for _ in range(4_000)]
    assert drawn[:500] == [int(np.argmin(waits(11, n, 4) / shares)) for n in range(500)]
    counts = np.bincount(drawn, minlength=4)
    assert (np.abs(counts - 4_000 * shares) < 5 * np.sqrt(4_000 * shares * (1 - shares))).all()


def test_arithmetic_that_rounds_otherwise_hardly_ever_changes_a_token() -> None:
    """A flat distribution over a large vocabulary, logits that differ as those of another batch do: bf16 keys and values."""
    rng = np.random.default_rng(2)
    rows = rng.normal(0, 1, (200, 20_000)).astype(np.float32)
    params = SamplingParams(max_tokens=1, temperature=1.5)
    other = rows + rng.normal(0, 1e-3, rows.shape).astype(np.float32)
    same = [
        Sampler(params, seed=n).sample(a).token == Sampler(params, seed=n).sample(b).token
        for n, (a, b) in enumerate(zip(rows, other, strict=True))
    ]
    assert sum(same) >= 197


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_a_sampler_rebuilt_elsewhere_continues_bit_for_bit(seed: int, moved_after: int) -> None:
    rows = np.random.default_rng(5).normal(0, 2, (40, 64)).astype(np.float32)
    params = SamplingParams(max_tokens=40, seed=seed, presence_penalty=0.7, frequency_penalty=0.4, top_p=0.9)
    here = Sampler(params)
    tokens = [here.sample(row).token for row in rows]
    there = Sampler(params, generated=tokens[:moved_after])
    assert there.position == moved_after
    assert [there.sample(row).token for row in rows[moved_after:]] == tokens[moved_after:]


def test_an_unseeded_stream_can_be_continued_by_the_seed_it_chose() -> None:
    rows = np.random.default_rng(6).normal(0, 1, (20, 100)).astype(np.float32)
    params = SamplingParams(max_tokens=20)
    first, other = Sampler(params), Sampler(params)
    assert first.seed != other.seed
    tokens = [first.sample(row).token for row in rows]
    assert [Sampler(params, seed=first.seed).sample(rows[0]).token] == tokens[:1]
    later = Sampler(params, seed=first.seed, generated=tokens[:7])
    assert [later.sample(row).token for row in rows[7:]] == tokens[7:]


def test_the_stream_is_philox_and_never_changes() -> None:
    """Workers of different versions hand requests over: these numbers are part of the protocol."""
    numbers = [[round(float(x), 12) for x in waits(1, n, 2)] for n in range(3)]
    assert numbers == [
        [1.192149527849, 0.164039202544],
        [1.026902555921, 1.195158566968],
        [0.055853653817, 0.363470185277],
    ]


@given(logits_of)
@settings(max_examples=60, deadline=None)
def test_greedy_takes_the_lowest_id_of_the_likeliest(logits: np.ndarray) -> None:
    expected = next(i for i, s in enumerate(logits) if s == logits.max())
    for params in (SamplingParams(max_tokens=1, temperature=0), SamplingParams(max_tokens=1, top_k=1)):
        assert Sampler(params).sample(logits).token == expected


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = np.array([2.0, 1.0, 1.0, -1.0], dtype=np.float32)
    total = math.log(sum(math.exp(v) for v in logits))
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=3, presence_penalty=2.0)
    sampled = Sampler(params, generated=[0]).sample(logits)
    assert sampled.token == 1  # the penalty moved token 0 down, the report stays the model's
    assert sampled.logprob == pytest.approx(1.0 - total, abs=1e-12)
    assert sampled.top is not None
    assert [token for token, _ in sampled.top] == [0, 1, 2]
    assert [value for _, value in sampled.top] == pytest.approx([2 - total, 1 - total, 1 - total], abs=1e-12)


@pytest.mark.parametrize(("logprobs", "top"), [(None, None), (0, ())])
def test_logprobs_only_when_asked(logprobs: int | None, top: tuple[()] | None) -> None:
    sampled = Sampler(SamplingParams(max_tokens=1, temperature=0, logprobs=logprobs)).sample(
        np.array([0.0, 1.0], dtype=np.float32)
    )
    assert sampled.top == top
    assert (sampled.logprob is None) == (logprobs is None)


def test_penalties_follow_the_openai_formula() -> None:
    logits = np.array([1.0, 0.9, 0.0], dtype=np.float32)
    once = SamplingParams(max_tokens=9, temperature=0, frequency_penalty=0.06)
    assert Sampler(once, generated=[0]).sample(logits).token == 0  # 1.0 - 1 x 0.06 > 0.9
    assert Sampler(once, generated=[0, 0]).sample(logits).token == 1  # 1.0 - 2 x 0.06 < 0.9
    flat = SamplingParams(max_tokens=9, temperature=0, presence_penalty=0.06)
    assert Sampler(flat, generated=[0, 0]).sample(logits).token == 0
    assert logits.tolist() == pytest.approx([1.0, 0.9, 0.0])  # the caller's logits are left alone


def test_banned_tokens_are_never_chosen() -> None:
    logits = np.array([5.0, 4.0, 3.0], dtype=np.float32)
    assert Sampler(SamplingParams(max_tokens=1, temperature=0)).sample(logits, banned={0, 99}).token == 1
    sampler = Sampler(SamplingParams(max_tokens=50, seed=1))
    assert {sampler.sample(logits, banned={0}).token for _ in range(50)} == {1, 2}
    with pytest.raises(EngineError, match="every token is banned"):
        Sampler(SamplingParams(max_tokens=1, temperature=0)).sample(logits, banned={0, 1, 2})
    with pytest.raises(EngineError, match="every token is banned"):
        Sampler(SamplingParams(max_tokens=1)).sample(logits, banned={0, 1, 2})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_an_error(bad: float) -> None:
    with pytest.raises(EngineError, match="not finite"):
        Sampler(SamplingParams(max_tokens=1)).sample(np.array([0.0, bad], dtype=np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", 2**64),
        ("stop_token_ids", (3, -1)),
        ("logprobs", 21),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("min_tokens", 9),
    ],
)
def test_errors_name_the_field(field: str, value: object) -> None:
    with pytest.raises(SamplingError, match=field) as raised:
        SamplingParams(**{"max_tokens": 8, field: value})
    assert raised.value.field == field


def test_params_travel_as_json_and_unknown_fields_are_refused() -> None:
    params = SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=(4, 5), seed=-1)
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="top_q"):
        msgspec.json.decode(b'{"max_tokens": 3, "top_q": 1}', type=SamplingParams)
    with pytest.raises(msgspec.ValidationError, match=r"top_p: 3\.0 is out of range"):
        msgspec.json.decode(b'{"max_tokens": 3, "top_p": 3.0}', type=SamplingParams)
