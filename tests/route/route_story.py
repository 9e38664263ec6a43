"""A random story of a cluster, by seed: workers come, go, fail and report; links, caches and requests of every kind. For recordings of decisions.

`play` drives a router through it and yields each decision in plain data: equal routers give equal ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from regauge.blocks import Cleared, Removed, Stored
from regauge.config import RouteConfig
from regauge.route import cluster
from regauge.route.cluster import Refusal
from regauge.route.router import Router

POLICIES = ("round-robin", "least-load", "prefix", "cache+load", "network-aware")
CAUSES = ("worker_lost", "failed", "timeout", "draining", "queue_full", "transfer_failed")
Plain = tuple[Any, ...]


def config(rng: random.Random, policy: Any) -> RouteConfig:
    return RouteConfig(
        policy=policy,
        block_tokens=64,
        index_blocks=rng.choice((400, 1_000_000)),
        assumed_tokens=rng.choice((64 * 40, 1_000_000)),
        stale_s=rng.choice((1.0, 10.0)),
        ttft_s=rng.choice((None, None, 8.0, 30.0)),
        tpot_s=rng.choice((None, None, 0.04)),
        offload=rng.choice(("fixed", "auto")),
        offload_tokens=rng.choice((0, 300)),
        eject_failures=rng.choice((2, 3)),
        eject_s=1.0,
    )


class Story:
    """`kinds`: the module with the router's words, and its class."""

    def __init__(self, seed: int, policy: str, kinds: Any = cluster, router: Any = Router) -> None:
        self.rng = rng = random.Random(seed)
        self.kinds = kinds
        self.router = router(config(rng, policy), seed, max_queue=rng.choice((None, 60)))
        self.now = 0.0
        self.count = 0
        self.open: list[Any] = []
        self.stage: dict[str, int] = {}
        self.seqs: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        self.prefills = [f"p{i}" for i in range(rng.choice((1, 3, 8)))]
        self.decodes = [f"d{i}" for i in range(rng.choice((1, 2, 6)))]
        self.computing = rng.random() < 0.4
        self.prompts = [tuple(rng.randrange(50 * k, 50 * k + 60) for k in range(12)) for _ in range(10)]
        for name in (*self.prefills, *self.decodes):
            self.join(name)
        for name in self.prefills:
            for other in self.decodes:
                self.link(name, other)

    def join(self, name: str) -> None:
        rng = self.rng
        for attempt in [each for each in self.open if name in (each.prefill, each.decode)]:
            self.end(attempt, lost=name)
        self.seqs[name], self.held[name] = 0, []
        prefill = name[0] == "p"
        self.router.join(
            self.kinds.Worker(
                name, prefill=prefill or rng.random() < 0.05, decode=not prefill, computes=self.computing and not prefill,
                slots=rng.choice((4, 16, 64)), prior_tokens_per_s=rng.choice((None, 4_000.0, 8_000.0)),
                model=rng.choice(("", "", "", "m")), overhead_s=rng.choice((0.0, 0.01)),
                attention_s=rng.choice((0.0, 1e-9)), cache_tokens=rng.choice((None, None, 64 * 30)),
            ),
            self.now,
        )  # fmt: skip

    def link(self, name: str, other: str) -> None:
        rng = self.rng
        path = rng.choice(("DIRECT", "DIRECT", "REMAP", "CONVERT", "CONVERT", "REFUSED"))
        rate = rng.choice((0.0, 1e9, 1e9, 4e8))
        self.router.link(
            self.kinds.Link(
                name, other, path, rng.choice((1e5, 2e5)), rate, rng.choice((0.0, 1e9, 8e8)),
                rng.choice((0, 0, rng.randrange(10**9))), rng.choice((0.0, 1e-6)),
            ),
            self.now,
        )  # fmt: skip

    def report(self, name: str) -> None:
        rng = self.rng
        worker = self.router.workers.get(name)
        queued = None if rng.random() < 0.3 else int(rng.random() * 20_000)
        if worker is not None and worker.queue and rng.random() < 0.7:
            queued = sum(each.tokens for each in worker.queue.values()) * rng.randrange(3) // 2
        load = self.kinds.Load(
            queued, None if rng.random() < 0.3 else rng.randrange(12), rng.choice((None, 900, 3_000)),
            rng.choice((None, 4_000)), rng.choice((None, 16, 64)), rng.choice((None, None, 5_000.0)),
            rng.choice((None, 0.02, 0.03)), None if rng.random() < 0.4 else self.seqs.get(name, 0) + (rng.random() < 0.1),
        )  # fmt: skip
        self.router.report(name, load, self.now - rng.choice((0.0, 0.005)))

    def cache(self, name: str) -> None:
        rng = self.rng
        self.seqs[name] = seq = self.seqs.get(name, 0) + 1 + (rng.random() < 0.03)
        held = self.held.setdefault(name, [])
        if rng.random() < 0.04:
            held.clear()
            self.router.cache_event(name, Cleared(seq), self.now)
        elif held and rng.random() < 0.4:
            gone = tuple(rng.sample(held, min(len(held), 5)))
            self.held[name] = [each for each in held if each not in gone]
            self.router.cache_event(name, Removed(seq, gone), self.now)
        else:
            fresh = rng.choice(self.prompts)[: rng.randrange(1, 13)]
            held += [each for each in fresh if each not in held]
            self.router.cache_event(name, Stored(seq, fresh), self.now)

    def request(self) -> Plain:
        rng = self.rng
        self.count += 1
        blocks = rng.choice(self.prompts)[: rng.randrange(13)] if rng.random() < 0.8 else ()
        names = [*self.prefills, *self.decodes]
        request = self.kinds.Request(
            f"r{self.count}", "t", "m" if rng.random() < 0.1 else "", len(blocks) * 64 + rng.randrange(1, 9_000), blocks,
            rng.randrange(1, 600), rng.choice((0, 0, 0, -2, 2)), rng.choice((None, None, None, 5.0)),
            rng.choice((None, None, None, 0.03)), frozenset(rng.sample(names, 1)) if rng.random() < 0.1 else frozenset(),
            rng.random() < 0.03, rng.random() < 0.05,
        )  # fmt: skip
        decided = self.router.route(request, self.now)
        if type(decided).__name__ == Refusal.__name__:
            return ("refused", decided.reason, decided.message, decided.retry_after_s, decided.ttft_s, decided.role)
        self.open.append(decided)
        self.stage[decided.id] = 0
        others = tuple((one.prefill, one.decode, one.score, dict(one.terms)) for one in decided.candidates)
        return (
            "placed", decided.prefill, decided.decode, decided.cached_tokens, decided.ttft_s, dict(decided.terms), others,
            decided.note,
        )  # fmt: skip

    def end(self, route: Any, lost: str = "") -> None:
        rng = self.rng
        self.open.remove(route)
        if lost or rng.random() < 0.15:
            cause = "worker_lost" if lost else rng.choice(CAUSES)
            self.router.failed(
                route.id, lost or rng.choice((route.prefill or route.decode, route.decode)), self.now, cause
            )
        else:
            self.router.finished(route.id, self.now, rng.choice(("complete", "complete", "cancelled", "failed")))

    def advance(self) -> None:
        """An attempt gets on."""
        rng = self.rng
        if not self.open:
            return
        route = rng.choice(self.open)
        stage = self.stage[route.id]
        self.stage[route.id] = stage + 1
        if stage == 0:
            cached = rng.choice((0, route.cached_tokens))
            self.router.prefilled(route.id, self.now, cached, rng.randrange(5_000), rng.choice((None, rng.random())))
        elif stage == 1:
            self.router.first_token(route.id, self.now)
        else:
            self.end(route)

    def step(self) -> Plain | None:
        rng = self.rng
        self.now += rng.choice((0.0, 0.001, 0.05, rng.expovariate(3)))
        draw, names = rng.random(), [*self.prefills, *self.decodes]
        name, other = rng.choice(names), rng.choice(self.decodes)
        if draw < 0.34:
            return self.request()
        if draw < 0.7:
            self.advance()
        elif draw < 0.8:
            self.report(name)
        elif draw < 0.88:
            self.link(rng.choice(self.prefills), other)
        elif draw < 0.975:
            if name in self.router.workers:
                self.cache(name)
        elif draw < 0.985:
            self.router.health(name, rng.random() < 0.8, self.now)
        elif draw < 0.993:
            self.join(name)
        elif draw < 0.995:
            for route in [each for each in self.open if name in (each.prefill, each.decode)]:
                self.end(route, lost=name)
            self.router.leave(name, self.now)
        elif name in self.router.workers:
            self.router.update(self.router.workers[name].worker, self.now)
        return None


def play(seed: int, policy: str, steps: int, kinds: Any = cluster, router: Any = Router) -> Iterator[Plain]:
    """Yield the decisions of a story of so many steps."""
    story = Story(seed, policy, kinds, router)
    for _ in range(steps):
        decision = story.step()
        if decision is not None:
            yield decision
    for number in range(0, story.count, 7):
        record = story.router.journal.of(f"r{number}")
        yield ("why", record and record.text())
