"""Which prefill rank sends what to which decode rank.

Both sides may be split over ranks in any way: tensor parallelism m to n (heads split, merged, replicated), pipeline stages,
context-parallel stripes. Every (state, component, layer, head, token) that a decode rank keeps is sent to it by exactly one
prefill rank. Where several hold it (one head on several ranks; a latent on all of them), the decode ranks spread over
the holders. The answer is the same from both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from regauge.errors import PlanError, Refused
from regauge.layout.spec import Group, Layout, Shard
from regauge.plan.check import Path, share_tokens, worst
from regauge.plan.planner import Plan, compile

MAX_RANKS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Crossing:
    """What one prefill rank sends to one decode rank."""

    prefill: int
    """Index of the prefill rank."""
    decode: int
    """Index of the decode rank."""
    plan: Plan


def ranks(layout: Layout) -> list[Layout]:
    """Return the layouts of all tensor- and context-parallel ranks like this one, tensor-parallel ranks outermost.

    Raises PlanError where one rank does not tell what the others are like: its scales are those of its own heads, its heads
    are numbered by hand, or it is one of several pipeline stages.
    """
    shard = layout.shard
    if shard.tp_size * shard.cp_size > MAX_RANKS:
        raise PlanError(f"{shard.tp_size} x {shard.cp_size} ranks; at most {MAX_RANKS} are paired")
    if shard.tp_size * shard.cp_size == shard.pp_size == 1:
        return [layout]
    if shard.pp_size > 1:
        raise PlanError(
            f"one of {shard.pp_size} pipeline stages does not tell which layers the others hold: give all ranks"
        )
    for group in layout.groups:
        for c in group.components:
            own_heads = c.scale is not None and c.scale.per == "head" and isinstance(c.scale.values, list)
            if shard.tp_size > 1 and (own_heads or c.first_head >= 0):
                raise PlanError(
                    f"{c.name}: scales or numbers of this rank's heads do not tell those of others: give all ranks"
                )
    return [
        msgspec.structs.replace(layout, shard=msgspec.structs.replace(shard, tp_rank=t, cp_rank=c))
        for t in range(shard.tp_size)
        for c in range(shard.cp_size)
    ]


def crossings(prefill: Sequence[Layout], decode: Sequence[Layout]) -> list[Crossing]:
    """Return every pair of ranks between which something crosses, with its plan.

    Raises Refused where a pair is refused, or where no prefill rank holds what a decode rank needs; PlanError for ranks
    that do not fit together.
    """
    _check_side(prefill, "prefill")
    _check_side(decode, "decode")
    out = []
    holdings = [list(_holdings(layout)) for layout in prefill]
    for j, b in enumerate(decode):
        sources, gone = _sources(prefill, holdings, b, j)
        if gone:
            raise Refused(tuple(gone))
        for i, take in sources.items():
            plan = compile(prefill[i], b, take=take)
            if plan.lanes:
                out.append(Crossing(i, j, plan))
    return out


def leg(prefill: Layout, decode: Layout) -> Plan:
    """Plan what this prefill rank sends to this decode rank, told by their layouts alone; maybe nothing (no lanes).

    Both ends find the same plan, and all the legs of a decode rank together bring what it keeps: `lacking` says whether they do. Raises
    Refused as `compile`, and PlanError where one rank does not tell which heads the others of its stage hold.
    """
    family, take = _family(prefill), None
    if len(family) > 1:
        holdings = [list(_holdings(layout)) for layout in family]
        index = decode.shard.tp_rank * decode.shard.cp_size + decode.shard.cp_rank
        mine = prefill.shard.tp_rank * prefill.shard.cp_size + prefill.shard.cp_rank
        take = _sources(family, holdings, decode, index)[0].get(mine, {})
    return compile(prefill, decode, take=take)


def lacking(decode: Layout, legs: Sequence[Plan]) -> list[str]:
    """Say what a decode rank keeps that none of these legs brings to it."""
    brought: dict[tuple[int, str, int, int], set[int]] = {}
    for plan in legs:
        for lane in plan.lanes:
            for layer in lane.layers:
                for head in lane.heads:
                    brought.setdefault((lane.pair[1], lane.name, layer, head), set()).add(plan.prefill.shard.cp_rank)
    stripes = sum(map(partial(share_tokens, decode.shard), _stripes(legs[0].prefill.shard))) if legs else 1
    out = []
    for i, group in enumerate(decode.groups):
        for c in group.components:
            heads = decode.heads(group, c)
            gone = [
                layer for layer in group.layer_ids
                if any(len(brought.get((i, c.name, layer, head), ())) < stripes for head in heads)
            ]  # fmt: skip
            if gone:
                out.append(f"{group.kind} {c.name}, layers {min(gone)} to {max(gone)}")
    return out


def _stripes(shard: Shard) -> list[Shard]:
    """Return the context-parallel ranks among which tokens are dealt out as here."""
    return [msgspec.structs.replace(shard, cp_rank=rank) for rank in range(shard.cp_size)]


def _family(layout: Layout) -> list[Layout]:
    """Return all tensor- and context-parallel ranks of a rank's pipeline stage, as far as what they hold goes."""
    shard = layout.shard
    count = shard.tp_size * shard.cp_size
    if count > MAX_RANKS:
        raise PlanError(f"{shard.tp_size} x {shard.cp_size} ranks; at most {MAX_RANKS} are paired")
    if shard.tp_size > 1 and any(c.first_head >= 0 for group in layout.groups for c in group.components):
        raise PlanError("the heads of this rank are numbered by hand: they do not tell which heads other ranks hold")
    return [
        msgspec.structs.replace(layout, shard=msgspec.structs.replace(shard, tp_rank=t, cp_rank=c))
        for t in range(shard.tp_size)
        for c in range(shard.cp_size)
    ]


