"""A server with the OpenAI API, as it is measured: streamed completions over HTTP, so that what its API adds counts, too."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp

from regauge.engines.speeds import Step
from regauge.engines.streaming import Answer, Endpoint, ask
from regauge.errors import ConfigError, EngineError

IDS: Final = (1_000, 10_000)
"""Token ids that prompts are made of, first and end: words of any vocabulary of tens of thousands."""
EACH: Final = 64
"""Tokens that an answer may have while each of the others' prompts is computed."""


class TimedServer:
    """A `speeds.Subject`. `answer` bounds the tokens of an answer, most of which come while the others' prompts are computed; 0: 64 for each of the batch.

    Raises EngineError where the server refuses or answers otherwise than asked: other prompt lengths, tokens from its cache.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        to: Endpoint,
        *,
        ids: tuple[int, int] = IDS,
        answer: int = 0,
        seed: int = 0,
    ) -> None:
        if not 0 <= ids[0] < ids[1]:
            raise ConfigError(f"ids {ids[0]}-{ids[1]}: give the first token id and the end, as 1000-10000")
        self._session, self._to, self._ids, self._answer = session, to, ids, answer
        self._rng = random.Random(seed)  # noqa: S311  # prompts, no secrets

    async def prefill(self, tokens: int) -> float:
        """Return the time to the first token of a prompt that is alone; see `Subject`."""
        answer = await ask(self._session, self._to, self._prompt(tokens), 2)
        self._check(answer, tokens)
        return answer.ttft_s

    async def decode(self, batch: int, context: int, steps: int) -> Step:
        """Return the time between tokens while all of a batch decode; see `Subject`.

        Measured is from when the last of them has its first token until each has had `steps` more; then they are cancelled.
        """
        pieces: list[list[float]] = [[] for _ in range(batch)]
        longest = self._answer or steps + EACH * batch
        enough = asyncio.Event()

        def took(mine: list[float]) -> Callable[[float], None]:
            def piece(at: float) -> None:
                mine.append(at)
                if all(pieces) and _after(pieces, max(each[0] for each in pieces)) >= steps:
                    enough.set()

            return piece

        asked = [
            asyncio.create_task(ask(self._session, self._to, self._prompt(context), longest, piece=took(mine)))
            for mine in pieces
        ]
        waiter = asyncio.create_task(enough.wait())
        try:
            await asyncio.wait([waiter, *asked], return_when=asyncio.FIRST_COMPLETED)
            if not enough.is_set():
                for each in asked:
                    if each.done():
                        each.result()
                raise EngineError(
                    f"{self._to.url}: an answer of {longest} tokens ended before all {batch} decoded together: "
                    "ask for a longer --answer, or a smaller batch or context"
                )
        finally:
            for task in (waiter, *asked):
                task.cancel()
            await asyncio.gather(waiter, *asked, return_exceptions=True)
        return together(pieces, context)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(*self._ids) for _ in range(tokens)]

    def _check(self, answer: Answer, tokens: int) -> None:
        if answer.prompt not in (0, tokens):
            raise EngineError(
                f"{self._to.url}: counts {answer.prompt} tokens in a prompt of {tokens} ids: it adds some of its own"
            )
        if answer.cached:
            raise EngineError(
                f"{self._to.url}: {answer.cached} tokens of a new prompt were cached: its cache counts otherwise"
            )


def _after(pieces: list[list[float]], start: float) -> int:
    """Return the fewest pieces that a request has had since."""
    return min(sum(at > start for at in each) for each in pieces)


def together(pieces: Sequence[Sequence[float]], context: int) -> Step:
    """Return the mean time between tokens from the last request's first one on."""
    start = max(each[0] for each in pieces)
    end = min(each[-1] for each in pieces)
    counted = [sum(start < at <= end for at in each) for each in pieces]
    before = [sum(at <= start for at in each) for each in pieces]
    resident = sum(context + b + c / 2 for b, c in zip(before, counted, strict=True))
    return Step((end - start) * len(pieces) / sum(counted), resident)
