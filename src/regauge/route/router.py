"""The router: what is known of the workers, and the decision for each request. Pure: events and the time in, decisions out.

What a route needs is booked with it, prompt tokens at prefill, a slot and pages at decode, bytes on decode's NIC, until it is told that
they are used up or not wanted any more: so that requests which come between two reports of a worker do not all go to the same place.

    route --> [prefilled] --> [first_token] --> finished
      |            `--------------'-----------> failed
      `-> Refusal
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import inf
from random import Random
from typing import Final

from regauge.blocks import CacheEvent
from regauge.config_route import RouteConfig
from regauge.route import admission
from regauge.route.admission import Limits
from regauge.route.cluster import Cause, Link, Load, Outcome, Refusal, Request, Route, Worker
from regauge.route.health import Breaker
from regauge.route.model import Estimate, View, estimate
from regauge.route.nic import Flow
from regauge.route.policies import POLICIES, Pick, network_aware, offloaded
from regauge.route.prefix import PrefixIndex
from regauge.route.roster import Role, Roster
from regauge.route.search import BEST
from regauge.route.state import Booking, Standing
from regauge.route.why import Journal

BLAMELESS: Final[frozenset[Cause]] = frozenset({"draining", "queue_full"})
"""Failures that say nothing of a worker's health."""
PLACED: Final = "placed"
TRUST_STEP: Final = 0.1


