"""Every plan equals the element-by-element reference; a round trip is the identity; pieces cover what boxes cover."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.errors import PlanError, Refused
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Group, Layout, Model, Shard, State
from regauge.move import kernels
from regauge.plan import Side, check, compile, instantiate, pieces
from regauge.plan.planner import live
from regauge.plan.reference import transfer
from regauge.plan.stripes import owned
from regauge.plan.wire import REGION, WireFormat
from strategies import EIGHT_BIT, FLOATS, Pool, assert_same, hybrids, layouts, models, page_tables, shards

MODEL = attention_model("m", 2, Array(2, 4))


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def only_rows_grow(a: Layout, b: Layout) -> bool:
    """Say whether the pair is carried: the one reason against it here is a new scale over several old ones."""
    refusals = check(a, b).refusals
    assert all("A decode scale must not span several of prefill's" in str(r) for r in refusals), refusals
    return not refusals


def span(data: st.DataObject, a: Layout, b: Layout) -> tuple[int, int]:
    most = min(g.pages * g.page_size for x in (a, b) for g in x.groups)
    first = data.draw(st.integers(0, most - 1))
    return first, data.draw(st.integers(first + 1, most))


def sides(data: st.DataObject, a: Layout, b: Layout, tokens: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    return data.draw(page_tables(a.groups[0], tokens[1])), data.draw(page_tables(b.groups[0], tokens[1]))


def expected(src: Pool, dst: Pool, p: np.ndarray, d: np.ndarray, tokens: tuple[int, int]) -> Pool:
    out = dst.copy()
    transfer(src.layout, dst.layout, src.memory, out.memory, src.offsets(p), out.offsets(d), tokens)
    return out


@pytest.mark.parametrize("backend", ["native", "numpy"])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_a_plan_does_what_the_reference_does(backend: str, data: st.DataObject, seed: int) -> None:
    model = data.draw(models())
    a, b = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))), data.draw(layouts(model, (*FLOATS, *EIGHT_BIT)))
    assume(only_rows_grow(a, b))
    tokens = span(data, a, b)
    p, d = sides(data, a, b, tokens)
    src, dst = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1))
    want = expected(src, dst, p, d, tokens)
    plan = compile(a, b)
    kernels.run(instantiate(plan, src.side(p), dst.side(d), tokens), backend=backend)
    assert_same(dst, want)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_the_same_bytes_come_back_from_any_remap(data: st.DataObject, seed: int) -> None:
    model = data.draw(models())
    a = data.draw(layouts(model))
    b = data.draw(layouts(model, (a.groups[0].components[0].dtype,)))
    assert check(a, b).path in ("DIRECT", "REMAP")
    tokens = span(data, a, b)
    p, d = sides(data, a, b, tokens)
    src, there, back = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1)), Pool.of(a, seeded(seed + 2))
    forth, home = compile(a, b), compile(b, a)
    kernels.run(instantiate(forth, src.side(p), there.side(d), tokens))
    kernels.run(instantiate(home, there.side(d), back.side(p), tokens))
    want = Pool.of(a, seeded(seed + 2))
    transfer(a, a, src.memory, want.memory, src.offsets(p), want.offsets(p), tokens)
    assert np.array_equal(back.memory, want.memory)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_pieces_move_the_same_bytes_as_boxes(data: st.DataObject, seed: int) -> None:
    model = data.draw(models())
    a = data.draw(layouts(model))
    b = data.draw(layouts(model, (a.groups[0].components[0].dtype,)))
    tokens = span(data, a, b)
    p, d = sides(data, a, b, tokens)
    src, dst = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1))
    want = expected(src, dst, p, d, tokens)
    plan = compile(a, b)
    list_ = pieces(instantiate(plan, src.side(p), dst.side(d), tokens))
    for source, target, size in list_.tolist():
        ctypes.memmove(target, source, size)
    assert np.array_equal(dst.memory, want.memory)
    ends = list_[:, 1] + list_[:, 2]
    assert (list_[1:, 1] >= ends[:-1]).all(), "pieces overlap or are out of order"
    joined = (list_[1:, :2] == (list_[:-1, :2] + list_[:-1, 2:])).all(axis=1)
    assert not joined.any(), "two pieces could be one"


@settings(max_examples=120, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), at=st.sampled_from(["auto", "prefill", "decode"]))
def test_a_staged_transfer_does_what_the_reference_does(data: st.DataObject, seed: int, at: str) -> None:
    model = data.draw(models())
    a, b = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))), data.draw(layouts(model, (*FLOATS, *EIGHT_BIT)))
    assume(only_rows_grow(a, b))
    tokens = span(data, a, b)
    p, d = sides(data, a, b, tokens)
    src, dst = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1))
    want = expected(src, dst, p, d, tokens)
    plan = compile(a, b)
    wire = WireFormat(plan, convert_at=at)
    count = tokens[1] - tokens[0]
    for pair in plan.pairs:
        gather, scatter = wire.halves(pair, count)
        size = wire.layer_bytes(pair, count)
        layers = plan.layers_of(pair)
        first = data.draw(st.integers(0, len(layers) - 1))
        for chosen in (layers[:first], layers[first:]):
            slot = np.zeros(size * max(len(chosen), 1), np.uint8)
            # A chunk of some layers lies at the start of its slot: the region begins that much before it.
            base = slot.ctypes.data - (layers.index(chosen[0]) * size if chosen else 0)
            staged = Side(np.zeros(1, np.int64), {REGION: base}, origin=tokens[0])
            kernels.run(instantiate(gather, src.side(p), staged, tokens, layers=chosen))
            kernels.run(instantiate(scatter, staged, dst.side(d), tokens, layers=chosen))
    assert_same(dst, want)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=120, deadline=None)
def test_a_decode_rank_takes_its_heads_from_a_wider_prefill_rank(data: st.DataObject, seed: int) -> None:
    model = attention_model("m", data.draw(st.integers(1, 3)), Array(4, data.draw(st.sampled_from([1, 4, 8]))))
    size = data.draw(st.sampled_from([2, 4, 8]))
    shard = Shard(data.draw(st.integers(0, size - 1)), size)
    a = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT)))
    b = data.draw(layouts(model, (*FLOATS, *EIGHT_BIT), shard=shard))
    assume(only_rows_grow(a, b))
    tokens = span(data, a, b)
    p, d = sides(data, a, b, tokens)
    src, dst = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1))
    want = expected(src, dst, p, d, tokens)
    kernels.run(instantiate(compile(a, b), src.side(p), dst.side(d), tokens))
    assert_same(dst, want)


@given(data=st.data(), seed=st.integers(0, 2**32 - 1), staged=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_pair_of_ranks_carries_what_both_hold_of_every_kind_of_state(
    data: st.DataObject, seed: int, staged: bool
) -> None:
    """Attention, window, latent, indexer and recurrent groups; tensor and context parallelism of any size on either side."""
    model = data.draw(hybrids())
    a, b = (data.draw(layouts(model, (*FLOATS, *EIGHT_BIT), shard=data.draw(shards(model)))) for _ in range(2))
    assume(only_rows_grow(a, b))
    plan = compile(a, b)
    src, dst = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1))
    want = dst.copy()
    for pair in plan.pairs:
        groups = a.groups[pair[0]], b.groups[pair[1]]
        tokens = (0, 1) if groups[0].kind == "recurrent" else span_of_ranks(data, groups, (a.shard, b.shard))
        p, d = (
            data.draw(page_tables(group, held(layout.shard, tokens[1])))
            for group, layout in zip(groups, (a, b), strict=True)
        )
        transfer(a, b, src.memory, want.memory, src.offsets(p), want.offsets(d), tokens, pair=pair)
        if not staged:
            kernels.run(instantiate(plan, src.side(p), dst.side(d), tokens, pair=pair))
            continue
        wire, count = WireFormat(plan), tokens[1] - tokens[0]
        gather, scatter = wire.halves(pair, count)
        slot = np.zeros(wire.layer_bytes(pair, count) * len(plan.layers_of(pair)), np.uint8)
        there = Side(np.zeros(1, np.int64), {REGION: slot.ctypes.data}, origin=tokens[0])
        kernels.run(instantiate(gather, src.side(p), there, tokens))
        kernels.run(instantiate(scatter, there, dst.side(d), tokens))
    assert_same(dst, want)


def held(shard: Shard, tokens: int) -> int:
    """Tokens below `tokens` that a rank holds."""
    return int(owned(shard, np.arange(tokens)).sum())


def span_of_ranks(data: st.DataObject, groups: tuple[Group, Group], shards: tuple[Shard, Shard]) -> tuple[int, int]:
    most = min(g.pages * g.page_size * s.cp_size for g, s in zip(groups, shards, strict=True))
    while any(held(s, most) > g.pages * g.page_size for g, s in zip(groups, shards, strict=True)):
        most -= 1
    first = data.draw(st.integers(0, most - 1))
    return first, data.draw(st.integers(first + 1, most))


def test_layers_go_one_by_one_as_well_as_together() -> None:
    a, b = from_short("bf16,page=4,hnd", MODEL, pages=8), from_short("bf16,page=3,nhd,fused", MODEL, pages=9)
    src, one, all_ = Pool.of(a, seeded(1)), Pool.of(b, seeded(2)), Pool.of(b, seeded(2))
    p, d, plan = np.array([3, 1, 7, 0]), np.array([8, 2, 0, 5, 1]), compile(a, b)
    kernels.run(instantiate(plan, src.side(p), all_.side(d), (0, 14)))
    for layer in range(MODEL.num_layers):
        for tokens in ((0, 5), (5, 6), (6, 14)):
            kernels.run(instantiate(plan, src.side(p), one.side(d), tokens, layers=[layer]))
    assert np.array_equal(one.memory, all_.memory)


def test_pages_that_hold_only_the_rest_of_a_request() -> None:
    """Decode already has a prefix: its page table starts at token 6."""
    a, b = from_short("fp32,page=4", MODEL, pages=4), from_short("fp32,page=3", MODEL, pages=4)
    src, dst = Pool.of(a, seeded(1)), Pool.of(b, seeded(2))
    want = dst.copy()
    p, d = np.array([2, 0, 3]), np.array([3, 1])
    transfer(a, b, src.memory, want.memory, src.offsets(p), want.offsets(d, origin=6), (7, 12))
    kernels.run(instantiate(compile(a, b), src.side(p), dst.side(d, origin=6), (7, 12)))
    assert np.array_equal(dst.memory, want.memory)


def test_neighbouring_pages_become_one_piece() -> None:
    a = from_short("bf16,page=4", MODEL, pages=10)
    plan = compile(a, a)
    bases = {"k": 0, "v": 10**6}
    list_ = pieces(instantiate(plan, Side(np.array([2, 3, 4, 9]), bases), Side(np.array([5, 6, 7, 8]), bases), (0, 16)))
    page = 4 * 2 * 4 * 2
    assert sorted(list_[:, 2].tolist()) == [page] * 4 + [3 * page] * 4  # K and V of two layers


def test_fragments_of_a_long_context_are_planned_fast_and_few() -> None:
    """170,000 tokens, 32 layers, K and V, page 64 to page 16, as they lie: whole pages, not tokens x layers."""
    model = load_model("llama-3.1-8b")
    a, b = from_short("bf16,page=64", model, pages=3000), from_short("bf16,page=16", model, pages=12000)
    rng = seeded(0)
    bases = {"k": 0, "v": 1 << 44}
    tiles = instantiate(
        compile(a, b), Side(rng.permutation(3000)[:2657], bases), Side(np.arange(10625), bases), (0, 170_000)
    )
    list_ = pieces(tiles)
    assert list_[:, 2].sum() == 170_000 * 2 * 8 * 128 * 2 * 32
    assert len(list_) <= 2 * 32 * 2657


@pytest.mark.parametrize(
    ("tokens", "pages", "match"),
    [
        ((0, 20), [0, 1, 2, 3], "prefill: tokens 0..19 are asked for, the page table of 4 pages covers 0..15"),
        ((0, 16), [0, 1, 2, 8], "names page 8 of 8"),
        ((0, 16), [0, 1, 2, -1], "names page -1 of 8"),
    ],
)
def test_a_page_table_that_does_not_fit_is_named(tokens: tuple[int, int], pages: list[int], match: str) -> None:
    a = from_short("bf16,page=4", MODEL, pages=8)
    side = Side(np.array(pages), {"k": 0, "v": 0})
    with pytest.raises(PlanError, match=match):
        instantiate(compile(a, a), side, Side(np.arange(8), {"k": 0, "v": 0}), tokens)


def test_symbolic_layouts_and_unknown_layers_cannot_move() -> None:
    symbolic, real = from_short("bf16", MODEL), from_short("bf16", MODEL, pages=2)
    side = Side(np.arange(2), {"k": 0, "v": 0})
    with pytest.raises(PlanError, match="symbolic"):
        instantiate(compile(symbolic, real), side, side, (0, 1))
    with pytest.raises(PlanError, match=r"layers \[7\]"):
        instantiate(compile(real, real), side, side, (0, 1), layers=[7])


def test_conversions_and_floods_are_not_sent_as_pieces() -> None:
    a, b = from_short("bf16,page=4", MODEL, pages=4), from_short("fp8_e4m3,page=4", MODEL, pages=4)
    side = Side(np.arange(4), {"k": 0, "v": 0})
    with pytest.raises(PlanError, match="conversion"):
        pieces(instantiate(compile(a, b), side, side, (0, 16)))
    big = load_model("llama-3.1-8b")
    a, b = from_short("bf16,kt,page=64", big, pages=999), from_short("bf16,page=64", big, pages=999)
    side = Side(np.arange(999), {"k": 0, "v": 0})
    with pytest.raises(PlanError, match="stage them"):
        pieces(instantiate(compile(a, b), side, side, (0, 8192)))


def test_a_refused_pair_does_not_compile() -> None:
    other = attention_model("m", 2, Array(2, 8))
    with pytest.raises(Refused, match=r"model.states\[attention\].arrays.k.dim: prefill has 4, decode has 8"):
        compile(from_short("bf16", MODEL), from_short("bf16", other))


def test_a_window_sends_its_live_tokens_and_a_recurrent_state_its_record_when_it_is_complete() -> None:
    model = Model("m", 3, [
        State("attention", "0", {"k": Array(1, 4), "v": Array(1, 4)}),
        State("window", "1", {"k": Array(1, 4), "v": Array(1, 4)}, window=8),
        State("recurrent", "2", {"ssm_state": Array(2, 4)})])  # fmt: skip
    layout = from_short("fp32,page=4", model)
    found = {g.kind: [live(g, layout, chunk, 30) for chunk in ((0, 16), (16, 28), (28, 30))] for g in layout.groups}
    assert found == {
        "attention": [(0, 16), (16, 28), (28, 30)],
        "window": [(16, 16), (22, 28), (28, 30)],
        "recurrent": [(0, 0), (0, 0), (0, 1)],
    }


def test_no_token_is_no_work() -> None:
    a = from_short("bf16", MODEL, pages=2)
    side = Side(np.arange(2), {"k": 0, "v": 0})
    assert instantiate(compile(a, a), side, side, (3, 3)) == []
