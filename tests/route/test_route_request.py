"""The life of a request over its attempts: it ends, in few of them, and says why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from route_rig import cluster, idle

from regauge.route.cluster import Cause, Request
from regauge.route.request import Life, Resume, Role, Start, Stop, Wait
from regauge.route.router import Router

CAUSES: tuple[Cause, ...] = ("worker_lost", "failed", "timeout", "draining", "queue_full", "transfer_failed")


def life(router: Router, **changes: object) -> Life:
    return Life(Request("r", tokens=100, max_tokens=50), router, **changes)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(CAUSES), st.booleans(), st.integers(0, 5), st.floats(0, 8), st.booleans(), st.booleans()
        ),
        min_size=30,
        max_size=30,
    ),
    st.integers(0, 4),
    st.booleans(),
)
def test_every_life_ends_in_a_bounded_number_of_attempts(
    steps: list[tuple[Cause, bool, int, float, bool, bool]], retries: int, resumable: bool
) -> None:
    router = cluster(2, 2, retries=retries)
    one = life(router, resumable=resumable, wait_s=5.0)
    now, begun = 0.0, 0
    action: object = one.begin(now)
    for kind, at_prefill, generated, seconds, lost, back in steps:
        if isinstance(action, Stop):
            break
        now += 0.01 + seconds
        if isinstance(action, Wait):
            assert action.earliest <= action.until
            router.health("d0", back, now)
            router.health("p0", back, now)
            now = max(now, action.earliest) + 2
            action = one.again(now)
            continue
        assert isinstance(action, Start | Resume)
        begun += 1
        route = action.route
        role: Role = "prefill" if at_prefill and route.prefill else "decode"
        worker = route.prefill if role == "prefill" and route.prefill else route.decode
        assert action.request.id == ("r" if begun == 1 else f"r.{begun - 1}")
        assert action.request.tokens == 100 + one.generated
        assert isinstance(action, Resume) == (one.generated > 0)
        if kind == "worker_lost" and lost:
            router.health(worker, False, now)
        action = one.failure(kind, worker, role, now, generated=generated if role == "decode" else 0)
    assert isinstance(action, Stop), "30 steps, of which a wait allows 3, and none ends it"
    assert begun <= retries + 1
    assert one.kills <= 2
    assert idle(router)


def test_a_request_that_kills_two_workers_is_stopped() -> None:
    router = cluster(3, 1)
    one = life(router)
    first = one.begin(0.0)
    assert isinstance(first, Start)
    assert first.route.prefill is not None
    again = one.failure("worker_lost", first.route.prefill, "prefill", 1.0)
    assert isinstance(again, Start)
    assert again.route.prefill not in (None, first.route.prefill)
    assert again.route.prefill is not None
    stop = one.failure("worker_lost", again.route.prefill, "prefill", 2.0)
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.message) == (
        "poison",
        "2 workers died with this request in hand, so it is not tried again",
    )
    record = router.journal.of("r.1")
    assert record is not None
    assert "stopped, poison" in record.text()


def test_after_the_first_token_it_goes_on_from_there_if_it_can() -> None:
    router = cluster(1, 2)
    one = life(router)
    first = one.begin(0.0)
    assert isinstance(first, Start)
    one.prefilled(0.5, 0, 100)
    one.first_token(0.6)
    action = one.failure("worker_lost", first.route.decode, "decode", 1.0, generated=20)
    assert isinstance(action, Resume)
    assert (action.generated, action.request.tokens, action.request.max_tokens) == (20, 120, 30)
    assert (action.request.resume, action.request.admitted, action.request.root) == (True, True, "r")
    one.first_token(1.5)
    again = one.failure("failed", action.route.decode, "decode", 2.0, generated=5)
    assert isinstance(again, Wait)  # the first one may come back
    assert one.generated == 25
    other = life(cluster(1, 2), resumable=False)
    begun = other.begin(0.0)
    assert isinstance(begun, Start)
    stop = other.failure("worker_lost", begun.route.decode, "decode", 1.0, generated=1)
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.message) == (
        "not_resumable",
        f"the answer cannot go on elsewhere ({begun.route.decode}: worker_lost)",
    )


def test_the_only_worker_is_waited_for_and_has_it_again() -> None:
    router = cluster(1, 1)
    one = life(router, wait_s=10.0)
    assert isinstance(one.begin(0.0), Start)
    router.health("p0", False, 1.0)
    wait = one.failure("worker_lost", "p0", "prefill", 1.0)
    assert wait == Wait(1.1, 11.0, "prefill")
    assert one.again(1.2) == Wait(1.3, 11.0, "prefill")
    router.health("p0", True, 2.0)
    action = one.again(2.0)
    assert isinstance(action, Start)
    assert (action.request.id, action.route.prefill) == ("r.1", "p0")
    one.finished(3.0)
    assert idle(router)


@pytest.mark.parametrize(("until", "reason"), [(5.0, "deadline"), (float("inf"), "no_worker")])
def test_waiting_ends(until: float, reason: str) -> None:
    router = cluster(1, 1)
    one = life(router, wait_s=10.0, until=until)
    one.begin(0.0)
    router.health("d0", False, 1.0)
    wait = one.failure("worker_lost", "d0", "decode", 1.0)
    assert isinstance(wait, Wait)
    assert wait.until == min(11.0, until)
    stop = one.again(wait.until)
    assert isinstance(stop, Stop)
    assert stop.reason == reason
    assert "d0: worker_lost" in stop.message


def test_a_refusal_at_the_start_is_handed_on() -> None:
    router = cluster(1, 1, ttft_s=0.1)
    stop = life(router).begin(0.0)
    assert isinstance(stop, Stop)
    assert stop.refusal is not None
    assert (stop.reason, stop.refusal.reason) == ("refused", "deadline")


def test_what_was_admitted_once_is_not_refused_for_its_deadline() -> None:
    router = cluster(2, 1, ttft_s=1.0)
    one = life(router)
    first = one.begin(0.0)
    assert isinstance(first, Start)
    assert first.route.prefill is not None
    for i in range(8):
        router.route(Request(f"other{i}", tokens=700), 0.0)
    assert isinstance(one.failure("failed", first.route.prefill, "prefill", 0.5), Start)


def test_nothing_under_way_is_no_error() -> None:
    one = life(cluster())
    one.finished(0.0)
    one.first_token(0.0)
    one.prefilled(0.0, 0, 0)
    assert isinstance(one.again(0.0), Stop)
    assert isinstance(one.failure("failed", "p0", "prefill", 0.0), Stop)
