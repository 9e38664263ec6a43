"""What lies between the NICs: the ports that a flow crosses, and the switch ports that a network takes.

Senders and receivers are numbered from 0, and so are the NICs of each. The NICs' own ports are not among those here: a flow crosses them first and last.
Cables carry the same rate each way, and a port here is one way of one cable. Where several cables lead on, a hash of the flow's number
picks one (ECMP), so that two flows may meet on one cable while another is idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from regauge.errors import ConfigError

MASK = (1 << 64) - 1
MOST = 1_000_000
"""Of anything that is counted here; more is a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Servers on both sides and the NICs of each."""

    senders: int
    receivers: int
    sender_nics: int = 1
    receiver_nics: int = 1

    def __post_init__(self) -> None:
        for name in ("senders", "receivers", "sender_nics", "receiver_nics"):
            _count(name, getattr(self, name))

    @property
    def nics(self) -> int:
        """All NICs of both sides."""
        return self.senders * self.sender_nics + self.receivers * self.receiver_nics

    def check(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int) -> None:
        """Refuse servers and NICs that are not there."""
        for name, number, there in (
            ("sender", sender, self.senders), ("sender's NIC", sender_nic, self.sender_nics),
            ("receiver", receiver, self.receivers), ("receiver's NIC", receiver_nic, self.receiver_nics),
        ):  # fmt: skip
            if not 0 <= number < there:
                raise ConfigError(f"topology: {name} {number} is not there; there are {there}, counted from 0")

    def place(self, sender: int | None, receiver: int | None, nic: int) -> int:
        """Return the number of a NIC among all: senders' first, server by server."""
        if sender is not None:
            return sender * self.sender_nics + nic
        return self.senders * self.sender_nics + (receiver or 0) * self.receiver_nics + nic


@dataclass(frozen=True, slots=True)
class Use:
    """What a network takes: switches, their ports with a cable in (NICs' and, both ends, those between switches), and all their ports."""

    switches: int
    used: int
    ports: int


