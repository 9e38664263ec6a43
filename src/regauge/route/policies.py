"""The policies: each orders the placements of one request, best first. Small functions of one signature.

`round-robin`, `least-load`, `prefix` and `cache+load` choose prefill and decode each by its own figures, as routers do that know nothing of the
network; `network-aware` takes the pair with the earliest first token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final

from regauge.config_route import PolicyName
from regauge.route.cluster import Request
from regauge.route.model import Estimate, View, estimate, stall
from regauge.route.search import BEST, OVER_LIMIT, Search, cheapest, rooms, starts
from regauge.route.state import Standing


class Pick:
    """A placement and what it is ordered by; `estimate`: if the policy has made one."""

    __slots__ = ("decode", "estimate", "prefill", "score")

    def __init__(
        self, score: float, prefill: Standing | None, decode: Standing, estimate: Estimate | None = None
    ) -> None:
        self.score, self.prefill, self.decode, self.estimate = score, prefill, decode, estimate


SCORE = attrgetter("score")
Policy = Callable[[Request, View], list[Pick]]


def _least(standings: list[Standing], cost: Callable[[Standing], float], view: View) -> list[tuple[float, Standing]]:
    """Return the cheapest few; among equals chance decides, or the first worker would get all of an idle cluster's work."""
    costs = [cost(standing) for standing in standings]
    return [(costs[at], standings[at]) for at in cheapest(costs, view.rng.random() if len(costs) > 1 else 0.0)]


def _pairs(prefills: list[tuple[float, Standing]], decodes: list[tuple[float, Standing]]) -> list[Pick]:
    """Return pairs of two orders, both sides' costs added."""
    if not prefills:
        return [Pick(cost, None, decode) for cost, decode in decodes]
    picks = [Pick(p + d, prefill, decode) for p, prefill in prefills for d, decode in decodes]
    return sorted(picks, key=SCORE)


def _room(view: View, request: Request) -> Callable[[Standing], float]:
    """Return what a decode worker costs: the shares of its slots and pages that are in use."""
    slots_weight, pages_weight = view.config.slots_weight, view.config.pages_weight
    tokens = request.tokens + request.max_tokens

    def cost(decode: Standing) -> float:
        slots = decode.taken / decode.slots
        pages = decode.pages_used + decode.pages_for(tokens)
        total = decode.pages
        free = decode.pages_base
        used = (pages + (total - free if free is not None else 0)) / total if total else 0.0
        return slots_weight * slots + pages_weight * used

    return cost


def round_robin(request: Request, view: View) -> list[Pick]:  # noqa: ARG001  # the signature of all
    """Each role's workers in turn, whatever they have to do."""

    def turn(role: str, standings: list[Standing]) -> list[tuple[float, Standing]]:
        if not standings:
            return []
        first = view.turns.get(role, 0)
        view.turns[role] = first + 1
        count = len(standings)
        return [(float(i), standings[(first + i) % count]) for i in range(min(BEST, count))]

    return _pairs(turn("prefill", view.prefills), turn("decode", view.decodes))


def least_load(request: Request, view: View) -> list[Pick]:
    """The prefill worker with the least to compute, the decode worker with the most room."""
    return _pairs(
        _least(view.prefills, lambda each: each.waiting_s(view.now), view),
        _least(view.decodes, _room(view, request), view),
    )


def prefix(request: Request, view: View) -> list[Pick]:
    """The prefill worker that has most of the prompt cached; among equals, the one with the least to compute."""
    longest = max(request.tokens, 1)

    def cost(standing: Standing) -> float:
        # A whole queue weighs less than one token of the cache.
        return (longest - view.cached.get(standing.name, 0)) + min(standing.waiting_s(view.now) / 1e6, 0.5)

    return _pairs(_least(view.prefills, cost, view), _least(view.decodes, _room(view, request), view))


def cache_load(request: Request, view: View) -> list[Pick]:
    """The weighted sum of uncached tokens and tokens in the queue; decode by the weighted shares of slots and pages."""
    config, now = view.config, view.now

    def cost(standing: Standing) -> float:
        uncached = request.tokens - view.cached.get(standing.name, 0)
        return config.cache_weight * uncached + config.queue_weight * standing.waiting_s(now) * standing.speed

    return _pairs(_least(view.prefills, cost, view), _least(view.decodes, _room(view, request), view))


def network_aware(request: Request, view: View) -> list[Pick]:
    """The pair with the earliest first token, what the KV's way there delays others' included; see `model.py`.

    All decode workers are looked at with the best prefill worker, then the best of them with the other good ones.
    """
    if not view.prefills:
        return []
    search, found = Search(request.tokens, view, view.few), starts(request, view)
    search.first(found[0], rooms(request, view))
    best = search.best
    for start in found[1:]:
        if len(best) >= view.few and start.queue_s + start.compute_s >= best[0].score:
            break  # its own terms alone are more than the best pair's
        search.look(start)
    return [Pick(pair.score, pair.start.prefill, pair.room.decode, search.estimate(pair)) for pair in best]


def _priced(request: Request, view: View, decode: Standing) -> Pick | None:
    """Return what it costs to have decode compute the prompt; None: it cannot."""
    made = estimate(request, view, None, decode)
    if made is None:
        return None
    limit = view.config.tpot_s if request.tpot_s is None else request.tpot_s
    score = made.ttft_s
    if limit is not None and made.tpot_s is not None and made.tpot_s > limit:
        score += OVER_LIMIT * (made.tpot_s - limit) * request.max_tokens
    return Pick(score + 1e-6 * decode.taken, None, decode, made)


def offloaded(request: Request, view: View, picks: list[Pick]) -> list[Pick]:
    """Return the placements where decode computes the prompt and may, best first; see `route.offload`.

    `picks` are the policy's own. Without any, decode computes whatever comes.
    """
    alone = [pick for pick in (_priced(request, view, each) for each in view.alone) if pick]
    alone.sort(key=SCORE)
    if not picks:
        return alone
    config, best = view.config, picks[0]
    allowed = []
    for pick in alone:
        made = pick.estimate
        if made is None:
            continue
        if config.offload == "fixed":
            best_cached = view.cached.get(best.prefill.name, 0) if best.prefill else 0
            if request.tokens - max(made.cached, best_cached) <= config.offload_tokens:
                allowed.append(pick)
        elif stall(pick.decode, made.compute_s) <= config.offload_harm:
            paired = best.estimate or (estimate(request, view, best.prefill, best.decode) if best.prefill else None)
            if paired is None or made.ttft_s < paired.ttft_s:
                allowed.append(pick)
    return allowed[:BEST]


POLICIES: Final[Mapping[PolicyName, Policy]] = MappingProxyType(
    {
        "round-robin": round_robin,
        "least-load": least_load,
        "prefix": prefix,
        "cache+load": cache_load,
        "network-aware": network_aware,
    }
)
