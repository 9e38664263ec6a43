"""What regauge says about itself: the names of all metrics, log fields and spans, and how they are written.

Metrics live in a `Metrics` object with a registry of its own, so that several can be in one process. A
transfer's bytes and seconds are recorded by one call (`Metrics.transfer`), as are a request's latencies
(`Metrics.finished`): two figures of one event cannot drift apart.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from regauge.logs import WORKER as WORKER  # noqa: PLC0414  # re-exported, as are the next two
from regauge.logs import get_logger as get_logger  # noqa: PLC0414
from regauge.logs import setup_logging as setup_logging  # noqa: PLC0414
from regauge.observe_planes import LATEST, PlaneMetrics
from regauge.observe_route import RouteMetrics
from regauge.observe_transfers import MODES as MODES  # noqa: PLC0414
from regauge.observe_transfers import OTHER as OTHER  # noqa: PLC0414
from regauge.observe_transfers import PATHS as PATHS  # noqa: PLC0414
from regauge.observe_transfers import REASONS as REASONS  # noqa: PLC0414
from regauge.observe_transfers import TransferMetrics, known

# Log fields. `event` is the sentence; a request's fields are the same in every process that it passes.
REQUEST_ID: Final = "request_id"
TRANSFER_ID: Final = "transfer_id"
ROLE: Final = "role"
ROUTE: Final = "route"
STATUS: Final = "status"
PATH: Final = "path"
PLACED: Final = "placed"
ATTEMPTS: Final = "attempts"
MODE: Final = "mode"
WIRE_BYTES: Final = "wire_bytes"
PAGES: Final = "pages"
PROMPT_TOKENS: Final = "prompt_tokens"
COMPLETION_TOKENS: Final = "completion_tokens"
TTFT_S: Final = "ttft_s"
TPOT_S: Final = "tpot_s"
SECONDS: Final = "seconds"
ERROR: Final = "error"
TRACE_ID: Final = "trace_id"

# Spans of one request, in their order.
SPAN_REQUEST: Final = "request"
SPAN_PREFILL: Final = "prefill"
SPAN_TRANSFER: Final = "transfer"
SPAN_DECODE: Final = "decode"

SHARED: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of prometheus_client: a folder where every process keeps its metrics, mapped, so that those of a process that died still
count. Gauges are of processes that live: requests in the house are summed, and of a worker the latest word holds."""
OUTCOMES: Final = ("complete", "cancelled", "failed")
"""Of an answer: it is whole; its client went away; a worker or the gateway gave it up."""
NOTHING: Final[Mapping[str, float]] = MappingProxyType({})
NONE: Final[Mapping[str, int]] = MappingProxyType({})
CLIENT_FAULTS: Final = ("malformed", "head", "header", "body", "write", "connections")
"""No HTTP; too large a head; headers or a body that came too slowly; an answer that was not read; too many connections."""
ROUTES: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{id}",
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "/openapi.json",
    "/debug/transfers",
    "/debug/live",
    "/debug/requests",
    "/debug/trace/{id}",
    "/debug/why/{id}",
    "/dashboard",
    "/dashboard/{file}",
    "/v1/usage",
    "/v1/usage/{id}",
    "/v1/responses",
    "/internal/generate",
    "/internal/prefill",
    "/internal/workers",
    "/internal/workers/{name}",
    "/internal/requests/{request_id}",
)

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


