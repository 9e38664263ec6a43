"""The right answer: what any plan must do, element by element, in plain numpy.

Independent of the planner: it asks the views for the address of every single element, reads it, converts it by the format
definition, and writes it. Slow on purpose; every fast path must agree with it byte for byte.

Arithmetic, in IEEE float32: v = float(code) [* source scale]; w = v * (1 / s) or v / s by the target's rule; the code is w
rounded to nearest even, saturated where the dtype saturates; NaN stays NaN, and becomes 0 in int8, which has none. float8_e4m3fnuz has no
negative zero: what would be one is 0. int8 codes are whole numbers of -127 .. 127 (-128 is read as it is). A dynamic scale is s = max(amax / MAX, 2^-126), where amax is the
largest |v| of the row as an integer comparison of bits, at most FLT_MAX. 2^-126 stands for the format's own floor, a row
is what one scale covers, and formats with `pow2` round the scale up to a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from regauge.layout.dtypes import DTYPES
from regauge.layout.elements import NUMPY_DTYPES
from regauge.layout.spec import Component, Group, Layout, Scale, Shard, scale_table
from regauge.layout.view import View, component_view, scale_view
from regauge.plan.boxes import Side
from regauge.plan.tiles import Int64

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
FLT_MAX_BITS = np.uint32(0x7F7FFFFF)


def holds(shard: Shard, token: int) -> bool:
    """Say whether a context-parallel rank holds a token."""
    return token // shard.cp_stripe % shard.cp_size == shard.cp_rank


def places(shard: Shard, origin: int, tokens: list[int]) -> Int64:
    """Return the place of each of a rank's tokens among those from `origin` on, counted one by one, int64[n]."""
    count, out = 0, {}
    for token in range(origin, max(tokens, default=origin) + 1):
        if holds(shard, token):
            out[token] = count
            count += 1
    return np.array([out[t] for t in tokens], np.int64)


def addresses(view: View, group: Group, side: Side, position: Int64, layers: tuple[int, ...]) -> Int64:
    """Return the address of every element, int64[layers, tokens, heads, dim], of tokens at places `position` of the pages."""
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
    size = np.dtype(NUMPY_DTYPES[dtype]).itemsize
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


def dynamic_scale(values: Floats, dtype: str, scale: Scale) -> Floats:
    """Return the scale of each row (last axis) as the format defines it, float32[...]."""
    bits = np.ascontiguousarray(values).view(np.uint32) & np.uint32(0x7FFFFFFF)
    amax = np.minimum(bits.max(axis=-1), FLT_MAX_BITS).view(np.float32)
    least = np.maximum(amax / np.float32(DTYPES[dtype].max), np.float32(scale.floor))
    if not scale.pow2:
        return np.asarray(least, np.float32)
    mantissa, exponent = np.frexp(least)
    return np.asarray(np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent)), np.float32)


def apply_scale(values: Floats, scale: Floats, rule: str, source: str) -> Floats:
    """Divide float32 values, which came in dtype `source`, by their scale, as the rule says."""
    with np.errstate(over="ignore", invalid="ignore"):
        if rule == "reciprocal":
            return values * (np.float32(1.0) / scale)
        out = values / scale
        rounds = rule == "divide_source" and source in ("bfloat16", "float16")
        return out.astype(NUMPY_DTYPES[source]).astype(np.float32) if rounds else out


