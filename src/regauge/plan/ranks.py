"""Which prefill rank sends what to which decode rank.

Both sides may be split over ranks in any way: tensor parallelism m to n (heads split, merged, replicated), pipeline stages,
context-parallel stripes. Every (state, component, layer, head, token) that a decode rank keeps is sent to it by exactly one
prefill rank. Where several hold it (one head on several ranks; a latent on all of them), the decode ranks spread over
the holders. The answer is the same from both ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from regauge.errors import PlanError, Refused
from regauge.layout.spec import Group, Layout, Shard
from regauge.plan.check import Path, worst
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
        for i, take in _sources(prefill, holdings, b, j).items():
            plan = compile(prefill[i], b, take=take)
            if plan.lanes:
                out.append(Crossing(i, j, plan))
    return out


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
) -> dict[int, dict[tuple[str, str, int], set[int]]]:
    """Return, by prefill rank, the heads of each (kind, component, layer) that it sends to this decode rank."""
    holders: dict[tuple[str, str, int, int], list[int]] = {}
    for i, held in enumerate(holdings):
        for kind, name, layer, heads in held:
            for head in heads:
                holders.setdefault((kind, name, layer, head), []).append(i)
    out: dict[int, dict[tuple[str, str, int], set[int]]] = {}
    lacking: list[str] = []
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
                lacking.append(_lack(group, c.name, gone, index))
    if lacking:
        raise Refused(tuple(lacking))
    return out


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