@dataclass(frozen=True)
class Metrics:
    """All Prometheus metrics of one process, in base units; make one with `Metrics.create()`."""

    registry: CollectorRegistry
    trouble_since: set[str] | None
    """Workers whose totals were seen before; None: all that they say is counted, from their beginning."""
    counts_workers: bool
    requests: Counter
    client_faults: Counter
    in_flight: Gauge
    ttft: Histogram
    tpot: Histogram
    itl: Histogram
    latency: Histogram
    prompt_tokens: Counter
    bypassed: Counter
    retried: Counter
    resumed: Counter
    receipts: Counter
    receipts_refused: Counter
    receipts_troubled: Gauge
    completion_tokens: Counter
    answers: Counter
    spans_lost: Counter
    queue: Histogram
    transfers: TransferMetrics
    routing: RouteMetrics
    planes: PlaneMetrics
    worker_up: Gauge
    queue_depth: Gauge
    running: Gauge
    pool_pages: Gauge
    pool_free_pages: Gauge
    pool_quarantined_pages: Gauge

    @classmethod
    def create(cls, version: str, *, counts_workers: bool = True, resumed: bool = False) -> Metrics:
        """Return fresh metrics on a registry of their own.

        Of processes that share a folder (`SHARED`) one alone counts what workers say of themselves. `resumed`: a process before this one did, so
        that what each worker says first has been counted.
        """
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Gauge(
            "regauge_build_info",
            "1, labelled with the version.",
            ["version"],
            registry=registry,
            multiprocess_mode=LATEST,
        ).labels(version).set(1)
        worker = ["worker", "role"]
        return cls(
            registry=registry,
            trouble_since=set() if resumed else None,
            counts_workers=counts_workers,
            requests=Counter(
                "regauge_requests_total", "HTTP requests answered.", ["route", "status"], registry=registry
            ),
            client_faults=Counter(
                "regauge_client_faults_total",
                "Connections that were ended for what the client did, by what it was.",
                ["reason"],
                registry=registry,
            ),
            in_flight=Gauge(
                "regauge_requests_in_flight",
                "Generation requests in the house.",
                registry=registry,
                multiprocess_mode="livesum",
            ),
            ttft=Histogram(
                "regauge_time_to_first_token_seconds",
                "Arrival to first token.",
                registry=registry,
                buckets=_LATENCY,
            ),
            tpot=Histogram(
                "regauge_time_per_output_token_seconds",
                "Mean time between tokens after the first, per request.",
                registry=registry,
                buckets=_PER_TOKEN,
            ),
            itl=Histogram(
                "regauge_inter_token_seconds",
                "Each time from a token to the next, as they come to the gateway.",
                registry=registry,
                buckets=_PER_TOKEN,
            ),
            latency=Histogram(
                "regauge_request_duration_seconds",
                "Arrival to last token.",
                registry=registry,
                buckets=_LATENCY,
            ),
            prompt_tokens=Counter("regauge_prompt_tokens_total", "Prompt tokens.", registry=registry),
            bypassed=Counter(
                "regauge_prefill_bypassed_total",
                "Answers whose prompt the decode worker computed itself.",
                registry=registry,
            ),
            retried=Counter(
                "regauge_retries_total",
                "Answers that were begun again before their first token, since a worker had been lost or had failed.",
                registry=registry,
            ),
            resumed=Counter(
                "regauge_resumed_answers_total",
                "Answers that another decode worker went on with, since theirs had been lost.",
                registry=registry,
            ),
            receipts=Counter("regauge_receipts_total", "Receipts handed over to the store.", registry=registry),
            receipts_refused=Counter(
                "regauge_receipts_refused_total",
                "Receipts that were not taken: forged, malformed, or too many at once.",
                registry=registry,
            ),
            receipts_troubled=Gauge(
                "regauge_receipts_troubled",
                "Requests of the last days whose receipts differ, or of which one is missing for over a minute.",
                ["status"],
                registry=registry,
                multiprocess_mode=LATEST,
            ),
            completion_tokens=Counter("regauge_completion_tokens_total", "Generated tokens.", registry=registry),
            answers=Counter(
                "regauge_answers_total", "Answers that have ended, by how they did.", ["outcome"], registry=registry
            ),
            spans_lost=Counter(
                "regauge_spans_lost_total",
                "Spans that the OpenTelemetry collector has not taken, by the reason.",
                ["reason"],
                registry=registry,
            ),
            queue=Histogram(
                "regauge_queue_seconds",
                "Arrival at a worker until it had pages, and where it computed the prompt its turn.",
                ["role"],
                registry=registry,
                buckets=_LATENCY,
            ),
            transfers=TransferMetrics.create(registry),
            routing=RouteMetrics.create(registry),
            planes=PlaneMetrics.create(registry),
            worker_up=Gauge(
                "regauge_worker_up", "1 while the worker answers.", worker, registry=registry, multiprocess_mode=LATEST
            ),
            queue_depth=Gauge(
                "regauge_queue_depth",
                "Requests that wait in a worker.",
                worker,
                registry=registry,
                multiprocess_mode=LATEST,
            ),
            running=Gauge(
                "regauge_running_requests",
                "Requests that run in a worker.",
                worker,
                registry=registry,
                multiprocess_mode=LATEST,
            ),
            pool_pages=Gauge(
                "regauge_pool_pages", "Pages of the KV pool.", worker, registry=registry, multiprocess_mode=LATEST
            ),
            pool_free_pages=Gauge(
                "regauge_pool_free_pages",
                "Free pages of the KV pool.",
                worker,
                registry=registry,
                multiprocess_mode=LATEST,
            ),
            pool_quarantined_pages=Gauge(
                "regauge_pool_quarantined_pages",
                "Pages of failed transfers that a write may still reach.",
                worker,
                registry=registry,
                multiprocess_mode=LATEST,
            ),
        )

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP request; a route that is not in `ROUTES` is counted as "other"."""
        self.requests.labels(known(route, ROUTES), str(status)).inc()

    def client_fault(self, reason: str) -> None:
        """Count a connection that was ended for what the client did; `reason` is one of `CLIENT_FAULTS`."""
        self.client_faults.labels(known(reason, CLIENT_FAULTS)).inc()

    def finished(
        self,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        ttft_s: float | None,
        seconds: float,
    ) -> float | None:
        """Record tokens and latencies of a request that produced all its tokens; return its TPOT in seconds.

        TPOT is (latency - TTFT) / (tokens - 1): None, and not recorded, for fewer than two tokens.
        """
        self.prompt_tokens.inc(prompt_tokens)
        self.completion_tokens.inc(completion_tokens)
        self.latency.observe(seconds)
        if ttft_s is None:
            return None
        self.ttft.observe(ttft_s)
        if completion_tokens < 2:
            return None
        tpot = (seconds - ttft_s) / (completion_tokens - 1)
        self.tpot.observe(tpot)
        return tpot

    def ended(self, outcome: str) -> None:
        """Count an answer that has ended, as one of `OUTCOMES`."""
        self.answers.labels(known(outcome, OUTCOMES)).inc()

    def queued(self, role: str, seconds: float | None) -> None:
        """Record how long a request waited at a worker; None: it does not say."""
        if seconds is not None:
            self.queue.labels(role).observe(max(0.0, seconds))

    def transfer(
        self, *, path: str, mode: str, wire_bytes: int, seconds: float, spans: int = 0, stages: Mapping[str, float] = NOTHING
    ) -> None:  # fmt: skip
        """Record one delivered transfer."""
        self.transfers.ended(path=path, mode=mode, wire_bytes=wire_bytes, seconds=seconds, spans=spans, stages=stages)

    def worker_state(
        self, name: str, role: str, *, running: int, waiting: int, free_pages: int, pages: int, quarantined_pages: int
    ) -> None:
        """Record a worker's sign of life."""
        self.worker_up.labels(name, role).set(1)
        self.running.labels(name, role).set(running)
        self.queue_depth.labels(name, role).set(waiting)
        self.pool_free_pages.labels(name, role).set(free_pages)
        self.pool_pages.labels(name, role).set(pages)
        self.pool_quarantined_pages.labels(name, role).set(quarantined_pages)

    def worker_counted(self, name: str, role: str, grown: Mapping[str, int], failed: Mapping[str, int] = NONE) -> None:
        """Add what has become of a worker's transfers since the last time; `failed` is by reason, one of `REASONS`."""
        if not self.counts_workers:
            return
        if self.trouble_since is not None and name not in self.trouble_since:
            self.trouble_since.add(name)
            return
        self.transfers.count(name, role, grown, failed)

    def worker_down(self, name: str, role: str) -> None:
        """Record that a worker does not answer; its other gauges go to zero, since nobody knows them."""
        self.worker_state(name, role, running=0, waiting=0, free_pages=0, pages=0, quarantined_pages=0)
        self.worker_up.labels(name, role).set(0)
        self.planes.gone(name)

    def source(self) -> CollectorRegistry:
        """Return where a scrape is read from: this process, or all that share a folder (`SHARED`), if there is one."""
        if SHARED not in os.environ:
            return self.registry
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # the library's
        return registry

    def exposition(self) -> tuple[bytes, str]:
        """Return the text for a scrape and its content type."""
        return generate_latest(self.source()), CONTENT_TYPE_LATEST
