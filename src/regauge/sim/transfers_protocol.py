"""Transfers by the real protocol machines: a `Sender` for each prefill worker, a `Receiver` with the real flow control for each decode worker.

Offers, grants, credit, writes, written, checks, commits, aborts, fences and leases are the product's; the driver here does what `outbound.py` and
`inbound.py` do. A worker is one rank with one state group of `LAYERS` layers, so a chunk is whole layers of some tokens, a quantum at most. Messages take
`delay_s` and keep their order; a write's bytes cross the network. Checks take no time, and agree. A port that is down holds writes up, and no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import ceil
from typing import Final

from regauge.config import FlowConfig
from regauge.move import messages as m
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import NicLimits
from regauge.move.outleg import LinkTerms
from regauge.move.protocol import Action, Check, Delivered, Failed, FenceLink, Granted, Part, Relink, Send, Write
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender
from regauge.sim.clock import Clock
from regauge.sim.cluster import Cluster
from regauge.sim.decode import Decode
from regauge.sim.engines import Task
from regauge.sim.network import Flow, Network
from regauge.sim.paths import Paths

LAYERS: Final = 8
PARTS: Final = 16
IN_FLIGHT: Final = 2
"""Writes of one link, for each of decode's NICs."""
TICK_S: Final = 0.1
ENDLESS_S: Final = 1e9
"""Requests of the simulation have no time limits of their own."""


class Session:
    """One transfer under way, as its driver knows it: the writes that the network has."""

    __slots__ = ("carried", "writes")

    def __init__(self) -> None:
        self.carried = 0
        self.writes: dict[tuple[int, int], tuple[Flow, Write, tuple[str, ...]]] = {}


