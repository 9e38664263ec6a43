"""Encoders and decoders of every dtype, in 32-bit integers: what `regauge.move.reference` defines, bit for bit.

No float8 type of the language is used: which casts a GPU has, and how they round, differs between chips and
compiler releases; integers do not. Values travel as the bits of a float32, in int32. Comparisons are of magnitudes
(sign bit cleared), so that signed integers order them as unsigned ones would.

The one addition that rounds takes both operands out of integer operations, so no compiler can fuse it with the
multiplication before it; flushing subnormals there changes nothing, as they round to zero in every narrow format.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bits_of(value: tl.tensor) -> tl.tensor:
    """Return the bits of float32 as int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits: tl.tensor) -> tl.tensor:
    """Return the float32 that int32 bits are."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _widen(code: tl.tensor, mantissa: tl.constexpr, least: tl.constexpr) -> tl.tensor:
    """Widen magnitudes without special codes; `least` is the exponent of the smallest normal number."""
    subnormal = code.to(tl.float32) * (2.0 ** (least - mantissa))
    normal = (code << (23 - mantissa)) + ((least + 126) << 23)
    return tl.where(code < (1 << mantissa), bits_of(subnormal), normal)


@triton.jit
def _from_half(code: tl.tensor) -> tl.tensor:
    magnitude = code & 0x7FFF
    special = 0x7F800000 | ((magnitude & 0x3FF) << 13) | tl.where(magnitude > 0x7C00, 0x400000, 0)
    wide = tl.where(magnitude >= 0x7C00, special, _widen(magnitude, 10, -14))
    return wide | ((code & 0x8000) << 16)


@triton.jit
def decode(code: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Widen codes (int32, zero above the dtype's bits) to the bits of float32, exactly."""
    if dtype == "float32":
        wide = code
    elif dtype == "bfloat16":
        wide = code << 16
    elif dtype == "float16":
        wide = _from_half(code)
    elif dtype == "float8_e5m2":
        wide = _from_half(code << 8)
    elif dtype == "int8":
        wide = bits_of(((code ^ 0x80) - 0x80).to(tl.float32))
    elif dtype == "float8_e4m3fnuz":
        wide = _widen(code & 0x7F, 3, -7) | ((code & 0x80) << 24)
        wide = tl.where(code == 0x80, 0x7FC00000, wide)
    else:
        tl.static_assert(dtype == "float8_e4m3fn")
        magnitude = code & 0x7F
        wide = tl.where(magnitude == 0x7F, 0x7FC00000, _widen(magnitude, 3, -6)) | ((code & 0x80) << 24)
    return wide


@triton.jit
def _narrow(magnitude: tl.tensor, most: tl.constexpr, mantissa: tl.constexpr, least: tl.constexpr) -> tl.tensor:
    """Clamp to the bits `most` and round to nearest even, subnormals included.

    With 2^E the power of two at or below the value, but at least 2^least, adding 2^(E + 23 - mantissa) rounds
    at the bit wanted. What lies above that power in the sum is the code's fraction with its leading one, if it has one.
    """
    value = tl.minimum(magnitude, most)
    power = tl.maximum(value & 0x7F800000, (least + 127) << 23)
    magic = power + ((23 - mantissa) << 23)
    fraction = bits_of(float_of(value) + float_of(magic)) - magic
    return ((power - ((least + 127) << 23)) >> (23 - mantissa)) + fraction


@triton.jit
def encode(wide: tl.tensor, negative: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Narrow the bits of float32 to codes in int32: clamp, then round to nearest even.

    `negative` (bool) is the sign of 8-bit codes; the others keep the value's own.
    """
    magnitude = wide & 0x7FFFFFFF
    nan = magnitude > 0x7F800000
    if dtype == "float32":
        code = wide
    elif dtype == "bfloat16":
        rounded = (tl.minimum(magnitude, 0x7F800000) + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
        code = tl.where(nan, (magnitude >> 16) | 0x40, rounded) | ((wide >> 16) & 0x8000)
    elif dtype == "float16":
        rounded = _narrow(magnitude, 0x477FE000, 10, -14)
        code = tl.where(nan, 0x7E00 | ((magnitude >> 13) & 0x1FF), rounded) | ((wide >> 16) & 0x8000)
    elif dtype == "int8":
        whole = bits_of(float_of(tl.minimum(magnitude, 0x42FE0000)) + 8388608.0) - 0x4B000000
        whole = tl.where(nan, 0, whole)
        code = tl.where(negative, -whole, whole) & 0xFF
    elif dtype == "float8_e4m3fnuz":
        code = _narrow(magnitude, 0x43700000, 3, -7)
        code = tl.where(nan, 0x80, tl.where(negative & (code != 0), code | 0x80, code))
    elif dtype == "float8_e5m2":
        code = tl.where(nan, 0x7F, _narrow(magnitude, 0x47600000, 2, -14)) | tl.where(negative, 0x80, 0)
    else:
        tl.static_assert(dtype == "float8_e4m3fn")
        code = tl.where(nan, 0x7F, _narrow(magnitude, 0x43E00000, 3, -6)) | tl.where(negative, 0x80, 0)
    return code


@triton.jit
def round_to(wide: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round the bits of float32 to bfloat16 or float16 as IEEE does, beyond whose range lies infinity."""
    rounded = decode(encode(wide, wide < 0, dtype), dtype)
    if dtype == "float16":
        magnitude = wide & 0x7FFFFFFF
        beyond = (magnitude >= 0x477FF000) & (magnitude <= 0x7F800000)
        rounded = tl.where(beyond, (wide & -0x80000000) | 0x7F800000, rounded)
    return rounded


@triton.jit
def decode_scale(code: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Widen scales to float32: float32 bits (`size` 4), or float8_e8m0fnu codes (1): 2^(code - 127), 0xff for NaN."""
    if size == 1:
        code = tl.where(code == 0, 0x00400000, tl.where(code == 0xFF, 0x7FC00000, code << 23))
    return float_of(code)


@triton.jit
def encode_scale(scale: tl.tensor, size: tl.constexpr) -> tl.tensor:
    """Return the code of computed scales; of powers of two where `size` is 1."""
    bits = bits_of(scale)
    if size == 1:
        bits = bits >> 23
    return bits


@triton.jit
def _settle(result: tl.tensor, left: tl.tensor, right: tl.tensor) -> tl.tensor:
    """Give NaN the bits that IEEE arithmetic on x86 gives it: the quieted operand's, the left one's first.

    GPUs differ: NVIDIA's return 0x7fffffff whatever the operands.
    """
    a, b = bits_of(left), bits_of(right)
    made = tl.where((b & 0x7FFFFFFF) > 0x7F800000, b | 0x400000, -0x400000)
    nan = tl.where((a & 0x7FFFFFFF) > 0x7F800000, a | 0x400000, made)
    bits = bits_of(result)
    return float_of(tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, bits))


@triton.jit
def product(left: tl.tensor, right: tl.tensor, nan_bits: tl.constexpr) -> tl.tensor:
    """Multiply float32; with `nan_bits` NaN is settled, which only targets wider than 8 bits can tell."""
    result = left * right
    if nan_bits:
        result = _settle(result, left, right)
    return result


@triton.jit
def quotient(left: tl.tensor, right: tl.tensor, nan_bits: tl.constexpr) -> tl.tensor:
    """Divide float32, rounded to nearest: a plain `/` is an approximation on some GPUs."""
    result = tl.math.div_rn(left, right)
    if nan_bits:
        result = _settle(result, left, right)
    return result
