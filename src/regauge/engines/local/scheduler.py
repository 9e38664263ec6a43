"""Continuous batching on one model: which tokens of which requests are computed in the next step.

Every step takes the requests that decode (up to `max_batch`, in turn) and whole prompt chunks of waiting
requests, oldest first, up to `chunk_tokens`. A prompt is cut at the multiples of `chunk_tokens`, whoever shares the
step and wherever its computation starts, so that a prefill worker, one whose cache has its beginning, and a monolithic run cut it alike.

Synchronous, without threads or I/O; pages belong to the caller, who frees them when a request has ended.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from regauge.config import EngineConfig
from regauge.engines.local.model import KVStore, LocalModel, Segment
from regauge.engines.local.sampling import Sampler, SamplingParams
from regauge.engines.local.speed import Work
from regauge.errors import EngineError

FinishReason = Literal["stop", "length", "prefill", "error"]
OnLayer = Callable[[str, int, int, int], None]
"""Called with (request_id, layer, start, count): KV of these tokens of a prompt is now in the store."""
NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrives at this worker.

    `token_ids` followed by `generated` is the text so far. Its first `computed` tokens' KV is in `pages`
    already: a decode worker that received a prefilled prompt gives `computed=len(token_ids)` and the first
    token as `generated`; a worker that resumes a lost request gives all its tokens and `computed=0`.
    """

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    pages: npt.NDArray[np.int64]
    """Page table with room for every token whose KV will be written; see `pages_needed`."""
    arrived: float = 0.0
    """Time of arrival in seconds; earlier requests are prefilled first, equals in order of `add`."""
    computed: int = 0
    generated: tuple[int, ...] = ()
    prefill_only: bool = False
    """End after the first token, with finish reason "prefill" unless that token ends the answer anyhow."""


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of a request, or its failure."""

    request_id: str
    token: int
    """The token's id; NO_TOKEN when the request failed."""
    index: int
    """How many generated tokens came before this one, those of other workers included."""
    seed: int
    """Seed of the request's random stream: another worker goes on with it and the tokens so far."""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    """The likeliest tokens and their log-probabilities, if asked for."""
    finish_reason: FinishReason | None = None
    """None while the request goes on."""
    error: EngineError | None = None
    """Why it failed, with finish reason "error"."""


@dataclass(eq=False, slots=True)
class _Running:
    """A request that has been accepted."""

    request: Request
    sampler: Sampler
    tokens: list[int]
    computed: int
    sampled: bool = field(init=False)
    """Whether the text so far ends with a token that was sampled and only awaits its own computation."""

    def __post_init__(self) -> None:
        last = bool(self.request.generated) and self.computed == len(self.tokens) - 1
        self.sampled = last and not self.request.prefill_only  # else that token is part of what is to be delivered

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.token_ids)


