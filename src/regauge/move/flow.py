"""Receiver-driven flow control, sans-IO: events and the time go in, credit comes out. `docs/flow.md` says why.

Twelve prefill servers have twelve times the NICs of the decode server that they feed. So decode decides what comes: it places each
transfer on the NIC with the least in front of it, lends its pages, and hands out credit for bytes that are *ready*, up to
a window of about rate x delay per NIC, in the order of `flow_order.py`. The senders' half is `flow_sender.py`.

    arrive --> waiting --Admit--> admitted --Credit*--> all landed --> end
                  |    `-Refuse      |  ^                               (pages: until `free`)
                  `-- end            `--' write-off: a silent sender's credit is taken back under a new epoch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from regauge.config import FlowConfig
from regauge.errors import ConfigError, ProtocolError
from regauge.move.flow_ledger import Flow, Nic
from regauge.move.flow_order import Order
from regauge.move.flow_types import (
    CREDIT,
    Admit,
    Credit,
    Demand,
    FlowAction,
    Late,
    LinkState,
    NicLimits,
    Policy,
    Rank,
    Refuse,
)

GROWTH = 2
"""Most that a transfer may have ready, over what was announced: chunks that are sent again."""
MAX_UNIT = 64 << 20
"""Most bytes of a sender's smallest chunk: it may go alone beyond the window, and a frozen one holds the NIC for a lease."""


def _admission(flow: Flow) -> tuple[bool, float, int, str]:
    """Order among those that wait for pages: by deadline, the smallest first among those without."""
    deadline = flow.demand.deadline
    return (flow.demand.bulk, float("inf") if deadline is None else deadline, flow.total, flow.demand.transfer)


