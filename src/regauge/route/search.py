"""The search of `network-aware`: the few best pairs, without pricing those that cannot be among them.

The rule is `policies.network_aware`'s. What makes it cheap: a pair's score has a bound from below that takes constant time, whatever is on its way to
decode; pairs are priced in the order of their bounds, until the next bound is beyond the last of the few best.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from regauge.route.cluster import Link, Request
from regauge.route.model import HARM, UNKNOWN, Estimate, View
from regauge.route.nic import TAIL_S
from regauge.route.state import Standing

BEST: Final = 4
"""Prefill workers, and decode workers, whose pairs are looked at."""
OVER_LIMIT: Final = 10.0
"""Times that a second counts by which a placement exceeds its limit of time per token, scaled by the tokens to come."""
SLACK: Final = 1e-9
SLACK_NOW: Final = 1e-12
"""Shares, of itself and of the time, by which a bound is lowered: it is not rounded as the score is."""


Start = tuple[Standing, int, float, float]
"""What a prompt finds at one prefill worker: tokens that are cached, seconds of computation in front of it, and its own."""


Room = tuple[Standing, float, float, float]
"""What a request finds at one decode worker, whoever computes its prompt: the wait in seconds, what is added to the score for too slow tokens, and for
the requests there: of equally good workers the one with fewer will be faster for longer."""


class Found(NamedTuple):
    """A pair that was priced. They sort by score; equal ones by when they were looked at."""

    score: float
    order: int
    start: Start
    room: Room
    transfer_s: float
    late_s: float
    harm_s: float
    link: Link

    def estimate(self, tokens: int, now: float) -> Estimate:
        """Return it as what a policy gives."""
        prefill, cached, queue, compute = self.start
        decode, link, late = self.room[0], self.link, self.late_s
        return Estimate(
            prefill, decode, cached, queue, compute, self.transfer_s, late, self.harm_s, decode.tpot_s(),
            link.bytes_per_token * tokens, now + queue + late, link.bytes_per_s > 0,
        )  # fmt: skip


def cheapest(costs: Sequence[float], chance: float) -> list[int]:
    """Return the positions of the `BEST` lowest costs, the lowest first; equal ones in turn from a random one on: `chance`, from 0 to below 1."""
    count = len(costs)
    if count > BEST:
        most = sorted(costs)[BEST - 1]
        few = [at for at, cost in enumerate(costs) if cost <= most]
    else:
        few = list(range(count))
    first = bisect_left(few, int(chance * count))
    few = few[first:] + few[:first]
    few.sort(key=costs.__getitem__)
    return few[:BEST]


def starts(request: Request, view: View) -> list[Start]:
    """Return the few prefill workers that would have the prompt computed first."""
    now, total, get = view.now, request.tokens, view.cached.get
    costs: list[float] = []
    add = costs.append
    for each in view.prefills:
        # `waiting_s` and `compute_s`, written out: this is done for every worker.
        have = get(each.name, 0)
        left = each.queue_s
        if left:
            done = each.done_s + now - each.done_at
            most = left if now <= each.fresh_until else each.head_s
            left -= done if done < most else most
        tokens = total - have
        if each.attention_s:
            compute = each.overhead_s + tokens / each.speed + each.attention_s * tokens * (have + tokens / 2)
        else:
            compute = each.overhead_s + tokens / each.speed
        add(left + each.foreign_s + compute)
    few = cheapest(costs, view.rng.random() if len(costs) > 1 else 0.0)
    found = []
    for at in few:
        each = view.prefills[at]
        have = get(each.name, 0)
        found.append((each, have, each.waiting_s(now), each.compute_s(total - have, have)))
    return found


def rooms(request: Request, view: View) -> list[Room]:
    """Return what each decode worker has for the request."""
    need = request.tokens + request.max_tokens
    limit = view.config.tpot_s if request.tpot_s is None else request.tpot_s
    found = []
    for decode in view.decodes:
        over, taken = 0.0, decode.taken
        if limit is not None:
            tpot = decode.tpot_s()
            if tpot is not None and tpot > limit:
                over = OVER_LIMIT * (tpot - limit) * request.max_tokens
        at_once = taken < decode.slots and need <= decode.tokens_free
        found.append((decode, 0.0 if at_once else decode.wait_s(need), over, 1e-6 * taken))
    return found


class Search:
    """One request's search. `few`: how many of the best pairs are kept."""

    __slots__ = ("_now", "_order", "_tokens", "best", "few")

    def __init__(self, tokens: int, now: float, few: int) -> None:
        self.few = few
        self.best: list[Found] = []
        """In order."""
        self._tokens = tokens
        self._now = now
        self._order = 0

    def look(self, start: Start, rooms: Sequence[Room]) -> bool:
        """Look at one prefill worker's pairs with some decode workers; return whether all of them are possible."""
        prefill, _, queue, compute = start
        now, tokens, order, links = self._now, self._tokens, self._order, prefill.links
        limit = self.best[self.few - 1][0] if len(self.best) >= self.few else inf
        bounds = []
        possible = True
        for room in rooms:
            decode, wait, over, held = room
            link = links.get(decode.name, UNKNOWN)
            if wait == inf or link.path == "REFUSED" or decode is prefill:
                possible = False
                continue
            order += 1
            late = wait - queue if wait > queue else 0.0
            begin = now + queue + late
            landed, harm = begin + compute, 0.0
            nic, rate = decode.nic, link.bytes_per_s
            if rate:
                if nic.rate and nic.rate < rate:
                    rate = nic.rate
                size, landed = link.bytes_per_token * tokens, landed + TAIL_S
                if nic.idle:
                    sent = begin + size / rate
                else:
                    front, ours = nic.least(size, begin, now, rate)
                    sent, harm = begin + (size + front) / rate, HARM * ours / rate
                if sent > landed:
                    landed = sent
            # In the order of `_price`, so that what is equal stays so.
            transfer = landed - begin - compute + link.convert_s_per_token * tokens
            score = queue + compute + transfer + late + harm + over + held
            if not rate or nic.idle:
                if score < limit:
                    limit = self._keep(Found(score, order, start, room, transfer, late, 0.0, link))
            else:
                score -= SLACK * score + SLACK_NOW * now
                if score <= limit:
                    bounds.append((score, order, room, link))
        self._order = order
        if bounds:
            bounds.sort()
            for score, order, room, link in bounds:
                if score > limit:
                    break
                found = self._price(start, room, link, order)
                if found[0] <= limit:
                    limit = self._keep(found)
        return possible

    def _keep(self, found: Found) -> float:
        """Keep a pair if it is among the best; return the score that the next one needs."""
        best, few = self.best, self.few
        insort(best, found)
        if len(best) > few:
            best.pop()
        return best[-1][0] if len(best) == few else inf

    def _price(self, start: Start, room: Room, link: Link, order: int) -> Found:
        decode, wait, over, held = room
        _, _, queue, compute = start
        now, tokens = self._now, self._tokens
        late = wait - queue if wait > queue else 0.0
        begin = now + queue + late
        landed, harm = decode.nic.finish(link.bytes_per_token * tokens, begin, begin + compute, now, link.bytes_per_s)
        transfer = landed - begin - compute + link.convert_s_per_token * tokens
        return Found(queue + compute + transfer + late + HARM * harm + over + held, order, start, room, transfer, late, harm, link)
