"""Every backend and instruction set writes the same bytes as the reference, and nothing outside the target boxes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import (
    DTYPES,
    EIGHT_BIT,
    FP8,
    GUARD,
    RULES,
    SCALES,
    Case,
    address,
    codes_of,
    noise,
    row,
    span,
    strides_in,
)
from regauge.move import reference
from regauge.plan.tiles import Convert, Tiles

# ---- formats: every 16-bit and 8-bit input, raw 32-bit inputs ----


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
def test_all_inputs_without_a_scale(src: str, dst: str) -> None:
    row(codes_of(src), src, dst).check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
def test_all_inputs_with_odd_scales(src: str, dst: str, rule: str) -> None:
    codes = codes_of(src)
    for s in SCALES:
        row(codes, src, dst, src_scale=s, rule=rule).check()
        row(codes, src, dst, dst_scale=s, rule=rule).check()
    row(codes, src, dst, src_scale=1.7, dst_scale=0.9, rule=rule).check(stream=True)


@pytest.mark.parametrize("dst", FP8)
@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_codes_equal_torch_after_an_explicit_clamp(src: str, dst: str) -> None:
    codes = codes_of(src)
    values = torch.from_numpy(codes.view(np.int16).copy()).view(getattr(torch, src)).float()
    most = reference.MAX_FINITE[dst]
    for s in (1.0, 0.37, 0.0123):
        scaled = values * torch.tensor(np.float32(1) / np.float32(s))
        want = scaled.clamp(-most, most).to(getattr(torch, dst)).view(torch.uint8).numpy()
        got = row(codes, src, dst, dst_scale=s).run()[0][GUARD:-GUARD]
        assert np.array_equal(got, want)


@pytest.mark.parametrize("rule", ["reciprocal", "divide"])
@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_int8_codes_are_whole_numbers_to_the_nearest_even(src: str, rule: str) -> None:
    codes = codes_of(src)
    x = codes.view(np.float16 if src == "float16" else ml_dtypes.bfloat16).astype(np.float32)
    with np.errstate(all="ignore"):
        for s in np.array([1.0, 0.37, 0.0123], np.float32):
            want = np.clip(np.rint(x / s if rule == "divide" else x * (np.float32(1) / s)), -127, 127)
            want[np.isnan(x)] = 0
            got = row(codes, src, "int8", dst_scale=s, rule=rule).run()[0][GUARD:-GUARD]
            assert np.array_equal(got.view(np.int8), want)


def test_every_int8_code_is_read_as_its_number() -> None:
    for dst, plain in (("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        got = row(codes_of("int8"), "int8", dst).run()[0][GUARD:-GUARD].view(plain)
        assert np.array_equal(got.astype(np.int32), codes_of("int8").view(np.int8))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(EIGHT_BIT), st.sampled_from(["src_scale", "dst_scale"]))
def test_all_bfloat16_under_any_scale(scale_bits: int, dst: str, side: str) -> None:
    scale = np.array([scale_bits], np.uint32).view(np.float32)[0]
    row(codes_of("bfloat16"), "bfloat16", dst, **{side: 1.0 if np.isnan(scale) else scale}).check()


@pytest.mark.parametrize("dst", EIGHT_BIT)
@pytest.mark.parametrize("octaves", [2, 9, 24])
def test_dynamic_scales_for_every_fraction_of_the_largest_element(octaves: int, dst: str) -> None:
    rng = np.random.default_rng(octaves)
    rows, n = 3 * 128, 128 + 32
    top = rng.choice([0x0180, 0x3F80, 0x7F00], rows) + np.arange(rows) % 128
    magnitudes = np.maximum(top[:, None] - rng.integers(0, octaves * 128, (rows, n)), 0)
    magnitudes[:, 7] = top
    codes = (magnitudes | rng.integers(0, 2, (rows, n)) << 15).astype(np.uint16)
    codes[5, 3], codes[9, 150] = 0x7FC1, 0xFF80
    scales, out = np.zeros(rows, np.float32), np.full(rows * n + 2 * GUARD, 0xA5, np.uint8)
    convert = Convert("bfloat16", dst, 2, 1, dst_scale=address(scales), dst_scale_stride=(4,), dynamic=True)
    tiles = Tiles(address(codes), address(out, GUARD), (rows,), (2 * n,), (n,), n, convert)
    Case(tiles, [out, scales], [codes]).check()


@settings(max_examples=60, deadline=None)
@given(
    st.binary(min_size=4, max_size=700),
    st.sampled_from(DTYPES),
    st.none() | st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_raw_float32_bits(raw: bytes, dst: str, scale_bits: int | None, divide: bool) -> None:
    codes = np.frombuffer(raw[: len(raw) // 4 * 4], np.uint32).copy()
    scales: dict[str, object] = {"rule": "divide" if divide else "reciprocal"}
    if scale_bits is not None:
        scale = np.array([scale_bits], np.uint32).view(np.float32)[0]
        scales["dst_scale"] = 1.0 if np.isnan(scale) else scale
    row(codes, "float32", dst, **scales).check()


@pytest.mark.parametrize("dst", EIGHT_BIT)
@pytest.mark.parametrize("src", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES)
def test_dynamic_scales_of_special_rows(src: str, dst: str, rule: str) -> None:
    subnormal, nan, inf = 1e-40 if src != "float16" else 6e-8, np.nan, np.inf
    rng = np.random.default_rng(5)
    for special in ([], [0.0] * 77, [nan], [-nan], [inf], [-inf, nan], [subnormal, 0.0], [60000.0]):
        values = np.array([*special, *([] if special[:1] == [0.0] else rng.normal(size=77) * 1e-3)], np.float32)
        codes = reference.encode(values, src, np.signbit(values))
        if subnormal in special:
            codes = codes[:2].copy()
        row(codes, src, dst, dst_scale=-1.0, dynamic=True, rule=rule).check()
        row(codes, src, dst, src_scale=0.7, dst_scale=-1.0, dynamic=True, rule=rule).check()


# ---- boxes: random shapes, orders of axes, alignments ----


@st.composite
def shapes(draw: st.DrawFn, most: int) -> list[int]:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 17, 33]), max_size=4))
    while math.prod(shape) > most:
        shape.pop()
    return shape


@st.composite
def copies(draw: st.DrawFn) -> Case:
    run = draw(st.integers(1, 300) | st.sampled_from([1, 2, 4, 8, 64, 128, 256]))
    shape = draw(shapes(max(1, 20_000 // run)))
    n = draw(st.integers(0, 4))
    pads = draw(st.tuples(st.sampled_from([0, 0, 3]), st.sampled_from([0, 0, 5])))
    ss, ds = (strides_in(draw(st.permutations(range(len(shape)))), shape, run, pad) for pad in pads)
    if shape and draw(st.booleans()):  # a source that is read again along one axis: a replicated KV head
        axis = draw(st.integers(0, len(shape) - 1))
        ss = tuple(0 if j == axis else s for j, s in enumerate(ss))
    align = draw(st.tuples(st.integers(0, 70), st.integers(0, 70)))
    steps = [span(shape, s, run) + draw(st.integers(0, 9)) for s in (ss, ds)]
    src, dst = noise(n * steps[0] + 70), noise(n * steps[1] + 70 + 2 * GUARD)
    a = address(src, *(align[0] + i * steps[0] for i in range(n))) if n else np.zeros(0, np.int64)
    order = draw(st.permutations(range(n)))
    b = address(dst, *(GUARD + align[1] + i * steps[1] for i in order)) if n else np.zeros(0, np.int64)
    return Case(Tiles(a, b, tuple(shape), ss, ds, run), [dst], [src])


@settings(max_examples=150, deadline=None)
@given(copies(), st.integers(1, 3), st.booleans())
def test_copies_of_random_boxes(case: Case, threads: int, stream: bool) -> None:
    case.check(threads=threads, stream=stream)


@st.composite
def conversions(draw: st.DrawFn) -> Case:
    src_dtype, dst_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    sizes = reference.ITEMSIZE[src_dtype], reference.ITEMSIZE[dst_dtype]
    run = draw(st.integers(1, 300) | st.sampled_from([32, 64, 128, 600]))
    shape = draw(shapes(max(1, 6_000 // run)))
    axes, n = len(shape), draw(st.integers(1, 3))
    row_axes = draw(st.integers(0, min(2, axes)))
    full = [*shape, run]
    contiguous = draw(st.booleans())
    steps: list[tuple[int, ...]] = []
    for size in sizes:
        order = [*draw(st.permutations(range(axes))), axes] if contiguous else draw(st.permutations(range(axes + 1)))
        steps.append(strides_in(order, full, size, draw(st.sampled_from([0, 0, 3]))))
    gaps = [span(full, s, size) for s, size in zip(steps, sizes, strict=True)]
    src, dst = noise(n * gaps[0] + 70), noise(n * gaps[1] + 70 + 2 * GUARD)
    a = address(src, *(draw(st.integers(0, 70)) + i * gaps[0] for i in range(n)))
    shift = draw(st.integers(0, 70))
    b = address(dst, *(GUARD + shift + i * gaps[1] for i in range(n)))
    outputs, keep = [dst], [src]
    dynamic = dst_dtype in EIGHT_BIT and draw(st.booleans())
    free = shape[: axes - row_axes]
    operands: dict[str, object] = {}
    for name in ("src_scale", "dst_scale"):
        if not (draw(st.booleans()) or (dynamic and name == "dst_scale")):
            continue
        rows = math.prod(free)
        values = np.random.default_rng(rows).lognormal(size=n * rows).astype(np.float32)
        if draw(st.booleans()):
            values = np.random.default_rng(rows).integers(120, 132, n * rows, np.uint8)
            operands[f"{name}_dtype"] = "float8_e8m0fnu"
        size = values.itemsize
        shared = not dynamic and draw(st.booleans())
        strides = [0] * axes if shared else [*strides_in(range(len(free)), free, size, 0), *[0] * row_axes]
        operands[name] = address(values, *(size * i * rows for i in range(n)))
        operands[f"{name}_stride"] = tuple(strides)
        (outputs if dynamic and name == "dst_scale" else keep).append(values)
    operands["rule"] = draw(st.sampled_from(RULES))
    operands["floor"] = draw(st.sampled_from([2.0**-126, 1e-4 / 448, 0.37]))
    operands["pow2"] = draw(st.booleans()) or operands.get("dst_scale_dtype") == "float8_e8m0fnu"
    convert = Convert(src_dtype, dst_dtype, steps[0][-1], steps[1][-1], row_axes=row_axes, dynamic=dynamic, **operands)  # type: ignore[arg-type]
    return Case(Tiles(a, b, tuple(shape), steps[0][:-1], steps[1][:-1], run, convert), outputs, keep)


@settings(max_examples=200, deadline=None)
@given(conversions(), st.integers(1, 3), st.booleans())
def test_conversions_of_random_boxes(case: Case, threads: int, stream: bool) -> None:
    case.check(threads=threads, stream=stream)


# ---- sizes at which threads and streaming set in ----


def page_case(shape: tuple[int, ...], src: Sequence[int], dst: Sequence[int], tiles: int, run: int, align: int) -> Case:
    """`tiles` boxes in a shuffled order; axes lie in the orders `src` and `dst`."""
    ss, ds = strides_in(src, shape, run, 0), strides_in(dst, shape, run, 0)
    size = math.prod(shape) * run
    a, b = noise(tiles * size), noise(tiles * size + 2 * GUARD + 64)
    start = -b.ctypes.data % 64 + GUARD // 64 * 64 + align
    order = np.random.default_rng(9).permutation(tiles)
    return Case(
        Tiles(address(a, *range(0, len(a), size)), address(b, *(start + order * size)), shape, ss, ds, run),
        [b],
        [a],
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("align", [0, 16, 1])
@pytest.mark.parametrize(
    ("shape", "src", "dst", "tiles", "run"),
    [
        pytest.param((16, 8), (0, 1), (1, 0), 45, 256, id="nhd-hnd"),
        pytest.param((16, 8), (1, 0), (0, 1), 91, 128, id="hnd-nhd-1-byte"),
        pytest.param((4, 16, 72), (0, 2, 1), (1, 0, 2), 131, 2, id="dim-major-page"),
        pytest.param((3, 33, 77), (0, 2, 1), (1, 0, 2), 55, 4, id="odd-transpose"),
        pytest.param((), (), (), 1, 1_300_021, id="one-long-run"),
        pytest.param((3,), (0,), (0,), 5, 100_003, id="long-odd-runs"),
    ],
)
def test_large_copies(
    shape: tuple[int, ...],
    src: Sequence[int],
    dst: Sequence[int],
    tiles: int,
    run: int,
    align: int,
    threads: int,
) -> None:
    page_case(shape, src, dst, tiles, run, align).check(threads=threads)


def convert_pages(case: Case, src: str, dst: str, **scales: object) -> Case:
    """Turn a case of copies of 1-byte elements into conversions: element strides grow with the element sizes."""
    t, (a, b) = case.tiles, (reference.ITEMSIZE[src], reference.ITEMSIZE[dst])
    source, target = noise(len(case.keep[0]) * a), noise((len(case.outputs[0])) * b)
    at = -target.ctypes.data % 64 + 64
    convert = Convert(src, dst, a, b, **scales)  # type: ignore[arg-type]
    moved = dataclasses.replace(
        t,
        src=source.ctypes.data + (t.src - t.src.min()) * a,
        dst=target.ctypes.data + at + (t.dst - t.dst.min()) * b,
        src_stride=tuple(s * a for s in t.src_stride),
        dst_stride=tuple(s * b for s in t.dst_stride),
        convert=convert,
    )
    return Case(moved, [target], [source])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e4m3fn", "bfloat16"),
        ("float32", "bfloat16"),
        ("float16", "float8_e5m2"),
        ("bfloat16", "int8"),
        ("int8", "bfloat16"),
        ("bfloat16", "float8_e4m3fnuz"),
        ("float8_e4m3fnuz", "float8_e4m3fn"),
    ],
)
def test_large_conversions(src: str, dst: str, threads: int) -> None:
    pages = page_case((16, 8), (0, 1), (1, 0), 80, 128, 0)
    scale = np.array([0.37], np.float32)
    one = np.full(80, scale.ctypes.data, np.int64)
    convert_pages(pages, src, dst, dst_scale=one, dst_scale_stride=(0, 0)).check(threads=threads, stream=True)
    convert_pages(pages, src, dst).check(threads=threads, stream=True)
    flat = page_case((), (), (), 1, 600_011, 0)
    convert_pages(flat, src, dst).check(threads=threads)


@pytest.mark.parametrize("dst", EIGHT_BIT)
@pytest.mark.parametrize("row_axes", [0, 1])
def test_large_dynamic_conversions(row_axes: int, dst: str) -> None:
    pages = page_case((16, 8), (0, 1), (1, 0), 60, 128, 0)
    scales = np.zeros(60 * 16 * 8, np.float32)
    case = convert_pages(
        pages,
        "bfloat16",
        dst,
        dynamic=True,
        row_axes=row_axes,
        dst_scale=address(scales, *range(0, scales.nbytes, 16 * 8 * 4)),
        dst_scale_stride=(32, 0 if row_axes else 4),
    )
    Case(case.tiles, [*case.outputs, scales], case.keep).check(threads=2, stream=True)
