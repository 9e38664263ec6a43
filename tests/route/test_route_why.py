"""What a route's explanation says, and how many are kept."""

from __future__ import annotations

import json

from route_rig import NIC, cluster, link, placed

from regauge.route.cluster import Refusal, Request, Route, Worker
from regauge.route.router import Router
from regauge.route.why import Journal, explain


def test_the_terms_add_up_and_the_runners_up_say_why_they_lost() -> None:
    router = cluster(1, 2)
    router.link(link(0, 1, backlog_bytes=int(3 * NIC)), 0.0)
    route = placed(router, Request("a", tenant="acme", tokens=1000), 0.0)
    assert (route.prefill, route.decode) == ("p0", "d0")
    total = sum(route.terms[name] for name in ("queue_s", "compute_s", "transfer_s", "wait_s"))
    assert abs(total - route.ttft_s) < 1e-9
    assert route.header == "network-aware p0>d0 ttft=1.002 cached=0"
    router.prefilled("a", 1.0, 0, 1000)
    router.first_token("a", 1.1)
    router.finished("a", 2.0)
    record = router.journal.of("a")
    assert record is not None
    text = record.text()
    for part in (
        "request a: 1000 tokens, tenant acme",
        "p0 > d0, by network-aware: first token after 1.002 s",
        "computing 1.000 s",
        "100.0 MB to send",
        "not p0 > d1: +2.098 s, most of it transfer not hidden (+2.098 s)",
        "first token after 1.100 s, 1.002 s predicted",
        "2.000 s  a: complete",
    ):
        assert part in text, part
    data = json.loads(json.dumps(record.data()))
    assert data["decisions"][0]["others"][0]["decode"] == "d1"
    assert [each["event"] for each in data["events"]][-1] == "complete"


def test_refusals_are_explained_too() -> None:
    router = cluster(1, 1, ttft_s=0.5)
    refusal = router.route(Request("a", tokens=1000), 0.0)
    assert isinstance(refusal, Refusal)
    assert explain(refusal)[0].startswith("refused, deadline: the first token is predicted after 1.00 s")
    record = router.journal.of("a")
    assert record is not None
    assert json.loads(json.dumps(record.data()))["decisions"][0]["refused"] == "deadline"


def test_only_the_newest_are_kept() -> None:
    journal = Journal(3)
    for number in range(5):
        journal.decided(Request(f"r{number}"), Route(f"r{number}", "prefix", None, "d0", 0, 0.0), 0.0)
        journal.decided(Request(f"r{number}.1", root=f"r{number}"), Route("", "prefix", None, "d0", 0, 0.0), 1.0)
        for event in range(200):
            journal.happened(f"r{number}.1", 2.0, str(event))
    assert len(journal) == 3
    assert journal.of("r1") is None
    assert journal.of("r1.1") is None
    record = journal.of("r4.1")
    assert record is not None
    assert record is journal.of("r4")
    assert (len(record.decisions), len(record.events)) == (2, 64)


def test_without_explanations_nothing_is_kept() -> None:
    router = Router(explain=False)
    router.join(Worker("d0", decode=True, computes=True), 0.0)
    route = placed(router, Request("a", tokens=1000), 0.0)
    router.first_token("a", 1.0)
    router.finished("a", 2.0)
    assert (route.decode, [one.decode for one in route.candidates]) == ("d0", ["d0"])
    assert router.journal.of("a") is None
