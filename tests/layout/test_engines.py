"""Engine presets against tensors of the shapes that the engines allocate, element by element."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from regauge.errors import LayoutError, PresetError
from regauge.layout.dtypes import DTYPES
from regauge.layout.engines import Flags, engine_layout, from_engine_form, pool_names
from regauge.layout.presets import attention_model, load_described, load_layout, load_model, shipped_models
from regauge.layout.spec import Array, Layout, Model, Shard
from regauge.layout.view import bytes_per_token, check_memory, component_view, region_sizes
from regauge.move import kernels
from regauge.plan import check, compile, instantiate
from regauge.plan.reference import addresses, transfer
from strategies import Pool, assert_same
from tensors import UNROTATED, regions, where, where_scales

LAYERS, PAGES, HEADS, DIM = 2, 3, 2, 32
MODEL = attention_model("m", LAYERS, Array(HEADS, DIM))

# The tensor of each pool, as axes from outermost to innermost; `2d` is K's, then V's, elements of a token; `d/x`, `x` (`p/x`)
# are the parts of a head dim (page) in lanes of 16 bytes.
DEVICE = {
    ("sglang", "nhd"): (("bp h d",) * 2, 1),
    ("sglang", "hnd"): (("b h p d",) * 2, 1),
    ("sglang", "vectorized_5d"): (("b h d/x p x", "b h p/x d x"), 64),
}
WHOLE = {
    ("sglang", "layer_first"): ("2 l bp h d", 1),
    ("sglang", "page_first"): ("2 bp l h d", 1),
    ("sglang", "page_first_direct"): ("2 b l p h d", 1),
    ("sglang", "page_head"): ("2 b h p l d", 1),
    ("vllm", "LBHNC"): ("l b h p 2d", 16),
    ("vllm", "LBNHC"): ("l b p h 2d", 16),
    ("vllm", "LHBNC"): ("l h b p 2d", 16),
    ("vllm", "BLHNC"): ("b l h p 2d", 16),
    ("vllm", "BLNHC"): ("b l p h 2d", 16),
    ("vllm", "BHLNC"): ("b h l p 2d", 16),
}
PLATFORM = {"vectorized_5d": "gfx95x"}  # the pool is ROCm's
POOLS = [*DEVICE, *WHOLE, ("vllm", "B2NHC"), ("vllm", "cpu")]
DTYPE_FLAGS = {"sglang": ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"), "vllm": ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")}


def flags_of(engine: str, pool: str) -> tuple[str, ...]:
    special = {"vectorized_5d": ("auto", "bfloat16", "fp8_e4m3"), "cpu": ("auto", "bfloat16")}
    rows = ("fp8_per_token_head",) if engine == "vllm" else ()
    return special.get(pool, (*DTYPE_FLAGS[engine], *rows))


COMBINATIONS = [(e, p, f) for e, p in POOLS for f in flags_of(e, p)]


def make(engine: str, pool: str | None, flag: str = "auto", model: Model = MODEL, **more: object) -> Layout:
    platform = PLATFORM.get(pool or "", "cuda")
    options = {"model_dtype": "bfloat16", "pages": PAGES, "platform": platform, **more}
    return engine_layout(engine, model, Flags(pool=pool, kv_cache_dtype=flag, **options))  # type: ignore[arg-type]


def tensor(axes: str, page: int, itemsize: int, heads: int = HEADS) -> np.ndarray:
    """A tensor of that shape that holds each element's own byte offset."""
    lanes = 16 // itemsize
    sizes = {"2": 2, "l": LAYERS, "b": PAGES, "bp": PAGES * page, "p": page, "h": heads, "d": DIM, "2d": 2 * DIM,
             "d/x": DIM // lanes, "p/x": page // lanes, "x": lanes}  # fmt: skip
    shape = [sizes[a] for a in axes.split()]
    return np.arange(np.prod(shape)).reshape(shape) * itemsize


def canonical(array: np.ndarray, axes: str, page: int) -> np.ndarray:
    """The tensor as [..., page, token, head, dim] of whichever axes it has besides, in the order 2, l."""
    names = axes.split()
    if "bp" in names:  # slots are pages of consecutive rows
        i = names.index("bp")
        array = array.reshape(*array.shape[:i], PAGES, page, *array.shape[i + 1 :])
        names[i : i + 1] = ["b", "p"]
    for outer, name in (("d/x", "d"), ("p/x", "p")):
        if outer in names:
            array = np.moveaxis(array, names.index("x"), names.index(outer) + 1)
            names.remove("x")
            i = names.index(outer)
            array = array.reshape(*array.shape[:i], -1, *array.shape[i + 2 :])
            names[i] = name
    if "2d" in names:
        array = array.reshape(*array.shape[:-1], 2, DIM)
        names[-1:] = ["2", "d"]
    return array.transpose([names.index(a) for a in ("2", "l", "b", "p", "h", "d") if a in names])


@pytest.mark.parametrize(("engine", "pool", "flag"), COMBINATIONS)
def test_every_combination_is_sound(engine: str, pool: str, flag: str) -> None:
    layout = check_memory(make(engine, pool, flag))
    k, v = layout.groups[0].components
    dtype = {"fp8_e5m2": "float8_e5m2"}.get(flag, "float8_e4m3fn" if flag.startswith("fp8") else "bfloat16")
    assert (k.name, v.name, k.dtype, v.dtype) == ("k", "v", dtype, dtype)
    scale = 4 if flag == "fp8_per_token_head" else 0
    assert bytes_per_token(layout) == 2 * LAYERS * HEADS * (DIM * DTYPES[k.dtype].itemsize + scale)
    # No padding anywhere: the regions hold the elements and nothing else.
    assert sum(region_sizes(layout).values()) == bytes_per_token(layout) * PAGES * layout.groups[0].page_size
    symbolic = make(engine, pool, flag, pages=0)
    assert check(symbolic, symbolic).path in ("DIRECT", "REMAP")


@pytest.mark.parametrize(("engine", "pool", "flag"), [c for c in COMBINATIONS if c[:2] in DEVICE])
def test_device_pools_lie_as_their_tensors(engine: str, pool: str, flag: str) -> None:
    axes, page = DEVICE[engine, pool]
    layout = make(engine, pool, flag)
    assert layout.groups[0].page_size == page
    for c, own in zip(layout.groups[0].components, axes, strict=True):
        got = where(layout.groups[0], c.name)
        assert regions(layout.groups[0], c.name) == tuple(f"{c.name}.{layer}" for layer in range(LAYERS))
        want = canonical(tensor(own, page, DTYPES[c.dtype].itemsize), own, page)
        for layer in range(LAYERS):
            assert np.array_equal(got[layer], want)


@pytest.mark.parametrize(
    ("engine", "pool", "flag"), [c for c in COMBINATIONS if c[:2] in WHOLE and c[2] != "fp8_per_token_head"]
)
def test_pools_of_all_layers_lie_as_their_tensor(engine: str, pool: str, flag: str) -> None:
    axes, default = WHOLE[engine, pool]
    for page in (default, 32):
        layout = make(engine, pool, flag, page_size=page)
        assert page != default or make(engine, pool, flag) == layout
        want = canonical(tensor(axes, page, DTYPES[layout.groups[0].components[0].dtype].itemsize), axes, page)
        for c, own in zip(layout.groups[0].components, want, strict=True):
            assert set(regions(layout.groups[0], c.name)) == {"kv"}
            assert np.array_equal(where(layout.groups[0], c.name), own)


@pytest.mark.parametrize("pool", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_rows_of_k_and_v_each_end_in_their_scale(pool: str) -> None:
    """[K | K's scale | V | V's scale] per head and token."""
    layout = make("vllm", pool, "fp8_per_token_head")
    group, row = layout.groups[0], 2 * (DIM + 4)
    axes = WHOLE["vllm", pool][0].replace("2d", "d")
    sizes = {"l": LAYERS, "b": PAGES, "p": group.page_size, "h": HEADS, "d": row}
    shape = [sizes[x] for x in axes.split()]
    cells = canonical(np.arange(np.prod(shape)).reshape(shape), axes, group.page_size)
    for index, c in enumerate(group.components):
        first = index * (DIM + 4)
        assert np.array_equal(where(group, c.name), cells[..., first : first + DIM])
        assert c.scale is not None
        assert (c.scale.per, c.scale.rule, c.scale.floor) == ("token_head", "reciprocal", 1e-6)
        assert np.array_equal(where_scales(group, c.name)[..., 0], cells[..., first + DIM])


@pytest.mark.parametrize("flag", flags_of("vllm", "B2NHC"))
def test_blocks_of_two_halves_with_their_scales_inline(flag: str) -> None:
    layout = make("vllm", "B2NHC", flag)
    group = layout.groups[0]
    inline = flag == "fp8_per_token_head"
    for index, c in enumerate(group.components):
        size = DTYPES[c.dtype].itemsize
        row = DIM * size + (4 if inline else 0)
        # (blocks, 2, block, H, bytes of a row): one uint8 tensor per layer
        rows = np.arange(PAGES * 2 * 16 * HEADS * row).reshape(PAGES, 2, 16, HEADS, row)
        assert regions(group, c.name) == ("kv.0", "kv.1")
        assert np.array_equal(where(group, c.name)[0], rows[:, index, ..., : DIM * size : size])
        if inline:
            assert c.scale is not None
            assert (c.scale.per, c.scale.rule) == ("token_head", "reciprocal")
            assert np.array_equal(where_scales(group, c.name)[0, ..., 0], rows[:, index, ..., DIM])


def test_cpu_blocks_hold_k_transposed_then_v() -> None:
    """As probed in vLLM 0.32 on AVX2: the declared shape (B, H, block, 2 * D) is not how the bytes lie."""
    layout = make("vllm", "cpu", model_dtype="float32")
    k = layout.groups[0].component("k")
    assert (layout.groups[0].page_size, k.dtype) == (128, "float32")
    whole = np.arange(LAYERS * PAGES * HEADS * 2 * DIM * 128).reshape(LAYERS, PAGES, HEADS, 2, DIM * 128) * 4
    as_k = whole[..., 0, :].reshape(LAYERS, PAGES, HEADS, DIM, 128)
    as_v = whole[..., 1, :].reshape(LAYERS, PAGES, HEADS, 128, DIM)
    assert np.array_equal(where(layout.groups[0], "k"), as_k.transpose(0, 1, 4, 2, 3))
    assert np.array_equal(where(layout.groups[0], "v"), as_v.transpose(0, 1, 3, 2, 4))


def test_eight_bit_caches_have_one_constant_scale_per_tensor() -> None:
    for engine, pool, rule in (("sglang", "nhd", "divide_source"), ("vllm", "LBNHC", "divide")):
        for c in make(engine, pool, "fp8_e4m3").groups[0].components:
            assert c.dtype == "float8_e4m3fn"
            assert c.scale is not None
            assert (c.scale.per, c.scale.values, c.scale.at, c.scale.rule) == ("tensor", 1.0, None, rule)
        assert make(engine, pool).groups[0].components[0].scale is None


@pytest.mark.parametrize(("engine", "pool"), POOLS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_partition_the_heads(engine: str, pool: str, tp: int) -> None:
    wide = attention_model("m", 2, Array(4, DIM))
    held = []
    for rank in range(tp):
        layout = make(engine, pool, model=wide, tp=tp, rank=rank)
        group = layout.groups[0]
        assert {c.heads for c in group.components} == {len(layout.heads(group, c)) for c in group.components}
        held += list(layout.heads(group, group.components[0]))
    assert sorted(set(held)) == [0, 1, 2, 3]
    assert len(held) == max(tp, 4)  # beyond the heads, they are replicated


# A sample of all pairs, and every pool with itself.
PAIRS = [*list(itertools.product(COMBINATIONS, COMBINATIONS))[::23], *((c, c) for c in COMBINATIONS)]


@pytest.mark.parametrize("backend", ["native", "numpy"])
def test_pairs_plan_and_do_what_the_reference_does(backend: str) -> None:
    assert {a[:2] for a, _ in PAIRS} == {b[:2] for _, b in PAIRS} == set(POOLS)
    paths = set()
    for number, (one, other) in enumerate(PAIRS):
        tp, rank = [(1, 0), (2, 1)][number % 2]
        pages = {"vectorized_5d": 64, "cpu": 32}
        a, b = (
            make(e, p, f, tp=tp, rank=rank, page_size=pages.get(p, 32 if i and number % 3 else 16), pages=6 if i else 5)
            for i, (e, p, f) in enumerate((one, other))
        )
        last = 70
        tokens = (3, last)
        rng = np.random.default_rng(number)
        src, dst = Pool.of(a, rng), Pool.of(b, rng)
        p, d = (rng.permutation(x.groups[0].pages)[: -(-last // x.groups[0].page_size)] for x in (a, b))
        want = dst.copy()
        transfer(a, b, src.memory, want.memory, src.offsets(p), want.offsets(d), tokens)
        kernels.run(instantiate(compile(a, b), src.side(p), dst.side(d), tokens), backend=backend)
        assert_same(dst, want)
        paths.add(check(a, b).path)
    assert paths == {"DIRECT", "REMAP", "CONVERT"}


@pytest.mark.parametrize("flag", ["auto", "fp8_e4m3"])
def test_ranks_of_unequal_tp_fit_together(flag: str) -> None:
    """SGLang TP 1 in NHD to vLLM TP 2 in HND: each decode rank takes its heads out of the whole."""
    a = make("sglang", "nhd", flag, page_size=16)
    src = Pool.of(a, np.random.default_rng(1))
    for rank in range(2):
        b = make("vllm", "LBHNC", flag, tp=2, rank=rank)
        assert check(a, b).path == "REMAP"  # equal scales: codes cross as they are
        dst = Pool.of(b, np.random.default_rng(2))
        p, d = np.array([2, 0]), np.array([1, 2])
        kernels.run(instantiate(compile(a, b), src.side(p), dst.side(d), (0, 20)), backend="native")
        for ka, kb in zip(a.groups[0].components, b.groups[0].components, strict=True):
            x = addresses(component_view(a.groups[0], ka), a.groups[0], src.offsets(p), np.arange(20), (0, 1))
            y = addresses(component_view(b.groups[0], kb), b.groups[0], dst.offsets(d), np.arange(20), (0, 1))
            assert np.array_equal(src.memory[x[:, :, [rank]]], dst.memory[y])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "sglang", "pool": "nhdd"}, "^pool: no preset for 'nhdd'; choose nhd, hnd, .* describe it in a file"),
        ({"engine": "vllm", "pool": "HNDLB"}, "^pool: .* choose LBHNC, LBNHC, .* cpu, hnd, nhd"),
        ({"engine": "vllm", "pool": None}, "^pool: vLLM's pool depends on the attention backend .* LBHNC"),
        ({"engine": "sglang", "flag": "fp8"}, "^dtype: no preset for 'fp8'; choose auto, bf16, .* fp8_e4m3"),
        ({"engine": "vllm", "pool": "LBNHC", "flag": "nvfp4"}, "^dtype: .* choose auto, float16, .* fp8_per_token_head"),
        ({"engine": "vllm", "pool": "LBNHC", "flag": "fp8_per_token_head", "platform": "gfx94x"}, "^dtype: .* amax / 224"),
        ({"engine": "vllm", "pool": "LBNHC", "flag": "fp8_e5m2", "platform": "gfx95x"}, "^dtype: .* or use fp8"),
        ({"engine": "vllm", "pool": "LBNHC", "flag": "fp8_ds_mla"}, "^dtype: fp8_ds_mla is for models with an indexer"),
        ({"engine": "sglang", "platform": "npu"}, "^platform: no preset for 'npu'; choose cuda, gfx94x"),
        ({"engine": "sglang", "flag": "fp8_e5m2", "platform": "cpu"}, "^dtype: SGLang has no fp8_e5m2 on CPU"),
        ({"engine": "sglang", "record": "packed"}, "^record: only 8-bit latents of a model with an indexer"),
        ({"engine": "vllm", "pool": "LBNHC", "record": "wide"}, "^record: 'wide': choose packed or raw"),
        ({"engine": "sglang", "tp": 4, "cp": 3}, "^cp: 3 ranks .* the 4 tensor-parallel ranks"),
        ({"engine": "sglang", "tp": 4, "cp": 2}, "^cp: SGLang shares tokens .* MLA"),
        ({"engine": "vllm", "pool": "LBNHC", "tp": 4, "cp": 4}, "^cp: 4 ranks hold 2 copies of each head of k: 4 of them"),
        ({"engine": "sglang", "pp": 3}, "^pp: 3 stages for 2 layers"),
        ({"engine": "vllm", "pool": "LBNHC", "pp": 3}, "^pp: 3 stages for 2 layers"),
        ({"engine": "sglang", "pp": 2, "pp_rank": 2}, "^pp-rank: there is no rank 2 of 2"),
        ({"engine": "vllm", "pool": "cpu", "flag": "fp8"}, "^dtype: vLLM's CPU cache has the model's dtype, bfloat16"),
        ({"engine": "vllm", "pool": "cpu", "flag": "float16"}, "^dtype: .* and not float16: use auto"),
        ({"engine": "sglang", "pool": "vectorized_5d", "flag": "fp8_e4m3", "platform": "cuda"}, "^platform: .* say platform=gfx94x"),
        ({"engine": "sglang", "pool": "nhd", "model_dtype": ""}, "^model-dtype: auto stands for the model's dtype"),
        ({"engine": "sglang", "pool": "nhd", "model_dtype": "fp8"}, "^model-dtype: 'fp8' is no dtype to compute in"),
        ({"engine": "sglang", "pool": "vectorized_5d", "page_size": 12}, "^page: 12 tokens; .* multiples of 8"),
        ({"engine": "vllm", "pool": "cpu", "page_size": 16}, "^page: 16 tokens; this pool takes multiples of 32"),
        ({"engine": "sglang", "pool": "nhd", "page_size": 0}, "^page: 0 tokens"),
        ({"engine": "sglang", "pool": "nhd", "tp": 2, "rank": 2}, "^rank: there is no rank 2 of 2"),
    ],
)  # fmt: skip
def test_what_has_no_preset_names_the_flag_and_its_choices(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PresetError, match=message):
        make(**({"pool": "nhd"} | arguments))  # type: ignore[arg-type]


def test_an_unknown_engine_and_unlike_head_dims_are_refused() -> None:
    with pytest.raises(PresetError, match="engine: no preset for 'tgi'; choose vllm, sglang"):
        engine_layout("tgi", MODEL, Flags(pool="nhd"))
    unlike = attention_model("m", 2, Array(2, 32), Array(2, 16))
    with pytest.raises(PresetError, match="pool: LBNHC holds K and V of one head dim"):
        make("vllm", "nhd", model=unlike)
    check_memory(make("sglang", "nhd", model=unlike))  # apart, they need not be alike
    with pytest.raises(LayoutError, match="2 heads of k do not divide over 3 ranks"):
        make("sglang", "nhd", tp=3)


def test_an_engines_flags_are_a_form_of_a_layout() -> None:
    text = "engine:sglang,pool=hnd,page=64,dtype=fp8_e4m3,tp=2,rank=1,pages=3"
    got = load_layout(text, MODEL)
    assert got == make("sglang", "hnd", "fp8_e4m3", page_size=64, tp=2, rank=1)
    assert got.shard == Shard(1, 2)
    assert from_engine_form("engine:sglang", MODEL, model_dtype="float16").groups[0].components[0].dtype == "float16"
    assert from_engine_form("engine:vllm, pool=nhd, model-dtype=bf16", MODEL, model_dtype="float32") == make(
        "vllm", "LBNHC", pages=0
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine:tgi", "engine: no preset for 'tgi'; choose vllm, sglang"),
        ("engine:sglang,hnd", "cannot read 'hnd'; after the engine come pool=..., dtype=..."),
        ("engine:sglang,colour=red", "cannot read 'colour=red'"),
        ("engine:sglang,page=1,page=2", "page is given twice"),
        ("engine:sglang,page=x", "page: 'x' is no number"),
        ("engine:sglang,tp=-1", "tp: '-1' is no number"),
        ("engine:sglang,pool=hdn", "pool: no preset for 'hdn'; choose nhd, hnd"),
    ],
)
def test_a_form_that_cannot_be_read_says_which_part(text: str, message: str) -> None:
    with pytest.raises(PresetError, match=message):
        load_layout(text, MODEL, model_dtype="bfloat16")


@pytest.mark.parametrize(
    ("engine", "platform", "flag", "dtype"),
    [
        ("sglang", "cuda", "fp8_e4m3", "float8_e4m3fn"), ("sglang", "musa", "fp8_e4m3", "float8_e4m3fn"),
        ("sglang", "gfx94x", "fp8_e4m3", "float8_e4m3fnuz"), ("sglang", "gfx94x", "fp8_e5m2", "float8_e4m3fnuz"),
        ("sglang", "gfx95x", "fp8_e5m2", "float8_e4m3fn"), ("vllm", "gfx94x", "fp8", "float8_e4m3fnuz"),
        ("vllm", "gfx95x", "fp8_e4m3", "float8_e4m3fn"), ("vllm", "cuda", "fp8_e5m2", "float8_e5m2"),
        ("sglang", "cuda", "fp8_e5m2", "float8_e5m2"),
    ],
)  # fmt: skip
def test_one_name_is_another_type_on_another_platform(engine: str, platform: str, flag: str, dtype: str) -> None:
    layout = make(engine, "nhd", flag, platform=platform)
    assert {c.dtype for c in layout.groups[0].components} == {dtype}


def test_musa_starts_with_pages_of_64() -> None:
    assert make("sglang", "nhd", platform="musa").groups[0].page_size == 64


@pytest.mark.parametrize(("engine", "sizes"), [("sglang", [7, 7, 8, 8]), ("vllm", [7, 8, 8, 7])])
def test_pipeline_stages_are_the_engines(engine: str, sizes: list[int]) -> None:
    """30 layers over 4 stages: SGLang gives the last stages one more, vLLM those before the last."""
    deep = attention_model("m", 30, Array(2, DIM))
    stages = [make(engine, "nhd", model=deep, pp=4, pp_rank=stage) for stage in range(4)]
    assert [len(x.groups[0].layer_ids) for x in stages] == sizes
    assert [i for x in stages for i in x.groups[0].layer_ids] == list(range(30))
    assert [x.shard.pp_rank for x in stages] == [0, 1, 2, 3]


def test_neighbours_that_share_tokens_hold_the_same_heads() -> None:
    """vLLM, TP 8 with 2 KV heads, decode context parallelism 2 with stripes of 4."""
    held = {}
    for rank in range(8):
        layout = make("vllm", "LBNHC", tp=8, rank=rank, cp=2, stripe=4)
        held[rank] = (*layout.heads(layout.groups[0], layout.groups[0].components[0]), layout.shard.cp_rank)
        assert (layout.shard.cp_size, layout.shard.cp_stripe, layout.shard.tp_size) == (2, 4, 4)
    assert held == {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1), 4: (1, 0), 5: (1, 1), 6: (1, 0), 7: (1, 1)}


