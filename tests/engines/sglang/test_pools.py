"""Layouts out of the pools of the SGLang that is installed, without a server; see `conftest.py` for where there is none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():  # of SGLang's own imports
    warnings.simplefilter("ignore")
    from regauge.engines.sglang import cpu

    cpu.install()
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, NoOpMHATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.runtime_context import get_parallel

    from regauge.engines.sglang import pools
from regauge.errors import EngineError
from regauge.layout.engines import Flags, engine_layout
from regauge.layout.presets import attention_model
from regauge.layout.spec import Array, Layout, Model, State
from regauge.layout.view import region_sizes
from regauge.plan.boxes import Side
from regauge.plan.reference import transfer

LAYERS, HEADS, DIM = 3, 4, 16
MODEL = attention_model("m", LAYERS, Array(HEADS, DIM))
MLA = Model("m", LAYERS, [State("latent", "0-2", {"latent": Array(1, 32), "rope": Array(1, 8)})])
K_AND_V = {"k": Array(HEADS, DIM), "v": Array(HEADS, DIM)}
WINDOWS = Model("m", 6, [State("attention", "2,5", K_AND_V), State("window", "0-1,3-4", K_AND_V, window=8)])
WIDE = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def without_a_server() -> Iterator[None]:
    """What SGLang's writes ask for and a server has said by then."""
    with get_parallel().override(dcp_enabled=False, attn_dcp_size=1):
        yield


def attention(page: int = 4, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
    asked: dict[str, Any] = {
        "size": 10 * page, "page_size": page, "dtype": dtype, "head_num": HEADS, "head_dim": DIM, "layer_num": LAYERS,
        "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    return MHATokenToKVPool(**(asked | given))


def latents(page: int = 4, dtype: torch.dtype = torch.bfloat16) -> Any:
    return MLATokenToKVPool(
        size=10 * page, page_size=page, dtype=dtype, kv_lora_rank=32, qk_rope_head_dim=8, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip


def windows(page: int = 4, dtype: torch.dtype = torch.bfloat16) -> Any:
    return SWAKVPool(
        size=10 * page, size_swa=6 * page, page_size=page, dtype=dtype, head_num=HEADS, head_dim=DIM,
        swa_attention_layer_ids=[0, 1, 3, 4], full_attention_layer_ids=[2, 5], device="cpu",
    )  # fmt: skip


def verified(pool: Any, model: Model, **ranks: int) -> Layout:
    layout = pools.read(pool, model, **ranks)
    pools.verify(layout, pool)
    return layout


def dtypes(layout: Layout) -> set[str]:
    return {component.dtype for group in layout.groups for component in group.components}


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize(("make", "model"), [(attention, MODEL), (latents, MLA), (windows, WINDOWS)])
def test_a_pool_lies_as_its_preset_says(make: Any, model: Model, page: int, dtype: torch.dtype) -> None:
    pool = make(page, dtype)
    layout = verified(pool, model)
    assert {group.page_size for group in layout.groups} == {page}
    assert dtypes(layout) == {str(dtype).removeprefix("torch.")}  # not what a flag said
    tensors = [t for part in pools._parts(pool) for t in part.tensors.values()]
    assert sorted(r.base for r in layout.regions) == sorted(t.data_ptr() for t in tensors)
    assert not any(t.any() for t in tensors), "what the probe wrote is still there"


def test_every_pool_has_its_own_pages() -> None:
    layout = verified(windows(), WINDOWS)
    assert {group.kind: group.pages for group in layout.groups} == {"attention": 11, "window": 7}  # page 0 counts


def test_window_layers_may_share_the_pool_of_the_others() -> None:
    layout = verified(attention(layer_num=6), WINDOWS)
    assert [(group.kind, group.pages) for group in layout.groups] == [("attention", 11), ("window", 11)]


@pytest.mark.parametrize("dtype", WIDE)
def test_heads_before_tokens(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    layout = verified(attention(16, dtype), MODEL)
    assert {c.at.order for c in layout.groups[0].components} == {"page head token dim"}


def test_a_value_head_of_another_size() -> None:
    model = attention_model("m", LAYERS, Array(HEADS, DIM), Array(HEADS, 8))
    layout = verified(attention(v_head_dim=8), model)
    assert [component.dim for component in layout.groups[0].components] == [DIM, 8]


def test_a_rank_has_its_heads_and_its_layers() -> None:
    layout = verified(attention(head_num=2), MODEL, tp=2, rank=1)
    assert [(c.heads, list(layout.heads(layout.groups[0], c))) for c in layout.groups[0].components] == [
        (2, [2, 3])
    ] * 2
    layout = verified(attention(layer_num=2, start_layer=1, end_layer=2), MODEL, pp=2, pp_rank=1)
    assert layout.groups[0].layer_ids == (1, 2)


def test_tokens_that_fill_no_page_are_nobodys() -> None:
    pool = attention(16, size=103)
    layout = verified(pool, MODEL)
    assert layout.groups[0].pages == 7
    assert region_sizes(layout)["k.0"] == 7 * 16 * HEADS * DIM * 2 < pool.k_buffer[0].nbytes


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"head_num": 2}, r"k\.0 of layer 0 has \[44, 2, 16\] of torch.bfloat16, .*the preset says \[44, 4, 16\]"),
        ({"v_head_dim": 8}, r"v\.0 of layer 0 has \[44, 4, 8\]"),
        ({"layer_num": 2}, r"hold layers \[0, 1\], its preset says \[0, 1, 2\]"),
        ({"dtype": torch.float8_e4m3fn}, "keeps torch.float8_e4m3fn as torch.uint8 in its MHATokenToKVPool"),
    ],
)
def test_a_pool_of_another_model_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        pools.read(attention(**given), MODEL)


