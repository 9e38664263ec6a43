"""A decode worker on a manual clock: slots and pages, and one batch.

Between events its tokens come as a fluid, so that a request's end is exact for a step time that is linear in the resident tokens.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from math import inf, sqrt

from regauge.route.cluster import Load
from regauge.sim.clock import Clock
from regauge.sim.engines import DecodeModel, Prefill, Task


class Decode:
    """A decode worker: a slot and pages from the request's arrival to its end, tokens of all at one pace.

    `seated(task)` is called when a request has a slot and pages, `ended(task)` when it has its last token.
    """

    def __init__(
        self, name: str, index: int, model: DecodeModel, clock: Clock,
        seated: Callable[[Task], None], ended: Callable[[Task], None],
    ) -> None:  # fmt: skip
        self.name, self.index, self.model = name, index, model
        self.computer: Prefill | None = None
        """Computes prompts here."""
        self.up = True
        self.seats = self.pages_used = 0
        self.produced = 0.0
        """Tokens that a request which was here from the start would have had."""
        self.busy_s = 0.0
        self.changed = True
        self._clock, self._seated, self._ended = clock, seated, ended
        self._waiting: deque[Task] = deque()
        self._running: list[tuple[float, int, Task]] = []
        self._batch = 0
        self._resident = 0.0
        """Tokens of those that decode, less `produced` for each."""
        self._count = 0
        self._at = 0.0
        self._wakes = inf
        self._pace = 1.0
        """Over the usual: less while a prompt is computed here, or the worker is slow."""
        self._slow = 1.0
        self._computes = False
        """A prompt is computed here."""
        self._by_tokens = model.step_token_s > 0 or model.curve is not None
        self._step, self._slope = 0.0, 0.0
        """Seconds of a step at `_at`, and what each further step is longer."""

    def submit(self, task: Task) -> None:
        """Ask for a slot and pages; `seated` is called once they are there."""
        self.changed = True
        task.pages = -(-(task.tokens + task.output) // self.model.page_size)
        self._waiting.append(task)
        self._admit()

    def begin(self, task: Task) -> None:
        """A request's KV is here, and its first token: decode the others."""
        self._advance()
        self.changed = True
        self._count += 1
        task.base = self.produced
        task.goal = self.produced + max(task.output - 1, 0)
        task.decoding = True
        self._batch += 1
        self._resident += task.tokens - self.produced
        heapq.heappush(self._running, (task.goal, self._count, task))
        self._plan()

    def cancel(self, task: Task) -> int:
        """Give a request up, wherever it is; return how many tokens the client has of this attempt."""
        self.changed = True
        if not task.seated >= 0:
            if task in self._waiting:
                self._waiting.remove(task)
            return 0
        count = 0
        if task.decoding:
            self._advance()
            count = max(0, min(int(self.produced - task.base + 1e-6) + 1, task.output - 1))
            self._running = [entry for entry in self._running if entry[2] is not task]
            heapq.heapify(self._running)
            self._leave(task)
            self._plan()
        self._free(task)
        self._admit()
        return count

    def computing(self, *, now_so: bool) -> None:
        """A prompt begins, or ends, to be computed here."""
        self._set_pace(self.model.beside if now_so else 1.0, self._slow)
        self._computes = now_so

    def begin_anew(self) -> None:
        """Come back, empty."""
        self.up = self.changed = True
        if self.computer is not None:
            self.computer.begin_anew()

    def slow(self, factor: float) -> None:
        """Take `factor` times as long for each step from now on, and for prompts that are not begun."""
        if self.computer is not None:
            self.computer.factor = factor
        self._set_pace(self._pace * self._slow, factor)

    def tpot_s(self) -> float:
        """Return the time of a step now, for those that decode."""
        return self.model.step(self._batch, self._resident + self._batch * self.produced) * self._slow

    def load(self) -> Load:
        """Return what the worker says of itself."""
        model = self.model
        held = self.seats + len(self._waiting)
        if self._batch and self._by_tokens:
            self._advance()
            self._plan()
        tpot = self.tpot_s() if self._batch else None
        free = max(0, model.pages - self.pages_used)
        computer = self.computer
        return Load(
            None if computer is None else computer.queued_tokens(), held, free, model.pages, model.page_size,
            None if computer is None else computer.model.tokens_per_s / computer.factor, tpot,
            None if computer is None else computer.seq,
        )  # fmt: skip

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot and pages."""
        return len(self._waiting)

    @property
    def batch(self) -> int:
        """Requests that decode."""
        return self._batch

    @property
    def resident(self) -> float:
        """Tokens of those that decode."""
        return self._resident + self._batch * self.produced

    def _set_pace(self, beside: float, slow: float) -> None:
        self.changed = True
        self._advance()
        self._slow, self._pace = slow, beside / slow
        self._plan()

    def _admit(self) -> None:
        while self._waiting and self.seats < self.model.slots and self.up:
            task = self._waiting[0]
            if self.pages_used + task.pages > self.model.pages and self.seats:
                return
            self._waiting.popleft()
            self.seats += 1
            self.pages_used += task.pages
            task.seated = self._clock.now
            self._seated(task)

    def _free(self, task: Task) -> None:
        self.seats -= 1
        self.pages_used -= task.pages

    def _leave(self, task: Task) -> None:
        self._batch -= 1
        self._resident -= task.tokens - task.base
        if not self._batch:
            self._resident = 0.0

    def _advance(self) -> None:
        """Let tokens come up to now; `_plan` must follow, whatever changes in between."""
        now = self._clock.now
        seconds, self._at = now - self._at, now
        if seconds <= 0 or not (self._batch or self._computes):
            return
        self.busy_s += seconds
        if not self._batch:
            return
        worth, step = seconds * self._pace, self._step
        if not self._slope:
            self.produced += worth / step
        elif worth > 0:
            self.produced += 2 * worth / (step + sqrt(step * step + 2 * self._slope * worth))

    def _plan(self) -> None:
        """Set the step time from here on, and look again at the next end."""
        if not self._running:
            return
        model, batch, resident = self.model, self._batch, self._resident + self._batch * self.produced
        left = self._running[0][0] - self.produced
        if left < 0:
            left = 0.0
        self._step = step = model.step(batch, resident)
        if self._by_tokens and left:
            self._slope = max(0.0, (model.step(batch, resident + batch * left) - step) / left)
        if self._pace <= 0:
            return
        when = self._at + left * (step + self._slope * left / 2) / self._pace
        if when < self._wakes:
            self._wakes = when
            self._clock.call(when, self._look, when)

    def _look(self, when: float) -> None:
        if when != self._wakes:
            return  # something sooner was planned meanwhile
        self._wakes = inf
        self._advance()
        over = []
        running, until = self._running, self.produced + 1e-6
        while running and running[0][0] <= until:
            task = heapq.heappop(running)[2]
            over.append(task)
            self._leave(task)
            self._free(task)
        self._plan()
        if over:
            self.changed = True
            for task in over:
                self._ended(task)
            self._admit()