class Topology(Protocol):
    """What all of them have."""

    def ports(self) -> dict[str, float]:
        """Return the bytes per second of each port between the NICs."""

    def path(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:
        """Return the ports that a flow of that number crosses between two NICs, in order.

        Raises:
            ConfigError: A server or NIC is not there, or nothing leads from one NIC to the other.
        """

    def use(self) -> Use:
        """Return what it takes."""


@dataclass(frozen=True, slots=True)
class Single:
    """One switch that never is the bottleneck."""

    ends: Ends
    switch_ports: int = 128

    def __post_init__(self) -> None:
        _count("switch_ports", self.switch_ports)
        _fits("one switch", self.ends.nics, self.switch_ports, "NICs")

    def ports(self) -> dict[str, float]:
        """Return none."""
        return {}

    def path(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:  # noqa: ARG002  # no choice
        """Return none: see `Topology`."""
        self.ends.check(sender, sender_nic, receiver, receiver_nic)
        return ()

    def use(self) -> Use:
        """Return one switch, and a port for each NIC."""
        return Use(1, self.ends.nics, self.switch_ports)


@dataclass(frozen=True, slots=True)
class Racks:
    """A switch for each rack, and one spine that joins them by `uplinks` cables each; servers are dealt to the racks in turn."""

    ends: Ends
    racks: int
    uplinks: int
    rate: float
    """Of an uplink, bytes per second."""
    switch_ports: int = 128

    def __post_init__(self) -> None:
        for name in ("racks", "uplinks", "switch_ports"):
            _count(name, getattr(self, name))
        _rate(self.rate)
        _fits("a rack's switch", self._most + self.uplinks, self.switch_ports, "NICs and uplinks")
        _fits("the spine", self.racks * self.uplinks, self.switch_ports, "uplinks")

    @property
    def _most(self) -> int:
        ends = self.ends
        return -(-ends.senders // self.racks) * ends.sender_nics + -(-ends.receivers // self.racks) * ends.receiver_nics

    def oversubscription(self, nic_rate: float) -> float:
        """Return the rate of the fullest rack's NICs, at `nic_rate` bytes per second each, over that of its uplinks."""
        return self._most * nic_rate / (self.uplinks * self.rate)

    def ports(self) -> dict[str, float]:
        """Return both ways of each uplink."""
        return {
            f"rack{rack}.{way}{cable}": self.rate
            for rack in range(self.racks)
            for way in ("up", "down")
            for cable in range(self.uplinks)
        }

    def path(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:
        """Return an uplink of each rack, or none within a rack: see `Topology`."""
        self.ends.check(sender, sender_nic, receiver, receiver_nic)
        ours, theirs = sender % self.racks, receiver % self.racks
        if ours == theirs:
            return ()
        up, down = _pick(flow, 0, self.uplinks), _pick(flow, 1, self.uplinks)
        return f"rack{ours}.up{up}", f"rack{theirs}.down{down}"

    def use(self) -> Use:
        """Return a switch for each rack and the spine."""
        return Use(self.racks + 1, self.ends.nics + 2 * self.racks * self.uplinks, (self.racks + 1) * self.switch_ports)


@dataclass(frozen=True, slots=True)
class FatTree:
    """Three tiers of k-port switches: k pods of k/2 edge and k/2 aggregation switches, and (k/2)^2 cores; room for k^3/4 NICs.

    Al-Fares, Loukissas and Vahdat, A Scalable, Commodity Data Center Network Architecture (SIGCOMM 2008). NICs fill the edge switches in order,
    senders' first.
    """

    ends: Ends
    k: int
    rate: float
    """Of a cable between switches, bytes per second."""

    def __post_init__(self) -> None:
        _count("k", self.k)
        if self.k % 2:
            raise ConfigError(f"topology: k is {self.k}; a fat tree's switches have an even number of ports")
        _rate(self.rate)
        room = self.k**3 // 4
        if self.ends.nics > room:
            k = next(k for k in range(self.k, 4 * self.k + 2 * self.ends.nics, 2) if k**3 // 4 >= self.ends.nics)
            raise ConfigError(
                f"topology: {self.ends.nics} NICs, but a fat tree of {self.k}-port switches has room for {room}; k = {k} has room"
            )

    def ports(self) -> dict[str, float]:
        """Return both ways of each cable: pod, edge or core switch, aggregation switch."""
        half = self.k // 2
        names = []
        for pod in range(self.k):
            for aggregation in range(half):
                for edge in range(half):
                    names += [f"pod{pod}.edge{edge}.up{aggregation}", f"pod{pod}.edge{edge}.down{aggregation}"]
                for core in range(half):
                    names += [f"pod{pod}.agg{aggregation}.up{core}", f"pod{pod}.agg{aggregation}.down{core}"]
        return dict.fromkeys(names, self.rate)

    def path(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:
        """Return none below one edge switch, two ports within a pod, else four: see `Topology`."""
        ends, half = self.ends, self.k // 2
        ends.check(sender, sender_nic, receiver, receiver_nic)
        pod, edge = divmod(ends.place(sender, None, sender_nic) // half, half)
        to_pod, to_edge = divmod(ends.place(None, receiver, receiver_nic) // half, half)
        if (pod, edge) == (to_pod, to_edge):
            return ()
        aggregation, core = _pick(flow, 0, half), _pick(flow, 1, half)
        up, down = f"pod{pod}.edge{edge}.up{aggregation}", f"pod{to_pod}.edge{to_edge}.down{aggregation}"
        if pod == to_pod:
            return up, down
        return up, f"pod{pod}.agg{aggregation}.up{core}", f"pod{to_pod}.agg{aggregation}.down{core}", down

    def use(self) -> Use:
        """Return the whole tree's switches, and its cables."""
        switches, cables = 5 * self.k**2 // 4, self.k**3 // 2
        return Use(switches, self.ends.nics + 2 * cables, switches * self.k)


@dataclass(frozen=True, slots=True)
class Rails:
    """NIC i of every server on leaf i; the leaves are joined by `uplinks` cables each to one spine, or, with 0, not at all."""

    ends: Ends
    uplinks: int = 0
    rate: float = 0.0
    """Of an uplink, bytes per second."""
    switch_ports: int = 128

    def __post_init__(self) -> None:
        _count("switch_ports", self.switch_ports)
        if self.uplinks:
            _count("uplinks", self.uplinks)
            _rate(self.rate)
        _fits("a leaf", self.ends.senders + self.ends.receivers + self.uplinks, self.switch_ports, "NICs and uplinks")
        _fits("the spine", self.rails * self.uplinks, self.switch_ports, "uplinks")

    @property
    def rails(self) -> int:
        """Leaves: as many as a server has NICs."""
        return max(self.ends.sender_nics, self.ends.receiver_nics)

    def ports(self) -> dict[str, float]:
        """Return both ways of each uplink."""
        return {
            f"rail{rail}.{way}{cable}": self.rate
            for rail in range(self.rails)
            for way in ("up", "down")
            for cable in range(self.uplinks)
        }

    def path(self, sender: int, sender_nic: int, receiver: int, receiver_nic: int, flow: int) -> tuple[str, ...]:
        """Return none along a rail, else an uplink of each leaf: see `Topology`."""
        self.ends.check(sender, sender_nic, receiver, receiver_nic)
        if sender_nic == receiver_nic:
            return ()
        if not self.uplinks:
            raise ConfigError(
                f"topology: nothing leads from rail {sender_nic} to rail {receiver_nic}; give the leaves uplinks, or send on one rail"
            )
        up, down = _pick(flow, 0, self.uplinks), _pick(flow, 1, self.uplinks)
        return f"rail{sender_nic}.up{up}", f"rail{receiver_nic}.down{down}"

    def use(self) -> Use:
        """Return a leaf for each rail and, with uplinks, the spine."""
        switches = self.rails + bool(self.uplinks)
        return Use(switches, self.ends.nics + 2 * self.rails * self.uplinks, switches * self.switch_ports)


def _pick(flow: int, stage: int, count: int) -> int:
    """Return one of `count` by a hash of the flow's number; another hash at each stage (the finaliser of splitmix64)."""
    word = (flow * 2 + stage + 1) * 0x9E3779B97F4A7C15 & MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return (word ^ word >> 31) % count


def _count(name: str, value: int) -> None:
    if not 1 <= value <= MOST:
        raise ConfigError(f"topology: {name} is {value}; give 1 to {MOST}")


def _rate(value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise ConfigError(f"topology: rate is {value} bytes/s; give a finite one above 0")


def _fits(what: str, needed: int, there: int, of: str) -> None:
    if needed > there:
        raise ConfigError(
            f"topology: {what} would need {needed} ports for {of} and has {there}; take a larger switch (switch_ports), fewer cables, or a fat tree"
        )
