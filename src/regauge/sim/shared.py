"""A fleet whose prefill and decode workers share cores, with prompts computed in chunks as the embedded engine does: what a small machine is.

Both are measured (`calibrate.py`): the steps of a prompt, and what computing of one kind costs the other while both go on. So is, where it is given,
how fast each kind of computing goes over time (`drift.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, floor, isnan

from regauge.config_route import RouteConfig
from regauge.errors import ConfigError
from regauge.sim.calibrate import Beside, PromptTimes
from regauge.sim.clock import Clock
from regauge.sim.cluster import Cluster
from regauge.sim.decode import Decode
from regauge.sim.drift import STEADY, Drift
from regauge.sim.engines import DecodeModel, Prefill, PrefillModel, Task
from regauge.sim.fleet import Fleet

_AT_ONCE_S = 1e-9
_ALMOST = 1e-6
"""Of a step."""


class Chunked(Prefill):
    """A prefill worker that computes in steps: whole chunks of the oldest prompts, as many as fit in one.

    What is cached of a prompt is settled when it comes, as the embedded engine leases its pages then. Its KV crosses when the last
    chunk is computed. `busy(so)` is told when computing begins and when nothing is left.
    """

    def __init__(
        self, index: int, model: PrefillModel, times: PromptTimes, clock: Clock, block: int,
        begins: Callable[[Task], None], computed: Callable[[Task], None], busy: Callable[[bool], None],
    ) -> None:  # fmt: skip
        super().__init__(f"p{index}", index, model, clock, block, begins, computed)
        self._times, self._busy = times, busy
        self._got: dict[Task, int] = {}
        """Tokens that are there of each prompt, the oldest first."""
        self._step: list[tuple[Task, int]] = []
        """Of the step that is computed: each prompt, and what there will be of it."""
        self._left = 0.0
        """Seconds of the step that were left at `_at`, were this worker alone."""
        self._at = 0.0
        self._turn = 0
        self._beside = 1.0

    def submit(self, task: Task) -> None:
        """Queue a prompt."""
        self.changed = True
        # The engine keeps whole blocks, and computes at least the last token.
        task.cached = task.expected = min(self.matched(task), (task.tokens - 1) // self.block * self.block)
        self._got[task] = task.cached
        if not self._step:
            self._busy(True)
            self._compute()

    def cancel(self, task: Task) -> None:
        """Give a prompt up; a step that it is in goes on."""
        self.changed = True
        self._got.pop(task, None)

    def queued_tokens(self) -> int:
        """Return the prompt tokens that are not computed."""
        return sum(task.tokens - got for task, got in self._got.items())

    @property
    def waiting(self) -> int:
        """Prompts that are not computed."""
        return len(self._got)

    def pace(self, beside: float) -> None:
        """Take so many times as long from now on, the step under way, too."""
        if beside == self._beside:
            return
        self._left = max(0.0, self._left - (self._clock.now - self._at) / (self.factor * self._beside))
        self._at, self._beside = self._clock.now, beside
        if self._step:
            self._plan()

    def _compute(self) -> None:
        """Begin the next step, if there is something to compute."""
        chunk = self._times.chunk
        room, now, parts = chunk, self._clock.now, []
        for task, got in self._got.items():
            count = min(chunk - got % chunk, task.tokens - got)
            if count > room:
                break
            room -= count
            parts.append((got, got + count))
            self._step.append((task, got + count))
            if isnan(task.began):
                task.began = now
        self.current = self._step[0][0] if self._step else None
        if not self._step:
            self._busy(False)
            return
        self._left, self._at = self._times.step(parts), now
        self.busy_s -= now
        self._plan()

    def _plan(self) -> None:
        self._turn += 1
        self._clock.call(self._at + self._left * self.factor * self._beside, self._stepped, self._turn)

    def _stepped(self, turn: int) -> None:
        if turn != self._turn:
            return  # its pace has changed since
        self.changed = True
        now, step = self._clock.now, self._step
        self.busy_s += now
        self._step = []
        for task, got in step:
            if task not in self._got:
                continue  # it was given up
            self._got[task] = got
            if got == task.tokens:
                del self._got[task]
                self._over(task, now)
        self._compute()

    def _over(self, task: Task, now: float) -> None:
        if task.blocks:
            self._keep(task.blocks)
        task.computed, task.computing_s = now, _AT_ONCE_S
        self._begins(task)
        task.computing_s = now - task.began
        self._computed(task)


class Stepped(Decode):
    """A decode worker whose requests join, and leave, between two steps: a fluid that counts whole steps.

    Of several that come at one instant, the first begins a step, and the others join the one after it.
    """

    def __init__(
        self, name: str, index: int, model: DecodeModel, clock: Clock,
        seated: Callable[[Task], None], ended: Callable[[Task], None],
    ) -> None:  # fmt: skip
        super().__init__(name, index, model, clock, seated, ended)
        self._joining: list[Task] = []
        self._turn = 0

    @property
    def batch(self) -> int:
        """Requests that decode, or will from the next step on: in between none may be left."""
        return self._batch + len(self._joining)

    def begin(self, task: Task) -> None:
        """Decode a request from the next step on. One that has its only token takes part in none."""
        self._advance()
        if task.output > 1 and any(goal > self.produced + _ALMOST for goal, *_ in self._running):
            self._joining.append(task)
            self._plan()
        elif task.output <= 1:
            super().begin(task)
        else:
            self.produced = float(ceil(self.produced - _ALMOST))
            super().begin(task)

    def cancel(self, task: Task) -> int:
        """Give a request up; see `Decode.cancel`."""
        if task not in self._joining:
            return super().cancel(task)
        self.changed = True
        self._joining.remove(task)
        self._free(task)
        self._admit()
        return 1

    def _plan(self) -> None:
        """Look again at the next end, and at the end of the step under way if somebody waits for it."""
        super()._plan()
        if not self._joining:
            return
        left = floor(self.produced + _ALMOST) + 1 - self.produced if self._batch else 0.0
        if self._pace > 0:
            self._turn += 1
            when = self._at + left * (self._step + self._slope * left / 2) / self._pace
            self._clock.call(when, self._join, self._turn)

    def _join(self, turn: int) -> None:
        if turn != self._turn:
            return  # the pace has changed, or somebody has ended
        joining, self._joining = self._joining, []
        self._advance()
        self.produced = float(round(self.produced))
        for task in joining:
            super().begin(task)


class SharedFleet(Fleet):
    """Prefill and decode workers on the same cores; of the cluster's prefill model only the cache's size counts here, and what the router is told.

    `drift` says how many times as long everything takes over time, steps under way, too; time 0 is that of the arrivals. What the router is told of
    prefill's speed does not follow it. Raises ConfigError for decode workers that compute prompts: what that costs is not modelled here.
    """

    def __init__(
        self, cluster: Cluster, config: RouteConfig, times: PromptTimes, beside: Beside, drift: Drift = STEADY, seed: int = 0
    ) -> None:  # fmt: skip
        if cluster.decode.computer is not None:
            raise ConfigError("decode.computer: on shared cores, decode workers compute no prompts")
        self._times, self._both = times, beside
        self._computing = 0
        self._prompts_take = self._steps_take = 1.0
        super().__init__(cluster, config, seed)
        self._drift_on((self._prompt_drifts, drift.prompt.changes()))
        self._drift_on((self._step_drifts, drift.step.changes()))

    def _prefill(self, index: int) -> Prefill:
        given = self.cluster
        return Chunked(
            index, given.prefill, self._times, self.clock, given.block, self.transfers.begins, self.transfers.computed,
            self._busy,
        )  # fmt: skip

    def _decode(self, index: int) -> Decode:
        return Stepped(f"d{index}", index, self.cluster.decode, self.clock, self._seated, self._ended)

    def _drift_on(self, course: tuple[Callable[[float], None], Iterator[tuple[float, float]]]) -> None:
        """Have the next factor come at its time, and so on, until nothing is left to do."""
        apply, changes = course
        at, factor = next(changes, (0.0, 0.0))
        if not factor:
            return

        def turn(_: object) -> None:
            apply(factor)
            if self.going():
                self._drift_on(course)

        if at > 0.0:
            self.clock.call(at, turn, None)
        else:
            apply(factor)
            self._drift_on(course)

    def _prompt_drifts(self, factor: float) -> None:
        self._prompts_take = factor
        self._pace()

    def _step_drifts(self, factor: float) -> None:
        self._steps_take = factor
        self._slow()

    def _busy(self, so: bool) -> None:
        """A prefill worker begins to compute, or has nothing left."""
        self._computing += 1 if so else -1
        self._slow()

    def _slow(self) -> None:
        for decode in self.decodes.values():
            decode.slow(self._steps_take * (self._both.step if self._computing else 1.0))

    def _landed(self, task: Task) -> None:
        super()._landed(task)
        self._pace()

    def _ended(self, task: Task) -> None:
        super()._ended(task)
        self._pace()

    def _pace(self) -> None:
        decoding = any(decode.batch for decode in self.decodes.values())
        for prefill in self.prefills.values():
            if isinstance(prefill, Chunked):
                prefill.pace(self._prompts_take * (self._both.prompt if decoding else 1.0))
