"""Which NICs a transfer takes, and the ports between them."""

from __future__ import annotations

from regauge.sim.cluster import Cluster
from regauge.sim.engines import Task


class Paths:
    """NICs and the ports between them: who goes where, and what is planned on each NIC."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nics = {f"{role}{i}": cluster.nics(f"{role}{i}") for role, count in (("p", cluster.prefills), ("d", cluster.decodes)) for i in range(count)}  # fmt: skip
        self._place = {port: i for ports in self._nics.values() for i, port in enumerate(ports)}
        self.planned = dict.fromkeys(self._place, 0.0)
        """Bytes of transfers that are on a NIC and have not landed."""
        self._known: dict[tuple[str, str], tuple[str, ...]] = {}

    def nics(self, worker: str) -> tuple[str, ...]:
        """Return the ports of a worker's NICs."""
        return self._nics[worker]

    def least(self, worker: str) -> str:
        """Return the NIC with the least planned on it."""
        nics = self._nics[worker]
        return nics[0] if len(nics) == 1 else min(nics, key=self.planned.__getitem__)

    def ports(self, task: Task, sender_nic: str, receiver_nic: str) -> tuple[str, ...]:
        """Return all ports that a transfer crosses."""
        fabric = self._cluster.fabric
        known = self._known.get((sender_nic, receiver_nic)) if fabric is None else None
        if known is None:
            assert task.prefill is not None  # noqa: S101  # nothing is sent otherwise
            assert task.decode is not None  # noqa: S101
            places = self._place[sender_nic], self._place[receiver_nic]
            between = self._cluster.between(task.prefill.index, places[0], task.decode.index, places[1], task.number)
            known = (sender_nic, receiver_nic, *between)
            if fabric is None:
                self._known[sender_nic, receiver_nic] = known
        return known
