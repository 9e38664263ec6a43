"""One client request on the two workers: dual dispatch, relay, and an end that leaves nothing behind.

A `Job` has one or more choices (answers to prompts), each a request of its own to the workers. For each choice two
legs start at the same time, under a fresh transfer id: the decode worker's stream, which reserves pages, and the
prefill worker's call, which computes the prompt and delivers the KV cache. A leg that fails ends the other at once.
However a choice ends other than by both legs' good end, both workers are told to drop it.

Where prefill is lost, or fails before the first token, the choice begins again, once: on decode alone, if that is an engine that computes
prompts itself (`Connection.computes`); else as soon as prefill is usable, which is waited for a while. The client sees a later first token,
and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from regauge.engines.local.sampling import SamplingParams
from regauge.engines.sglang import room
from regauge.errors import ProtocolError, RegaugeError
from regauge.observe import ERROR, REQUEST_ID, WORKER, Metrics, get_logger
from regauge.serve import wire
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.openai import RATE_LIMIT, SERVER_ERROR, ApiError
from regauge.serve.replies import Delta, PromptDetails, TokenInfo, Usage
from regauge.serve.text import Detokenizer, StopScanner, Tokenizer
from regauge.serve.workers import Worker, Workers

SETTLE_S: Final = 0.5
"""After one leg's end, seconds to wait for the other's: a failed transfer is often the other worker's death."""
RETRY_AFTER_S: Final = 1
UNAVAILABLE: Final = "worker_unavailable"
_SYMPTOMS: Final = frozenset({"transfer_failed", "timeout", "aborted"})
"""What a worker says when its peer is at fault, or may be."""
_PASSING: Final = _SYMPTOMS - {"timeout"} | {"engine_failed", "draining"}
"""What a prefill worker says of a request that may go well another time."""


@dataclass(frozen=True)
class Choice:
    """One answer to be made: its place among the answers, its prompt and how to sample it."""

    index: int
    prompt: int
    request_id: str
    transfer_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]


@dataclass
class Tally:
    """What a job came to; times in seconds of the monotonic clock, `ttft_s` of the choice that was first."""

    arrived: float
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    wire_bytes: int = 0
    mode: str | None = None
    ttft_s: float | None = None
    tpots_s: list[float] = field(default_factory=list)

    @property
    def tpot_s(self) -> float | None:
        """Mean of the choices' times per output token."""
        return sum(self.tpots_s) / len(self.tpots_s) if self.tpots_s else None


