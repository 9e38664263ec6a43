"""The way from the kernels' callers to Triton, which is imported when it is asked for: it may not be installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from regauge.errors import ConfigError
from regauge.plan.tiles import Int64, Keyed, Tiles


def run(tiles: Sequence[Tiles]) -> None:
    """Copy or convert tiles that lie in the current accelerator's memory.

    Raises ConfigError where triton, torch or a GPU is missing.
    """
    _triton("run").run(tiles)


def digest(
    src: tuple[Int64, tuple[int, ...]],
    dst: tuple[Int64, tuple[int, ...]] | None,
    shape: tuple[int, ...],
    run: int,
    keys: Keyed,
) -> int:
    """Return the digest of rows in the current accelerator's memory, and copy them to `dst` unless it is None.

    `src` and `dst` are addresses and strides, as in `Tiles`. Raises ConfigError as `run` does.
    """
    module = _triton("digest")
    target = dst or (None, ())
    value: int = module.digest(module.Rows(src[0], shape, src[1], run, keys, *target))
    return value


def _triton(module: str) -> Any:
    try:
        return import_module(f"regauge.move.triton.{module}")
    except ImportError as e:
        raise ConfigError(
            f"the triton kernels need {e.name}: pip install 'regauge[triton]', and a build of torch for the GPU"
        ) from e
