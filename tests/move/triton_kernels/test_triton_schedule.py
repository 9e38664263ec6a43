"""How boxes are laid out over programs: arithmetic only."""

from __future__ import annotations

import numpy as np
import pytest

from regauge.move.triton import schedule as schedules
from regauge.move.triton.schedule import schedule
from regauge.plan.tiles import Convert, Tiles

AT = np.arange(1 << 20, (1 << 20) + 6 * 65536, 65536, dtype=np.int64)


def tiles(shape: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...], run: int, shift: int = 0) -> Tiles:
    return Tiles(AT + shift, AT + (1 << 30), shape, src, dst, run)


@pytest.mark.parametrize(
    ("shift", "run", "word", "align"), [(0, 256, 8, 16), (8, 256, 8, 8), (4, 256, 4, 4), (0, 250, 2, 2)]
)
def test_words_are_as_large_as_all_addresses_allow(shift: int, run: int, word: int, align: int) -> None:
    (x,) = schedule(tiles((16, 8), (2048, 256), (256, 4096), run, shift))
    assert (x.constants["src_size"], x.constants["src_align"]) == (word, align)


def test_rows_of_a_target_that_is_contiguous_elsewhere_are_columns_of_the_source() -> None:
    (x,) = schedule(tiles((8, 24, 128), (6144, 2, 48), (256, 2048, 2), 2))
    assert (x.constants["src_down"], x.constants["dst_down"]) == (True, False)
    assert (x.constants["src_group"], x.constants["dst_group"]) == (8, 128)
    assert x.axes[0].tolist() == [24, 32, 2, 2048, 0, 0]  # padded to whole blocks of 32 rows
    assert (x.rows, x.columns) == (6 * 32, 1024)


def test_what_lies_side_by_side_on_both_sides_is_one_axis() -> None:
    (x,) = schedule(tiles((4, 16), (16 * 256, 256), (32 * 256, 256), 256))
    assert x.axes.tolist() == [[4, 4, 4096, 8192, 0, 0], [512, 512, 8, 8, 0, 0]]


def test_short_runs_that_the_target_keeps_together_fill_a_row() -> None:
    (x,) = schedule(tiles((16, 16), (16, 256), (256, 16), 16))
    assert x.constants["column_axes"] == 2
    assert x.columns == 32


def test_many_rows_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    box = tiles((16, 8), (2048, 256), (256, 4096), 256)
    monkeypatch.setattr(schedules, "MAX_STEPS", 300)
    launches = schedule(box)
    assert [x.bases.shape[1] for x in launches] == [2, 2, 2]
    assert np.array_equal(np.concatenate([x.bases for x in launches], axis=1)[0], box.src)
    monkeypatch.setattr(schedules, "MAX_STEPS", 100)
    with pytest.raises(ValueError, match="a tile of 128 rows of 32 elements is too large for one launch: cut it"):
        schedule(box)


@pytest.mark.parametrize(("shift", "stride", "align"), [(0, 4, 4), (2, 4, 0), (0, 6, 0)])
def test_scales_at_odd_addresses_are_read_byte_by_byte(shift: int, stride: int, align: int) -> None:
    convert = Convert("bfloat16", "int8", 2, 1, dst_scale=AT + shift, dst_scale_stride=(stride, 0))
    (x,) = schedule(Tiles(AT, AT + (1 << 30), (16, 8), (2048, 256), (1024, 128), 128, convert))
    assert x.constants["dst_scale_align"] == align