def pages_needed(prompt: int, sampling: SamplingParams, page_size: int, *, prefill_only: bool = False) -> int:
    """Return the pages of a request of `prompt` tokens; the last token's own KV is never written."""
    written = prompt if prefill_only else prompt + sampling.max_tokens - 1
    return -(-written // page_size)


class Scheduler:
    """Runs requests on `model`, with their KV in `store`; used by one thread."""

    def __init__(self, model: LocalModel, store: KVStore, config: EngineConfig) -> None:
        self._model = model
        self._store = store
        self._config = config
        self.context = min(config.max_context, model.max_context)
        """Most tokens of one request, prompt and answer together."""
        self._all: dict[str, _Running] = {}
        self._waiting: list[_Running] = []
        self._decoding: deque[_Running] = deque()
        self.work = Work()
        """Of the last step."""

    @property
    def layers(self) -> int:
        """Layers of the model, as `on_layer` counts them."""
        return self._model.num_layers

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return bool(self._all)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return sum(entry.remaining for entry in self._waiting)

    @property
    def decoding(self) -> int:
        """Requests that decode."""
        return len(self._decoding)

    def add(self, request: Request) -> None:
        """Accept a request. Raises EngineError that names it and what is wrong, before anything runs."""
        if wrong := self._objection(request):
            raise EngineError(f"request {request.id!r}: {wrong}")
        entry = _Running(
            request=request,
            sampler=Sampler(request.sampling, generated=request.generated),
            tokens=[*request.token_ids, *request.generated],
            computed=request.computed,
        )
        self._all[request.id] = entry
        if entry.sampled:
            self._decoding.append(entry)
        else:
            bisect.insort(self._waiting, entry, key=lambda other: other.request.arrived)

    def abort(self, request_id: str) -> bool:
        """Forget a request; return whether it was there.

        May be called from `on_layer`. No later step touches the request's pages; a step that is under way may.
        """
        entry = self._all.pop(request_id, None)
        if entry is None:
            return False
        queue = self._decoding if entry in self._decoding else self._waiting
        queue.remove(entry)
        return True

    def step(self, on_layer: OnLayer | None = None) -> list[Output]:
        """Compute one step; return the new tokens and the failures of the requests that took part.

        A failure inside the model or in `on_layer` ends every request of the step, a failure to choose a token
        that request alone: their outputs carry the EngineError. Requests outside the step go on.
        """
        decoding = len(self._decoding)
        batch = self._choose()
        decoded = sum(entry.sampled for entry, _ in batch)
        self.work = Work(sum(count for entry, count in batch if not entry.sampled), decoded, decoding)
        if not batch:
            return []
        segments = [Segment(entry.request.id, entry.request.pages, entry.computed, count) for entry, count in batch]
        tokens = list(itertools.chain.from_iterable(e.tokens[e.computed : e.computed + count] for e, count in batch))
        prompts = [segment for segment, (entry, _) in zip(segments, batch, strict=True) if not entry.sampled]

        def layer_written(layer: int) -> None:
            for segment in prompts:
                if on_layer is not None and segment.request_id in self._all:
                    on_layer(segment.request_id, layer, segment.start, segment.count)

        try:
            logits = self._model.forward(tokens, segments, self._store, layer_written).numpy()
        except Exception as error:  # noqa: BLE001  # whatever broke, it is reported for each request of the step
            return [self._failed(entry, f"the model failed: {error}", error) for entry in self._alive(batch)]
        outputs = []
        for (entry, count), row in zip(batch, logits, strict=True):
            if self._all.get(entry.request.id) is entry:
                entry.computed += count
                if entry.remaining == 0:
                    outputs.append(self._advance(entry, row))
        return outputs

    def _choose(self) -> list[tuple[_Running, int]]:
        """Return the entries of the next step and their numbers of new tokens."""
        turn = min(self._config.max_batch, len(self._decoding))
        batch = [(entry, 1) for entry in itertools.islice(self._decoding, turn)]
        self._decoding.rotate(-turn)
        room = self._config.chunk_tokens
        for entry in self._waiting:
            count = min(self._config.chunk_tokens - entry.computed % self._config.chunk_tokens, entry.remaining)
            if count > room:
                break  # a shorter chunk would make the cuts depend on who else is here
            batch.append((entry, count))
            room -= count
        return batch

    def _advance(self, entry: _Running, logits: npt.NDArray[np.float32]) -> Output:
        """Sample the next token of an entry whose text so far is computed."""
        sampling, index = entry.request.sampling, entry.generated
        try:
            chosen = entry.sampler.sample(logits, self.stops(sampling) if index < sampling.min_tokens else ())
        except EngineError as error:
            return self._failed(entry, str(error), error)
        entry.tokens.append(chosen.token)
        reason = self._finish_reason(entry, chosen.token)
        if reason is not None:
            self.abort(entry.request.id)
        elif not entry.sampled:
            entry.sampled = True
            self._waiting.remove(entry)
            self._decoding.append(entry)
        return Output(
            request_id=entry.request.id,
            token=chosen.token,
            index=index,
            seed=entry.sampler.seed,
            logprob=chosen.logprob,
            top=chosen.top,
            finish_reason=reason,
        )

    def _finish_reason(self, entry: _Running, token: int) -> FinishReason | None:
        sampling, prompt = entry.request.sampling, len(entry.request.token_ids)
        ends = self.ends(sampling, token, prompt=prompt, generated=entry.generated)
        return "prefill" if ends is None and entry.request.prefill_only else ends

    def ends(
        self, sampling: SamplingParams, token: int, *, prompt: int, generated: int
    ) -> Literal["stop", "length"] | None:
        """Return why an answer of `generated` tokens ends with this one, if it does."""
        if token in self.stops(sampling):
            return "stop"
        return "length" if generated >= sampling.max_tokens or prompt + generated >= self.context else None

    def stops(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the tokens that end an answer."""
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self._model.eos_ids

    def _alive(self, batch: Iterable[tuple[_Running, int]]) -> list[_Running]:
        return [entry for entry, _ in batch if self._all.get(entry.request.id) is entry]

    def _failed(self, entry: _Running, message: str, cause: Exception) -> Output:
        self.abort(entry.request.id)
        error = EngineError(f"request {entry.request.id!r}: {message}")
        error.__cause__ = cause
        return Output(
            request_id=entry.request.id,
            token=NO_TOKEN,
            index=entry.generated,
            seed=entry.sampler.seed,
            finish_reason="error",
            error=error,
        )

    def _objection(self, request: Request) -> str | None:
        """Return what is wrong with a request, or None."""
        prompt, given, sampling = len(request.token_ids), len(request.generated), request.sampling
        if request.id in self._all:
            return "a request of this id is already running"
        if prompt == 0:
            return "the prompt is empty"
        if given >= sampling.max_tokens:
            return f"all {sampling.max_tokens} tokens of its answer are generated already"
        if prompt + given >= self.context:
            return f"{prompt + given} tokens leave no room for an answer in a context of {self.context}"
        if not 0 <= request.computed < prompt + given:
            return f"computed={request.computed} is outside 0 to {prompt + given - 1}, all but its last token"
        return self._token_objection(request) or self._page_objection(request)

    def _token_objection(self, request: Request) -> str | None:
        try:
            tokens = np.array((*request.token_ids, *request.generated), dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return "token ids must be integers"
        outside = tokens[(tokens < 0) | (tokens >= self._model.vocab)]
        if len(outside):
            return f"token id {outside[0]} is outside the vocabulary of {self._model.vocab}"
        return None

    def _page_objection(self, request: Request) -> str | None:
        text = len(request.token_ids) + len(request.generated)
        prompt = text if request.prefill_only else len(request.token_ids)
        size = self._store.page_size
        needed = pages_needed(prompt, request.sampling, size, prefill_only=request.prefill_only)
        needed = min(needed, -(-(self.context - 1) // size))
        if len(request.pages) < needed:
            return f"its page table has {len(request.pages)} pages, but its tokens take {needed}"
        return None
