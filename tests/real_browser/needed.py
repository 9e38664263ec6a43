"""What these tests need, and what of it is missing."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

AXE = Path(__file__).parents[2] / ".venv" / "axe" / "axe.min.js"


def missing() -> str:
    """Why these tests cannot run here; empty if they can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    absent += ["selenium"] * (find_spec("selenium") is None) + ["axe-core"] * (not AXE.exists())
    return (
        f"{', '.join(absent)} not installed: run scripts/install-browser .venv/bin/python .venv/axe" if absent else ""
    )
