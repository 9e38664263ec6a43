"""Requests that would be late are told when to come again; priorities; and an overload leaves nothing behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from route_rig import cluster, placed

from regauge.config import RouteConfig
from regauge.route.admission import Correction
from regauge.route.cluster import Load, Refusal, Request, Route
from regauge.route.router import Router


def test_late_requests_are_refused_until_the_queue_has_drained() -> None:
    router = cluster(1, 1, slots=100, ttft_s=10.0, admit_share=0.8)
    admitted = 0
    while isinstance(decided := router.route(Request(f"r{admitted}", tokens=1000), 0.0), Route):
        admitted += 1
    assert admitted == 7  # of 1 s each: the 8th would come after 8 s, and a little for its transfer
    assert (decided.reason, decided.retry_after_s) == ("deadline", 1)
    assert decided.ttft_s == pytest.approx(8.0, abs=0.1)
    assert "the first token is predicted after 8.00 s, and 8.00 s are allowed: come again in 1 s" in decided.message
    long = router.route(Request("long", tokens=5000), 0.0)
    assert isinstance(long, Refusal)
    assert long.retry_after_s == 5
    for i in range(6):
        router.finished(f"r{i}", 6.0)
    assert isinstance(router.route(Request("long", tokens=5000), 6.0), Route)


def test_a_request_may_bring_its_own_deadline() -> None:
    router = cluster(1, 1)
    assert isinstance(router.route(Request("a", tokens=1000, ttft_s=1.0), 0.0), Refusal)
    assert isinstance(router.route(Request("b", tokens=1000, ttft_s=2.0), 0.0), Route)


def test_a_placement_that_is_in_time_is_taken_before_a_refusal() -> None:
    router = cluster(2, 1, ttft_s=3.0, admit_share=1.0, policy="prefix", block_tokens=10)
    router.index.assume("p0", (1,))
    router.report("p0", Load(queued_tokens=60_000), 0.0)
    assert placed(router, Request("a", tokens=100, blocks=(1,)), 0.0).prefill == "p1"


@pytest.mark.parametrize(("priority", "most"), [(-5, 3), (0, 8), (1, 9), (2, 10), (9, 10)])
def test_higher_priority_is_admitted_longer(priority: int, most: int) -> None:
    router = cluster(1, 1, slots=100, ttft_s=10.05, admit_share=0.8)
    for admitted in range(20):
        decided = router.route(Request(f"r{admitted}", tokens=1000, priority=priority), 0.0)
        if isinstance(decided, Refusal):
            break
    assert admitted == most


def test_the_house_is_full_for_low_priority_first() -> None:
    router = Router(RouteConfig(), max_queue=10)
    router.join(cluster(1, 1).workers["p0"].worker, 0.0)
    router.join(cluster(1, 1).workers["d0"].worker, 0.0)
    taken = 0
    for number in range(10):
        decided = router.route(Request(f"r{number}", priority=-3), 0.0)
        taken += isinstance(decided, Route)
    assert taken == 7
    assert isinstance(decided, Refusal)
    assert decided.reason == "overload"
    for number in range(3):
        assert isinstance(router.route(Request(f"s{number}"), 0.0), Route)
    full = router.route(Request("x"), 0.0)
    assert isinstance(full, Refusal)
    assert full.message.startswith("10 requests are in the house, as many as priority 0 allows")
    assert isinstance(router.route(Request("y", resume=True), 0.0), Route)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), max_size=50))
def test_the_correction_is_bounded(measured: list[tuple[float, float]]) -> None:
    correction = Correction()
    for number, (predicted, took) in enumerate(measured):
        correction.measured(predicted, took, float(number))
        assert 0.5 <= correction.factor(float(number)) <= correction.careful(float(number)) <= 2.0


def test_predictions_are_corrected_and_the_correction_is_forgotten() -> None:
    router = cluster(1, 1)
    for number in range(100):
        now = number * 2.0
        route = placed(router, Request(f"r{number}", tokens=1000), now)
        router.first_token(route.id, now + 1.5 * 1.0)
        router.finished(route.id, now + 1.5)
        last = now + 1.5
    assert router.correction.factor(last) > 1.05
    assert router.correction.factor(last + 60) == pytest.approx(1.0, abs=0.001)


def test_recovery_from_overload_is_as_fast_as_the_queue_drains() -> None:
    """Offered three times what can be served, for 60 s; then little: it is admitted at once."""
    router = cluster(1, 1, slots=1000, ttft_s=2.0)
    done: list[tuple[float, str]] = []
    free, number, refused = 0.0, 0, 0
    for tick in range(900):
        now = tick / 15  # 15 requests a second of 0.2 s each
        for when, attempt in [each for each in done if each[0] <= now]:
            router.first_token(attempt, when)
            router.finished(attempt, when)
            done.remove((when, attempt))
        decided = router.route(Request(f"r{number}", tokens=200), now)
        number += 1
        if isinstance(decided, Refusal):
            refused += 1
            continue
        free = max(free, now) + 0.2
        assert free - now <= 2.0, "admitted, and late"
        done.append((free, decided.id))
    assert 550 < refused < 620
    for when, attempt in done:
        router.first_token(attempt, when)
        router.finished(attempt, when)
    assert free - 60 <= 2.0
    assert isinstance(router.route(Request("after", tokens=1500), free), Route)


def test_unsteady_times_leave_more_room() -> None:
    steady, unsteady = Correction(), Correction()
    for number in range(40):
        steady.measured(1.0, 1.0, number / 10)
        unsteady.measured(1.0, 1.6 if number % 2 else 0.55, number / 10)
    assert steady.careful(4.0) == pytest.approx(1.0)
    assert unsteady.careful(4.0) > 1.5
    assert unsteady.careful(34.0) < 1.05
