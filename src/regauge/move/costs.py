"""The file that keeps the cost model's constants: `calibrate` measures them, serving and `explain` read them."""

from __future__ import annotations

from pathlib import Path

from regauge.errors import ConfigError
from regauge.plan.cost import Constants, decode, encode


def read(path: Path) -> Constants:
    """Read constants from a file that `write` wrote. Raises ConfigError naming the file and the field."""
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `regauge bench calibrate --out FILE` writes one") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def write(path: Path, constants: Constants) -> None:
    """Write constants to a file. Raises ConfigError where that cannot be."""
    try:
        path.write_bytes(encode(constants))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
