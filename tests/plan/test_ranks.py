"""Every decode rank gets all that it keeps, once, however both sides are split: heads, layers, tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.errors import PlanError, Refused
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Group, Layout, Model, Shard, format_layers
from regauge.move import kernels
from regauge.plan import check, instantiate
from regauge.plan.planner import Plan
from regauge.plan.ranks import crossings, lacking, leg, path_of, ranks
from regauge.plan.reference import transfer
from regauge.plan.sample import roomy
from regauge.plan.stripes import owned
from strategies import EIGHT_BIT, FLOATS, Pool, assert_same, hybrids, layouts, shards

TOKENS = 23
MODEL = attention_model("m", 4, Array(8, 4))


def stages(layout: Layout, count: int) -> list[Layout]:
    """Cut a rank's layers into pipeline stages; a stage may be of any length, but not empty."""
    edges = np.linspace(0, layout.model.num_layers, count + 1).astype(int)
    out = []
    for rank in range(count):
        groups: list[Group] = []
        for group in layout.groups:
            ids = tuple(x for x in group.layer_ids if edges[rank] <= x < edges[rank + 1])
            if ids:
                groups.append(msgspec.structs.replace(group, layers=format_layers(ids)))
        shard = msgspec.structs.replace(layout.shard, pp_rank=rank, pp_size=count)
        out.append(msgspec.structs.replace(layout, groups=groups, shard=shard))
    return out


def alike(group: Group) -> Group:
    """One constant for all layers and heads: a rank's own ones do not tell those of others."""
    components = []
    for c in group.components:
        scale = c.scale
        while scale is not None and isinstance(scale.values, list):
            first = scale.values[0]
            scale = msgspec.structs.replace(scale, values=first[0] if isinstance(first, list) else first)
        components.append(msgspec.structs.replace(c, scale=scale))
    return msgspec.structs.replace(group, components=components)


@st.composite
def sides(draw: st.DrawFn, model: Model, dtypes: tuple[str, ...]) -> list[Layout]:
    one = draw(layouts(model, dtypes, shard=draw(shards(model))))
    one = msgspec.structs.replace(one, groups=[alike(group) for group in one.groups])
    one = roomy(one, TOKENS)
    each = ranks(one)
    count = draw(st.integers(1, model.num_layers))
    return [stage for rank in each for stage in (stages(rank, count) if count > 1 else [rank])]


def tokens_of(group: Group) -> tuple[int, int]:
    return (0, 1) if group.kind == "recurrent" else (0, TOKENS)


def carry_by_reference(a: Pool, b: Pool) -> None:
    for i, x in enumerate(a.layout.groups):
        for j, y in enumerate(b.layout.groups):
            if x.kind == y.kind:
                sides = a.offsets(np.arange(x.pages)), b.offsets(np.arange(y.pages))
                transfer(a.layout, b.layout, a.memory, b.memory, *sides, tokens_of(x), pair=(i, j))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_ranks_of_any_number_on_both_sides(data: st.DataObject, seed: int) -> None:
    """What decode ranks hold at the end is what they would hold if one rank of the whole model had sent it."""
    model = data.draw(hybrids())
    dtype = data.draw(st.sampled_from(FLOATS))
    whole = roomy(data.draw(layouts(model, (dtype,))), TOKENS)
    prefill = data.draw(sides(model, (dtype,)))
    decode = data.draw(sides(model, (*FLOATS, *EIGHT_BIT)))
    rng = np.random.default_rng(seed)
    truth = Pool.of(whole, rng)
    sources = [Pool.of(layout, rng) for layout in prefill]
    targets = [Pool.of(layout, rng) for layout in decode]
    wanted = [pool.copy() for pool in targets]
    for pool in sources:
        carry_by_reference(truth, pool)
    for pool in wanted:
        carry_by_reference(truth, pool)
    for c in crossings(prefill, decode):
        src, dst = sources[c.prefill], targets[c.decode]
        for pair in c.plan.pairs:
            x, y = src.layout.groups[pair[0]], dst.layout.groups[pair[1]]
            tiles = instantiate(
                c.plan, src.side(np.arange(x.pages)), dst.side(np.arange(y.pages)), tokens_of(x), pair=pair
            )
            kernels.run(tiles)
    for got, want in zip(targets, wanted, strict=True):
        assert_same(got, want)


