"""The definition of every kernel, in numpy and ml_dtypes: slow, plain, and right bit for bit.

For every tile and every index of `shape`, `run` bytes are copied, or a row of `run` elements is converted:

    v = float32(x)                                    exact
    v = v * s_src                                     when there is a source scale
    w = v * (1 / s_dst)   or   w = v / s_dst          when there is a target scale: rule "reciprocal" or "divide"
    w = float32(round(v / s_dst))                     rule "divide_source": rounded to the source's dtype
    code = round_to_nearest_even(clamp(w))

in IEEE float32, every operation rounded on its own (no fused multiply-add), subnormals kept everywhere.

* Targets float16, float8_e4m3fn, float8_e4m3fnuz, float8_e5m2 and int8 saturate: whatever lies beyond the largest
  finite value, infinity included, becomes that value (65504, 448, 240, 57344, 127). bfloat16 and float32 round to
  infinity as IEEE does.
* e4m3fn and e5m2 codes have the sign that multiplication gives, sign(x) xor sign(s_src) xor sign(s_dst), also where they are
  NaN; every NaN has the magnitude 0x7f. (torch writes the same e4m3fn and e5m2 codes for an unscaled NaN; ml_dtypes
  writes 0x7e for e5m2.)
* e4m3fnuz (bias 8, so that a code means half of what it means in e4m3fn) has one zero, 0x00, which negative zero and
  negative values that round to zero become too, and one NaN, 0x80, without a sign. Other codes have the sign above.
* int8 codes are the nearest whole numbers, ties to even, within +-127, so that the range is symmetric; the code -128 is
  read as -128. int8 has no NaN: NaN becomes 0.
* fp8 and fp16 NaN widen to quiet NaN: e4m3fn's and e4m3fnuz's without payload, fp16's (and e5m2's, which is a truncated fp16) with
  theirs. Narrowing to fp16 or bf16 keeps sign and top payload bits and sets the quiet bit. A NaN that a scale brings
  forth (0 * inf, or a scale of NaN) has the sign and payload that the CPU gives it, except in 8-bit targets, where it follows the rules above.
* Rule "divide_source" rounds the quotient as IEEE does (nearest even, overflow to infinity, NaN quiet) to bfloat16 or
  float16; for sources of other dtypes it is "divide". (A tensor that is divided in its own dtype before the cast, as
  SGLang's generic attention path does, gives these codes.)
* Dynamic target scales, for 8-bit targets: amax = the largest |v| of the row, compared as integer bits and then no more
  than the largest finite float32 (so that NaN and infinity count as that); s_dst = max(amax / MAX, floor) with
  MAX = 448, 240, 57344 or 127; with `pow2` the smallest power of two that is no less than that; stored, then used by
  `rule`.
* Scales in memory are float32, or float8_e8m0fnu: a byte c stands for 2**(c - 127), 0xff for NaN.

Formats: OCP 8-bit floating point specification 1.0 (e4m3fn, e5m2); Noune et al., 8-bit Numerical Formats for Deep
Neural Networks, 2022 (e4m3fnuz); OCP Microscaling formats 1.0 (e8m0); IEEE 754 binary16 and binary32, bfloat16 = the top
half of binary32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from regauge.layout.dtypes import DTYPES
from regauge.plan.tiles import Convert, Tiles

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.unsignedinteger[Any]]

ITEMSIZE: Mapping[str, int] = MappingProxyType({name: d.itemsize for name, d in DTYPES.items() if not d.opaque})
"""Bytes of one element of every dtype that the kernels convert."""

SCALE_ITEMSIZE: Mapping[str, int] = MappingProxyType({"float32": 4, "float8_e8m0fnu": 1})
"""Bytes of one scale of every dtype that scales are stored in."""

MAX_FINITE: Mapping[str, float] = MappingProxyType({n: DTYPES[n].max for n in ITEMSIZE if DTYPES[n].saturates})
"""Largest finite value of the dtypes that saturate."""

HALF_OVERFLOW = 65520.0
"""From here on IEEE rounds to float16's infinity; `encode` saturates."""

