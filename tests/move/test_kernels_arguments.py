"""Malformed tiles and unknown ways to run them are refused before anything is written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import pytest

from kernel_cases import address
from regauge.move import kernels
from regauge.plan.tiles import Convert, Tiles

DYNAMIC = functools.partial(
    Convert, "float16", "int8", 2, 1, dynamic=True, dst_scale=np.zeros(1, np.int64), dst_scale_stride=(0, 0)
)


@pytest.fixture
def good() -> Iterator[Tiles]:
    src, dst = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    yield Tiles(address(src), address(dst), (2, 2), (8, 4), (8, 4), 4)
    assert not dst.any(), "a refused call must write nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (1,) * 9, "src_stride": (0,) * 9, "dst_stride": (0,) * 9}, "at most 8"),
        ({"shape": (2, -1)}, "negative"),
        ({"run": -4}, "negative"),
        ({"src_stride": (8,)}, "1 strides"),
        ({"dst_stride": (8, 4, 2)}, "3 strides"),
        ({"dst": np.zeros(2, np.int64)}, "2 addresses"),
        ({"dst": np.zeros(1, np.int32)}, "int64"),
        ({"convert": Convert("float16", "float64", 2, 8)}, "unknown dtype 'float64'"),
        ({"convert": Convert("float16", "float32", 2, 4, rule="half")}, "rule"),  # type: ignore[arg-type]
        ({"convert": Convert("float16", "float32", 2, 4, row_axes=3)}, "row_axes"),
        ({"convert": Convert("float16", "float32", 2, 4, dynamic=True)}, "8-bit target"),
        ({"convert": Convert("float16", "float8_e5m2", 2, 1, dynamic=True)}, "dst_scale"),
        ({"convert": DYNAMIC(floor=0.0)}, "floor is 0.0"),
        ({"convert": DYNAMIC(floor=float("nan"))}, "floor is nan"),
        ({"convert": DYNAMIC(dst_scale_dtype="float8_e8m0fnu")}, "set pow2"),
        ({"convert": DYNAMIC(src_scale_dtype="float16")}, "src_scale_dtype"),
        ({"convert": Convert("float16", "float32", 2, 4, src_scale=np.zeros(1, np.int64))}, "0 strides"),
    ],
)
def test_malformed_tiles_are_refused_before_anything_is_written(
    good: Tiles, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.run([good, dataclasses.replace(good, **change)])  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [{"threads": 0}, {"isa": "avx1024"}, {"backend": "cuda"}])
def test_unknown_ways_to_run_are_refused(good: Tiles, how: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(how))):
        kernels.run([good], **how)  # type: ignore[arg-type]


def test_empty_boxes_write_nothing(good: Tiles) -> None:
    kernels.run([dataclasses.replace(good, shape=(2, 0)), dataclasses.replace(good, run=0)])
