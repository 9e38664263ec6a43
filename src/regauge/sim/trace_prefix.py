"""Names of prefixes, made from what a trace has: ids of contents, or counts of tokens that came before.

A name stands for a whole prompt up to a block's end, so two prompts share exactly the names of what they share. Only whole blocks have one.
"""

from __future__ import annotations

from collections.abc import Sequence


class Prefixes:
    """Prefixes by the contents of their blocks, numbered as they are first seen."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], int] = {}

    def chain(self, contents: Sequence[int], step: int = 1, scope: int = 0) -> tuple[int, ...]:
        """Return the names of a prompt's prefixes, one for every `step` contents; the rest is a partial block and has none.

        Contents are compared within a scope (0 or more), as ids of a session are.
        """
        names, before = self._names, -1 - scope
        chained = []
        for begin in range(0, len(contents) - step + 1, step):
            before = names.setdefault((before, *contents[begin : begin + step]), len(names))
            chained.append(before)
        return tuple(chained)


class Numbers:
    """Fresh names for all sessions of a trace."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, count: int) -> range:
        """Return so many names that nothing has yet."""
        self._next += count
        return range(self._next - count, self._next)


class History:
    """The prompts of one session, by lengths: so many tokens, of which so many came before in the session."""

    def __init__(self, numbers: Numbers, block: int) -> None:
        self._numbers, self._block = numbers, block
        self._prompts: list[tuple[int, ...]] = []

    def prompt(self, tokens: int, before: int) -> tuple[int, ...]:
        """Return the names of a prompt's whole blocks, the first `before` tokens shared with the latest prompt that is as long.

        Where none is (an answer was cached too), with the longest: only prompts are known here to have been computed.
        """
        whole, shared = tokens // self._block, min(before, tokens) // self._block
        prompts = self._prompts
        fits = next((each for each in reversed(prompts) if len(each) >= shared), None)
        if fits is None:
            fits = max(prompts, key=len, default=())
        kept = fits[:shared]
        names = (*kept, *self._numbers.fresh(whole - len(kept)))
        prompts.append(names)
        return names
