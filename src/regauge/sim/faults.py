"""What goes wrong in a run, and when: workers that die and come back, slow workers, ports that are down or slower.

[[faults]]
at = 60.0           # seconds of the run
for = 30.0          # left out: to the end
what = "dead"       # or "slow" (factor: times as long), or "port" (factor: times its rate; 0: down)
who = "p3"          # a worker, or a port
factor = 2.0
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import Final, Literal

import msgspec

from regauge.errors import ConfigError

MOST_BYTES: Final = 4 << 20


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong."""

    at: float
    what: Literal["dead", "slow", "port"]
    who: str
    seconds: float | None = msgspec.field(default=None, name="for")
    """How long; None: to the end."""
    factor: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at < inf:
            raise ConfigError(f"at: must be 0 or more and finite, not {self.at}")
        if self.seconds is not None and not 0 < self.seconds < inf:
            raise ConfigError(f"for: must be more than 0 and finite, not {self.seconds}")
        least = {"dead": None, "slow": 1.0, "port": 0.0}[self.what]
        if least is None:
            if self.factor is not None:
                raise ConfigError("factor: a dead worker has none")
        elif self.factor is None or not isfinite(self.factor) or self.factor < least:
            raise ConfigError(f'factor: "{self.what}" needs one, {least:g} or more and finite, not {self.factor}')


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    faults: list[dict[str, object]]


def read(path: Path) -> tuple[Fault, ...]:
    """Read a schedule from a TOML file. Raises ConfigError that names the file and the entry."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES} bytes; a schedule of faults is shorter")
        loaded = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = msgspec.convert(loaded, _File).faults
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parse(entries, str(path))


def parse(entries: Sequence[object], where: str) -> tuple[Fault, ...]:
    """Take a schedule from plain data, such as a table of a configuration. Raises ConfigError that names the entry."""
    faults = []
    for number, entry in enumerate(entries, 1):
        try:
            faults.append(msgspec.convert(entry, Fault))
        except (ConfigError, msgspec.ValidationError) as error:
            raise ConfigError(f"{where}: fault {number}: {error}") from error
    return tuple(faults)


def check(faults: Sequence[Fault], workers: Collection[str], ports: Collection[str]) -> None:
    """Raises ConfigError for a fault of somebody who is not there."""
    for fault in faults:
        known, kind = (ports, "port") if fault.what == "port" else (workers, "worker")
        if fault.who not in known:
            close = get_close_matches(fault.who, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"fault at {fault.at:g} s: there is no {kind} {fault.who!r}{hint}")
