"""What the router knows of one worker: its last report, and what has been promised to it since. Mutable; owned by the router.

A report is older than our own bookings, and contains those that were made before it. The rule: of a report's figures, what our own bookings made
until `TRANSIT_S` before it account for is ours, and the rest is somebody else's (another gateway's) until the next report; bookings made later
come on top. If the worker says less than we had booked, it has got on with the oldest of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf
from typing import Final

from regauge.route.cluster import Link, Load, Worker
from regauge.route.health import Breaker
from regauge.route.nic import Nic
from regauge.route.why import Record

TRANSIT_S: Final = 0.02
"""A booking so young when a report was asked for has not reached the worker yet."""
FRESH_S: Final = 2.0
"""A report older than this says nothing of how far the queue has got."""
SPEED_STEP: Final = 0.2
"""Weight of the newest measurement in a mean."""
PAGE_TOKENS: Final = 16
"""Page size of a worker that does not say."""
GUESS: Final = 1_000.0
"""Prompt tokens per second of a worker of which nobody knows them. Where a limit of time holds, it gets one prompt at a time until one is measured."""
OLD_S: Final = 5.0
"""A speed that was not measured for so long may be wrong: an idle worker gets a prompt whatever is predicted, to be measured anew."""
MEMORY_S: Final = 20.0
"""Seconds of computing after which what was measured counts 1/e."""
UNKNOWN: Final = Link("", "")
Ways = tuple[tuple[float, float, float], ...]
HOLD_S: Final = 5.0
"""How long a request holds its place in decode, until that is measured."""


class Booking:
    """What one attempt has been promised."""

    __slots__ = (
        "cached", "compute_s", "computing", "decode", "first", "guessed", "id", "known", "made", "pages_tokens",
        "predicted_s", "prefill", "record", "tokens",
    )  # fmt: skip

    def __init__(self, attempt: str, made: float, prefill: Standing | None, decode: Standing) -> None:
        self.id, self.made, self.prefill, self.decode = attempt, made, prefill, decode
        self.tokens = self.cached = 0
        """To be computed, and cached, as expected."""
        self.compute_s = 0.0
        self.pages_tokens = 0
        """Tokens that decode must have pages for."""
        self.predicted_s = 0.0
        """Time to the first token, before correction."""
        self.known = True
        """All of what it takes was predicted: its link's rate is known."""
        self.guessed = False
        """Its computation was a guess: see `GUESS`."""
        self.first: float | None = None
        """When its first token came."""
        self.computing = True
        """Its prompt is not known to be computed."""
        self.record: Record | None = None
        """Where the journal has it."""


