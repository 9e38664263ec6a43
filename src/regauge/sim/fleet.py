"""A cluster that serves a trace: the gateway's `Router`, driven as the gateway drives it, over simulated workers and network.

The router knows what the gateway knows: answers as they come, a report of each worker and link now and then, cache events with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from regauge.config_route import RouteConfig
from regauge.route.cluster import Link, Load, Refusal, Request, Worker
from regauge.route.router import Router
from regauge.sim.clock import Clock
from regauge.sim.engines import Decode, DecodeModel, Prefill, PrefillModel, Task
from regauge.sim.log import COMPLETE, LIMITED, REFUSED, Log, Rows
from regauge.sim.network import Flow, Network
from regauge.sim.trace import Arrival


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the fleet is made of."""

    prefills: int = 12
    decodes: int = 4
    prefill: PrefillModel = field(default_factory=lambda: PrefillModel(20_000.0))
    decode: DecodeModel = field(default_factory=DecodeModel)
    slow: dict[int, float] = field(default_factory=dict)
    """Prefill worker -> its speed over the others'."""
    bytes_per_token: float = 188_416.0
    """KV of Qwen3-235B in BF16, 94 layers x 4 KV heads x 128 x 2."""
    prefill_nic: float = 50e9
    decode_nic: float = 12.5e9
    """Bytes per second."""
    racks: int = 1
    uplink: float = 0.0
    """Of each rack, each way, bytes per second; 0: as good as endless."""
    report_s: float = 0.5
    """Between a worker's reports."""
    block: int = 512


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the router is told; all of it, unless a study leaves something out."""

    links: bool = True
    prefix: bool = True
    bookings: bool = True
    """Without: each booking is taken back at once, so that reports are all that it has."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of the requests, and what it took. SIMULATED."""

    log: Log
    seconds: float
    """Of the clock, from the start to the last event."""
    busy: Mapping[str, float]
    """Seconds that each worker worked."""
    carried: Mapping[str, float]
    """Bytes that crossed each port."""
    ports: Mapping[str, float]
    """Bytes per second of each."""
    decisions: Mapping[str, int]
    """Of the router: placed, and refusals by reason."""
    events: int
    """Of the clock."""
    seats_most: int = 0
    """Most requests that one decode worker held at a report."""

    @property
    def refused(self) -> int:
        """Requests that were not taken."""
        return int(((self.log.outcome == LIMITED) | (self.log.outcome == REFUSED)).sum())

    @property
    def hit(self) -> float:
        """Share of prompt tokens that were cached, of complete requests."""
        mask = self.log.complete
        return float(self.log.cached[mask].sum() / max(1, self.log.prompt[mask].sum()))

    @property
    def prefill_busy(self) -> float:
        """Share of the time that prefill workers computed, mean of all."""
        shares = [busy / self.seconds for name, busy in self.busy.items() if name.startswith("p")]
        return sum(shares) / max(1, len(shares))

    @property
    def decode_nic_busy(self) -> float:
        """Share of what decode's NICs can carry that they carried, mean of all."""
        shares = [
            self.carried[p] / self.seconds / rate
            for p, rate in self.ports.items()
            if p.startswith("d") and not p.startswith("down")
        ]
        return sum(shares) / max(1, len(shares))

    def ttfts(self) -> list[float]:
        """Return the times to the first token."""
        return [float(each) for each in self.log.ttft()]

    def tpots(self) -> list[float]:
        """Return the times per output token of requests with more than one."""
        return [float(each) for each in self.log.tpot()]


