"""Metrics of transfers: of each that was delivered, from one event; and of all that workers count, by what it has grown from one answer to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

PATHS: Final = ("DIRECT", "REMAP", "CONVERT")
MODES: Final = ("fused", "mapped", "staged")
OTHER: Final = "other"
"""The label for a value outside the known ones: what a client sends cannot make a new time series."""
STAGES: Final = (
    "expect_to_offer",
    "offer_to_grant",
    "grant_to_first_byte",
    "first_byte_to_last",
    "last_byte_to_commit",
)
"""Of a transfer, in their order (`move.protocol.Stages`); the last three together are its seconds."""
REASONS: Final = (
    "aborted", "corrupted", "deadline", "fault", "flow", "lease", "link", "mismatch", "peer", "refused", "restarted", OTHER,
)  # fmt: skip
"""Why a transfer failed: `regauge.move.reasons` sorts, `docs/operations.md` explains."""
_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 120.0,
)  # fmt: skip
_BYTES = tuple(float(4**power << 10) for power in range(13))  # 1 KiB to 16 GiB
_SPANS = tuple(float(4**power) for power in range(11))  # to a million


def known(value: str, values: tuple[str, ...]) -> str:
    """Return a label: OTHER for what is none of the known values."""
    return value if value in values else OTHER


@dataclass(frozen=True)
class TransferMetrics:
    """See docs/metrics.md."""

    nbytes: Histogram
    seconds: Histogram
    stages: Histogram
    spans: Histogram
    exposed: Histogram
    delivered: Counter
    chunks: Counter
    failures: Counter
    resent: Counter
    resumed: Counter
    grants: Counter
    credits: Counter
    credit_bytes: Counter
    landed: Counter
    observed: Counter

    @classmethod
    def create(cls, registry: CollectorRegistry) -> TransferMetrics:
        """Return them on a registry."""
        way = ["path", "mode"]

        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"regauge_transfer_{name}", text, labels, registry=registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"regauge_{name}_total", text, ["worker", "role", *labels], registry=registry)

        return cls(
            nbytes=histogram("bytes", "Bytes on the wire, per transfer.", way, _BYTES),
            seconds=histogram("seconds", "Grant to commit, per transfer: layer-wise, so prefill computes meanwhile.", way),
            stages=histogram("stage_seconds", "How long a transfer was in each stage, by decode's clock.", ["path", "stage"]),
            spans=histogram("spans", "Boxes in which a transfer's bytes lie on decode.", way, _SPANS),
            exposed=histogram("exposed_seconds", "What of a transfer came after its prompt was computed, per transfer.", []),
            delivered=counter("transfers", "Transfers that were delivered, as each side counts them."),
            chunks=counter("transfer_chunks", "Chunks whose digest was compared on arrival and agreed."),
            failures=counter("transfer_failures", "Transfers that failed, as each side counts them, by class of reason.", "reason"),
            resent=counter("transfer_resent_chunks", "Chunks written twice, since they were not what was sent."),
            resumed=counter("transfer_resumed_legs", "Legs of transfers that went on over a new link."),
            grants=counter("transfer_grants", "Grants of pages to a prefill rank."),
            credits=counter("transfer_credits", "Words of credit to a prefill rank."),
            credit_bytes=counter("transfer_credit_bytes", "Bytes that credit let prefill ranks write, without padding."),
            landed=counter("kv_landed_bytes", "Bytes of chunks as they landed on decode, whatever became of their transfers.", "path"),
            observed=counter("worker_observed_seconds", "Seconds, by the worker's clock, in which its landed bytes have grown."),
        )  # fmt: skip

    def ended(
        self, *, path: str, mode: str, wire_bytes: int, seconds: float, spans: int, stages: Mapping[str, float]
    ) -> None:
        """Record one that was delivered. No spans, and stages that are not there, are not known."""
        path = known(path, PATHS)
        way = (path, known(mode, MODES))
        self.nbytes.labels(*way).observe(wire_bytes)
        self.seconds.labels(*way).observe(seconds)
        if spans:
            self.spans.labels(*way).observe(spans)
        for stage, length in stages.items():
            self.stages.labels(path, known(stage, STAGES)).observe(length)

    def count(self, worker: str, role: str, grown: Mapping[str, int], failed: Mapping[str, int]) -> None:
        """Add what a worker's totals (fields of `move.state.Totals`) have grown by."""
        for reason, count in failed.items():
            self.failures.labels(worker, role, known(reason, REASONS)).inc(count)
        for name, counter in (
            ("delivered", self.delivered), ("chunks", self.chunks), ("resent", self.resent), ("resumed", self.resumed),
            ("grants", self.grants), ("credits", self.credits), ("credit_bytes", self.credit_bytes),
        ):  # fmt: skip
            counter.labels(worker, role).inc(grown.get(name, 0))

    def flowed(self, worker: str, role: str, landed: Mapping[str, int], seconds: float) -> None:
        """Add the bytes that have landed and the seconds in which they did: of one pair of a worker's answers, so that their quotient is a rate."""
        for path, count in landed.items():
            self.landed.labels(worker, role, known(path, PATHS)).inc(count)
        self.observed.labels(worker, role).inc(seconds)
