"""From logits and values to figures. Log-probabilities are computed in float64, document by document."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regauge.engines.local.accuracy.bench import Bench, Logits
from regauge.move.bound import Memory
from regauge.plan.quality import Figures


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return log-probabilities over the last axis, float64[...]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def perplexity(logits: Logits, wanted: npt.NDArray[np.int64]) -> float:
    """Return exp of the mean negative log-likelihood of `wanted`, int64[documents, answer]."""
    logs = [np.take_along_axis(log_softmax(rows), ids[:, None], -1) for rows, ids in zip(logits, wanted, strict=True)]
    return float(np.exp(-np.mean(logs)))


def compare(control: Logits, crossed: Logits, control_perplexity: float) -> Figures:
    """Return agreement and KL(control || crossed) over all positions; logits are float32[documents, answer, vocab]."""
    agree, divergences = [], []
    for a, b in zip(control, crossed, strict=True):
        agree.append(a.argmax(-1) == b.argmax(-1))
        p, q = log_softmax(a), log_softmax(b)
        divergences.append((np.exp(p) * (p - q)).sum(-1))
    kl = np.concatenate(divergences)
    # Rounding can leave a sum of differences just below zero. numpy's maximum, unlike Python's, lets NaN through: it must fail the gate.
    mean, most = (float(np.maximum(x, 0.0)) for x in (kl.mean(), kl.max()))
    return Figures(float(np.mean(agree)), mean, most, control_perplexity)


def errors(bench: Bench, source: Memory, target: Memory) -> dict[str, list[float]]:
    """Return, by component, the relative error of each layer: norm of (target - source) by norm of source, of all documents."""
    sums: dict[str, Sequence[npt.NDArray[np.float64]]] = {}
    for index in range(bench.documents):
        held, read = bench.values(source, index), bench.values(target, index)
        for name, values in held.items():
            wide = values.astype(np.float64)
            parts = [(x**2).sum(axis=(1, 2, 3)) for x in (read[name] - wide, wide)]
            sums[name] = [a + b for a, b in zip(sums[name], parts, strict=True)] if name in sums else parts
    return {name: np.sqrt(a / np.maximum(b, np.finfo(np.float64).tiny)).tolist() for name, (a, b) in sums.items()}
