"""A cluster that serves a trace: the gateway's `Router` and `Life`, driven as the gateway drives them, over simulated workers and network.

The router knows what the gateway knows: answers as they come, a report of each worker and NIC now and then, cache events with it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from regauge.config_route import RouteConfig
from regauge.errors import ConfigError
from regauge.route.cluster import Cause, Link, Refusal, Request, Route, Worker
from regauge.route.request import Action, Life, Resume, Role, Start, Wait
from regauge.route.router import Router
from regauge.sim import faults as wrong
from regauge.sim.clock import Clock
from regauge.sim.cluster import EVERYTHING, Cluster, Knowledge, Result
from regauge.sim.decode import Decode
from regauge.sim.engines import Prefill, Task
from regauge.sim.faults import Fault
from regauge.sim.log import COMPLETE, FAILED, LIMITED, REFUSED, Rows
from regauge.sim.mishaps import Mishaps
from regauge.sim.network import Network
from regauge.sim.trace import Arrival
from regauge.sim.transfers import Transfers, carrier

__all__ = ["Cluster", "Fleet", "Knowledge", "Result"]

LIMITS = frozenset(("deadline", "tpot", "overload"))
"""Refusals that a client sees as 429."""
PROGRESS = 256
HEARD = 0.8
"""Of `route.stale_s`, after which a worker is asked though it has nothing new to say."""


class Fleet:
    """One run. `knowledge`: what the router is told; `faults`: what goes wrong. Raises ConfigError for a fault of nobody."""

    def __init__(
        self,
        cluster: Cluster,
        config: RouteConfig,
        seed: int = 0,
        knowledge: Knowledge = EVERYTHING,
        faults: Sequence[Fault] = (),
    ) -> None:
        self.cluster, self.knowledge = cluster, knowledge
        self.clock = Clock()
        self.router = Router(config, seed, explain=False)
        self.network = Network(self.clock, cluster.all_ports())
        self.transfers: Transfers = carrier(
            cluster, self.clock, self.network, self._landed, self._refused, config.ttft_s
        )
        self.prefills = {f"p{i}": self._prefill(i) for i in range(cluster.prefills)}
        self.decodes = {f"d{i}": self._decode(i) for i in range(cluster.decodes)}
        wrong.check(faults, {*self.prefills, *self.decodes}, set(self.network.ports))
        self._faults = tuple(faults)
        self._rows = Rows()
        self.tasks: dict[str, Task] = {}
        """Attempts that are under way."""
        self.waits: dict[int, tuple[Task, Wait]] = {}
        """Requests that wait for a worker, by number."""
        self._mishaps = Mishaps(self)
        self._backlogs: dict[str, int] = {}
        self._thinking = 0
        self._following: dict[int, list[tuple[int, Arrival]]] = {}
        self._next: Iterator[tuple[int, Arrival]] = iter(())
        self._pending: set[int] = set()
        """Of those that were taken from the trace, those that are not over."""
        self._pulled_at = 0.0
        self._arriving = False
        self._reports = 0
        self._warm = self._ends = 0
        self._ended_at = 0.0
        self._progress: Callable[[int], None] | None = None
        self._watch: Callable[[Fleet], None] | None = None
        self._join()

    def run(
        self,
        arrivals: Iterable[Arrival],
        *,
        warm: int = 0,
        progress: Callable[[int], None] | None = None,
        watch: Callable[[Fleet], None] | None = None,
    ) -> Result:
        """Serve the arrivals, ascending in `at`; the log has those after the first `warm`.

        `progress` is told now and then how many requests are over, `watch` called at every report. Arrivals are taken as their time comes, so
        they need not all be in memory. Raises ConfigError for arrivals out of order.
        """
        self._warm, self._progress, self._watch = warm, progress, watch
        self._next = iter(enumerate(arrivals))
        self._arriving = True
        for fault in self._faults:
            self.clock.call(fault.at, self._mishaps.begin, fault)
        self._report(None)
        self._pull()
        collecting = gc.isenabled()
        gc.disable()  # what a request leaves behind holds no cycles
        try:
            self.clock.run()
        finally:
            if collecting:
                gc.enable()
        if progress is not None:
            progress(self._ends)
        busy = {name: each.busy_s for name, each in self.prefills.items()}
        busy |= {name: each.busy_s for name, each in self.decodes.items()}
        carried = {port: self.network.carried(port) for port in self.network.ports}
        return Result(
            self._rows.log(), max(self._ended_at, 1e-9), busy, carried, self.cluster.all_ports(),
            dict(self.router.decisions), self.clock.ran,
        )  # fmt: skip

    @property
    def open(self) -> int:
        """Requests that came and are not over."""
        return len(self.tasks) + len(self.waits)

    def going(self) -> bool:
        """Return whether a request is under way, or to come."""
        return bool(self._arriving or self.tasks or self.waits or self._thinking)

    # Making it

    def _prefill(self, index: int) -> Prefill:
        cluster = self.cluster
        worker = Prefill(
            f"p{index}", index, cluster.prefill, self.clock, cluster.block, self.transfers.begins, self.transfers.computed
        )  # fmt: skip
        worker.factor = 1 / cluster.slow.get(index, 1.0)
        return worker

    def _decode(self, index: int) -> Decode:
        name, model = f"d{index}", self.cluster.decode
        decode = Decode(name, index, model, self.clock, self._seated, self._ended)
        if model.computer is not None:
            decode.computer = Prefill(
                name, index, model.computer, self.clock, self.cluster.block, self._begins_here, self._computed_here
            )  # fmt: skip
        return decode

    def _join(self) -> None:
        for name in (*self.prefills, *self.decodes):
            self.router.join(self.worker(name), 0.0)
        for name in self.decodes:
            for sender in self.prefills:
                self.router.link(self._link(sender, name), 0.0)

    def worker(self, name: str) -> Worker:
        """Return what the router is told of a worker that joins."""
        if name in self.prefills:
            model, factor, decode, slots = self.prefills[name].model, self.prefills[name].factor, False, 1
        else:
            shape = self.decodes[name].model
            if shape.computer is None:
                return Worker(name, decode=True, slots=shape.slots)
            model, factor, decode, slots = shape.computer, 1.0, True, shape.slots
        return Worker(
            name, prefill=not decode, decode=decode, computes=decode, slots=slots,
            prior_tokens_per_s=model.tokens_per_s / factor, overhead_s=model.overhead_s * factor,
            attention_s=model.attention_s * factor,
        )  # fmt: skip

    def _link(self, prefill: str, decode: str) -> Link:
        """Return a pair's link: what it is measured to give one transfer, and the NICs of decode all of them."""
        cluster = self.cluster
        if not self.knowledge.links:
            return Link(prefill, decode, "DIRECT", cluster.bytes_per_token, 0.0, 0.0)
        between = cluster.between(int(prefill[1:]), 0, int(decode[1:]), 0, 0)
        rate = min(cluster.prefill_nic, cluster.decode_nic, *(self.network.ports[port] for port in between))
        nic = cluster.decode_nic * cluster.decode_nics
        return Link(prefill, decode, "DIRECT", cluster.bytes_per_token, rate, nic)

    # What the router is told

    def _report(self, _: object) -> None:
        """Workers and NICs report, and cache events are fetched. One that has nothing new to say is asked now and then only, so that it counts as heard of."""
        now, router = self.clock.now, self.router
        every = max(1, int(router.config.stale_s * HEARD / self.cluster.report_s))
        all_of_them = self._reports % every == 0
        self._reports += 1
        for prefill in self.prefills.values():
            if prefill.up and (all_of_them or prefill.changed or prefill.current is not None):
                self._cache_events(prefill)
                router.report(prefill.name, prefill.load(), now)
                prefill.changed = False
        for decode in self.decodes.values():
            if not decode.up:
                continue
            if all_of_them or decode.changed:
                if decode.computer is not None:
                    self._cache_events(decode.computer)
                router.report(decode.name, decode.load(), now)
                decode.changed = False
            self._nic_report(decode)
        if self._watch is not None:
            self._watch(self)
        if self.going():
            self.clock.call(now + self.cluster.report_s, self._report, None)

    def _nic_report(self, decode: Decode) -> None:
        """Tell what is in front of a decode worker's NICs."""
        backlog = self.transfers.backlog(decode)
        if backlog or self._backlogs.get(decode.name, 0):
            self._backlogs[decode.name] = backlog
            self.router.nic(decode.name, backlog, self.clock.now)

    def _cache_events(self, prefill: Prefill) -> None:
        if prefill.events:
            for event in prefill.events:
                self.router.cache_event(prefill.name, event, self.clock.now)
            prefill.events.clear()

    # Arrivals

    def _pull(self) -> None:
        """Take arrivals up to the next that comes at a time of its own; those that wait for another's end are kept until then."""
        for number, arrival in self._next:
            if arrival.after < 0:
                if not self._pulled_at <= arrival.at < inf:
                    raise ConfigError(
                        f"arrival {number} is at {arrival.at} s, behind one at {self._pulled_at}: times ascend from 0"
                    )
                self._pulled_at = arrival.at
                self._pending.add(number)
                self.clock.call(arrival.at, self._come, (number, arrival))
                return
            if arrival.after >= number:
                raise ConfigError(f"arrival {number} comes after {arrival.after}, which is no earlier one")
            self._thinking += 1
            if arrival.after in self._pending:
                self._following.setdefault(arrival.after, []).append((number, arrival))
            else:
                self.clock.call(self.clock.now + arrival.think_s, self._answered, (number, arrival))
            self._pending.add(number)
        self._arriving = False

    def _come(self, numbered: tuple[int, Arrival]) -> None:
        self._arrive(numbered[0], numbered[1])
        self._pull()

    def _answered(self, numbered: tuple[int, Arrival]) -> None:
        self._thinking -= 1
        self._arrive(*numbered)

    def _arrive(self, number: int, arrival: Arrival) -> None:
        now, name = self.clock.now, f"r{number}"
        task = Task(name, number, now, arrival.tokens, arrival.output, arrival.blocks)
        blocks = arrival.blocks if self.knowledge.prefix else ()
        decided = self.router.route(Request(name, tokens=task.tokens, blocks=blocks, max_tokens=task.output), now)
        if isinstance(decided, Refusal):
            self._over(task, LIMITED if decided.reason in LIMITS else REFUSED)
            return
        self._send(task, decided)

    # The way of an attempt

    def _send(self, task: Task, route: Route) -> None:
        """Bring an attempt to its workers: decode first, which computes or waits for the KV."""
        if not self.knowledge.bookings:
            self.router.finished(task.id, self.clock.now, "cancelled")
        decode = task.decode = self.decodes[route.decode]
        task.prefill = decode.computer if route.prefill is None else self.prefills[route.prefill]
        self.tasks[task.id] = task
        decode.submit(task)

    def _seated(self, task: Task) -> None:
        decode, prefill = task.decode, task.prefill
        assert decode is not None  # noqa: S101  # it was sent there
        if prefill is not None and prefill is decode.computer:
            prefill.submit(task)
        else:
            self.transfers.open(task)

    def _begins_here(self, task: Task) -> None:
        assert task.decode is not None  # noqa: S101  # it was sent there
        task.decode.computing(now_so=True)

    def _computed_here(self, task: Task) -> None:
        decode = task.decode
        assert decode is not None  # noqa: S101  # it was sent there
        if decode.computer is not None and decode.computer.current is None:
            decode.computing(now_so=False)
        self._landed(task)

    def _landed(self, task: Task) -> None:
        """All KV is where it is decoded, and the first token."""
        now, router, decode = self.clock.now, self.router, task.decode
        assert decode is not None  # noqa: S101  # it was sent there
        task.landed = max(now, task.computed)
        if not task.first >= 0:
            task.first = task.landed
        router.prefilled(task.id, now, task.cached, task.tokens - task.cached, task.computing_s)
        router.first_token(task.id, now)
        decode.begin(task)

    def _ended(self, task: Task) -> None:
        self.router.finished(task.id, self.clock.now)
        del self.tasks[task.id]
        self._over(task, COMPLETE)

    def _over(self, task: Task, outcome: int) -> None:
        """A request is over: its row is written, and who comes after it thinks."""
        number, now, life = task.number, self.clock.now, task.life
        task.over = True
        self._ended_at = now
        self._ends += 1
        if self._progress is not None and not self._ends % PROGRESS:
            self._progress(self._ends)
        self._pending.discard(number)
        for following in self._following.pop(number, ()):
            self.clock.call(now + following[1].think_s, self._answered, following)
        if number < self._warm:
            return
        prefill, decode = task.prefill, task.decode
        tokens, output = (task.tokens, task.output) if life is None else (life.request.tokens, life.request.max_tokens)
        self._rows.add((
            number, task.at, tokens, task.cached, output,
            -1 if prefill is None or prefill.name[0] == "d" else prefill.index, -1 if decode is None else decode.index,
            task.seated, task.began, task.computed, task.landed, task.first, now, task.nbytes,
            0 if decode is None else task.attempts, outcome,
        ))  # fmt: skip

    # What goes wrong

    def _refused(self, task: Task) -> None:
        """Decode's flow control does not take a transfer."""
        assert task.decode is not None  # noqa: S101  # it was sent there
        self.fail(task, task.decode.name, "transfer_failed", "decode")

    def fail(self, task: Task, worker: str, cause: Cause, role: Role) -> None:
        """An attempt has failed at a worker: end it on all of them, and do what the request's life says."""
        now, life = self.clock.now, task.life
        if life is None:
            blocks = task.blocks if self.knowledge.prefix else ()
            request = Request(task.id, tokens=task.tokens, blocks=blocks, max_tokens=task.output)
            life = task.life = Life(request, self.router, wait_s=self.cluster.wait_s, attempts=1, attempt=request)
        self._act(task, life.failure(cause, worker, role, now, generated=self._withdraw(task)))

    def _withdraw(self, task: Task) -> int:
        """Take an attempt from its workers and the network; return how many of its tokens the client has."""
        prefill, decode = task.prefill, task.decode
        assert decode is not None  # noqa: S101  # it was sent there
        del self.tasks[task.id]
        task.over = True
        if task.flow is not None:
            self.transfers.abort(task)
        if prefill is not None:
            prefill.cancel(task)
            if prefill is decode.computer and prefill.current is None:
                decode.computing(now_so=False)
        return decode.cancel(task)

    def _act(self, task: Task, action: Action) -> None:
        life = task.life
        assert life is not None  # noqa: S101  # it was made when the request first failed
        if isinstance(action, Wait):
            self.waits[task.number] = task, action
            self.clock.call(action.until, self.again, (task.number, action))
        elif isinstance(action, Start | Resume):
            asked = action.request
            another = Task(asked.id, task.number, task.at, asked.tokens, asked.max_tokens, task.blocks)
            another.life, another.attempts = life, life.attempts
            another.first, another.nbytes = task.first, task.nbytes
            self._send(another, action.route)
        else:
            self._over(task, FAILED)

    def again(self, waiting: tuple[int, Wait]) -> None:
        """Try a request again that waits for a worker, unless it has been tried since."""
        number, wait = waiting
        task, current = self.waits.get(number, (None, None))
        if task is None or current is not wait:
            return
        del self.waits[number]
        assert task.life is not None  # noqa: S101  # it waits
        self._act(task, task.life.again(self.clock.now))
