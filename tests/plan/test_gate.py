"""The gate: a pair that converts needs a record that is signed, covers exactly it, and is good enough."""

from __future__ import annotations

import msgspec
import pytest

from quality_records import (
    GOOD,
    HEADS,
    KEY,
    LAYERS,
    MODEL,
    OTHER_KEY,
    per_head,
    record_of,
    result,
    scaled,
    table,
)
from regauge.config import QualityLimits
from regauge.layout.presets import from_short
from regauge.layout.spec import Layout, Model, Scale, Shard
from regauge.plan import quality
from regauge.plan.gate import Gate, shortfalls

TRUST = [KEY.public_key()]
PLAIN = from_short("bf16", MODEL)
RECORD = record_of(PLAIN, per_head())
SIGNED = quality.sign(RECORD, KEY)


def ask(prefill: Layout, decode: Layout, *signed: quality.Signed, **more: object) -> list[str]:
    gate = Gate({f"r{i}": s for i, s in enumerate(signed)}, TRUST, **more)  # type: ignore[arg-type]
    verdict = gate.check(prefill, decode, whole=False)
    assert (verdict.path == "REFUSED") == bool(verdict.refusals)
    return [str(r) for r in verdict.refusals]


def test_the_pair_that_was_measured_passes() -> None:
    assert ask(PLAIN, per_head(), SIGNED) == []


@pytest.mark.parametrize("form", ["bf16", "bf16,page=64,hnd,fused,page-first"])
def test_what_does_not_convert_needs_no_record(form: str) -> None:
    assert ask(PLAIN, from_short(form, MODEL)) == []


def test_without_a_record_the_refusal_says_how_to_get_one() -> None:
    (refusal,) = ask(PLAIN, per_head())
    assert refusal.startswith(
        "quality: prefill has bfloat16 without scale, decode has float8_e4m3fn with a scale per head (constant, rule reciprocal). "
    )
    assert "no quality record is given: measure it with `regauge bench accuracy" in refusal


def test_pages_and_axes_move_values_and_do_not_change_them() -> None:
    other = from_short("bf16,page=64,hnd", MODEL), per_head("fp8_e4m3,page=8,kt,page-first")
    assert ask(*other, SIGNED) == []


@pytest.mark.parametrize("rank", range(HEADS))
def test_a_rank_is_covered_by_the_record_of_the_whole_model(rank: int) -> None:
    """Tensor parallelism, and a pipeline stage with every second layer: their own heads and layers of the scales are compared."""
    shard = Shard(tp_rank=rank, tp_size=HEADS)

    def cut(factor: float = 1.0) -> Layout:
        rows = [[row[rank]] for row in table(factor)[1::2]]  # type: ignore[index]
        layout = scaled(from_short("fp8_e4m3", MODEL, shard=shard), Scale("head", values=rows))
        groups = [msgspec.structs.replace(g, layers=f"1-{LAYERS - 1}:2") for g in layout.groups]
        return msgspec.structs.replace(layout, groups=groups)

    assert ask(PLAIN, cut(), SIGNED) == []
    (refusal,) = ask(PLAIN, cut(1.5), SIGNED)
    assert f"k of layer 1: the decode scale of head {rank} was" in refusal


def named(name: str = "small", revision: str = "abc", dim: int = 8) -> Model:
    states = [msgspec.structs.replace(s, arrays={n: msgspec.structs.replace(a, dim=dim) for n, a in s.arrays.items()})
              for s in MODEL.states]  # fmt: skip
    return Model(name, LAYERS, states, revision)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (named(name="large"), "r0: is of another model than the prefill layout's: 'small', not 'large'."),
        (named(revision="abd"), "revision abc, not abd"),
        (named(revision=""), "revision abc, not not given"),
        (named(dim=16), "its geometry differs"),
    ],
)
def test_a_record_of_another_model_does_not_count(model: Model, message: str) -> None:
    decode = scaled(from_short("fp8_e4m3", model), Scale("head", values=table()))
    (refusal,) = ask(from_short("bf16", model), decode, SIGNED)
    assert message in refusal


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        ("fp16", per_head(), "measured was bfloat16 without scale -> float8_e4m3fn with a scale per head"),
        ("bf16", per_head("fp8_e5m2"), "the pair does bfloat16 without scale -> float8_e5m2"),
        ("bf16", from_short("fp8_e4m3", MODEL), "the pair does bfloat16 without scale -> float8_e4m3fn without scale"),
        ("bf16", from_short("fp8_e4m3,scale=token_head", MODEL), "float8_e4m3fn with a scale per token_head (stored,"),
        ("bf16", scaled(PLAIN, Scale("head", values=table(), rule="divide")), "bfloat16 with a scale per head"),
        ("bf16", scaled(per_head(), Scale("head", values=table(), rule="divide")), "(constant, rule divide)"),
        ("bf16", scaled(per_head(), Scale("tensor", values=0.5)), "with a scale per tensor (constant"),
        ("bf16", per_head(factor=1.001), "k of layer 0: the decode scale of head 0 was 0.01 when it was measured"),
    ],
)
def test_another_dtype_scheme_rule_or_scale_does_not_count(prefill: str, decode: Layout, message: str) -> None:
    (refusal,) = ask(from_short(prefill, MODEL), decode, SIGNED)
    assert message in refusal
    assert refusal.startswith("quality: prefill has ")


