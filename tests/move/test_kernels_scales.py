"""Every way to store, compute and apply scales gives the reference's bytes on every instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import DTYPES, EIGHT_BIT, FP8, GUARD, RULES, Case, address, codes_of, noise, row
from regauge.move import reference
from regauge.plan.tiles import Convert, Tiles

E8M0 = "float8_e8m0fnu"


@pytest.mark.parametrize("dst", FP8)
@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_dividing_in_the_source_dtype_gives_the_codes_of_a_tensor_divided_before_the_cast(src: str, dst: str) -> None:
    codes = codes_of(src)
    values = torch.from_numpy(codes.view(np.int16).copy()).view(getattr(torch, src))
    most, differ = reference.MAX_FINITE[dst], 0
    for s in (1.0, 0.37, 0.0123):
        divided = values.float().div(torch.tensor(s)).to(getattr(torch, src)).float()
        want = divided.clamp(-most, most).to(getattr(torch, dst)).view(torch.uint8).numpy()
        got = row(codes, src, dst, dst_scale=s, rule="divide_source").run()[0][GUARD:-GUARD]
        number = ~values.isnan().numpy()  # torch's cast to bfloat16 gives every NaN the same sign
        assert np.array_equal(got[number], want[number])
        differ += int((got != row(codes, src, dst, dst_scale=s, rule="divide").run()[0][GUARD:-GUARD]).sum())
    assert differ > 0, "the rules must differ somewhere, or this test shows nothing"


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", DTYPES)
def test_scales_of_one_byte_are_powers_of_two(src: str, dst: str) -> None:
    codes = codes_of(src)
    for rule in RULES:
        # 255 is NaN: which of two NaN survives in a wide target is the CPU's choice.
        for code in (0, 1, 127, 133, 254, *([255] if dst in EIGHT_BIT else [])):
            row(codes, src, dst, src_scale=code, src_scale_dtype=E8M0, rule=rule).check()
            row(codes, src, dst, dst_scale=code, dst_scale_dtype=E8M0, rule=rule).check()
        byte = row(codes, src, dst, dst_scale=133, dst_scale_dtype=E8M0, rule=rule).run()[0]
        assert np.array_equal(byte, row(codes, src, dst, dst_scale=64.0, rule=rule).run()[0])


def magnitudes(rng: np.random.Generator, rows: int, n: int, octaves: int) -> np.ndarray:
    """bfloat16 rows with every fraction as that of the largest element, some rows empty, with NaN or with infinity."""
    top = rng.choice([0x0180, 0x3F80, 0x4480, 0x7F00], rows) + np.arange(rows) % 128
    codes = np.maximum(top[:, None] - rng.integers(0, octaves * 128, (rows, n)), 0)
    codes[:, 7] = top
    codes[11] = 0
    codes = (codes | rng.integers(0, 2, (rows, n)) << 15).astype(np.uint16)
    codes[5, 3], codes[9, n - 1] = 0x7FC1, 0xFF80
    return codes


def dynamic_rows(codes: np.ndarray, dst: str, gap: int = 0, **scheme: object) -> Case:
    """Rows with computed scales, `gap` bytes between targets."""
    rows, n = codes.shape
    stored = np.uint8 if scheme.get("dst_scale_dtype") == E8M0 else np.float32
    scales = np.zeros(rows, stored)
    out = np.full(rows * (n + gap) + 2 * GUARD, 0xA5, np.uint8)
    at = -out.ctypes.data % 64 + 64
    convert = Convert(
        "bfloat16",
        dst,
        2,
        1,
        dst_scale=address(scales),
        dst_scale_stride=(scales.itemsize,),
        dynamic=True,
        **scheme,  # type: ignore[arg-type]
    )
    return Case(
        Tiles(address(codes), address(out, at), (rows,), (2 * n,), (n + gap,), n, convert), [out, scales], [codes]
    )


@pytest.mark.parametrize("n", [64, 128, 160, 512])
@pytest.mark.parametrize("dst", EIGHT_BIT)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pow2", [False, True])
def test_computed_scales(rule: str, pow2: bool, dst: str, n: int) -> None:
    rng = np.random.default_rng(n)
    for floor in (2.0**-126, 1e-4 / 448, 3.3):
        for octaves in (2, 20):
            codes = magnitudes(rng, 3 * 128 + 5, n, octaves)
            dynamic_rows(codes, dst, rule=rule, pow2=pow2, floor=floor).check(stream=octaves == 2)
            dynamic_rows(codes, dst, 16, rule=rule, pow2=pow2, floor=floor).check()
    if pow2:
        dynamic_rows(codes, dst, rule=rule, pow2=True, dst_scale_dtype=E8M0).check(stream=True)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(EIGHT_BIT),
    st.sampled_from(RULES),
    st.floats(2.0**-126, 2.0**100, width=32),
    st.booleans(),
)
def test_computed_scales_of_raw_rows(seed: int, dst: str, rule: str, floor: float, pow2: bool) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**16, (40, 128), np.uint16)
    codes[::2] &= 0xBFFF  # every other row without NaN and infinity
    dynamic_rows(codes, dst, rule=rule, floor=floor, pow2=pow2).check()


def test_a_power_of_two_scale_is_the_smallest_that_fits() -> None:
    x = np.array([[448.0, 1.0], [449.0, 1.0], [3.5, -0.1], [0.0, 0.0]], np.float32)
    scale = reference.dynamic_scale(x, "float8_e4m3fn", (1,), 2.0**-126, True)
    assert scale[:, 0].tolist() == [1.0, 2.0, 2.0**-7, 2.0**-126]
    floor = reference.dynamic_scale(x, "float8_e4m3fn", (1,), 0.3, True)
    assert floor[:, 0].tolist() == [1.0, 2.0, 0.5, 0.5]


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", EIGHT_BIT)
def test_long_rows_of_bytes(src: str, dst: str) -> None:
    codes = np.concatenate([noise(3000), np.arange(256, dtype=np.uint8), noise(1003)])
    for scales in ({}, {"src_scale": 0.37}, {"src_scale": -3.0, "dst_scale": 0.011}, {"dst_scale": 0.0}):
        for rule in RULES:
            row(codes, src, dst, rule=rule, **scales).check(stream=rule == "divide")
    ordinary = codes.copy()
    ordinary[ordinary & 0x7F >= 0x7C] = 0x38  # no NaN or infinity in any fp8
    row(ordinary, src, dst, src_scale=0.37).check(stream=True)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("bfloat16", "float8_e4m3fn"),
        ("bfloat16", "float8_e4m3fnuz"),
        ("bfloat16", "int8"),
        ("float8_e4m3fn", "bfloat16"),
        ("float8_e4m3fnuz", "bfloat16"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fnuz"),
    ],
)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_scales_per_head_of_many_pages(rule: str, src: str, dst: str, both: bool) -> None:
    """Rows of a page alternate between the heads' scales, two of which have the same rounded reciprocal; so do the pages."""
    pages, tokens, heads, n = 40, 16, 8, 128
    sizes = [reference.ITEMSIZE[d] for d in (src, dst)]
    rng = np.random.default_rng(3)
    values = rng.standard_normal((pages, tokens * heads * n)) * 3
    values[:-4] += np.copysign(0.5, values[:-4])  # the last pages have codes that are subnormal
    source = values.astype(ml_dtypes.bfloat16).view(np.uint8).reshape(-1)
    source = noise(len(source)) if sizes[0] == 1 else source
    out = np.zeros(pages * tokens * heads * n * sizes[1] + 64, np.uint8)
    at = -out.ctypes.data % 64
    scales = rng.lognormal(size=(2, heads)).astype(np.float32)
    scales[:, 2], scales[:, 5] = 1.875, np.nextafter(np.float32(1.875), np.float32(0))
    operands: dict[str, object] = {}
    for i, name in enumerate(("src_scale", "dst_scale")):
        if both or sizes[i] == 1:
            operands[name] = np.full(pages, scales[i].ctypes.data, np.int64)
            operands[f"{name}_stride"] = (0, 4)
    page = [tokens * heads * n * size for size in sizes]
    order = rng.permutation(pages)
    for stride in ((heads * n, n), (n, tokens * n)):
        tiles = Tiles(
            source.ctypes.data + np.arange(pages, dtype=np.int64) * page[0],
            out.ctypes.data + at + order * page[1],
            (tokens, heads),
            (heads * n * sizes[0], n * sizes[0]),
            (stride[0] * sizes[1], stride[1] * sizes[1]),
            n,
            Convert(src, dst, *sizes, rule, **operands),  # type: ignore[arg-type]
        )
        Case(tiles, [out], [source, scales]).check(threads=2, stream=True)
