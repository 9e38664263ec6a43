"""Runs one pair of sides in every way the product has, and compares with the reference.

The right answer does not come from the plan: a pool with everything is made in the format of the prefill side, and the
reference writes it, element by element, into the prefill ranks (that is what is carried) and into copies of the decode ranks
(that is what must be there in the end). What the plan and the kernels make of the prefill ranks must equal the latter in every
byte: elements, stored scales, and all that lies around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from regauge.errors import Refused, RegaugeError
from regauge.layout.dtypes import DTYPES, SCALE_DTYPES
from regauge.layout.spec import Component, Layout
from regauge.move import kernels
from regauge.move.conformance.pools import (
    PREFIX,
    Pool,
    element_addresses,
    generator,
    random_pool,
    spread,
    tokens_of,
    truth,
)
from regauge.move.conformance.refusals import causes
from regauge.move.crossing import slot_side
from regauge.plan.boxes import Side, instantiate, pieces
from regauge.plan.check import Path, Refusal, check
from regauge.plan.planner import Plan
from regauge.plan.ranks import Crossing, crossings, path_of
from regauge.plan.reference import Bytes, load
from regauge.plan.stripes import owned
from regauge.plan.tiles import Int64, Tiles
from regauge.plan.wire import WireFormat

Way = Literal["fused", "portable", "staged", "pieces"]
"""One kernel pass; the same by the portable kernels; gathered into a slot and scattered from it; moved as a transport would."""
WAYS: tuple[Way, ...] = get_args(Way)
MAX_MOVED = 1 << 16
"""Most pieces of two groups of ranks that are moved one by one: the product stages pairs that have more."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The prefill side of pairs: its ranks with a request's KV cache, and a pool with all of it."""

    name: str
    everything: Pool
    pools: tuple[Pool, ...]
    told: tuple[Layout, ...]
    """What the sender believes its layouts are. The suite must notice when that is wrong."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one pair."""

    prefill: str
    decode: str
    path: Path
    cause: str = ""
    """Of a refusal: the causes of `refusals.causes`."""
    fault: str = ""
    """What is wrong; empty: the pair was carried correctly in every way, or refused for cause."""
    rank_pairs: int = 0
    elements: int = 0
    """Elements that decode has to get."""
    ways: tuple[Way, ...] = field(default=())
    """Those that were run: none after one that is wrong."""


def source(name: str, ranks: Sequence[Layout], seed: int) -> Source:
    """Return a prefill side: random bytes, in which every rank holds its part of one request."""
    everything = truth(ranks, generator(seed, name, "everything"))
    pools = []
    for rank, layout in enumerate(ranks):
        pools.append(random_pool(layout, generator(seed, name, "prefill", str(rank)), decode=False))
        spread(everything, pools[-1], 0)
    return Source(name, everything, tuple(pools), tuple(pool.layout for pool in pools))


def run_pair(prefill: Source, name: str, ranks: Sequence[Layout], seed: int) -> Outcome:
    """Carry a request from a prefill side to all decode ranks, in every way, and compare."""
    must_refuse = ", ".join(causes(prefill.told, ranks))
    targets: list[Pool] = []
    if not must_refuse:
        random = [generator(seed, name, "decode", str(rank)) for rank in range(len(ranks))]
        targets = [random_pool(layout, rng, decode=True) for layout, rng in zip(ranks, random, strict=True)]
        ranks = [pool.layout for pool in targets]
    try:
        pairs = crossings(prefill.told, ranks)
    except Refused as refused:
        fault = unfounded(_refusals(prefill.told, ranks), refused, must_refuse)
        return Outcome(prefill.name, name, "REFUSED", must_refuse, fault)
    except RegaugeError as error:
        return Outcome(prefill.name, name, "REFUSED", must_refuse, f"not planned: {error}")
    path = path_of(pairs)
    if must_refuse:
        return Outcome(prefill.name, name, path, must_refuse, f"carried, and must be refused: {must_refuse}")
    wanted = [pool.copy() for pool in targets]
    for pool in wanted:
        spread(prefill.everything, pool, PREFIX)
    ways: list[Way] = []
    fault = ""
    for way in WAYS:
        if way == "pieces" and (path == "CONVERT" or not _moves(prefill.pools, targets, pairs)):
            continue
        ways.append(way)
        if fault := _fault(prefill.pools, targets, wanted, pairs, way):
            break
    elements = sum(_elements(pool) for pool in wanted)
    return Outcome(prefill.name, name, path, "", fault, len(pairs), elements, tuple(ways))