def test_what_was_converted_when_it_was_measured_must_be_now() -> None:
    """K alone converts in this pair, K and V did when it was measured; and the other way round."""
    (group,) = per_head().groups
    k, v = group.components[0], PLAIN.groups[0].components[1]
    half = msgspec.structs.replace(PLAIN, groups=[msgspec.structs.replace(group, components=[k, v])])
    (refusal,) = ask(PLAIN, half, SIGNED)
    assert "v (attention) of layer 0 was converted when it was measured, and is not in this pair" in refusal
    (refusal,) = ask(PLAIN, per_head(), quality.sign(record_of(PLAIN, half), KEY))
    assert "v of layer 0: bfloat16 without scale -> float8_e4m3fn with a scale per head" in refusal
    assert "was not measured" in refusal


def test_a_changed_an_unsigned_and_a_strangers_record_do_not_count() -> None:
    better = msgspec.structs.replace(RECORD, result=result(perplexity=10.0))
    (refusal,) = ask(PLAIN, per_head(), msgspec.structs.replace(SIGNED, record=better))
    assert "r0: has been changed since it was signed" in refusal
    (refusal,) = ask(PLAIN, per_head(), quality.Signed(RECORD))
    assert "r0: is not signed: let someone who vouches for it run `regauge bench sign" in refusal
    stranger = quality.sign(RECORD, OTHER_KEY)
    (refusal,) = ask(PLAIN, per_head(), stranger)
    assert f"is signed by key {stranger.key[:16]}, which is not among the trusted" in refusal
    (refusal,) = ask(PLAIN, per_head(), msgspec.structs.replace(stranger, key=SIGNED.key))
    assert "has been changed since it was signed" in refusal


def test_one_record_of_several_is_enough_and_otherwise_each_says_why_not() -> None:
    wrong = quality.sign(record_of(PLAIN, from_short("fp8_e5m2", MODEL)), KEY)
    assert ask(PLAIN, per_head(), wrong, SIGNED) == []
    reasons = ask(PLAIN, per_head(), wrong, quality.Signed(RECORD))
    assert ["r0: k of layer 0" in reasons[0], "r1: is not signed" in reasons[1]] == [True, True]


def test_other_weights_do_not_count_where_they_are_known() -> None:
    assert ask(PLAIN, per_head(), SIGNED, weights=RECORD.model.weights) == []
    (refusal,) = ask(PLAIN, per_head(), SIGNED, weights="22" * 32)
    assert "is of other weights than those that are served" in refusal


def worse(**change: float) -> quality.Figures:
    return msgspec.structs.replace(GOOD, **change)


@pytest.mark.parametrize("control", ["decode_control", "prefill_control"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_mean": 0.0151}, "mean KL 0.0151 against the {} layout without a transfer exceeds 0.015 (max_kl)"),
        ({"kl_mean": float("nan")}, "mean KL nan"),
        (
            {"agreement": 0.909},
            "agreement 90.90% against the {} layout without a transfer is below 91.00% (min_agreement)",
        ),
        ({"perplexity": 9.8}, "perplexity is 1.026 times that against the {} layout without a transfer"),
        ({"perplexity": 0.0}, "perplexity is inf times"),
    ],
)
def test_every_limit_holds_against_both_controls(control: str, change: dict[str, float], message: str) -> None:
    (found,) = shortfalls(result(**{control: worse(**change)}), QualityLimits())
    assert message.format(control.removesuffix("_control")) in found


def test_few_positions_are_noise() -> None:
    (found,) = shortfalls(result(positions=255), QualityLimits())
    assert "255 positions were measured, 256 are demanded (min_positions). Measure on more text" in found


def test_limits_are_the_users() -> None:
    bad = quality.sign(record_of(PLAIN, per_head(), result(decode_control=worse(kl_mean=0.05))), KEY)
    assert "exceeds 0.015" in ask(PLAIN, per_head(), bad)[0]
    assert ask(PLAIN, per_head(), bad, limits=QualityLimits(max_kl=0.05)) == []
    assert "exceeds 0.001" in ask(PLAIN, per_head(), SIGNED, limits=QualityLimits(max_kl=0.001))[0]
    assert shortfalls(result(), QualityLimits()) == []
