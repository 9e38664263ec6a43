"""Workers that fail or are slow are left out for a while, probed, and taken back; never the last of a role."""

from __future__ import annotations

from route_rig import cluster, link, placed

from regauge.route.cluster import Request
from regauge.route.router import Router


def fail(router: Router, worker: str, times: int, now: float) -> None:
    """Have attempts fail at a prefill worker; the others' are cancelled."""
    failed = 0
    for number in range(200):
        route = placed(router, Request(f"{worker}{now}-{number}", tokens=10), now)
        if route.prefill == worker:
            router.failed(route.id, worker, now, "failed")
            failed += 1
            if failed == times:
                return
        else:
            router.finished(route.id, now, "cancelled")
    raise AssertionError(f"{worker} was asked {failed} times only")


def given(router: Router, now: float, count: int = 40) -> list[str | None]:
    """Return whom so many requests at once go to."""
    routes = [placed(router, Request(f"g{now}-{i}", tokens=10), now) for i in range(count)]
    return [route.prefill for route in routes]


def end(router: Router, now: float, count: int = 40) -> None:
    for i in range(count):
        router.prefilled(f"g{now}-{i}", now, 0, 10)
        router.finished(f"g{now}-{i}", now)


def test_failures_in_a_row_eject_and_probes_bring_back() -> None:
    router = cluster(3, 1, slots=1000, eject_failures=3, eject_s=5.0)
    fail(router, "p0", 3, 0.0)
    assert "p0" not in given(router, 1.0)
    end(router, 1.0)
    asked = given(router, 6.0)  # on probation: one request at a time
    assert asked.count("p0") == 1
    end(router, 6.0)
    assert given(router, 7.0).count("p0") == 1
    end(router, 7.0)
    assert given(router, 8.0).count("p0") > 5


def test_a_failed_probe_ejects_for_twice_as_long_up_to_a_limit() -> None:
    router = cluster(3, 1, slots=1000, eject_failures=1, eject_s=5.0, eject_most_s=12.0)
    now = 0.0
    for seconds in (5.0, 10.0, 12.0, 12.0):
        fail(router, "p0", 1, now)
        assert "p0" not in given(router, now + seconds - 0.1)
        end(router, now + seconds - 0.1)
        now += seconds


def test_the_last_worker_of_a_role_is_never_ejected() -> None:
    router = cluster(2, 1, slots=1000, eject_failures=1)
    fail(router, "p0", 1, 0.0)
    fail(router, "p1", 5, 0.0)
    assert set(given(router, 0.1)) == {"p1"}
    router.health("p1", False, 0.2)
    assert set(given(router, 0.2)) == {"p0"}  # ejected, and better than nobody


def test_what_says_nothing_of_health_does_not_count() -> None:
    router = cluster(2, 1, slots=1000, eject_failures=1)
    for number, cause in enumerate(("draining", "queue_full")):
        route = placed(router, Request(f"r{number}", tokens=10), 0.0)
        assert route.prefill is not None
        router.failed(route.id, route.prefill, 0.0, cause)  # type: ignore[arg-type]
    assert set(given(router, 0.1)) == {"p0", "p1"}


def test_a_slow_worker_is_told_from_its_peers() -> None:
    router = cluster(4, 1, slots=1000, eject_ratio=4.0)
    for number in range(400):
        now = float(number)
        route = placed(router, Request(f"r{number}", tokens=200), now)
        took = route.ttft_s * (10 if route.prefill == "p2" else 1)
        router.first_token(route.id, now + took)
        router.finished(route.id, now + took)
        if router.workers["p2"].breaker.ejections:
            break
    assert {name for name, each in router.workers.items() if each.breaker.ejections} == {"p2"}
    assert "times what is predicted" in router.workers["p2"].breaker.why


def test_slowness_of_all_is_nobodys_fault() -> None:
    router = cluster(4, 2, slots=1000)
    for number in range(200):
        now = float(number)
        route = placed(router, Request(f"r{number}", tokens=200), now)
        router.first_token(route.id, now + 10 * route.ttft_s)
        router.finished(route.id, now + 10 * route.ttft_s)
    assert not any(each.breaker.ejections for each in router.workers.values())


def test_where_the_network_is_not_known_nobody_is_called_slow() -> None:
    router = cluster(4, 1, slots=1000)
    for i in range(4):
        router.link(link(i, 0, bytes_per_s=0.0), 0.0)
    for number in range(200):
        now = float(number)
        route = placed(router, Request(f"r{number}", tokens=200), now)
        took = route.ttft_s * (10 if route.prefill == "p2" else 1)
        router.first_token(route.id, now + took)
        router.finished(route.id, now + took)
    assert not any(each.breaker.ejections for each in router.workers.values())


def test_most_of_a_role_stays_however_slow() -> None:
    router = cluster(6, 1, slots=1000)
    for number in range(600):
        now = float(number)
        route = placed(router, Request(f"r{number}", tokens=200), now)
        took = route.ttft_s * (20 if route.prefill in ("p0", "p1", "p2") else 1)
        router.first_token(route.id, now + took)
        router.finished(route.id, now + took)
        assert sum(each.breaker.until is not None for each in router.workers.values()) <= 2
    assert any(router.workers[name].breaker.ejections for name in ("p0", "p1", "p2"))
