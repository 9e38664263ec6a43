"""A bill of materials: the TOML file that says what a deployment is made of. docs/topology.md has every key.

`load` reads one, or one that is shipped, checks it, and makes a `Topology` of it: names, addresses and ports follow from the
file alone, so that everybody who reads it gets the same.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from regauge import toml
from regauge.config_bounds import Port
from regauge.config_planes import MANAGEMENT_PORT
from regauge.errors import ConfigError
from regauge.fabric.build import build
from regauge.fabric.topology import CableKind, EngineName, PlaneName, Role, Topology, TransportName

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
Pattern = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]*(\{n(:0[1-9])?\})?[a-z0-9-]*$", min_length=1, max_length=63)]
Interface = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_.-]{0,14}$")]
Device = Annotated[str, msgspec.Meta(pattern=r"^([a-zA-Z][a-zA-Z0-9_.-]{0,30})?$")]
Pci = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])?$")]
Speed = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]{0,4}(\.[0-9]{1,3})?G$")]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Numa = Annotated[int, msgspec.Meta(ge=0, le=63)]
Dscp = Annotated[int, msgspec.Meta(ge=0, le=63)]
Priority = Annotated[int, msgspec.Meta(ge=0, le=7)]
Host = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: immutable, and nothing unknown in it."""


class RoceBill(_Strict, frozen=True):
    """Lossless RoCEv2. The defaults are what NVIDIA's guides for RoCE use: DSCP 26 on priority 3, CNP with 48 on 6."""

    dscp: Dscp = 26
    priority: Priority = 3
    cnp_dscp: Dscp = 48
    cnp_priority: Priority = 6
    ecn_min_bytes: Bytes = 150_000
    ecn_max_bytes: Bytes = 1_500_000
    ecn_mark_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 100
    gid_index: Annotated[int, msgspec.Meta(ge=0, le=255)] = 3


class PlaneBill(_Strict, frozen=True):
    """One of the three networks."""

    network: Text
    speed: Speed
    mtu: Annotated[int, msgspec.Meta(ge=1_280, le=9_216)] = 1_500
    vlan: Annotated[int, msgspec.Meta(ge=2, le=4_094)] | None = None
    router: Text = ""
    rail_prefix: Annotated[int, msgspec.Meta(ge=8, le=30)] | None = None
    first_host: Host = 11
    first_bmc: Host = 111
    first_switch: Host = 2
    roce: RoceBill | None = None


class PlanesBill(_Strict, frozen=True):
    """All three."""

    compute: PlaneBill
    business: PlaneBill
    management: PlaneBill


class CableBill(_Strict, frozen=True):
    """What a switch's ports are cabled with."""

    kind: CableKind
    length_m: Annotated[float, msgspec.Meta(gt=0, le=10_000)]
    speed: Speed | None = None


class SwitchBill(_Strict, frozen=True):
    """One switch."""

    planes: Annotated[list[PlaneName], msgspec.Meta(min_length=1, max_length=3)]
    ports: Annotated[int, msgspec.Meta(ge=1, le=1_024)]
    speed: Speed
    cable: CableBill
    model: Text = ""
    breakout: Literal[1, 2, 4, 8] = 1
    lanes: Literal[1, 2, 4, 8] = 1
    alias: Annotated[
        str, msgspec.Meta(pattern=r"^[A-Za-z0-9/_-]*(\{port\}[A-Za-z0-9/_-]*(\{sub\})?)?$", max_length=40)
    ] = ""
    managed: bool = True


class NicBill(_Strict, frozen=True):
    """One network port of each server of a group."""

    plane: PlaneName
    interface: Interface
    rail: Annotated[int, msgspec.Meta(ge=0, le=63)] | None = None
    rdma: Device = ""
    pci: Pci = ""
    numa: Numa | None = None
    speed: Speed | None = None
    address: Text = ""


class AcceleratorsBill(_Strict, frozen=True):
    """The cards of each server of a group."""

    model: Text
    count: Annotated[int, msgspec.Meta(ge=1, le=64)]
    numa: list[Numa] = []
    pci: list[Pci] = []


class ServersBill(_Strict, frozen=True):
    """A group of servers alike."""

    name: Pattern
    role: Role
    nics: Annotated[list[NicBill], msgspec.Meta(min_length=1, max_length=64)]
    count: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 1
    first: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    model: Text = ""
    accelerators: AcceleratorsBill | None = None
    bmc: bool = True


class ServingBill(_Strict, frozen=True):
    """What runs on it."""

    model: Text = "smollm2-135m-instruct"
    transport: TransportName = "tcp"
    port: Port = 8_000
    worker_port: Port = 9_000
    management_port: Port = MANAGEMENT_PORT
    prefill_layout: Text = "fp8_e4m3,page=64,hnd"
    decode_layout: Text = "bf16,page=16,nhd"
    prefill_engine: EngineName = "local"
    decode_engine: EngineName = "local"
    key_file: Text = "/etc/regauge/transfer.key"


class Bill(_Strict, frozen=True):
    """The whole file."""

    site: Name
    planes: PlanesBill
    switches: Annotated[dict[Name, SwitchBill], msgspec.Meta(min_length=1, max_length=64)]
    servers: Annotated[list[ServersBill], msgspec.Meta(min_length=1, max_length=256)]
    gateway: Text
    description: Text = ""
    serving: ServingBill = ServingBill()


def load(source: str | Path) -> Topology:
    """Read a bill of materials: a file, or the name of a shipped one. Raises ConfigError that names file, field and remedy."""
    path = Path(source)
    if path.suffix != ".toml" and not path.is_file():
        return decode(_shipped(str(source)).read_bytes(), str(source))
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    return decode(data, str(path))


def decode(data: bytes, where: str) -> Topology:
    """Make a topology of a bill's bytes. Raises ConfigError that begins with `where` and names field and remedy."""
    try:
        return build(toml.decode(data, Bill))
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {_explained(str(error))}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def shipped() -> tuple[str, ...]:
    """Return the names of the shipped bills."""
    return tuple(sorted(each.name.removesuffix(".toml") for each in _folder().iterdir() if each.name.endswith(".toml")))


def _folder() -> Traversable:
    return files("regauge.fabric") / "topologies"


def _shipped(name: str) -> Traversable:
    names = shipped()
    if name in names:
        return _folder() / f"{name}.toml"
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"shipped are {', '.join(names)}"
    raise ConfigError(f"no topology {name!r}: name a .toml file or a shipped one; {hint}")


def _explained(message: str) -> str:
    """Add to what msgspec says which key was meant, or which there are."""
    found = re.search(r"unknown field `([^`]*)`(?: - at `\$\.?([^`]*)`)?", message)
    if not found:
        return message
    known = _keys(found[2] or "")
    near = difflib.get_close_matches(found[1], known, n=1)
    return f"{message}; " + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}")


def _keys(path: str) -> list[str]:
    """Return the keys of the table at a path such as `servers[...].nics[...]`."""
    kind: Any = Bill
    for part in filter(None, re.sub(r"\[[^\]]*\]", ".*", path).split(".")):
        if part == "*":
            kind = get_args(kind)[-1]
            continue
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == part)
        kind = _bare(kind)
    return [field.name for field in msgspec.structs.fields(_bare(kind))]


def _bare(kind: Any) -> Any:
    """Take Annotated and Optional off a type."""
    while getattr(kind, "__metadata__", None) is not None:
        kind = kind.__origin__
    if type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not type(None))
    return kind
