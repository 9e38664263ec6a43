"""What a user gives the adapter of an engine that has an API of its own: vLLM's in `kv_connector_extra_config`, SGLang's in a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from regauge import toml
from regauge.config import TransferConfig
from regauge.errors import ConfigError
from regauge.move.auth import load_key

SGLANG: Final = "REGAUGE_SGLANG"
"""Environment variable that names SGLang's file."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's; unknown keys are refused."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9_-]+$")]
    """Of this engine, as the gateway and its peers know it. Its ranks are `NAME.0`, `NAME.1`, ..."""
    transfer: TransferConfig
    """As in regauge's configuration file; `key_file` must be given."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Decode: control port of rank 0, rank r listens at `port` + r."""
    status_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Where rank 0 tells about its transfers (`engines/status.py`), rank r at `status_port` + r; 0: nowhere."""
    rooms: str = ""
    """SGLang: plane at which prefill answers decode engines that ask for a room, named as `transfer.host`; empty: that of the control connections."""
    pool: str = ""
    """How the cache lies, as the preset calls it; empty: as the backend is known to have it. What is said here is verified like the rest."""
    model: str = ""
    """What both sides call the model; empty: its folder's name."""

    def key(self) -> bytes:
        """Read the pre-shared key. Raises ConfigError as `load_key`."""
        path = self.transfer.key_file
        if not path:
            raise ConfigError("transfer.key_file: give the file with the pre-shared key")
        return load_key(Path(path))

    def ports(self, rank: int) -> tuple[int, int]:
        """Return a rank's control and status port, 0 for one that is not given. Raises ConfigError for one that cannot be."""
        for name, first in (("port", self.port), ("status_port", self.status_port)):
            if first and first + rank > 65_535:
                raise ConfigError(f"{name}: {first} leaves no port for rank {rank}; choose a lower one")
        return self.port and self.port + rank, self.status_port and self.status_port + rank


def read(given: Mapping[str, Any], where: str) -> Settings:
    """Check what was given at `where`. Raises ConfigError that names the field."""
    try:
        return msgspec.convert(dict(given), Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def load(path: Path) -> Settings:
    """Read a TOML file. Raises ConfigError that names the file and the field."""
    try:
        return toml.decode(path.read_bytes(), Settings)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
