"""The search of `network-aware`: the few best pairs, without pricing those that cannot be among them.

The rule is `policies.network_aware`'s. What makes it cheap: a pair's score has a bound from below that takes constant time, whatever is on its way to
decode; pairs are priced in the order of their bounds, until the next bound is beyond the last of the few best.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import inf
from operator import itemgetter
from typing import Final, NamedTuple, cast

from regauge.route.cluster import Link, Request
from regauge.route.model import HARM, Estimate, View
from regauge.route.nic import TAIL_S
from regauge.route.state import UNKNOWN, Standing

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


NOTHING_S: Final = 1e-9
"""A pair that is better by less need not be found, where only the best is wanted."""


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


_found = cast("Callable[[type[Found], Sequence[object]], Found]", tuple.__new__)
_estimate = cast("Callable[[type[Estimate], Sequence[object]], Estimate]", tuple.__new__)
"""Two thirds of the time of the classes' own ways."""


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
            left -= done if done < most else most  # noqa: FURB136  # a third of the time of min()
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
    """One request's search: `first` with the best prefill worker, then `look` at the others; `best` has the few best pairs so far, in order."""

    __slots__ = ("_around", "_few", "_first", "_floors", "_now", "_order", "_sure", "_tokens", "_view", "best")

    def __init__(self, request: Request, view: View) -> None:
        self.best: list[Found] = []
        self._view = view
        self._now, self._tokens, self._few = view.now, request.tokens, view.few
        self._order = 0
        self._first: Start | None = None
        self._around: list[Room] = []
        """Decode workers that the others are looked at with,"""
        self._floors: list[tuple[float, float]] = []
        """and their scores with the first one, or bounds of them from below, with what of it is for delaying others."""
        self._sure = True
        """Whether all of those are to be looked at: of many, only the few that are best with the first one are."""

    def first(self, start: Start, rooms: list[Room]) -> None:
        """Look at the best prefill worker's pairs with all decode workers."""
        self._around, self._first = rooms, start
        if self._look(start, rooms, self._floors):
            self._sure = len(rooms) <= BEST
            if self._few == BEST:
                self._narrow(self.best)
        else:
            # Where the best prefill worker is refused by some, or all, all are looked at with the others.
            self._floors = []

    def look(self, start: Start) -> None:
        """Look at another prefill worker's pairs."""
        if self._few == 1 and self._floors:
            rooms = self._better(start)
            if rooms and self._first is not None and not self._sure:
                wide = Search(Request("", tokens=self._tokens), self._view)
                wide._few = BEST
                wide._look(self._first, self._around, [])
                self._narrow(wide.best)
                rooms = self._better(start)
        else:
            rooms = self._around
        if rooms:
            self._look(start, rooms, [])

    def _narrow(self, best: list[Found]) -> None:
        self._around = [found.room for found in best]
        self._floors = [(found.score, HARM * found.harm_s) for found in best]
        self._sure = True

    def _better(self, start: Start) -> list[Room]:
        """Return the decode workers with which another prefill worker may be better than the best pair."""
        first = self._first
        if first is None or any(room[1] for room in self._around) or not start[0].alike(first[0], self._view.decodes):
            return self._around
        # Nobody waits for decode, and the computation is done no earlier than with the first one. What begins later by d lands no earlier, and
        # delays others by at most d less; what begins earlier by d lands at most d earlier, and delays others no less.
        later, enough = start[2] - first[2], self.best[0].score - NOTHING_S
        both = zip(self._around, self._floors, strict=True)
        if later < 0:
            rooms = [(score, room) for room, (score, _) in both if score + later < enough]
        else:
            less = HARM * later
            rooms = [(score, room) for room, (score, harm) in both if score - min(less, harm) < enough]
        rooms.sort(key=itemgetter(0))  # among equals, those that are better with the first one
        return [room for _, room in rooms]

    def estimate(self, found: Found) -> Estimate:
        """Return a pair as what a policy gives."""
        _, _, start, room, transfer, late, harm, link = found
        prefill, cached, queue, compute = start
        return _estimate(
            Estimate,
            (
                prefill, room[0], cached, queue, compute, transfer, late, harm, room[0].tpot_s(),
                link.bytes_per_token * self._tokens, self._now + queue + late, link.bytes_per_s > 0,
            ),
        )  # fmt: skip

    def _look(  # noqa: C901  # written out: this is done for every pair
        self, start: Start, rooms: Sequence[Room], floors: list[tuple[float, float]]
    ) -> bool:
        prefill, _, queue, compute = start
        now, tokens, order, links = self._now, self._tokens, self._order, prefill.links
        limit = self.best[self._few - 1][0] if len(self.best) >= self._few else inf
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
            landed, nic, rate = begin + compute, decode.nic, link.bytes_per_s
            exact, harm = nic.idle or not rate, 0.0
            if rate:
                if nic.rate and nic.rate < rate:
                    rate = nic.rate
                size, landed = link.bytes_per_token * tokens, landed + TAIL_S
                if exact:
                    sent = begin + size / rate
                else:
                    front, ours = nic.least(size, begin, now, rate)
                    sent, harm = begin + (size + front) / rate, HARM * ours / rate
                if sent > landed:
                    landed = sent
            # In the order of `_price`, so that what is equal stays so.
            transfer = landed - begin - compute + link.convert_s_per_token * tokens
            score = queue + compute + transfer + late + harm + over + held
            floors.append((score, harm))
            if not exact:
                score -= SLACK * score + SLACK_NOW * now
                if score <= limit:
                    bounds.append((score, order, room, link))
            elif score < limit:
                limit = self._keep(_found(Found, (score, order, start, room, transfer, late, 0.0, link)))
        self._order, order = order, self._order + 1
        bounds.sort()
        for score, number, room, link in bounds:
            if score > limit:
                break
            found = self._price(start, room, link, number)
            floors[number - order] = found.score, HARM * found.harm_s
            if found[0] <= limit:
                limit = self._keep(found)
        return possible

    def _keep(self, found: Found) -> float:
        """Keep a pair if it is among the best; return the score that the next one needs."""
        best, few = self.best, self._few
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
        score = queue + compute + transfer + late + HARM * harm + over + held
        return _found(Found, (score, order, start, room, transfer, late, harm, link))
