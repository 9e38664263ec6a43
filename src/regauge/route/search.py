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


class Start(NamedTuple):
    """What a prompt finds at one prefill worker."""

    prefill: Standing
    cached: int
    queue_s: float
    compute_s: float


class Room(NamedTuple):
    """What a request finds at one decode worker, whoever computes its prompt."""

    decode: Standing
    wait_s: float
    over: float
    """What is added to the score for too slow tokens,"""
    held: float
    """and for the requests there: of equally good workers the one with fewer will be faster for longer."""


class Found(NamedTuple):
    """A pair that was priced. They sort by score; equal ones by when they were looked at."""

    score: float
    order: int
    start: Start
    room: Room
    begin: float
    transfer_s: float
    late_s: float
    harm_s: float
    wire_bytes: float
    known: bool

    def estimate(self) -> Estimate:
        """Return it as what a policy gives."""
        start, decode = self.start, self.room.decode
        return Estimate(
            start.prefill, decode, start.cached, start.queue_s, start.compute_s, self.transfer_s, self.late_s,
            self.harm_s, decode.tpot_s(), self.wire_bytes, self.begin, self.known,
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
        found.append(Start(each, have, each.waiting_s(now), each.compute_s(total - have, have)))
    return found


def rooms(request: Request, view: View) -> list[Room]:
    """Return what each decode worker has for the request."""
    need = request.tokens + request.max_tokens
    limit = view.config.tpot_s if request.tpot_s is None else request.tpot_s
    found = []
    for decode in view.decodes:
        over = 0.0
        if limit is not None:
            tpot = decode.tpot_s()
            if tpot is not None and tpot > limit:
                over = OVER_LIMIT * (tpot - limit) * request.max_tokens
        held = 1e-6 * (len(decode.seats) + decode.foreign_seats)
        found.append(Room(decode, decode.wait_s(need), over, held))
    return found


class Search:
    """One request's search."""

    def __init__(self, request: Request, view: View) -> None:
        self.tokens = request.tokens
        self.now = view.now
        self.best: list[Found] = []
        """The few best pairs so far, in order."""
        self._order = 0

    def look(self, start: Start, rooms: Sequence[Room]) -> bool:
        """Look at one prefill worker's pairs with some decode workers; return whether all of them are possible."""
        now, tokens, best, links = self.now, self.tokens, self.best, start.prefill.links
        queue, compute = start.queue_s, start.compute_s
        bounds = []
        order = self._order
        possible = True
        for room in rooms:
            decode, wait, over, held = room
            link = links.get(decode.name, UNKNOWN)
            if wait == inf or link.path == "REFUSED" or decode is start.prefill:
                possible = False
                continue
            order += 1
            begin = now + queue
            if wait > queue:
                begin += wait - queue
            nic, rate, size = decode.nic, link.bytes_per_s, link.bytes_per_token * tokens
            if nic.rate and nic.rate < rate:
                rate = nic.rate
            if rate:
                front, ours = nic.least(size, begin, now, rate) if nic.foreign or nic.moving else (0.0, 0.0)
                sent = begin + (size + front) / rate
                complete = begin + compute + TAIL_S
                landed = (sent if sent > complete else complete) + HARM * ours / rate
            else:
                landed = begin + compute
            least = landed - now + link.convert_s_per_token * tokens + over + held
            bounds.append((least - SLACK * least - SLACK_NOW * now, order, room, link))
        self._order = order
        bounds.sort()
        for least, number, room, link in bounds:
            if len(best) < BEST:
                insort(best, self._price(start, room, link, number))
            elif least > best[-1][0]:
                break
            else:
                found = self._price(start, room, link, number)
                if found < best[-1]:
                    insort(best, found)
                    del best[BEST:]
        return possible

    def _price(self, start: Start, room: Room, link: Link, order: int) -> Found:
        decode, wait, over, held = room
        queue, compute, now, tokens = start.queue_s, start.compute_s, self.now, self.tokens
        late = wait - queue if wait > queue else 0.0
        begin = now + queue + late
        size = link.bytes_per_token * tokens
        landed, harm = decode.nic.finish(size, begin, begin + compute, now, link.bytes_per_s)
        transfer = landed - begin - compute + link.convert_s_per_token * tokens
        score = queue + compute + transfer + late + HARM * harm + over + held
        return Found(score, order, start, room, begin, transfer, late, harm, size, link.bytes_per_s > 0)