def path_of(pairs: Sequence[Crossing]) -> Path:
    """Return the path that asks most of all pairs of ranks."""
    return worst(lane.path for c in pairs for lane in c.plan.verdict.lanes)


Held = tuple[str, str, int, range]
"""Kind, component, layer, global heads."""


def _holdings(layout: Layout) -> Iterator[Held]:
    for group in layout.groups:
        for c in group.components:
            for layer in group.layer_ids:
                yield group.kind, c.name, layer, layout.heads(group, c)


def _sources(
    prefill: Sequence[Layout], holdings: Sequence[list[Held]], decode: Layout, index: int
) -> tuple[dict[int, dict[tuple[str, str, int], set[int]]], list[str]]:
    """Return, by prefill rank, the heads of each (kind, component, layer) that it sends to this decode rank; and what nobody holds."""
    holders: dict[tuple[str, str, int, int], list[int]] = {}
    for i, held in enumerate(holdings):
        for kind, name, layer, heads in held:
            for head in heads:
                holders.setdefault((kind, name, layer, head), []).append(i)
    out: dict[int, dict[tuple[str, str, int], set[int]]] = {}
    lack: list[str] = []
    for group in decode.groups:
        for c in group.components:
            gone = set()
            for layer in group.layer_ids:
                for head in decode.heads(group, c):
                    senders = _one_per_stripe(prefill, holders.get((group.kind, c.name, layer, head), []), index)
                    if not senders:
                        gone.add(layer)
                    for i in senders:
                        out.setdefault(i, {}).setdefault((group.kind, c.name, layer), set()).add(head)
            if gone:
                lack.append(_lack(group, c.name, gone, index))
    return out, lack


def _lack(group: Group, name: str, layers: set[int], index: int) -> str:
    return (f"no prefill rank holds every head and token of {group.kind} {name}, layers {min(layers)} to {max(layers)}, which "
            f"decode rank {index} keeps. Give the layouts of all prefill ranks")  # fmt: skip


def _one_per_stripe(prefill: Sequence[Layout], holders: Sequence[int], index: int) -> list[int]:
    """Return one of the holders for every context-parallel rank, or none if a rank's tokens are held by nobody."""
    by_stripe: dict[int, list[int]] = {}
    for i in holders:
        by_stripe.setdefault(prefill[i].shard.cp_rank, []).append(i)
    if holders and len(by_stripe) < prefill[holders[0]].shard.cp_size:
        return []
    return [some[index % len(some)] for some in by_stripe.values()]


def _check_side(side: Sequence[Layout], name: str) -> None:
    if not 1 <= len(side) <= MAX_RANKS:
        raise PlanError(f"{len(side)} {name} ranks; 1 to {MAX_RANKS} are paired")

    def dealing(shard: Shard) -> tuple[int, int]:
        return shard.cp_size, shard.cp_stripe

    if len({dealing(layout.shard) for layout in side}) > 1:
        raise PlanError(
            f"the {name} ranks deal tokens out in different ways: shard.cp_size and cp_stripe must be the same"
        )
