"""Does the suite notice? A sender is told something wrong about its own cache, and each such pair must come out with a wrong
element named, or, where the mistake is in the model, refused for that cause: neither an exception nor another refusal counts.

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
from regauge.layout.spec import Array, Component, Layout, Placement, Rope, Scale, Shard, with_components
from regauge.move.conformance.catalogue import calibrated
from regauge.move.conformance.pools import Pool, element_addresses
from regauge.move.conformance.suite import Outcome, Source, run_pair, source

_MODEL = attention_model("self-test", 2, Array(4, 16), rope=Rope(10000.0, 16))


def _told(change: Callable[[Layout], Layout]) -> Callable[[Source], Source]:
    return lambda right: replace(right, told=tuple(change(layout) for layout in right.told))


def _component(change: Callable[[Component], Component]) -> Callable[[Source], Source]:
    return _told(lambda layout: with_components(layout, change))


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
    others = reversed(right.told)
    told = (msgspec.structs.replace(x, shard=other.shard) for x, other in zip(right.told, others, strict=True))
    return replace(right, told=tuple(told))


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
_REFUSED: Mapping[str, str] = MappingProxyType({"keys told as not rotated": "the same name for another model"})
"""The cause for which a pair told wrong is refused; others are carried, and an element differs."""


def names() -> tuple[str, ...]:
    """Return what can be told wrong."""
    return tuple(_PLANTED)


def tried(name: str, seed: int = 0) -> tuple[str, str]:
    """Return what is wrong with a pair told right, and why the same pair told wrong is not noticed: both empty, if all is well."""
    form, tp, other, change = _PLANTED[name]
    prefill = [calibrated(from_short(form, _MODEL, shard=Shard(rank, tp))) for rank in range(tp)]
    decode: Sequence[Layout] = [from_short(other, _MODEL)]
    right = source(name, prefill, seed)
    return run_pair(right, other, decode, seed).fault, missed(name, run_pair(change(right), other, decode, seed))


def missed(name: str, found: Outcome) -> str:
    """Return why an outcome does not show that the mistake was noticed; empty if it does."""
    cause = _REFUSED.get(name, "")
    if cause:
        noticed = (found.path, found.cause, found.fault) == ("REFUSED", cause, "")
    else:
        noticed = found.path != "REFUSED" and ": expected " in found.fault
    return "" if noticed else f"{found.path} {found.cause or 'for no cause'}, {found.fault or 'and no element differs'}"
