"""Targets whose parts interleave, and rows that lie in pieces: the reference's bytes, and nothing beside them."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import ISAS, Case, filler, noise
from regauge.move import kernels, reference
from regauge.plan.tiles import Convert, Int64, Tiles

LATENT, ROPE, BLOCK, RECORD, PLAIN = 512, 64, 128, 656, 1152


def values(count: int) -> np.ndarray:
    x = np.random.default_rng(count).standard_normal(count).astype(ml_dtypes.bfloat16)
    x[::997] = np.nan
    return x.view(np.uint8)


def starts(array: np.ndarray, count: int, step: int, first: int = 0) -> Int64:
    order = np.random.default_rng(count).permutation(count).astype(np.int64)
    return array.ctypes.data + first + order * step


def check(tiles: list[Tiles], target: np.ndarray) -> None:
    """Run all tiles in one call, everywhere, and compare the whole target."""
    before = target.copy()
    kernels.run(tiles, backend="numpy")
    expected = target.copy()
    assert not np.array_equal(expected, before)
    for isa in ISAS:
        for threads, stream in ((1, False), (3, True)):
            target[...] = before
            extra, _buffers = filler()
            kernels.run([*tiles, extra] if stream else tiles, threads=threads, isa=isa)  # type: ignore[arg-type]
            assert np.array_equal(target, expected), f"isa {isa}, {threads} threads"
    target[...] = before


def mla(pages: int, tokens: int, shift: int, *, pack: bool, pad: int = 0) -> tuple[list[Tiles], np.ndarray, np.ndarray]:
    """Pages of plain latent and rope against packed records, `pad` bytes after each."""
    record = RECORD + pad
    steps = (PLAIN, record) if pack else (record, PLAIN)
    source = values(pages * tokens * steps[0])
    if not pack:
        rows = source.reshape(-1, record)
        scales = np.random.default_rng(1).uniform(0.01, 2, (len(rows), 4)).astype(np.float32)
        rows[:, LATENT : LATENT + 16] = scales.view(np.uint8)
    target = noise(pages * tokens * steps[1] + 128)
    first = -target.ctypes.data % 64 + shift
    a, b = starts(source, pages, tokens * steps[0]), starts(target, pages, tokens * steps[1], first)
    shape, outer = (tokens, LATENT // BLOCK), (tokens,)
    if pack:
        convert = Convert(
            "bfloat16", "float8_e4m3fn", 2, 1, dst_scale=b + LATENT, dst_scale_stride=(record, 4), dynamic=True
        )
        latent = Tiles(a, b, shape, (PLAIN, 2 * BLOCK), (record, BLOCK), BLOCK, convert)
        rope = Tiles(a + 2 * LATENT, b + LATENT + 16, outer, (PLAIN,), (record,), 2 * ROPE)
    else:
        convert = Convert("float8_e4m3fn", "bfloat16", 1, 2, src_scale=a + LATENT, src_scale_stride=(record, 4))
        latent = Tiles(a, b, shape, (record, BLOCK), (PLAIN, 2 * BLOCK), BLOCK, convert)
        rope = Tiles(a + LATENT + 16, b + 2 * LATENT, outer, (record,), (PLAIN,), 2 * ROPE)
    return [latent, rope], target, source


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize(("pages", "tokens"), [(1, 64), (3, 5), (9, 64), (40, 16), (5, 200)])
@pytest.mark.parametrize(("shift", "pad"), [(0, 0), (4, 0), (0, 16)])
def test_packed_mla_records(pages: int, tokens: int, pack: bool, shift: int, pad: int) -> None:
    tiles, target, _source = mla(pages, tokens, shift, pack=pack, pad=pad)
    check(tiles, target)
    check(tiles[::-1], target)


@pytest.mark.parametrize("dst", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("pad", [0, 12])
def test_scales_inline_behind_every_row(dst: str, pad: int) -> None:
    """D + 4 bytes for each (token, head), as vLLM's fp8_per_token_head has it."""
    pages, tokens, heads, dim = 30, 16, 4, 128
    row = dim + 4 + pad
    source, target = values(pages * tokens * heads * dim * 2), noise(pages * tokens * heads * row + 128)
    a, b = (
        starts(source, pages, tokens * heads * dim * 2),
        starts(target, pages, tokens * heads * row, -target.ctypes.data % 64),
    )
    strides = (row * heads, row)
    convert = Convert("bfloat16", dst, 2, 1, dst_scale=b + dim, dst_scale_stride=strides, dynamic=True)
    check([Tiles(a, b, (tokens, heads), (dim * heads * 2, dim * 2), strides, dim, convert)], target)


