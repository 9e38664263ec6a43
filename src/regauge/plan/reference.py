"""The right answer: what any plan must do, element by element, in plain numpy.

Independent of the planner: it asks the views for the address of every single element, reads it, converts it by the format
definition, and writes it. Slow on purpose; every fast path must agree with it byte for byte.

Arithmetic, in IEEE float32: v = float(code) [* source scale]; w = v * (1 / s) or v / s by the target's rule; the code is w
rounded to nearest even, saturated where the dtype saturates; NaN stays NaN, and becomes 0 in int8, which has none. float8_e4m3fnuz has no
negative zero: what would be one is 0. int8 codes are whole numbers of -127 .. 127 (-128 is read as it is). A dynamic scale is s = max(amax / MAX, 2^-126), where amax is the
largest |v| of the row as an integer comparison of bits, at most FLT_MAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Component, Group, Layout, scale_table
from regauge.layout.view import View, component_view, scale_view
from regauge.plan.planner import Side
from regauge.plan.tiles import Int64

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
FLT_MIN = np.float32(2.0**-126)
FLT_MAX_BITS = np.uint32(0x7F7FFFFF)

NUMPY_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}


def addresses(view: View, group: Group, side: Side, tokens: tuple[int, int], layers: tuple[int, ...]) -> Int64:
    """Return the address of every element, int64[layers, tokens, heads, dim]."""
    position = np.arange(*tokens) - side.origin
    base = view.layer_bases(group.layer_ids, layers, side.bases)
    token = side.pages[position // group.page_size] * view.page_stride + view.token[position % group.page_size]
    return (
        base[:, None, None, None]
        + token[None, :, None, None]
        + view.head[None, None, :, None]
        + view.dim[None, None, None, :]
    )


def load(memory: Bytes, where: Int64, dtype: str) -> npt.NDArray[Any]:
    """Read one element per offset into `memory`."""
    size = DTYPES[dtype].itemsize
    raw = memory[where[..., None] + np.arange(size)]
    values: npt.NDArray[Any] = np.ascontiguousarray(raw).view(NUMPY_DTYPES[dtype])[..., 0]
    return values


def store(memory: Bytes, where: Int64, values: npt.NDArray[Any]) -> None:
    """Write one element per offset into `memory`."""
    raw = np.ascontiguousarray(values)[..., None].view(np.uint8)
    memory[where[..., None] + np.arange(raw.shape[-1])] = raw


def encode(values: Floats, dtype: str) -> npt.NDArray[Any]:
    """Round float32 values to a dtype: nearest even, saturated where the dtype saturates; NaN kept, or 0 in int8."""
    info = DTYPES[dtype]
    if info.saturates:
        values = np.where(np.isnan(values), values, np.clip(values, -info.max, info.max)).astype(np.float32)
    if info.whole:
        values = np.rint(np.where(np.isnan(values), np.float32(0), values))
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(NUMPY_DTYPES[dtype])


def dynamic_scale(values: Floats, dtype: str) -> Floats:
    """Return the scale of each row (last axis) as the format defines it, float32[...]."""
    bits = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)
    amax = np.minimum(bits.max(axis=-1), FLT_MAX_BITS).view(np.float32)
    scale: Floats = np.maximum(amax / np.float32(DTYPES[dtype].max), FLT_MIN)
    return scale


def apply_scale(values: Floats, scale: Floats, rule: str) -> Floats:
    """Divide float32 values by their scale, as the rule says."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values * (np.float32(1.0) / scale) if rule == "reciprocal" else values / scale


def transfer(
    prefill: Layout, decode: Layout, source: Bytes, target: Bytes, src: Side, dst: Side, tokens: tuple[int, int]
) -> None:
    """Carry tokens [first, end) of every layer that both sides hold from `source` to `target`.

    Region bases in `src` and `dst` are offsets into the two arrays.
    """
    for b_group in decode.groups:
        for a_group in prefill.groups:
            layers = tuple(sorted(set(a_group.layer_ids) & set(b_group.layer_ids)))
            if a_group.kind != b_group.kind or not layers:
                continue
            for b in b_group.components:
                a = next(c for c in a_group.components if c.name == b.name)
                heads = [h - prefill.heads[0] for h in decode.heads]
                where = addresses(component_view(a_group, a), a_group, src, tokens, layers)[:, :, heads]
                to = addresses(component_view(b_group, b), b_group, dst, tokens, layers)
                codes = load(source, where, a.dtype)
                scales = _scales(a_group, a, source, src, tokens, layers)
                scales = None if scales is None else scales[:, :, heads]
                _write(b_group, b, target, dst, tokens, layers, to, (a, codes, scales))


def _write(
    group: Group, b: Component, target: Bytes, dst: Side, tokens: tuple[int, int], layers: tuple[int, ...],
    to: Int64, source: tuple[Component, npt.NDArray[Any], Floats | None],
) -> None:  # fmt: skip
    a, codes, scales = source
    stored = b.scale is not None and b.scale.at is not None
    own = None if stored else _scales(group, b, target, dst, tokens, layers)
    both_stored = stored and a.scale is not None and a.scale.at is not None
    same = both_stored or (not stored and (a.scale is None or a.scale.at is None) and _equal(scales, own))
    if a.dtype == b.dtype and same:
        store(target, to, codes)
        if both_stored and scales is not None:
            store(target, addresses(scale_view(group, b), group, dst, tokens, layers)[..., 0], scales)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        values = codes.astype(np.float32)
        if scales is not None and not (a.scale is not None and a.scale.at is None and (scales == 1.0).all()):
            values = values * scales[..., None]
    if stored:
        own = dynamic_scale(values, b.dtype)
        store(target, addresses(scale_view(group, b), group, dst, tokens, layers)[..., 0], own)
    if own is not None and (stored or not (own == 1.0).all()):
        values = apply_scale(values, own[..., None], b.scale.rule if b.scale else "reciprocal")
    store(target, to, encode(values, b.dtype))


def _scales(
    group: Group, component: Component, memory: Bytes, side: Side, tokens: tuple[int, int], layers: tuple[int, ...]
) -> Floats | None:
    """Return the scale of every (layer, token, head), float32[layers, tokens, heads]; None without scales."""
    scale = component.scale
    if scale is None:
        return None
    if scale.at is not None:
        where = addresses(scale_view(group, component), group, side, tokens, layers)[..., 0]
        return load(memory, where, "float32")
    rows = np.array(scale_table(scale, len(group.layer_ids), component.heads), np.float32)
    picked = rows[[group.layer_ids.index(x) for x in layers]]
    return np.repeat(picked[:, None, :], tokens[1] - tokens[0], axis=1)


def _equal(a: Floats | None, b: Floats | None) -> bool:
    one = np.float32(1.0)
    return bool(np.all((one if a is None else a) == (one if b is None else b)))


def side_of(memory: Bytes, bases: Mapping[str, int], pages: Int64, origin: int = 0) -> Side:
    """Return a side whose bases are absolute addresses of offsets into `memory`, for kernels."""
    start = memory.ctypes.data
    return Side(pages, {name: start + offset for name, offset in bases.items()}, origin)
