"""Constant scales, calibrated: the largest magnitude over documents that are not evaluated, by the dtype's largest value."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from regauge.engines.local.accuracy.bench import Bench
from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Component, Layout, Rule, with_components

Peaks = dict[str, npt.NDArray[np.float32]]
"""By component, the largest magnitude of each layer and head, float32[layers, heads]."""


def peaks(bench: Bench, plain: Layout) -> Peaks:
    """Return the largest magnitudes over all tokens of a bench's prompts; `plain` is a float32 layout."""
    found: Peaks = {}
    memory = bench.prefill(plain)
    with closing(memory.slab):
        for index in range(bench.documents):
            for name, values in bench.values(memory, index).items():
                peak = np.abs(values).max(axis=(1, 3))
                found[name] = np.maximum(found[name], peak) if name in found else peak
    return found


def has_constants(layout: Layout) -> bool:
    """Say whether a component has constant scales, which calibration would replace."""
    return any(_constant(c) for g in layout.groups for c in g.components)


def calibrated(layout: Layout, found: Peaks) -> Layout:
    """Return the layout with its constant scales replaced by calibrated ones, per tensor or head as it says."""
    return with_components(layout, lambda c: _calibrate(c, found[c.name]) if _constant(c) else c)


def with_rule(layout: Layout, rule: Rule) -> Layout:
    """Return the layout with that rule in every scale."""

    def change(c: Component) -> Component:
        if c.scale is None:
            return c
        return msgspec.structs.replace(c, scale=msgspec.structs.replace(c.scale, rule=rule))

    return with_components(layout, change)


def without_scales(layout: Layout) -> Layout:
    """Return the layout as a receiver takes it that was not told of its constant scales."""
    return with_components(layout, lambda c: msgspec.structs.replace(c, scale=None) if _constant(c) else c)


def with_dtype(layout: Layout, dtype: str) -> Layout:
    """Return the layout as a receiver takes it that believes in another dtype of the same size."""
    return with_components(layout, lambda c: msgspec.structs.replace(c, dtype=dtype))


def _constant(component: Component) -> bool:
    return component.scale is not None and component.scale.at is None


def _calibrate(component: Component, peak: npt.NDArray[np.float32]) -> Component:
    scale = component.scale
    if scale is None:
        return component
    rows = np.broadcast_to(peak.max(axis=1, keepdims=True), peak.shape) if scale.per == "tensor" else peak
    values: list[Any] = np.maximum(rows / np.float32(DTYPES[component.dtype].max), np.float32(2.0**-126)).tolist()
    return msgspec.structs.replace(component, scale=msgspec.structs.replace(scale, values=values))
