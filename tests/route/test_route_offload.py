"""Short uncached prompts may be computed by decode workers that can: by a fixed threshold, or where it is faster and does little harm."""

from __future__ import annotations

import pytest
from route_rig import cluster, link, placed

from regauge.blocks import Stored
from regauge.route.cluster import Refusal, Request, Worker
from regauge.route.router import Router


def offloading(speed: float = 500.0, **config: object) -> Router:
    router = cluster(1, 0, **config)
    router.join(Worker("d0", decode=True, computes=True, prior_tokens_per_s=speed), 0.0)
    router.link(link(0, 0), 0.0)
    return router


@pytest.mark.parametrize(("tokens", "prefill"), [(64, None), (65, "p0")])
def test_a_fixed_threshold_counts_uncached_tokens(tokens: int, prefill: str | None) -> None:
    router = offloading(offload_tokens=64, block_tokens=10)
    assert placed(router, Request("a", tokens=tokens), 0.0).prefill == prefill
    router.cache_event("d0", Stored(1, (1, 2)), 0.0)
    assert placed(router, Request("b", tokens=tokens + 20, blocks=(1, 2)), 0.0).prefill == prefill


def test_nothing_is_offloaded_unless_asked_for() -> None:
    assert placed(offloading(), Request("a", tokens=1), 0.0).prefill == "p0"


def test_auto_offloads_what_is_faster_so() -> None:
    router = offloading(offload="auto")
    assert placed(router, Request("a", tokens=100), 0.0).prefill == "p0"  # half the speed, and nothing waits
    placed(router, Request("b", tokens=10_000), 0.0)
    route = placed(router, Request("c", tokens=100), 0.0)
    assert route.prefill is None  # 10 s of queue at prefill
    assert route.header.startswith("network-aware d0 ttft=")
    assert placed(router, Request("d", tokens=4000), 0.0).prefill == "p0"  # 8 s that the others' tokens would wait for


def test_without_prefill_decode_computes_everything_if_it_can() -> None:
    router = offloading()
    router.health("p0", False, 0.0)
    route = placed(router, Request("a", tokens=1000), 0.0)
    assert (route.prefill, route.terms["compute_s"]) == (None, 2.0)
    router.join(Worker("d0", decode=True), 0.0)
    refusal = router.route(Request("b", tokens=1000), 0.0)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.role, refusal.message) == (
        "no_worker",
        "prefill",
        "no prefill worker is usable",
    )
