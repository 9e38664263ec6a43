"""Digests do not depend on layout, pages or ranks, add up, cover stored scales, and see every fault."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Component, Group, Layout, Placement, Shard
from regauge.layout.validate import validate
from regauge.layout.view import component_view, scale_view
from regauge.move import digest, kernels
from regauge.plan import Side, check, compile, instantiate
from regauge.plan.digest import Keys, add, array_name, elements_digest
from regauge.plan.planner import Lane, Plan
from regauge.plan.ranks import crossings, ranks
from regauge.plan.reference import addresses, holds, load, places
from regauge.plan.tiles import Tiles
from regauge.plan.wire import REGION, WireFormat
from strategies import EIGHT_BIT, FLOATS, Pool, hybrids, layouts, page_tables, shards

ANY = (*FLOATS, *EIGHT_BIT)
KEYS = Keys(bytes(range(32)))
MODEL = attention_model("m", 2, Array(2, 8))


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def logical(pool: Pool, pages: np.ndarray, group: Group, lanes: Sequence[Lane], tokens: Sequence[int]) -> int:
    """Digest what a pool holds of some lanes, element by element: neither planner nor kernels take part."""
    position = places(pool.layout.shard, 0, list(tokens))
    total = 0
    for lane in lanes:
        name, _, scale = lane.name.partition(" ")
        c = group.component(name)
        total += _array(pool, pages, group, c, lane, tokens, position, scales=bool(scale))
        converted = lane.converts and c.scale is not None and c.scale.at is not None
        if converted:
            total += _array(pool, pages, group, c, lane, tokens, position, scales=True)
    return add([total])


def _array(
    pool: Pool, pages: np.ndarray, group: Group, c: Component, lane: Lane, tokens: Sequence[int], position: np.ndarray,
    *, scales: bool,
) -> int:  # fmt: skip
    ours = pool.layout.heads(group, c)
    index = [h - ours[0] for h in lane.heads]
    view = scale_view(group, c) if scales else component_view(group, c)
    dtype = c.scale.dtype if scales and c.scale else c.dtype
    layers = lane.layers
    where = addresses(view, group, pool.offsets(pages), position, layers)[:, :, index]
    name = array_name(group.kind, f"{c.name} scale" if scales else c.name, dtype)
    values = load(pool.memory, where, dtype)
    return sum(
        elements_digest(KEYS, name, values[:, i : i + 1], layers, token, lane.heads) for i, token in enumerate(tokens)
    )


def draw_case(
    data: st.DataObject, seed: int
) -> tuple[Plan, Pool, Pool, list[tuple[tuple[int, int], tuple[int, int], np.ndarray, np.ndarray]]]:
    """A plan between two ranks of a hybrid model, filled pools, and tokens and page tables for each pair of groups."""
    model = data.draw(hybrids())
    a, b = (data.draw(layouts(model, ANY, shard=data.draw(shards(model)))) for _ in range(2))
    assume(not check(a, b).refusals)
    plan = compile(a, b)
    assume(plan.pairs)
    out = []
    for pair in plan.pairs:
        groups = a.groups[pair[0]], b.groups[pair[1]]
        most = 1 if groups[0].kind == "recurrent" else min(g.pages * g.page_size for g in groups)
        first = data.draw(st.integers(0, most - 1))
        tables = [data.draw(page_tables(g, most)) for g in groups]
        out.append((pair, (first, most), *tables))
    return plan, Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1)), out


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), backend=st.sampled_from(["native", "numpy"]))
def test_sums_are_those_of_the_logical_elements_on_either_side(data: st.DataObject, seed: int, backend: str) -> None:
    plan, src, dst, work = draw_case(data, seed)
    same = dst.copy()
    for pair, tokens, p, d in work:
        tiles = instantiate(plan, src.side(p), dst.side(d), tokens, pair=pair, keys=KEYS)
        if not tiles:
            continue
        got = digest.run(tiles, backend=backend)  # type: ignore[arg-type]
        kernels.run(instantiate(plan, src.side(p), same.side(d), tokens, pair=pair))
        common = [t for t in range(*tokens) if holds(src.layout.shard, t) and holds(dst.layout.shard, t)]
        lanes = [lane for lane in plan.lanes if lane.pair == pair]
        x, y = src.layout.groups[pair[0]], dst.layout.groups[pair[1]]
        assert got.src == logical(src, p, x, lanes, common)
        assert got.dst == logical(dst, d, y, lanes, common)
        assert got.src == got.dst or any(lane.converts for lane in lanes)
        assert digest.read(tiles, "src") == got.src
        assert digest.read(tiles, "dst") == got.dst
    assert np.array_equal(dst.memory, same.memory)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_chunks_of_tokens_and_layers_add_up(data: st.DataObject, seed: int) -> None:
    plan, src, dst, work = draw_case(data, seed)
    for pair, (first, end), p, d in work:
        whole = digest.run(instantiate(plan, src.side(p), dst.side(d), (first, end), pair=pair, keys=KEYS))
        cut = data.draw(st.integers(first, end))
        parts = digest.Sums()
        for layer in plan.layers_of(pair):
            for tokens in ((first, cut), (cut, end)):
                tiles = instantiate(plan, src.side(p), dst.side(d), tokens, pair=pair, layers=[layer], keys=KEYS)
                parts += digest.run(tiles)
        assert parts == whole


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_what_is_written_to_the_wire_is_what_is_read_from_it(data: st.DataObject, seed: int) -> None:
    plan, src, dst, work = draw_case(data, seed)
    wire = WireFormat(plan)
    for pair, tokens, p, d in work:
        count = tokens[1] - tokens[0]
        gather, scatter = wire.halves(pair, count)
        slot = np.zeros(wire.layer_bytes(pair, count) * len(plan.layers_of(pair)), np.uint8)
        staged = Side(np.zeros(1, np.int64), {REGION: slot.ctypes.data}, origin=tokens[0])
        sent = digest.run(instantiate(gather, src.side(p), staged, tokens, keys=KEYS))
        arrived = digest.run(instantiate(scatter, staged, dst.side(d), tokens, keys=KEYS))
        assert sent.dst == arrived.src


@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_what_ranks_send_adds_up_to_what_a_rank_gets(data: st.DataObject, seed: int) -> None:
    model = attention_model("m", 2, Array(4, data.draw(st.sampled_from([1, 4, 8]))))
    dtype = data.draw(st.sampled_from(FLOATS))
    sides = [
        ranks(data.draw(layouts(model, (dtype,), shard=Shard(0, data.draw(st.sampled_from([1, 2, 4, 8]))))))
        for _ in range(2)
    ]
    end = min(x[0].groups[0].pages * x[0].groups[0].page_size for x in sides)
    pools = [[Pool.of(layout, seeded(seed)) for layout in side] for side in sides]
    tables = [data.draw(page_tables(side[0].groups[0], end)) for side in sides]
    sums = [0] * len(sides[1])
    paired = crossings(*sides)
    for c in paired:
        tiles = instantiate(
            c.plan, pools[0][c.prefill].side(tables[0]), pools[1][c.decode].side(tables[1]), (0, end), keys=KEYS
        )
        sums[c.decode] = add([sums[c.decode], digest.run(tiles).src])
    for layout, pool, got in zip(sides[1], pools[1], sums, strict=True):
        plan = compile(layout, layout)
        assert got == logical(pool, tables[1], layout.groups[0], plan.lanes, range(end))


# ---- faults ----


def change(pool: Pool, rng: np.random.Generator, where: np.ndarray, size: int) -> None:
    """Change every byte of every element at these addresses."""
    at = (where.ravel()[:, None] + np.arange(size)).ravel()
    pool.memory[at] ^= rng.integers(1, 256, len(at), np.uint8)


def elements(pool: Pool, pages: np.ndarray, tokens: range) -> list[tuple[np.ndarray, int]]:
    """Addresses and size of every array of a pool of one group: elements and stored scales."""
    group = pool.layout.groups[0]
    out = []
    for c in group.components:
        views = [component_view(group, c)]
        if c.scale is not None and c.scale.at is not None:
            views.append(scale_view(group, c))
        side, position = pool.offsets(pages), np.array(tokens)
        out += [(addresses(view, group, side, position, group.layer_ids), view.itemsize) for view in views]
    return out


FAULTS = ("bit", "element", "page", "swapped", "stale", "dropped", "doubled")


@pytest.mark.parametrize("fault", FAULTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_fault_is_seen(fault: str, data: st.DataObject, seed: int) -> None:
    """Between any two layouts, converted or not. The control: without the fault, the sums agree."""
    model = attention_model(
        "m", 2, Array(data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([4, 8, 12])))
    )
    a, b = (data.draw(layouts(model, ANY)) for _ in range(2))
    assume(not check(a, b).refusals)
    group, rng = b.groups[0], seeded(seed)
    end = min(g.pages * g.page_size for x in (a, b) for g in x.groups)
    p, d = data.draw(page_tables(a.groups[0], end)), data.draw(page_tables(group, end))
    src, dst, plan = Pool.of(a, seeded(seed)), Pool.of(b, seeded(seed + 1)), compile(a, b)
    tiles = instantiate(plan, src.side(p), dst.side(d), (0, end), keys=KEYS)
    sums = digest.run(tiles)
    assert digest.read(tiles, "dst") == sums.dst
    before = dst.copy()
    used = range(min(end, group.page_size))
    match fault:
        case "bit" | "element":
            arrays = elements(dst, d, range(end))
            where, size = arrays[rng.integers(len(arrays))]
            one = where.flat[[rng.integers(where.size)]]
            if fault == "bit":
                dst.memory[one + rng.integers(size)] ^= np.uint8(1 << rng.integers(8))
            else:
                change(dst, rng, one, size)
        case "page":
            for where, size in elements(dst, d[:1], used):
                change(dst, rng, where, size)
        case "swapped":
            assume(len(d) > 1)
            swapped = d.copy()
            swapped[[0, 1]] = swapped[[1, 0]]
            digest.run(instantiate(plan, src.side(p), dst.side(swapped), (0, end), keys=KEYS))
        case "stale":
            stale = Pool.of(b, seeded(seed + 2))
            for where, size in elements(dst, d[-1:], range(end - (len(d) - 1) * group.page_size)):
                spread = (where.ravel()[:, None] + np.arange(size)).ravel()
                dst.memory[spread] = stale.memory[spread]
        case "dropped" | "doubled":
            chunks = [
                digest.run(instantiate(plan, src.side(p), dst.side(d), (0, end), layers=[i], keys=KEYS)) for i in (0, 1)
            ]
            assert chunks[0] + chunks[1] == sums
            assert chunks[0] != sums
            assert chunks[0] + chunks[1] + chunks[1] != sums
            return
    assume(not np.array_equal(before.memory, dst.memory))
    assert digest.read(tiles, "dst") != sums.dst


def test_another_secret_gives_another_digest() -> None:
    a = from_short("bf16,page=4", MODEL, pages=4)
    src, dst = Pool.of(a, seeded(1)), Pool.of(a, seeded(2))
    one, two = (
        digest.run(instantiate(compile(a, a), src.side(np.arange(4)), dst.side(np.arange(4)), (0, 16), keys=keys))
        for keys in (KEYS, Keys(bytes(32)))
    )
    assert one.src == one.dst != two.src == two.dst


def irregular(order: str) -> Layout:
    model = attention_model("m", 1, Array(1, 12))
    components = [Component(n, "bfloat16", 1, 12, Placement(order, region=n)) for n in ("k", "v")]
    return validate(Layout(model, [Group("attention", "0", 2, components, pages=4)]))


def test_rows_that_the_two_ends_cut_differently_are_read_apart() -> None:
    """Lanes of 4 and of 6 elements: their common runs are of 4, 2, 2 and 4, which is no box."""
    a, b = irregular("layer page head dim token dim:4"), irregular("layer page head dim token dim:6")
    src, dst = Pool.of(a, seeded(1)), Pool.of(b, seeded(2))
    plan, pages = compile(a, b), np.array([2, 0, 3])
    tiles: list[Tiles] = instantiate(plan, src.side(pages), dst.side(pages), (1, 6), keys=KEYS)
    assert {t.only for t in tiles} == {None, "src", "dst"}
    sums = digest.run(tiles)
    assert sums.src == sums.dst == logical(src, pages, a.groups[0], plan.lanes, range(1, 6))
    assert digest.read(tiles, "dst") == sums.dst


def test_long_rows_are_cut_into_segments() -> None:
    model = attention_model("m", 1, Array(2, 2560))
    a, b = (from_short(form, model, pages=3) for form in ("bf16,page=4", "fp32,page=3,hnd"))
    src, dst, plan = Pool.of(a, seeded(1)), Pool.of(b, seeded(2)), compile(a, b)
    src.memory &= 0xBF  # no NaN, no infinity
    pages = np.array([2, 0, 1])
    sums = digest.run(instantiate(plan, src.side(pages), dst.side(pages), (0, 9), keys=KEYS))
    assert sums.src == logical(src, pages, a.groups[0], plan.lanes, range(9))
    assert sums.dst == logical(dst, pages, b.groups[0], plan.lanes, range(9))


REAL = {
    "deepseek-v3.2": ("bf16,page=64", "record:fp8_ds_mla,record:dsa_index,page=64", "fp8,scale=token_head,page=16"),
    "kimi-linear-48b-a3b": ("bf16,page=64", "bf16,page=16,hnd,state=bf16", "bf16,record:dsa_mla,page=64"),
    "gpt-oss-20b": ("bf16,page=16", "bf16,page=64,kt", "bf16,record:inline4,page=16"),
}


@pytest.mark.parametrize("name", REAL)
def test_todays_models_are_digested_in_the_pass_that_moves_them(name: str) -> None:
    """Packed records, indexers, recurrent states, windows: no row has to be read apart, and nothing is refused."""
    model = load_model(name)
    sides_ = [from_short(form, model, pages=2, requests=2) for form in REAL[name]]
    for a, b in itertools.product(sides_, repeat=2):
        if check(a, b).refusals:
            continue
        plan, src, dst = compile(a, b), Pool.of(a, seeded(1)), Pool.of(b, seeded(2))
        for pair in plan.pairs:
            recurrent = a.groups[pair[0]].kind == "recurrent"
            tokens, pages = ((0, 1), np.array([1])) if recurrent else ((3, 20), np.array([1, 0]))
            layer = plan.layers_of(pair)[:1]
            tiles = instantiate(plan, src.side(pages), dst.side(pages), tokens, pair=pair, layers=layer, keys=KEYS)
            assert all(t.only is None or t.run * math.prod(t.shape) < 1024 for t in tiles), (
                "more than scales is read apart"
            )
            sums = digest.run(tiles)
            assert digest.read(tiles, "dst", backend="numpy") == sums.dst
            assert sums.src == sums.dst or any(lane.converts for lane in plan.lanes if lane.pair == pair)
