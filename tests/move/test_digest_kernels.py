"""Every backend and instruction set computes the same digest and moves the same bytes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_cases import EIGHT_BIT, ISAS, address, noise, span, strides_in
from regauge.move import digest, kernels, reference
from regauge.plan.digest import ROW_BYTES, ROW_KEY, Keys
from regauge.plan.tiles import Convert, End, Keyed, Tiles

KEYS = Keys(bytes(range(32)))
FLOATS = ("float32", "bfloat16", "float16")


@dataclass
class Case:
    """Tiles over their own buffers: the last `row_axes` axes and the run are rows."""

    tiles: Tiles
    source: np.ndarray
    outputs: list[np.ndarray]

    def run(self, **how: object) -> tuple[digest.Sums, list[np.ndarray]]:
        before = [o.copy() for o in self.outputs]
        stream = how.pop("stream", False)
        a, b = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
        keys = self.tiles.src_keys or self.tiles.dst_keys
        assert keys is not None
        one = dataclasses.replace(
            keys, row=keys.row[:1], row_stride=(0,), token=keys.token[:1], token_stride=(0,), row_axes=0
        )
        extra = Tiles(address(a), address(b), (256,), (4096,), (4096,), 4096, src_keys=one)
        sums = digest.run([self.tiles, extra] if stream else [self.tiles], **how)  # type: ignore[arg-type]
        results = [o.copy() for o in self.outputs]
        for output, start in zip(self.outputs, before, strict=True):
            output[...] = start
        return sums, results

    def check(self, *, threads: int = 1, stream: bool = False) -> None:
        sums, expected = self.run(backend="numpy", stream=stream)
        for isa in ISAS:
            got, outputs = self.run(isa=isa, threads=threads, stream=stream)
            for one, want in zip(outputs, expected, strict=True):
                assert np.array_equal(one, want), f"isa {isa}"
            assert got == sums, f"isa {isa}"
            for of in get_args(End):
                assert digest.read([self.tiles], of, isa=isa) == digest.read([self.tiles], of, backend="numpy")


def keyed(draw: st.DrawFn, shape: list[int], n: int, row_axes: int) -> Keyed:
    """Keys for every row: any outer axis may be one of heads, of tokens, of both (a key per row) or of neither."""
    outer = shape[: len(shape) - row_axes]
    along = [draw(st.sampled_from(["row", "token", "both"])) for _ in outer]
    count = {"row": n, "token": n}
    stride: dict[str, list[int]] = {"row": [0] * len(shape), "token": [0] * len(shape)}
    for which in ("row", "token"):
        for j in reversed(range(len(outer))):
            if along[j] in (which, "both"):
                stride[which][j] = count[which]
                count[which] *= outer[j]
    rows = KEYS.rows("k", 0, range(count["row"]), 1).reshape(-1, ROW_KEY)
    tokens = KEYS.tokens(0, count["token"])
    return Keyed(
        KEYS.words,
        rows.ctypes.data + np.arange(n) * 32,
        tuple(s * 32 for s in stride["row"]),
        tokens.ctypes.data + np.arange(n) * 8,
        tuple(s * 8 for s in stride["token"]),
        row_axes,
        keep=(rows, tokens),
    )


@st.composite
def boxes(draw: st.DrawFn, run_bytes: int = 1) -> tuple[list[int], int, int, int]:
    """Shape, axes of a row, run, tiles; rows of at most ROW_BYTES."""
    run = draw(st.sampled_from([1, 2, 4, 8, 12, 16, 31, 32, 64, 96, 100, 128, 256, 300, 1024]))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17, 33, 64]), max_size=4))
    row_axes = draw(st.integers(0, min(2, len(shape))))
    while math.prod(shape) * run > 60_000 or math.prod(shape[len(shape) - row_axes :]) * run * run_bytes > ROW_BYTES:
        shape = shape[1:] if len(shape) > row_axes else shape[:-1]
        row_axes = min(row_axes, len(shape))
    return shape, row_axes, run, draw(st.integers(1, 4))


@st.composite
def copies(draw: st.DrawFn) -> Case:
    shape, row_axes, run, n = draw(boxes())
    pads = draw(st.tuples(st.sampled_from([0, 0, 3]), st.sampled_from([0, 0, 5])))
    ss, ds = (strides_in(draw(st.permutations(range(len(shape)))), shape, run, pad) for pad in pads)
    steps = [span(shape, s, run) for s in (ss, ds)]
    align = draw(st.integers(0, 70))
    src, dst = noise(n * steps[0] + 70), noise(n * steps[1] + 256)
    at = -dst.ctypes.data % 64 + draw(st.sampled_from([0, 0, 5]))
    order = draw(st.permutations(range(n)))
    a, b = address(src, *(align + i * steps[0] for i in range(n))), address(dst, *(at + i * steps[1] for i in order))
    return Case(Tiles(a, b, tuple(shape), ss, ds, run, src_keys=keyed(draw, shape, n, row_axes)), src, [dst])


@settings(max_examples=120, deadline=None)
@given(copies(), st.integers(1, 3), st.booleans())
def test_copies_of_random_boxes(case: Case, threads: int, stream: bool) -> None:
    case.check(threads=threads, stream=stream)


@st.composite
def conversions(draw: st.DrawFn) -> Case:
    src_dtype, dst_dtype = draw(st.sampled_from([*FLOATS, *EIGHT_BIT])), draw(st.sampled_from([*FLOATS, *EIGHT_BIT]))
    sizes = reference.ITEMSIZE[src_dtype], reference.ITEMSIZE[dst_dtype]
    shape, row_axes, run, n = draw(boxes(4))
    full = [*shape, run]
    contiguous = draw(st.booleans())
    steps: list[tuple[int, ...]] = []
    for size in sizes:
        axes = len(shape)
        order = [*draw(st.permutations(range(axes))), axes] if contiguous else draw(st.permutations(range(axes + 1)))
        steps.append(strides_in(order, full, size, 0))
    gaps = [span(full, s, size) for s, size in zip(steps, sizes, strict=True)]
    src, dst = noise(n * gaps[0]), noise(n * gaps[1])
    outputs = [dst]
    scales: dict[str, object] = {}
    if draw(st.booleans()) and dst_dtype in EIGHT_BIT:
        count = math.prod(shape[: len(shape) - row_axes])
        table = np.ones(n * count, np.float32)
        stride = strides_in(list(range(len(shape) - row_axes)), shape[: len(shape) - row_axes], 4, 0)
        outputs.append(table)
        scales = {
            "dynamic": True,
            "row_axes": row_axes,
            "dst_scale": address(table, *range(0, table.nbytes, 4 * count)),
            "dst_scale_stride": (*stride, *[0] * row_axes),
        }
    convert = Convert(src_dtype, dst_dtype, steps[0][-1], steps[1][-1], **scales)  # type: ignore[arg-type]
    sides = draw(st.sampled_from(["src", "dst", "both"]))
    tiles = Tiles(
        address(src, *range(0, n * gaps[0], gaps[0])), address(dst, *range(0, n * gaps[1], gaps[1])), tuple(shape),
        steps[0][:-1], steps[1][:-1], run, convert,
        *(keyed(draw, shape, n, row_axes) if sides in (side, "both") else None for side in ("src", "dst")),
    )  # fmt: skip
    return Case(tiles, src, outputs)


@settings(max_examples=100, deadline=None)
@given(conversions(), st.integers(1, 3), st.booleans())
def test_conversions_of_random_boxes(case: Case, threads: int, stream: bool) -> None:
    case.check(threads=threads, stream=stream)


# ---- arguments ----


def one_row(nbytes: int, **changes: object) -> Tiles:
    rows, tokens = KEYS.rows("k", 0, [0], 1), KEYS.tokens(0, 1)
    memory = np.zeros(nbytes + 8, np.uint8)
    keys = Keyed(KEYS.words, address(rows), (), address(tokens), (), keep=(rows, tokens, memory))
    return Tiles(address(memory), address(memory), (), (), (), nbytes, src_keys=dataclasses.replace(keys, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tiles", "match"),
    [
        (one_row(4097), "tiles\\[0\\].src_keys: a row of 4097 bytes; at most 4096"),
        (one_row(8, row_axes=1), "src_keys.row_axes is 1; the shape has 0 axes"),
        (one_row(8, row_stride=(32,)), "src_keys.row_stride has 1 strides"),
        (one_row(8, token=np.zeros(2, np.int64)), "src_keys.token has 2 addresses"),
        (one_row(8, words=KEYS.words[:-1]), "words must be uint32\\[1026\\], not uint32\\[1025\\]"),
        (dataclasses.replace(one_row(8), src_keys=None), "no tile has keys"),
    ],
)
def test_malformed_keys_are_named(tiles: Tiles, match: str) -> None:
    for call in (lambda: digest.run([tiles]), lambda: digest.read([tiles], "src")):
        with pytest.raises(ValueError, match=match):
            call()


def test_a_key_that_changes_within_a_row_is_refused() -> None:
    tiles = dataclasses.replace(
        one_row(8, row_stride=(32,), token_stride=(0,), row_axes=1), shape=(2,), src_stride=(8,), dst_stride=(8,)
    )
    with pytest.raises(ValueError, match="row_stride must be 0 along the last 1 axes"):
        digest.run([tiles])


@pytest.mark.parametrize("how", [{"threads": 0}, {"isa": "avx1024"}, {"backend": "cuda"}])
def test_unknown_ways_to_run_are_refused(how: dict[str, object]) -> None:
    for call in (lambda: digest.run([one_row(8)], **how), lambda: digest.read([one_row(8)], "src", **how)):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=next(iter(how))):
            call()


def test_an_unknown_dtype_is_named() -> None:
    tiles = dataclasses.replace(one_row(8), convert=Convert("float16", "float64", 2, 8))
    for call in (lambda: digest.run([tiles]), lambda: digest.read([tiles], "src")):
        with pytest.raises(ValueError, match="unknown dtype 'float64'"):
            call()


@pytest.mark.parametrize("backend", ["native", "numpy"])
@pytest.mark.parametrize("row_axes", [0, 1])
@pytest.mark.parametrize("empty", [{"run": 0}, {"shape": (0,)}])
def test_empty_boxes_have_the_digest_of_nothing(empty: dict[str, Any], row_axes: int, backend: kernels.Backend) -> None:
    keyed = one_row(8, row_stride=(0,), token_stride=(0,), row_axes=row_axes)
    tiles = dataclasses.replace(keyed, **{"shape": (2,), "src_stride": (4,), "dst_stride": (4,), "run": 4} | empty)
    assert digest.run([tiles], backend=backend) == digest.Sums(0, 0)
    assert digest.read([tiles], "src", backend=backend) == 0


def test_nothing_has_the_digest_of_nothing() -> None:
    assert digest.run([]) == digest.Sums(0, 0)
    assert digest.read([], "src") == 0
