"""Which path a pair takes, and what a refusal says."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.layout.dtypes import DTYPES
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Layout, Model, Rope, Scale, Shard
from regauge.plan import check
from strategies import EIGHT_BIT, FLOATS, layouts, models

CONVERTS = ("CONVERT", "REFUSED")  # a new scale over several old ones is refused
ROPE = Rope(1e4, 8)
MODEL = attention_model("m", 4, Array(2, 8), rope=ROPE)


def model(
    name: str = "m", num_layers: int = 4, heads: int = 2, dim: int = 8, rope: Rope | None = ROPE,
    revision: str = "",
) -> Model:  # fmt: skip
    return attention_model(name, num_layers, Array(heads, dim), rope=rope, revision=revision)


def layout(text: str, **change: object) -> Layout:
    return from_short(text, model(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "path", "reasons"),
    [
        ("bf16", "bf16", "DIRECT", ()),
        ("fp8,page=64,hnd", "fp8_e4m3,page=64,hnd", "DIRECT", ()),
        ("fp8,scale=token_head", "fp8,scale=token_head", "DIRECT", ()),
        ("fp8", "fp8,scale=tensor", "DIRECT", ()),  # a factor of one is no factor
        ("bf16,page=64", "bf16,page=16", "REMAP", ("page size 64 -> 16",)),
        ("bf16,fused", "bf16", "REMAP",
         ("axis order 'layer page kv token head dim' -> 'layer page token head dim'", "regions kv, kv -> k, v")),
        ("bf16,page-first", "bf16", "REMAP", ("axis order 'page layer token head dim' -> 'layer page token head dim'",)),
        ("bf16", "fp8", "CONVERT", ("dtype bfloat16 -> float8_e4m3fn",)),
        ("bf16", "fp16", "CONVERT", ("dtype bfloat16 -> float16",)),
        ("fp8,page=64,hnd", "bf16", "CONVERT",
         ("dtype float8_e4m3fn -> bfloat16", "page size 64 -> 16",
          "axis order 'layer page head token dim' -> 'layer page token head dim'")),
        ("fp8", "fp8,scale=token_head", "CONVERT", ("scale none -> per token_head",)),
    ],
)  # fmt: skip
def test_paths_and_their_reasons(a: str, b: str, path: str, reasons: tuple[str, ...]) -> None:
    verdict = check(layout(a), layout(b))
    assert (verdict.path, verdict.reasons) == (path, reasons)
    assert not verdict.refusals


@pytest.mark.parametrize(
    ("change", "field", "ours", "theirs"),
    [
        ({"dim": 16}, "model.states[attention].arrays.v.dim", "8", "16"),
        ({"num_layers": 5}, "model.num_layers", "4", "5"),
        ({"heads": 4}, "model.states[attention].arrays.k.heads", "2", "4"),
        ({"name": "other"}, "model.name", "m", "other"),
        ({"rope": None}, "model.states[attention].rope", "rotary", "none"),
        ({"rope": Rope(5e5, 8)}, "model.states[attention].rope.theta", "10000.0", "500000.0"),
        ({"rope": Rope(1e4, 4)}, "model.states[attention].rope.dim", "8", "4"),
        ({"rope": Rope(1e4, 8, interleaved=True)}, "model.states[attention].rope.interleaved", "False", "True"),
        (
            {"rope": Rope(1e4, 8, scaling='{"factor": 2}')},
            "model.states[attention].rope.scaling",
            "none",
            '{"factor": 2}',
        ),
    ],
)
def test_a_pair_that_cannot_work_names_field_values_and_remedy(
    change: dict[str, object], field: str, ours: str, theirs: str
) -> None:
    verdict = check(layout("bf16"), layout("bf16", **change))
    assert verdict.path == "REFUSED"
    clash = next(r for r in verdict.refusals if r.field == field)
    assert (clash.prefill, clash.decode) == (ours, theirs)
    assert clash.remedy
    assert str(clash).startswith(f"{field}: prefill has {ours}, decode has {theirs}. ")


def test_revisions_count_when_both_sides_give_one() -> None:
    a, b = layout("bf16", revision="aa"), layout("bf16", revision="bb")
    assert [r.field for r in check(a, b).refusals] == ["model.revision"]
    assert check(a, layout("bf16")).path == "DIRECT"


def test_layers_and_heads_that_prefill_lacks() -> None:
    half = msgspec.to_builtins(layout("bf16"))
    half["groups"][0]["layers"] = "0-1"
    verdict = check(msgspec.convert(half, Layout), layout("bf16"))
    assert [(r.field, r.prefill) for r in verdict.refusals] == [
        ("groups (prefill)", "no attention k of layers 2-3"), ("groups (prefill)", "no attention v of layers 2-3")]  # fmt: skip
    refused = check(layout("bf16"), msgspec.convert(half, Layout))
    assert [(r.field, r.decode) for r in refused.refusals][:1] == [("groups (decode)", "no attention k of layers 2-3")]
    half["shard"] = {"pp_size": 2}
    assert check(layout("bf16"), msgspec.convert(half, Layout)).path == "DIRECT"  # another stage holds the rest
    one = from_short("bf16", MODEL, shard=Shard(1, 2))
    assert check(layout("bf16"), one).reasons[0] == "heads 0-1 -> 1"
    assert check(one, layout("bf16")).reasons[0] == "heads 1 -> 0-1"  # another rank holds the rest
    alone = msgspec.to_builtins(layout("bf16"))
    alone["groups"][0]["components"][0] |= {"heads": 1, "first_head": 1}
    refused = check(msgspec.convert(alone, Layout), layout("bf16"))
    assert [(r.field, r.prefill, r.decode) for r in refused.refusals] == [
        ("groups[0].k.heads", "heads 1", "heads 0-1")]  # fmt: skip


@pytest.mark.parametrize("a", DTYPES)
@pytest.mark.parametrize("b", DTYPES)
def test_any_type_converts_to_any_other_unless_it_is_only_moved(a: str, b: str) -> None:
    verdict = check(layout(a), layout(b))
    opaque = DTYPES[a].opaque or DTYPES[b].opaque
    assert verdict.path == ("DIRECT" if a == b else "REFUSED" if opaque else "CONVERT")
    assert all("moved and not converted" in str(r) for r in verdict.refusals)


def test_strides_and_padding_matter_even_where_the_order_is_the_same() -> None:
    plain = msgspec.to_builtins(layout("bf16,page=4"))
    for c in plain["groups"][0]["components"]:
        c["at"]["strides"] = {"token": 64}
    padded = msgspec.convert(plain, Layout)
    assert check(padded, layout("bf16,page=4")).reasons == ("strides inside the page differ",)
    assert check(padded, padded).path == "DIRECT"
    for c in plain["groups"][0]["components"]:
        c["at"] = {**c["at"], "order": "head layer page token dim", "strides": {}}
    outside = msgspec.convert(plain, Layout)
    assert check(outside, outside).reasons == ("pages are not blocks of their own",)


def test_constant_scales_are_compared_by_value() -> None:
    def scaled(values: object) -> Layout:
        plain = msgspec.to_builtins(layout("fp8,scale=tensor"))
        for c in plain["groups"][0]["components"]:
            c["scale"] = msgspec.to_builtins(Scale("tensor", values=values))  # type: ignore[arg-type]
        return msgspec.convert(plain, Layout)

    assert check(scaled(0.5), scaled([0.5] * 4)).path == "DIRECT"
    verdict = check(scaled(0.5), scaled([0.5, 0.5, 0.5, 0.25]))
    assert (verdict.path, verdict.reasons) == ("CONVERT", ("scale per tensor (constant) -> per tensor (constant)",))


def test_a_rank_with_fewer_heads_takes_codes_and_their_scales_as_they_are() -> None:
    whole, part = layout("fp8,scale=token_head"), from_short("fp8,scale=token_head", MODEL, shard=Shard(1, 2))
    assert (check(whole, part).path, check(whole, part).reasons) == ("REMAP", ("heads 0-1 -> 1",))

    def by_head(values: list[float], shard: Shard) -> Layout:
        plain = msgspec.to_builtins(from_short("fp8,scale=head", MODEL, shard=shard))
        for c in plain["groups"][0]["components"]:
            c["scale"]["values"] = [values] * 4
        return msgspec.convert(plain, Layout)

    assert check(by_head([0.5, 0.25], Shard()), by_head([0.25], Shard(1, 2))).path == "REMAP"
    assert check(by_head([0.5, 0.25], Shard()), by_head([0.5], Shard(1, 2))).path == "CONVERT"


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_layout_with_itself_never_converts_and_the_pair_is_ordered(data: st.DataObject) -> None:
    model = data.draw(models())
    a, b = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))), data.draw(layouts(model, (*FLOATS, *EIGHT_BIT)))
    outside = {"pages are not blocks of their own"}
    own = check(a, a)
    assert own.path == "DIRECT" or set(own.reasons) == outside
    assert check(a, b) == check(a, b)
    assert (check(a, b).pair == check(b, a).pair) == (a.digest() == b.digest())
    assert (check(a, b).path in CONVERTS) == (check(b, a).path in CONVERTS)


def test_notes_say_what_a_conversion_costs() -> None:
    model = load_model("llama-3.1-8b")
    verdict = check(from_short("bf16", model), from_short("fp8", model))
    assert verdict.notes[0] == "k: values are rounded to float8_e4m3fn; beyond +-448 x scale they saturate"
    verdict = check(from_short("fp8", model), from_short("bf16", model))
    assert verdict.notes[0] == "k: every float8_e4m3fn code is exact in bfloat16"
    verdict = check(from_short("bf16", model), from_short("fp16", model))
    assert verdict.notes[0] == "k: beyond +-65504 values saturate; below 6e-8 they become 0"


@pytest.mark.parametrize("a", ["bf16", "fp8", "int8,scale=token_head"])
def test_int8_without_a_scale_is_legal_and_noted(a: str) -> None:
    note = "k: values are rounded to whole numbers: give int8 a scale"
    for b in ("int8", "int8,scale=tensor", "int8,scale=head"):  # short forms have constants of 1
        verdict = check(layout(a), layout(b))
        assert (verdict.path, verdict.notes[0]) == ("CONVERT", note)
    for b in ("int8,scale=token_head", "fp8"):
        assert note not in check(layout(a), layout(b)).notes
    scaled = msgspec.to_builtins(layout("int8"))
    for c in scaled["groups"][0]["components"]:
        c["scale"] = {"per": "tensor", "values": 0.01}
    assert note not in check(layout(a), msgspec.convert(scaled, Layout)).notes
