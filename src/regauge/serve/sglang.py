"""An SGLang server, asked by its own API: token ids in, token ids out, over `/generate`, so that every route of the gateway is the same to it.

What it says of the transfer is in `inject.py`. A prefill request is answered
once everything is delivered. Decode never computes a prompt: its answer begins with the token that prefill has sampled.

What SGLang 0.5.23 does, and what is done about it:

- A request whose connection closes it notices after 2 s (a stream) or up to 4 s: an abort is said aloud, by `POST /abort_request`.
- Events of a stream hold all tokens so far, or the new ones alone, by how the server was started (`--incremental-streaming-output`).
- `ignore_eos` has it ignore the request's own stop tokens, too: they end the answer here.
- `seed` counts only with `--enable-deterministic-inference`.
- `/health` has the model compute a token, for a second and more, and tells nothing of transfers: `/model_info` and the ranks' status are asked.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Final, Literal

import msgspec

from regauge.engines.local.sampling import GREEDY_TEMPERATURE
from regauge.errors import ProtocolError
from regauge.serve import inject, wire
from regauge.serve.connection import WorkerError, WorkerLost
from regauge.serve.engine_client import ENDS, EngineClient, FinishReason, signed
from regauge.serve.exchange import Exchange
from regauge.serve.inject import RID_END, Leg

GENERATE: Final = "/generate"
ABORT: Final = "/abort_request"
INFO: Final = "/model_info"
READY: Final = "/ready"
ABORT_S: Final = 2.0
"""Most seconds for an abort to be taken."""
_CODES: Final[Mapping[int, wire.Code]] = {400: "bad_request", 401: "unauthorized", 429: "queue_full", 503: "draining"}
_SAID: Final[tuple[tuple[re.Pattern[str], wire.Code], ...]] = (
    (re.compile(r"(Prefill|Decode) (bootstrap|handshake|transfer) failed"), "transfer_failed"),
    (re.compile(r"queue is full"), "queue_full"),
    (re.compile(r"exceeds the m|is longer than the m"), "prompt_too_large"),
    (re.compile(r"Duplicate request ID"), "duplicate_request"),
)
"""What SGLang's words mean, where its status does not tell."""


class _Finish(msgspec.Struct, frozen=True):
    type: str
    message: str = ""
    status_code: int | None = None


_Ranked = tuple[float | None, int, Any]
"""Log-probability (None: not finite), token, text."""


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[_Ranked] | None = None
    output_top_logprobs: list[list[_Ranked] | None] | None = None


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | str | None = None


class _Answer(msgspec.Struct, frozen=True):
    """A whole answer, one event of a stream, or a refusal, which has `error` or `message`."""

    output_ids: list[int] = []
    meta_info: _Meta = _Meta()
    error: _Problem | str | None = None
    message: str = ""


class _Info(msgspec.Struct, frozen=True):
    served_model_name: str = ""
    disaggregation_mode: Literal["null", "prefill", "decode", "encode"] = "null"


