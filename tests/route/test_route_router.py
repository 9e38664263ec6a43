"""Bookings: what a route takes is given back, to the last token, page and byte; and who is asked at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from route_rig import NIC, PER_TOKEN, cluster, idle, link, placed

from regauge.config import RouteConfig
from regauge.route.cluster import Link, Load, Refusal, Request, Route, Worker
from regauge.route.policies import POLICIES
from regauge.route.router import Router

NAMES = ("p0", "p1", "d0", "d1")
REPORTS = st.builds(
    Load,
    queued_tokens=st.none() | st.integers(0, 20_000),
    running=st.none() | st.integers(0, 20),
    free_pages=st.none() | st.integers(0, 500),
    pages=st.none() | st.integers(500, 600),
    page_size=st.none() | st.sampled_from([1, 16, 64]),
    prefill_tokens_per_s=st.none() | st.floats(1, 1e5),
    tpot_s=st.none() | st.floats(1e-3, 1),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["route", "prefilled", "first", "finished", "failed", "report", "link", "health", "join"]),
        st.integers(0, 5),
        REPORTS,
        st.floats(0, 3),
        st.sets(st.sampled_from(["p0", "p1", "d0", "d1"]), max_size=2),
    ),
    max_size=60,
)


class Traffic:
    """Random events, and what must hold after each."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.routes: list[Route] = []
        self.down: set[str] = set()
        self.now = 0.0
        self.attempts = 0

    def route(self, number: int, exclude: set[str]) -> None:
        self.attempts += 1
        request = Request(
            f"r{self.attempts}", tokens=1 + 997 * number, blocks=(1, 2, number), exclude=frozenset(exclude)
        )
        decided = self.router.route(request, self.now)
        if isinstance(decided, Refusal):
            assert decided.retry_after_s >= 1
            return
        assert not {decided.prefill, decided.decode} & (exclude | self.down)
        assert decided.prefill is not None or decided.decode == "d1"
        assert all(decided.terms[term] >= -1e-9 for term in ("queue_s", "compute_s", "transfer_s", "wait_s"))
        self.routes.append(decided)

    def worker(self, what: str, number: int, load: Load) -> None:
        name = NAMES[number % 4]
        if what == "report":
            self.router.report(name, load, self.now)
        elif what == "link":
            self.router.link(link(number % 2, number // 3, backlog_bytes=number * 10**8), self.now)
        elif what == "health":
            self.down ^= {name}
            self.router.health(name, name not in self.down, self.now)
        else:
            self.router.join(self.router.workers[name].worker, self.now)
            self.down -= {name}

    def attempt(self, what: str, number: int, seconds: float) -> None:
        if not self.routes:
            return
        attempt = self.routes[number % len(self.routes)]
        if what == "prefilled":
            self.router.prefilled(attempt.id, self.now, 0, 10, seconds)
        elif what == "first":
            self.router.first_token(attempt.id, self.now)
        else:
            self.routes.remove(attempt)
            if what == "finished":
                self.router.finished(attempt.id, self.now)
            else:
                self.router.failed(attempt.id, attempt.prefill or attempt.decode, self.now, "failed")

    def check(self) -> None:
        for each in self.router.workers.values():
            assert each.queue_s >= 0
            assert each.waiting_s(self.now) >= 0
            assert each.pages_used >= 0
            assert each.nic.booked >= 0
            assert each.nic.foreign >= 0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(POLICIES)), STEPS, st.booleans())
def test_whatever_happens_bookings_are_given_back_and_nobody_unusable_is_asked(
    policy: str, steps: list[tuple[str, int, Load, float, set[str]]], alone: bool
) -> None:
    traffic = Traffic(cluster(policy=policy, eject_failures=2))
    if alone:
        traffic.router.join(Worker("d1", decode=True, computes=True), 0.0)
    for what, number, load, seconds, exclude in steps:
        traffic.now += seconds
        if what == "route":
            traffic.route(number, exclude)
        elif what in ("report", "link", "health", "join"):
            traffic.worker(what, number, load)
        else:
            traffic.attempt(what, number, seconds)
        traffic.check()
    for route in traffic.routes:
        traffic.router.finished(route.id, traffic.now)
    assert idle(traffic.router)


def test_requests_between_two_reports_do_not_all_go_to_one_worker() -> None:
    for policy in sorted(set(POLICIES) - {"prefix"}):
        router = cluster(4, 4, policy=policy)
        routes = [placed(router, Request(f"r{i}", tokens=1000), 0.0) for i in range(8)]
        for names in ([route.prefill for route in routes], [route.decode for route in routes]):
            assert sorted(map(names.count, set(names))) == [2, 2, 2, 2], (policy, names)


