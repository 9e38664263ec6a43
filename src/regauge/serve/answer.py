"""From a job to HTTP: admission, sending whole or streamed answers, and what every reply carries.

The status of a streamed answer goes out with its first text, so that a request which fails before then gets its own
status. A client that closes its connection ends its job, and so its requests on both workers.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Final, Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regauge import observe
from regauge.errors import RegaugeError
from regauge.observe import Metrics, get_logger
from regauge.serve import anthropic
from regauge.serve.deadlines import Deadlines
from regauge.serve.failures import ClientGone as ClientGone  # noqa: PLC0414  # re-exported
from regauge.serve.failures import api_error, too_many
from regauge.serve.openai import SERVER_ERROR, ApiError
from regauge.serve.recent import Story
from regauge.serve.relay import Job
from regauge.serve.replies import Delta, Usage
from regauge.serve.tenants import Grant, Tenant

JSON: Final = "application/json"
SLOW_READER_S: Final = 5.0
"""Seconds after a request's own time limit until a client that does not read its answer is given up."""
_STREAM: Final = MappingProxyType(
    {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
)
_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Guest(Protocol):
    """A request that is in the house."""

    @property
    def size(self) -> int:
        """Requests to the workers that it is."""

    def fail(self, error: RegaugeError) -> None:
        """End it from outside."""


class House:
    """Who is in: admission of choices, the jobs that run, and the aborts that run beside them."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.draining = False
        self.limit = limit
        """Most choices that are in at once."""
        self.deadlines = Deadlines()
        self._metrics = metrics
        self._choices = 0
        self._jobs: set[Guest] = set()
        self._beside: set[asyncio.Task[Any]] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def choices(self) -> int:
        """Requests that are in; a job has one for each choice."""
        return self._choices

    def enter(self, job: Guest) -> None:
        """Admit a job. Raises ApiError: 429 if the house is full, 503 if it closes."""
        if self.draining:
            raise closing()
        if self._choices + job.size > self.limit:
            raise too_many(f"{self._choices} requests are running or waiting, of at most {self.limit}; try again")
        self._jobs.add(job)
        self._count(job.size)

    def leave(self, job: Guest) -> None:
        """Let a job go; a second time does nothing."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._count(-job.size)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run something short to its end, whatever becomes of the request that wants it."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def drain(self, grace_s: float) -> None:
        """Admit nobody, let jobs end for `grace_s`, then end them with an error; return when all is over."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            for job in self._jobs:
                job.fail(closing())
            await self._empty.wait()
        while self._beside:
            await asyncio.wait(self._beside)

    def _count(self, change: int) -> None:
        self._choices += change
        self._metrics.in_flight.set(self._choices)
        (self._empty.clear if self._choices else self._empty.set)()


class Writer(Protocol):
    """How an API writes an answer: what each dialect has one of."""

    def chunks(self, delta: Delta) -> bytes:
        """Return the server-sent events of one step."""

    def end(self, usage: Usage) -> bytes:
        """Return the end of a stream."""

    def failed(self, error: ApiError) -> bytes:
        """Return the server-sent event that ends a stream which failed."""

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""

    def refusal(self, error: ApiError) -> bytes:
        """Return the body of an error."""


class Answer:
    """Sends a job's answer, as an ASGI app; leaves the house when it is over."""

    def __init__(self, job: Job, writer: Writer, house: House, *, stream: bool, limit_s: float) -> None:
        self._job = job
        self._writer = writer
        self._house = house
        self._stream = stream
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, then leave the house and note what the request came to."""
        gone = asyncio.create_task(self._watch(receive))
        summary: dict[str, object] = scope["state"].setdefault("summary", {})
        try:
            async with asyncio.timeout(self._limit_s):
                error = await (self._send_stream(send) if self._stream else self._send_whole(send))
            if error is not None:
                summary[observe.ERROR] = str(error)
        except TimeoutError:
            # The job's own time limit has passed already: it is the sending that hangs. The server will find the
            # answer unfinished and close the connection.
            summary[observe.ERROR] = "the client does not read its answer"
        finally:
            gone.cancel()
            try:
                await asyncio.gather(gone, self._job.close(), return_exceptions=True)
            finally:  # also where the server cuts this short: a job that never left would keep the house open
                self._house.leave(self._job)
                self._note(summary)
                if isinstance(granted := scope["state"].get("grant"), Grant):
                    granted.used = self._job.usage().total_tokens

    def _note(self, summary: dict[str, object]) -> None:
        tally, usage = self._job.tally, self._job.usage()
        self._job.story.end(summary.get(observe.ERROR), tally.ttft_s, usage.prompt_tokens, usage.completion_tokens)
        summary |= {
            observe.PATH: tally.path,
            observe.MODE: tally.mode,
            observe.PLACED: tally.route.header if tally.route else None,
            observe.ATTEMPTS: tally.attempts,
            observe.WIRE_BYTES: tally.wire_bytes,
            observe.PROMPT_TOKENS: usage.prompt_tokens,
            observe.COMPLETION_TOKENS: usage.completion_tokens,
            observe.TTFT_S: rounded(tally.ttft_s),
            observe.TPOT_S: rounded(tally.tpot_s),
        }

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._job.fail(ClientGone("the client closed its connection"))

    async def _send_whole(self, send: Send) -> RegaugeError | None:
        gathered: list[Delta] = []
        try:
            async with aclosing(self._job.deltas()) as deltas:
                async for batch in deltas:
                    gathered += batch
                self._house.leave(self._job)  # before the client can know, and ask again
        except ClientGone as gone:
            return gone
        except RegaugeError as error:
            await self._refuse(send, api_error(error))
            return error
        body = self._writer.whole(gathered, self._job.usage())
        headers = {"content-type": JSON, "content-length": str(len(body)), **self._job.told()}
        await begin(send, 200, headers)
        await part(send, body, last=True)
        return None

    async def _send_stream(self, send: Send) -> RegaugeError | None:
        begun = False
        try:
            async with aclosing(self._job.deltas()) as deltas:
                async for batch in deltas:
                    if not begun:
                        await begin(send, 200, {**_STREAM, **self._job.told()})
                        begun = True
                    await part(send, b"".join(self._writer.chunks(delta) for delta in batch))
                self._house.leave(self._job)
        except ClientGone as gone:
            return gone
        except RegaugeError as error:
            if begun:
                await part(send, self._writer.failed(api_error(error)), last=True)
            else:
                await self._refuse(send, api_error(error))
            return error
        await part(send, self._writer.end(self._job.usage()), last=True)
        return None

    async def _refuse(self, send: Send, error: ApiError) -> None:
        body = self._writer.refusal(error)
        await begin(send, error.status, {"content-type": JSON, "content-length": str(len(body)), **error.headers()})
        await part(send, body, last=True)


class Spans(Protocol):
    """Takes requests that have ended, for an OpenTelemetry collector: `otlp.Otlp`."""

    def ended(self, story: Story, *, route: str, status: int, tenant: str) -> None:
        """Take one; does not wait."""

    def close(self) -> None:
        """Send what is left, within a bound; blocks."""


class Envelope:
    """ASGI middleware: a request id on every reply, one count and one log line per request, and its spans."""

    def __init__(self, app: ASGIApp, metrics: Metrics, spans: Spans | None = None) -> None:
        self._app = app
        self._metrics = metrics
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on under its id; count and log it at its end."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"], state["begun"] = request_id, False
        status, begun, whole = 0, time.monotonic(), False

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, state["begun"] = message["status"], True
                named = [(b"x-request-id", request_id.encode())]
                if anthropic.speaks(scope["path"]):
                    named.append((b"request-id", request_id.encode()))  # that API's own name for it
                message["headers"] = [*message["headers"], *named]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
            whole = True
        finally:
            # No status was sent: either the client had gone, or the server's error handler will answer.
            status = status or (499 if whole else 500)
            route = _route(scope["path"])
            self._metrics.answered(route, status)
            log = get_logger(**{observe.REQUEST_ID: request_id, observe.ROUTE: route, observe.STATUS: status})
            asked = scope["method"] == "POST" and not route.startswith("/internal/")  # not a worker's heartbeat
            line = log.info if asked else log.debug
            told = {observe.SECONDS: rounded(time.monotonic() - begun), **state.get("summary", {})}
            story, tenant = state.get("story"), state.get("tenant")
            if isinstance(story, Story) and story.context is not None:
                told[observe.TRACE_ID] = story.context.trace_id
            line("request", **told)
            if isinstance(story, Story) and self._spans is not None:
                self._spans.ended(
                    story, route=route, status=status, tenant=tenant.name if isinstance(tenant, Tenant) else ""
                )


def error_response(error: ApiError, path: str = "", request_id: str = "") -> Response:
    """Return an error as the API of a path writes it."""
    body = anthropic.error_body(error, request_id) if anthropic.speaks(path) else error.body()
    return Response(body, error.status, error.headers(), JSON)


def closing() -> ApiError:
    """Return the 503 of a gateway that shuts down."""
    return ApiError(503, "the gateway is shutting down", type=SERVER_ERROR, code="shutting_down")


def rounded(seconds: float | None) -> float | None:
    """Microseconds are enough for a log line."""
    return None if seconds is None else round(seconds, 6)


def _route(path: str) -> str:
    for prefix in ("/v1/models/", "/v1/usage/", "/debug/why/", "/debug/trace/"):
        if path.startswith(prefix):
            return f"{prefix}{{id}}"
    return "/dashboard/{file}" if path.startswith("/dashboard/") else path


async def begin(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send the head of an answer."""
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def part(send: Send, body: bytes, *, last: bool = False) -> None:
    """Send a part of an answer's body."""
    await send({"type": "http.response.body", "body": body, "more_body": not last})