@pytest.mark.parametrize(
    "name", [n for n in shipped_models() if n != "minimax-text-01"]
)  # neither engine serves it now
def test_every_shipped_model_has_an_engine_layout(name: str) -> None:
    told = load_described(name)
    model = told.model
    expected = sum(
        a.heads * a.dim * 2 * len(s.layer_ids) for s in model.states if s.kind != "recurrent" for a in s.arrays.values()
    )
    pooled = sum(len(s.layer_ids) for s in model.states if s.kind == "indexer") * (132 - 256)  # 8-bit keys with a scale
    for engine, pool in (("sglang", "nhd"), ("vllm", "hnd")):
        layout = make(engine, pool, model=model, model_dtype=told.dtype, ssm_dtype="float32", pages=2)
        assert bytes_per_token(layout) == expected + pooled
        assert {(g.kind, x) for g in layout.groups for x in g.layer_ids} == {
            (s.kind, x) for s in model.states for x in s.layer_ids
        }


ALL_KINDS = [UNROTATED, *(load_model(n) for n in ("llama-3.1-8b", "gpt-oss-20b", "glm-5.2", "qwen3-next-80b-a3b",
                                                  "kimi-linear-48b-a3b", "minimax-text-01"))]  # fmt: skip


@pytest.mark.parametrize("model", ALL_KINDS, ids=lambda model: model.name)
def test_every_pool_is_sound_for_every_kind_of_model_or_refuses_it(model: Model) -> None:
    made = 0
    for engine, dtype in itertools.product(("sglang", "vllm"), ("auto", "fp8_e4m3", "fp8_ds_mla")):
        for pool in pool_names(engine):
            more = {"model": model, "ssm_dtype": "float32", "requests": 3}
            try:
                layout = make(engine, pool, dtype, **more)
            except PresetError:
                continue
            check_memory(layout)
            made += 1
    assert made or model.name == "minimax-text-01"  # neither engine serves it now