def test_a_report_counts_what_is_booked_once() -> None:
    router = cluster(1, 1)
    for i in range(3):
        placed(router, Request(f"r{i}", tokens=1000), 0.0)
    p0 = router.workers["p0"]
    assert p0.waiting_s(0.0) == pytest.approx(3.0)
    router.report("p0", Load(queued_tokens=3000), 0.1)  # our own three, and nobody else's
    assert p0.waiting_s(0.1) == pytest.approx(3.0)
    router.report("p0", Load(queued_tokens=5000), 0.2)  # 2000 of another gateway
    assert p0.waiting_s(0.2) == pytest.approx(5.0)
    placed(router, Request("r3", tokens=1000), 0.2)
    assert p0.waiting_s(0.2) == pytest.approx(6.0)
    router.report("p0", Load(queued_tokens=1500), 0.21)  # r3 is on its way; half of the rest is done
    assert p0.waiting_s(0.21) == pytest.approx(2.5)
    assert p0.waiting_s(0.71) == pytest.approx(2.0)
    for i in range(4):
        router.finished(f"r{i}", 0.8)
    assert p0.waiting_s(0.8) == 0.0


def test_without_reports_a_queue_is_not_taken_to_move_beyond_its_head() -> None:
    router = cluster(1, 1)
    for i in range(3):
        placed(router, Request(f"r{i}", tokens=1000), 0.0)
    p0 = router.workers["p0"]
    assert p0.waiting_s(0.5) == pytest.approx(2.5)
    assert p0.waiting_s(100.0) == pytest.approx(2.0)
    router.prefilled("r0", 100.0, 0, 1000)
    assert p0.waiting_s(100.0) <= 2.0


def test_speed_is_learnt_from_answers_until_the_worker_says_it() -> None:
    router = cluster(1, 1)
    placed(router, Request("a", tokens=4000), 0.0)
    router.prefilled("a", 1.0, 0, 4000, 2.0)
    assert router.workers["p0"].speed == pytest.approx(2000.0)
    router.report("p0", Load(prefill_tokens_per_s=500.0), 1.5)
    assert router.workers["p0"].speed == 500.0


def test_decode_without_room_is_avoided_and_what_never_fits_is_refused() -> None:
    router = cluster(1, 2)
    for name, free in (("d0", 2), ("d1", 60)):
        router.report(name, Load(running=1, free_pages=free, pages=64, page_size=16), 0.0)
    for i in range(3):
        assert placed(router, Request(f"r{i}", tokens=160, max_tokens=16), 0.1).decode == "d1"
    refusal = router.route(Request("x", tokens=2000, max_tokens=16), 0.1)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.role) == ("no_room", "decode")


def test_decode_slots_are_booked() -> None:
    router = cluster(1, 2, slots=2, policy="network-aware")
    decodes = [placed(router, Request(f"r{i}", tokens=10), 0.0).decode for i in range(4)]
    assert sorted(decodes) == ["d0", "d0", "d1", "d1"]
    assert placed(router, Request("over", tokens=10), 0.0).terms["wait_s"] > 0


def test_a_decode_nic_with_a_backlog_is_avoided_by_the_policy_that_knows_it() -> None:
    router = cluster(1, 2)
    router.link(link(0, 0, backlog_bytes=int(5 * NIC)), 0.0)
    router.link(link(0, 1, backlog_bytes=0), 0.0)
    for i in range(4):
        route = placed(router, Request(f"r{i}", tokens=1000), 0.0)
        assert route.decode == "d1"
        router.finished(route.id, 0.0)


def test_kv_that_is_on_its_way_makes_a_nic_busy() -> None:
    """12 senders into one NIC: each waits for the others, and says so."""
    router = cluster(12, 1, slots=64)
    tokens = int(NIC / PER_TOKEN)  # a second of the NIC each
    predicted = [placed(router, Request(f"r{i}", tokens=tokens), 0.0).terms["transfer_s"] for i in range(12)]
    assert predicted == sorted(predicted)
    assert predicted[0] < 0.01
    assert predicted[-1] == pytest.approx(12 - 10, abs=0.01)  # 12 s of bytes, of which 10 s of computing hide 10


def test_refused_pairs_are_never_used_and_the_others_are() -> None:
    for policy in sorted(POLICIES):
        router = cluster(2, 2, policy=policy)
        for i, j in ((0, 0), (0, 1), (1, 0)):
            router.link(link(i, j, path="REFUSED"), 0.0)
        for i in range(4):
            route = placed(router, Request(f"r{i}", tokens=100), 0.0)
            assert (route.prefill, route.decode) == ("p1", "d1"), policy
        router.link(link(1, 1, path="REFUSED"), 0.0)
        refusal = router.route(Request("x"), 0.0)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.role) == ("no_worker", "prefill")


