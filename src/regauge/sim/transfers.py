"""How KV crosses: one of several levels of detail, behind one interface.

`Fluid` is the least, bytes become ready while the prompt is computed, and cross as fast as max-min fair sharing of the ports gives; `transfers_flow.Controlled` has the real flow control.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from regauge.sim.clock import Clock
from regauge.sim.cluster import Cluster
from regauge.sim.decode import Decode
from regauge.sim.engines import Task
from regauge.sim.network import Flow, Network
from regauge.sim.paths import Paths
from regauge.sim.transfers_flow import Controlled
from regauge.sim.transfers_protocol import Machines


class Transfers(Protocol):
    """What carries KV. `task.flow` is its own while a transfer is under way."""

    paths: Paths

    def open(self, task: Task) -> None:
        """Decode has room for a request: prepare its transfer, and have its prompt computed once it may be."""

    def begins(self, task: Task) -> None:
        """The prompt begins to be computed; what is cached is ready at once."""

    def computed(self, task: Task) -> None:
        """The prompt is computed, and so all of its KV ready."""

    def abort(self, task: Task) -> None:
        """Give a transfer up; what has crossed goes to `task.nbytes`."""

    def backlog(self, decode: Decode) -> int:
        """Return the bytes that a decode worker's NICs have in front of them, as its flow control knows."""

    def over(self, port: str) -> list[Task]:
        """Return the tasks whose transfers cross a port."""

    def died(self, name: str) -> None:
        """A worker is gone; its transfers have been aborted."""

    def returned(self, name: str) -> None:
        """A worker is back, as another process."""


class Way:
    """One transfer's way: a NIC of each side, and the flow."""

    __slots__ = ("flow", "nbytes", "receiver_nic", "sender_nic")

    def __init__(self, flow: Flow, nbytes: float, sender_nic: str, receiver_nic: str) -> None:
        self.flow, self.nbytes, self.sender_nic, self.receiver_nic = flow, nbytes, sender_nic, receiver_nic


class Fluid:
    """Max-min fair sharing, as good as congestion control gets without knowing what the bytes are for. See `Transfers`."""

    def __init__(self, cluster: Cluster, network: Network, landed: Callable[[Task], None]) -> None:
        self._bytes, self._network, self._landed = cluster.bytes_per_token, network, landed
        self.paths = Paths(cluster)
        self._under_way: dict[int, Task] = {}

    def open(self, task: Task) -> None:
        """Choose the NICs with the least planned, and let the prompt be computed."""
        prefill, decode, paths = task.prefill, task.decode, self.paths
        assert prefill is not None  # noqa: S101  # nothing is sent otherwise
        assert decode is not None  # noqa: S101
        ours, theirs = paths.least(prefill.name), paths.least(decode.name)
        nbytes = task.tokens * self._bytes
        flow = self._network.open(paths.ports(task, ours, theirs), partial(self._done, task))
        task.flow = Way(flow, nbytes, ours, theirs)
        paths.planned[ours] += nbytes
        paths.planned[theirs] += nbytes
        self._under_way[task.number] = task
        prefill.submit(task)

    def begins(self, task: Task) -> None:
        """Cached KV is ready at once, the rest evenly until the prompt is computed."""
        way = task.flow
        assert isinstance(way, Way)  # noqa: S101  # it was opened
        cached = task.cached * self._bytes
        if cached:
            self._network.add(way.flow, cached)
        self._network.produce(way.flow, way.nbytes - cached, task.computing_s, last=True)

    def computed(self, task: Task) -> None:
        """Nothing: the network knew when that would be."""

    def abort(self, task: Task) -> None:
        """Take the flow out of the network."""
        way = task.flow
        if isinstance(way, Way):
            task.nbytes += self._network.close(way.flow)
            self._forget(task, way)

    def backlog(self, decode: Decode) -> int:
        """Return the bytes that are ready and wait."""
        planned, nics = self.paths.planned, self.paths.nics(decode.name)
        return int(sum([self._network.backlog(nic) for nic in nics if planned[nic] > 1.0], 0.0))

    def over(self, port: str) -> list[Task]:
        """Return the tasks whose transfers cross a port."""
        tasks = []
        for task in self._under_way.values():
            way = task.flow
            if isinstance(way, Way) and port in self.paths.ports(task, way.sender_nic, way.receiver_nic):
                tasks.append(task)
        return tasks

    def died(self, name: str) -> None:
        """Nothing more: nobody else knows of links."""

    def returned(self, name: str) -> None:
        """Nothing."""

    def _done(self, task: Task) -> None:
        way = task.flow
        assert isinstance(way, Way)  # noqa: S101  # it was opened
        task.nbytes += way.nbytes
        self._forget(task, way)
        self._landed(task)

    def _forget(self, task: Task, way: Way) -> None:
        task.flow = None
        planned = self.paths.planned
        planned[way.sender_nic] -= way.nbytes
        planned[way.receiver_nic] -= way.nbytes
        del self._under_way[task.number]


def carrier(
    cluster: Cluster, clock: Clock, network: Network, landed: Callable[[Task], None], refused: Callable[[Task], None],
    ttft_s: float | None,
) -> Transfers:  # fmt: skip
    """Return the cluster's level of detail. `landed` is told of transfers that are over, `refused` of those that decode does not take."""
    if cluster.transfers == "fluid":
        return Fluid(cluster, network, landed)
    level = Machines if cluster.transfers == "protocol" else Controlled
    return level(cluster, clock, network, landed, refused, ttft_s)
