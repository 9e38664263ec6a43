"""Metrics of the three planes: what each interface has carried, and KV that took another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from regauge.plane_meter import InterfaceBytes
from regauge.rates import Sample, grown

LATEST: Final = "livemostrecent"


@dataclass(frozen=True)
class PlaneMetrics:
    """What hosts tell of their interfaces."""

    nbytes: Counter
    seconds: Counter
    speed: Gauge
    off_plane: Gauge
    told: dict[tuple[str, str, str], Sample] = field(default_factory=dict)
    """Of each host, interface and direction, the counter as it was last told."""
    tellers: dict[str, str] = field(default_factory=dict)
    """Of each host, the worker that is listened to."""

    @classmethod
    def create(cls, registry: CollectorRegistry) -> PlaneMetrics:
        """Return them on a registry."""
        return cls(
            nbytes=Counter(
                "regauge_plane_bytes_total",
                "Bytes that an interface of a plane has carried since it was first heard of.",
                ["host", "plane", "interface", "direction"],
                registry=registry,
            ),
            seconds=Counter(
                "regauge_plane_observed_seconds_total",
                "Seconds, by the host's clock, in which an interface of a plane has carried its bytes.",
                ["host", "plane", "interface"],
                registry=registry,
            ),
            speed=Gauge(
                "regauge_plane_speed_bytes_per_second",
                "Line rate of an interface of a plane.",
                ["host", "plane", "interface"],
                registry=registry,
                multiprocess_mode=LATEST,
            ),
            off_plane=Gauge(
                "regauge_off_plane_bytes",
                "Bytes of KV that the compute plane's interfaces cannot have carried, since the worker began: at least so many.",
                ["worker", "role"],
                registry=registry,
                multiprocess_mode=LATEST,
            ),
        )

    def host(self, name: str, worker: str, interfaces: Sequence[InterfaceBytes], clock_s: float) -> None:
        """Take what a worker says of its host's counters, and when by its clock. Of several on one host the first to say it is listened to: their answers
        overtake each other. Bytes and seconds are of one pair of answers, so that their quotient is a rate."""
        if self.tellers.setdefault(name, worker) != worker:
            return
        for each in interfaces:
            if each.bytes_per_s:
                self.speed.labels(name, each.plane, each.interface).set(each.bytes_per_s)
            seconds = 0.0
            for direction, total in (("received", each.received), ("sent", each.sent)):
                key, after = (name, each.interface, direction), Sample(total, clock_s)
                before = self.told.get(key)
                if before is not None and clock_s <= before.at:
                    continue  # a late word, or of no other moment
                self.told[key] = after
                counter = self.nbytes.labels(name, each.plane, each.interface, direction)
                if before is not None:
                    counter.inc(grown(before, after))
                    seconds = clock_s - before.at
            self.seconds.labels(name, each.plane, each.interface).inc(seconds)

    def gone(self, worker: str) -> None:
        """A worker does not answer: another of its host is listened to from then on, and what came between is lost."""
        for host in [host for host, teller in self.tellers.items() if teller == worker]:
            del self.tellers[host]
            for key in [key for key in self.told if key[0] == host]:
                del self.told[key]
