"""What goes wrong elsewhere with unlike pairs, as reported: here each is carried byte for byte, or refused with field and remedy.

Tests are named after what goes wrong. `carried` runs all ranks of both sides in every way that the product has, against the
reference (`regauge.move.conformance`). Where a report is of a sender that is mistaken about its own cache, the same mistake
is made here too, and must show as a wrong element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from regauge.errors import PlanError, Refused
from regauge.layout.engines.flags import latent_rows
from regauge.layout.presets import attention_model, load_model
from regauge.layout.records import record_components
from regauge.layout.spec import Array, Component, Group, Layout, Model, Placement, Scale, State, with_components
from regauge.layout.view import region_sizes
from regauge.move import kernels
from regauge.move.conformance import pools as suite
from regauge.move.conformance.catalogue import all_ranks, shortened
from regauge.move.conformance.suite import Outcome, run_pair, source
from regauge.plan import check, compile, instantiate
from regauge.plan.planner import live
from regauge.plan.ranks import crossings
from regauge.plan.reference import transfer
from strategies import Pool

GQA = shortened(load_model("qwen3-30b-a3b"), 2)
SPARSE = shortened(load_model("glm-5"), 2)
WINDOW = shortened(load_model("gpt-oss-20b"), 4)
DELTA = shortened(load_model("qwen3-next-80b-a3b"), 4)


def side(form: str, model: Model = GQA, dtype: str = "bfloat16") -> list[Layout]:
    return all_ranks(form, model, dtype)


def carry(prefill: Sequence[Layout], decode: Sequence[Layout]) -> Outcome:
    return run_pair(source("prefill", prefill, seed=1), "decode", decode, seed=1)


def assert_noticed(prefill: Sequence[Layout], decode: Sequence[Layout], told: Sequence[Layout]) -> None:
    """Carry a request whose sender believes that its layouts are `told`: an element must come out wrong."""
    right = source("prefill", prefill, seed=1)
    mistaken = [numbered_as(layout, pool.layout) for layout, pool in zip(told, right.pools, strict=True)]
    pools = [with_room(pool, layout) for pool, layout in zip(right.pools, mistaken, strict=True)]
    found = run_pair(replace(right, told=tuple(mistaken), pools=tuple(pools)), "decode", decode, seed=1)
    assert ": expected " in found.fault, found


def numbered_as(told: Layout, own: Layout) -> Layout:
    """A mistaken sender numbers its pages as they are."""
    groups = [msgspec.structs.replace(g, pages=mine.pages) for g, mine in zip(told.groups, own.groups, strict=True)]
    return msgspec.structs.replace(told, groups=groups)


def with_room(pool: suite.Pool, told: Layout) -> suite.Pool:
    """What it takes for its pages may end after its memory: what lies there is not of the request either."""
    end = max(pool.bases[name] + size for name, size in region_sizes(told).items())
    beyond = np.random.default_rng(3).integers(0, 256, max(0, end - len(pool.memory)), np.uint8)
    return replace(pool, memory=np.concatenate([pool.memory, beyond]))


def with_pages(layout: Layout, pages: int) -> Layout:
    return msgspec.structs.replace(layout, groups=[msgspec.structs.replace(g, pages=pages) for g in layout.groups])


def carried(prefill: Sequence[Layout], decode: Sequence[Layout], path: str) -> None:
    found = carry(prefill, decode)
    assert (found.path, found.fault) == (path, "")
    assert found.elements > 0


def reasons(prefill: Sequence[Layout], decode: Sequence[Layout]) -> str:
    return "; ".join(check(prefill[0], decode[0]).reasons)


# -- one name, other bytes ---------------------------------------------------------------------------------------------


def v4_side(record: bool) -> list[Layout]:
    """DeepSeek V4's latents as FlashMLA keeps them, 584 bytes a token, or as TRT-LLM does, 512 bytes: both called fp8_e4m3."""
    state = State("latent", "0-1", {"latent": Array(1, 448), "rope": Array(1, 64)})
    heads = {"latent": 1, "rope": 1}
    if record:
        made = record_components("v4", state, page_size=64, heads=heads, order="layer page", region="kv")
    else:
        scales = dict.fromkeys(heads, Scale("tensor", values=1.0, rule="divide"))
        made = latent_rows(state, "float8_e4m3fn", scales, "layer page", "kv")
    return [Layout(Model("deepseek-v4", 2, [state]), [Group("latent", "0-1", 64, made)])]


