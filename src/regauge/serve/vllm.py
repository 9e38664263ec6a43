"""A vLLM server, asked by its own API: token ids in, token ids out, over `/v1/completions`, so that every route of the gateway is the same to it.

The gateway's part of the transfer travels in `kv_transfer_params["regauge"]` (`engines/vllm/schedule.py`). vLLM ends a request whose
connection closes, so that nothing else is needed to abort one. A decode engine whose prefill is gone computes the prompt itself: it gets
the request again, without a transfer. What became of a transfer vLLM cannot say in its answers: the connector's own status does.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, get_args

import aiohttp
import msgspec

from regauge.engines import status
from regauge.engines.vllm.schedule import PARAMS
from regauge.errors import ProtocolError, RegaugeError
from regauge.layout.spec import Layout
from regauge.move.state import Totals, WorkerState
from regauge.observe import ERROR, WORKER, get_logger
from regauge.plan.cost import Mode
from regauge.serve import wire
from regauge.serve.connection import Connection, Reply, WorkerError, WorkerLost

COMPLETIONS: Final = "/v1/completions"
HEALTH: Final = "/health"
MODELS: Final = "/v1/models"
STATUS_S: Final = 2.0
"""Most seconds for the status of a rank."""
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
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


class VllmClient(Connection):
    """One vLLM server with regauge's connector."""

    computes = True

    def __init__(
        self, address: wire.WorkerAddress, token: str, model: str, key: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> None:
        """`key`: of the transfer plane, and `tls` of its links: what its connector's status wants to see."""
        super().__init__(address, token)
        self._model = model
        self._shown = {"Authorization": wire.bearer(status.token(key))}
        self._tls = tls

    async def _health(self) -> wire.Health:
        async with self.call("GET", HEALTH, None) as answer:
            await self.refusal(answer, None)
        async with self.call("GET", MODELS, None) as answer:
            names = [each.id for each in (await self.read(answer, _Models, None)).data]
        if self._model not in names:
            served = ", ".join(names) or "nothing"
            reason = f"it serves {served}, not {self._model}: start it with --served-model-name {self._model}"
            raise WorkerLost(self.name, self.role, reason)
        if not self._told:
            return wire.Health("ok", self.role, self.name, 0, self._model)
        state = await self.debug(1, None)
        pages = sum(pool.quarantined for pool in state.pools)
        return wire.Health(
            "ok", self.role, self.name, state.pid, self._model, quarantined_pages=pages, transfers=state.totals
        )

    async def generate(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[wire.Event, None]:
        """As `Connection.generate`. Where `body.prefill` is empty the engine computes the prompt itself."""
        asked = self._body(body.token_ids, body.sampling) | {"stream": True}
        if body.prefill:
            asked["kv_transfer_params"] = {PARAMS: {"transfer": body.transfer_id, "from": body.prefill}}
        count, telling = 0, None
        try:
            async with self._ask(asked, body.request_id, deadline, headers) as answer:
                await self.refusal(answer, deadline)
                async with aclosing(self.parts(answer, b"\n\n", deadline)) as parts:
                    async for part in parts:
                        event = self._event(part)
                        if event is None or not event.choices:
                            continue
                        choice = event.choices[0]
                        for token in _tokens(choice, body.sampling.logprobs):
                            if not count and body.prefill and self._told:  # beside the stream: it has ended by now
                                telling = asyncio.create_task(self._arrival(body.transfer_id))
                            count += 1
                            yield token
                        if choice.finish_reason is not None:
                            if telling is not None and (arrival := await telling) is not None:
                                yield arrival
                            yield wire.FinishEvent(self._reason(choice.finish_reason), len(body.token_ids), count)
                            await self.drain(answer)
                            return
        finally:
            if telling is not None:
                telling.cancel()
        raise WorkerLost(self.name, self.role, "the stream ended before its finish reason")

    async def prefill(self, body: wire.Prefill, deadline: float, headers: Mapping[str, str]) -> wire.Prefilled:
        """As `Connection.prefill`; returns once the first token is there: what is still to be sent the engine sends by itself."""
        started = time.monotonic()
        sampling = msgspec.structs.replace(body.sampling, max_tokens=1, min_tokens=min(body.sampling.min_tokens, 1))
        asked = self._body(body.token_ids, sampling)
        asked["kv_transfer_params"] = {
            PARAMS: {"transfer": body.transfer_id, "to": body.decode, "handover": body.handover}
        }
        async with self._ask(asked, body.request_id, deadline, headers) as answer:
            reply = await self.read(answer, _Answer, deadline)
        told = (reply.kv_transfer_params or {}).get(PARAMS)
        if isinstance(told, dict) and told.get("error"):
            raise WorkerError(wire.ErrorEvent("transfer_failed", str(told["error"]), self.name), self.role)
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

    async def abort(self, request_id: str) -> bool:
        """Nothing: the request's connection has been closed, which ends it."""
        del request_id
        return False

    async def debug(self, limit: int, deadline: float | None) -> WorkerState:
        """As `Connection.debug`, of all ranks together."""
        if not self._told:
            message = "this vLLM server was given no status_port: nothing tells how its transfers stand"
            raise WorkerError(wire.ErrorEvent("bad_request", message, self.name), self.role)
        path = f"{status.STATUS_PATH}?limit={limit}"
        told = await asyncio.gather(*(self._status(rank, path, status.Status, deadline) for rank in self._told))
        states = [state for each in told for state in each.states if state.role == self.role]
        if not states:
            raise ProtocolError(f"{self.role} worker {self.name} tells of no {self.role} rank; see its kv_role")
        return _together(self.name, states)

    async def layout(self) -> Layout | None:
        """As `Connection.layout`, of rank 0: check takes it for all of them."""
        if not self._told:
            return None
        deadline = asyncio.get_running_loop().time() + STATUS_S
        told = await self._status(self._told[0], f"{status.STATUS_PATH}?limit=1", status.Status, deadline)
        return told.read_layout()

    async def refusal(self, answer: aiohttp.ClientResponse, deadline: float | None) -> None:
        """As `Connection.refusal`."""
        if answer.status == 200:
            return
        body = await self.within(answer.read(), deadline)
        try:
            problem = msgspec.json.decode(body, type=_Answer).error
        except (msgspec.DecodeError, RecursionError):
            problem = None
        message = problem.message if problem is not None else body[:200].decode("utf-8", "replace")
        code = _CODES.get(answer.status, "engine_failed")
        raise WorkerError(wire.ErrorEvent(code, message or f"HTTP {answer.status}", self.name), self.role)

    @property
    def _told(self) -> list[str]:
        return [rank.status for rank in self.address.ranks if rank.status]

    async def _status(self, rank: str, path: str, kind: type[Reply], deadline: float | None) -> Reply:
        async with self.call("GET", rank + path, deadline, headers=self._shown, secure=self._tls) as answer:
            return await self.read(answer, kind, deadline)

    async def _arrival(self, transfer: str) -> wire.TransferEvent | None:
        """Ask what became of a transfer. A failed one the engine has made up for: it is logged."""
        deadline = asyncio.get_running_loop().time() + STATUS_S
        path = f"{status.TRANSFERS_PATH}{transfer}"
        try:
            ends = await asyncio.gather(
                *(self._status(rank, path, status.TransferEnd, deadline) for rank in self._told)
            )
        except RegaugeError as error:
            get_logger(**{WORKER: self.name}).warning("the end of a transfer is not known", **{ERROR: str(error)})
            return None
        if failed := [end.error for end in ends if end.error]:
            get_logger(**{WORKER: self.name}).warning(
                "decode computed a prompt whose KV did not come", **{ERROR: failed[0]}
            )
            return None
        mode = next((m for m in get_args(Mode) for end in ends if m == end.mode), None)
        if mode is None:
            return None
        wire_bytes, seconds = sum(end.wire_bytes for end in ends), max(end.seconds for end in ends)
        return wire.TransferEvent(ends[0].path, mode, wire_bytes, 0, seconds)

    def _ask(self, asked: dict[str, Any], request_id: str, deadline: float, headers: Mapping[str, str]) -> Any:
        own = {**headers, "X-Request-Id": request_id}
        return self.call("POST", COMPLETIONS, deadline, msgspec.json.encode(asked), own)

    def _body(self, token_ids: list[int], sampling: wire.SamplingParams) -> dict[str, Any]:
        """Every parameter is said: vLLM would take those that are not from the model's generation_config.json."""
        return {
            "model": self._model, "prompt": token_ids, "max_tokens": sampling.max_tokens, "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p,
            "seed": None if sampling.seed is None else _signed(sampling.seed), "repetition_penalty": 1.0,
            "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": list(sampling.stop_token_ids), "ignore_eos": sampling.ignore_eos, "logprobs": sampling.logprobs,
            "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip

    def _event(self, part: bytes) -> _Answer | None:
        data = part.strip()
        if not data.startswith(_DATA):
            return None  # a comment that keeps the connection open
        data = data.removeprefix(_DATA).strip()
        if data == _DONE:
            return None
        try:
            event = msgspec.json.decode(data, type=_Answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"event of {self.role} worker {self.name}: {error}: {data[:80]!r}") from error
        if event.error is not None:
            raise WorkerError(wire.ErrorEvent("engine_failed", event.error.message, self.name), self.role)
        return event

    def _reason(self, reason: str) -> Any:
        if reason in {"stop", "length"}:
            return reason
        code: wire.Code = "aborted" if reason == "abort" else "engine_failed"
        raise WorkerError(wire.ErrorEvent(code, f"the request ended with {reason!r}", self.name), self.role)


def _together(name: str, ranks: Sequence[WorkerState]) -> WorkerState:
    first, totals = ranks[0], [rank.totals for rank in ranks]
    failed = Counter[str]()
    for each in totals:
        failed.update(each.failed)
    return msgspec.structs.replace(
        first, name=name,
        transfers=[x for rank in ranks for x in rank.transfers], links=[x for rank in ranks for x in rank.links],
        pools=[x for rank in ranks for x in rank.pools], sessions=[x for rank in ranks for x in rank.sessions],
        nics=[x for rank in ranks for x in rank.nics],
        totals=Totals(sum(t.delivered for t in totals), sum(t.wire_bytes for t in totals), dict(failed),
                      sum(t.resent for t in totals), sum(t.resumed for t in totals)),
    )  # fmt: skip


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


def _signed(seed: int) -> int:
    """vLLM takes 64 bits with a sign."""
    seed %= 1 << 64
    return seed - (1 << 64) if seed >> 63 else seed
