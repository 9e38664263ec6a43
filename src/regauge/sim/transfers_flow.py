"""Transfers under the real flow control: `ReceiverFlow` for each decode worker, `SenderFlow` for each prefill worker.

They decide which NIC of decode a transfer comes over, when it is admitted, whose bytes go next, and how many; the network carries what they send, turn
by turn. Messages take `delay_s`, and are not lost. A turn is a quantum, `quantum_s` of a decode NIC's rate: coarser than in a real cluster, so that a
request costs a few turns, and not hundreds. A prompt's KV is said to be ready in parts of a quantum, `PARTS` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, inf
from typing import Final

from regauge.config import FlowConfig
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_sender import SenderFlow
from regauge.move.flow_types import FAIR_SHARE, Admit, Credit, Demand, FlowAction, NicLimits, Refuse
from regauge.sim.clock import Clock
from regauge.sim.cluster import Cluster
from regauge.sim.decode import Decode
from regauge.sim.engines import Task
from regauge.sim.network import Flow, Network
from regauge.sim.paths import Paths

PARTS: Final = 16
IN_FLIGHT: Final = 2
"""Turns of one transfer that may be under way: one lands while the credit for the next comes."""
SOON_S: Final = 1e-6
"""Least time until a paced sender looks again."""


class Crossing:
    """One transfer."""

    __slots__ = ("computed", "landed", "nbytes", "part", "ports", "sender", "sender_nic", "sent", "turns")

    def __init__(self, nbytes: int, sender: SenderFlow, sender_nic: str) -> None:
        self.nbytes, self.sender, self.sender_nic = nbytes, sender, sender_nic
        self.computed = self.landed = self.sent = self.part = 0
        """Bytes; `part`: how many parts are ready."""
        self.ports: tuple[str, ...] = ()
        self.turns: dict[int, Flow] = {}
        """Under way, by the byte at which they begin."""


class Controlled:
    """See the module, and `Transfers`. `ttft_s`: within which a request's KV should have landed; None: no matter when."""

    def __init__(
        self, cluster: Cluster, clock: Clock, network: Network, landed: Callable[[Task], None],
        refused: Callable[[Task], None], ttft_s: float | None,
    ) -> None:  # fmt: skip
        self._cluster, self._clock, self._network = cluster, clock, network
        self._landed, self._refused, self._ttft_s = landed, refused, ttft_s
        self.paths = Paths(cluster)
        self.quantum = max(1, int(cluster.decode_nic * cluster.quantum_s))
        policy, rtt = cluster.flow_policy, max(2 * cluster.delay_s, SOON_S)
        self._marked = policy is FAIR_SHARE
        limits = FlowConfig(
            quantum_bytes=self.quantum, stall_s=max(0.05, 20 * cluster.quantum_s), max_transfers=1 << 20
        )
        self._lease_s = limits.lease_s

        def nics(worker: str, rate: float) -> list[NicLimits]:
            return [NicLimits(nic, rate, rtt) for nic in self.paths.nics(worker)]

        self.receivers = {
            f"d{i}": ReceiverFlow(nics(f"d{i}", cluster.decode_nic), limits=limits, policy=policy)
            for i in range(cluster.decodes)
        }
        self.senders = {
            f"p{i}": SenderFlow(nics(f"p{i}", cluster.prefill_nic), order=policy.sender_order, burst_bytes=self.quantum)
            for i in range(cluster.prefills)
        }
        self._tasks: dict[str, Task] = {}
        self._wakes: dict[str, float] = {}
        """Sender NICs that will look again for what their pace allows."""
        self._ticking: set[str] = set()

    def open(self, task: Task) -> None:
        """Announce the transfer on both sides; decode's flow control says over which NIC it comes, and when its prompt may be computed."""
        prefill, decode, now = task.prefill, task.decode, self._clock.now
        assert prefill is not None  # noqa: S101  # nothing is sent otherwise
        assert decode is not None  # noqa: S101
        nic, nbytes = self.paths.least(prefill.name), max(1, round(task.tokens * self._cluster.bytes_per_token))
        sender = self.senders[prefill.name]
        task.flow = Crossing(nbytes, sender, nic)
        self._tasks[task.id] = task
        self.paths.planned[nic] += nbytes
        sender.offer(task.id, decode.name, nbytes, nic)
        deadline = None if self._ttft_s is None else task.at + self._ttft_s
        self._do(
            self.receivers[decode.name].arrive(Demand(task.id, prefill.name, nbytes, deadline=deadline), now),
        )
        if decode.name not in self._ticking:
            self._ticking.add(decode.name)
            self._tick(decode.name)

    def begins(self, task: Task) -> None:
        """Cached KV is ready at once, the rest in parts until the prompt is computed."""
        crossing = task.flow
        assert isinstance(crossing, Crossing)  # noqa: S101  # it was opened
        cached = round(task.cached * self._cluster.bytes_per_token)
        parts = min(max(1, ceil((crossing.nbytes - cached) / self.quantum)), PARTS)
        for part in range(1, parts):
            share = part / parts
            upto = cached + int(share * (crossing.nbytes - cached))
            self._clock.call(task.began + share * task.computing_s, self._ready, (task, upto))
        self._clock.call(task.computed, self._ready, (task, crossing.nbytes))
        if cached:
            self._ready((task, cached))

    def computed(self, task: Task) -> None:
        """Nothing: the last part comes at that time."""

    def abort(self, task: Task) -> None:
        """End the transfer on both sides, and take its turns out of the network."""
        crossing, decode = task.flow, task.decode
        if isinstance(crossing, Crossing) and decode is not None:
            crossed = crossing.landed + sum([self._network.close(flow) for flow in crossing.turns.values()], 0.0)
            crossing.turns.clear()
            task.nbytes += crossed
            self._end(task, crossing, decode.name)

    def backlog(self, decode: Decode) -> int:
        """Return what decode's flow control publishes: bytes admitted and not landed."""
        return sum(state.backlog_bytes for state in self.receivers[decode.name].links())

    def over(self, port: str) -> list[Task]:
        """Return the tasks whose transfers cross a port."""
        tasks = []
        for task in self._tasks.values():
            crossing = task.flow
            if isinstance(crossing, Crossing) and (port == crossing.sender_nic or port in crossing.ports):
                tasks.append(task)
        return tasks

    def died(self, name: str) -> None:
        """Nothing more: its transfers have been ended on both sides."""

    def returned(self, name: str) -> None:
        """Nothing."""

    def _do(self, actions: Sequence[FlowAction]) -> None:
        """Carry out what a receiver decides; the sender hears of it a delay later."""
        then = self._clock.now + self._cluster.delay_s
        for action in actions:
            if isinstance(action, Credit):
                self._clock.call(then, self._credited, action)
            elif isinstance(action, Admit):
                task = self._tasks[action.transfer]
                crossing = task.flow
                assert isinstance(crossing, Crossing)  # noqa: S101  # it was opened
                crossing.ports = self.paths.ports(task, crossing.sender_nic, action.nic)
                self._clock.call(then, self._granted, task)
            elif isinstance(action, Refuse):
                self._clock.call(then, self._not_taken, self._tasks[action.transfer])

    def _granted(self, task: Task) -> None:
        if not task.over and task.prefill is not None:
            task.prefill.submit(task)

    def _not_taken(self, task: Task) -> None:
        if not task.over:
            self._refused(task)

    def _ready(self, part: tuple[Task, int]) -> None:
        """So much of a prompt is computed: its sender knows at once, decode a delay later."""
        task, upto = part
        crossing = task.flow
        if task.over or not isinstance(crossing, Crossing) or not task.computed >= 0:
            return
        crossing.computed = upto
        self._offer(task, crossing)
        self._clock.call(self._clock.now + self._cluster.delay_s, self._told, part)

    def _told(self, part: tuple[Task, int]) -> None:
        task, upto = part
        if not task.over and task.decode is not None and task.flow is not None:
            name = task.decode.name
            self._do(self.receivers[name].backlog(task.id, upto, self._clock.now))

    def _credited(self, credit: Credit) -> None:
        task = self._tasks.get(credit.transfer)
        if task is not None and isinstance(task.flow, Crossing):
            task.flow.sender.credit(credit, self._clock.now)
            self._kick((task.flow.sender, task.flow.sender_nic))

    def _offer(self, task: Task, crossing: Crossing) -> None:
        """Let the sender have what is computed, a few turns at a time."""
        crossing.sender.ready(task.id, min(crossing.computed, crossing.landed + IN_FLIGHT * self.quantum))
        self._kick((crossing.sender, crossing.sender_nic))

    def _kick(self, at: tuple[SenderFlow, str]) -> None:
        """Send what a NIC has leave to send, at its pace."""
        sender, nic = at
        now = self._clock.now
        if self._wakes.get(nic, inf) <= now:
            del self._wakes[nic]
        while (turn := sender.choose(nic, now, most=self.quantum)) is not None:
            task = self._tasks[turn.transfer]
            crossing = task.flow
            assert isinstance(crossing, Crossing)  # noqa: S101  # it was opened
            sender.sent(turn.transfer, turn.nbytes, now)
            flow = self._network.open(crossing.ports, partial(self._arrived, task, crossing, turn.start, turn.nbytes))
            crossing.turns[turn.start] = flow
            self._network.add(flow, turn.nbytes, last=True)
            if self._marked and self._network.backlog(turn.receiver_nic) > IN_FLIGHT * self.quantum:
                sender.congested(nic, now)
        wake = sender.next_wake(nic, now)
        if wake is not None and wake < self._wakes.get(nic, inf):
            self._wakes[nic] = wake = max(wake, now + SOON_S)
            self._clock.call(wake, self._kick, at)

    def _arrived(self, task: Task, crossing: Crossing, start: int, nbytes: int) -> None:
        """A turn has landed."""
        decode, now = task.decode, self._clock.now
        assert decode is not None  # noqa: S101  # it was sent there
        del crossing.turns[start]
        crossing.landed += nbytes
        receiver = self.receivers[decode.name]
        self._do(receiver.landed(task.id, crossing.landed, now))
        if crossing.landed < crossing.nbytes:
            self._offer(task, crossing)
            return
        task.nbytes += crossing.nbytes
        self._end(task, crossing, decode.name)
        self._landed(task)

    def _end(self, task: Task, crossing: Crossing, decode: str) -> None:
        now = self._clock.now
        task.flow = None
        del self._tasks[task.id]
        self.paths.planned[crossing.sender_nic] -= crossing.nbytes
        crossing.sender.end(task.id)
        receiver = self.receivers[decode]
        self._do(receiver.end(task.id, now))
        self._do(receiver.free(task.id, now))
        self._kick((crossing.sender, crossing.sender_nic))

    def _tick(self, decode: str) -> None:
        receiver, now = self.receivers[decode], self._clock.now
        for name, flow in list(receiver.transfers.items()):
            if now - flow.alive_at > self._lease_s / 4:
                self._do(receiver.renew(name, now))  # its sender lives: a dead one's transfers are ended
        self._do(receiver.tick(now))
        wake = receiver.next_wake()
        if wake is None:
            self._ticking.discard(decode)
        else:
            self._clock.call(wake, self._tick, decode)
