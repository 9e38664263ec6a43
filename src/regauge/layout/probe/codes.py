"""Between numbers and the bytes of a cache, as the formats define them: what the probe expects to find.

Plain numpy and ml_dtypes, every operation rounded on its own in float32. Sources of the formats: `regauge.layout.dtypes`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regauge.layout.dtypes import DTYPES
from regauge.layout.elements import NUMPY_DTYPES
from regauge.layout.spec import Rule, Scale

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def encode(values: Floats, dtype: str) -> Bytes:
    """Round numbers to a dtype, to nearest even and saturated where it saturates; uint8[..., itemsize], little-endian."""
    info = DTYPES.get(dtype)
    if info is not None and info.saturates:
        values = np.clip(values, -info.max, info.max)
    if info is not None and info.whole:
        values = np.rint(values)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = np.ascontiguousarray(values.astype(NUMPY_DTYPES[dtype]))
    return codes[..., None].view(np.uint8)


def decode(raw: Bytes, dtype: str) -> Floats:
    """Widen the bytes of elements, uint8[..., itemsize], to float32."""
    values: Floats = np.ascontiguousarray(raw).view(NUMPY_DTYPES[dtype])[..., 0].astype(np.float32)
    return values


def rounded(values: Floats, dtype: str) -> Floats:
    """Return what is left of numbers that pass through a dtype."""
    return values if dtype == "float32" else decode(encode(values, dtype), dtype)


def quotient(values: Floats, scale: Floats, rule: Rule, source: str) -> Floats:
    """Divide by the scale as the rule says; `source` is the dtype that the values came in."""
    with np.errstate(over="ignore", invalid="ignore"):
        if rule == "reciprocal":
            return values * (np.float32(1.0) / scale)
        return rounded(values / scale, source) if rule == "divide_source" else values / scale


def computed_scale(amax: Floats, dtype: str, scale: Scale) -> Floats:
    """Return the scale that a cache of `dtype` stores for a largest magnitude."""
    out: Floats = np.maximum(amax / np.float32(DTYPES[dtype].max), np.float32(scale.floor))
    if scale.pow2:
        fraction, exponent = np.frexp(out)  # out = fraction * 2**exponent, fraction in [0.5, 1)
        out = np.ldexp(np.float32(1.0), exponent - (fraction == 0.5)).astype(np.float32)
    return out
