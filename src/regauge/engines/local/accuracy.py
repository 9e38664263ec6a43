"""What a crossing does to a model's answers: next-token agreement, KL divergence and perplexity.

For every document the first tokens are computed on the prefill layout, their KV crosses, and the tokens after them are teacher-forced
on the decode layout. The control is the same engine on the decode layout without a transfer; perplexity on a float32 pool
stands beside both. A DIRECT or REMAP pair of the same dtype must agree with its control in every bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from regauge.config import cache_dir
from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import LocalModel, Segment
from regauge.engines.local.prepare import prepare
from regauge.errors import ConfigError
from regauge.layout.presets import load_layout, load_model, load_model_dtype, with_pages
from regauge.layout.spec import Layout
from regauge.move import kernels
from regauge.move.crossing import Memory
from regauge.plan import Side, check, compile, instantiate

Say = Callable[[str], None]
Logits = npt.NDArray[np.float32]

DEFAULT_PAIRS = (
    ("bf16,page=64,hnd", "bf16,page=16,nhd"),
    ("bf16", "fp8_e4m3,page=64,hnd"),
    ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd"),
    ("bf16", "fp8_e4m3,page=64,hnd,scale=token_head"),
    ("bf16", "fp8_e5m2"),
)
DOCUMENTS = 8
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One pair's result. `agreement` is a share of positions; KL is in nats, the mean over positions."""

    prefill: str
    decode: str
    path: str
    positions: int
    agreement: float
    kl: float
    perplexity: float
    perplexity_control: float
    perplexity_float32: float


