"""Launch the kernels on tiles that lie in the memory of a GPU, or, in Triton's interpreter, of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.runtime import JITFunction

from regauge.errors import ConfigError
from regauge.move.triton import kernels
from regauge.move.triton.schedule import DST_SCALE, ELEMENTS, SRC_SCALE, WARPS, Schedule, schedule
from regauge.plan.tiles import Tiles

INTERPRETED = not isinstance(kernels.relayout, JITFunction)
"""Whether Triton was imported with TRITON_INTERPRET=1: kernels then run in numpy, on this process's memory."""

BLOCK = 1 << 17 if INTERPRETED else ELEMENTS
"""Elements of a block unless a caller says otherwise: in the interpreter a program costs the same whatever it does."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A kernel with its arguments, ready to be queued, and again: call it. Its tables live as long as it does."""

    kernel: Any
    schedule: Schedule
    arguments: tuple[object, ...]
    kept: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        """Queue it on the device's current stream."""
        with np.errstate(all="ignore"):  # in the interpreter numpy would warn of infinities and NaN, which are wanted
            self.kernel[(self.schedule.programs,)](*self.arguments, **self.schedule.constants, num_warps=WARPS)


def run(tiles: Sequence[Tiles], *, elements: int = BLOCK) -> None:
    """Copy or convert every tile on the current accelerator, on its current stream; returns when the bytes are written.

    Addresses of tiles and of stored scales are the device's; constant scales that a plan made (`Convert.keep`) are
    copied there. Compiles a kernel the first time that a combination of dtypes, scales, alignment and block comes up.

    Raises ConfigError where there is no accelerator, ValueError for tiles too large for one launch.
    """
    place = accelerator()
    launches = prepare(tiles, place, elements=elements)
    for launch in launches:
        launch()
    finish(place)


def prepare(tiles: Sequence[Tiles], device: torch.device, *, elements: int = BLOCK) -> list[Launch]:
    """Lay tiles out over programs and copy the tables that kernels read to the device: what `run` does first."""
    launches = []
    for t in tiles:
        for x in schedule(t, elements=elements):
            parts, kept = to_device(x, t.convert.keep if t.convert else (), device)
            launches.append(Launch(getattr(kernels, x.kernel), x, (*parts, x.rows, x.columns), tuple(kept)))
    return launches


def accelerator() -> torch.device:
    """Return torch's current accelerator; in the interpreter the CPU.

    Raises ConfigError if there is none.
    """
    if INTERPRETED:
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    if found is None:
        raise ConfigError(
            "the triton kernels need a GPU that torch sees, and there is none: use the native kernels, or set "
            "TRITON_INTERPRET=1 before Python starts to run them, slowly, on the CPU"
        )
    return found


def finish(device: torch.device) -> None:
    """Wait for everything queued on the device's current stream."""
    if device.type != "cpu":
        getattr(torch, device.type).current_stream(device).synchronize()


def to_device(
    x: Schedule, host_tables: Sequence[object], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Copy what a kernel reads to the device: the tables `axes` and the four of addresses, and what is to be kept.

    `host_tables` are arrays in this process's memory that addresses in the last two tables may point into: they are
    copied, too, and those addresses moved along.
    """
    bases, kept = x.bases, list[torch.Tensor]()
    if device.type != "cpu":
        bases = bases.copy()
        for table in host_tables:
            assert isinstance(table, np.ndarray)  # noqa: S101  # a plan keeps nothing else
            there = torch.from_numpy(table.view(np.uint8).ravel()).to(device)
            begin = table.ctypes.data
            for i in (SRC_SCALE, DST_SCALE):
                inside = (x.bases[i] >= begin) & (x.bases[i] < begin + table.nbytes)
                bases[i] += np.where(inside, there.data_ptr() - begin, 0)
            kept.append(there)
    together = torch.from_numpy(np.concatenate([x.axes.ravel(), bases.ravel()])).to(device)
    parts = [together[: x.axes.size], *together[x.axes.size :].view(4, -1)]
    return parts, [*kept, together]
