"""The receiver's books: what each transfer and each NIC has been granted and has landed. No decisions, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from regauge.config import FlowConfig
from regauge.move.flow_meter import FORGET_S, DelayMeter, RateMeter, Shares
from regauge.move.flow_types import Demand, LinkState, NicLimits, Rank

SLACK = 1.25
"""Window over line rate x delay."""
GAIN = 4.0
"""Window, and most credit of one sender, over *measured* rate x delay. A rate is measured under the window that it sets, so one
that is too small would shrink itself; with 4, delays may be 4 times the least one before that happens."""
SAMPLE_DELAYS = 4
"""Delays that a rate sample lasts at least."""


@dataclass(slots=True)
class Flow:
    """One transfer, waiting or admitted. Byte counts are cumulative from its start."""

    demand: Demand
    arrived: float
    total: int
    ready: int = 0
    granted: int = 0
    landed: int = 0
    peak: int = 0
    """Most that was ever granted, in whatever epoch: more can never land."""
    epoch: int = 0
    sequence: int = 0
    nic: Nic | None = None
    unscheduled: bool = False
    """Its outstanding bytes are charged to the unscheduled budget."""
    stalled: bool = False
    silent: bool = False
    late_told: bool = False
    alive_at: float = 0.0
    progress_at: float = 0.0
    hungry_since: float = 0.0
    """Since when bytes have been ready, without a break, that it has no credit for."""
    rank: Rank = Rank.NORMAL
    """As what it got its last credit."""
    told_at: float = 0.0
    probe_at: float | None = None
    """When credit was sent onto an idle NIC: its first landing measures the delay."""

    @property
    def outstanding(self) -> int:
        """Bytes granted and not landed."""
        return self.granted - self.landed

    @property
    def remaining(self) -> int:
        """Bytes not landed."""
        return self.total - self.landed

    @property
    def hungry(self) -> bool:
        """More is ready than granted, and its sender lives."""
        return self.ready > self.granted and not self.silent and not (self.unscheduled and self.outstanding > 0)


@dataclass(slots=True)
class PeerLink:
    """One sender, as seen from one receiver NIC."""

    meter: RateMeter
    flows: int = 0
    outstanding: int = 0
    idle_since: float = 0.0


class Nic:
    """One receiver NIC's accounts."""

    def __init__(self, limits: NicLimits, flow_limits: FlowConfig) -> None:
        self.limits = limits
        self._flow = flow_limits
        self._period = SAMPLE_DELAYS * limits.rtt_s
        self.meter = RateMeter(limits.bytes_per_s, self._period)
        self.delay = DelayMeter(limits.rtt_s)
        self.shares = Shares(flow_limits.shares)
        self.flows: dict[str, Flow] = {}
        self.peers: dict[str, PeerLink] = {}
        self.outstanding = 0
        """Scheduled bytes."""
        self.unscheduled = 0
        self.stalled = 0
        """Of the scheduled bytes."""
        self.backlog = 0
        self._live: set[str] = set()
        """Senders with a transfer."""
        self._owing = 0
        """Senders with scheduled bytes outstanding."""
        self.aged_due = 0.0
        """Bytes that aged transfers have coming, of what others got."""
        self.reach = limits.rtt_s
        """Seconds of traffic that the window covers: the measured delay, no less than half of the configured one."""
        self.quantum = 0
        """Bytes per decision: an eighth of what is under way at least, so that decisions stay cheap on fast links."""
        self.window = 0
        """Most scheduled bytes that may be outstanding and moving."""
        self._resize()

    @property
    def rate(self) -> float:
        """Measured bytes per second. One sender alone cannot be told from the NIC: then it is the slower of both."""
        if len(self._live) == 1:
            [peer] = self._live
            return min(self.meter.rate, self.peers[peer].meter.rate)
        return self.meter.rate

    @property
    def backlog_s(self) -> float:
        """Seconds until all that is admitted would have landed."""
        return self.backlog / self.rate

    def room(self) -> int:
        """Scheduled bytes that may be granted now."""
        moving = self.window - (self.outstanding - self.stalled)
        return min(moving, int(self.window * self._flow.overcommit) - self.outstanding)

    def peer_room(self, peer: str) -> int:
        """Scheduled bytes that one sender may be granted now."""
        link = self.peers[peer]
        cap = int(GAIN * link.meter.rate * self.reach) + 2 * self.quantum
        return min(cap, self.window) - link.outstanding

    def place(self, flow: Flow, now: float) -> None:
        """A transfer comes over this NIC."""
        flow.nic = self
        peer = flow.demand.peer
        if peer not in self.peers:
            self.peers[peer] = PeerLink(RateMeter(self.limits.bytes_per_s, self._period), idle_since=now)
        self.peers[peer].flows += 1
        self._live.add(peer)
        self.flows[flow.demand.transfer] = flow
        self.backlog += flow.remaining
        self._resize()

    def grant(self, flow: Flow, nbytes: int, now: float) -> None:
        """Charge bytes to the transfer's account."""
        if self.outstanding + self.unscheduled == 0 and flow.probe_at is None:
            flow.probe_at = now
        if flow.outstanding == 0:
            flow.progress_at = now
        flow.granted += nbytes
        flow.peak = max(flow.peak, flow.granted)
        self._charge(flow, nbytes, now)

    def land(self, flow: Flow, total: int, now: float) -> None:
        """Bytes up to `total` have come."""
        if flow.probe_at is not None:
            self.delay.sample(now - flow.probe_at)
            flow.probe_at = None
        if total > flow.granted:
            # Written off before, and here after all.
            self._charge(flow, total - flow.granted, now)
            flow.granted = total
        if flow.stalled:
            flow.stalled = False
            self.stalled -= flow.outstanding
        nbytes = total - flow.landed
        self.meter.landed(nbytes, now)
        self.peers[flow.demand.peer].meter.landed(nbytes, now)
        self._resize()
        flow.landed = total
        flow.progress_at = now
        self.backlog -= nbytes
        self._charge(flow, -nbytes, now)
        if flow.outstanding == 0:
            flow.unscheduled = False

    def grow(self, flow: Flow, total: int) -> None:
        """The transfer has more bytes than announced."""
        self.backlog += total - flow.total
        flow.total = total

    def stall(self, flow: Flow) -> None:
        """The transfer's credit stands still: it makes room for others."""
        if not flow.stalled and not flow.unscheduled:
            flow.stalled = True
            self.stalled += flow.outstanding

    def write_off(self, flow: Flow, now: float) -> None:
        """Take back what has not landed; a new epoch begins."""
        if flow.stalled:
            flow.stalled = False
            self.stalled -= flow.outstanding
        taken = flow.outstanding
        flow.granted = flow.landed
        flow.epoch += 1
        flow.probe_at = None
        self._charge(flow, -taken, now)
        flow.unscheduled = False

    def remove(self, flow: Flow, now: float) -> None:
        """The transfer is over."""
        self.write_off(flow, now)
        self.backlog -= flow.remaining
        del self.flows[flow.demand.transfer]
        link = self.peers[flow.demand.peer]
        link.flows -= 1
        if not link.flows:
            self._live.discard(flow.demand.peer)
            self._resize()

    def forget_peers(self, now: float) -> None:
        """Drop senders that have had no transfer for a while."""
        for name in [n for n, p in self.peers.items() if not p.flows and now - p.idle_since > FORGET_S]:
            del self.peers[name]

    def state(self) -> LinkState:
        """Return the published view."""
        queued = sum(max(flow.ready - flow.granted, 0) for flow in self.flows.values())
        return LinkState(
            nic=self.limits.name,
            transfers=len(self.flows),
            granted_bytes=self.outstanding + self.unscheduled,
            unscheduled_bytes=self.unscheduled,
            stalled_bytes=self.stalled,
            queued_bytes=queued,
            backlog_bytes=self.backlog,
            window_bytes=self.window,
            bytes_per_s=self.rate,
            rtt_s=self.delay.delay,
            backlog_s=self.backlog_s,
            line_bytes_per_s=self.limits.bytes_per_s,
        )

    def _resize(self) -> None:
        """The measured rate or delay has changed."""
        limits = self.limits
        if limits.window_bytes is not None:
            self.window = limits.window_bytes
            self.quantum = max(1, min(self._flow.quantum_bytes, self.window // 2))
            return
        self.reach = max(self.delay.delay, limits.rtt_s / 2)
        self.quantum = max(self._flow.quantum_bytes, int(self.rate * self.reach / 8))
        self.window = int(self.reach * min(SLACK * limits.bytes_per_s, GAIN * self.rate)) + 2 * self.quantum

    def _charge(self, flow: Flow, nbytes: int, now: float) -> None:
        link = self.peers[flow.demand.peer]
        if flow.unscheduled:
            self.unscheduled += nbytes
        else:
            self.outstanding += nbytes
            self._owing -= link.outstanding > 0
            link.outstanding += nbytes
            self._owing += link.outstanding > 0
            if flow.stalled:
                self.stalled += nbytes
        if link.outstanding > 0:
            link.meter.busy(now)
        else:
            link.meter.idle(now)
            link.idle_since = now
        # Less than half a window, or one sender: it may be the senders who set the pace, not this NIC.
        if 2 * self.outstanding >= self.window and self._owing > 1:
            self.meter.busy(now)
        else:
            self.meter.idle(now)