def test_two_record_formats_under_one_dtype_name() -> None:
    """sgl-project/sglang#37838: the handshake compares `kv_cache_dtype`, fp8_e4m3 on both sides, of 584 and of 512 bytes."""
    packed, uniform = v4_side(True), v4_side(False)
    carried(packed, uniform, "CONVERT")
    carried(uniform, packed, "CONVERT")
    assert "dtype bfloat16 -> float8_e4m3fn" in reasons(packed, uniform)  # the rotated part
    assert "scale per block of 64 (float8_e8m0fnu) -> per tensor (constant)" in reasons(packed, uniform)
    assert_noticed(packed, uniform, told=uniform)
    assert_noticed(uniform, packed, told=packed)


@pytest.mark.parametrize(("prefill", "decode"), [("packed", "raw"), ("raw", "packed")])
def test_packed_and_raw_rows_of_sparse_attention_under_one_flag(prefill: str, decode: str) -> None:
    """sgl-project/sglang#20163: FlashMLA reads records of 656 bytes, TRT-LLM rows of 576, both started with fp8_e4m3."""
    a, b = (side(f"engine:sglang,dtype=fp8_e4m3,record={record}", SPARSE) for record in (prefill, decode))
    carried(a, b, "CONVERT")
    assert_noticed(a, b, told=b)


def test_auto_on_both_sides_and_another_dtype_of_the_model() -> None:
    """SGLang 0.5.23 publishes the string `auto` from both sides: bfloat16 and float32 pass, and the text is garbage."""
    a, b = side("engine:sglang,page=16"), side("engine:sglang,page=16", dtype="float32")
    carried(a, b, "CONVERT")
    assert "dtype bfloat16 -> float32" in reasons(a, b)
    assert_noticed(a, b, told=b)


def test_e4m3fn_bytes_read_as_e4m3fnuz() -> None:
    """`fp8_e4m3` is another format on gfx94x: every code means half as much there."""
    form = "engine:sglang,page=64,dtype=fp8_e4m3,platform="
    a, b = side(f"{form}cuda"), side(f"{form}gfx94x")
    carried(a, b, "CONVERT")
    carried(b, a, "CONVERT")
    assert_noticed(a, b, told=b)


def scaled(layouts: Sequence[Layout], *values: float) -> list[Layout]:
    def change(c: Component) -> Component:
        assert c.scale is not None
        return msgspec.structs.replace(c, scale=Scale("tensor", values=list(values), rule=c.scale.rule))

    return [with_components(x, change) for x in layouts]


def test_a_scale_that_is_taken_for_one() -> None:
    """SGLang and vLLM do not exchange the checkpoint's k_scale and v_scale: codes made with others mean other values."""
    own, other, plain = scaled(side("engine:vllm,pool=LBNHC,dtype=fp8"), 0.03, 0.11), side("engine:sglang,dtype=fp8_e4m3"), side("bf16")  # fmt: skip
    carried(own, other, "CONVERT")
    carried(own, scaled(other, 0.03, 0.11), "REMAP")
    carried(own, plain, "CONVERT")
    for wrong in (scaled(own, 1.0, 1.0), scaled(own, 0.11, 0.03)):
        assert_noticed(own, plain, told=wrong)
        assert_noticed(own, other, told=wrong)


def test_unlike_dtypes_of_recurrent_states() -> None:
    """sgl-project/sglang#36371: Mooncake takes the source's length for the copy and for the target's stride, without an error."""
    a = side("engine:sglang,ssm-dtype=bfloat16,page=64", DELTA)
    b = side("engine:sglang,ssm-dtype=float32,page=64", DELTA)
    carried(a, b, "CONVERT")
    carried(b, a, "CONVERT")
    assert "dtype bfloat16 -> float32" in reasons(a, b)


