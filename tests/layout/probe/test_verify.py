"""A declaration that is right is verified, whatever the layout; one that is wrong anywhere is found, at its first element."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from probe_engine import ReferenceEngine
from regauge.engines.probe import probe
from regauge.errors import EngineError, LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.presets import attention_model, from_short
from regauge.layout.probe import pattern
from regauge.layout.probe.snapshot import Memory
from regauge.layout.probe.verify import MAX_STRAYS, Verdict, verify
from regauge.layout.spec import Array, Group, Layout, Placement
from regauge.layout.validate import validate
from regauge.layout.view import Int64, View, array_views, component_view
from regauge.plan import Side
from regauge.plan.reference import addresses
from strategies import EIGHT_BIT, FLOATS, hybrids, layouts, models, shards

MODEL = attention_model("m", 3, Array(2, 16))


def short(text: str, pages: int = 6) -> Layout:
    return from_short(text, MODEL, pages=pages)


def named(true: Layout, declared: Layout) -> str:
    verdict = probe(ReferenceEngine(true), declared)
    assert not verdict.verified
    assert verdict.first is not None
    return str(verdict.first)


# -- what is right ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_right_declaration_is_verified(data: st.DataObject) -> None:
    model = data.draw(st.one_of(models(), hybrids()))
    # Of context-parallel ranks, the probe writes their own tokens as they lie: packed.
    shard = msgspec.structs.replace(data.draw(shards(model)), cp_rank=0, cp_size=1, cp_stripe=1)
    layout = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT), shard=shard))
    verdict = probe(ReferenceEngine(layout, data.draw(st.sampled_from(pattern.SOURCES))))
    assert verdict.verified, (verdict.first, verdict.strays)
    assert verdict.strays == ()
    assert [set(c.layers) for c in verdict.covered] == [set(g.layer_ids) for g in layout.groups]


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _moved(draw: st.DrawFn, at: Placement) -> Placement:
    """Change one thing of a placement."""
    axes = at.order.split()
    plain = [a for a in axes if ":" not in a]
    match draw(st.sampled_from(["order", "stride", "offset", "lanes"])):
        case "order":
            order = [*draw(st.permutations(plain)), *(a for a in axes if ":" in a)]
            return msgspec.structs.replace(at, order=" ".join(order))
        case "stride":
            axis = draw(st.sampled_from(axes))
            return msgspec.structs.replace(at, strides={axis: draw(st.integers(1, 400))})
        case "lanes" if ":" in axes[-1]:
            return msgspec.structs.replace(at, order=" ".join(plain))
    return msgspec.structs.replace(at, offset=at.offset + draw(st.integers(1, 70)))


@st.composite
def mutations(draw: st.DrawFn, layout: Layout) -> Layout:
    """The layout with one component's placement, dtype or scale placement changed, or one group's page size."""
    index = draw(st.integers(0, len(layout.groups) - 1))
    group = layout.groups[index]
    c = draw(st.sampled_from(group.components))
    match draw(st.sampled_from(["placement", "dtype", "scale", "page size"])):
        case "dtype" if c.scale is None or c.scale.at is None:
            others = [d for d in (EIGHT_BIT if c.scale else (*FLOATS, *EIGHT_BIT)) if d != c.dtype]
            new = msgspec.structs.replace(c, dtype=draw(st.sampled_from(others)))
        case "scale" if c.scale is not None and c.scale.at is not None:
            at = _moved(draw, c.scale.at)
            assume(c.scale.per == "block" or "dim" not in at.order)
            new = msgspec.structs.replace(c, scale=msgspec.structs.replace(c.scale, at=at))
        case "page size" if group.kind != "recurrent":
            size = draw(st.integers(1, group.page_size))  # of no more tokens than the engine's pages hold
            groups = [
                *layout.groups[:index],
                msgspec.structs.replace(group, page_size=size),
                *layout.groups[index + 1 :],
            ]
            return msgspec.structs.replace(layout, groups=groups)
        case _:
            new = msgspec.structs.replace(c, at=_moved(draw, c.at))
    components = [new if x is c else x for x in group.components]
    changed = msgspec.structs.replace(group, components=components)
    return msgspec.structs.replace(layout, groups=[*layout.groups[:index], changed, *layout.groups[index + 1 :]])


def _first_difference(true: Layout, declared: Layout, made: pattern.Pattern) -> tuple[object, ...] | None:
    """Compare where both layouts put every element of the pattern, in the probe's order, address by address."""
    for field in made.fields:
        a, b = true.groups[field.group], declared.groups[field.group]
        c, d = a.component(field.component.name), b.component(field.component.name)
        for (label, view), (_, other) in zip(array_views(a, c), array_views(b, d), strict=True):
            for layer in field.layers:
                wrong = _places(a, view, made.tables[field.group], layer, field.tokens) != _places(
                    b, other, made.tables[field.group], layer, field.tokens
                )
                wrong |= c.dtype != d.dtype and label == c.name
                if wrong.any():
                    return (label, layer, *(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape)))
    return None