def pairs(prefill: Sequence[str] | None, decode: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Pair the two lists of layouts; the default pairs if both are empty. Raises ConfigError for unequal lengths."""
    if not prefill and not decode:
        return DEFAULT_PAIRS
    if len(prefill or ()) != len(decode or ()):
        raise ConfigError("give --decode-layout as many times as --prefill-layout")
    return tuple(zip(prefill or (), decode or (), strict=True))


def measure(
    model: str, chosen: Sequence[tuple[str, str]], text: str | None, prompt: int, answer: int, say: Say
) -> list[Row]:
    """Measure pairs on documents of `prompt` + `answer` tokens. Raises ConfigError, LayoutError, EngineError or Refused."""
    if prompt < 1 or answer < 1:
        raise ConfigError("--prompt-tokens and --answer-tokens are at least 1")
    folder = prepare(model, cache_dir(), say)
    engine = LocalModel(folder, os.cpu_count() or 1)  # nothing else runs beside it
    bench = Bench(engine, documents(folder, text, prompt + answer), prompt)
    base, dtype = load_model(str(folder)), load_model_dtype(str(folder))
    plain = bench.run(load_layout("fp32", base), None)
    controls: dict[str, Logits] = {}
    rows = []
    for a, b in chosen:
        say(f"measuring {a} -> {b}")
        prefill, decode = (load_layout(text, base, model_dtype=dtype) for text in (a, b))
        path = check(prefill, decode).path
        if b not in controls:
            controls[b] = bench.run(decode, None)
        crossed = bench.run(prefill, decode)
        agreement = float((crossed.argmax(-1) == controls[b].argmax(-1)).mean())
        rows.append(Row(a, b, path, crossed.shape[0] * crossed.shape[1], agreement, _kl(controls[b], crossed),
                        bench.perplexity(crossed), bench.perplexity(controls[b]), bench.perplexity(plain)))  # fmt: skip
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    out = [
        "| prefill | decode | path | agreement | mean KL | perplexity | control | float32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r.prefill} | {r.decode} | {r.path} | {r.agreement:.2%} | {r.kl:.5f} | {r.perplexity:.3f} "
        f"| {r.perplexity_control:.3f} | {r.perplexity_float32:.3f} |"
        for r in rows
    ]
    return "\n".join([*out, f"\n{rows[0].positions} positions; control: the decode layout without a transfer"])


def documents(folder: Path, text: str | None, tokens: int) -> list[list[int]]:
    """Return documents of exactly that many tokens. Raises ConfigError when the text is too short for one.

    Without a file, the reference topics that come with Python: real English prose on every machine.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if text is not None:
        try:
            sources = Path(text).read_text(encoding="utf-8").split("\n\n\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {text}: {error}") from error
    else:
        from pydoc_data.topics import topics

        sources = [topics[name] for name in sorted(topics)]
    found = []
    for source in sources:
        ids = tokenizer.encode(" ".join(source.split())[: tokens * 12])
        if len(ids) >= tokens:
            found.append(list(ids[:tokens]))
        if len(found) == DOCUMENTS:
            break
    if not found:
        raise ConfigError(
            f"no document has {tokens} tokens: lower --prompt-tokens and --answer-tokens, or give more text"
        )
    return found


class Bench:
    """Runs all documents together, on one pool or across two."""

    def __init__(self, model: LocalModel, texts: list[list[int]], prompt: int) -> None:
        self._model = model
        self._texts = texts
        self._prompt = prompt
        self._tokens = len(texts[0])

    def run(self, first: Layout, second: Layout | None) -> Logits:
        """Return the logits that predict each token after the prompt, float32[answer, documents, vocab]."""
        need = len(self._texts) * (self._tokens + max(g.page_size for x in (first, second or first) for g in x.groups))
        with_source = with_pages(first, need)
        source = allocate(with_source)
        target = source if second is None else allocate(with_pages(second, need))
        try:
            self._compute(source, 0, self._prompt - 1)
            if second is not None:
                self._cross(source, target)
            return np.stack([self._compute(target, at, at + 1) for at in range(self._prompt - 1, self._tokens - 1)])
        finally:
            source.slab.close()
            target.slab.close()

    def perplexity(self, logits: Logits) -> float:
        """Return exp of the mean negative log-likelihood of the documents' own tokens."""
        wanted = np.array([[t[at] for t in self._texts] for at in range(self._prompt, self._tokens)])
        logs = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        return float(np.exp(-np.take_along_axis(logs, wanted[..., None], -1).mean()))

    def _pages(self, memory: Memory, index: int) -> npt.NDArray[np.int64]:
        size = memory.layout.groups[0].page_size
        count = -(-self._tokens // size)
        return np.arange(index * count, (index + 1) * count)

    def _compute(self, memory: Memory, start: int, end: int) -> Logits:
        """Compute tokens [start, end) of every document in chunks; return the last logits, float32[documents, vocab]."""
        single = end - start == 1
        store = self._store(memory, len(self._texts) if single else CHUNK)
        groups = [list(range(len(self._texts)))] if single else [[i] for i in range(len(self._texts))]
        out = [np.empty(0, np.float32)] * len(self._texts)
        for members in groups:
            for at in range(start, end, CHUNK):
                stop = min(at + CHUNK, end)
                segments = [Segment(str(i), self._pages(memory, i), at, stop - at) for i in members]
                ids = [token for i in members for token in self._texts[i][at:stop]]
                logits = self._model.forward(ids, segments, store).numpy()
                for i, row in zip(members, logits, strict=True):
                    out[i] = row
        return np.stack(out) if end > start else np.empty((0, 0), np.float32)

    def _store(self, memory: Memory, max_new: int) -> PagedKV:
        return PagedKV(memory, dtype=self._model.dtype, max_new=max_new, max_context=self._tokens)

    def _cross(self, source: Memory, target: Memory) -> None:
        plan = compile(source.layout, target.layout)
        for i in range(len(self._texts)):
            src, dst = Side(self._pages(source, i), source.bases), Side(self._pages(target, i), target.bases)
            kernels.run(instantiate(plan, src, dst, (0, self._prompt - 1)))


def _kl(control: Logits, crossed: Logits) -> float:
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (control, crossed))
    return float((p.exp() * (p - q)).sum(-1).mean())