def test_a_link_may_be_known_before_its_workers_and_goes_with_them() -> None:
    router = Router()
    router.link(Link("p0", "d0", "REFUSED"), 0.0)
    router.join(Worker("p0", prefill=True), 0.0)
    router.join(Worker("d0", decode=True), 0.0)
    assert isinstance(router.route(Request("a"), 0.0), Refusal)
    router.join(Worker("d0", decode=True), 0.0)  # restarted: its links are the same
    assert isinstance(router.route(Request("a"), 0.0), Refusal)
    router.leave("d0", 0.0)
    router.join(Worker("d0", decode=True), 0.0)
    assert isinstance(router.route(Request("a"), 0.0), Route)


def test_models_are_kept_apart() -> None:
    router = cluster(2, 2)
    for name, role in (("pm", "prefill"), ("dm", "decode")):
        router.join(Worker(name, prefill=role == "prefill", decode=role == "decode", model="m"), 0.0)
    router.leave("p0", 0.0)
    router.leave("p1", 0.0)
    assert placed(router, Request("a", model="m", exclude=frozenset({"d0", "d1"})), 0.0).decode == "dm"
    assert isinstance(router.route(Request("b", model="other"), 0.0), Refusal)


def test_a_worker_may_change_its_role_while_requests_run() -> None:
    router = cluster(1, 2)
    first = placed(router, Request("a", tokens=100), 0.0)
    other = "d1" if first.decode == "d0" else "d0"
    router.update(Worker(other, prefill=True, prior_tokens_per_s=1e6), 0.0)
    route = placed(router, Request("b", tokens=100), 0.0)
    assert (route.prefill, route.decode) == (other, first.decode)
    router.finished("a", 0.0)
    router.finished("b", 0.0)
    assert idle(router)


def test_a_worker_of_both_roles_is_no_pair_with_itself() -> None:
    router = Router()
    for name in ("a", "b"):
        router.join(Worker(name, prefill=True, decode=True), 0.0)
    for i in range(6):
        route = placed(router, Request(f"r{i}", tokens=100), 0.0)
        assert route.prefill != route.decode


def test_an_attempt_is_booked_once() -> None:
    router = cluster()
    placed(router, Request("a"), 0.0)
    with pytest.raises(ValueError, match="'a' is booked already"):
        router.route(Request("a"), 0.0)


def test_news_of_workers_and_attempts_that_have_gone_is_ignored() -> None:
    router = cluster(1, 1)
    router.report("gone", Load(queued_tokens=5), 0.0)
    router.health("gone", True, 0.0)
    router.prefilled("gone", 0.0, 0, 0)
    router.first_token("gone", 0.0)
    router.finished("gone", 0.0)
    router.failed("gone", "p0", 0.0, "failed")
    assert idle(router)


def test_the_limit_of_time_per_token_is_kept_by_whoever_can() -> None:
    router = cluster(1, 2, slots=8, tpot_s=0.05)
    router.report("d0", Load(running=1, tpot_s=0.2), 0.0)
    router.report("d1", Load(running=6, tpot_s=0.03), 0.0)
    route = placed(router, Request("a", tokens=100), 0.1)
    assert (route.decode, route.note) == ("d1", "")
    router.health("d1", False, 0.1)
    refusal = router.route(Request("b", tokens=100), 0.1)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.retry_after_s) == ("tpot", 5)  # when the one that decodes there has ended
    route = placed(router, Request("a.1", tokens=100, admitted=True, root="a"), 0.1)
    assert route.decode == "d0"
    assert "beyond the limit of 0.05 s" in route.note


def test_decisions_are_the_same_for_the_same_seed() -> None:
    def run(policy: str, seed: int) -> list[str]:
        router = Router(RouteConfig(policy=policy), seed)  # type: ignore[arg-type]
        for i in range(6):
            router.join(Worker(f"p{i}", prefill=True), 0.0)
            router.join(Worker(f"d{i}", decode=True), 0.0)
        headers = []
        for i in range(12):
            headers.append(placed(router, Request(f"r{i}", tokens=100), 0.0).header)
            router.finished(f"r{i}", 0.0)
        return headers

    for policy in POLICIES:
        assert run(policy, 3) == run(policy, 3)
    assert run("least-load", 3) != run("least-load", 4)