_FP8: Mapping[str, Any] = MappingProxyType(
    {
        "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
        "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "float8_e5m2": ml_dtypes.float8_e5m2,
    }
)


def run(tiles: Tiles) -> None:
    """Copy or convert all boxes of `tiles`, reading and writing the memory at their addresses."""
    for i in range(len(tiles.src)):
        if tiles.convert is None:
            shape = (*tiles.shape, tiles.run)
            source = memory(int(tiles.src[i]), shape, (*tiles.src_stride, 1))
            memory(int(tiles.dst[i]), shape, (*tiles.dst_stride, 1))[...] = source
        else:
            _convert_tile(tiles, tiles.convert, i)


def decode(codes: Codes, dtype: str) -> Float32:
    """Widen the bits of elements of `dtype` to float32, exactly."""
    if dtype == "float32":
        return codes.view(np.float32)
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return _from_half(codes)
    if dtype == "float8_e5m2":
        return _from_half(np.left_shift(codes, 8, dtype=np.uint16))
    if dtype == "int8":
        return codes.view(np.int8).astype(np.float32)
    wide = codes.view(_FP8[dtype]).astype(np.float32)
    if dtype == "float8_e4m3fnuz":
        return np.where(codes == 0x80, np.uint32(0x7FC00000), wide.view(np.uint32)).view(np.float32)
    sign = (codes.astype(np.uint32) & 0x80) << 24
    return np.where((codes & 0x7F) == 0x7F, sign | 0x7FC00000, wide.view(np.uint32)).view(np.float32)


def encode(w: Float32, dtype: str, negative: npt.NDArray[np.bool_]) -> Codes:
    """Narrow float32 to the bits of `dtype`: clamp, then round to nearest even. `negative`: the sign of fp8 codes."""
    bits = w.view(np.uint32)
    if dtype == "float32":
        return bits
    nan = np.isnan(w)
    if dtype == "bfloat16":
        with np.errstate(over="ignore"):
            rounded = np.where(nan, np.float32(0), w).astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.where(nan, (bits >> 16 | 0x40).astype(np.uint16), rounded)
    most = np.float32(MAX_FINITE[dtype])
    clamped = np.clip(np.where(nan, np.float32(0), w), -most, most)
    if dtype == "float16":
        payload = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x1FF)
        return np.where(nan, payload.astype(np.uint16), clamped.astype(np.float16).view(np.uint16))
    if dtype == "int8":
        whole: Codes = np.rint(clamped).astype(np.int8).view(np.uint8)
        return whole
    magnitude = np.abs(clamped).astype(_FP8[dtype]).view(np.uint8)
    sign = negative.astype(np.uint8) << 7
    code: Codes
    if dtype == "float8_e4m3fnuz":
        code = np.where(nan, np.uint8(0x80), np.where(magnitude == 0, np.uint8(0), magnitude | sign))
    else:
        code = np.where(nan, np.uint8(0x7F), magnitude) | sign
    return code


def decode_scale(codes: Codes, dtype: str) -> Float32:
    """Widen the bits of scales, float32 or float8_e8m0fnu, to float32."""
    if dtype == "float32":
        return codes.view(np.float32)
    bits = codes.astype(np.uint32) << 23
    bits = np.where(codes == 0, np.uint32(0x00400000), np.where(codes == 0xFF, np.uint32(0x7FC00000), bits))
    return bits.view(np.float32)


def encode_scale(scale: Float32, dtype: str) -> Codes:
    """Return the bits of scales that were computed; of powers of two where `dtype` is float8_e8m0fnu."""
    bits = np.ascontiguousarray(scale).view(np.uint32)
    return bits if dtype == "float32" else (bits >> 23).astype(np.uint8)


