"""Do two arrays in memory share a byte? Exactly, whatever their strides, without listing their elements."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from regauge.errors import LayoutError

MAX_STEPS = 1 << 17
"""Most steps of all searches of a layout, some half a second: a peer's layout must not cost arbitrary time. Those of the conformance
catalogue take up to 83, a hundred groups that share one region some thousands."""


@dataclass(frozen=True, slots=True)
class Box:
    """Runs of bytes: one of `size` bytes at `base` + the sum of stride * index, for every index of every axis."""

    base: int
    size: int
    axes: tuple[tuple[int, int], ...]
    """(stride, count) of axes of more than one index, largest stride first. Strides are positive."""

    @classmethod
    def of(cls, base: int, itemsize: int, axes: list[tuple[int, int]]) -> Box:
        """Return the box of elements, those that lie densely one after another joined to runs."""
        left, size = sorted((x for x in axes if x[1] > 1), reverse=True), itemsize
        while left and left[-1][0] == size:
            size *= left.pop()[1]
        return cls(base, size, tuple(left))


class Search:
    """Looks for shared bytes; has MAX_STEPS for all that it is asked."""

    def __init__(self) -> None:
        self._steps = 0

    def within(self, box: Box) -> bool:
        """Say whether two runs of a box share a byte. Raises LayoutError beyond MAX_STEPS."""
        axes = [(stride, 1 - count, count - 1) for stride, count in box.axes]
        return self._hits(_Sums(axes), 0, 1 - box.size, box.size - 1, apart=False)

    def between(self, one: Box, two: Box) -> bool:
        """Say whether a run of one box and a run of the other share a byte. Raises LayoutError beyond MAX_STEPS."""
        spans: dict[int, tuple[int, int]] = {}
        for stride, count in one.axes:
            low, high = spans.get(stride, (0, 0))
            spans[stride] = low, high + count - 1
        for stride, count in two.axes:
            low, high = spans.get(stride, (0, 0))
            spans[stride] = low - count + 1, high
        axes = [(stride, *spans[stride]) for stride in sorted(spans, reverse=True)]
        between = two.base - one.base
        return self._hits(_Sums(axes), 0, between - one.size + 1, between + two.size - 1, apart=True)

    def _hits(self, sums: _Sums, index: int, least: int, most: int, *, apart: bool) -> bool:
        """Say whether the axes from `index` on have a sum from `least` to `most`; unless `apart`, one that is not of zeros.

        What the smaller axes can still add leaves each factor little choice where axes nest: one or two.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise LayoutError("strides are too intricate to tell whether elements overlap: use axes that nest")
        divisor = sums.divisor[index]
        if not divisor:
            return apart and least <= 0 <= most
        if most // divisor * divisor < least:  # no multiple of what every sum is a multiple of
            return False
        stride, low, high = sums.axes[index]
        first = max(low, -((sums.most[index + 1] - least) // stride))
        last = min(high, (most - sums.least[index + 1]) // stride)
        return any(
            self._hits(sums, index + 1, least - stride * x, most - stride * x, apart=apart or x != 0)
            for x in range(first, last + 1)
        )


class _Sums:
    """Sums of stride * factor over axes (stride, least factor, most), largest stride first; bounds from each axis on."""

    def __init__(self, axes: list[tuple[int, int, int]]) -> None:
        self.axes = axes
        self.least, self.most, self.divisor = [0], [0], [0]
        for stride, low, high in reversed(axes):
            self.least.insert(0, self.least[0] + stride * low)
            self.most.insert(0, self.most[0] + stride * high)
            self.divisor.insert(0, gcd(self.divisor[0], stride))
