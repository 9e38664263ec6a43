"""The host that the doctor looks at: files of sysfs, procfs and /etc, and what tools print. Everything is read through one object.

`Live` is this machine, `Recorded` one whose answers were written down by `Recorder`: so that a finding can be looked into elsewhere, and tested.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from regauge.errors import ConfigError

MAX_BYTES = 1 << 20
"""Of a file, and of what a tool prints."""
MAX_RECORD = 64 << 20
PATIENCE_S = 5.0


class Host(Protocol):
    """What can be asked. None: there is no such file or tool, or it may not be read."""

    def read(self, path: str) -> str | None:
        """Return a file's text, stripped."""

    def names(self, path: str) -> list[str] | None:
        """Return what is in a folder, sorted."""

    def target(self, path: str) -> str | None:
        """Return the last part of what a symbolic link names."""

    def run(self, *words: str) -> str | None:
        """Return what a tool prints; None also where it fails."""


class Live:
    """This machine, or a tree that looks like one."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        """See `Host`."""
        try:
            with self._at(path).open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str) -> list[str] | None:
        """See `Host`."""
        try:
            return sorted(each.name for each in self._at(path).iterdir())
        except OSError:
            return None

    def target(self, path: str) -> str | None:
        """See `Host`."""
        try:
            return self._at(path).readlink().name
        except OSError:
            return None

    def run(self, *words: str) -> str | None:
        """See `Host`."""
        if shutil.which(words[0]) is None:
            return None
        try:
            done = subprocess.run(words, capture_output=True, timeout=PATIENCE_S, check=False)  # noqa: S603  # our own words
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout[:MAX_BYTES].decode(errors="replace").strip() if done.returncode == 0 else None

    def _at(self, path: str) -> Path:
        return self._root / path.lstrip("/")


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """What a host answered, by what it was asked; null: nothing."""

    files: dict[str, str | None] = {}
    folders: dict[str, list[str] | None] = {}
    links: dict[str, str | None] = {}
    commands: dict[str, str | None] = {}


class Recorded:
    """A host by its record. What was not asked then is not there."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def read(self, path: str) -> str | None:
        """See `Host`."""
        return self.record.files.get(path)

    def names(self, path: str) -> list[str] | None:
        """See `Host`."""
        return self.record.folders.get(path)

    def target(self, path: str) -> str | None:
        """See `Host`."""
        return self.record.links.get(path)

    def run(self, *words: str) -> str | None:
        """See `Host`."""
        return self.record.commands.get(" ".join(words))


class Recorder:
    """Asks another host each thing once, and writes down what it answers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.record = Record()

    def read(self, path: str) -> str | None:
        """See `Host`."""
        return _once(self.record.files, path, self._host.read)

    def names(self, path: str) -> list[str] | None:
        """See `Host`."""
        return _once(self.record.folders, path, self._host.names)

    def target(self, path: str) -> str | None:
        """See `Host`."""
        return _once(self.record.links, path, self._host.target)

    def run(self, *words: str) -> str | None:
        """See `Host`."""
        return _once(self.record.commands, " ".join(words), lambda _: self._host.run(*words))


T = TypeVar("T")


def _once(known: dict[str, T], key: str, ask: Callable[[str], T]) -> T:
    if key not in known:
        known[key] = ask(key)
    return known[key]


def load(path: Path) -> Recorded:
    """Read a record. Raises ConfigError for a file that is none."""
    try:
        if path.stat().st_size > MAX_RECORD:
            raise ConfigError(f"{path}: a record of a host has at most {MAX_RECORD >> 20} MiB")
        return Recorded(msgspec.json.decode(path.read_bytes(), type=Record))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: no record of a host, as `regauge doctor --record` writes it: {error}") from error


def save(path: Path, record: Record) -> None:
    """Write a record. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(record, order="deterministic")))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def number(text: str | None) -> int | None:
    """Return a file's whole number; None where it holds none."""
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def decoded(text: str | None) -> object:
    """Return what a tool printed as JSON; None where it is none."""
    try:
        return None if text is None else msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def rows(found: object) -> Sequence[dict[str, object]]:
    """Return the objects of a JSON list; what else is in it is left out."""
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
