"""The search of `network-aware`: the few best pairs, without pricing those that cannot be among them.

The rule is `policies.network_aware`'s. What makes it cheap: a pair's score has a bound from below that takes constant time, whatever is on its way to
decode; pairs are priced in the order of their bounds, until the next bound is beyond the last of the few best.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import Final

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


NOTHING_S: Final = 1e-9
"""A pair that is better by less need not be found, where only the best is wanted."""


class Start:
    """What a prompt finds at one prefill worker."""

    __slots__ = ("cached", "compute_s", "prefill", "queue_s")

    def __init__(self, prefill: Standing, cached: int, queue_s: float, compute_s: float) -> None:
        self.prefill = prefill
        self.cached = cached
        """Tokens."""
        self.queue_s = queue_s
        """Computation in front of it, and"""
        self.compute_s = compute_s
        """its own."""


class Room:
    """What a request finds at one decode worker, whoever computes its prompt."""

    __slots__ = ("decode", "harm_s", "held", "late_s", "score", "wait_s")

    def __init__(self, decode: Standing, wait_s: float, late_s: float, held: float) -> None:
        self.decode, self.wait_s = decode, wait_s
        self.late_s = late_s
        """Added to the score for too slow tokens, and"""
        self.held = held
        """for the requests there: of equally good workers the one with fewer will be faster for longer."""
        self.score = 0.0
        """With the best prefill worker, or a bound of it from below, and"""
        self.harm_s = 0.0
        """what of that is for delaying others."""


class Found:
    """A pair that was priced; of equal scores the one that was looked at first is the better one: `order`."""

    __slots__ = ("harm_s", "late_s", "link", "order", "room", "score", "start", "transfer_s")

    def __init__(self, score: float, order: int, start: Start, room: Room, link: Link) -> None:
        self.score, self.order, self.start, self.room, self.link = score, order, start, room, link
        self.transfer_s = self.late_s = self.harm_s = 0.0


def cheapest(costs: list[float], chance: float) -> list[int]:
    """Return the positions of the `BEST` lowest costs, the lowest first; equal ones in turn from a random one on: `chance`, from 0 to below 1."""
    count = len(costs)
    few: list[int] = []
    at, most = int(chance * count), inf
    for _ in range(count):
        cost = costs[at]
        if cost < most or len(few) < BEST:
            place = len(few)
            while place and costs[few[place - 1]] > cost:
                place -= 1
            few.insert(place, at)
            if len(few) > BEST:
                few.pop()
            most = costs[few[-1]]
        at += 1
        if at == count:
            at = 0
    return few


def starts(request: Request, view: View) -> list[Start]:
    """Return the few prefill workers that would have the prompt computed first."""
    now, total, cached = view.now, request.tokens, view.cached
    costs: list[float] = []
    for each in view.prefills:
        # `waiting_s` and `compute_s`, written out: this is done for every worker.
        have = cached.get(each.name, 0)
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
        costs.append(left + each.foreign_s + compute)
    few = cheapest(costs, view.rng.random() if len(costs) > 1 else 0.0)
    found = []
    for at in few:
        each = view.prefills[at]
        have = cached.get(each.name, 0)
        found.append(Start(each, have, each.waiting_s(now), each.compute_s(total - have, have)))
    return found


def rooms(request: Request, view: View) -> list[Room]:
    """Return what each decode worker has for the request."""
    more = request.max_tokens
    need = request.tokens + more
    limit = view.config.tpot_s if request.tpot_s is None else request.tpot_s
    found = []
    for decode in view.decodes:
        over, taken = 0.0, decode.taken
        if limit is not None:
            tpot = decode.tpot_s()
            if tpot is not None and tpot > limit:
                over = OVER_LIMIT * (tpot - limit) * more
        at_once = taken < decode.slots and need <= decode.tokens_free
        found.append(Room(decode, 0.0 if at_once else decode.wait_s(need), over, 1e-6 * taken))
    return found


_SCORE = attrgetter("score")


class Search:
    """One request's search: `first` with the best prefill worker, then `look` at the others; `best` has the few best pairs so far, in order."""

    __slots__ = ("_around", "_bounded", "_few", "_first", "_now", "_order", "_sure", "_tokens", "_view", "best")

    def __init__(self, tokens: int, view: View, few: int) -> None:
        self.best: list[Found] = []
        self._view = view
        self._now, self._tokens, self._few = view.now, tokens, few
        self._order = 0
        self._first: Start | None = None
        self._around: list[Room] = []
        """Decode workers that the others are looked at with."""
        self._bounded = False
        """Whether these have their scores with the first prefill worker, or bounds of them."""
        self._sure = True
        """Whether all of those are to be looked at: of many, only the few that are best with the first one are."""

    def first(self, start: Start, rooms: list[Room]) -> None:
        """Look at the best prefill worker's pairs with all decode workers."""
        self._around, self._first = rooms, start
        # Where the best prefill worker is refused by some, or all, all are looked at with the others.
        self._bounded = self._look(start, rooms, True)
        if self._bounded:
            self._sure = len(rooms) <= BEST
            if self._few == BEST:
                self._narrow(self.best)

    def look(self, start: Start) -> None:
        """Look at another prefill worker's pairs."""
        rooms = self._around
        if self._few == 1 and self._bounded and rooms:
            rooms = self._better(start)
            if rooms and self._first is not None and not self._sure:
                wide = Search(self._tokens, self._view, BEST)
                wide._look(self._first, self._around, False)
                self._narrow(wide.best)
                rooms = self._better(start)
        if rooms:
            self._look(start, rooms, False)

    def _narrow(self, best: list[Found]) -> None:
        for found in best:
            found.room.score, found.room.harm_s = found.score, HARM * found.harm_s
        self._around = [found.room for found in best]
        self._sure = True

    def _better(self, start: Start) -> list[Room]:
        """Return the decode workers with which another prefill worker may be better than the best pair."""
        first = self._first
        if first is None or not start.prefill.alike(first.prefill, self._view.decodes):
            return self._around
        # Nobody waits for decode, and the computation is done no earlier than with the first one. What begins later by d lands no earlier, and
        # delays others by at most d less; what begins earlier by d lands at most d earlier, and delays others no less.
        later, enough = start.queue_s - first.queue_s, self.best[0].score - NOTHING_S
        less = HARM * later
        rooms: list[Room] = []
        for room in self._around:
            if room.wait_s:
                return self._around
            least = room.score + later if later < 0 else room.score - min(less, room.harm_s)
            if least < enough:
                rooms.append(room)
        if len(rooms) > 1:
            rooms.sort(key=_SCORE)  # among equals, those that are better with the first one
        return rooms

    def estimate(self, found: Found) -> Estimate:
        """Return a pair as what a policy gives."""
        start, decode, link, late = found.start, found.room.decode, found.link, found.late_s
        made = Estimate(start.prefill, decode, start.cached, start.queue_s, start.compute_s)
        made.transfer_s, made.wait_s, made.harm_s, made.tpot_s = found.transfer_s, late, found.harm_s, decode.tpot_s()
        made.wire_bytes, made.ready = link.bytes_per_token * self._tokens, self._now + start.queue_s + late
        made.known = link.bytes_per_s > 0
        return made

    def _look(  # noqa: C901  # written out: this is done for every pair
        self, start: Start, rooms: list[Room], note: bool
    ) -> bool:
        """Look at pairs; `note` their scores, or bounds of them, in the rooms. Return whether all of them are possible."""
        prefill, queue, compute = start.prefill, start.queue_s, start.compute_s
        now, tokens, order, links = self._now, self._tokens, self._order, prefill.links
        limit = self.best[self._few - 1].score if len(self.best) >= self._few else inf
        bounds: list[tuple[float, int, Room, Link]] = []
        possible = True
        for room in rooms:
            decode, wait = room.decode, room.wait_s
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
            score = queue + compute + transfer + late + harm + room.late_s + room.held
            if note:
                room.score, room.harm_s = score, harm
            if not exact:
                score -= SLACK * score + SLACK_NOW * now
                if score <= limit:
                    bounds.append((score, order, room, link))
            elif score < limit:
                found = Found(score, order, start, room, link)
                found.transfer_s, found.late_s = transfer, late
                limit = self._keep(found)
        self._order = order
        if len(bounds) > 1:
            bounds.sort()
        for score, number, room, link in bounds:
            if score > limit:
                break
            found = self._price(start, room, link, number)
            if note:
                room.score, room.harm_s = found.score, HARM * found.harm_s
            if found.score <= limit:
                limit = self._keep(found)
        return possible

    def _keep(self, found: Found) -> float:
        """Keep a pair if it is among the best; return the score that the next one needs."""
        best, few, score = self.best, self._few, found.score
        place = len(best)
        while place:
            other = best[place - 1]
            if other.score < score or (other.score == score and other.order < found.order):
                break
            place -= 1
        best.insert(place, found)
        if len(best) > few:
            best.pop()
        return best[-1].score if len(best) == few else inf

    def _price(self, start: Start, room: Room, link: Link, order: int) -> Found:
        wait, queue, compute = room.wait_s, start.queue_s, start.compute_s
        now, tokens = self._now, self._tokens
        late = wait - queue if wait > queue else 0.0
        begin = now + queue + late
        nic = room.decode.nic
        landed, harm = nic.finish(link.bytes_per_token * tokens, begin, begin + compute, now, link.bytes_per_s)
        transfer = landed - begin - compute + link.convert_s_per_token * tokens
        score = queue + compute + transfer + late + HARM * harm + room.late_s + room.held
        found = Found(score, order, start, room, link)
        found.transfer_s, found.late_s, found.harm_s = transfer, late, harm
        return found