def _fault(
    sources: Sequence[Pool], targets: Sequence[Pool], wanted: Sequence[Pool], pairs: Sequence[Crossing], way: Way
) -> str:
    got = [pool.copy() for pool in targets]
    try:
        _carry(sources, got, pairs, way)
    except (RegaugeError, ValueError) as error:
        return f"{way}: {error}"
    found = first_difference(got, wanted, pairs)
    return f"{way}: {found}" if found else ""


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refusals(prefill: Sequence[Layout], decode: Sequence[Layout]) -> list[Refusal]:
    """Return what the planner has against a pair: of the first ranks if that is enough, else of any two."""
    first = check(prefill[0], decode[0]).refusals
    if first:
        return list(first)
    return [r for a in prefill for b in decode for r in check(a, b).refusals]


def unfounded(found: Sequence[Refusal], refused: Refused, must_refuse: str) -> str:
    """Return what is wrong with a refusal; empty if it has a cause, and names field, both values and remedy."""
    if not must_refuse:
        return f"refused without cause: {refused}"
    for refusal in found:
        if not all((refusal.field, refusal.prefill, refusal.decode, refusal.remedy)):
            return f"a refusal says too little: {refusal!r}"
        if refusal.prefill == refusal.decode:
            return f"a refusal names two values that are the same: {refusal}"
    if not found and not str(refused):
        return "a refusal without a reason"
    return ""


# -- the ways ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one prefill rank sends to one decode rank, of one pair of groups."""

    plan: Plan
    pair: tuple[int, int]
    source: Pool
    target: Pool
    tokens: tuple[int, int]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.source.side(self.pair[0]), self.target.side(self.pair[1])

    def tiles(self) -> list[Tiles]:
        return instantiate(self.plan, *self.sides, self.tokens, pair=self.pair)


def _parts(sources: Sequence[Pool], targets: Sequence[Pool], pairs: Sequence[Crossing]) -> Iterator[_Part]:
    for crossing in pairs:
        for pair in crossing.plan.pairs:
            group = crossing.plan.decode.groups[pair[1]]
            tokens = tokens_of(crossing.plan.decode, group, PREFIX)
            if tokens[0] < tokens[1]:
                yield _Part(crossing.plan, pair, sources[crossing.prefill], targets[crossing.decode], tokens)


def _moves(sources: Sequence[Pool], targets: Sequence[Pool], pairs: Sequence[Crossing]) -> bool:
    """Say whether a transport could be given the pieces of a pair, whose every part is few enough."""
    return all(sum(t.pieces for t in part.tiles()) <= MAX_MOVED for part in _parts(sources, targets, pairs))


def _carry(sources: Sequence[Pool], targets: Sequence[Pool], pairs: Sequence[Crossing], way: Way) -> None:
    for part in _parts(sources, targets, pairs):
        match way:
            case "staged":
                _staged(part)
            case "pieces":
                _move(part.tiles(), part.source.memory, part.target.memory)
            case "fused" | "portable":
                kernels.run(part.tiles(), isa="portable" if way == "portable" else "auto")


