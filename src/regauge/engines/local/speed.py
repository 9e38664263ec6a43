"""How fast an engine is, measured over the steps that it really runs. Pure: steps and their seconds go in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MEMORY_S: Final = 20.0
"""Seconds of computing after which what was measured counts 1/e: idle time does not make it old."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computed."""

    prompt_tokens: int = 0
    decoded: int = 0
    """Requests that got their next token."""
    decoding: int = 0
    """Requests that decode, those included whose turn it was not."""


class Speed:
    """Means over the last steps, weighted by their seconds (prompts) and by their tokens (decoding).

    A step that does both counts for both with all its seconds: so long took its prompt tokens, and so long waited whoever decodes.
    """

    def __init__(self, memory_s: float = MEMORY_S) -> None:
        self._memory_s = memory_s
        self._prompt_tokens = self._prompt_s = 0.0
        self._decoded = self._waited_s = 0.0

    def add(self, work: Work, seconds: float) -> None:
        """Take in a step of so many seconds."""
        keep = math.exp(-seconds / self._memory_s)
        if work.prompt_tokens:
            self._prompt_tokens = keep * self._prompt_tokens + work.prompt_tokens
            self._prompt_s = keep * self._prompt_s + seconds
        if work.decoded:
            self._decoded = keep * self._decoded + work.decoded
            self._waited_s = keep * self._waited_s + seconds * work.decoding  # all wait, also for their turn

    def fade(self, share: float) -> None:
        """Have what was measured so far count less against what comes."""
        self._prompt_tokens *= share
        self._prompt_s *= share
        self._decoded *= share
        self._waited_s *= share

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per second; 0 before the first."""
        return self._prompt_tokens / self._prompt_s if self._prompt_s > 0 else 0.0

    @property
    def tpot_s(self) -> float:
        """Seconds from a token of a request to its next; 0 before the first."""
        return self._waited_s / self._decoded if self._decoded > 0 else 0.0
