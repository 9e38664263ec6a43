"""What a bug report needs to know of a machine: the command line's verb `collect-env`."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any, Final

from regauge import __version__
from regauge.move import kernels

_PACKAGES: Final = (
    "numpy",
    "ml_dtypes",
    "msgspec",
    "starlette",
    "uvicorn",
    "aiohttp",
    "torch",
    "transformers",
    "psycopg",
)


def collect() -> dict[str, Any]:
    """Return versions, and what the machine is."""
    return {
        "regauge": __version__, "python": platform.python_version(), "platform": platform.platform(),
        "cpus": os.cpu_count(), "kernels": kernels.isa(), "packages": {name: _version(name) for name in _PACKAGES},
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
