"""The gateway's endpoints: from a checked request to a job on the workers."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from regauge import __version__
from regauge.config import LimitsConfig, ServeConfig
from regauge.engines.sglang import room
from regauge.errors import ProtocolError
from regauge.move.state import shown
from regauge.observe import Metrics, get_logger
from regauge.serve import wire
from regauge.serve.answer import JSON, SLOW_READER_S, Answer, House
from regauge.serve.debug import Overview, is_loopback
from regauge.serve.openai import (
    COMPLETION_MAX_TOKENS,
    SERVER_ERROR,
    ApiError,
    Ask,
    bad,
    parse_chat,
    parse_completion,
)
from regauge.serve.pairing import Pairing
from regauge.serve.relay import UNAVAILABLE, Choice, Job
from regauge.serve.replies import Writer
from regauge.serve.text import TemplateError, Tokenizer
from regauge.serve.workers import Worker, Workers, view

LONG_TEXT: Final = 16_384
"""Characters from which on a request is tokenised in a thread: the event loop must not stand still."""
PIECE: Final = 64
"""Characters that a message or prompt counts for besides its own: what the template writes around it, and each call's cost."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Gateway:
    """The endpoints."""

    def __init__(
        self,
        config: ServeConfig,
        tokenizer: Tokenizer,
        workers: Workers,
        metrics: Metrics,
        *,
        model: str,
        pairing: Pairing,
    ) -> None:
        self.house = House(config.limits.max_queue, metrics)
        self._limits = config.limits
        self._tokenizer = tokenizer
        self._workers = workers
        self._metrics = metrics
        self._model = model
        self._pairing = pairing
        self._created = int(time.time())
        own = tokenizer.max_context
        engines = min(config.prefill.max_context, config.decode.max_context)
        self._context = engines if own is None else min(engines, own)

    def set_limits(self, limits: LimitsConfig) -> None:
        """Put other limits in force, for requests that come from now on."""
        self._limits = limits
        self.house.limit = limits.max_queue

    def routes(self) -> list[Route]:
        """Return the routes; `observe.ROUTES` lists the same for the metrics' labels."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.scrape),
            Route("/version", self.version),
            Route(wire.DEBUG_PATH, self.debug),
        ]

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Watch the workers while the app runs; end what is left when it stops."""
        both = self._workers.both()
        await asyncio.gather(*(worker.poll() for worker in both))
        watches = [asyncio.create_task(worker.watch()) for worker in both]
        watches.append(asyncio.create_task(self._pairing.learn()))
        for watch in watches:
            watch.add_done_callback(_watch_ended)
        try:
            yield
        finally:
            await self.house.drain(0)
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            for worker in both:
                await worker.client.close()

    async def chat(self, request: Request) -> Answer:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, parse_chat(await self._body(request)))

    async def complete(self, request: Request) -> Answer:
        """`POST /v1/completions`."""
        return await self._answer(request, parse_completion(await self._body(request)))

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{id}`."""
        self._check_model(request.path_params["id"])
        return _json(self._card())

    async def health(self, _: Request) -> Response:
        """`GET /health`: this process is alive."""
        return _json({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """`GET /ready`: requests can be served; else 503. The body names a worker that does not answer, and since when.

        Where decode computes prompts itself for want of a prefill worker, the status is "degraded".
        """
        workers = [
            {
                "name": worker.client.name,
                "role": worker.client.role,
                "up": worker.up,
                "since": worker.since.isoformat(timespec="milliseconds"),
                "reason": worker.reason,
            }
            for worker in self._workers.both()
        ]
        ready = not (self.house.draining or self._pairing.refused or self._workers.fault())
        status = "ready" if all(worker.usable for worker in self._workers.both()) else "degraded"
        other = "draining" if self.house.draining else "unavailable"
        return _json({"status": status if ready else other, "workers": workers}, 200 if ready else 503)

    async def scrape(self, _: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        text, kind = self._metrics.exposition()
        return Response(text, media_type=kind)

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        pair = {"path": self._pairing.verdict.path, "text": self._pairing.verdict.text}
        return _json({"version": __version__, "model": self._model, "verdict": pair})

    async def debug(self, request: Request) -> Response:
        """`GET /debug/transfers`: how transfers, links and pools of all workers stand; for this machine only."""
        if not is_loopback(request.client.host if request.client else ""):
            message = f"{wire.DEBUG_PATH} answers on loopback alone: ask on the gateway's machine, as by ssh"
            raise ApiError(403, message, code="loopback_only")
        limit = request.query_params.get("limit")
        try:
            count = shown(limit)
        except ProtocolError as error:
            raise bad("limit", str(error)) from error
        views = await asyncio.gather(*(view(worker, count) for worker in self._workers.both()))
        pair = self._pairing.verdict.path
        overview = Overview(__version__, self._model, pair, self.house.choices, time.time(), list(views))
        return Response(msgspec.json.encode(overview), media_type=JSON)

    def _card(self) -> dict[str, object]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "regauge",
            "max_model_len": self._context,
        }

    def _check_model(self, name: str) -> None:
        if name != self._model:
            message = f"the model {name!r} does not exist; this server has {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _body(self, request: Request) -> bytes:
        limit = self._limits.max_body_bytes
        parts, size = [], int(request.headers.get("content-length", "0"))
        too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
        if size > limit:
            raise too_large
        size = 0
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError as error:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from error
        except ClientDisconnect as error:
            raise ApiError(400, "the connection closed before the body's end") from error
        return b"".join(parts)

    async def _answer(self, request: Request, ask: Ask) -> Answer:
        self._check_model(ask.model)
        count = 1 if ask.chat else len(ask.prompts)
        if count * ask.n > self._limits.max_queue:
            raise bad("prompt", f"{count} prompts x n={ask.n} is more than {self._limits.max_queue} requests")
        long = sum(len(piece) + PIECE for piece in _pieces(ask)) > LONG_TEXT
        prompts = await asyncio.to_thread(self._encode, ask) if long else self._encode(ask)
        budgets = [self._budget(ids, ask, index) for index, ids in enumerate(prompts)]
        if (missing := self._workers.fault()) is not None:
            raise _fault(missing)
        if self._pairing.refused:
            message = f"the pair of engines is refused: {self._pairing.verdict.text}"
            raise ApiError(503, message, type=SERVER_ERROR, code="pair_refused")
        request_id: str = request.state.request_id
        salt = secrets.token_hex(4)  # a client may send the same X-Request-Id twice
        choices = [
            Choice(
                index=prompt * ask.n + nth,
                prompt=prompt,
                request_id=f"{request_id}-{salt}-{prompt * ask.n + nth}",
                transfer_id=room.new_transfer(),
                token_ids=ids,
                sampling=ask.sampling_for(budgets[prompt], nth),
                stops=ask.stops,
            )
            for prompt, ids in enumerate(prompts)
            for nth in range(ask.n)
        ]
        headers = {"X-Request-Id": request_id}
        if _TRACEPARENT.fullmatch(trace := request.headers.get("traceparent", "")):
            headers["traceparent"] = trace
        job = Job(
            choices,
            self._workers,
            self._tokenizer,
            self._metrics,
            limit_s=self._limits.request_timeout_s,
            wait_s=self._limits.prefill_wait_s,
            headers=headers,
            spawn=self.house.spawn,
        )
        echo = [self._tokenizer.decode(p) if isinstance(p, list) else p for p in ask.prompts] if ask.echo else []
        writer = Writer(
            id=f"{'chatcmpl' if ask.chat else 'cmpl'}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._model,
            fingerprint=f"regauge-{self._pairing.verdict.path}",
            chat=ask.chat,
            usage_chunk=ask.include_usage,
            logprobs=ask.sampling.logprobs is not None,
            tokenizer=self._tokenizer,
            echo=tuple(text for text in echo for _ in range(ask.n)),
        )
        self.house.enter(job)
        return Answer(
            job,
            writer,
            self.house,
            stream=ask.stream,
            path=self._pairing.verdict.path,
            limit_s=self._limits.request_timeout_s + SLOW_READER_S,
        )

    def _encode(self, ask: Ask) -> list[list[int]]:
        if ask.chat:
            try:
                return [self._tokenizer.encode_chat(ask.messages)]
            except TemplateError as error:
                raise bad("messages", str(error)) from error
        size = self._tokenizer.vocab_size
        prompts = []
        for index, prompt in enumerate(ask.prompts):
            if isinstance(prompt, str):
                prompts.append(self._tokenizer.encode(prompt))
            elif all(0 <= token < size for token in prompt):
                prompts.append(prompt)
            else:
                where = "prompt" if len(ask.prompts) == 1 else f"prompt[{index}]"
                raise bad(where, f"token ids go up to {size - 1}")
        return prompts

    def _budget(self, ids: list[int], ask: Ask, prompt: int) -> int:
        """Return the most tokens to generate after a prompt."""
        param = "messages" if ask.chat else "prompt"
        where = param if len(ask.prompts) < 2 else f"prompt[{prompt}]"
        if not ids:
            raise bad(where, "has no tokens")
        room = self._context - len(ids)
        asked = 1 if ask.max_tokens is None else ask.max_tokens
        if asked > room:
            message = (
                f"the context holds {self._context} tokens; {len(ids) + asked} are asked for:"
                f" {len(ids)} in {where} and {asked} for the answer"
            )
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        if ask.max_tokens is not None:
            return ask.max_tokens
        usual = self._limits.default_max_tokens if ask.chat else COMPLETION_MAX_TOKENS
        return min(max(usual, ask.sampling.min_tokens), room)


def _pieces(ask: Ask) -> Iterable[str | list[int]]:
    return (message["content"] for message in ask.messages) if ask.chat else ask.prompts


def _watch_ended(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        get_logger().error("a watch over the workers broke; their state is no longer known", exc_info=error)


def _fault(worker: Worker) -> ApiError:
    """Return what a client is told while a worker that is needed takes no requests."""
    who = f"{worker.client.role} worker {worker.client.name}"
    if worker.up:
        return ApiError(503, f"{who} is shutting down", type=SERVER_ERROR, code=UNAVAILABLE)
    since = worker.since.isoformat(timespec="seconds")
    message = f"{who} is not available since {since}: {worker.reason}"
    return ApiError(503, message, type=SERVER_ERROR, code=UNAVAILABLE)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)
