"""A vLLM server, asked by its own API: token ids in, token ids out, over `/v1/completions`, so that every route of the gateway is the same to it.

What it says of the transfer is in `inject.py`. vLLM ends a request whose
connection closes, so that nothing else is needed to abort one. A decode engine whose prefill is gone computes the prompt itself: it gets
the request again, without a transfer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import msgspec

from regauge.errors import ProtocolError
from regauge.serve import inject, wire
from regauge.serve.engine_client import ENDS, EngineClient, FinishReason, signed
from regauge.serve.exchange import Exchange
from regauge.serve.inject import Leg

COMPLETIONS: Final = "/v1/completions"
HEALTH: Final = "/health"
MODELS: Final = "/v1/models"
_NAMED: Final = "token_id:"
"""How vLLM writes a token where it is asked for ids (`return_tokens_as_token_ids`)."""
_CODES: Final[Mapping[int, wire.Code]] = {400: "bad_request", 401: "unauthorized", 429: "queue_full", 503: "draining"}


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Problem(msgspec.Struct, frozen=True):
    message: str = ""


class _Answer(msgspec.Struct, frozen=True):
    """A whole answer, or one event of a stream."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: _Problem | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class VllmClient(EngineClient):
    """One vLLM server with regauge's connector."""

    computes = True
    continues = False

    async def _serves(self) -> Sequence[str]:
        async with self.call("GET", HEALTH, None) as answer:
            await self.refusal(answer)
        async with self.call("GET", MODELS, None) as answer:
            return [each.id for each in (await self.read(answer, _Models)).data]

    def _stream(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Exchange]:
        """Where `body.prefill` is empty the engine computes the prompt itself."""
        asked = self._body(body, body.sampling) | {"stream": True}
        leg = Leg(body.request_id, body.transfer_id, senders=body.prefill)
        return self._ask(inject.vllm(asked, leg), body.request_id, deadline, headers)

    def _take(
        self, data: bytes, count: int, alternatives: int | None
    ) -> tuple[list[wire.TokenEvent], FinishReason | None]:
        del count  # each event has its own tokens alone
        event = self._decoded(data, _Answer)
        if event.error is not None:
            raise self._failure("engine_failed", event.error.message)
        if not event.choices:
            return [], None
        choice = event.choices[0]
        return list(_tokens(choice, alternatives)), self._reason(choice.finish_reason)

    async def prefill(self, body: wire.Prefill, deadline: float, headers: Mapping[str, str]) -> wire.Prefilled:
        """As `Connection.prefill`; returns once the first token is there: what is still to be sent the engine sends by itself."""
        started = time.monotonic()
        sampling = msgspec.structs.replace(body.sampling, max_tokens=1, min_tokens=min(body.sampling.min_tokens, 1))
        leg = Leg(body.request_id, body.transfer_id, receivers=body.decode, handover=body.handover)
        asked = inject.vllm(self._body(body, sampling), leg)
        async with self._ask(asked, body.request_id, deadline, headers) as answer:
            reply = await self.read(answer, _Answer)
        if why := inject.refused(reply.kv_transfer_params):
            raise self._failure("transfer_failed", why)
        tokens = list(_tokens(reply.choices[0], sampling.logprobs)) if reply.choices else []
        if not tokens:
            raise ProtocolError(f"answer of {self.role} worker {self.name}: it holds no token")
        details = reply.usage.prompt_tokens_details if reply.usage else None
        cached = (details.cached_tokens or 0) if details else 0
        first = tokens[0]
        return wire.Prefilled(
            first_token=first.token, computed_tokens=len(body.token_ids) - cached, cached_tokens=cached,
            prefill_seconds=time.monotonic() - started, transfer_seconds=0.0, logprob=first.logprob, top=first.top,
        )  # fmt: skip

    async def abort(self, request_id: str) -> wire.Aborted:
        """Nothing: the request's connection has been closed, which ends it."""
        del request_id
        return wire.Aborted(found=False)

    async def refusal(self, answer: Exchange) -> None:
        """As `Connection.refusal`."""
        if answer.status == 200:
            return
        body = await self.whole(answer)
        try:
            problem = msgspec.json.decode(body, type=_Answer).error
        except (msgspec.DecodeError, RecursionError):
            problem = None
        message = problem.message if problem is not None else body[:200].decode("utf-8", "replace")
        code = _CODES.get(answer.status, "engine_failed")
        raise self._failure(code, message or f"HTTP {answer.status}")

    def _ask(
        self, asked: dict[str, Any], request_id: str, deadline: float, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Exchange]:
        own = {**headers, "X-Request-Id": request_id}
        return self.call("POST", COMPLETIONS, deadline, msgspec.json.encode(asked), own)

    def _body(self, body: wire.Generate | wire.Prefill, sampling: wire.SamplingParams) -> dict[str, Any]:
        """Every parameter is said: vLLM would take those that are not from the model's generation_config.json."""
        return {
            "model": self._model, "prompt": body.token_ids, "max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p,
            "seed": signed(sampling.seed), "repetition_penalty": 1.0,
            "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": sampling.ignore_eos, "logprobs": sampling.logprobs,
            "return_token_ids": True, "return_tokens_as_token_ids": True, **inject.salted(body.salt),
        }  # fmt: skip

    def _reason(self, reason: str | None) -> FinishReason | None:
        if reason is None or reason in ENDS:
            return None if reason is None else ENDS[reason]
        code: wire.Code = "aborted" if reason == "abort" else "engine_failed"
        raise self._failure(code, f"the request ended with {reason!r}")


def _tokens(choice: _Choice, alternatives: int | None) -> Iterator[wire.TokenEvent]:
    ids, given = choice.token_ids or [], choice.logprobs
    if alternatives is None or given is None:
        yield from (wire.TokenEvent(token) for token in ids)
        return
    tops = given.top_logprobs or [None] * len(ids)
    if not len(ids) == len(given.token_logprobs) == len(tops):
        raise ProtocolError(f"{len(ids)} tokens came with {len(given.token_logprobs)} log-probabilities")
    for token, logprob, top in zip(ids, given.token_logprobs, tops, strict=True):
        ranked = sorted(((_id(name), value) for name, value in (top or {}).items()), key=lambda t: (-t[1], t[0]))
        yield wire.TokenEvent(token, logprob, ranked[:alternatives])


def _id(name: str) -> int:
    number = name.removeprefix(_NAMED)
    if number == name or not (number.isascii() and number.isdigit()):
        raise ProtocolError(f"a token is called {name[:40]!r}, not {_NAMED}N")
    return int(number)
