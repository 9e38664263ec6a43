"""The embedded engine, in this process, as it is measured: one scheduler on a pool of its own, without a gateway or a transfer."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from regauge.config import EngineConfig
from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import LocalModel
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import Request, Scheduler
from regauge.engines.speeds import Step
from regauge.errors import ConfigError, EngineError
from regauge.layout.presets import with_pages
from regauge.layout.spec import Layout


class TimedEngine:
    """A `speeds.Subject`. `tokens` is the size of its pool. A context manager: it owns the pool.

    A decode step is measured over pages that nothing was prefilled into: what lies there changes the answer, and not the time.
    Raises ConfigError for a layout that the engine cannot have, and for requests beyond the model's context.
    """

    def __init__(
        self, model: LocalModel, layout: Layout, *, longest: int, tokens: int, batch: int, config: EngineConfig
    ) -> None:
        if longest > model.max_context:
            raise ConfigError(
                f"{longest} tokens in a request: the model's context is {model.max_context}; ask for fewer"
            )
        page = layout.groups[0].page_size
        sized = with_pages(layout, tokens + batch * page)  # a page of each request is not full
        if sized.groups[0].pages * page < tokens + batch * page:
            raise ConfigError(
                f"the layout has {sized.groups[0].pages} pages of {page} tokens, and {tokens} tokens are measured: leave its pages out"
            )
        self._page, self._vocab = page, model.vocab
        self._memory = allocate(sized, "timed")
        self._rng = random.Random(0)  # noqa: S311  # prompts, no secrets
        try:
            store = PagedKV(self._memory, dtype=model.dtype, max_new=config.chunk_tokens + batch, max_context=longest)
        except BaseException:  # whatever broke, the memory is given back, and the error goes on
            self._memory.slab.close()
            raise
        given = EngineConfig(max_context=longest, max_batch=batch, chunk_tokens=config.chunk_tokens)
        self._scheduler = Scheduler(model, store, given)
        self._count = 0

    async def prefill(self, tokens: int) -> float:
        """Return the seconds of computing a prompt; see `Subject`."""
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        request = Request(self._name(), self._ids(tokens), sampling, self._pages([tokens])[0], prefill_only=True)
        begun = time.perf_counter()
        self._scheduler.add(request)
        while self._scheduler.has_work:
            self._step()
        return time.perf_counter() - begun

    async def decode(self, batch: int, context: int, steps: int) -> Step:
        """Return the time of a step; see `Subject`. One step more goes before, and is not counted."""
        sampling = SamplingParams(max_tokens=steps + 2, temperature=0, ignore_eos=True)
        tables = self._pages([context + steps + 2] * batch)
        names = [self._name() for _ in range(batch)]
        for name, pages in zip(names, tables, strict=True):
            ids = self._ids(context)
            self._scheduler.add(Request(name, ids, sampling, pages, computed=context, generated=ids[:1]))
        self._step()
        begun = time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds = (time.perf_counter() - begun) / steps
        for name in names:
            self._scheduler.abort(name)
        return Step(seconds, batch * (context + 1 + steps / 2))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.slab.close()

    def _step(self) -> None:
        for output in self._scheduler.step():
            if output.error is not None:
                raise EngineError(str(output.error)) from output.error

    def _name(self) -> str:
        self._count += 1
        return f"timed-{self._count}"

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab) for _ in range(count))

    def _pages(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """Return page tables that share nothing, from the pool's first page on."""
        found, at = [], 0
        for each in tokens:
            count = -(-each // self._page)
            found.append(np.arange(at, at + count, dtype=np.int64))
            at += count
        return found
