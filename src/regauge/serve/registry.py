"""Which workers there are, as one source knows them, and the changes from one look to the next. Pure: no I/O, no clock; leases are the sources'."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec

from regauge.errors import ConfigError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.serve import wire

MAX_ENTRY: Final = 256 << 10
"""Bytes of an entry's JSON."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PRINTABLE: Final = re.compile(r"[\x21-\x7e]*")
_MAX_RANKS: Final = 1_024


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker, or who started it, says of it. `read` has checked it."""

    address: wire.WorkerAddress
    instance: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Of its process: what an earlier process of its name says later does not count."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] | None = None
    """Seconds for which this holds unless it is said again; None: until it is taken back."""
    draining: bool = False
    """It takes no new requests; those under way go on."""
    layout: str = ""
    """JSON of its KV cache's layout, as `layout.files` writes it; empty: it tells it otherwise, or not at all."""

    @property
    def name(self) -> str:
        """Return the worker's name."""
        return self.address.name

    def read_layout(self) -> Layout | None:
        """Return the layout, if it is told. Raises LayoutError."""
        return files.decode(self.layout.encode(), format="json") if self.layout else None

    def __repr__(self) -> str:
        """Leave the token out."""
        return f"Entry({self.address!r}, instance={self.instance!r}, draining={self.draining})"


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker is there, or is another one than before under its name, or at another address."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Drained:
    """A worker takes no new requests from now on (`draining`), or takes them again."""

    name: str
    draining: bool


@dataclass(frozen=True, slots=True)
class Left:
    """A worker is no longer there."""

    name: str
    reason: str


Change = Joined | Drained | Left


def read(data: bytes) -> Entry:
    """Read an entry's JSON. Raises ConfigError that names the field."""
    if len(data) > MAX_ENTRY:
        raise ConfigError(f"a worker's entry has {len(data)} bytes; at most {MAX_ENTRY} are read")
    try:
        entry = msgspec.json.decode(data, type=Entry)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"a worker's entry: {error}") from error
    check(entry)
    return entry


def check(entry: Entry) -> None:
    """Raise ConfigError that names the field with which nobody can be reached."""
    address = entry.address
    where = "a worker's entry: address"
    for what, name in (("name", address.name), *(("ranks.name", rank.name) for rank in address.ranks)):
        check_name(f"{where}.{what}", name)
    _check_url(f"{where}.url", address.url)
    for rank in address.ranks:
        if rank.status:
            _check_url(f"{where}.ranks.status", rank.status)
        if rank.control is not None and not (rank.control[0] and _PRINTABLE.fullmatch(rank.control[0][:256])):
            raise ConfigError(f"{where}.ranks.control: {rank.control[0][:80]!r} is no host")
    if len(address.ranks) > _MAX_RANKS or len({rank.name for rank in address.ranks}) != len(address.ranks):
        raise ConfigError(f"{where}.ranks: at most {_MAX_RANKS}, each under its own name")
    if not address.ranks:
        raise ConfigError(f"{where}.ranks: name at least one")
    if address.role == "decode" and any(rank.control is None for rank in address.ranks):
        raise ConfigError(f"{where}.ranks.control: every rank of a decode worker has one")
    if len(address.token) > 4_096 or not _PRINTABLE.fullmatch(address.token):
        raise ConfigError(f"{where}.token: must be at most 4096 printable characters")


def check_name(where: str, name: str) -> None:
    """Raise ConfigError for what cannot be a worker's name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: must be 1 to 128 letters, digits and ._-, not {name[:140]!r}")


def _check_url(where: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or len(url) > 1_024 or not _PRINTABLE.fullmatch(url) or parts.username or parts.query or parts.fragment:
        raise ConfigError(f"{where}: give one like http://10.0.0.2:8000, not {url[:80]!r}")


class Registry:
    """The entries of one source, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[str, Entry] = {}

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The entries, by name."""
        return self._entries

    def replace(self, entries: Iterable[Entry], reason: str) -> tuple[list[Change], int]:
        """Make these the only entries; return the changes, and how many were too many. `reason`: why those that are not among them have left."""
        wanted = {entry.name: entry for entry in entries}
        changes: list[Change] = [Left(name, reason) for name in self._entries if name not in wanted]
        self._entries = {name: entry for name, entry in self._entries.items() if name in wanted}
        left_out = 0
        for entry in wanted.values():
            before = self._entries.get(entry.name)
            if before is not None or len(self._entries) < self._limit:
                self._entries[entry.name] = entry
                changes += _differences(before, entry)
            else:
                left_out += 1
        return changes, left_out


def _differences(before: Entry | None, after: Entry) -> list[Change]:
    changes: list[Change] = []
    fresh = before is None or (before.address, before.instance, before.layout) != (
        after.address,
        after.instance,
        after.layout,
    )
    if fresh:
        changes.append(Joined(after))
    if after.draining != (before.draining if before is not None and not fresh else False):
        changes.append(Drained(after.name, after.draining))
    return changes


class Merge:
    """What several sources say together: a name belongs to the first that told it, and when that has no such worker any more, to the next."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        """Names that are `taken` belong to none of them."""
        self._taken = frozenset(taken)
        self._told: dict[str, dict[int, tuple[Entry, bool]]] = {}
        """Of each name, what each source says: the entry, and whether it drains; the owner first."""

    def apply(self, source: int, changes: Iterable[Change]) -> tuple[list[Change], list[str]]:
        """Return what follows from a source's changes, and the names that it told in vain for now."""
        out: list[Change] = []
        vain: list[str] = []
        for change in changes:
            name = change.entry.name if isinstance(change, Joined) else change.name
            told = self._told.setdefault(name, {})
            if isinstance(change, Joined):
                told[source] = (change.entry, False)
            elif isinstance(change, Drained) and source in told:
                told[source] = (told[source][0], change.draining)
            owns = name not in self._taken and next(iter(told), None) == source
            if isinstance(change, Left):
                told.pop(source, None)
            if not owns:
                vain += [name] if isinstance(change, Joined) else []
            else:
                out.append(change)
                if isinstance(change, Left) and told:
                    out += _whole(*next(iter(told.values())))
            if not told:
                del self._told[name]
        return out, vain


def _whole(entry: Entry, draining: bool) -> list[Change]:
    return [Joined(entry), *([Drained(entry.name, True)] if draining else [])]