def dynamic_scale(
    v: Float32, dtype: str, axes: tuple[int, ...], floor: float = 2.0**-126, pow2: bool = False
) -> Float32:
    """Return the scale of every row of `v`; `axes` are the axes of one row, kept with length 1."""
    amax = (v.view(np.uint32) & 0x7FFFFFFF).max(axis=axes, keepdims=True, initial=0)
    finite = np.minimum(amax, np.uint32(0x7F7FFFFF)).view(np.float32)
    scale: Float32 = np.maximum(finite / np.float32(MAX_FINITE[dtype]), np.float32(floor))
    if pow2:
        scale = ((scale.view(np.uint32) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)).view(np.float32)
    return scale


def _quotient(v: Float32, s: Float32, c: Convert) -> Float32:
    if c.rule == "reciprocal":
        return v * (np.float32(1) / s)
    w = v / s
    if c.rule == "divide" or c.src_dtype not in ("bfloat16", "float16"):
        return w
    rounded = decode(encode(w, c.src_dtype, np.signbit(w)), c.src_dtype)
    if c.src_dtype == "bfloat16":
        return rounded
    return np.where(np.abs(w) >= HALF_OVERFLOW, np.copysign(np.float32(np.inf), w), rounded)


def _from_half(codes: Codes) -> Float32:
    half = codes.astype(np.uint16)
    wide = half.view(np.float16).astype(np.float32).view(np.uint32)
    quiet = (half.astype(np.uint32) & 0x8000) << 16 | 0x7FC00000 | (half.astype(np.uint32) & 0x3FF) << 13
    return np.where((half & 0x7FFF) > 0x7C00, quiet, wide).view(np.float32)


def _convert_tile(t: Tiles, c: Convert, i: int) -> None:
    shape = (*t.shape, t.run)
    codes = _load(int(t.src[i]), shape, (*t.src_stride, c.src_step), ITEMSIZE[c.src_dtype])
    if codes.size == 0:
        return
    x = decode(codes, c.src_dtype)
    negative = np.signbit(x)
    row = tuple(range(len(t.shape) - c.row_axes, len(shape)))
    with np.errstate(all="ignore"):
        v = x
        if c.src_scale is not None:
            s = _load_scale(int(c.src_scale[i]), shape, c.src_scale_stride, c.src_scale_dtype)
            v, negative = v * s, negative ^ np.signbit(s)
        w = v
        if c.dst_scale is not None:
            at, stride, dtype = int(c.dst_scale[i]), c.dst_scale_stride, c.dst_scale_dtype
            if c.dynamic:
                scale = dynamic_scale(v, c.dst_dtype, row, c.floor, c.pow2)
                _store(at, shape, (*stride, 0), encode_scale(np.broadcast_to(scale, shape), dtype))
            s = _load_scale(at, shape, stride, dtype)
            w = _quotient(v, s, c)
            negative = negative ^ np.signbit(s)
        out = encode(w, c.dst_dtype, negative)
    _store(int(t.dst[i]), shape, (*t.dst_stride, c.dst_step), out)


def memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """Return a view of the bytes at `address`; strides in bytes may have any sign, and addresses any alignment."""
    first = np.frombuffer(memoryview((ctypes.c_uint8 * 1).from_address(address)), dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(first, shape, strides)


def _load(address: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> Codes:
    raw = np.ascontiguousarray(memory(address, (*shape, size), (*strides, 1)))
    codes: Codes = raw.view(np.dtype(f"u{size}"))[..., 0]
    return codes


def _load_scale(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Float32:
    return decode_scale(_load(address, shape, (*strides, 0), SCALE_ITEMSIZE[dtype]), dtype)


def _store(address: int, shape: tuple[int, ...], strides: tuple[int, ...], codes: Codes) -> None:
    size = codes.dtype.itemsize
    raw = np.ascontiguousarray(codes)[..., np.newaxis].view(np.uint8)
    memory(address, (*shape, size), (*strides, 1))[...] = raw
