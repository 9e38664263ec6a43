"""Carries out a schedule of faults on a fleet: see `faults.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.route.request import Role
from regauge.sim.faults import Fault

if TYPE_CHECKING:
    from regauge.sim.fleet import Fleet


class Mishaps:
    """What is wrong in a fleet now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._wrong: dict[tuple[str, str], list[Fault]] = {}

    def begin(self, fault: Fault) -> None:
        """Something goes wrong; of several at once, all count."""
        fleet = self._fleet
        self._wrong.setdefault((fault.what, fault.who), []).append(fault)
        self._apply(fault)
        if fault.seconds is not None:
            fleet.clock.call(fleet.clock.now + fault.seconds, self._mended, fault)

    def _mended(self, fault: Fault) -> None:
        self._wrong[fault.what, fault.who].remove(fault)
        self._apply(fault)

    def _apply(self, fault: Fault) -> None:
        fleet = self._fleet
        name, factor = fault.who, 1.0
        left = self._wrong[fault.what, name]
        for each in left:
            factor *= 1.0 if each.factor is None else each.factor
        if fault.what == "port":
            fleet.network.port(name, fleet.cluster.all_ports()[name] * factor)
            if not factor:
                self._look_again(name)
        elif fault.what == "slow":
            if name in fleet.prefills:
                fleet.prefills[name].factor = factor / fleet.cluster.slow.get(fleet.prefills[name].index, 1.0)
            else:
                fleet.decodes[name].slow(factor)
        elif left and self._worker_up(name):
            self._die(name)
        elif not left:
            self._return(name)

    def _worker_up(self, name: str) -> bool:
        fleet = self._fleet
        return fleet.prefills[name].up if name in fleet.prefills else fleet.decodes[name].up

    def _die(self, name: str) -> None:
        """A worker is gone, with all that it holds."""
        fleet = self._fleet
        role: Role = "prefill" if name in fleet.prefills else "decode"
        fleet.router.health(name, usable=False, now=fleet.clock.now)
        if role == "prefill":
            fleet.prefills[name].up = False
            hit = [t for t in fleet.tasks.values() if t.prefill is fleet.prefills[name] and not t.landed >= 0]
        else:
            fleet.decodes[name].up = False
            hit = [t for t in fleet.tasks.values() if t.decode is fleet.decodes[name]]
        for task in hit:
            fleet.fail(task, name, "worker_lost", role)
        fleet.transfers.died(name)
        if role == "prefill":
            fleet.prefills[name].die()
        elif (computer := fleet.decodes[name].computer) is not None:
            computer.die()

    def _return(self, name: str) -> None:
        """A worker is back, empty: it joins anew, and who waits for one may try again."""
        fleet = self._fleet
        now = fleet.clock.now
        if name in fleet.prefills:
            fleet.prefills[name].begin_anew()
        else:
            fleet.decodes[name].begin_anew()
        fleet.router.join(fleet.worker(name), now)
        fleet.transfers.returned(name)
        for number, (_, wait) in fleet.waits.items():
            fleet.clock.call(max(now, wait.earliest), fleet.again, (number, wait))

    def _stuck(self, check: tuple[str, frozenset[str]]) -> None:
        """Transfers that have been on a port for a lease while it is down fail."""
        fleet = self._fleet
        port, seen = check
        if fleet.network.ports[port] or not fleet.going():
            return
        over = fleet.transfers.over(port)
        for task in over:
            if task.id in seen:
                assert task.decode is not None  # noqa: S101  # it was sent there
                assert task.prefill is not None  # noqa: S101
                ours = port.split(".")[0] == task.prefill.name
                worker, role = (task.prefill.name, "prefill") if ours else (task.decode.name, "decode")
                fleet.fail(task, worker, "transfer_failed", role)  # type: ignore[arg-type]
        self._look_again(port)

    def _look_again(self, port: str) -> None:
        """Look in a lease whether those that are on a port now still are."""
        fleet = self._fleet
        here = frozenset(task.id for task in fleet.transfers.over(port))
        fleet.clock.call(fleet.clock.now + fleet.cluster.lease_s, self._stuck, (port, here))