# -- where elements lie ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode"), [("hnd", "nhd"), ("nhd", "hnd")])
def test_nhd_and_hnd_are_not_compared(prefill: str, decode: str) -> None:
    """vllm-project/vllm#26556, and SGLang, whose handshake has no layout for attention pools."""
    a, b = side(f"engine:sglang,page=16,pool={prefill}"), side(f"engine:sglang,page=16,pool={decode}")
    carried(a, b, "REMAP")
    assert "axis order" in reasons(a, b)
    assert_noticed(a, b, told=b)


def test_layout_and_block_size_differ_together() -> None:
    """vllm-project/vllm#30448: prefill NHD with the larger blocks."""
    carried(side("engine:vllm,pool=nhd,page=128"), side("engine:vllm,pool=hnd,page=16"), "REMAP")
    carried(side("engine:vllm,pool=hnd,page=16,tp=2"), side("engine:vllm,pool=nhd,page=128"), "REMAP")


def test_fused_k_and_v_taken_for_apart() -> None:
    """LMCache/LMCache#4467: a head stores its K, then its V; strides came from half a row."""
    fused, apart = side("engine:vllm,pool=LBNHC"), side("engine:sglang,page=16")
    carried(fused, apart, "REMAP")
    carried(apart, fused, "REMAP")
    order = Placement("layer page kv token head dim")
    wrong = [with_components(x, lambda c: msgspec.structs.replace(c, at=order)) for x in fused]
    assert_noticed(fused, apart, told=wrong)


def test_layers_of_one_model_lie_in_several_ways() -> None:
    """vllm-project/vllm#46039: K and V apart, K and V in turn, and keys alone; offsets of one layer were used for all."""
    kv = {"k": Array(4, 32), "v": Array(4, 32)}
    model = Model("m", 4, [State("attention", "0-3", kv), State("indexer", "1,3", {"index_k": Array(1, 64)})])

    def attention(layers: str, order: str) -> Group:
        region = f"kv{layers[0]}.{{layer}}"
        return Group("attention", layers, 16, [Component(n, "bfloat16", 4, 32, Placement(order, region)) for n in kv])

    keys = Component("index_k", "bfloat16", 1, 64, Placement("page token dim", "index.{layer}"))
    mixed = Layout(
        model,
        [attention("0,2", "kv page token head dim"), attention("1,3", "page kv token head dim"),
         Group("indexer", "1,3", 32, [keys])])  # fmt: skip
    plain = side("fp32,page=24", model)
    carried([mixed], plain, "CONVERT")
    carried(plain, [mixed], "CONVERT")
    carried([mixed], side("bf16,hnd,page=64", model), "REMAP")
    alike = msgspec.structs.replace(
        mixed,
        groups=[
            attention("0,2", "kv page token head dim"),
            attention("1,3", "kv page token head dim"),
            mixed.groups[2],
        ],
    )
    assert_noticed([mixed], plain, told=[alike])


def test_a_buffer_on_the_host_has_another_layout_than_on_the_device() -> None:
    """vllm-project/vllm#53554, vllm-project/vllm-gaudi#421: staged through host memory of another order."""
    for pool in ("layer_first", "page_first", "page_first_direct", "page_head"):
        carried(side(f"engine:sglang,pool={pool},page=16"), side("engine:vllm,pool=LBHNC,tp=2"), "REMAP")


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode"), [(16, 128), (128, 16), (1, 16), (16, 64), (32, 16), (48, 64), (7, 5)])
def test_page_sizes_differ(prefill: int, decode: int) -> None:
    """vllm-project/vllm#26744 (16 to 128), #26759, #45443 (prefill's larger), #42895 (32 to 16), sgl-project/sglang#14439."""
    carried(side(f"engine:sglang,page={prefill}"), side(f"engine:sglang,page={decode}"), "REMAP")
    carried(side(f"engine:sglang,page={prefill},pool=hnd"), side(f"engine:vllm,pool=LBNHC,page={decode}"), "REMAP")


