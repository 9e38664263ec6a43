"""Pictures show what the planner does: the same cells, the same spans; and they are sound SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import msgspec
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Array, Component, Group, Layout, Model, Placement, Scale, Shard, State
from regauge.plan import check, compile, instantiate, pieces
from regauge.plan.cells import page_cells
from regauge.plan.picture import draw, svg
from regauge.plan.sample import roomy, scattered
from strategies import EIGHT_BIT, FLOATS, Pool, layouts, models

LLAMA = load_model("llama-3.1-8b")
SVG = "{http://www.w3.org/2000/svg}"
MLA = Model("mla", 2, [State("latent", "0-1", {"latent": Array(1, 512), "rope": Array(1, 64)})])


def record(page: int) -> Layout:
    """FP8 MLA tokens of 656 bytes: 512 codes, 4 float32 scales, 64 bfloat16."""
    strides = {"token": 656, "page": 656 * page}
    order = "layer page token dim"
    scale = Scale("block", at=Placement(order, "kv", 512, {**strides, "dim": 4}), block=128)
    latent = Component("latent", "float8_e4m3fn", 1, 512, Placement(order, "kv", 0, strides), scale)
    rope = Component("rope", "bfloat16", 1, 64, Placement(order, "kv", 528, strides))
    return Layout(MLA, [Group("latent", "0-1", page, [latent, rope])])


def parse(picture: str) -> ET.Element:
    return ET.fromstring(picture)  # noqa: S314  # our own


def texts(picture: str) -> list[str]:
    return [e.text or "" for e in parse(picture).iter(f"{SVG}text")]


def test_heads_first_takes_one_head_from_every_row() -> None:
    picture = svg(from_short("bf16,page=16", LLAMA), from_short("bf16,page=64,hnd", LLAMA))
    seen = texts(picture)
    assert "llama-3.1-8b: REMAP" in seen
    assert "prefill: pages of 16 tokens" in seen
    assert "page 0 in k: k bfloat16, 256 B a cell" in seen
    assert "+16384" in seen  # head 1 of a page of 64 tokens
    assert "56 more" in seen
    links = list(parse(picture).iter(f"{SVG}path"))
    assert len(links) == 14  # K and V, 7 each


def test_a_packed_record_is_drawn_as_one() -> None:
    seen = texts(svg(record(64), record(128)))
    title = "page 0 in kv: latent float8_e4m3fn + latent scale float32 + rope bfloat16, cells of 16, 128, 512 B"
    assert seen.count(title) == 2
    assert {"latent", "scale", "rope", "+512", "+528", "+656", "+1168"} <= set(seen)
    assert "... the rest of the page is filled from other pages" in seen


def test_scales_that_a_conversion_makes_stand_on_its_side() -> None:
    apart = [Component("latent", "bfloat16", 1, 512, Placement("layer page token dim", "latent")),
             Component("rope", "bfloat16", 1, 64, Placement("layer page token dim", "rope"))]  # fmt: skip
    plan = compile(*(roomy(x, 64) for x in (Layout(MLA, [Group("latent", "0-1", 64, apart)]), record(64))))
    cells = page_cells(plan, (0, 0))
    scale = [i for i, a in enumerate(cells.arrays) if a.name == "latent scale"]
    assert [c.offset for c in cells.target if c.array in scale][:3] == [512, 1168, 1824]
    assert not [c for c in cells.source if c.array in scale]
    seen = texts(draw(plan))
    assert seen.index("latent") < seen.index("scale") < seen.index("rope")


def test_elements_that_change_places_one_by_one_are_shortened() -> None:
    picture = svg(from_short("bf16,page=16,kt", LLAMA), from_short("bf16,page=16", LLAMA))
    assert "... 1019 more rows" in texts(picture)
    assert len(picture) < 200_000


def test_names_are_escaped() -> None:
    evil = msgspec.structs.replace(LLAMA, name="</text><script>alert(1)</script>")
    layout = from_short("bf16", evil)
    root = parse(svg(layout, layout))
    assert not list(root.iter(f"{SVG}script"))
    assert any("</text><script>" in (e.text or "") for e in root.iter(f"{SVG}text"))


def test_nothing_is_fetched_and_both_colour_schemes_are_served() -> None:
    picture = svg(from_short("bf16", LLAMA), from_short("bf16", LLAMA))
    assert "prefers-color-scheme:dark" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in picture


def test_a_rank_of_stripes_shows_its_own_tokens() -> None:
    b = msgspec.structs.replace(record(64), shard=Shard(cp_rank=1, cp_size=2))
    cells = page_cells(compile(roomy(record(64), 64), roomy(b, 64)), (0, 0))
    latent = [c for c in cells.target if c.array == 0]
    assert [c.token for c in latent][:3] == [1, 3, 5]
    assert [c.offset for c in latent][:3] == [0, 656, 1312]
    assert [c.offset for c in cells.source if c.array == 0][:3] == [656, 1968, 3280]
    assert len(latent) == 32


def test_the_first_page_with_something_of_a_rank_is_drawn() -> None:
    """Pages of 16, stripes of 64, rank 1: the first four source pages hold none of its tokens."""
    b = msgspec.structs.replace(record(64), shard=Shard(cp_rank=1, cp_size=2, cp_stripe=64))
    plan = compile(roomy(record(16), 256), roomy(b, 256))
    cells = page_cells(plan, (0, 0))
    latent = [c for c in cells.source if c.array == 0]
    assert {c.page for c in latent} == {4}
    assert [c.token for c in latent] == list(range(64, 80))
    assert "page 4 in" in draw(plan)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_cells_are_the_planners_spans(data: st.DataObject) -> None:
    model = data.draw(models())
    a, b = (roomy(data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))), 16) for _ in "ab")
    assume(not check(a, b).refusals)
    plan = compile(a, b)
    for pair in plan.pairs:
        cells, first = page_cells(plan, pair), plan.layers_of(pair)[:1]
        sides = scattered(plan, pair, (0, cells.tokens))
        boxes = instantiate(plan, *sides, (0, cells.tokens), pair=pair, layers=first)
        moved = [c for c in cells.source if c.span >= 0]
        assert len({c.key for c in moved}) == len(moved)
        assert {c.key for c in moved} == {c.key for c in cells.target if c.span >= 0}
        if not any(lane.converts for lane in plan.lanes if lane.pair == pair):
            assert sum(c.nbytes for c in moved) == sum(t.pieces * t.run for t in boxes)
            assert len({c.span for c in moved}) == len(pieces(boxes))
    parse(draw(plan))


@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_copying_cell_by_cell_moves_a_page(data: st.DataObject, seed: int) -> None:
    model = data.draw(models())
    a = roomy(data.draw(layouts(model)), 16)
    b = roomy(data.draw(layouts(model, (a.groups[0].components[0].dtype,))), 16)
    plan, pair = compile(a, b), (0, 0)
    cells, layer = page_cells(plan, pair), plan.layers_of(pair)[0]
    rng = np.random.default_rng(seed)
    src, got, want = Pool.of(a, rng), Pool.of(b, np.random.default_rng(1)), Pool.of(b, np.random.default_rng(1))
    pages = [np.arange(1, 1 + -(-cells.tokens // g.page_size)) for g in (a.groups[0], b.groups[0])]
    boxes = instantiate(plan, src.offsets(pages[0]), want.offsets(pages[1]), (0, cells.tokens), layers=[layer])
    for source, target, size in pieces(boxes).tolist():
        want.memory[target : target + size] = src.memory[source : source + size]
    to = {c.key: c for c in cells.target}
    for c in cells.source:
        at = []
        for pool, group, cell, side in ((src, a.groups[0], c, 0), (got, b.groups[0], to[c.key], 1)):
            region = cells.arrays[cell.array].regions[side].replace("{layer}", str(layer))
            page = int(pages[side][cell.page]) * cells.arrays[cell.array].strides[side]
            assert group.layer_ids[0] == layer
            at.append(pool.bases[region] + page + cell.offset)
        got.memory[at[1] : at[1] + c.nbytes] = src.memory[at[0] : at[0] + c.nbytes]
    assert np.array_equal(got.memory, want.memory)