def test_interleaved_parts_that_do_not_match_are_run_one_after_the_other() -> None:
    tiles, target, _source = mla(6, 16, 0, pack=True)
    odd = dataclasses.replace(tiles[1], src=tiles[1].src[:4].copy(), dst=tiles[1].dst[:4].copy())
    check([tiles[0], odd], target)
    moved = tiles[1].dst.copy()
    moved[[0, 1]] = moved[[1, 0]]  # ropes of two pages change places: no constant distance
    check([tiles[0], dataclasses.replace(tiles[1], dst=moved)], target)


def strides_of(order: str, page: int, heads: int, dim: int, lane: int, size: int) -> tuple[int, ...]:
    """Byte strides of token, head, outer dim, lane element."""
    return {
        "nhd": (heads * dim * size, dim * size, lane * size, size),
        "hnd": (dim * size, page * dim * size, lane * size, size),
        "hdn": (size, dim * page * size, lane * page * size, page * size),
        "lanes": (lane * size, dim * page * size, page * lane * size, size),
    }[order]


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["nhd", "hnd", "hdn", "lanes"]),
    st.sampled_from(["nhd", "hnd", "hdn", "lanes"]),
    st.sampled_from([("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"), ("bfloat16", "int8"), ("float32", "float16")]),
    st.sampled_from([(16, 2, 128), (64, 3, 64), (8, 1, 80), (128, 2, 128)]),
    st.sampled_from([8, 16]),
    st.sampled_from(["none", "dst", "heads", "dynamic"]),
)  # fmt: skip
def test_rows_in_pieces(
    src: str, dst: str, dtypes: tuple[str, str], geometry: tuple[int, int, int], lane: int, scale: str
) -> None:
    page, heads, dim = geometry
    pages, groups = 7, dim // lane
    sizes = [reference.ITEMSIZE[d] for d in dtypes]
    elements = page * heads * dim
    source = noise(pages * elements * sizes[0]) if dtypes[0] == "float8_e4m3fn" else values(pages * elements * sizes[0])
    target = noise(pages * elements * sizes[1] + 128)
    a = starts(source, pages, elements * sizes[0])
    b = starts(target, pages, elements * sizes[1], -target.ctypes.data % 64)
    ss, ds = (strides_of(o, page, heads, dim, lane, size) for o, size in zip((src, dst), sizes, strict=True))
    scales = np.random.default_rng(2).uniform(0.1, 1, max(heads, pages * page * heads)).astype(np.float32)
    dynamic = scale == "dynamic" and sizes[1] == 1
    operands: dict[str, object] = {}
    if dynamic:
        at = scales.ctypes.data + np.arange(pages, dtype=np.int64) * page * heads * 4
        operands = {"dst_scale": at, "dst_scale_stride": (heads * 4, 4, 0), "dynamic": True, "row_axes": 1}
    elif scale in ("dst", "heads"):
        at = np.full(pages, scales.ctypes.data, np.int64)
        operands = {"dst_scale": at, "dst_scale_stride": (0, 4 if scale == "heads" else 0, 0)}
    convert = Convert(*dtypes, ss[3], ds[3], **operands)  # type: ignore[arg-type]
    tiles = Tiles(a, b, (page, heads, groups), ss[:3], ds[:3], lane, convert)
    for threads, stream in ((1, False), (2, True)):
        Case(tiles, [target, scales] if dynamic else [target], [source, scales]).check(threads=threads, stream=stream)