class Fleet:
    """One run. `warm`: requests at the start that are served and not counted."""

    def __init__(
        self,
        cluster: Cluster,
        config: RouteConfig,
        seed: int = 0,
        knowledge: Knowledge = Knowledge(),
    ) -> None:
        self.cluster, self.knowledge = cluster, knowledge
        self.clock = Clock()
        self.router = Router(config, seed)
        self._rows = Rows()
        self._warm = self._ends = 0
        self._progress: Callable[[int], None] | None = None
        self._flows: dict[str, Flow] = {}
        self._sent: dict[str, tuple[Prefill, Decode]] = {}
        self._seats_most = 0
        self._open = 0
        self._arriving = False
        ports = {f"p{i}": cluster.prefill_nic for i in range(cluster.prefills)}
        ports |= {f"d{i}": cluster.decode_nic for i in range(cluster.decodes)}
        if cluster.uplink:
            ports |= {f"{way}{rack}": cluster.uplink for way in ("up", "down") for rack in range(cluster.racks)}
        self.network = Network(self.clock, ports)
        self.prefills = {f"p{i}": self._prefill(i) for i in range(cluster.prefills)}
        self.decodes = {
            f"d{i}": Decode(f"d{i}", cluster.decode, self.clock, self._ended) for i in range(cluster.decodes)
        }
        self._join()

    def run(
        self, arrivals: Iterable[Arrival], *, warm: int = 0, progress: Callable[[int], None] | None = None
    ) -> Result:
        """Serve the arrivals; the log has those after the first `warm`. `progress` is told now and then how many are over."""
        self._arriving, self._warm, self._progress = True, warm, progress
        last = 0.0
        for number, arrival in enumerate(arrivals):
            self.clock.at(arrival.at, lambda number=number, arrival=arrival: self._arrive(number, arrival))  # type: ignore[misc]
            last = arrival.at
        self.clock.at(last, self._last)
        self._report()
        self.clock.run()
        seconds = max(self.clock.now, 1e-9)
        busy = {name: each.busy_s for name, each in self.prefills.items()}
        return Result(
            self._rows.log(), seconds, busy, dict(self.network.carried), dict(self.network.ports),
            dict(self.router.decisions), self.clock.ran, self._seats_most,
        )  # fmt: skip

    def _over(self, task: Task, outcome: int, prefill: int = -1, decode: int = -1) -> None:
        number = int(task.id[1:])
        self._ends += 1
        if self._progress is not None and self._ends % 256 == 0:
            self._progress(self._ends)
        if number < self._warm:
            return
        nan, done = float("nan"), outcome == COMPLETE
        times = (
            (task.seated, task.began, task.prefilled, task.first, task.first, task.ended)
            if done
            else (nan,) * 5 + (self.clock.now,)
        )
        sent = task.tokens * self.cluster.bytes_per_token if done else 0.0
        self._rows.add(
            (number, task.arrived, task.tokens, task.cached, task.output, prefill, decode, *times, sent, 1, outcome)
        )

    def _prefill(self, index: int) -> Prefill:
        model, name = self.cluster.prefill, f"p{index}"
        if index in self.cluster.slow:
            speed = model.tokens_per_s * self.cluster.slow[index]
            model = PrefillModel(
                speed, model.overhead_s, model.attention_s / self.cluster.slow[index], model.cache_blocks
            )
        return Prefill(name, model, self.clock, self.cluster.block, self._ready)

    def _join(self) -> None:
        for name, prefill in self.prefills.items():
            model = prefill.model
            worker = Worker(
                name, prefill=True, prior_tokens_per_s=model.tokens_per_s, overhead_s=model.overhead_s,
                attention_s=model.attention_s,
            )  # fmt: skip
            self.router.join(worker, 0.0)
        for name, decode in self.decodes.items():
            self.router.join(Worker(name, decode=True, slots=decode.model.slots), 0.0)

    def _last(self) -> None:
        self._arriving = False

    def _report(self) -> None:
        """Every worker and link reports, and cache events are fetched."""
        now, router, cluster = self.clock.now, self.router, self.cluster
        for name, prefill in self.prefills.items():
            for event in prefill.events:
                router.cache_event(name, event, now)
            prefill.events.clear()
            speed = prefill.model.tokens_per_s
            router.report(name, Load(prefill.queued_tokens(), prefill_tokens_per_s=speed, cache_seq=prefill.seq), now)
        for name, decode in self.decodes.items():
            router.report(name, decode.load(), now)
            backlog = int(self.network.rest(name))
            self._seats_most = max(self._seats_most, decode.seats)
            for sender in self.prefills:
                rate = self._rate(sender, name) if self.knowledge.links else 0.0
                nic = cluster.decode_nic if self.knowledge.links else 0.0
                router.link(Link(sender, name, "DIRECT", cluster.bytes_per_token, rate, nic, backlog), now)
        if self._arriving or self._open:
            self.clock.after(cluster.report_s, self._report)

    def _ports(self, prefill: str, decode: str) -> list[str]:
        """Return the ports on the way; workers are dealt to the racks in turn."""
        cluster = self.cluster
        ports, ours, theirs = [prefill, decode], int(prefill[1:]) % cluster.racks, int(decode[1:]) % cluster.racks
        if cluster.uplink and ours != theirs:
            ports += [f"up{ours}", f"down{theirs}"]
        return ports

    def _rate(self, prefill: str, decode: str) -> float:
        """Return what a pair's link is measured to give a transfer of its own."""
        return min(self.network.ports[port] for port in self._ports(prefill, decode))

    def _arrive(self, number: int, arrival: Arrival) -> None:
        now, router = self.clock.now, self.router
        blocks = arrival.blocks if self.knowledge.prefix else ()
        task = Task(f"r{number}", now, arrival.tokens, arrival.output, arrival.blocks)
        decided = router.route(Request(task.id, tokens=task.tokens, blocks=blocks, max_tokens=task.output), now)
        if isinstance(decided, Refusal):
            limited = decided.reason in ("deadline", "tpot", "overload")
            self._over(task, LIMITED if limited else REFUSED)
            return
        assert decided.prefill is not None  # noqa: S101  # no decode worker here says that it computes prompts
        if not self.knowledge.bookings:
            router.finished(task.id, now, "cancelled")
        prefill, decode = self.prefills[decided.prefill], self.decodes[decided.decode]
        self._open += 1
        self._sent[task.id] = prefill, decode
        decode.submit(task, lambda: self._seated(task))

    def _seated(self, task: Task) -> None:
        """Decode has a slot and pages: the prompt may be computed."""
        prefill, decode = self._sent[task.id]
        task.seated = self.clock.now
        flow = self.network.open(self._ports(prefill.name, decode.name), lambda: self._landed(task))
        self._flows[task.id] = flow
        prefill.submit(task)

    def _ready(self, task: Task, share: float, last: bool) -> None:
        """A share of the prompt's KV is there."""
        size = share * task.tokens * self.cluster.bytes_per_token
        self.network.add(self._flows[task.id], size, last=last)

    def _landed(self, task: Task) -> None:
        now = self.clock.now
        del self._flows[task.id]
        task.first = now
        self.router.prefilled(task.id, now, task.cached, task.tokens - task.cached, task.prefilled - task.began)
        self.router.first_token(task.id, now)
        self._sent[task.id][1].begin(task)

    def _ended(self, task: Task) -> None:
        self.router.finished(task.id, self.clock.now)
        prefill, decode = self._sent.pop(task.id)
        self._open -= 1
        self._over(task, COMPLETE, int(prefill.name[1:]), int(decode.name[1:]))