def test_a_pool_that_is_not_known_is_refused() -> None:
    none = NoOpMHATokenToKVPool(
        size=40, page_size=4, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    with pytest.raises(EngineError, match="in a NoOpMHATokenToKVPool: how that lies is not known here"):
        pools.read(none, MODEL)


def test_too_few_pages_cannot_be_verified() -> None:
    pool = attention(size=12)
    with pytest.raises(EngineError, match="4 pages of 4 tokens; 5 are needed"):
        pools.verify(pools.read(pool, MODEL), pool)


def test_a_wrong_declaration_is_caught_by_the_bytes() -> None:
    pool = attention(16)
    flags = Flags(page_size=16, platform="cpu", model_dtype="bfloat16", pool="hnd", pages=11)
    with pytest.raises(EngineError, match=r"does not lie as its preset declares, and is refused: .*k"):
        pools.verify(engine_layout("sglang", MODEL, flags), pool)


def test_a_write_that_lies_elsewhere_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and dtypes are the same; only the bytes tell."""
    pool = attention(16)
    own = pool.set_kv_buffer
    monkeypatch.setattr(pool, "set_kv_buffer", lambda layer, where, k, v: own(layer, where, v, k))
    with pytest.raises(EngineError, match="is refused: "):
        pools.verify(pools.read(pool, MODEL), pool)


def memory(layout: Layout, pool: Any) -> tuple[np.ndarray, dict[str, int]]:
    """All of a pool's bytes in one array, and where each region begins."""
    tensors = {name: tensor for part in pools._parts(pool) for name, tensor in part.tensors.items()}
    parts = [tensors[region.name].contiguous().view(torch.uint8).flatten() for region in layout.regions]
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    return torch.cat(parts).numpy(), {r.name: int(start) for r, start in zip(layout.regions, starts, strict=True)}


def test_what_one_pool_was_written_another_one_reads() -> None:
    """Pages of 16 in bfloat16 to pages of 64 in float32, of SGLang's own pools on both sides, by its own operations."""
    ours, theirs = attention(16), attention(64, torch.float32)
    a, b = verified(ours, MODEL), verified(theirs, MODEL)
    tokens = 70
    given = torch.randn(LAYERS, 2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    from_, to = np.array([7, 2, 9, 4, 5]), np.array([6, 3])
    slots = lambda pages, size: torch.from_numpy(pages[np.arange(tokens) // size] * size + np.arange(tokens) % size)  # noqa: E731  # two uses
    for layer in range(LAYERS):
        ours.set_kv_buffer(
            SimpleNamespace(layer_id=layer), slots(from_, 16), given[layer, 0].clone(), given[layer, 1].clone()
        )
    (source, src), (target, dst) = memory(a, ours), memory(b, theirs)
    transfer(a, b, source, target, Side(from_, src), Side(to, dst), (0, tokens))
    for layer in range(LAYERS):
        for name, wanted in zip(("k", "v"), given[layer], strict=True):
            start = dst[f"{name}.{layer}"]
            kept = target[start : start + theirs.k_buffer[layer].nbytes].view(np.float32).reshape(-1, HEADS, DIM)
            assert np.array_equal(kept[slots(to, 64).numpy()], wanted.float().numpy())