class ReceiverFlow:
    """All transfers that come to one receiver. Not thread-safe: one event loop owns it.

    `pages` is the number of KV pages that may be lent; None leaves pages to somebody else. An event costs time in
    proportion to the transfers on one NIC.
    """

    def __init__(
        self, nics: Sequence[NicLimits], *, pages: int | None = None, limits: FlowConfig | None = None,
        policy: Policy = CREDIT,
    ) -> None:  # fmt: skip
        names = [nic.name for nic in nics]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"receiver NICs need names, one each, at least one: {names}")
        self.limits = limits or FlowConfig()
        self.policy = policy
        self._nics = {nic.name: Nic(nic, self.limits) for nic in nics}
        self._pages = pages
        self._pages_free = pages or 0
        self._held: dict[str, int] = {}
        self._flows: dict[str, Flow] = {}
        self._waiting: dict[str, Flow] = {}
        self._tick_s = min(self.limits.stall_s, self.limits.lease_s / 8)
        self._ticked = 0.0

    @property
    def transfers(self) -> Mapping[str, Flow]:
        """Every transfer that has not ended, for inspection."""
        return self._flows

    @property
    def pages_free(self) -> int | None:
        """Pages that may be lent; None if somebody else keeps them."""
        return None if self._pages is None else self._pages_free

    def links(self) -> list[LinkState]:
        """State of every NIC, in the order in which they were given."""
        return [nic.state() for nic in self._nics.values()]

    def arrive(self, demand: Demand, now: float) -> list[FlowAction]:
        """A transfer wants to come. Raises ProtocolError for a name in use or a negative size."""
        if demand.transfer in self._flows or demand.transfer in self._held:
            raise ProtocolError(f"transfer {demand.transfer!r} is known already")
        if demand.nbytes < 0 or demand.pages < 0 or demand.unit_bytes < 1:
            raise ProtocolError(f"transfer {demand.transfer!r}: nbytes, pages and unit_bytes must not be negative")
        if reason := self._refusal(demand, now):
            return [Refuse(demand.transfer, demand.peer, reason)]
        flow = Flow(demand, now, demand.nbytes, alive_at=now, progress_at=now, hungry_since=now)
        self._flows[demand.transfer] = self._waiting[demand.transfer] = flow
        # Those that wait did not fit before this one came, so only it can. Nobody passes one that has aged.
        if any(now - other.arrived >= self.limits.max_wait_s for other in self._waiting.values()):
            return self._admit_waiting(now)
        return self._try_admit(flow, now)

    def backlog(self, transfer: str, ready_total: int, now: float) -> list[FlowAction]:
        """The sender has computed bytes [0, ready_total) of the transfer. Transfers that are over are ignored.

        Raises ProtocolError for more than twice the announced size. Before admission the word is kept.
        """
        flow = self._flows.get(transfer)
        if flow is None:
            return []
        if ready_total > GROWTH * flow.demand.nbytes:
            raise ProtocolError(
                f"{flow.demand.peer}: {transfer!r} announced {flow.demand.nbytes} bytes, not {ready_total}"
            )
        if ready_total > flow.ready:
            if not flow.hungry:
                flow.hungry_since = now
            flow.ready = ready_total
        if flow.nic is None:
            flow.total = max(flow.total, ready_total)
        elif ready_total > flow.total:
            flow.nic.grow(flow, ready_total)
        return self._alive(flow, now)

    def landed(self, transfer: str, total: int, now: float) -> list[FlowAction]:
        """Bytes [0, total) of the transfer have landed. Raises ProtocolError if that is more than was ever granted."""
        flow = self._flows.get(transfer)
        if flow is None:
            return []
        if flow.nic is None or total > flow.peak:
            raise ProtocolError(f"{flow.demand.peer}: {transfer!r} sent {total} bytes on a credit of {flow.peak}")
        if total > flow.landed:
            flow.nic.land(flow, total, now)
        return self._alive(flow, now)

    def renew(self, transfer: str, now: float) -> list[FlowAction]:
        """The sender lives and has nothing new to say."""
        flow = self._flows.get(transfer)
        return [] if flow is None else self._alive(flow, now)

    def end(self, transfer: str, now: float) -> list[FlowAction]:
        """The transfer is over, one way or another: its credit goes to others. Its pages stay lent until `free`."""
        flow = self._flows.pop(transfer, None)
        if flow is None:
            return []
        self._waiting.pop(transfer, None)
        nic = flow.nic
        if nic is None:
            return []
        nic.remove(flow, now)
        return [*self._schedule(nic, now), *self._admit_waiting(now)]

    def free(self, transfer: str, now: float) -> list[FlowAction]:
        """The transfer's pages may be lent again. Raises ProtocolError while it is not over."""
        if transfer in self._flows:
            raise ProtocolError(f"pages of {transfer!r} are freed before it has ended")
        self._pages_free += self._held.pop(transfer, 0)
        return self._admit_waiting(now)

    def tick(self, now: float) -> list[FlowAction]:
        """Take back credit of silent senders, replace credit that stands still, repeat credit before it goes stale."""
        self._ticked = now
        actions: list[FlowAction] = []
        for nic in self._nics.values():
            stall_s = max(self.limits.stall_s, 4 * nic.delay.delay)
            for flow in nic.flows.values():
                if flow.outstanding <= 0:
                    continue
                if now - flow.alive_at > self.limits.lease_s:
                    nic.write_off(flow, now)
                    flow.silent = True
                elif now - flow.progress_at > stall_s:
                    nic.stall(flow)
            actions += self._schedule(nic, now)
            order = self._order(nic, now)
            actions += [self._tell_late(f) for f in nic.flows.values() if not f.late_told and order.late(f)]
            actions += [
                self._credit(flow, now)
                for flow in nic.flows.values()
                if flow.outstanding > 0 and now - flow.told_at > self.limits.lease_s / 6
            ]
            nic.forget_peers(now)
        return actions + self._admit_waiting(now)

    def next_wake(self) -> float | None:
        """When `tick` is due; None while there is nothing to watch."""
        return self._ticked + self._tick_s if self._flows else None

    def _refusal(self, demand: Demand, now: float) -> str:
        if len(self._flows) >= self.limits.max_transfers:
            return f"{self.limits.max_transfers} transfers are under way here: try again, or raise max_transfers"
        if demand.unit_bytes > MAX_UNIT:
            return f"its smallest chunk has {demand.unit_bytes} bytes: send chunks of at most {MAX_UNIT}"
        if self._pages is not None and demand.pages > self._pages:
            return f"needs {demand.pages} pages, the pool has {self._pages}"
        allowed = [self._nics[name] for name in demand.nics or self._nics if name in self._nics]
        if not allowed:
            return f"none of the NICs {', '.join(demand.nics)} is here: {', '.join(self._nics)} are"
        if demand.deadline is None or self.limits.late != "refuse":
            return ""
        rate = max(nic.rate for nic in allowed)
        needs = demand.nbytes / rate
        if now + needs > demand.deadline:
            return f"needs {needs:.3g} s at {rate:.3g} bytes/s, its deadline is in {demand.deadline - now:.3g} s"
        return ""

    def _admit_waiting(self, now: float) -> list[FlowAction]:
        """Admit who fits, in order. One that has aged is not passed by anybody who came later."""
        if not self._waiting:
            return []
        aged = [f for f in self._waiting.values() if now - f.arrived >= self.limits.max_wait_s]
        actions: list[FlowAction] = []
        for flow in sorted(aged, key=lambda f: (f.arrived, f.demand.transfer)):
            done = self._try_admit(flow, now)
            actions += done
            if flow.nic is None:
                return actions
        for flow in sorted(self._waiting.values(), key=_admission):
            actions += self._try_admit(flow, now)
        return actions

    def _try_admit(self, flow: Flow, now: float) -> list[FlowAction]:
        demand = flow.demand
        if self._pages is not None and demand.pages > self._pages_free:
            return []
        allowed = [self._nics[name] for name in demand.nics or self._nics if name in self._nics]
        nic = min(allowed, key=lambda n: (n.backlog_s, len(n.flows)))
        if nic.backlog and nic.backlog_s + flow.total / nic.rate > self.limits.commit_s:
            return []
        del self._waiting[demand.transfer]
        if self._pages is not None and demand.pages:
            self._pages_free -= demand.pages
            self._held[demand.transfer] = demand.pages
        nic.place(flow, now)
        flow.alive_at = flow.progress_at = now
        actions: list[FlowAction] = [Admit(demand.transfer, demand.peer, nic.limits.name, demand.pages)]
        if not flow.late_told and self._order(nic, now).late(flow):
            actions.append(self._tell_late(flow))
        small = 0 < flow.total <= self.limits.unscheduled_bytes
        if small and self.policy.windowed and nic.unscheduled + flow.total <= self.limits.unscheduled_budget_bytes:
            flow.unscheduled = True
            nic.grant(flow, flow.total, now)
            # A prompt may take long to compute: the first landing says nothing about the link's delay.
            flow.probe_at = None
            return [*actions, self._credit(flow, now)]
        return actions + self._schedule(nic, now)

    def _alive(self, flow: Flow, now: float) -> list[FlowAction]:
        flow.alive_at = now
        flow.silent = False
        return [] if flow.nic is None else self._schedule(flow.nic, now)

    def _order(self, nic: Nic, now: float) -> Order:
        return Order(self.limits, nic.rate, now + nic.delay.delay + nic.outstanding / nic.rate, now)

    def _schedule(self, nic: Nic, now: float) -> list[FlowAction]:
        """Hand out what the window has room for."""
        if self.policy.windowed and nic.outstanding and nic.room() <= 0:
            return []
        hungry = [flow for flow in nic.flows.values() if flow.hungry]
        if not self.policy.windowed:
            return self._grant_all(nic, hungry, now)
        got: dict[str, Flow] = {}
        nic.shares.active({flow.demand.tenant for flow in hungry})
        while hungry:
            if nic.outstanding and nic.room() < min(nic.quantum, *(f.ready - f.granted for f in hungry)):
                break
            order = self._order(nic, now)
            flow, rank = self._next(nic, order, hungry)
            wanted = min(max(nic.quantum, flow.demand.unit_bytes), flow.ready - flow.granted)
            # The smallest chunk of a sender may be more than a window: alone it may go.
            if nic.outstanding and nic.room() < wanted:
                break
            peer = flow.demand.peer
            if nic.peers[peer].outstanding and nic.peer_room(peer) < wanted:
                hungry = [f for f in hungry if f.demand.peer != peer]
                continue
            flow.rank = rank
            self._account(nic, order, hungry, flow, wanted)
            nic.grant(flow, wanted, now)
            got[flow.demand.transfer] = flow
            if not flow.hungry:
                hungry.remove(flow)
        return [self._credit(flow, now) for flow in got.values()]

    def _next(self, nic: Nic, order: Order, hungry: Sequence[Flow]) -> tuple[Flow, Rank]:
        """Whose tenant is behind; else who has aged, in their share; else by deadline and size."""
        owed = nic.shares.behind(self.limits.fair_s * nic.rate)
        theirs = [f for f in hungry if f.demand.tenant == owed] if owed is not None else []
        if theirs:
            return order.first(theirs, nic.quantum)[0], Rank.OWED
        oldest = order.oldest(hungry) if nic.aged_due >= nic.quantum else None
        return order.first(hungry, nic.quantum) if oldest is None else (oldest, Rank.OWED)

    def _account(self, nic: Nic, order: Order, hungry: Sequence[Flow], flow: Flow, nbytes: int) -> None:
        """Charge tenants and the aged for bytes that are about to be granted to `flow`, one of the hungry."""
        nic.shares.grant(flow.demand.tenant, nbytes, self.limits.fair_s * nic.rate)
        oldest = order.oldest(hungry)
        share = self.limits.aged_share
        if oldest is None:
            nic.aged_due = 0.0
        elif oldest is flow:
            nic.aged_due = max(nic.aged_due - nbytes, 0.0)
        else:
            nic.aged_due += nbytes * share / (1 - share)

    def _grant_all(self, nic: Nic, hungry: list[Flow], now: float) -> list[FlowAction]:
        """Baselines: everything that is ready, at once."""
        picked = hungry
        if self.policy.one_per_peer:
            heads: dict[str, Flow] = {}
            for flow in nic.flows.values():
                if flow.remaining:
                    heads.setdefault(flow.demand.peer, flow)
            picked = [flow for flow in picked if heads[flow.demand.peer] is flow]
        for flow in picked:
            nic.grant(flow, flow.ready - flow.granted, now)
        return [self._credit(flow, now) for flow in picked]

    def _tell_late(self, flow: Flow) -> Late:
        flow.late_told = True
        demand = flow.demand
        return Late(demand.transfer, demand.peer, f"{flow.remaining} bytes cannot land before the deadline any more")

    def _credit(self, flow: Flow, now: float) -> Credit:
        nic = flow.nic
        assert nic is not None  # noqa: S101  # only admitted transfers have credit
        flow.sequence += 1
        flow.told_at = now
        return Credit(
            transfer=flow.demand.transfer,
            peer=flow.demand.peer,
            nic=nic.limits.name,
            epoch=flow.epoch,
            sequence=flow.sequence,
            data_bytes=flow.granted,
            freshness_s=self.limits.lease_s / 2,
            rank=flow.rank,
            remaining=flow.remaining,
            slack_s=self._order(nic, now).slack(flow),
        )
