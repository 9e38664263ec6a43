"""Sends the spans of requests that have ended to an OpenTelemetry collector: OTLP over HTTP. Needs the extra `otlp`.

Spans are made of a request's story, as `GET /debug/trace/{id}` has it, and handed to the SDK's batch processor, whose thread sends them. It may wait for a
collector, the event loop never does. What may wait is counted here, by whole requests: the SDK would drop the oldest spans of its queue, and tell nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Final

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from regauge import observe
from regauge.observe import Metrics, get_logger
from regauge.serve.recent import Span, Story, Try
from regauge.serve.tracecontext import Context

MOST_WAITING: Final = 8_192
"""Spans that may wait for the collector, some hundred bytes each; with more, a request's are lost whole."""
BATCH: Final = 512
EVERY_S: Final = 1.0
SEND_S: Final = 5.0
"""Most seconds for one batch, the SDK's retries included."""
CLOSE_S: Final = 3.0
"""Most seconds that the gateway's end waits for what is left."""
OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "/v1/chat/completions": "chat",
        "/v1/messages": "chat",
        "/v1/responses": "chat",
        "/v1/completions": "text_completion",
    }
)
"""`gen_ai.operation.name` by route."""
_PREFILL: Final = frozenset(("waits for its turn", "computes the prompt", "KV not yet across"))
_OWN: Final[Mapping[str, str]] = MappingProxyType(
    {"decodes": observe.SPAN_DECODE, "waits for pages": "waits for pages"}
)
_UNSET: Final = Status(StatusCode.UNSET)
Attributes = dict[str, str | int | float]


class Made(msgspec.Struct, frozen=True):
    """A span before the SDK has it; times in seconds since the request came."""

    name: str
    context: Context
    begin_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    kind: SpanKind = SpanKind.INTERNAL
    first_token_s: float | None = None


class Otlp:
    """The spans of one gateway process; `ended` is for its event loop alone."""

    def __init__(self, url: str, metrics: Metrics, *, model: str, instance: str, version: str) -> None:
        """`url`: where spans are posted. `instance`: which gateway process this is."""
        self._model = model
        self._lost = metrics.spans_lost
        self._sender = _Counted(OTLPSpanExporter(endpoint=url, timeout=SEND_S), metrics)
        self._batches = BatchSpanProcessor(
            self._sender, max_queue_size=MOST_WAITING + BATCH, schedule_delay_millis=1e3 * EVERY_S, max_export_batch_size=BATCH
        )  # fmt: skip
        named = {"service.name": "regauge", "service.version": version, "service.instance.id": instance}
        self._resource = Resource.create(named)
        self._scope = InstrumentationScope("regauge", version)
        self._given = 0

    def ended(self, story: Story, *, route: str, status: int, tenant: str) -> None:
        """Take a request that has ended; never waits."""
        if story.context is None or not story.context.recorded:
            return
        about: Attributes = {"http.request.method": "POST", "http.route": route, "http.response.status_code": status}
        if tenant:
            about["regauge.tenant"] = tenant
        if route in OPERATIONS:
            about["gen_ai.operation.name"] = OPERATIONS[route]
        spans = list(made(story, story.context, {**about, "gen_ai.request.model": self._model}))
        if self._given - self._sender.taken + len(spans) > MOST_WAITING:
            self._lost.labels("queue_full").inc(len(spans))
            return
        self._given += len(spans)
        base = round(story.unix_s * 1e9)
        for span in spans:
            self._hand_over(span, base)

    def close(self) -> None:
        """Send what is left, within CLOSE_S; the rest is lost, and counted. Blocks."""
        ending = threading.Thread(target=self._batches.shutdown, daemon=True)  # waits for up to 30 s, by itself
        ending.start()
        ending.join(CLOSE_S)
        if ending.is_alive():
            self._sender.shutdown()
        self._sender.give_up(self._given)

    def _hand_over(self, made: Made, base: int) -> None:
        """Give the SDK an ended span. Its tracer would make the same in ten times the time, and want to be told of the ids by a generator of them."""
        context = made.context
        state = TraceState.from_header([context.state]) if context.state else None
        trace_id, flags = int(context.trace_id, 16), TraceFlags(context.flags)
        parent = None
        if context.parent:
            remote = made.kind is SpanKind.SERVER
            parent = SpanContext(trace_id, int(context.parent, 16), remote, flags, state)
        events = []
        if made.first_token_s is not None:
            events.append(Event("first token", timestamp=base + round(made.first_token_s * 1e9)))
        self._batches.on_end(ReadableSpan(
            made.name, SpanContext(trace_id, int(context.span_id, 16), False, flags, state), parent, self._resource, made.attributes, events,
            kind=made.kind, status=Status(StatusCode.ERROR, made.error) if made.error else _UNSET, instrumentation_scope=self._scope,
            start_time=base + round(made.begin_s * 1e9), end_time=base + round(made.end_s * 1e9),
        ))  # fmt: skip