def cover(prefill: list[Layout], decode: list[Layout]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(c.prefill, c.decode, c.plan.lanes[0].heads) for c in crossings(prefill, decode)]


def side(tp: int, form: str = "bf16") -> list[Layout]:
    return ranks(from_short(form, MODEL, shard=Shard(0, tp)))


def test_heads_are_split_and_merged() -> None:
    assert cover(side(2), side(4)) == [(0, 0, (0, 1)), (0, 1, (2, 3)), (1, 2, (4, 5)), (1, 3, (6, 7))]
    assert cover(side(4), side(1)) == [(0, 0, (0, 1)), (1, 0, (2, 3)), (2, 0, (4, 5)), (3, 0, (6, 7))]


def test_decode_ranks_spread_over_prefill_ranks_that_hold_the_same_head() -> None:
    """16 prefill ranks hold 8 heads twice: two decode ranks of all heads take them from different holders."""
    pairs = cover(side(16), ranks(from_short("bf16", MODEL, shard=Shard(0, 1))) * 2)
    assert [p for p, d, _ in pairs if d == 0] == list(range(0, 16, 2))
    assert [p for p, d, _ in pairs if d == 1] == list(range(1, 16, 2))


def test_a_missing_rank_is_refused_and_named() -> None:
    with pytest.raises(Refused, match=r"no prefill rank holds every head and token of attention k, layers 0 to 3"):
        crossings(side(2)[:1], side(1))
    stripes = ranks(from_short("bf16", MODEL, shard=Shard(cp_size=2)))
    assert path_of(crossings(stripes, side(1))) == "REMAP"
    with pytest.raises(Refused, match="which decode rank 0 keeps"):
        crossings(stripes[1:], side(1))


def test_ranks_that_one_rank_does_not_tell_are_asked_for() -> None:
    with pytest.raises(PlanError, match="pipeline stages"):
        ranks(from_short("bf16", MODEL, shard=Shard(pp_size=2)))
    per_head = from_short("fp8,scale=head", MODEL, shard=Shard(0, 2))
    assert len(ranks(per_head)) == 2  # one constant for all heads
    values = [[1.0, 2.0, 3.0, 4.0]] * 4
    own = per_head.groups[0].components[0]
    assert own.scale is not None
    own = msgspec.structs.replace(own, scale=msgspec.structs.replace(own.scale, values=values))
    group = msgspec.structs.replace(per_head.groups[0], components=[own, per_head.groups[0].components[1]])
    with pytest.raises(PlanError, match="k: scales"):
        ranks(msgspec.structs.replace(per_head, groups=[group]))


def test_two_ranks_with_nothing_in_common_exchange_nothing() -> None:
    a, b = side(2)
    assert check(a, b).path == "NONE"


def test_many_ranks_are_paired_fast() -> None:
    """64 prefill ranks to 32 decode ranks of a large model: only those pairs that share a head."""
    model = load_model("qwen3-235b-a22b")
    heads = model.states[0].arrays["k"].heads
    a, b = (ranks(from_short("bf16", model, shard=Shard(0, tp))) for tp in (64, 32))
    pairs = crossings(a, b)
    assert len(pairs) == 32
    assert {c.plan.lanes[0].heads for c in pairs} == {(h,) for h in range(heads)}


@given(data=st.data())
def test_two_stripings_share_a_token_or_they_do_not(data: st.DataObject) -> None:
    a, b = (
        Shard(cp_rank=data.draw(st.integers(0, size - 1)), cp_size=size, cp_stripe=data.draw(st.integers(1, 9)))
        for size in data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    )
    tokens = np.arange(5 * 9 * 5 * 9)
    shared = bool((owned(a, tokens) & owned(b, tokens)).any())
    verdict = check(*(from_short("bf16", MODEL, shard=shard) for shard in (a, b)))
    assert (verdict.path != "NONE") == shared