def test_who_decodes_alone_is_let_in_so_that_an_old_measurement_cannot_shut_a_worker_for_ever() -> None:
    router = cluster(1, 1, slots=8, tpot_s=0.05)
    router.report("d0", Load(running=6, tpot_s=0.06), 0.0)
    refusal = router.route(Request("a", tokens=100), 0.1)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "tpot"
    router.report("d0", Load(running=0, tpot_s=0.06), 1.0)  # it was measured while six ran
    assert router.workers["d0"].tpot_s() == pytest.approx(0.06 * 9 / 14)
    router.report("d0", Load(running=0, tpot_s=0.2), 2.0)
    router.report("d0", Load(running=0, tpot_s=0.19), 3.0)
    assert placed(router, Request("b", tokens=100), 3.0).decode == "d0"


def test_low_priority_may_use_up_less_of_the_limit_of_time_per_token() -> None:
    router = cluster(1, 1, slots=8, tpot_s=0.05)
    router.report("d0", Load(running=2, tpot_s=0.04), 0.0)
    refusal = router.route(Request("low", priority=-3), 0.1)
    assert isinstance(refusal, Refusal)
    assert "0.0350 s are allowed" in refusal.message
    assert isinstance(router.route(Request("usual"), 0.1), Route)


def test_a_worker_of_unknown_speed_gets_one_prompt_until_it_is_known() -> None:
    router = Router(RouteConfig(ttft_s=2.0))
    router.join(Worker("p", prefill=True), 0.0)
    router.join(Worker("d", decode=True), 0.0)
    first = placed(router, Request("a", tokens=50_000), 0.0)  # nobody knows that it would be late
    refusal = router.route(Request("b", tokens=10), 0.1)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.retry_after_s) == ("deadline", 1)
    assert "how fast p computes is not known" in refusal.message
    router.prefilled(first.id, 5.0, 0, 50_000)
    router.first_token(first.id, 5.0)
    assert router.workers["p"].speed == pytest.approx(10_000.0)
    assert router.correction.factor(5.0) == 1.0  # it was a guess that was wrong, and no prediction
    assert placed(router, Request("b", tokens=10_000), 5.0).ttft_s == pytest.approx(1.0, abs=0.01)
    assert isinstance(router.route(Request("c", tokens=10_000), 5.0), Refusal)


def test_without_a_limit_nobody_waits_for_the_speed_to_be_known() -> None:
    router = Router(RouteConfig())
    router.join(Worker("p", prefill=True), 0.0)
    router.join(Worker("d", decode=True), 0.0)
    assert all(isinstance(router.route(Request(f"r{i}", tokens=1000), 0.0), Route) for i in range(3))


def test_speed_is_learnt_over_the_time_that_a_worker_was_busy() -> None:
    router = cluster(1, 1)
    for name in ("a", "b", "c"):
        placed(router, Request(name, tokens=2000), 0.0)
    router.prefilled("a", 2.0, 0, 2000)  # together: one has all the time,
    router.prefilled("b", 2.0, 0, 2000)
    router.prefilled("c", 3.0, 0, 2000)
    assert router.workers["p0"].speed == pytest.approx(2000.0, rel=0.02)
    placed(router, Request("d", tokens=2000), 100.0)  # and idle time counts for none
    router.prefilled("d", 101.0, 0, 2000)
    assert router.workers["p0"].speed == pytest.approx(2000.0, rel=0.02)


def test_decode_that_computes_prompts_is_measured_by_its_first_tokens() -> None:
    router = Router(RouteConfig(ttft_s=2.0))
    router.join(Worker("d", decode=True, computes=True), 0.0)
    router.first_token(placed(router, Request("a", tokens=4000), 0.0).id, 2.0)
    assert router.workers["d"].speed == pytest.approx(2000.0)


def test_decisions_are_counted_by_what_was_decided() -> None:
    router = cluster(1, 1, ttft_s=2.0)
    placed(router, Request("a", tokens=1000), 0.0)
    router.route(Request("b", tokens=1000), 0.0)
    router.health("p0", False, 0.0)
    router.route(Request("c", tokens=1000), 0.0)
    assert router.decisions == {"placed": 1, "deadline": 1, "no_worker": 1}


def test_a_worker_that_was_measured_too_slow_is_measured_again_and_not_shut_for_ever() -> None:
    router = cluster(1, 1, ttft_s=2.0)
    router.report("p0", Load(queued_tokens=0, prefill_tokens_per_s=10.0), 0.0)
    assert isinstance(router.route(Request("a", tokens=1000), 4.0), Refusal)
    placed(router, Request("b", tokens=1000), 5.1)
    assert isinstance(router.route(Request("c", tokens=1000), 5.1), Refusal), "one is enough"
    router.report("p0", Load(queued_tokens=0, prefill_tokens_per_s=1000.0), 6.0)
    router.finished("b", 6.0)
    assert isinstance(router.route(Request("d", tokens=1000), 6.1), Route)
