"""The catalogue: what accelerators, NICs, switches and models are said to be, each figure with its source and its date.

A catalogue file is TOML; a figure is an inline table:

    [accelerators.mtt-s5000]
    name = "MTT S5000"
    memory_gb = { value = 80, source = "press", date = "2026-02" }

Files are read one after the other: a figure of a later file replaces that of an earlier one whole, its source and range too; a device
may be new. Bandwidths are of one direction unless the field says otherwise, rates are dense (no structured sparsity), GB is 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from regauge import toml
from regauge.errors import ConfigError
from regauge.sim.curves import Measured, read_measured

SHIPPED = ("accelerators.toml", "nics.toml", "switches.toml", "models.toml", "currencies.toml")

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
Date = Annotated[str, msgspec.Meta(pattern=r"^\d{4}(-\d\d){0,2}$")]
Path_ = Annotated[str, msgspec.Meta(max_length=4096)]


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One figure, who says so, and when."""

    value: float
    source: Text
    date: Date
    """Year, month or day of the source."""
    note: str = ""
    low: float | None = None
    """Lowest that it may be; none: as `value`."""
    high: float | None = None
    currency: Annotated[str, msgspec.Meta(pattern="^([A-Z]{3})?$")] = ""
    """Of a price, as its source has it: code of ISO 4217."""


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One card. Figures that nobody published are left out."""

    name: str = ""
    vendor: str = ""
    fp8_tflops: Figure | None = None
    bf16_tflops: Figure | None = None
    memory_gb: Figure | None = None
    memory_gb_per_s: Figure | None = None
    scale_up_gb_per_s: Figure | None = None
    """To the other cards of its server, both directions together, as data sheets count."""
    cards: Figure | None = None
    """Cards in a server."""
    nics: Figure | None = None
    """NICs in a server that carry KV."""
    nic: str = ""
    """Key of that NIC."""
    price: Figure | None = None
    """Of one card."""
    power_w: Figure | None = None
    """Of one card at its limit."""
    server_price: Figure | None = None
    """Of a server with `cards` cards, its NICs among them."""
    server_power_w: Figure | None = None
    """Of such a server at its limit."""
    prefill_csv: Path_ = ""
    """Measured prefill: columns tokens, seconds; relative to the catalogue file. Replaces the roofline."""
    decode_csv: Path_ = ""
    """Measured decode steps: columns tokens (resident, of all requests), seconds."""


class Nic(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One network adapter."""

    name: str = ""
    gbit_per_s: Figure | None = None
    share: Figure | None = None
    """Part of the line rate that payload reaches."""
    price: Figure | None = None


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One switch."""

    name: str = ""
    ports: Figure | None = None
    gbit_per_s: Figure | None = None
    """Of one port."""
    price: Figure | None = None
    """Of the switch, without optics."""
    power_w: Figure | None = None
    """At its limit."""


class Currency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A currency by its code of ISO 4217."""

    name: str = ""
    per_usd: Figure | None = None
    """Units of it for one US dollar."""


class ModelSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a model, in 10^9; its key is that of its layout preset."""

    name: str = ""
    total_b: Figure | None = None
    active_b: Figure | None = None
    """That one token goes through."""


class Catalogue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices by key."""

    accelerators: dict[str, Accelerator] = {}
    nics: dict[str, Nic] = {}
    switches: dict[str, Switch] = {}
    models: dict[str, ModelSize] = {}
    currencies: dict[str, Currency] = {}


@dataclass(frozen=True, slots=True)
class Curves:
    """What was measured on an accelerator; none: nothing was."""

    prefill: Measured | None
    decode: Measured | None


_NEEDED: Mapping[type, tuple[str, ...]] = {
    Accelerator: ("name", "memory_gb", "memory_gb_per_s"),
    Nic: ("name", "gbit_per_s"),
    Switch: ("name", "ports", "gbit_per_s"),
    ModelSize: ("name", "total_b", "active_b"),
    Currency: ("name", "per_usd"),
}
_KINDS: Mapping[str, str] = {
    "accelerators": "accelerator",
    "nics": "NIC",
    "switches": "switch",
    "models": "model",
    "currencies": "currency",
}
_WHOLE = ("cards", "nics", "ports")
_PRICES = ("price", "server_price")