def test_logical_blocks_are_larger_than_those_of_the_kernel() -> None:
    """vllm-project/vllm#51527, #28677: blocks of a hybrid model are raised until a recurrent state fits, by rank and dtype."""
    a = side("engine:vllm,pool=LBHNC,ssm-dtype=float32", DELTA)
    b = side("engine:vllm,pool=LBHNC,ssm-dtype=bfloat16,tp=4", DELTA)
    sizes = [next(g.page_size for g in x[0].groups if g.kind == "attention") for x in (a, b)]
    assert sizes[0] != sizes[1]
    carried(a, b, "CONVERT")


def test_regions_differ_in_size() -> None:
    """vllm-project/vllm#51361: pools of other numbers of pages, and rows that are padded on one side."""
    a = [with_pages(layout, 40) for layout in side("engine:vllm,pool=LBHNC")]
    b = [with_pages(layout, 311) for layout in side("engine:vllm,pool=LBHNC")]
    carried(a, b, "DIRECT")
    carried(b, a, "DIRECT")
    carried(a, side("record:inline16,page=16"), "CONVERT")


class Ranks:
    """One prefill and one decode rank with memory, and their pages in the hands of the test."""

    def __init__(self, prefill: str, decode: str) -> None:
        model = attention_model("m", 2, Array(2, 8))
        rng = np.random.default_rng(5)
        self.src, self.dst = (Pool.of(with_pages(side(form, model)[0], 40), rng) for form in (prefill, decode))
        self.plan = compile(self.src.layout, self.dst.layout)

    def carry(self, prefill: list[int], decode: list[int], origin: int, tokens: tuple[int, int]) -> Pool:
        """Carry tokens into decode pages that start at token `origin`; return what decode held before."""
        p, d, before = np.array(prefill), np.array(decode), self.dst.copy()
        want = self.dst.copy()
        transfer(self.src.layout, self.dst.layout, self.src.memory, want.memory, self.src.offsets(p), want.offsets(d, origin), tokens)  # fmt: skip
        kernels.run(instantiate(self.plan, self.src.side(p), self.dst.side(d, origin), tokens))
        assert np.array_equal(self.dst.memory, want.memory)
        return before


def test_decode_needs_fewer_blocks_than_prefill_has() -> None:
    """vllm-project/vllm#50558: 2,048 tokens in 32 blocks of 64, of which decode has 31 cached and two blocks left for the
    last and for a token that is appended: the last two of prefill's were copied, one block off, and nothing was said."""
    ranks = Ranks("bf16,page=64", "bf16,page=64")
    prefill, decode = list(np.random.default_rng(1).permutation(40)[:32]), [7, 3]
    before = ranks.carry(prefill, decode, 1984, (1984, 2048))
    page = 64 * 2 * 8 * 2
    at = [x.bases["k"] + n * page for x, n in ((ranks.src, int(prefill[31])), (ranks.dst, 7), (ranks.dst, 3))]
    assert np.array_equal(ranks.dst.memory[at[1] :][:page], ranks.src.memory[at[0] :][:page])
    assert np.array_equal(ranks.dst.memory[at[2] :][:page], before.memory[at[2] :][:page]), "the appended token's block"


def test_decode_needs_more_blocks_than_prefill_has() -> None:
    """vllm-project/vllm#50558, the other branch: a token is appended, 33 blocks are given for 32, and an assertion fires."""
    ranks = Ranks("bf16,page=64", "bf16,page=64")
    ranks.carry(list(range(32)), list(range(32, -1, -1)), 0, (0, 2048))
    sides = ranks.src.side(np.arange(32)), ranks.dst.side(np.arange(33))
    with pytest.raises(
        PlanError, match=r"prefill: tokens 0..2048 are asked for, the page table of 32 pages covers 0..2047"
    ):
        instantiate(ranks.plan, *sides, (0, 2049))