@dataclass(slots=True, eq=False)
class Standing:
    """One worker, as the router sees it."""

    worker: Worker
    breaker: Breaker
    name: str = ""
    load: Load = field(default_factory=Load)
    reported: float = -inf
    """When the last report was asked for."""
    up: bool = True
    speed: float = 0.0
    """Prompt tokens per second: the worker's own figure, else what its answers came to, else its prior."""
    measured_tokens: float = 0.0
    measured_s: float = 0.0
    """What its answers came to of late: tokens, and the seconds that they took."""
    free_since: float = -inf
    """When the last prompt that was computed here was done."""
    measured_at: float = -inf
    """When its speed was measured, or a prompt was sent to it to measure it."""
    tpot_batch: int = 0
    """Requests that ran while `load.tpot_s` was measured."""
    nic: Nic = field(default_factory=Nic)
    links: dict[str, Link] = field(default_factory=dict)
    """Of a prefill worker, by the name of the decode worker."""
    queue: dict[str, Booking] = field(default_factory=dict)
    """Bookings whose prompt is computed here, oldest first."""
    queue_s: float = 0.0
    done_s: float = 0.0
    """Of `queue_s`, computed already, as of `done_at`."""
    done_at: float = 0.0
    head_s: float = 0.0
    """Computation of the oldest booking in the queue."""
    fresh_until: float = -inf
    """Until when the report says how far the queue has got."""
    foreign_s: float = 0.0
    """Computation that others have queued here."""
    seats: dict[str, Booking] = field(default_factory=dict)
    foreign_seats: int = 0
    taken: int = 0
    """Decode slots that are in use or promised."""
    tokens_free: float = inf
    """Tokens that a request may have for decode to have pages for them at once."""
    pages_used: int = 0
    """By our bookings."""
    pages_base: int | None = None
    """Pages that are free when none of our bookings holds any; None: unknown."""
    hold_s: float = HOLD_S
    trust: float = 1.0
    """Share of the tokens that were expected in its cache and were there."""
    rate_told: bool = False
    """Its NIC's rate was told, and not taken from its links'."""
    slots: int = 0
    overhead_s: float = 0.0
    attention_s: float = 0.0
    """As of `worker`: read for every request."""
    page_tokens: int = PAGE_TOKENS
    """Tokens of a page,"""
    pages: int | None = None
    """pages, and"""
    step_s: float | None = None
    """seconds per token, as of `load`: so are they."""
    _decodes: list[Standing] | None = None
    _ways: Ways | None = None

    def __post_init__(self) -> None:
        self.name = self.worker.name
        self.state(self.worker)
        self.speed = self.worker.prior_tokens_per_s or GUESS

    def state(self, worker: Worker) -> None:
        """Take another statement of it."""
        self.worker = worker
        self.slots, self.overhead_s, self.attention_s = worker.slots, worker.overhead_s, worker.attention_s

    @property
    def guessed(self) -> bool:
        """Whether nobody knows its speed: no prior, no report, no answer."""
        return not (self.worker.prior_tokens_per_s or self.measured_s or self.load.prefill_tokens_per_s)

    def wanted(self, now: float) -> bool:
        """Whether it is to have a prompt whatever is predicted, for its speed to be measured: it is idle, and nobody knows how fast it is now."""
        return not self.queue and not self.foreign_s and now - self.measured_at > OLD_S

    @property
    def measured_speed(self) -> float | None:
        """Tokens per second that its answers came to; None: there was none."""
        return self.measured_tokens / self.measured_s if self.measured_s else None

    def compute_s(self, tokens: int, cached: int) -> float:
        """Return the seconds to compute `tokens` tokens of a prompt after `cached` ones."""
        attention = self.attention_s * tokens * (cached + tokens / 2) if self.attention_s else 0.0
        return self.overhead_s + tokens / self.speed + attention

    def ways(self, decodes: list[Standing]) -> Ways:
        """Return what its links to these workers are like. The list is taken to be the same while it is the same object."""
        if self._ways is None or decodes is not self._decodes:
            links = [self.links.get(each.name, UNKNOWN) for each in decodes]
            self._decodes = decodes
            self._ways = tuple([(each.bytes_per_token, each.bytes_per_s, each.convert_s_per_token) for each in links])
        return self._ways

    def alike(self, other: Standing, decodes: list[Standing]) -> bool:
        """Return whether its links to these workers are like another prefill worker's."""
        mine, theirs = self.ways(decodes), other.ways(decodes)
        if mine is not theirs:
            if mine != theirs:
                return False
            self._ways = theirs  # so that it is seen at once the next time
        return True

    def linked(self, link: Link) -> None:
        """Take the state of a pair of which this is the prefill worker."""
        self.links[link.decode] = link
        self._ways = None

    def unlinked(self, decode: str) -> None:
        """A decode worker has left."""
        self.links.pop(decode, None)
        self._ways = None

    def waiting_s(self, now: float) -> float:
        """Return the seconds of computation that a prompt which comes now finds in front of it."""
        left = self.queue_s
        # Sums that shrank are rounded: the oldest prompt alone can be more than all of them.
        return max(0.0, left - self._done(now)) + self.foreign_s if left else self.foreign_s

    def _done(self, now: float) -> float:
        done = self.done_s + now - self.done_at
        # Where nobody says that it gets on, no more than the oldest prompt is taken to be done.
        most = self.queue_s if now <= self.fresh_until else self.head_s
        return min(most, done)

    def enqueue(self, booking: Booking, now: float) -> None:
        """Book a prompt's computation."""
        if self.queue:
            self.done_s = self._done(now)
        else:
            self.done_s, self.head_s = 0.0, booking.compute_s
        self.done_at = now
        self.queue[booking.id] = booking
        self.queue_s += booking.compute_s

    def dequeue(self, booking: Booking, now: float) -> None:
        """Take a prompt's computation back: it is done, or will not be."""
        if self.queue.pop(booking.id, None) is None:
            return
        if not self.queue:
            self.queue_s = self.done_s = self.head_s = 0.0
            return
        done = self.done_s + now - self.done_at
        self.queue_s = max(0.0, self.queue_s - booking.compute_s)
        self.head_s = next(iter(self.queue.values())).compute_s
        self.done_s = min(max(0.0, done - booking.compute_s), self.queue_s)
        self.done_at = now

    def seat(self, booking: Booking) -> None:
        """Book a decode slot and pages."""
        self.seats[booking.id] = booking
        self.pages_used += self.pages_for(booking.pages_tokens)
        self._room()

    def unseat(self, booking: Booking, now: float) -> None:
        """Give slot and pages back."""
        if self.seats.pop(booking.id, None) is None:
            return
        self.pages_used -= self.pages_for(booking.pages_tokens)
        self._room()
        if booking.first is not None:
            self.hold_s += SPEED_STEP * (now - booking.first - self.hold_s)

    def _room(self) -> None:
        """Seats or pages have changed."""
        self.taken = len(self.seats) + self.foreign_seats
        pages, base = self.pages, self.pages_base
        if base is not None:
            pages = base - self.pages_used if pages is None else min(pages, base - self.pages_used)
        self.tokens_free = inf if pages is None else pages * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Return the pages that so many tokens need."""
        return -(-tokens // self.page_tokens)

    def wait_s(self, tokens: int) -> float:
        """Return the seconds until decode has a slot and pages for a request of `tokens` tokens in all; infinite: it never fits."""
        pages = -(-tokens // self.page_tokens)
        if self.pages is not None and pages > self.pages:
            return inf
        seats = self.taken
        over = seats + 1 - self.slots
        turn_s = self.hold_s / max(1, min(seats, self.slots))  # one of them ends every so often
        wait = over * turn_s if over > 0 else 0.0
        if self.pages_base is not None:
            short = self.pages_used + pages - self.pages_base
            if short > 0 and seats:
                each = max(1.0, self.pages_used / len(self.seats)) if self.seats else float(pages)
                wait = max(wait, short / each * turn_s)
        return wait

    def tpot_s(self, more: int = 1) -> float | None:
        """Return the predicted time per output token with `more` requests beyond those of now; None: never measured.

        A batch that fills all slots is taken to be twice as slow as one request.
        """
        measured = self.step_s
        if measured is None:
            return None
        slots, running = self.slots, self.load.running
        now = self.taken + more
        return measured * (slots + now) / (slots + (self.tpot_batch if running is not None else now))

    def tpot_wait_s(self, limit_s: float) -> float:
        """Return the seconds until one request more is predicted to stay within a limit of time per token."""
        tpot, seats = self.tpot_s() or 0.0, self.taken
        if tpot <= limit_s or not seats:
            return 0.0
        over = (1 - limit_s / tpot) * (self.slots + seats + 1)
        return min(over, seats) * self.hold_s / seats

    def report(self, load: Load, now: float) -> None:
        """Take what the worker said of itself when it was asked at `now`. Reports that were overtaken are ignored."""
        if now < self.reported:
            return
        known, before = now - TRANSIT_S, self.load
        self.load, self.reported = load, now
        # Each figure is read once, and so are the few of the report before: of a message, that is what takes the time.
        speed, queued, running = load.prefill_tokens_per_s, load.queued_tokens, load.running
        if speed:
            self.speed = speed
        elif (measured := self.measured_speed) is not None:
            self.speed = measured
        if speed != before.prefill_tokens_per_s:
            self.measured_at = now
        if queued is None:
            self.fresh_until = -inf
        else:
            self.fresh_until = now + FRESH_S
            self._queue_said(queued, known, now)
        self._decodes_said(load, running, before, known)
        self._room()

    def _decodes_said(self, load: Load, running: int | None, before: Load, known: float) -> None:
        """Take what a report says of decode."""
        step, free = load.tpot_s, load.free_pages
        self.pages = load.pages
        if step != self.step_s:
            # It is a mean over steps before the report: an idle worker's was measured while it was busy.
            self.tpot_batch = max(running or 0, before.running or 0)
            self.step_s = step
        page_tokens = load.page_size or PAGE_TOKENS
        if page_tokens != self.page_tokens:
            self.page_tokens = page_tokens
            self.pages_used = sum(self.pages_for(booking.pages_tokens) for booking in self.seats.values())
        if running is not None or free is not None:
            self._held(running, free, known)

    def _held(self, running: int | None, free: int | None, known: float) -> None:
        """Tell what of decode's seats and pages is not ours. Bookings are in order of their time: the youngest are the last."""
        young, pages = 0, 0
        for booking in reversed(self.seats.values()):
            if booking.made <= known:
                break
            young += 1
            pages += self.pages_for(booking.pages_tokens)
        if running is not None:
            self.foreign_seats = max(0, running - (len(self.seats) - young))
        if free is not None:
            self.pages_base = free + self.pages_used - pages
            if self.pages is not None:
                self.pages_base = min(self.pages_base, self.pages)

    def _queue_said(self, queued: int, known: float, now: float) -> None:
        tokens, seconds = 0, 0.0
        for booking in self.queue.values():
            if booking.made > known:
                break
            tokens += booking.tokens
            seconds += booking.compute_s
        self.foreign_s = max(0, queued - tokens) / self.speed
        self.done_s = seconds * (1 - queued / tokens) if queued < tokens else 0.0
        self.done_at = now

    def computed(self, booking: Booking, tokens: int, cached: int, now: float, seconds: float | None) -> None:
        """Learn from a prompt of which `tokens` were computed in `seconds`; None: since it was sent, or the one before it was done.

        Prompts that are computed together come to their end together: the first of them has all the time, and the sums are right.
        """
        if seconds is None:
            seconds = now - max(booking.made, self.free_since)
        self.free_since = now
        if tokens < 1:
            return
        rest = max(0.0, seconds - self.overhead_s - self.attention_s * tokens * (cached + tokens / 2))
        self.measured_at = now
        keep = exp(-rest / MEMORY_S)
        self.measured_tokens = keep * self.measured_tokens + tokens
        self.measured_s = keep * self.measured_s + rest
        if not self.load.prefill_tokens_per_s and self.measured_s:
            self.speed = self.measured_tokens / self.measured_s
