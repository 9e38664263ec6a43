"""One answer to one prompt: what is asked for, and how its tokens become text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from regauge.engines.local.sampling import SamplingParams
from regauge.serve import wire
from regauge.serve.replies import Delta, TokenInfo
from regauge.serve.text import Detokenizer, StopScanner, Tokenizer


@dataclass(frozen=True)
class Choice:
    """One answer to be made: its place among the answers, its prompt and how to sample it."""

    index: int
    prompt: int
    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]


class ChoiceText:
    """Tokens of one choice to deltas; holds log-probabilities back with the text they belong to.

    The tokens of several workers go through one: where decode was lost, another goes on from `tokens`.
    """

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self.tokens: list[int] = []
        """All that was generated."""
        self.ttft_s: float | None = None
        self._choice = choice
        self._detokenizer = Detokenizer(tokenizer, choice.token_ids)
        self._scanner = StopScanner(choice.stops)
        self._keep = choice.sampling.logprobs is not None
        self._infos: list[TokenInfo] = []
        self._chars = 0

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    def push(self, event: wire.TokenEvent) -> Delta | None:
        """Take a token; return what it adds, with `finish` if a stop string is complete."""
        self.tokens.append(event.token)
        if self._keep:
            self._infos.append(TokenInfo(event, self._chars))
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
        infos, self._infos = tuple(self._infos), []
        return Delta(self._choice.index, text, infos, finish, stopped)