D = TypeVar("D", Accelerator, Nic, Switch, ModelSize, Currency)


def load(paths: Sequence[Path] = ()) -> Catalogue:
    """Return the shipped catalogue with a user's files laid over it, in their order.

    Raises ConfigError naming file, device and field: unknown, missing, without a source, out of range.
    """
    found = shipped()
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        found = _over(found, _read(data, str(path), path.parent))
    return _whole(found)


@cache
def shipped() -> Catalogue:
    """Return the catalogue that comes with regauge."""
    folder, found = files("regauge.sim") / "catalogue", Catalogue()
    for name in SHIPPED:
        found = _over(found, _read((folder / name).read_bytes(), name, Path()))
    return _whole(found)


def curves(accelerator: Accelerator) -> Curves:
    """Read the measured curves that an accelerator names. Raises ConfigError with file and line."""
    prefill, decode = (
        read_measured(Path(name), value="seconds") if name else None
        for name in (accelerator.prefill_csv, accelerator.decode_csv)
    )
    return Curves(prefill, decode)


def _read(data: bytes, where: str, folder: Path) -> Catalogue:
    try:
        found = toml.decode(data, Catalogue)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    for kind in _KINDS:
        for key, dev in getattr(found, kind).items():
            for field in dev.__struct_fields__:
                if isinstance(value := getattr(dev, field), Figure):
                    _check(value, field, f"{where}: {kind}.{key}.{field}")
    placed = {key: _placed(dev, folder) for key, dev in found.accelerators.items()}
    return msgspec.structs.replace(found, accelerators=placed)


def _placed(dev: Accelerator, folder: Path) -> Accelerator:
    given = {f: str(folder / getattr(dev, f)) for f in ("prefill_csv", "decode_csv") if getattr(dev, f)}
    return msgspec.structs.replace(dev, **given)


def _check(figure: Figure, field: str, where: str) -> None:
    low, high = (figure.value if x is None else x for x in (figure.low, figure.high))
    if not all(isfinite(x) for x in (low, figure.value, high)) or not 0.0 < low <= figure.value <= high:
        raise ConfigError(f"{where}: 0 < low <= value <= high, all finite")
    if field in _WHOLE and figure.value != int(figure.value):
        raise ConfigError(f"{where}: is a number of things: give a whole number")
    if field == "share" and high > 1.0:
        raise ConfigError(f"{where}: a share is at most 1")
    if (field in _PRICES) != bool(figure.currency):
        raise ConfigError(
            f"{where}: " + ("a price needs its currency" if field in _PRICES else "only prices have one: currency")
        )


def _over(below: Catalogue, above: Catalogue) -> Catalogue:
    return Catalogue(*({**getattr(below, k), **_merged(getattr(below, k), getattr(above, k))} for k in _KINDS))


def _merged(below: Mapping[str, D], above: Mapping[str, D]) -> dict[str, D]:
    found: dict[str, D] = {}
    for key, dev in above.items():
        given = {f: v for f in dev.__struct_fields__ if (v := getattr(dev, f)) not in (None, "")}
        found[key] = msgspec.structs.replace(below[key], **given) if key in below else dev
    return found


def _whole(found: Catalogue) -> Catalogue:
    for kind, what in _KINDS.items():
        for key, dev in getattr(found, kind).items():
            missing = [f for f in _NEEDED[type(dev)] if not getattr(dev, f)]
            if missing:
                raise ConfigError(f"{kind}.{key}: a new {what} needs {', '.join(missing)}")
    for key, dev in found.accelerators.items():
        if dev.nic and dev.nic not in found.nics:
            raise ConfigError(f"accelerators.{key}.nic: no NIC {dev.nic!r}; known: {', '.join(sorted(found.nics))}")
    for kind in _KINDS:
        for key, dev in getattr(found, kind).items():
            for field in _PRICES:
                price = getattr(dev, field, None)
                if price and price.currency != "USD" and price.currency not in found.currencies:
                    raise ConfigError(
                        f"{kind}.{key}.{field}: no rate of {price.currency} to the dollar; add "
                        f"[currencies.{price.currency}] with name and per_usd"
                    )
    return found
