"""A cluster that serves a trace: the gateway's `Router`, driven as the gateway drives it, over simulated workers and network.

The router knows what the gateway knows: answers as they come, a report of each worker and link now and then, cache events with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from regauge.config_route import RouteConfig
from regauge.route.cluster import Link, Load, Refusal, Request, Worker
from regauge.route.router import Router
from regauge.sim.clock import Clock
from regauge.sim.engines import Decode, DecodeModel, Prefill, PrefillModel, Task
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


@dataclass(slots=True)
class Result:
    """What became of the requests."""

    tasks: list[Task]
    refused: int
    seconds: float
    prefill_busy: float
    """Share of the time, mean of the workers."""
    decode_nic_busy: float
    cached_tokens: int
    prompt_tokens: int
    seats_most: int

    @property
    def hit(self) -> float:
        """Share of prompt tokens that were cached."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    def ttfts(self) -> list[float]:
        """Return the times to the first token."""
        return [task.first - task.arrived for task in self.tasks]

    def tpots(self) -> list[float]:
        """Return the times per output token of requests with more than one."""
        return [(task.ended - task.first) / (task.output - 1) for task in self.tasks if task.output > 1]


class Fleet:
    """One run. `warm`: requests at the start that are served and not counted."""

    def __init__(
        self, cluster: Cluster, config: RouteConfig, seed: int = 0, knowledge: Knowledge = Knowledge()
    ) -> None:
        self.cluster, self.knowledge = cluster, knowledge
        self.clock = Clock()
        self.router = Router(config, seed)
        self.refusals: list[Refusal] = []
        self.done: list[Task] = []
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

    def run(self, arrivals: Sequence[Arrival], warm: int = 0) -> Result:
        """Serve the arrivals; return what became of those after the first `warm`."""
        self._arriving = True
        for number, arrival in enumerate(arrivals):
            self.clock.at(arrival.at, lambda number=number, arrival=arrival: self._arrive(number, arrival))  # type: ignore[misc]
        self.clock.at(arrivals[-1].at, self._last)
        self._report()
        self.clock.run()
        begin = arrivals[warm].at
        seconds = max(self.clock.now, 1e-9)
        counted = [task for task in self.done if task.arrived >= begin]
        return Result(
            counted,
            len(self.refusals),
            seconds,
            sum(each.busy_s for each in self.prefills.values()) / len(self.prefills) / seconds,
            sum(self.network.carried(name) for name in self.decodes)
            / len(self.decodes)
            / seconds
            / self.cluster.decode_nic,
            sum(task.cached for task in counted),
            sum(task.tokens for task in counted),
            self._seats_most,
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
            backlog = int(self.network.backlog(name))
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
            self.refusals.append(decided)
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
        del self._sent[task.id]
        self._open -= 1
        self.done.append(task)
