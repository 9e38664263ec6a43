"""The Triton kernels, in Triton's interpreter, write the same bytes as the reference, and nothing outside the target boxes.

One program is slow there whatever it does, so that cases are few and large.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import conversions, copies

from kernel_cases import DTYPES, EIGHT_BIT, Case, address, codes_of, noise, row, strides_in
from regauge.errors import ConfigError
from regauge.move import kernels, reference
from regauge.move.triton import run as triton_run
from regauge.plan.tiles import Convert, Tiles


def check(case: Case, *, elements: int = triton_run.BLOCK) -> None:
    expected = case.run(backend="numpy")
    before = [o.copy() for o in case.outputs]
    triton_run.run([case.tiles], elements=elements)
    for output, want, start in zip(case.outputs, expected, before, strict=True):
        assert np.array_equal(output, want)
        output[...] = start


def rows_with_scales(src: str, dst: str, scales: list[float], side: str, rule: str) -> Case:
    """All codes of `src` once under every scale, in one box."""
    codes = codes_of(src)[: 1 << 14 if reference.ITEMSIZE[src] == 4 else None]
    table = np.array(scales, np.float32)
    sizes = reference.ITEMSIZE[src], reference.ITEMSIZE[dst]
    out = np.full(len(scales) * len(codes) * sizes[1], 0xA5, np.uint8)
    operand = {side: address(table), f"{side}_stride": (4,)}
    convert = Convert(src, dst, *sizes, rule=rule, **operand)  # type: ignore[arg-type]
    shape, strides = (len(scales),), (len(codes) * sizes[1],)
    return Case(Tiles(address(codes), address(out), shape, (0,), strides, len(codes), convert), [out], [codes, table])


def test_the_interpreter_runs_these_tests() -> None:
    assert triton_run.INTERPRETED


@pytest.mark.parametrize("src", DTYPES)
def test_all_inputs_without_a_scale(src: str) -> None:
    for dst in DTYPES:
        check(row(codes_of(src), src, dst))


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", ["float32", "bfloat16", "float16", "float8_e4m3fnuz", "int8"])
def test_all_inputs_with_odd_scales(src: str, dst: str) -> None:
    scales = [0.37, -3.3, 1e-42, 0.0, np.inf, 1e30]
    check(rows_with_scales(src, dst, scales, "dst_scale", "divide"))
    check(rows_with_scales(src, dst, scales[:3], "dst_scale", "reciprocal"))
    check(rows_with_scales(src, dst, scales[1:5], "src_scale", "reciprocal"))


def rows_with_computed_scales(src: str, dst: str, row_axes: int, stored: str, **scheme: object) -> Case:
    """Eight boxes of 3 x 5 runs of 40: small ones, large ones, zeros, NaN, infinities."""
    rng = np.random.default_rng(1)
    values = (rng.normal(size=(8, 3, 5, 40)) * 10.0 ** rng.integers(-44, 38, (8, 1, 1, 1))).astype(np.float32)
    values[3], values[4, 2, 1, 7], values[5, 1, 0, 0], values[6, 2, 4, 39] = 0, np.nan, -np.inf, 1e-45
    sizes = reference.ITEMSIZE[src], reference.ITEMSIZE[dst]
    codes = reference.encode(values, src, np.signbit(values))
    strides = [(600 * n, 200 * n, 40 * n) for n in sizes]
    free = (8, 3, 5)[: 3 - row_axes]
    scales = np.full(math.prod(free) * reference.SCALE_ITEMSIZE[stored], 0xA5, np.uint8)
    given, out = np.full(math.prod(free), 0.7, np.float32), np.zeros(8 * 600 * sizes[1], np.uint8)
    scale_strides = [
        (*strides_in(range(len(free)), free, n, 0), *[0] * row_axes) for n in (4, reference.SCALE_ITEMSIZE[stored])
    ]
    convert = Convert(
        src, dst, *sizes, row_axes=row_axes, src_scale=address(given), src_scale_stride=scale_strides[0],
        dst_scale=address(scales), dst_scale_stride=scale_strides[1], dst_scale_dtype=stored, dynamic=True,
        **scheme,  # type: ignore[arg-type]
    )  # fmt: skip
    tiles = Tiles(address(codes), address(out), (8, 3, 5), *strides, 40, convert)  # type: ignore[arg-type]
    return Case(tiles, [out, scales], [codes, given])


@pytest.mark.parametrize("dst", EIGHT_BIT)
@pytest.mark.parametrize("row_axes", [0, 1, 2])
def test_computed_scales(dst: str, row_axes: int) -> None:
    check(rows_with_computed_scales("float32", dst, row_axes, "float32", rule="divide", floor=1e-9))
    check(rows_with_computed_scales("bfloat16", dst, row_axes, "float8_e8m0fnu", pow2=True))


def test_a_row_larger_than_a_block_is_read_twice() -> None:
    case = rows_with_computed_scales("float16", "float8_e4m3fn", 2, "float32", rule="divide_source")
    check(case, elements=256)


@pytest.mark.parametrize("dst", DTYPES)
@pytest.mark.parametrize("src", ["bfloat16", "float16"])
def test_quotients_rounded_to_the_source(src: str, dst: str) -> None:
    check(rows_with_scales(src, dst, [0.37, -3.3e-5, 1e-42, 0.0, np.inf, 7e4], "dst_scale", "divide_source"))


@pytest.mark.parametrize("side", ["src_scale", "dst_scale"])
def test_every_e8m0_scale(side: str) -> None:
    codes = codes_of("bfloat16")[::37].copy()
    scales, out = np.arange(255, dtype=np.uint8), np.zeros(255 * len(codes), np.uint8)
    operand = {side: address(scales), f"{side}_stride": (1,), f"{side}_dtype": "float8_e8m0fnu"}
    convert = Convert("bfloat16", "float8_e5m2", 2, 1, **operand)  # type: ignore[arg-type]
    tiles = Tiles(address(codes), address(out), (255,), (0,), (len(codes),), len(codes), convert)
    check(Case(tiles, [out], [codes, scales]), elements=1 << 19)


@settings(max_examples=40, deadline=None)
@given(copies(), st.sampled_from([1 << 9, triton_run.BLOCK]))
def test_copies_of_random_boxes(case: Case, elements: int) -> None:
    small = case.tiles.pieces * case.tiles.run > 8 * elements
    check(case, elements=triton_run.BLOCK if small else elements)


@settings(max_examples=60, deadline=None)
@given(conversions(), st.sampled_from([1 << 9, triton_run.BLOCK]))
def test_conversions_of_random_boxes(case: Case, elements: int) -> None:
    small = case.tiles.pieces * case.tiles.run > 8 * elements
    check(case, elements=triton_run.BLOCK if small else elements)


@pytest.mark.parametrize(
    ("shape", "src", "dst", "run"),
    [
        pytest.param((5, 8, 32), (512, 2, 16), (512, 64, 2), 2, id="dim-major-page-of-8"),
        pytest.param((3, 33, 77), (2 * 33 * 77, 2, 66), (2 * 33 * 77, 154, 2), 2, id="odd-transpose"),
        pytest.param((4, 16, 16), (4096, 16, 256), (4096, 256, 16), 16, id="x-split-of-8-lanes"),
    ],
)
def test_transposes(shape: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...], run: int) -> None:
    nbytes = shape[0] * src[0]
    source, out = noise(3 * nbytes), np.zeros(3 * nbytes, np.uint8)
    at = [2 * nbytes, 0, nbytes]
    tiles = Tiles(address(source, *at), address(out, *reversed(at)), shape, src, dst, run)
    check(Case(tiles, [out], [source]), elements=1 << 12)


def test_nothing_to_do() -> None:
    empty = np.zeros(0, np.int64)
    triton_run.run(
        [Tiles(empty, empty, (3,), (1,), (1,), 5), Tiles(address(empty), address(empty), (0,), (1,), (1,), 5)]
    )


def test_the_backend_of_the_kernels() -> None:
    case = row(codes_of("float16"), "float16", "float8_e5m2")
    want = case.run(backend="numpy")
    got = case.run(backend="triton")
    assert np.array_equal(got[0], want[0])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regauge.move.triton.run", None)
    monkeypatch.delattr("regauge.move.triton.run", raising=False)
    with pytest.raises(ConfigError, match=r"need regauge.move.triton.run: pip install 'regauge\[triton\]'"):
        kernels.run([], backend="triton")


def test_the_gpu_bench_runs_dry() -> None:
    script = Path(__file__).parents[3] / "bench/gpu.py"
    small = ["--tokens", "64", "--cases", "2", "--rounds", "1", "--launches", "1", "--workers", "1"]
    done = subprocess.run([sys.executable, str(script), *small], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cases equal the reference, byte for byte" in done.stdout
    assert "the digest, alone and in a copy, is the definition's" in done.stdout


def test_without_a_gpu_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_run, "INTERPRETED", False)
    with pytest.raises(ConfigError, match="use the native kernels, or set TRITON_INTERPRET=1"):
        triton_run.run([])
