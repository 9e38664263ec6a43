"""The reference defines the formats; here it is held against torch (and numpy for int8), independent implementations."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from regauge.move import reference
from regauge.plan.tiles import Convert, Tiles

FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
NARROW = ("bfloat16", "float16", *FP8)


def all_codes(dtype: str) -> np.ndarray:
    """Every bit pattern of a dtype of one or two bytes; for float32 random ones and the edges of every format."""
    size = reference.ITEMSIZE[dtype]
    if size < 4:
        return np.arange(256**size, dtype=f"u{size}")
    rng = np.random.default_rng(1)
    edges = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000], np.uint32)
    near = np.concatenate([all_as_float(d).view(np.uint32) for d in (*NARROW, "int8")])
    near = np.concatenate([near - 1, near, near + 1, near + 0x1000, near + 0x80000, near + 0x100000])
    return np.concatenate([edges, edges | 0x80000000, near, rng.integers(0, 2**32, 50_000, dtype=np.uint32)])


def all_as_float(dtype: str) -> np.ndarray:
    return reference.decode(all_codes(dtype), dtype)


def as_torch(codes: np.ndarray, dtype: str) -> torch.Tensor:
    signed = codes.view(f"i{codes.dtype.itemsize}") if codes.dtype.itemsize > 1 else codes
    return torch.from_numpy(signed.copy()).view(getattr(torch, dtype))


def torch_codes(values: torch.Tensor, dtype: str) -> np.ndarray:
    """Clamp as the definition says, cast, and return the bits."""
    most = reference.MAX_FINITE.get(dtype)
    clamped = values if most is None else values.clamp(-most, most)
    cast = clamped.to(getattr(torch, dtype))
    size = reference.ITEMSIZE[dtype]
    return cast.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy().view(f"u{size}")


@pytest.mark.parametrize("dtype", NARROW)
def test_decode_widens_every_code_as_torch_does(dtype: str) -> None:
    ours, theirs = all_as_float(dtype), as_torch(all_codes(dtype), dtype).float().numpy()
    nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])
    signed = ~nan if dtype == "float8_e4m3fnuz" else slice(None)  # its one NaN has no sign
    assert np.array_equal(np.signbit(ours)[signed], np.signbit(theirs)[signed])


@pytest.mark.parametrize("target", NARROW)
@pytest.mark.parametrize("source", ["float32", *NARROW])
def test_encode_rounds_and_saturates_as_torch_does_after_a_clamp(source: str, target: str) -> None:
    values = all_as_float(source)
    ours = reference.encode(values, target, np.signbit(values))
    theirs = torch_codes(torch.from_numpy(values), target)
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], theirs[~nan])
    if target in FP8:
        assert np.array_equal(ours[nan], theirs[nan])
    else:  # the payload of a NaN differs between torch's casts; that it is one does not
        assert np.isnan(reference.decode(ours[nan], target)).all()


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [
        ("float16", 65504.0),
        ("float8_e4m3fn", 448.0),
        ("float8_e4m3fnuz", 240.0),
        ("float8_e5m2", 57344.0),
        ("int8", 127.0),
    ],
)
def test_saturating_targets_have_no_infinity(dtype: str, largest: float) -> None:
    values = np.array([np.inf, -np.inf, 1e30, -1e30, largest], np.float32)
    back = reference.decode(reference.encode(values, dtype, np.signbit(values)), dtype)
    assert back.tolist() == [largest, -largest, largest, -largest, largest]


@pytest.mark.parametrize("source", ["float32", *NARROW, "int8"])
def test_e4m3fnuz_is_ml_dtypes_after_a_clamp(source: str) -> None:
    values = all_as_float(source)
    ours = reference.encode(values, "float8_e4m3fnuz", np.signbit(values))
    with np.errstate(invalid="ignore"):  # casting a signalling NaN
        theirs = np.where(np.isnan(values), values, np.clip(values, -240, 240)).astype(ml_dtypes.float8_e4m3fnuz)
    assert np.array_equal(ours, theirs.view(np.uint8))
    codes = all_codes("float8_e4m3fnuz")
    assert np.array_equal(
        reference.decode(codes, "float8_e4m3fnuz"),
        codes.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32),
        equal_nan=True,
    )


def test_e4m3fnuz_has_half_the_value_of_e4m3fn_and_no_negative_zero() -> None:
    codes = np.delete(all_codes("float8_e4m3fn"), [0x7F, 0x80, 0xFF])
    assert np.array_equal(2 * reference.decode(codes, "float8_e4m3fnuz"), reference.decode(codes, "float8_e4m3fn"))
    values = np.array([-0.0, -1e-9, -(2.0**-11), -np.nan, np.nan], np.float32)
    assert reference.encode(values, "float8_e4m3fnuz", np.signbit(values)).tolist() == [0, 0, 0, 0x80, 0x80]


@pytest.mark.parametrize("source", ["float32", *NARROW, "int8"])
def test_int8_is_rint_within_symmetric_bounds_and_has_no_nan(source: str) -> None:
    values = all_as_float(source)
    want = np.clip(np.rint(np.where(np.isnan(values), 0, values)), -127, 127)
    assert np.array_equal(reference.encode(values, "int8", np.signbit(values)).view(np.int8), want)
    assert reference.decode(all_codes("int8"), "int8").tolist() == [*range(128), *range(-128, 0)]


def test_bfloat16_overflows_to_infinity() -> None:
    values = np.array([3.4e38, -3.4e38], np.float32)
    back = reference.decode(reference.encode(values, "bfloat16", np.signbit(values)), "bfloat16")
    assert back.tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize(
    ("dtype", "most"), [("float8_e4m3fn", 448), ("float8_e4m3fnuz", 240), ("float8_e5m2", 57344), ("int8", 127)]
)
def test_dynamic_scales_of_special_rows(dtype: str, most: int) -> None:
    rows = np.array([[1, -most], [0, 0], [np.nan, 1], [-np.inf, 1], [1e-45, 0]], np.float32)
    scale = reference.dynamic_scale(rows, dtype, (1,))
    largest = np.finfo(np.float32).max / np.float32(most)
    assert scale[:, 0].tolist() == [1.0, 2.0**-126, largest, largest, 2.0**-126]


@pytest.mark.parametrize("rule", ["reciprocal", "divide"])
def test_a_row_is_scaled_rounded_and_its_scale_stored(rule: str) -> None:
    x = np.array([0.1, -3.0, 7.0, 0.0], np.float32)
    out, scale = np.zeros(4, np.uint8), np.zeros(1, np.float32)

    def at(a: np.ndarray) -> np.ndarray:
        return np.array([a.ctypes.data], np.int64)

    convert = Convert(
        "float32", "float8_e4m3fn", 4, 1, rule=rule, dst_scale=at(scale), dst_scale_stride=(), dynamic=True
    )  # type: ignore[arg-type]
    reference.run(Tiles(at(x), at(out), (), (), (), 4, convert))
    s = np.float32(7) / np.float32(448)
    scaled = x / s if rule == "divide" else x * (np.float32(1) / s)
    assert scale[0] == s
    assert np.array_equal(out, torch_codes(torch.from_numpy(scaled), "float8_e4m3fn"))


def test_the_rule_changes_codes() -> None:
    x, s = np.arange(0x3F80, 0x4380, dtype=np.uint32) << 16, np.float32(0.0123)
    v = x.view(np.float32)
    by_reciprocal, by_division = v * (np.float32(1) / s), v / s
    assert (by_reciprocal != by_division).any()