class Router:
    """One model's workers. Not thread-safe: one event loop owns it. Times are seconds of the caller's clock, which never goes back.

    `max_queue`: most requests at once; None: any number. `seed` decides between equals. `explain`: keep a journal of what was decided and why; without,
    the decisions are the same, and of a route's candidates only the one that was taken is sure to be there.
    """

    def __init__(
        self, config: RouteConfig | None = None, seed: int = 0, *, max_queue: int | None = None, explain: bool = True
    ) -> None:
        self.config = config = config or RouteConfig()
        self.max_queue = max_queue
        self.index = PrefixIndex(config.index_blocks, config.stale_s)
        self.journal = Journal(config.keep_routes if explain else 0)
        self._explain = explain
        self.correction = admission.Correction()
        self._rng = Random(seed)  # noqa: S311  # choices between equals, not secrets
        self._roster = Roster()
        self._workers = self._roster.workers
        self._bookings: dict[str, Booking] = {}
        self._view = View(config, 0.0, self._rng, [], [], {})
        self._links: dict[str, dict[str, Link]] = {}
        self.decisions: Counter[str] = Counter()
        """Placed attempts, and those that were not by the reason; so far."""

    # What happens to workers

    def join(self, worker: Worker, now: float) -> None:
        """Know a worker, or know it anew: it has restarted, and nothing said of the one before holds. Its attempts must be ended first."""
        self._forget(worker.name)
        standing = Standing(worker, Breaker(), measured_at=now if worker.prior_tokens_per_s else -inf)
        self._workers[worker.name] = standing
        self._roster.sort()
        self.index.join(worker.name, self._capacity(standing), now)
        for link in self._links.get(worker.name, {}).values():
            self._linked(link, now)

    def leave(self, name: str, now: float) -> None:  # noqa: ARG002  # every event has its time
        """Forget a worker, if it is known, and its links. What is booked with others stays booked, until each attempt is ended."""
        self._forget(name)
        for other in self._links.pop(name, {}):
            self._links.get(other, {}).pop(name, None)
            if other in self._workers:
                self._workers[other].unlinked(name)

    def update(self, worker: Worker, now: float) -> None:  # noqa: ARG002  # every event has its time
        """Take another statement of a worker that goes on, such as another role; bookings and cache stay."""
        self._workers[worker.name].state(worker)
        self._roster.sort()

    def health(self, name: str, usable: bool, now: float) -> None:  # noqa: ARG002  # every event has its time
        """Say whether a worker can be reached and takes requests; whoever routes knows that by probes of its own."""
        standing = self._workers.get(name)
        if standing is not None and standing.up != usable:
            standing.up = usable
            self._roster.changed()

    def report(self, name: str, load: Load, now: float) -> None:
        """Take what a worker said of itself; `now` is when it was asked."""
        standing = self._workers.get(name)
        if standing is None:
            return  # it has left meanwhile
        standing.report(load, now)
        self.index.heard(name, load.cache_seq, now)
        if self.index.assumed(name):
            self.index.resize(name, self._capacity(standing))

    def link(self, link: Link, now: float) -> None:
        """Take the state of a pair of workers, which need not be known yet.

        Where only the backlog changes between many pairs, `nic` says it once for all of them.
        """
        known, decode = self._links.setdefault(link.prefill, {}), self._workers.get(link.decode)
        told = decode is not None and decode.rate_told and not link.nic_bytes_per_s
        if told or link.differs(known.get(link.decode)):
            known[link.decode] = link
            self._links.setdefault(link.decode, {})[link.prefill] = link
            self._linked(link, now)
        self.nic(link.decode, link.backlog_bytes, now, link.nic_bytes_per_s)

    def nic(self, decode: str, backlog_bytes: int, now: float, bytes_per_s: float = 0.0) -> None:
        """Take the state of a decode worker's NIC, if the worker is known: see `Link.backlog_bytes`; `bytes_per_s` 0: as it was."""
        standing = self._workers.get(decode)
        if standing is not None:
            standing.nic.said(backlog_bytes, bytes_per_s or standing.nic.rate, now)

    def cache_event(self, name: str, event: CacheEvent, now: float) -> None:
        """Take an event of a worker's prefix cache."""
        if name in self._workers:
            self.index.event(name, event, now)

    # What happens to requests

    def route(self, request: Request, now: float) -> Route | Refusal:
        """Decide where an attempt goes, and book what it needs there; or say why it goes nowhere now.

        Raises ValueError for an id that is booked already.
        """
        if request.id in self._bookings:
            raise ValueError(f"attempt {request.id!r} is booked already")
        decided = self._decide(request, now)
        self.decisions[decided.reason if isinstance(decided, Refusal) else PLACED] += 1
        if self._explain:
            record = self.journal.decided(request, decided, now)
            if isinstance(decided, Route):
                self._bookings[request.id].record = record
        return decided

    def prefilled(self, attempt: str, now: float, cached: int, computed: int, seconds: float | None = None) -> None:
        """An attempt's prompt is computed and its KV has crossed; `seconds` that computing alone took, if known."""
        booking = self._bookings.get(attempt)
        if booking is None or not booking.computing:
            return
        computer = booking.prefill or booking.decode
        self._crossed(booking, now)
        computer.computed(booking, computed, cached, now, seconds)
        if booking.cached and self._workers.get(computer.name) is computer:
            computer.trust += TRUST_STEP * (min(1.0, cached / booking.cached) - computer.trust)
        if booking.prefill is not None:
            booking.prefill.breaker.good(attempt)
        if booking.record is not None:
            booking.record.happened(attempt, now, ("prefilled: {} cached, {} computed", cached, computed))

    def first_token(self, attempt: str, now: float) -> None:
        """An attempt's first token has come."""
        booking = self._bookings.get(attempt)
        if booking is None or booking.first is not None:
            return
        booking.first = now
        measured = now - booking.made
        if booking.computing and booking.prefill is None:
            booking.decode.computed(booking, booking.tokens, booking.cached, now, None)
        self._crossed(booking, now)
        if not booking.guessed:
            ratio = self.correction.measured(booking.predicted_s, measured, now)
            for standing in _both(booking) if booking.known else ():
                standing.breaker.timed(ratio)
                self._roster.slow(standing, self.config, now)
        if booking.record is not None:
            what = ("first token after {:.3f} s, {:.3f} s predicted", measured, booking.predicted_s)
            booking.record.happened(attempt, now, what)

    def finished(self, attempt: str, now: float, outcome: Outcome = "complete") -> None:
        """An attempt is over: all that was booked for it is free."""
        booking = self._release(attempt, now)
        if booking is None:
            return
        for standing in _both(booking):
            if outcome == "complete":
                standing.breaker.good(attempt)
            else:
                standing.breaker.over(attempt)
        if booking.record is not None:
            booking.record.happened(attempt, now, outcome)

    def failed(self, attempt: str, worker: str, now: float, cause: Cause) -> None:
        """An attempt failed at a worker: all that was booked for it is free, and the worker's record has it."""
        booking = self._release(attempt, now)
        if booking is None:
            return
        for standing in _both(booking):
            if standing.name != worker or cause in BLAMELESS:
                standing.breaker.over(attempt)
            elif standing.breaker.bad(attempt, cause, self.config, now, spare=self._roster.spare(standing)):
                self._roster.changed()
                self.journal.happened(attempt, now, f"{worker} is left out: {standing.breaker.why}")
        self.journal.happened(attempt, now, f"failed at {worker}: {cause}")

    # What is known

    @property
    def workers(self) -> Mapping[str, Standing]:
        """All workers, for inspection."""
        return self._workers

    @property
    def booked(self) -> int:
        """Attempts that are not over."""
        return len(self._bookings)

    def usable(self, role: Role, now: float, exclude: frozenset[str] = frozenset()) -> bool:
        """Return whether some worker of a role would be given requests now."""
        return bool(self._roster.takers(role, now, "", exclude))

    # Inside

    def _forget(self, name: str) -> None:
        if self._workers.pop(name, None) is not None:
            self.index.leave(name)
            self._roster.sort()

    def _decide(self, request: Request, now: float) -> Route | Refusal:
        view, config = self._view, self.config
        view.now = now
        view.prefills, view.decodes, view.alone = self._roster.able(now, request.model, request.exclude)
        if not view.decodes:
            return Refusal("no_worker", f"no decode worker is usable{_but(request)}", role="decode")
        if not view.prefills and not view.alone:
            return Refusal("no_worker", f"no prefill worker is usable{_but(request)}", role="prefill")
        if self.max_queue is not None:
            allowed = admission.allowed(request, self.max_queue)
            if len(self._bookings) >= allowed:
                drained = min(each.waiting_s(now) for each in view.prefills or view.decodes)
                return admission.full(request, allowed, drained)
        limits = Limits.of(request, config)
        # More than the best placement is looked for where a limit may refuse it, and for those who ask why.
        view.few = 1 if limits is admission.NONE and not self._explain else BEST
        view.cached, note = self._cached(request, now) if request.blocks else ({}, "")
        made = self._estimates(request, view)
        if not made:
            return self._no_pair(request, view)
        if limits is admission.NONE:
            chosen = made[0]
        else:
            taken = admission.choose(made, limits, self.correction.careful(now), now)
            if isinstance(taken, Refusal):
                return taken
            chosen = taken
        tpot_limit = config.tpot_s if request.tpot_s is None else request.tpot_s
        if tpot_limit is not None and (chosen.tpot_s or 0.0) > tpot_limit:
            slow = f"{chosen.tpot_s:.4f} s per token are predicted, beyond the limit of {tpot_limit:g} s"
            note = f"{note}; {slow}" if note else slow
        ttft = chosen.ttft_s
        self._book(request, chosen, ttft, now)
        best = chosen.candidate()
        ranked = (best, *[one.candidate() for one in made if one is not chosen]) if len(made) > 1 else (best,)
        return Route(
            request.id, config.policy, best.prefill, best.decode, chosen.cached, ttft * self.correction.factor(now), ranked,
            note,
        )  # fmt: skip

    def _cached(self, request: Request, now: float) -> tuple[dict[str, int], str]:
        """Return the tokens that each worker is expected to have cached, and what is wrong with that."""
        cached: dict[str, int] = {}
        index, notes = self.index, []
        most, per_block, doubtful = max(0, request.tokens - 1), self.config.block_tokens, index.doubtful(now)
        for workers, blocks in index.matches(request.blocks):
            tokens = min(blocks * per_block, most)
            for name in index.names(workers):
                cached[name] = tokens
            for name in index.names(workers & doubtful) if workers & doubtful else ():
                share = self._workers[name].trust if index.assumed(name) else 1.0
                if stale := index.stale(name, now):
                    notes.append(
                        f"the cache index of {name} is stale ({stale}): {tokens} tokens count {self.config.stale_weight:g}"
                    )
                    share *= self.config.stale_weight
                cached[name] = int(tokens * share)
        return cached, "; ".join(notes) if notes else ""

    def _estimates(self, request: Request, view: View) -> list[Estimate]:
        """Return the best few placements of the policy that are possible, best first."""
        policy = POLICIES[self.config.policy]
        picks = policy(request, view) if view.prefills else []
        picks = offloaded(request, view, picks) + picks if view.alone else picks
        made = _first(request, view, picks)
        if not made and view.prefills and policy is not network_aware:
            made = _first(request, view, network_aware(request, view))  # all pairs that the policy likes are refused
        return made

    def _no_pair(self, request: Request, view: View) -> Refusal:
        need = request.tokens + request.max_tokens
        if all(each.wait_s(need) == inf for each in view.decodes):
            return Refusal("no_room", f"no decode worker can ever hold {need} tokens", role="decode")
        return Refusal("no_worker", "no usable prefill worker has a path to a usable decode worker", role="prefill")

    def _book(self, request: Request, chosen: Estimate, ttft_s: float, now: float) -> None:
        attempt, tokens, prefill, decode, computer = (
            request.id,
            request.tokens,
            chosen.prefill,
            chosen.decode,
            chosen.computer,
        )
        booking = Booking(attempt, now, prefill, decode)
        booking.tokens, booking.cached, booking.compute_s = tokens - chosen.cached, chosen.cached, chosen.compute_s
        booking.pages_tokens, booking.predicted_s = tokens + request.max_tokens, ttft_s
        booking.known, booking.guessed = chosen.known, computer.guessed
        self._bookings[attempt] = booking
        computer.enqueue(booking, now)
        decode.seat(booking)
        if prefill is not None:
            flow = Flow(chosen.ready, chosen.ready + chosen.compute_s, chosen.wire_bytes)
            decode.nic.add(attempt, flow, now)
            prefill.breaker.given(attempt, now)
        decode.breaker.given(attempt, now)
        blocks = request.blocks
        if blocks:
            self.index.assume(computer.name, blocks)

    def _crossed(self, booking: Booking, now: float) -> None:
        """The prompt is computed, and its KV where it is wanted."""
        if booking.computing:
            booking.computing = False
            (booking.prefill or booking.decode).dequeue(booking, now)
            booking.decode.nic.drop(booking.id, now)

    def _release(self, attempt: str, now: float) -> Booking | None:
        booking = self._bookings.pop(attempt, None)
        if booking is not None:
            self._crossed(booking, now)
            booking.decode.unseat(booking, now)
        return booking

    def _linked(self, link: Link, now: float) -> None:
        prefill, decode = self._workers.get(link.prefill), self._workers.get(link.decode)
        if prefill is not None:
            prefill.linked(link)
        if decode is not None:
            own = self._links[link.decode].values()
            fastest = max([each.bytes_per_s for each in own if each.decode == link.decode])
            decode.rate_told = link.nic_bytes_per_s > 0
            decode.nic.paced(link.nic_bytes_per_s or fastest, now)

    def _capacity(self, standing: Standing) -> int:
        """Return the blocks that a cache is assumed to hold."""
        tokens = standing.worker.cache_tokens
        if tokens is None:
            load = standing.load
            pages, size = load.pages, load.page_size
            tokens = pages * size if pages and size else self.config.assumed_tokens
        return max(1, tokens // self.config.block_tokens)


def _first(request: Request, view: View, picks: list[Pick]) -> list[Estimate]:
    """Return the estimates of the first few picks that are possible."""
    made: list[Estimate] = []
    for pick in picks:
        one = pick.estimate or estimate(request, view, pick.prefill, pick.decode)
        if one is not None:
            made.append(one)
            if len(made) == BEST:
                break
    return made


def _both(booking: Booking) -> tuple[Standing, ...]:
    return (booking.decode,) if booking.prefill is None else (booking.prefill, booking.decode)


def _but(request: Request) -> str:
    return f", but for {', '.join(sorted(request.exclude))}, which failed this request" if request.exclude else ""