def test_stripings_of_a_peer_cost_bounded_memory() -> None:
    """Periods of 2^32 tokens and more, in which the two deals never repeat."""
    for a, b in (((1024, 8191), (1023, 1)), ((4096, 1 << 20), (4095, (1 << 20) - 1))):
        sides = [from_short("bf16", MODEL, shard=Shard(cp_size=n, cp_stripe=stripe)) for n, stripe in (a, b)]
        assert check(*sides).path == "REMAP"


def carried(plan: Plan) -> set[tuple[tuple[int, int], str, int, int]]:
    """What a plan brings: (pair of groups, array, layer, head)."""
    return {(lane.pair, lane.name, x, head) for lane in plan.lanes for x in lane.layers for head in lane.heads}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_both_ends_of_a_link_find_the_leg_that_the_whole_has_for_them(data: st.DataObject) -> None:
    """From two layouts alone; and all legs of a decode rank together lack nothing, but without one of them something."""
    model = data.draw(hybrids())
    prefill, decode = data.draw(sides(model, FLOATS)), data.draw(sides(model, FLOATS))
    assume(len(prefill) * len(decode) <= 48)
    legs = {(i, j): leg(a, b) for i, a in enumerate(prefill) for j, b in enumerate(decode)}
    told = {key: carried(plan) for key, plan in legs.items() if plan.lanes}
    if all(layout.shard.pp_size == 1 for layout in decode):
        # With stages, the place in the list spreads a decode rank over the holders of a head otherwise than its own rank does.
        assert told == {(c.prefill, c.decode): carried(c.plan) for c in crossings(prefill, decode)}
    for j, rank in enumerate(decode):
        mine = [legs[i, k] for i, k in told if k == j]
        assert lacking(rank, mine) == []
        if prefill[0].shard.cp_size == 1:
            brought = [item for plan in mine for item in carried(plan)]
            assert len(brought) == len(set(brought)), "something is sent twice"
        for left_out in range(len(mine)):
            rest = mine[:left_out] + mine[left_out + 1 :]
            gone = lacking(rank, rest)
            assert gone, f"leg {left_out} of {len(mine)} is not missed"
            assert all(any(lane.name in text for text in gone) for lane in mine[left_out].lanes)


def test_what_is_lacking_is_named() -> None:
    (rank,) = side(1)
    legs = [leg(a, rank) for a in side(4)]
    assert lacking(rank, legs) == []
    assert lacking(rank, legs[1:]) == ["attention k, layers 0 to 3", "attention v, layers 0 to 3"]
    assert lacking(rank, []) == ["attention k, layers 0 to 3", "attention v, layers 0 to 3"]
    cut = stages(rank, 2)
    assert lacking(rank, [leg(cut[1], rank)]) == ["attention k, layers 0 to 1", "attention v, layers 0 to 1"]
    assert lacking(cut[0], [leg(a, cut[0]) for a in side(4)]) == []


def test_stripes_whose_tokens_a_rank_does_not_keep_are_not_missed() -> None:
    ours, theirs = (ranks(from_short("bf16", MODEL, shard=Shard(cp_size=n, cp_stripe=s))) for n, s in ((2, 2), (4, 1)))
    for rank in theirs:
        legs = [plan for a in ours if (plan := leg(a, rank)).lanes]
        assert len(legs) == 1, "a stripe of four lies in one of two"
        assert lacking(rank, legs) == []
        assert lacking(rank, []) != []
    for rank in ours:
        legs = [plan for a in theirs if (plan := leg(a, rank)).lanes]
        assert len(legs) == 2
        assert lacking(rank, legs) == []
        assert lacking(rank, legs[:1]) == ["attention k, layers 0 to 3", "attention v, layers 0 to 3"]


def test_heads_numbered_by_hand_do_not_tell_those_of_other_ranks() -> None:
    a, b = side(2)
    group = a.groups[0]
    by_hand = [msgspec.structs.replace(c, first_head=0) for c in group.components]
    layout = msgspec.structs.replace(a, groups=[msgspec.structs.replace(group, components=by_hand)])
    with pytest.raises(PlanError, match="numbered by hand: they do not tell which heads other ranks hold"):
        leg(layout, b)