def made(story: Story, context: Context, about: Attributes) -> Iterator[Made]:
    """Yield a request's spans, each before those under it; `about`: attributes of the first."""
    told = story.time_line()
    line = told.request
    attributes: Attributes = {
        **about,
        "gen_ai.usage.input_tokens": line.prompt_tokens,
        "gen_ai.usage.output_tokens": line.completion_tokens,
        **_ours({
            observe.REQUEST_ID: line.id, observe.PATH: line.path, observe.MODE: line.mode, observe.ATTEMPTS: line.attempts,
            observe.WIRE_BYTES: line.wire_bytes, observe.TTFT_S: line.ttft_s,
        }),
    }  # fmt: skip
    if line.ttft_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = line.ttft_s
    if line.error:
        status = about["http.response.status_code"]
        attributes["error.type"] = str(status) if isinstance(status, int) and status >= 400 else line.outcome
    yield Made(observe.SPAN_REQUEST, context, 0.0, line.seconds, attributes, line.error, SpanKind.SERVER)
    for tried, view in zip(story.tries, told.tries, strict=True):
        if tried.context is not None:
            yield from _attempt(view, tried.context)


def _attempt(view: Try, context: Context) -> Iterator[Made]:
    whole, *steps = view.spans
    attributes = _ours({
        observe.REQUEST_ID: view.name, observe.TRANSFER_ID: view.transfer, observe.SPAN_PREFILL: view.prefill, observe.SPAN_DECODE: view.decode,
        observe.PATH: view.path, observe.MODE: view.mode, observe.WIRE_BYTES: view.wire_bytes, "outcome": view.outcome,
    })  # fmt: skip
    error = view.error or (view.outcome if view.outcome in ("failed", "resumed") else "")
    if error:
        attributes["error.type"] = view.outcome
    first = view.tokens_s[0] if view.tokens_s else None
    yield Made("attempt", context, whole.begin_s, whole.end_s, attributes, error, SpanKind.CLIENT, first)
    for name, group in groupby(steps, lambda step: _part(step.name)):
        yield from _together(name, list(group), context)


def _part(step: str) -> str:
    """Return which part of an attempt a step belongs to; what has no other is a stage of the transfer."""
    return observe.SPAN_PREFILL if step in _PREFILL else _OWN.get(step, observe.SPAN_TRANSFER)


def _together(name: str, steps: Sequence[Span], above: Context) -> Iterator[Made]:
    """Yield one span over steps that follow each other, and each of them under it, unless it is the step itself."""
    context = above.child()
    yield Made(name, context, steps[0].begin_s, steps[-1].end_s, _ours({observe.WORKER: steps[0].where}))
    if name in _OWN.values() or [step.name for step in steps] == [name]:
        return
    for step in steps:
        yield Made(step.name, context.child(), step.begin_s, step.end_s, _ours({observe.WORKER: step.where}))


def _ours(fields: Mapping[str, str | int | float | None]) -> Attributes:
    """Return what is known of our own fields, by the names that log lines have for them."""
    return {f"regauge.{name}": value for name, value in fields.items() if value is not None and value != ""}


class _Counted(SpanExporter):
    """Sends batches, and counts those that the collector has not taken."""

    def __init__(self, inner: OTLPSpanExporter, metrics: Metrics) -> None:
        self.taken = 0
        """Spans that wait no more, whatever became of them."""
        self._inner = inner
        self._lost = metrics.spans_lost
        self._well = True
        self._closed = self._given_up = False
        self._counting = threading.Lock()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self._count(len(spans), well=result is SpanExportResult.SUCCESS)
        return result

    def give_up(self, given: int) -> None:
        """Count what of so many spans has not come to its end, on its way or not, as lost; nothing is counted after it."""
        with self._counting:
            self._given_up = True
            self._lost.labels("not_taken").inc(given - self.taken)

    def _count(self, spans: int, *, well: bool) -> None:
        with self._counting:
            if self._given_up:
                return
            self.taken += spans
            if not well:
                self._lost.labels("not_taken").inc(spans)
        if well != self._well:
            self._well = well
            say = get_logger().info if well else get_logger().warning
            say("the collector takes spans again" if well else "the collector takes no spans: they are lost")

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._inner.shutdown()  # type: ignore[no-untyped-call]  # the library's