def _places(group: Group, view: View, table: Int64, layer: int, tokens: int) -> Int64:
    bases = {view.region.replace("{layer}", str(x)): 0 for x in group.layer_ids}
    return addresses(view, group, Side(table, bases), np.arange(tokens), (layer,))[0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_mutation_is_found_and_its_first_element_named(data: st.DataObject) -> None:
    model = data.draw(st.one_of(models(), hybrids()))
    true = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT)))
    try:
        declared = data.draw(mutations(true))
        made = pattern.make(declared, source="float32")
        expected = _first_difference(true, declared, made)
    except LayoutError:  # an order or split that this geometry cannot have: refused before anything is written
        assume(False)
    verdict = probe(ReferenceEngine(true), declared)
    if expected is None:
        assert verdict.verified, verdict.first
        return
    first = verdict.first
    assert first is not None
    assert (first.array, first.layer, first.token, first.head, first.dim) == expected
    assert not verdict.verified


# -- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("true", "declared", "said"),
    [
        ("bf16,page=4,hnd", "bf16,page=4,nhd",
         ("k, layer 0, token 0, head 1, dim 0: expected at byte 0x520 of k, found at byte 0x580 of k (looks like: axes token "
          "and head swapped: order 'layer page head token dim'; token step 32 bytes, declared 64; head step 128 bytes, "
          "declared 32)")),
        ("bf16,page=4,kt", "bf16,page=4,hnd", "looks like: K transposed: order 'layer page head dim token'; "),
        ("fp8,page=8", "fp8,page=4", "looks like: page size 8"),
        ("fp8,page=4", "fp8,page=8", "looks like: page size 4"),
        ("bf16,page=4,fused,page-first", "bf16,page=4,fused", "looks like: axes layer and page swapped"),
        ("bf16,page=4,fused", "bf16,page=4",
         ("expected in no region of the engine, found at byte 0xa00 of kv (looks like: in region kv together with the others: "
          "order 'layer page kv token head dim')")),
        ("fp16,page=4", "bf16,page=4", "found nowhere (looks like: dtype float16)"),
        ("fp8_e5m2,page=4", "fp8_e4m3fnuz,page=4", "found nowhere (looks like: dtype float8_e5m2)"),
        ("fp32,page=4", "bf16,page=4", "found at byte 0xa02 of k (looks like: dtype float32; "),
    ],
)  # fmt: skip
def test_it_says_what_it_looks_like(true: str, declared: str, said: str) -> None:
    text = named(short(true), short(declared))
    assert said in text


def _replace(layout: Layout, **changes: dict[str, object]) -> Layout:
    """Change components by name."""
    group = layout.groups[0]
    components = [msgspec.structs.replace(c, **changes.get(c.name, {})) for c in group.components]
    return validate(msgspec.structs.replace(layout, groups=[msgspec.structs.replace(group, components=components)]))


def test_k_and_v_swapped() -> None:
    plain = short("bf16,page=4")
    swapped = _replace(plain, k={"at": plain.groups[0].components[1].at}, v={"at": plain.groups[0].components[0].at})
    assert "looks like: K and V swapped" in named(swapped, plain)
    fused = short("bf16,page=4,fused")
    group = fused.groups[0]
    other = msgspec.structs.replace(group, components=group.components[::-1])
    assert "looks like: K and V swapped" in named(msgspec.structs.replace(fused, groups=[other]), fused)


def test_lanes() -> None:
    plain = short("bf16,page=4,hnd")
    at = Placement("layer page head dim token dim:8", "k")
    lanes = _replace(plain, k={"at": at})
    assert "looks like: dim in lanes of 8: order 'layer page head dim token dim:8'" in named(lanes, plain)
    assert "looks like: no lanes: order 'layer page head token dim'" in named(plain, lanes)


def test_everything_shifted() -> None:
    plain = short("int8,page=4")
    moved = _replace(plain, v={"at": Placement("layer page token head dim", "v", offset=48)})
    assert "v, layer 0, token 0" in named(moved, plain)
    assert "looks like: all of it 48 bytes further on" in named(moved, plain)


