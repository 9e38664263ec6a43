"""What a simulated fleet is made of, and what comes out of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Literal, Protocol

from regauge.errors import ConfigError
from regauge.move.flow_types import CREDIT, Policy
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.log import LIMITED, REFUSED, Log

Level = Literal["fluid", "flow", "protocol"]


class Fabric(Protocol):
    """Ports between the NICs; `regauge.sim.topology` has some. Sender and receiver are numbers of workers."""

    def ports(self) -> Mapping[str, float]:
        """Return bytes per second of each port, NICs not among them."""

    def path(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:
        """Return the ports between two NICs, for a flow of that number."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the fleet is made of. Workers are `p0`, `p1`, ... and `d0`, ...; so are their NICs, or `p0.0`, `p0.1` where they have several."""

    prefills: int = 12
    decodes: int = 4
    prefill: PrefillModel = field(default_factory=lambda: PrefillModel(20_000.0))
    decode: DecodeModel = field(default_factory=DecodeModel)
    slow: Mapping[int, float] = field(default_factory=dict)
    """Prefill worker -> its speed over the others', from beginning to end, known to the router."""
    bytes_per_token: float = 188_416.0
    """KV on the wire: of Qwen3-235B in BF16, 94 layers x 4 KV heads x 128 x 2."""
    prefill_nic: float = 50e9
    decode_nic: float = 12.5e9
    """Bytes per second, of one NIC."""
    prefill_nics: int = 1
    decode_nics: int = 1
    """Of one worker. A transfer crosses one of each side."""
    fabric: Fabric | None = None
    """Between the NICs; None: nothing there is ever full, or as `racks` says."""
    racks: int = 1
    uplink: float = 0.0
    """Of each rack, each way, bytes per second; 0: as good as endless."""
    transfers: Level = "fluid"
    """How much of a transfer is real: see docs/simulator.md."""
    flow_policy: Policy = CREDIT
    """Of decode's flow control, for `flow` and `protocol`."""
    quantum_s: float = 0.01
    """For `flow`: seconds of a decode NIC's rate in one decision. Shorter is closer to the real thing, and dearer."""
    delay_s: float = 50e-6
    """For `flow` and `protocol`: of a message, one way."""
    lease_s: float = 2.0
    """A transfer over a port that is down fails after so long."""
    wait_s: float = 30.0
    """A request waits so long for a lost worker to come back."""
    report_s: float = 0.5
    """Between a worker's reports."""
    block: int = 512

    def __post_init__(self) -> None:
        for name in ("prefills", "decodes", "prefill_nics", "decode_nics", "racks", "block"):
            if getattr(self, name) < 1:
                raise ConfigError(f"cluster.{name}: must be 1 or more, not {getattr(self, name)}")
        for name in ("bytes_per_token", "prefill_nic", "decode_nic", "quantum_s", "lease_s", "report_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"cluster.{name}: must be more than 0 and finite, not {getattr(self, name)}")
        for name in ("uplink", "delay_s", "wait_s"):
            if not 0 <= getattr(self, name) < inf:
                raise ConfigError(f"cluster.{name}: must be 0 or more and finite, not {getattr(self, name)}")
        if self.fabric is not None and self.uplink:
            raise ConfigError("cluster: give `fabric` or `racks` and `uplink`, not both")
        for worker, speed in self.slow.items():
            if not 0 <= worker < self.prefills or not (isfinite(speed) and speed > 0):
                raise ConfigError(f"cluster.slow: worker {worker}, speed {speed}: workers are 0 to {self.prefills - 1}")

    def nics(self, worker: str) -> tuple[str, ...]:
        """Return the ports of a worker's NICs."""
        count = self.prefill_nics if worker.startswith("p") else self.decode_nics
        return (worker,) if count == 1 else tuple(f"{worker}.{i}" for i in range(count))

    def all_ports(self) -> dict[str, float]:
        """Return the bytes per second of every port."""
        ports = {port: self.prefill_nic for i in range(self.prefills) for port in self.nics(f"p{i}")}
        ports |= {port: self.decode_nic for i in range(self.decodes) for port in self.nics(f"d{i}")}
        if self.uplink:
            ports |= {f"{way}{rack}": self.uplink for way in ("up", "down") for rack in range(self.racks)}
        if self.fabric is not None:
            between = self.fabric.ports()
            if both := ports.keys() & between.keys():
                raise ConfigError(f"cluster.fabric: port {min(both)!r} has the name of a NIC")
            ports |= between
        return ports

    def between(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:
        """Return the ports that a transfer crosses between the NICs; with racks, workers are dealt to them in turn."""
        if self.fabric is not None:
            return self.fabric.path(sender, sender_nic, receiver, receiver_nic, flow)
        ours, theirs = sender % self.racks, receiver % self.racks
        return (f"up{ours}", f"down{theirs}") if self.uplink and ours != theirs else ()


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the router is told; all of it, unless a study leaves something out."""

    links: bool = True
    prefix: bool = True
    bookings: bool = True
    """Without: each booking is taken back at once, so that reports are all that it has."""


EVERYTHING = Knowledge()


@dataclass(frozen=True)
class Result:
    """What became of the requests, and what it took. SIMULATED."""

    log: Log
    seconds: float
    """Of the clock, from 0 to the last request's end."""
    busy: Mapping[str, float]
    """Seconds that each worker worked."""
    carried: Mapping[str, float]
    """Bytes that crossed each port."""
    ports: Mapping[str, float]
    """Bytes per second of each, without faults."""
    decisions: Mapping[str, int]
    """Of the router: placed, and refusals by reason; attempts, of requests that were served to warm up, too."""
    events: int
    """Of the clock."""

    @property
    def refused(self) -> int:
        """Requests that were not taken."""
        return int(((self.log.outcome == LIMITED) | (self.log.outcome == REFUSED)).sum())

    @property
    def hit(self) -> float:
        """Share of prompt tokens that were cached, of complete requests."""
        mask = self.log.complete
        return float(self.log.cached[mask].sum() / max(1, self.log.prompt[mask].sum()))

    @cached_property
    def prefill_busy(self) -> float:
        """Share of the time that prefill workers computed, mean of all."""
        shares = [busy / self.seconds for name, busy in self.busy.items() if name[0] == "p"]
        return sum(shares, 0.0) / max(1, len(shares))

    @cached_property
    def decode_nic_busy(self) -> float:
        """Share of what decode's NICs can carry that they carried, mean of all."""
        nics = [port for port in self.ports if port[0] == "d" and port[1:2].isdigit()]
        return sum(self.carried[port] / self.seconds / self.ports[port] for port in nics) / max(1, len(nics))

    def ttfts(self) -> list[float]:
        """Return the times to the first token."""
        return [float(each) for each in self.log.ttft()]

    def tpots(self) -> list[float]:
        """Return the times per output token of requests with more than one."""
        return [float(each) for each in self.log.tpot()]