class Job:
    """The choices of one client request, merged into one stream of deltas; `close` it, whatever happened.

    `limit_s` is for all of it; for a prefill worker to come back nothing waits longer than `wait_s`. `spawn` runs an abort beside the request, so that neither the client nor a cancellation cuts it short.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        workers: Workers,
        tokenizer: Tokenizer,
        metrics: Metrics,
        *,
        limit_s: float,
        wait_s: float,
        headers: Mapping[str, str],
        spawn: Callable[[Coroutine[None, None, None]], None],
    ) -> None:
        self.choices = choices
        self.tally = Tally(time.monotonic())
        self._workers = workers
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._deadline = asyncio.get_running_loop().time() + limit_s
        self._wait_s = wait_s
        self._headers = headers
        self._spawn = spawn
        self._queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complete = False

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Start the choices and yield their deltas, as many as there are at a time. Raises what ended a choice."""
        for choice in self.choices:
            task = asyncio.create_task(self._run(choice))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        still_open = len(self.choices)
        while still_open:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            batch = [item for item in items if isinstance(item, Delta)]
            still_open -= sum(delta.finish is not None for delta in batch)
            if batch:
                yield batch
            for item in items:
                if isinstance(item, BaseException):
                    raise item
        self._complete = True

    def fail(self, error: RegaugeError) -> None:
        """End the job from outside: `deltas` raises the error."""
        self._queue.put_nowait(error)

    async def close(self) -> None:
        """Wait until nothing of the job runs any more; unless all is well it is cancelled, and its workers told."""
        if not self._complete:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def usage(self) -> Usage:
        """Return the tokens so far; a prompt counts once."""
        prompts = {choice.prompt: len(choice.token_ids) for choice in self.choices}
        prompt, completion = sum(prompts.values()), self.tally.completion_tokens
        cached = PromptDetails(sum(self.tally.cached_tokens.values()))
        return Usage(prompt, completion, prompt + completion, cached)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)

    async def _run(self, choice: Choice) -> None:
        alone = self._workers.decode.client.computes
        if self._workers.prefill.usable or not alone:
            text = _ChoiceText(choice, self._tokenizer)
            try:
                await self._together(choice, text)
                return
            except (WorkerLost, WorkerError) as error:
                if text.count or not (error.role == "prefill" if alone else self._wait_s and _may_pass(error)):
                    raise
                if not alone:
                    await self._returned(choice, error)
                    again = replace(choice, request_id=f"{choice.request_id}-again", transfer_id=room.new_transfer())
                    await self._together(again, _ChoiceText(again, self._tokenizer))
                    return
                fields = {REQUEST_ID: choice.request_id, ERROR: str(error)}
                get_logger().warning("decode computes the prompt itself", **fields)
        self._metrics.bypassed.inc()
        await self._decode(choice, _ChoiceText(choice, self._tokenizer), None)

    async def _returned(self, choice: Choice, error: WorkerLost | WorkerError) -> None:
        """Wait until prefill is usable again after an error; raise the error if it is not in time."""
        loop, log = asyncio.get_running_loop(), get_logger(**{REQUEST_ID: choice.request_id})
        begun = loop.time()
        log.warning("the request waits for prefill, to begin again", **{ERROR: str(error)})
        try:
            async with asyncio.timeout_at(min(begun + self._wait_s, self._deadline)):
                await self._workers.prefill.returned()
        except TimeoutError:
            log.error("prefill did not come back in time", seconds=round(loop.time() - begun, 3))
            raise error from None
        self._metrics.retried.inc()
        log.info("the request begins again", seconds=round(loop.time() - begun, 3))

    async def _together(self, choice: Choice, text: _ChoiceText) -> None:
        prefill = asyncio.create_task(self._prefill(choice))
        decode = asyncio.create_task(self._decode(choice, text, prefill))
        legs: tuple[asyncio.Task[wire.Prefilled], asyncio.Task[bool]] = (prefill, decode)
        whole = False
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if _good(prefill):
                await asyncio.wait((decode,))
            elif _good(decode) or all(map(_is_symptom, _errors(legs))):
                await asyncio.wait(legs, timeout=SETTLE_S)
            if not _good(decode):
                raise _cause(legs)
            whole = _good(prefill) and decode.result()
        finally:
            prefill.cancel()
            decode.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
            if not whole:
                for worker in self._workers.both():
                    self._spawn(abort(worker, choice.request_id))
                for leg, worker in zip(legs, self._workers.both(), strict=True):
                    if not leg.cancelled() and isinstance(leg.exception(), WorkerLost):
                        worker.doubt()

    async def _prefill(self, choice: Choice) -> wire.Prefilled:
        decode = self._workers.decode.client
        body = wire.Prefill(
            choice.request_id,
            choice.transfer_id,
            choice.token_ids,
            choice.sampling,
            decode.address.receivers,
            handover=not decode.computes,
        )
        reply = await self._workers.prefill.client.prefill(body, self._deadline, self._headers)
        self.tally.cached_tokens[choice.prompt] = reply.cached_tokens
        return reply

    async def _decode(self, choice: Choice, text: _ChoiceText, prefill: asyncio.Task[wire.Prefilled] | None) -> bool:
        """Relay the stream; return whether the worker ended it (and not a stop string). Without `prefill` nothing is sent to decode."""
        senders = [] if prefill is None else self._workers.prefill.client.address.senders
        body = wire.Generate(choice.request_id, choice.transfer_id, choice.token_ids, choice.sampling, senders)
        events = self._workers.decode.client.generate(body, self._deadline, self._headers)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, wire.TokenEvent):
                    if not text.count:
                        text.ttft_s = time.monotonic() - self.tally.arrived
                    asked = choice.sampling.logprobs is not None and not text.count
                    if prefill is not None and event.logprob is None and asked:
                        # The first token of an engine whose hand-over has no log-probabilities: its answer has them.
                        first = await asyncio.shield(prefill)
                        event = wire.TokenEvent(event.token, first.logprob, first.top)
                    delta = text.push(event)
                    self.tally.completion_tokens += 1
                    if delta is not None and delta.finish is None:
                        self._queue.put_nowait(delta)
                    elif delta is not None:
                        self._finish(choice, text, delta)
                        return False
                elif isinstance(event, wire.TransferEvent):
                    self.tally.mode = event.mode
                    self.tally.wire_bytes += event.wire_bytes
                    self._metrics.transfer(
                        path=event.path, mode=event.mode, wire_bytes=event.wire_bytes, seconds=event.seconds
                    )
                elif isinstance(event, wire.FinishEvent):
                    self._finish(choice, text, text.end(event.reason))
        return True

    def _finish(self, choice: Choice, text: _ChoiceText, delta: Delta) -> None:
        tpot = self._metrics.finished(
            prompt_tokens=len(choice.token_ids),
            completion_tokens=text.count,
            ttft_s=text.ttft_s,
            seconds=time.monotonic() - self.tally.arrived,
        )
        if tpot is not None:
            self.tally.tpots_s.append(tpot)
        if text.ttft_s is not None:
            self.tally.ttft_s = min(text.ttft_s, self.tally.ttft_s or text.ttft_s)
        self._queue.put_nowait(delta)


