"""Decisions: as recorded, as the plain rule of `network-aware` has them, and the same without explanations."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from route_story import POLICIES, Plain, Story, play

from regauge.route.cluster import Request
from regauge.route.model import HARM, View, estimate
from regauge.route.policies import network_aware
from regauge.route.router import Router
from regauge.route.search import BEST, OVER_LIMIT, cheapest
from regauge.route.state import Standing

RECORDED = {
    "round-robin": "0da288ccc7b0271c",
    "least-load": "6c0bc6d795733036",
    "prefix": "ccbf5576ccc1b0ed",
    "cache+load": "37088396aae588ab",
    "network-aware": "88fc6d60167374e9",
}
"""Policy -> digest of who was chosen in four stories, made by the router before it was made faster, its NICs moved on at each transfer's beginning as they are
now; of least-load and cache+load with a wait that is never below 0, where rounding had decided between idle workers, and chance does."""


def short(decision: Plain) -> str:
    """What is left of a decision whose figures are rounded otherwise elsewhere."""
    return " ".join(map(str, decision[1:4] if decision[0] == "placed" else decision[:2]))


@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_as_recorded(policy: str) -> None:
    decided = [short(each) for seed in range(4) for each in play(seed, policy, 300) if each[0] != "why"]
    assert hashlib.sha256("\n".join(decided).encode()).hexdigest()[:16] == RECORDED[policy]


def plain(request: Request, view: View) -> list[tuple[float, str, str]]:
    """The rule: the cheapest few prefill workers; the first with all decode workers, the others with the best of these."""
    now, made = view.now, list[tuple[float, str, str]]()

    def computed(each: Standing) -> float:
        have = view.cached.get(each.name, 0)
        return each.waiting_s(now) + each.compute_s(request.tokens - have, have)

    def look(prefill: Standing, decodes: list[Standing]) -> int:
        before = len(made)
        for decode in decodes:
            one = estimate(request, view, prefill, decode)
            if one is not None:
                limit = view.config.tpot_s if request.tpot_s is None else request.tpot_s
                over = max(0.0, one.tpot_s - limit) if limit is not None and one.tpot_s is not None else 0.0
                score = one.ttft_s + HARM * one.harm_s + OVER_LIMIT * over * request.max_tokens + 1e-6 * decode.taken
                made.append((score, prefill.name, decode.name))
        possible = len(made) - before
        made.sort(key=lambda each: each[0])
        return possible

    costs = [computed(each) for each in view.prefills]
    turn = int(view.rng.random() * len(costs)) if len(costs) > 1 else 0
    turned = [*range(turn, len(costs)), *range(turn)]
    first, *others = sorted(turned, key=lambda at: costs[at])[:BEST]
    around = view.decodes
    if look(view.prefills[first], around) == len(around):
        named = {each.name: each for each in around}
        around = [named[decode] for _, _, decode in made[:BEST]]
    for at in others:
        if len(made) >= BEST and costs[at] >= made[0][0]:
            break
        look(view.prefills[at], around)
    return made


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_what_the_plain_rule_finds(seed: int) -> None:
    story, rng = Story(seed, "network-aware"), random.Random(seed)
    for number in range(120):
        story.step()
        workers = list(story.router.workers.values())
        prefills, decodes = ([each for each in workers if getattr(each.worker, role)] for role in ("prefill", "decode"))
        if not prefills or not decodes:
            continue
        cached = {each.name: rng.randrange(900) for each in workers if rng.random() < 0.5}
        request = Request(f"x{number}", tokens=rng.randrange(1_000, 9_000), tpot_s=rng.choice((None, 0.03)))
        views = [
            View(story.router.config, story.now, random.Random(number), prefills, decodes, cached, few=few)
            for few in (BEST, BEST, 1)
        ]
        expected, found, best = (
            plain(request, views[0]),
            network_aware(request, views[1]),
            network_aware(request, views[2]),
        )
        assert [each.score for each in found] == pytest.approx([each[0] for each in expected[:BEST]])
        assert [each.score for each in best] == pytest.approx([each.score for each in found[:1]])
        if len(expected) > 1 and expected[1][0] > expected[0][0] + 1e-6:
            for pick in (found[0], best[0]):
                assert pick.prefill is not None
                assert (pick.prefill.name, pick.decode.name) == expected[0][1:]


@pytest.mark.parametrize("policy", ["cache+load", "network-aware"])
@pytest.mark.parametrize("seed", range(6))
def test_without_explanations_the_decisions_are_the_same(policy: str, seed: int) -> None:
    def quiet(config: object, seed: int, max_queue: int | None) -> Router:
        return Router(config, seed, max_queue=max_queue, explain=False)  # type: ignore[arg-type]

    told, untold = (
        [each for each in play(seed, policy, 400, router=kind) if each[0] != "why"] for kind in (Router, quiet)
    )
    assert [short(each) for each in told] == [short(each) for each in untold]


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.99])
def test_the_cheapest_are_in_order_and_equals_in_turn(chance: float) -> None:
    assert [cheapest([1.0] * 10, chance)[at] for at in range(BEST)] == [
        (int(chance * 10) + at) % 10 for at in range(BEST)
    ]
    assert cheapest([3.0, 1.0, 2.0, 5.0, 4.0, 0.0], chance) == [5, 1, 2, 0]
    assert cheapest([], chance) == []


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, float("inf")])), st.floats(0, 0.999))
def test_the_cheapest_are_those_of_a_stable_sort_from_a_random_one_on(costs: list[float], chance: float) -> None:
    first = int(chance * len(costs))
    turned = [*range(first, len(costs)), *range(first)]
    assert cheapest(costs, chance) == sorted(turned, key=costs.__getitem__)[:BEST]