def test_scales_that_lie_elsewhere() -> None:
    plain = short("fp8,page=4,scale=token_head")
    scale = plain.groups[0].components[0].scale
    assert scale is not None
    at = Placement("layer page head token", "k_scale")
    other = _replace(plain, k={"scale": msgspec.structs.replace(scale, at=at)})
    text = named(other, plain)
    assert text.startswith(
        "scale of k, layer 0, token 0, head 1, dim 0: expected at byte 0xa4 of k_scale, found at byte 0xb0"
    )
    assert "looks like: axes token and head swapped: order 'layer page head token'" in text


class _RopeWoven(ReferenceEngine):
    """Keeps the rotated halves of K as pairs, as some kernels want them."""

    def write(self, kind, layer, pages, values):  # type: ignore[no-untyped-def]
        k = values["k"]
        pairs = k.reshape(*k.shape[:2], 2, -1).swapaxes(2, 3).reshape(k.shape)
        super().write(kind, layer, pages, {**values, "k": pairs})


def test_rope_halves_interleaved() -> None:
    layout = short("bf16,page=4")
    first = probe(_RopeWoven(layout)).first
    assert first is not None
    assert (first.array, first.dim) == ("k", 1)  # element 0 stays where it is
    assert first.looks_like == ("rope halves interleaved",)


# -- engines that are said to lie otherwise ---------------------------------------------------------------------------


def test_vllm_cpu_page_is_k_transposed_then_v_whatever_its_shape_says() -> None:
    """vLLM 0.32's CPU attention: (blocks, heads, block, 2 * dim) is what the tensor says; the kernel packs K as [dim, block]."""
    model = attention_model("m", 2, Array(2, 32))
    said = from_short("bf16,page=32", model, pages=3)
    group = said.groups[0]
    shape = [msgspec.structs.replace(c, at=Placement("layer page head token kv dim", "kv")) for c in group.components]
    packed = [
        msgspec.structs.replace(c, at=Placement(order, "kv"))
        for c, order in zip(
            group.components, ("layer page head kv dim token", "layer page head kv token dim"), strict=True
        )
    ]
    said = msgspec.structs.replace(said, groups=[msgspec.structs.replace(group, components=shape)])
    true = msgspec.structs.replace(said, groups=[msgspec.structs.replace(group, components=packed)])
    assert probe(ReferenceEngine(true)).verified
    text = named(true, said)
    assert "k, layer 0, token 0, head 0, dim 1: " in text
    assert "dim step 64 bytes, declared 2" in text
    assert "looks like: order 'layer page head kv dim token'" in text


def test_sglang_dummy_page_0_is_not_written() -> None:
    layout = short("bf16,page=4")
    verdict = probe(ReferenceEngine(layout, usable={0: range(1, 6)}))
    assert verdict.verified
    assert 0 not in verdict.covered[0].pages


class _ZeroesTheRest(ReferenceEngine):
    """Clears the rest of a page that it begins, and a byte of padding."""

    def write(self, kind, layer, pages, values):  # type: ignore[no-untyped-def]
        if layer == 0:
            group = self.layout.groups[0]
            view = component_view(group, group.components[0])
            last = int(pages[2]) * view.page_stride
            self.read()["k"][last : last + view.page_bytes] = 0
            self.read()["v"][257] = 0
        super().write(kind, layer, pages, values)


def test_bytes_that_change_beside_those_written_are_reported() -> None:
    layout = short("bf16,page=4")
    padded = _replace(layout, v={"at": Placement("layer page token head dim", "v", strides={"page": 260})})
    verdict = probe(_ZeroesTheRest(padded))
    assert verdict.first is None
    assert not verdict.verified
    assert [str(s) for s in verdict.strays] == [
        "bytes 0x1c0 to 0x1ff of k changed: k, layer 0, page 1, token 3 of the page, head 0, dim 0",
        "bytes 0x101 to 0x101 of v changed: padding",
    ]


class _Spills(ReferenceEngine):
    """Clears ranges of bytes beside those that it writes."""

    spilt: Mapping[str, Sequence[tuple[int, int]]] = {}

    def write(self, kind, layer, pages, values):  # type: ignore[no-untyped-def]
        for region, ranges in self.spilt.items() if layer == 0 else ():
            for start, end in ranges:
                self.read()[region][start:end] = 0
        super().write(kind, layer, pages, values)