class SglangClient(EngineClient):
    """One SGLang server with regauge as its transfer backend."""

    async def _serves(self) -> Sequence[str]:
        async with self.call("GET", READY, None) as answer:
            await self.refusal(answer)
        async with self.call("GET", INFO, None) as answer:
            info = await self.read(answer, _Info)
        if info.disaggregation_mode != self.role:
            reason = f"its disaggregation mode is {info.disaggregation_mode}: start it with --disaggregation-mode {self.role}"
            raise WorkerLost(self.name, self.role, reason)
        return [info.served_model_name]

    async def generate(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[wire.Event, None]:
        """As `Connection.generate`."""
        ends = frozenset(body.sampling.stop_token_ids if body.sampling.ignore_eos else ())
        count = 0
        async with aclosing(super().generate(body, deadline, headers)) as events:
            async for event in events:
                yield event
                if isinstance(event, wire.TokenEvent):
                    count += 1
                    if event.token in ends:
                        yield wire.FinishEvent("stop", len(body.token_ids), count)
                        await self.abort(body.request_id)
                        return

    def _stream(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Exchange]:
        leg = Leg(body.request_id, body.transfer_id, senders=body.prefill)
        asked = inject.sglang(_body(body) | {"stream": True}, leg)
        return self.call("POST", GENERATE, deadline, msgspec.json.encode(asked), headers)

    def _take(
        self, data: bytes, count: int, alternatives: int | None
    ) -> tuple[list[wire.TokenEvent], FinishReason | None]:
        event = self._decoded(data, _Answer)
        if event.error is not None or event.message:
            raise self._refused(event, 0)
        reason = self._reason(event.meta_info.finish_reason)
        return self._tokens(event, count, alternatives), reason

    async def prefill(self, body: wire.Prefill, deadline: float, headers: Mapping[str, str]) -> wire.Prefilled:
        """As `Connection.prefill`: SGLang answers once the KV cache and the hand-over are delivered."""
        started = time.monotonic()
        leg = Leg(body.request_id, body.transfer_id, receivers=body.decode)
        asked = msgspec.json.encode(inject.sglang(_body(body), leg))
        async with self.call("POST", GENERATE, deadline, asked, headers) as answer:
            reply = await self.read(answer, _Answer)
        self._reason(reply.meta_info.finish_reason)
        tokens = self._tokens(reply, 0, body.sampling.logprobs)
        if not tokens:
            raise ProtocolError(f"answer of {self.role} worker {self.name}: it holds no token")
        first, cached = tokens[0], reply.meta_info.cached_tokens
        return wire.Prefilled(
            first_token=first.token, computed_tokens=len(body.token_ids) - cached, cached_tokens=cached,
            prefill_seconds=time.monotonic() - started, transfer_seconds=0.0, logprob=first.logprob, top=first.top,
        )  # fmt: skip

    async def abort(self, request_id: str) -> wire.Aborted:
        """As `Connection.abort`. SGLang does not say whether it had the request; this says that it had."""
        deadline = asyncio.get_running_loop().time() + ABORT_S
        body = msgspec.json.encode({"rid": request_id + RID_END})
        async with self.call("POST", ABORT, deadline, body) as answer:
            await self.refusal(answer)
            await self.whole(answer)
        return wire.Aborted(found=True)

    async def refusal(self, answer: Exchange) -> None:
        """As `Connection.refusal`."""
        if answer.status == 200:
            return
        body = await self.whole(answer)
        try:
            problem = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, RecursionError):
            problem = _Answer(message=body[:200].decode("utf-8", "replace"))
        raise self._refused(problem, answer.status)

    def _refused(self, problem: _Answer, status: int) -> WorkerError:
        """Return the error that a refusal is; an event of a stream has its status, where there is one, within."""
        message, code = problem.message, status
        if isinstance(problem.error, str):
            message = problem.error
        elif problem.error is not None:
            message = problem.error.message
            code = code or (problem.error.code if isinstance(problem.error.code, int) else 0)
        return self._failure(_code(message, code), message or f"HTTP {status}")

    def _reason(self, finish: _Finish | None) -> FinishReason | None:
        if finish is None or finish.type in ENDS:
            return None if finish is None else ENDS[finish.type]
        code: wire.Code = "engine_failed"
        if finish.type == "abort":
            code = "aborted" if finish.status_code is None else _code(finish.message, finish.status_code)
        raise self._failure(code, finish.message or f"the request ended with {finish.type!r}")

    def _tokens(self, answer: _Answer, count: int, alternatives: int | None) -> list[wire.TokenEvent]:
        """Return the tokens of an event behind the first `count`: its lists hold all, or only the new ones."""
        ids, total = answer.output_ids, answer.meta_info.completion_tokens
        if len(ids) not in (total, total - count):
            message = f"an event of {total} tokens, {count} of them known, holds {len(ids)}"
            raise ProtocolError(f"answer of {self.role} worker {self.name}: {message}")
        known = count if len(ids) == total else 0
        if alternatives is None:
            return [wire.TokenEvent(token) for token in ids[known:]]
        chosen = answer.meta_info.output_token_logprobs or []
        tops = answer.meta_info.output_top_logprobs or [None] * len(ids)
        if not len(ids) == len(chosen) == len(tops):
            raise ProtocolError(
                f"answer of {self.role} worker {self.name}: {len(ids)} tokens came with {len(chosen)} log-probabilities"
            )
        events = [
            wire.TokenEvent(token, _finite(logprob), _likeliest(top or [], alternatives))
            for token, (logprob, _, _), top in zip(ids[known:], chosen[known:], tops[known:], strict=True)
        ]
        if not count and events and chosen[known][0] is None:
            events[0] = wire.TokenEvent(
                events[0].token
            )  # the hand-over of this transfer has none: prefill's answer does
        return events


def _body(body: wire.Generate | wire.Prefill) -> dict[str, Any]:
    """Return a request to `/generate`. Every sampling parameter is said: the server may have preferred ones of its own."""
    s = body.sampling
    return {
        "input_ids": body.token_ids,
        "return_logprob": s.logprobs is not None, "top_logprobs_num": s.logprobs or 0, "logprob_start_len": -1,
        "sampling_params": {
            "max_new_tokens": s.max_tokens, "min_new_tokens": s.min_tokens,
            "temperature": 0.0 if s.temperature < GREEDY_TEMPERATURE else s.temperature,
            "top_p": s.top_p, "top_k": s.top_k or -1, "min_p": s.min_p, "sampling_seed": signed(s.seed),
            "presence_penalty": s.presence_penalty, "frequency_penalty": s.frequency_penalty, "repetition_penalty": 1.0,
            "stop": [], "stop_token_ids": list(s.stop_token_ids), "ignore_eos": s.ignore_eos, "n": 1,
        },
        **inject.salted(body.salt),
    }  # fmt: skip


def _likeliest(top: list[_Ranked], count: int) -> list[tuple[int, float]]:
    ranked = [(token, _finite(logprob)) for logprob, token, _ in top]
    return sorted(ranked, key=lambda each: (-each[1], each[0]))[:count]


def _finite(logprob: float | None) -> float:
    return wire.LOWEST_LOGPROB if logprob is None else logprob


def _code(message: str, status: int) -> wire.Code:
    said = next((code for words, code in _SAID if words.search(message)), None)
    return said or _CODES.get(status, "engine_failed")
