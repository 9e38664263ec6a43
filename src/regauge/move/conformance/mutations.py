"""Does the suite notice? A sender is told something wrong about its own cache, and every such pair must come out as a fault.

These are the mistakes that engines make without noticing (see `tests/move/test_bug_reports.py`): a page table that is off, a
format that has the same name and other bytes, a scale that was not sent. A suite that cannot fail proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec
import numpy as np

from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Component, Layout, Placement, Rope, Scale, Shard
from regauge.move.conformance.pools import Pool, element_addresses
from regauge.move.conformance.suite import Source, run_pair, source

_MODEL = attention_model("self-test", 2, Array(4, 16), rope=Rope(10000.0, 16))


def _components(layout: Layout, change: Callable[[Component], Component]) -> Layout:
    groups = [msgspec.structs.replace(g, components=[change(c) for c in g.components]) for g in layout.groups]
    return msgspec.structs.replace(layout, groups=groups)


def _told(change: Callable[[Layout], Layout]) -> Callable[[Source], Source]:
    return lambda right: replace(right, told=tuple(change(layout) for layout in right.told))


def _component(change: Callable[[Component], Component]) -> Callable[[Source], Source]:
    return _told(lambda layout: _components(layout, change))


def _table(change: Callable[[Pool], tuple[np.ndarray, int]]) -> Callable[[Source], Source]:
    return lambda right: replace(right, pools=tuple(replace(pool, tables=(change(pool),)) for pool in right.pools))


def _swapped(pool: Pool) -> tuple[np.ndarray, int]:
    table, origin = pool.tables[0]
    return np.concatenate([table[:-2], table[-1:], table[-2:-1]]), origin


def _foreign(pool: Pool) -> tuple[np.ndarray, int]:
    table, origin = pool.tables[0]
    return np.concatenate([table[:-1], np.zeros(1, np.int64)]), origin


def _placed(order: Callable[[str], str]) -> Callable[[Component], Component]:
    return lambda c: msgspec.structs.replace(c, at=msgspec.structs.replace(c.at, order=order(c.at.order)))


def _exchanged(layout: Layout) -> Layout:
    k, v = layout.groups[0].components
    groups = [
        msgspec.structs.replace(
            layout.groups[0], components=[msgspec.structs.replace(k, at=v.at), msgspec.structs.replace(v, at=k.at)]
        )
    ]
    return msgspec.structs.replace(layout, groups=groups)


def _layers(layout: Layout) -> Layout:
    return msgspec.structs.replace(layout, groups=[msgspec.structs.replace(layout.groups[0], layers="1,0")])


def _unscaled(c: Component) -> Component:
    return msgspec.structs.replace(c, scale=Scale("tensor", values=1.0, rule="divide"))


def _scales_elsewhere(c: Component) -> Component:
    if c.scale is None:
        return c
    at = Placement("layer page head token", f"{c.name}_scale")
    return msgspec.structs.replace(c, scale=msgspec.structs.replace(c.scale, at=at))


def _one_bit(right: Source) -> Source:
    """Flip the lowest bit of one element of the last token in the sender's memory."""
    pool = right.pools[0].copy()
    where, _ = element_addresses(pool, 0, pool.layout.groups[0].components[1])
    pool.memory[where[1, -1, -1, -1]] ^= 1
    return replace(right, pools=(pool, *right.pools[1:]))


def _ranks_exchanged(right: Source) -> Source:
    return replace(right, told=tuple(reversed(right.told)))


def _no_rotation(layout: Layout) -> Layout:
    states = [msgspec.structs.replace(s, rope=None) for s in layout.model.states]
    return msgspec.structs.replace(layout, model=msgspec.structs.replace(layout.model, states=states))


_PLANTED: Mapping[str, tuple[str, int, str, Callable[[Source], Source]]] = MappingProxyType(
    {
        "two pages exchanged": ("bf16,page=16", 1, "bf16,page=16", _table(_swapped)),
        "two pages exchanged before a conversion": ("bf16,page=16", 1, "fp8_e4m3,page=24", _table(_swapped)),
        "a page of another request": ("bf16,page=16", 1, "bf16,page=64,hnd", _table(_foreign)),
        "a page table that starts a token later": (
            "bf16,page=16", 1, "bf16,page=16", _table(lambda pool: (pool.tables[0][0], 1))),
        "a page table that starts a page later": (
            "bf16,page=32", 1, "bf16,page=16", _table(lambda pool: (pool.tables[0][0], 32))),
        "HND told as NHD": (
            "bf16,hnd", 1, "bf16", _component(_placed(lambda o: o.replace("head token", "token head")))),
        "K exchanged with V": ("bf16", 1, "bf16,page=64", _told(_exchanged)),
        "layers exchanged": ("bf16,page-first", 1, "bf16", _told(_layers)),
        "ranks exchanged": ("bf16", 2, "bf16", _ranks_exchanged),
        "e4m3fn told as e4m3fnuz": (
            "fp8_e4m3", 1, "bf16", _component(lambda c: msgspec.structs.replace(c, dtype="float8_e4m3fnuz"))),
        "e4m3fn told as e5m2": (
            "fp8_e4m3", 1, "fp16", _component(lambda c: msgspec.structs.replace(c, dtype="float8_e5m2"))),
        "fp16 told as bf16": ("fp16", 1, "fp32", _component(lambda c: msgspec.structs.replace(c, dtype="bfloat16"))),
        "a scale told as 1.0": ("fp8_e4m3,scale=tensor", 1, "bf16", _component(_unscaled)),
        "stored scales told in another order": (
            "fp8_e4m3,scale=token_head", 1, "bf16", _component(_scales_elsewhere)),
        "one bit of one element changed": ("bf16", 1, "bf16,page=64,kt", _one_bit),
        "keys told as not rotated": ("bf16", 1, "bf16", _told(_no_rotation)),
    }
)  # fmt: skip
"""What is told wrong: the prefill form, its ranks, the decode form, and the change."""


def names() -> tuple[str, ...]:
    """Return what can be told wrong."""
    return tuple(_PLANTED)


def noticed(name: str, seed: int = 0) -> tuple[str, str]:
    """Return what the suite says of a pair told right, and of the same pair told wrong.

    The first must be empty and the second must not; keys told as not rotated are refused, by cause.
    """
    form, tp, other, change = _PLANTED[name]
    prefill = [_calibrated(from_short(form, _MODEL, shard=Shard(rank, tp))) for rank in range(tp)]
    decode: Sequence[Layout] = [from_short(other, _MODEL)]
    right = source(name, prefill, seed)
    wrong = run_pair(change(right), other, decode, seed)
    return run_pair(right, other, decode, seed).fault, wrong.fault or wrong.cause


def _calibrated(layout: Layout) -> Layout:
    """Give constant scales values other than 1."""

    def change(c: Component) -> Component:
        if c.scale is None or c.scale.values is None:
            return c
        return msgspec.structs.replace(c, scale=Scale("tensor", values=[0.37, 2.9], rule="divide"))

    return _components(layout, change)
