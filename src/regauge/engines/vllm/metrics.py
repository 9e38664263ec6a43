"""What a worker's transfers came to, as vLLM logs it and shows it to Prometheus (`v1/metrics.py` of its connectors, 0.32)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from regauge.config import Role
from regauge.engines.ended import Ended
from regauge.observe import OTHER

DELIVERED: Final = "delivered"
"""Of each transfer: role, path, mode, wire bytes, seconds."""
FAILED: Final = "failed"
"""Of each transfer: role, class of its reason, one of `observe.REASONS`."""
_BYTES = [float(4**power << 10) for power in range(13)]  # 1 KiB to 16 GiB
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0]


@dataclass
class Stats(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types here
    """Transfers that ended since the last step; plain data, since it goes from a worker's process to the front end's."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forget what was added."""
        self.data: dict[str, list[list[Any]]] = {DELIVERED: [], FAILED: []}

    def add(self, role: Role, ended: Ended) -> None:
        """Count one transfer."""
        if ended.error:
            self.data[FAILED].append([role, ended.reason or OTHER])
        else:
            self.data[DELIVERED].append([role, ended.path, ended.mode, ended.wire_bytes, ended.seconds])

    def is_empty(self) -> bool:
        """Whether nothing has ended."""
        return not any(self.data.values())

    def aggregate(self, other: Stats) -> Stats:
        """Add what another rank, or a later step, has counted."""
        for key, more in other.data.items():
            self.data[key].extend(more)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return figures for a line of the log."""
        delivered = self.data[DELIVERED]
        seconds = sorted(each[4] for each in delivered)
        out: dict[str, int | float] = {"transfers": len(delivered), "failed": len(self.data[FAILED])}
        if seconds:
            out |= {
                "MiB": round(sum(each[3] for each in delivered) / 2**20, 3),
                "median ms": round(1e3 * seconds[len(seconds) // 2], 3),
                "longest ms": round(1e3 * seconds[-1], 3),
            }
        return out


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:regauge_transfer_bytes`, `_seconds` (by role, path and mode) and `vllm:regauge_transfer_failures` (by role and reason)."""

    def __init__(
        self, vllm_config: Any, metric_types: Mapping[Any, Any], labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:  # fmt: skip
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        histogram, counter = metric_types[Histogram], metric_types[Counter]
        ways = [*labelnames, "role", "path", "mode"]
        self._nbytes = histogram(
            name="vllm:regauge_transfer_bytes", documentation="Bytes on the wire of one delivered transfer.",
            buckets=_BYTES, labelnames=ways,
        )  # fmt: skip
        self._seconds = histogram(
            name="vllm:regauge_transfer_seconds", documentation="Seconds of one delivered transfer, grant to commit.",
            buckets=_SECONDS, labelnames=ways,
        )  # fmt: skip
        self._failures = counter(
            name="vllm:regauge_transfer_failures", documentation="Transfers that failed.",
            labelnames=[*labelnames, "role", "reason"],
        )  # fmt: skip

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what ended in one step of an engine."""
        engine = self.per_engine_labelvalues[engine_idx]
        for role, path, mode, nbytes, seconds in transfer_stats_data[DELIVERED]:
            self._nbytes.labels(*engine, role, path, mode).observe(nbytes)
            self._seconds.labels(*engine, role, path, mode).observe(seconds)
        for role, reason in transfer_stats_data[FAILED]:
            self._failures.labels(*engine, role, reason).inc()