class Machines:
    """See the module, and `transfers.Transfers`."""

    def __init__(
        self, cluster: Cluster, clock: Clock, network: Network, landed: Callable[[Task], None],
        refused: Callable[[Task], None], ttft_s: float | None,
    ) -> None:  # fmt: skip
        self._cluster, self._clock, self._network = cluster, clock, network
        self._landed, self._refused, self._ttft_s = landed, refused, ttft_s
        self.paths = Paths(cluster)
        self._chunk = max(1, int(cluster.decode_nic * cluster.quantum_s))
        self._token = max(1, round(cluster.bytes_per_token / LAYERS))
        self._part = Part(0, tuple(range(LAYERS)), token_bytes=self._token)
        self._tasks: dict[str, Task] = {}
        self._life = {f"{role}{i}": 0 for role, count in (("p", cluster.prefills), ("d", cluster.decodes)) for i in range(count)}  # fmt: skip
        """Instance of each worker's process."""
        self._links: dict[tuple[str, str], int] = {}
        """Links that stand, by prefill and decode worker, each with a number of its own."""
        self._made = 0
        self._ticking = False
        self.senders = {name: self._sender() for name in self._life if name[0] == "p"}
        self.receivers = {name: self._receiver(name) for name in self._life if name[0] == "d"}
        for sender in self.senders:
            for receiver in self.receivers:
                self._connect((sender, receiver))

    # What the fleet asks for

    def open(self, task: Task) -> None:
        """Have decode expect the transfer, and prefill offer it."""
        assert task.prefill is not None  # noqa: S101  # nothing is sent otherwise
        assert task.decode is not None  # noqa: S101
        p, d, now = task.prefill.name, task.decode.name, self._clock.now
        task.flow = Session()
        self._tasks[task.id] = task
        due = None if self._ttft_s is None else task.at + self._ttft_s
        self._run(d, self.receivers[d].expect(task.id, [p], task.tokens, [m.Table([])], now, due=due))
        if (p, d) in self._links:
            self._run(p, self.senders[p].offer(task.id, [d], task.tokens, now))
        else:
            self._clock.call(now, self._give_up, task)
        if not self._ticking:
            self._ticking = True
            self._clock.call(now + TICK_S, self._tick, None)

    def begins(self, task: Task) -> None:
        """Say that what is cached is ready, and then the rest in parts until the prompt is computed."""
        self._ready((task, 0, task.cached))
        rest = task.tokens - task.cached
        parts = min(max(1, ceil(rest * self._token * LAYERS / self._chunk)), PARTS, rest)
        edges = [task.cached + rest * i // parts for i in range(parts + 1)]
        for i in range(1, parts + 1):
            when = task.computed if i == parts else task.began + task.computing_s * i / parts
            self._clock.call(when, self._ready, (task, edges[i - 1], edges[i]))

    def computed(self, task: Task) -> None:
        """Nothing: the last part comes at that time."""

    def abort(self, task: Task) -> None:
        """Have both machines give the transfer up. Writes that are under way are cut off."""
        assert task.prefill is not None  # noqa: S101  # nothing is sent otherwise
        assert task.decode is not None  # noqa: S101
        p, d, now = task.prefill.name, task.decode.name, self._clock.now
        session = self._forget(task)
        self._run(p, self.senders[p].cancel(task.id, "given up"))
        self._run(d, self.receivers[d].cancel(task.id, "given up", now))
        for (epoch, seq), (flow, write, _) in session.writes.items():
            crossed = self._network.close(flow)
            task.nbytes += crossed
            done = self.senders[p].written(task.id, d, epoch, seq, self._size(write), b"", now)
            self._run(p, done)
        task.nbytes += session.carried

    def backlog(self, decode: Decode) -> int:
        """Return what decode's flow control publishes: bytes admitted and not landed."""
        flow = self.receivers[decode.name].flow
        return 0 if flow is None else sum(state.backlog_bytes for state in flow.links())

    def over(self, port: str) -> list[Task]:
        """Return the tasks that have a write under way over a port."""
        return [
            task
            for task in self._tasks.values()
            if isinstance(task.flow, Session) and any(port in ports for _, _, ports in task.flow.writes.values())
        ]

    def died(self, name: str) -> None:
        """A worker's process is gone, and its links with it; the other ends notice a delay later. Its transfers have been aborted."""
        for link in [link for link in self._links if name in link]:
            self._cut(link)
        self._life[name] += 1
        if name in self.senders:
            self.senders[name] = self._sender()
        else:
            self.receivers[name] = self._receiver(name)

    def returned(self, name: str) -> None:
        """A worker's process is back: links are made anew."""
        for sender in self.senders:
            for receiver in self.receivers:
                if name in (sender, receiver) and (sender, receiver) not in self._links:
                    self._connect((sender, receiver))

    # Links

    def _sender(self) -> Sender:
        return Sender(offer_s=ENDLESS_S, deadline_s=ENDLESS_S, resume_s=self._cluster.lease_s)

    def _receiver(self, name: str) -> Receiver:
        cluster = self._cluster
        limits = FlowConfig(
            quantum_bytes=self._chunk, stall_s=max(0.05, 20 * cluster.quantum_s), lease_s=cluster.lease_s
        )
        nics = [NicLimits(nic, cluster.decode_nic, max(2 * cluster.delay_s, 1e-6)) for nic in self.paths.nics(name)]
        return Receiver(
            lease_s=cluster.lease_s, offer_s=ENDLESS_S, deadline_s=ENDLESS_S, resume_s=cluster.lease_s,
            flow=ReceiverFlow(nics, limits=limits, policy=cluster.flow_policy),
        )  # fmt: skip

    def _connect(self, link: tuple[str, str]) -> None:
        p, d = link
        self._made += 1
        self._links[link] = self._made
        ways = tuple(i % self._cluster.prefill_nics for i in range(self._cluster.decode_nics))
        terms = LinkTerms(
            (self._part,),
            lambda _, tokens: tokens * self._token,
            chunk_bytes=self._chunk,
            depth=IN_FLIGHT * len(ways),
            ways=ways,
        )
        receiver, now = self.receivers[d], self._clock.now
        self._run(d, receiver.link_up(p, (self._part,), f"{p}#{self._life[p]}", now))
        self._run(p, self.senders[p].link_up(d, terms, f"{d}#{self._life[d]}", receiver.epoch))

    def _cut(self, link: tuple[str, str]) -> None:
        """A link is gone: nothing lands over it any more, and both ends know."""
        if self._links.pop(link, None) is None:
            return
        p, d = link
        now = self._clock.now
        for task in self._tasks.values():
            if task.prefill is not None and task.decode is not None and (task.prefill.name, task.decode.name) == link:
                self._stop_writes(task)
        self._run(d, self.receivers[d].link_lost(p, "the link broke", now))
        self._run(d, self.receivers[d].link_fenced(p, now))
        self._run(p, self.senders[p].link_lost(d, "the link broke", now))

    def _stop_writes(self, task: Task) -> None:
        session = task.flow
        assert isinstance(session, Session)  # noqa: S101  # it is under way
        for flow, _, _ in session.writes.values():
            task.nbytes += self._network.close(flow)
        session.writes.clear()

    # Carrying out

    def _run(self, name: str, actions: Iterable[Action]) -> None:
        """Carry out what a machine asks for, as its driver would."""
        for action in actions:
            match action:
                case Send(peer, message):
                    link = (name, peer) if name[0] == "p" else (peer, name)
                    if (number := self._links.get(link)) is not None:
                        self._clock.call(
                            self._clock.now + self._cluster.delay_s, self._hear, (link, number, peer, message)
                        )
                case Write():
                    self._write(name, action)
                case Granted(transfer):
                    task = self._tasks.get(transfer)
                    if task is not None and task.prefill is not None:
                        task.prefill.submit(task)
                case Check():
                    self._run(name, self.receivers[name].checked(action, self._clock.now))
                case FenceLink(peer):
                    self._cut((peer, name))
                case Relink(peer):
                    self._clock.call(self._clock.now + self._cluster.delay_s, self._relink, (name, peer))
                case Delivered(transfer) if name[0] == "d":
                    self._delivered(self._tasks[transfer])
                case Failed(transfer) if (task := self._tasks.get(transfer)) is not None:
                    self._clock.call(self._clock.now, self._give_up, task)
                case _:
                    pass

    def _relink(self, link: tuple[str, str]) -> None:
        if link not in self._links:
            self._connect(link)

    def _give_up(self, task: Task) -> None:
        if not task.over:
            self._refused(task)

    def _hear(self, said: tuple[tuple[str, str], int, str, m.Message]) -> None:
        link, number, to, message = said
        if self._links.get(link) != number:
            return  # it was lost with its link
        now = self._clock.now
        if to[0] == "p":
            self._run(to, self.senders[to].on_message(link[1], message, now))
        else:
            self._run(to, self.receivers[to].on_message(link[0], message, now))

    def _ready(self, part: tuple[Task, int, int]) -> None:
        task, begin, end = part
        if task.over or task.prefill is None or not task.computed >= 0:
            return
        name = task.prefill.name
        if end > begin:
            self._run(name, self.senders[name].ready(task.id, (0, LAYERS), (begin, end), self._clock.now))
        if end == task.tokens:
            self._run(name, self.senders[name].finish(task.id, b""))

    def _size(self, write: Write) -> int:
        layers, tokens = write.layers, write.tokens
        return (layers[1] - layers[0]) * (tokens[1] - tokens[0]) * self._token

    def _write(self, name: str, write: Write) -> None:
        task = self._tasks[write.transfer]
        session, d = task.flow, write.peer
        assert isinstance(session, Session)  # noqa: S101  # it is under way
        ours = self.paths.nics(name)[write.nic % self._cluster.prefill_nics]
        ports = self.paths.ports(task, ours, self.paths.nics(d)[write.nic])
        flow = self._network.open(ports, partial(self._written, task, session, write))
        session.writes[write.epoch, write.seq] = flow, write, ports
        self._network.add(flow, self._size(write), last=True)

    def _written(self, task: Task, session: Session, write: Write) -> None:
        del session.writes[write.epoch, write.seq]
        assert task.prefill is not None  # noqa: S101  # it has written
        name, size = task.prefill.name, self._size(write)
        session.carried += size
        sender = self.senders[name]
        self._run(name, sender.written(task.id, write.peer, write.epoch, write.seq, size, b"", self._clock.now))

    def _delivered(self, task: Task) -> None:
        session = self._forget(task)
        task.nbytes += session.carried
        self._landed(task)

    def _forget(self, task: Task) -> Session:
        session = task.flow
        assert isinstance(session, Session)  # noqa: S101  # it is under way
        task.flow = None
        del self._tasks[task.id]
        return session

    def _tick(self, _: None) -> None:
        now = self._clock.now
        for name, sender in list(self.senders.items()):
            self._run(name, sender.tick(now))
        for name, receiver in list(self.receivers.items()):
            self._run(name, receiver.tick(now))
        self._ticking = bool(self._tasks)
        if self._ticking:
            self._clock.call(now + TICK_S, self._tick, None)
