"""Numbers that make every element of a KV cache recognisable by its bytes.

An element's code in each round is drawn from its dtype's alphabet by a hash of its number, so that no two elements have the
same codes in all rounds: with N elements, and chance p that two draws are the same, rounds are added until
N^2 / 2 * p^rounds <= 2^-20. Alphabets hold the codes that survive the way through the engine exactly, by whichever rule it
divides: value = code * scale, rounded to the dtype that its write operation takes, comes back as the same code.

Where a scale is computed from the values, one element of every row that shares it, at a hashed place, is the dtype's
largest code, so that the scale is the number that the pattern wants; it is hashed too.

Hash: the finaliser of splitmix64 (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.probe.codes import Bytes, Floats, computed_scale, decode, encode, quotient, rounded
from regauge.layout.spec import Component, Group, Kind, Layout, Rule, scale_table
from regauge.layout.view import Int64

UInt64 = npt.NDArray[np.uint64]
SOURCES = ("float32", "bfloat16", "float16")
BUDGET = 1 << 21
"""Elements that a pattern has unless more layers are asked for."""
MAX_ELEMENTS = 1 << 25
MAX_ROUNDS = 64
_RULES: tuple[Rule, ...] = get_args(Rule)
_ROUND_SALT = 1 << 20


def mix(numbers: UInt64 | Int64, salt: int) -> UInt64:
    """Hash numbers, uint64[...]."""
    x = numbers.astype(np.uint64) + np.array(salt * 0x9E3779B97F4A7C15 % (1 << 64), np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """The numbers of one component.

    Element (layer, token, head, dim) is number ((layer * tokens + token) * heads + head) * dim + d; layers are counted
    among the written ones.
    """

    group: int
    kind: Kind
    component: Component
    layers: tuple[int, ...]
    """Global numbers of the layers that are written."""
    tokens: int
    source: str
    salt: int
    alphabet: Bytes
    """Codes to draw from, uint8[n, itemsize]."""
    constant: Floats | None
    """Constant scales, float32[layers, heads]."""
    scales: Floats | None
    """Numbers that computed scales are drawn from."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(layers, tokens, heads, dim)."""
        return (len(self.layers), self.tokens, self.component.heads, self.component.dim)

    @property
    def row(self) -> int:
        """Elements that share a scale, where scales are stored."""
        scale = self.component.scale
        return scale.block if scale is not None and scale.per == "block" else self.component.dim

    def numbers(self, layer: int) -> Int64:
        """Return the numbers of a layer's elements, int64[tokens, heads, dim]."""
        _, *inner = self.shape
        count = math.prod(inner)
        return np.arange(layer * count, (layer + 1) * count).reshape(inner)

    def scale(self, rows: Int64, step: int) -> Floats:
        """Return the computed scale of rows in a round; row r holds elements r * row .. (r + 1) * row - 1."""
        if self.scales is None:
            raise LayoutError("has no stored scales", path=f"components.{self.component.name}.scale")
        return self.scales[(mix(rows, self._salt(step, 1)) % np.uint64(len(self.scales))).astype(np.int64)]

    def codes(self, numbers: Int64, step: int) -> Bytes:
        """Return the codes of elements in a round, uint8[..., itemsize]."""
        drawn = mix(numbers, self._salt(step, 0))
        codes = self.alphabet[(drawn % np.uint64(len(self.alphabet))).astype(np.int64)]
        if self.scales is None:
            return codes
        peak = (mix(numbers // self.row, self._salt(step, 2)) % np.uint64(self.row)).astype(np.int64)
        info = DTYPES[self.component.dtype]
        most = encode(np.array([info.max, -info.max], np.float32), info.name)
        sign = (drawn >> np.uint64(63)).astype(np.int64)
        return np.where((numbers % self.row == peak)[..., None], most[sign], codes)

    def values(self, numbers: Int64, step: int) -> Floats:
        """Return what the engine is given to write, float32[...]; exact in the dtype of the source."""
        values = decode(self.codes(numbers, step), self.component.dtype)
        if self.scales is not None:
            values = values * self.scale(numbers // self.row, step)
        if self.constant is not None:
            _, tokens, heads, dim = self.shape
            values = values * self.constant[numbers // (tokens * heads * dim), numbers // dim % heads]
        return rounded(values, self.source)

    def _salt(self, step: int, use: int) -> int:
        return (self.salt * _ROUND_SALT + step) * 4 + use


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The numbers of a whole layout, and where their tokens go."""

    source: str
    """The dtype that the engine's write operation takes."""
    rounds: int
    fields: tuple[Field, ...]
    tables: tuple[Int64, ...]
    """Page table of each group: page i of the table holds the i-th page of tokens, in pages of the engine's own size."""


def make(
    layout: Layout,
    *,
    source: str,
    usable: Mapping[int, Sequence[int]] | None = None,
    layers: Sequence[int] | None = None,
    tokens: int | None = None,
    rounds: int | None = None,
) -> Pattern:
    """Return the pattern for a layout.

    `usable`: pages that may be written, by group; default: all. `layers`: default: all, or where that would be more than BUDGET
    elements the first two, the last, and some between. `tokens`: default: two pages and a part of a third. `rounds`: default: as
    many as it takes to tell all elements apart. Raises LayoutError for what no numbers can tell apart.
    """
    if source not in SOURCES:
        raise LayoutError(f"values are {', '.join(SOURCES)}, not {source!r}", path="source")
    fields: list[Field] = []
    tables: list[Int64] = []
    for index, group in enumerate(layout.groups):
        table = _table(group, (usable or {}).get(index), f"groups[{index}]")
        count = _tokens(group, len(table), tokens)
        per_layer = count * sum(c.heads * c.dim for c in group.components)
        chosen = _layers(group, layers, BUDGET // len(layout.groups) // per_layer)
        if per_layer * len(chosen) > MAX_ELEMENTS:
            raise LayoutError(f"{per_layer * len(chosen)} elements in {len(chosen)} layers; at most {MAX_ELEMENTS}: give fewer "
                              "tokens or layers", path=f"groups[{index}]")  # fmt: skip
        tables.append(table)
        for component in group.components if chosen else ():
            fields.append(_field(index, group, component, chosen, count, source, len(fields)))
    if not fields:
        raise LayoutError("holds none of the layers asked for", path="layers")
    return Pattern(source, rounds or _rounds(fields), tuple(fields), tuple(tables))


def _table(group: Group, usable: Sequence[int] | None, path: str) -> Int64:
    """Out of order, so that a page number is not mistaken for the place in the table."""
    if not group.pages:
        raise LayoutError("the layout is symbolic: say how many pages the pool has", path=f"{path}.pages")
    pages = list(range(min(group.pages, 1 << 16)) if usable is None else usable)
    if not pages or len(set(pages)) != len(pages) or not 0 <= min(pages) <= max(pages) < group.pages:
        raise LayoutError(f"usable pages are some of 0 to {group.pages - 1}, each once", path=f"{path}.pages")
    if usable is None and group.pages > len(pages):
        pages[-1] = group.pages - 1
    return np.array([pages[-1], *pages[:-1]], np.int64)


def _tokens(group: Group, pages: int, given: int | None) -> int:
    size = group.page_size
    if group.kind == "recurrent":
        return min(3, pages)
    most = pages * size
    return max(1, min(most, given)) if given else min(most, 2 * size + size // 2 + 1)


def _layers(group: Group, given: Sequence[int] | None, most: int) -> tuple[int, ...]:
    ids = group.layer_ids
    if given is not None:
        return tuple(x for x in ids if x in given)
    if len(ids) <= max(most, 3):
        return ids
    between = np.linspace(1, len(ids) - 1, max(most - 1, 2)).astype(int)
    return tuple(ids[i] for i in sorted({0, *between.tolist()}))


def _field(
    index: int, group: Group, component: Component, layers: tuple[int, ...], tokens: int, source: str, salt: int
) -> Field:  # fmt: skip
    scale, path = component.scale, f"groups[{index}].components.{component.name}"
    if DTYPES[component.dtype].opaque or (
        scale is not None and scale.at is not None and scale.dtype == "float8_e4m3fn"
    ):
        raise LayoutError("its codes or scales are moved as they are and not computed, so that no values can be chosen for them",
                          path=f"{path}.dtype")  # fmt: skip
    constant = None
    if scale is not None and scale.at is None:
        table = scale_table(scale, len(group.layer_ids), component.heads, path=f"{path}.scale")
        constant = np.array([table[group.layer_ids.index(x)] for x in layers], np.float32)
    if scale is not None and scale.at is not None:
        alphabet, scales = _scaled_alphabet(component, source)
    else:
        given = np.ones(1, np.float32) if constant is None else np.unique(constant)
        alphabet, scales = _alphabet(component.dtype, source, given), None
    if len(alphabet) < 16 or (scales is not None and len(scales) < 4):
        raise LayoutError(f"too few codes survive the way from {source} through its scales: give values of another dtype",
                          path=f"{path}.scale")  # fmt: skip
    return Field(index, group.kind, component, layers, tokens, source, salt, alphabet, constant, scales)


def _every_code(dtype: str, source: str) -> Bytes:
    """All codes of a dtype that are finite numbers other than 0; of float32, some that the source can give."""
    size = DTYPES[dtype].itemsize
    if size == 4:
        narrow = "float16" if source == "float16" else "bfloat16"
        numbers = decode(_every_code(narrow, source), narrow)
        if source == "float32":
            low = (mix(np.arange(len(numbers)), 7) & np.uint64(0xFFFF)).astype(np.uint32) | np.uint32(1)
            numbers = (numbers.view(np.uint32) | low).view(np.float32)
        return encode(numbers, dtype)
    codes = np.arange(1 << 8 * size, dtype=np.uint8 if size == 1 else np.uint16)[:, None].view(np.uint8)
    numbers = np.abs(decode(codes, dtype))
    good = np.isfinite(numbers) & (numbers != 0)
    if size > 1:  # within what all float types hold in full
        good &= (numbers >= np.float32(2.0**-12)) & (numbers < np.float32(2.0**12))
    kept: Bytes = codes[good]
    return kept


def _survive(codes: Bytes, dtype: str, source: str, scales: Floats) -> npt.NDArray[np.bool_]:
    """Which codes come back as they are when the engine is given code * scale in the dtype of the source; [scales, codes]."""
    factors = scales[:, None]
    values = rounded(decode(codes, dtype) * factors, source)
    good = np.isfinite(values)
    for rule in _RULES:
        good &= (encode(quotient(values, factors, rule, source), dtype) == codes).all(axis=-1)
    return good


def _alphabet(dtype: str, source: str, scales: Floats) -> Bytes:
    codes = _every_code(dtype, source)
    for scale in scales:  # one by one: of a table of heads and layers there may be many
        codes = codes[_survive(codes, dtype, source, scale[None])[0]]
    return codes


def _scaled_alphabet(component: Component, source: str) -> tuple[Bytes, Floats]:
    """Return codes below the largest, and scales that the engine computes exactly from it."""
    scale, dtype = component.scale, component.dtype
    assert scale is not None  # noqa: S101  # asked for components that store scales
    most = np.float32(DTYPES[dtype].max)
    codes = _every_code(dtype, source)
    codes = codes[np.abs(decode(codes, dtype)) < most]
    wanted = np.array([m / 8 * 2.0**-e for e in range(32) for m in range(8, 16)], np.float32)
    peaks = rounded(wanted * most, source)
    wanted = wanted[(computed_scale(peaks, dtype, scale) == wanted) & np.isfinite(peaks)]
    survive = _survive(codes, dtype, source, wanted)
    most_do = survive.mean(axis=1) >= 0.75
    return codes[survive[most_do].all(axis=0)], wanted[most_do]


def _rounds(fields: Sequence[Field]) -> int:
    """Return how many rounds tell all elements apart, see the top."""
    counts: dict[tuple[str, bool], int] = {}
    chances: dict[tuple[str, bool], float] = {}
    for f in fields:
        n = math.prod(f.shape)
        p = 1.0 / len(f.alphabet)
        if f.scales is not None:
            _count(counts, chances, ("scale", True), n // f.row, 1.0 / len(f.scales))
            p = (1 - 1 / f.row) ** 2 * p + (1 / f.row) ** 2 / 2
        _count(counts, chances, (f.component.dtype, False), n, p)
    needed = max(math.ceil((2 * math.log2(counts[k]) + 19) / -math.log2(chances[k])) for k in counts)
    if needed > MAX_ROUNDS:
        raise LayoutError(f"{needed} rounds to tell the elements apart, at most {MAX_ROUNDS}: give fewer tokens or layers",
                          path="rounds")  # fmt: skip
    return needed


def _count(
    counts: dict[tuple[str, bool], int], chances: dict[tuple[str, bool], float], key: tuple[str, bool], n: int, p: float
) -> None:
    counts[key] = counts.get(key, 0) + max(n, 1)
    chances[key] = max(chances.get(key, 0.0), p)
