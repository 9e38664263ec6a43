"""Runs documents through a model on one KV pool or across two: prefill, crossing, teacher-forced answers.

A token of the answer is computed from the pool alone: its key and value are written in the pool's dtype, and what it attends to is read back
from there. So the tokens of an answer are computed together, each as a segment of its own that sees no further than itself, which is what
decoding one by one would give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from regauge.engines.local.kv import PagedKV, allocate, dense
from regauge.engines.local.model import LocalModel, Segment
from regauge.layout.presets import with_pages
from regauge.layout.spec import Layout
from regauge.move import kernels
from regauge.move.bound import Memory
from regauge.plan import Side, compile, instantiate

Logits = npt.NDArray[np.float32]
Values = Mapping[str, npt.NDArray[np.float32]]

CHUNK: Final = 256


class Bench:
    """All documents on one model. `texts` have one length; their first `prompt` tokens are prefill's, the last of which decode computes."""

    def __init__(self, model: LocalModel, texts: Sequence[Sequence[int]], prompt: int) -> None:
        self._model = model
        self._texts = texts
        self._prompt = prompt
        self._tokens = len(texts[0])

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self._texts)

    def prefill(self, layout: Layout) -> Memory:
        """Compute all tokens before the last of the prompt into new memory, whose slab the caller closes."""
        memory = self._allocate(layout)
        for index, ids in enumerate(self._texts):
            store = self._store(memory, CHUNK)
            for at in range(0, self._prompt - 1, CHUNK):
                stop = min(at + CHUNK, self._prompt - 1)
                self._model.forward(
                    ids[at:stop], [Segment(str(index), self._pages(memory, index), at, stop - at)], store
                )
        return memory

    def cross(self, source: Memory, target: Layout, declared: Layout | None = None) -> Memory:
        """Carry what `prefill` computed into new memory of the target layout, whose slab the caller closes.

        `declared` is what the receiver takes the source's layout for; the source's own unless a mistake is to be shown.
        """
        memory = self._allocate(target)
        plan = compile(self._sized(declared) if declared is not None else source.layout, memory.layout)
        for index in range(self.documents):
            src, dst = (Side(self._pages(m, index), m.bases) for m in (source, memory))
            kernels.run(instantiate(plan, src, dst, (0, self._prompt - 1)))
        return memory

    def answer(self, memory: Memory) -> Logits:
        """Return the logits that predict each token after the prompt, float32[documents, answer, vocab]."""
        out = []
        first, end = self._prompt - 1, self._tokens - 1
        for index, ids in enumerate(self._texts):
            pages = self._pages(memory, index)
            segments = [Segment(f"{index}.{at}", pages, at, 1) for at in range(first, end)]
            out.append(self._model.forward(ids[first:end], segments, self._store(memory, end - first)).numpy())
        return np.stack(out)

    def wanted(self) -> npt.NDArray[np.int64]:
        """Return the documents' own tokens after the prompt, int64[documents, answer]."""
        return np.array([ids[self._prompt :] for ids in self._texts], np.int64)

    def values(self, memory: Memory, index: int) -> Values:
        """Return what a document's prompt means in memory: by component, float32[layers, tokens, heads, dim]."""
        (group,) = memory.layout.groups
        count = self._prompt - 1
        shapes = {c.name: (len(group.layer_ids), count, c.heads, c.dim) for c in group.components}
        out = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        bases = {name: array.ctypes.data for name, array in out.items()}
        plan = compile(memory.layout, dense(memory.layout, "float32", count, "layer page token head dim"))
        src, dst = Side(self._pages(memory, index), memory.bases), Side(np.zeros(1, np.int64), bases)
        kernels.run(instantiate(plan, src, dst, (0, count)))
        return out

    def _sized(self, layout: Layout) -> Layout:
        groups = [msgspec.structs.replace(g, pages=0) for g in layout.groups]
        page = max(g.page_size for g in groups)
        return with_pages(msgspec.structs.replace(layout, groups=groups), self.documents * (self._tokens + page))

    def _allocate(self, layout: Layout) -> Memory:
        return allocate(self._sized(layout))

    def _pages(self, memory: Memory, index: int) -> npt.NDArray[np.int64]:
        count = -(-self._tokens // memory.layout.groups[0].page_size)
        return np.arange(index * count, (index + 1) * count)

    def _store(self, memory: Memory, max_new: int) -> PagedKV:
        return PagedKV(memory, dtype=self._model.dtype, max_new=max_new, max_context=self._tokens)
