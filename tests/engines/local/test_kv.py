"""The paged store keeps what the model writes, in any layout; 8-bit pools keep what the reference says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import Segment
from regauge.errors import ConfigError
from regauge.layout.presets import attention_model, from_short, with_pages
from regauge.layout.spec import Array, Layout, Scale, Shard
from regauge.plan.reference import apply_scale, dynamic_scale, encode
from strategies import EIGHT_BIT, FLOATS, layouts

MODEL = attention_model("m", 2, Array(2, 8))


def segments(page_size: int, pages: int, rng: np.random.Generator) -> list[Segment]:
    """Two requests: one that goes on after 5 tokens, one new; scattered pages."""
    table = rng.permutation(pages)
    first = -(-9 // page_size)
    return [Segment("a", table[:first], 5, 4), Segment("b", table[first : first + -(-3 // page_size)], 0, 3)]


def rounded(values: torch.Tensor, dtype: str) -> np.ndarray:
    return encode(values.numpy(), dtype).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_what_is_written_is_read_rounded_to_the_pool(data: st.DataObject, seed: int) -> None:
    layout = data.draw(layouts(MODEL, FLOATS))
    size = layout.groups[0].page_size
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed % 2**31)
    with_enough = with_pages(from_pages(layout), 40 + 4 * size)
    memory = allocate(with_enough)
    try:
        store = PagedKV(memory, dtype=torch.float32, max_new=9, max_context=9)
        parts = segments(size, with_enough.groups[0].pages, rng)
        earlier = [Segment("a", parts[0].pages, 0, 5)]
        old = [torch.randn(2, 5, 2, 8, generator=generator) for _ in "kv"]
        new = [torch.randn(2, 7, 2, 8, generator=generator) for _ in "kv"]
        for step, values in ((earlier, old), (parts, new)):
            store.begin(step)
            for layer in range(2):
                store.write(layer, values[0][layer], values[1][layer])
        dtypes = {c.name: c.dtype for c in layout.groups[0].components}
        for layer in range(2):
            for index, want in enumerate(([*zip(old, new, strict=True)], [(None, x) for x in new])):
                got = store.read(layer, index)
                for name, tensor, (before, after) in zip("kv", got, want, strict=True):
                    own = after[layer, :4] if index == 0 else after[layer, 4:]
                    whole = own if before is None else torch.cat([before[layer], own])
                    assert np.array_equal(tensor.transpose(0, 1).numpy(), rounded(whole, dtypes[name]))
    finally:
        memory.slab.close()


def from_pages(layout: Layout) -> Layout:
    """The layout, with its number of pages left open."""
    groups = [msgspec.structs.replace(g, pages=0) for g in layout.groups]
    return msgspec.structs.replace(layout, groups=groups)


@pytest.mark.parametrize("dtype", EIGHT_BIT)
@pytest.mark.parametrize("scale", ["none", "token_head"])
def test_eight_bit_pools_keep_codes_and_scales_of_the_reference(dtype: str, scale: str) -> None:
    memory = allocate(from_short(f"{dtype},page=4,hnd,scale={scale}", MODEL, pages=4))
    try:
        store = PagedKV(memory, dtype=torch.float32, max_new=8, max_context=8)
        store.begin([Segment("a", np.array([3, 1]), 0, 7)])
        k, v = torch.randn(7, 2, 8) * 3, torch.randn(7, 2, 8) * 1e-3
        store.write(1, k, v)
        for got, values in zip(store.read(1, 0), (k, v), strict=True):
            x = values.numpy()
            s = dynamic_scale(x, dtype, Scale("token_head"))[..., None] if scale == "token_head" else np.float32(1.0)
            codes = encode(apply_scale(x, s, "reciprocal", "float32") if scale == "token_head" else x, dtype)
            assert np.array_equal(got.transpose(0, 1).numpy(), codes.astype(np.float32) * s)
    finally:
        memory.slab.close()


def test_a_layout_that_lacks_layers_or_heads_is_refused() -> None:
    memory = allocate(from_short("bf16", MODEL, pages=2, shard=Shard(0, 2)))
    try:
        with pytest.raises(ConfigError, match="all layers and heads in one group"):
            PagedKV(memory, dtype=torch.float32, max_new=1, max_context=1)
    finally:
        memory.slab.close()


def test_pages_are_counted_in_whole_pages_and_own_numbers_stand() -> None:
    assert with_pages(from_short("bf16,page=24", MODEL), 100).groups[0].pages == 5
    assert with_pages(from_short("bf16,page=24", MODEL, pages=3), 100).groups[0].pages == 3