def _staged(part: _Part) -> None:
    """Gather into a slot and scatter from it, in two chunks of tokens and two of layers."""
    pair, tokens, sides = part.pair, part.tokens, part.sides
    wire, layers = WireFormat(part.plan), part.plan.layers_of(pair)
    half = len(layers) // 2
    middle = tokens[0] + max(1, 2 * (tokens[1] - tokens[0]) // 3)
    for first, end in ((tokens[0], middle), (middle, tokens[1])):
        if first == end:
            continue
        gather, scatter = wire.halves(pair, end - first)
        size = wire.layer_bytes(pair, end - first)
        for span in ((0, half), (half, len(layers))):
            chosen = layers[slice(*span)]
            if not chosen:
                continue
            slot = np.zeros(size * len(chosen), np.uint8)
            there = slot_side(slot.ctypes.data, span, size, (first, end))
            kernels.run(instantiate(gather, sides[0], there, (first, end), layers=chosen))
            kernels.run(instantiate(scatter, there, sides[1], (first, end), layers=chosen))


def _move(tiles: Sequence[Tiles], source: Bytes, target: Bytes) -> None:
    """Move the pieces that a transport would be given, all of one size at a time."""
    list_ = pieces(tiles) - np.array([source.ctypes.data, target.ctypes.data, 0])
    for size in np.unique(list_[:, 2]):
        some, span = list_[list_[:, 2] == size], np.arange(size)
        target[some[:, 1, None] + span] = source[some[:, 0, None] + span]


# -- comparison --------------------------------------------------------------------------------------------------------


def first_difference(got: Sequence[Pool], wanted: Sequence[Pool], pairs: Sequence[Crossing]) -> str:
    """Return where two decode sides differ first, "" if nowhere. A converted NaN may be any NaN."""
    for rank, (a, b) in enumerate(zip(got, wanted, strict=True)):
        if np.array_equal(a.memory, b.memory):
            continue
        converted = {
            (lane.decode_group, lane.component)
            for c in pairs
            if c.decode == rank
            for lane in c.plan.verdict.lanes
            if lane.path == "CONVERT"
        }
        if found := _difference(a, b, converted):
            return f"decode rank {rank}, {found}"
    return ""


def _difference(got: Pool, want: Pool, converted: set[tuple[int, str]]) -> str:
    same = got.memory == want.memory
    for index, group in enumerate(got.layout.groups):
        for c in group.components:
            for scales in (False, True):
                if scales and (c.scale is None or c.scale.at is None):
                    continue
                found = _element(got, want, index, c, same, scales=scales, converts=(index, c.name) in converted)
                if found:
                    return found
    if same.all():
        return ""
    at = int(np.argmin(same))
    region = max((start, name) for name, start in got.bases.items() if start <= at)[1] if at >= 64 else "none"
    return f"byte {at - got.bases.get(region, 0)} of region {region}, in which no element of the transfer lies, was written"


def _element(
    got: Pool,
    want: Pool,
    index: int,
    c: Component,
    same: np.ndarray,
    *,
    scales: bool,
    converts: bool,
) -> str:
    """Return the first element that differs, and mark all of them as compared in `same`."""
    where, tokens = element_addresses(got, index, c, scales=scales)
    size = SCALE_DTYPES[c.scale.dtype] if scales and c.scale is not None else DTYPES[c.dtype].itemsize
    spread_ = where[..., None] + np.arange(size)
    wrong = ~same[spread_].all(axis=-1)
    dtype = c.scale.dtype if scales and c.scale is not None else c.dtype
    if wrong.any() and converts and not scales and not DTYPES[dtype].whole:
        at = where[wrong]
        nan = [np.isnan(load(pool.memory, at, dtype).astype(np.float32)) for pool in (got, want)]
        wrong[wrong] = ~(nan[0] & nan[1])
    same[spread_] = True
    if not wrong.any():
        return ""
    return _described(got, want, index, c, (where, tokens), tuple(int(x) for x in np.argwhere(wrong)[0]), dtype, scales)


def _described(
    got: Pool,
    want: Pool,
    index: int,
    c: Component,
    places: tuple[Int64, Int64],
    at: tuple[int, ...],
    dtype: str,
    scale: bool,
) -> str:
    where, tokens = places
    group = got.layout.groups[index]
    a, b = (load(pool.memory, where[at], dtype) for pool in (got, want))
    what = f"scale of {c.name}" if scale else c.name
    return (
        f"{group.kind} {what}, layer {group.layer_ids[at[0]]}, token {tokens[at[1]]}, head "
        f"{got.layout.heads(group, c)[at[2]]}, {'block' if scale else 'dim'} {at[3]}: expected {b}, got {a}")  # fmt: skip


def _elements(pool: Pool) -> int:
    """Return how many elements of the request a rank has to get."""
    count = 0
    for group in pool.layout.groups:
        tokens = np.arange(*tokens_of(pool.layout, group, PREFIX))
        held = int(owned(pool.layout.shard, tokens).sum())
        count += held * len(group.layer_ids) * sum(c.heads * c.dim for c in group.components)
    return count