def transfer(
    prefill: Layout, decode: Layout, source: Bytes, target: Bytes, src: Side, dst: Side, tokens: tuple[int, int],
    *, pair: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Carry tokens [first, end), of every layer and head that both ranks hold, from `source` to `target`.

    Region bases in `src` and `dst` are offsets into the two arrays. `pair`: one pair of groups only.
    """
    for j, b_group in enumerate(decode.groups):
        for i, a_group in enumerate(prefill.groups):
            layers = tuple(sorted(set(a_group.layer_ids) & set(b_group.layer_ids)))
            if a_group.kind != b_group.kind or not layers or pair not in (None, (i, j)):
                continue
            common = [t for t in range(*tokens) if holds(prefill.shard, t) and holds(decode.shard, t)]
            if not common:
                continue
            from_, to = places(prefill.shard, src.origin, common), places(decode.shard, dst.origin, common)
            for b in b_group.components:
                a = next((c for c in a_group.components if c.name == b.name), None)
                if a is None:
                    continue
                ours, theirs = prefill.heads(a_group, a), decode.heads(b_group, b)
                heads = [h for h in theirs if h in ours]
                if not heads:
                    continue
                read = _Reader(a_group, a, source, src, from_, layers, [h - ours[0] for h in heads])
                write = _Reader(b_group, b, target, dst, to, layers, [h - theirs[0] for h in heads])
                _carry(read, write)


class _Reader:
    """One component on one side: the addresses of the elements of a transfer, and of their scales."""

    def __init__(
        self, group: Group, component: Component, memory: Bytes, side: Side, position: Int64, layers: tuple[int, ...],
        heads: list[int],
    ) -> None:  # fmt: skip
        self.component = component
        self.memory = memory
        self.where = addresses(component_view(group, component), group, side, position, layers)[:, :, heads]
        scale = component.scale
        self.scale = scale
        self.stored: Int64 | None = None
        self.constant: Floats | None = None
        if scale is not None and scale.at is not None:
            self.stored = addresses(scale_view(group, component), group, side, position, layers)[:, :, heads]
        elif scale is not None:
            rows = np.array(scale_table(scale, len(group.layer_ids), component.heads), np.float32)
            picked = rows[[group.layer_ids.index(x) for x in layers]][:, heads]
            self.constant = np.repeat(picked[:, None, :, None], len(position), axis=1)

    def scales(self) -> Floats | None:
        """Return the scale of every element, float32[layers, tokens, heads, dim or 1]; None without scales."""
        if self.stored is None or self.scale is None:
            return self.constant
        stored = load(self.memory, self.stored, self.scale.dtype).astype(np.float32)
        return np.repeat(stored, self.component.dim // stored.shape[-1], axis=-1)


def _carry(a: _Reader, b: _Reader) -> None:
    codes = load(a.memory, a.where, a.component.dtype)
    scales, own = a.scales(), b.constant
    both = a.stored is not None and b.stored is not None and a.stored.shape == b.stored.shape
    both = both and a.scale is not None and b.scale is not None and a.scale.dtype == b.scale.dtype
    if a.component.dtype == b.component.dtype and (
        both or (a.stored is None and b.stored is None and _equal(scales, own))
    ):
        store(b.memory, b.where, codes)
        if both and a.stored is not None and b.stored is not None and a.scale is not None:
            store(b.memory, b.stored, load(a.memory, a.stored, a.scale.dtype))
        return
    with np.errstate(invalid="ignore", over="ignore"):
        values = codes.astype(np.float32)
        if scales is not None and not (a.stored is None and (scales == 1.0).all()):
            values = values * scales
    if b.stored is not None and b.scale is not None:
        rows = values.reshape(*values.shape[:-1], b.stored.shape[-1], -1)
        made = dynamic_scale(rows, b.component.dtype, b.scale)
        store(b.memory, b.stored, made.astype(NUMPY_DTYPES[b.scale.dtype]))
        own = np.repeat(made, values.shape[-1] // made.shape[-1], axis=-1)
    if own is not None and b.scale is not None and (b.stored is not None or not (own == 1.0).all()):
        values = apply_scale(values, own, b.scale.rule, a.component.dtype)
    store(b.memory, b.where, encode(values, b.component.dtype))


def _equal(a: Floats | None, b: Floats | None) -> bool:
    one = np.float32(1.0)
    return bool(np.all((one if a is None else a) == (one if b is None else b)))


def side_of(memory: Bytes, bases: Mapping[str, int], pages: Int64, origin: int = 0) -> Side:
    """Return a side whose bases are absolute addresses of offsets into `memory`, for kernels."""
    start = memory.ctypes.data
    return Side(pages, {name: start + offset for name, offset in bases.items()}, origin)