def test_prefill_has_allocated_a_block_that_no_token_fills() -> None:
    """vllm-project/vllm#57077: 160 tokens in blocks of 128, handed out as four pages of 64, for three: the last three were taken."""
    ranks = Ranks("bf16,page=64", "bf16,page=64")
    ranks.carry([4, 9, 1, 6], [2, 5, 8], 0, (0, 160))


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (1, 4), (2, 4), (8, 2), (2, 8)])
def test_tensor_parallel_sizes_differ(prefill: int, decode: int) -> None:
    """vllm-project/vllm#43523 (4 to 1), #50765 (2 to 4), sgl-project/sglang#15674; beyond the KV heads, ranks hold copies."""
    carried(side(f"engine:vllm,pool=LBHNC,tp={prefill}"), side(f"engine:sglang,page=64,tp={decode}"), "REMAP")


def test_tensor_parallel_sizes_differ_with_sliding_windows() -> None:
    """llm-d/llm-d#2433: TP 1 to TP 4 with window layers, refused only when the transfer starts, and the client hangs."""
    one, four = (side(f"engine:vllm,pool=LBHNC,tp={n}", WINDOW) for n in (1, 4))
    assert {group.kind for group in one[0].groups} == {"window", "attention"}
    carried(one, four, "REMAP")
    carried(four, one, "REMAP")


@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 2), (2, 1)])
def test_convolution_states_are_split_as_three_parts(prefill: int, decode: int) -> None:
    """sgl-project/sglang#22060, #20655: a rank's channels are its share of q, of k and of v, and not one run of all."""
    carried(
        side(f"engine:sglang,page=64,tp={prefill}", DELTA), side(f"engine:sglang,page=64,tp={decode}", DELTA), "REMAP"
    )


def test_data_parallel_sizes_differ() -> None:
    """vllm-project/router#222: DP 4 x TP 1 to DP 2 x TP 2: a request is one replica's, whichever; the others do not count."""
    carried(side("engine:vllm,pool=LBHNC"), side("engine:vllm,pool=LBHNC,tp=2"), "REMAP")


def test_heads_of_a_rank_that_is_missing() -> None:
    """One rank of two is given: half of the heads would stay what they were."""
    with pytest.raises(Refused, match="no prefill rank holds every head and token of attention k, layers 0 to 1"):
        crossings(side("bf16,tp=2")[:1], side("bf16"))


# -- states that are left out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sender", [True, False])
def test_recurrent_states_are_not_sent(sender: bool) -> None:
    """sgl-project/sglang#37175, ROCm/ATOM#2154: only the paged cache crosses; the text is fluent and wrong."""
    whole = side("engine:sglang,page=64", DELTA)[0]
    carried([whole], [whole], "DIRECT")
    partial = msgspec.structs.replace(whole, groups=[g for g in whole.groups if g.kind != "recurrent"])
    pair = (partial, whole) if sender else (whole, partial)
    verdict = check(*pair)
    name = "prefill" if sender else "decode"
    assert verdict.path == "REFUSED"
    assert {r.field for r in verdict.refusals} == {f"groups ({name})"}
    assert any("no recurrent ssm_state of layers 0-2" in str(r) for r in verdict.refusals)
    assert all(f"Describe where the {name} side keeps it" in r.remedy for r in verdict.refusals)
    with pytest.raises(Refused, match="recurrent ssm_state"):
        crossings([pair[0]], [pair[1]])


def test_indexer_keys_are_not_sent() -> None:
    """As recurrent states: sparse attention then picks tokens by keys of other requests."""
    whole = side("engine:sglang", SPARSE)[0]
    partial = msgspec.structs.replace(whole, groups=[g for g in whole.groups if g.kind != "indexer"])
    found = check(partial, whole).refusals
    assert [r.field for r in found] == ["groups (prefill)"]
    assert "no indexer index_k of layers 0-1" in str(found[0])


def test_a_recurrent_state_of_another_length_is_none() -> None:
    """Prefixes match by blocks, a recurrent state is that of its exact length: nothing of it is sent before."""
    layout = side("engine:sglang,page=64", DELTA)[0]
    group = next(g for g in layout.groups if g.kind == "recurrent")
    assert live(group, layout, (0, 100), 173) == (0, 0)
    assert live(group, layout, (100, 173), 173) == (0, 1)
