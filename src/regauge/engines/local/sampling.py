"""How the next token is chosen from the logits.

The random stream of a request is counter-based: the number that decides token `n` depends on the request's
seed and on `n` alone. A request can therefore move to another process after any token and go on exactly as it
would have gone on where it was.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from regauge.errors import EngineError

MAX_LOGPROBS: Final = 20
GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below this one are taken as 0: the quotient would leave the range of the arithmetic."""
_HEAD: Final = 1024
"""top_p looks at this many of the likeliest tokens before it sorts the whole vocabulary."""
_WORD: Final = 1 << 64

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class SamplingError(EngineError, ValueError):
    """A sampling parameter is out of range; `field` is its name.

    It is a ValueError too, so that msgspec reports it as a ValidationError with the path of the struct.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a request's tokens are chosen and when they end. Raises SamplingError that names the field."""

    max_tokens: int
    """Most tokens to generate, at least one."""
    temperature: float = 1.0
    """0 picks the likeliest token (the lowest id of equals)."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities add up to this share; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Keep the tokens at least this fraction as likely as the likeliest."""
    seed: int | None = None
    """Start of the random stream, taken modulo 2^64; None draws one from the operating system."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the model's own."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""
    logprobs: int | None = None
    """Report the token's log-probability and those of this many likeliest tokens (0 to 20)."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token already generated (-2 to 2)."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit once for every time that it was generated (-2 to 2)."""
    min_tokens: int = 0
    """Tokens before which no token that ends the answer is chosen."""

    def __post_init__(self) -> None:
        _need("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        finite = math.isfinite(self.temperature)
        _need("temperature", self.temperature, finite and self.temperature >= 0, "0 or more")
        _need("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _need("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _need("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        if self.seed is not None:
            _need("seed", self.seed, -_WORD // 2 <= self.seed < _WORD, "a 64-bit integer")
        if self.logprobs is not None:
            _need("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _need(name, value, -2 <= value <= 2, "-2 to 2")
        _need("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "0 to max_tokens")
        for token in self.stop_token_ids:
            _need("stop_token_ids", token, token >= 0, "token ids, 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1


def _need(field: str, value: object, right: bool, range_text: str) -> None:
    if not right:
        raise SamplingError(field, f"{value!r} is out of range; give {range_text}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token; `logprob` and `top` are None unless asked for.

    Log-probabilities are natural logarithms of the model's own distribution, before temperature, cuts and
    penalties.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


class Sampler:
    """Chooses one request's tokens.

    A sampler made elsewhere from the same parameters, `seed` and tokens `generated` so far goes on with
    exactly the same stream.
    """

    def __init__(self, params: SamplingParams, *, seed: int | None = None, generated: Sequence[int] = ()) -> None:
        chosen = params.seed if seed is None else seed
        self.params = params
        self.seed = int.from_bytes(os.urandom(8), "little") if chosen is None else chosen % _WORD
        self._counts = Counter(generated)
        self._position = len(generated)

    @property
    def position(self) -> int:
        """Number of tokens chosen so far, those before a hand-over included."""
        return self._position

    def sample(self, logits: npt.NDArray[np.float32], banned: Collection[int] = ()) -> Sampled:
        """Choose the next token from `logits` ([vocab], float32), never one of `banned`.

        Raises EngineError when the logits are not finite, or nothing is left to choose from.
        """
        if not math.isfinite(float(logits.max())):
            raise EngineError("the model's logits are not finite: its weights or its KV cache are damaged")
        scores = self._penalised(logits, banned)
        if scores.max() == -np.inf:
            raise EngineError("every token is banned: nothing is left to choose from")
        if self.params.greedy:
            token = int(scores.argmax())
        else:
            ids, shares = candidates(scores, self.params)
            token = _pick(ids, shares, waits(self.seed, self._position, len(scores)))
        self._counts[token] += 1
        self._position += 1
        if self.params.logprobs is None:
            return Sampled(token, None, None)
        logprob, top = _logprobs(logits, token, self.params.logprobs)
        return Sampled(token, logprob, top)

    def _penalised(self, logits: npt.NDArray[np.float32], banned: Collection[int]) -> npt.NDArray[np.float32]:
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        penalise = bool(self._counts) and (presence != 0 or frequency != 0)
        if not penalise and not banned:
            return logits
        scores = logits.copy()
        if penalise:
            tokens = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            scores[tokens] -= (presence + frequency * counts).astype(np.float32)
        if banned:
            scores[[token for token in banned if token < len(scores)]] = -np.inf
        return scores


def waits(seed: int, position: int, count: int) -> Floats:
    """Return the exponential waiting times, one for each of the first `count` token ids, that decide token `position` of stream `seed`.

    Of the upper 53 bits u of the id's word of Philox 4x64-10, key `seed`, counter from `position` x 2^64 on: -ln((u + 1/2) / 2^53).
    """
    words = np.random.Philox(key=seed, counter=position << 64).random_raw(count)
    numbers: Floats = np.log(((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)
    return -numbers


def candidates(scores: npt.NDArray[np.float32], params: SamplingParams) -> tuple[Ids, Floats]:
    """Return the ids that may be chosen, ascending, and their probabilities (they add up to 1).

    The cuts follow one another on what the last one left, renormalised: temperature, min_p, top_k, top_p.
    Of equally likely tokens those with lower ids are kept. `scores` is [vocab], float32.
    """
    scaled = scores.astype(np.float64)
    scaled -= scaled.max()
    scaled /= params.temperature
    weights = np.exp(scaled)
    ids: Ids = np.flatnonzero(weights >= max(params.min_p, np.finfo(np.float64).tiny))
    if 0 < params.top_k < len(ids):
        ids = ids[_largest(weights[ids], params.top_k)]
    if params.top_p < 1:
        ids = ids[_nucleus(weights[ids], params.top_p)]
    kept = weights[ids]
    return ids, kept / kept.sum()


def _largest(weights: Floats, count: int) -> Ids:
    """Return the places of the `count` largest weights, ascending; of equals the first."""
    bound = np.partition(weights, -count)[-count]
    above = np.flatnonzero(weights > bound)
    equal = np.flatnonzero(weights == bound)[: count - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _nucleus(weights: Floats, share: float) -> Ids:
    """Return the places, ascending, of the fewest largest weights that make up `share` of their sum."""
    goal = share * weights.sum()
    size = min(len(weights), _HEAD)
    while True:
        head = _largest(weights, size) if size < len(weights) else np.arange(len(weights))
        order = head[np.argsort(-weights[head], kind="stable")]
        reached = int(np.searchsorted(np.cumsum(weights[order]), goal))
        if reached < len(order) or size == len(weights):
            return np.sort(order[: reached + 1])
        size = len(weights)


def _pick(ids: Ids, shares: Floats, times: Floats) -> int:
    """Return the id that comes first, where each has a rate of its share: each with the chance of its share (the exponential race, as Gumbel's trick).

    Each id has a number of its own, so that arithmetic which rounds otherwise on another worker, or in another batch, changes the choice only where two are
    as good as equal. With one number for all, the place of every edge between tokens would matter.
    """
    return int(ids[np.argmin(times[ids] / shares)])


def _logprobs(logits: npt.NDArray[np.float32], token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= math.log(float(np.exp(exact).sum()))
    places = _largest(exact, min(count, len(exact))) if count else np.empty(0, np.int64)
    order = places[np.argsort(-exact[places], kind="stable")]
    return float(exact[token]), tuple((int(place), float(exact[place])) for place in order)