def _spilling(spilt: Mapping[str, Sequence[tuple[int, int]]]) -> Verdict:
    """In pages of 256 bytes, 356 apart: layer 0 has the first six, of which 0, 4 and 5 are not written."""
    layout = short("bf16,page=4")
    apart = {n: {"at": Placement("layer page token head dim", n, strides={"page": 356})} for n in "kv"}
    engine = _Spills(_replace(layout, **apart), usable={0: range(1, 4)})
    engine.spilt = spilt
    return probe(engine)


def test_bytes_of_tokens_after_much_padding_are_noticed() -> None:
    verdict = _spilling({"v": [(3 * 356 + 256, 4 * 356 + 4)]})
    assert not verdict.verified
    assert [str(s) for s in verdict.strays] == [
        "bytes 0x52c to 0x593 of v changed: v, layer 0, page 4, token 0 of the page, head 0, dim 0"
    ]


def test_bytes_of_tokens_after_many_bytes_of_padding_are_noticed_and_named_first() -> None:
    padding = [(256 + 2 * i, 257 + 2 * i) for i in range(MAX_STRAYS + 2)]
    assert _spilling({"k": padding}).verified
    verdict = _spilling({"k": padding, "v": [(5 * 356 + 255, 5 * 356 + 256)]})
    assert not verdict.verified
    assert len(verdict.strays) == MAX_STRAYS
    assert [s.holds for s in verdict.strays] == ["v, layer 0, page 5, token 3 of the page, head 1, dim 15"] + [""] * 7


# -- limits -----------------------------------------------------------------------------------------------------------


def test_the_engine_does_not_take_what_is_declared() -> None:
    other = from_short("bf16,page=4", attention_model("m", 3, Array(2, 8)), pages=5)
    wide = msgspec.structs.replace(short("bf16,page=4"), model=MODEL)

    class Strict(ReferenceEngine):
        def write(self, kind, layer, pages, values):  # type: ignore[no-untyped-def]
            if values["k"].shape[2] != 8:
                raise ValueError("head dim is 8")
            super().write(kind, layer, pages, values)

    with pytest.raises(EngineError, match=r"did not take attention of layer 0 \(k \[11, 2, 16\].*head dim is 8"):
        probe(Strict(other), wide)


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(LayoutError, match="say how many pages"):
        probe(ReferenceEngine(short("bf16,page=4")), short("bf16,page=4", pages=0))
    plain = short("bf16,page=4")
    pairs = [msgspec.structs.replace(c, dtype="float4_e2m1fn_x2") for c in plain.groups[0].components]
    group = msgspec.structs.replace(plain.groups[0], components=pairs)
    with pytest.raises(LayoutError, match="no values can be chosen"):
        pattern.make(msgspec.structs.replace(plain, groups=[group]), source="float32")
    with pytest.raises(LayoutError, match="none of the layers"):
        pattern.make(plain, source="float32", layers=[7])
    with pytest.raises(LayoutError, match="usable pages"):
        pattern.make(plain, source="float32", usable={0: [6]})
    with pytest.raises(LayoutError, match="source"):
        pattern.make(plain, source="int8")


def test_steps_to_where_the_engine_has_no_bytes_are_not_compared() -> None:
    plain = short("bf16,page=4")
    true = _replace(plain, k={"at": Placement("layer page head token dim", "k.0")})
    text = named(true, _replace(plain, k={"at": Placement("page token head dim", "k.{layer}")}))
    assert "token step 32 bytes, declared 64" in text
    assert "layer step" not in text


def test_the_first_difference_of_random_bytes_is_the_first_element() -> None:
    layout = short("bf16,page=4")
    made = pattern.make(layout, source="bfloat16")
    rng = np.random.default_rng(1)
    sizes = {name: data.size for name, data in ReferenceEngine(layout).read().items()}
    noise = [{n: rng.integers(0, 256, s, np.uint8) for n, s in sizes.items()} for _ in range(made.rounds)]
    verdict: Verdict = verify(layout, made, Memory.of(noise, made.rounds))
    assert verdict.first is not None
    assert (verdict.first.array, verdict.first.token, verdict.first.found, verdict.first.looks_like) == ("k", 0, (), ())


def test_itemsizes_are_those_of_the_dtypes() -> None:
    for dtype in (*FLOATS, *EIGHT_BIT):
        field = pattern.make(short(dtype), source="float32").fields[0]
        assert field.codes(np.array([random.Random(0).randrange(64)]), 0).shape == (1, DTYPES[dtype].itemsize)
