"""A server's board controller: what its answers mean, and how it is asked. `redfish` asks it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from regauge import keys
from regauge.errors import ConfigError
from regauge.fabric.finding import Finding, Severity

WHY: Final = "without it nobody restarts the server, or sees why it is down"
_WELL: Final = "ok"


class Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How BMCs are asked: a TOML file that only its owner can read."""

    user: str
    password: Annotated[str, msgspec.Meta(min_length=1)]
    authority: str = ""
    """PEM file of what signed the BMCs' certificates; empty: those that the system trusts."""
    verify: bool = True
    """False: any certificate is taken, and whoever is in between reads the password."""


def load_access(path: Path) -> Access:
    """Read the file. Raises ConfigError that names file and field, also where others can read it."""
    try:
        data = tomllib.loads(keys.read_private(path).decode())
        return msgspec.convert(data, Access)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}; it has user and password, and verify or authority") from error


def judge(url: str, systems: list[dict[str, Any]], managers: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield what is wrong with a BMC that answered with these systems and managers."""
    if not systems:
        yield Finding(
            "bmc", "management", url, "knows no system", WHY, "restart it: ipmitool mc reset cold, on the server"
        )
    yield from (finding for body in systems for finding in _system(url, body))
    for body in managers:
        yield from _health(url, f"BMC {body.get('Id', '')}", body)


def _system(url: str, body: dict[str, Any]) -> Iterator[Finding]:
    name, power = f"system {body.get('Name') or body.get('Id', '')}", str(body.get("PowerState") or "")
    if not power:
        yield Finding("bmc", "management", url, f"{name}: does not tell whether it is on", "it may be off", f"ipmitool -H {url} chassis status", "unknown")  # fmt: skip
    elif power.lower() != "on":
        yield Finding("bmc", "management", url, f"{name}: is {power.lower()}", "it serves nothing", "turn it on: ipmitool -I lanplus -H BMC -U USER chassis power on")  # fmt: skip
    yield from _health(url, name, body)


def _health(url: str, name: str, body: dict[str, Any]) -> Iterator[Finding]:
    status = body.get("Status") or {}
    health = str(status.get("HealthRollup") or status.get("Health") or "")
    if not health:
        yield Finding("bmc", "management", url, f"{name}: does not tell its health", "a failing fan, supply or memory is not seen", "read its log: ipmitool sel list", "unknown")  # fmt: skip
    elif health.lower() != _WELL:
        kind: Severity = "error" if health.lower() == "critical" else "warning"
        yield Finding("bmc", "management", url, f"{name}: health is {health}", "a fan, supply, memory or card is failing", "ipmitool sel list; ipmitool sdr", kind)  # fmt: skip
