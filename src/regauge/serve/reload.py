"""SIGHUP: files are read anew, all or none. A bad one is refused, and what was goes on.

The supervisor reads the configuration and writes it where its gateways read it (`write`); each then asks its parts. A part looks at the new
configuration and returns what puts it in force, or raises ConfigError; nothing is put in force before all have looked. It holds for requests and
connections that come from then on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from regauge.config import ServeConfig
from regauge.errors import ConfigError
from regauge.observe import ERROR, get_logger

Part = Callable[[ServeConfig], Callable[[], None]]
"""Looks at a new configuration, raising ConfigError; returns what puts it in force, which does not fail."""

FILE: Final = "config.json"
FREE: Final = frozenset({"gateway", "limits", "route"})
"""Tables that are put in force while all runs; others need a restart, as do some fields of these."""


def needs_restart(old: ServeConfig, new: ServeConfig) -> list[str]:
    """Return the fields that differ and wait for a restart."""
    found = []
    for name in ServeConfig.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before != after and name not in FREE:
            found.append(name)
    if old.gateway.processes != new.gateway.processes:
        found.append("gateway.processes")
    if (old.gateway.tls is None) != (new.gateway.tls is None):
        found.append("gateway.tls")
    elif old.gateway.tls and new.gateway.tls and old.gateway.tls.authority != new.gateway.tls.authority:
        found.append("gateway.tls.authority")
    return found


def write(folder: Path, config: ServeConfig) -> None:
    """Leave a configuration for the gateways, readable for this user alone."""
    new = folder / f"{FILE}.new"
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(config))
    new.replace(folder / FILE)


def read(folder: Path, default: ServeConfig) -> ServeConfig:
    """Return what was left last, or the default if nothing was. Raises ConfigError."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=ServeConfig)
    except FileNotFoundError:
        return default
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder / FILE}: {error}") from error


class Reloader:
    """One gateway's parts."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts

    def reload(self, read: Callable[[], ServeConfig]) -> bool:
        """Put a new configuration in force; return whether it was. What is wrong with it is in the log."""
        try:
            config = read()
            ready = [part(config) for part in self._parts.values()]
        except ConfigError as error:
            get_logger().error("the configuration was not read anew; what was goes on", **{ERROR: str(error)})
            return False
        for put in ready:
            put()
        get_logger().info("the configuration was read anew")
        return True
