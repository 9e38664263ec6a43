"""How a picture is begun and written: PNG or SVG, the same bytes for the same figures, without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from regauge.errors import ConfigError

ENDINGS: Final = (".png", ".svg")


@contextmanager
def saved(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Give an empty figure, and write it after.

    Raises ConfigError without matplotlib, for another ending than .png or .svg, and where the file cannot be written.
    """
    if path.suffix not in ENDINGS:
        raise ConfigError(f"{path}: end it in .png or .svg")
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'regauge[plan]'") from error
    look = {
        "svg.hashsalt": "regauge", "svg.fonttype": "none", "axes.grid": True, "grid.color": "#dddddd", "grid.linewidth": 0.6,
        "axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "font.family": "DejaVu Sans", "axes.axisbelow": True,
        "hatch.linewidth": 0.6,
    }  # fmt: skip
    with mpl.rc_context(look):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        told = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        try:
            figure.savefig(path, dpi=120, metadata=told)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