class _ChoiceText:
    """Tokens of one choice to deltas; holds log-probabilities back with the text they belong to."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self.count = 0
        self.ttft_s: float | None = None
        self._choice = choice
        self._detokenizer = Detokenizer(tokenizer, choice.token_ids)
        self._scanner = StopScanner(choice.stops)
        self._keep = choice.sampling.logprobs is not None
        self._tokens: list[TokenInfo] = []
        self._chars = 0

    def push(self, event: wire.TokenEvent) -> Delta | None:
        """Take a token; return what it adds, with `finish` if a stop string is complete."""
        self.count += 1
        if self._keep:
            self._tokens.append(TokenInfo(event, self._chars))
        text, hit = self._detokenizer.push(event.token), None
        self._chars += len(text)
        if self.count > self._choice.sampling.min_tokens:
            text, hit = self._scanner.push(text)
        if hit:
            return self._delta(text, "stop", hit)
        return self._delta(text, None) if text else None

    def end(self, reason: Literal["stop", "length"]) -> Delta:
        """Return what was held back, with the reason."""
        text, hit = self._scanner.push(self._detokenizer.flush())
        if hit:
            return self._delta(text, "stop", hit)
        return self._delta(text + self._scanner.flush(), reason)

    def _delta(self, text: str, finish: Literal["stop", "length"] | None, stopped: str | None = None) -> Delta:
        tokens, self._tokens = tuple(self._tokens), []
        return Delta(self._choice.index, text, tokens, finish, stopped)


async def abort(worker: Worker, request_id: str) -> None:
    """Have a worker drop a request; a worker that cannot be reached is asked for its health."""
    try:
        await worker.client.abort(request_id)
    except WorkerLost:
        worker.doubt()
    except RegaugeError as error:
        fields = {REQUEST_ID: request_id, WORKER: worker.client.name, ERROR: str(error)}
        get_logger().warning("abort failed", **fields)


def api_error(error: RegaugeError) -> ApiError:
    """Return what the client is told of an error that ended its request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkerLost):
        return ApiError(503, str(error), type=SERVER_ERROR, code=UNAVAILABLE)
    if isinstance(error, RequestTimeout):
        return ApiError(504, str(error), type=SERVER_ERROR, code="timeout")
    if isinstance(error, ProtocolError):
        return ApiError(502, str(error), type=SERVER_ERROR, code="bad_gateway")
    if not isinstance(error, WorkerError):
        return ApiError(500, str(error), type=SERVER_ERROR, code="internal_error")
    match error.event.code:
        case "prompt_too_large":
            return ApiError(400, str(error), code="context_length_exceeded")
        case "queue_full":
            return too_many(str(error))
        case "draining" | "aborted":  # nobody but the worker itself can have aborted: the job waits for it
            return ApiError(503, str(error), type=SERVER_ERROR, code=UNAVAILABLE, retry_after_s=RETRY_AFTER_S)
        case "timeout" | "transfer_failed" as code:
            return ApiError(wire.STATUS[code], str(error), type=SERVER_ERROR, code=code)
        case code:
            # The request was checked here: that the worker refuses it is this server's fault.
            return ApiError(500, str(error), type=SERVER_ERROR, code=code)


def too_many(message: str) -> ApiError:
    """Return a 429."""
    return ApiError(429, message, type=RATE_LIMIT, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)


def _good(leg: asyncio.Task[Any]) -> bool:
    return leg.done() and not leg.cancelled() and leg.exception() is None


def _errors(legs: Sequence[asyncio.Task[Any]]) -> list[BaseException]:
    ended = [leg.exception() for leg in legs if leg.done() and not leg.cancelled()]
    return [error for error in ended if error is not None]


def _is_symptom(error: BaseException) -> bool:
    return isinstance(error, WorkerError) and error.event.code in _SYMPTOMS


def _may_pass(error: WorkerLost | WorkerError) -> bool:
    """Whether a request that failed so may go well once prefill is usable again."""
    if isinstance(error, WorkerError):
        # Decode's complaint of a transfer: prefill is gone since it answered.
        return error.event.code == "transfer_failed" or (error.role == "prefill" and error.event.code in _PASSING)
    return error.role == "prefill"


def _cause(legs: Sequence[asyncio.Task[Any]]) -> BaseException:
    """Return the error to report: a worker's death, else a worker's own fault, else what there is."""
    errors = _errors(legs)
    return min(errors, key=lambda error: (not isinstance(error, WorkerLost), _is_symptom(error)))
