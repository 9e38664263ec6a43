"""What the readers of traces share: lines within bounds, numbers that make sense, and errors that name file, line and remedy."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import BinaryIO, NoReturn, TypeVar

import msgspec

from regauge.errors import ConfigError

MAX_LINE = 64 << 20
"""Bytes. A published Weka session is one line of up to some 10 MB."""
MAX_FILE = 4 << 30
"""Bytes, after decompression."""
MAX_TOKENS = 100_000_000
"""Of one prompt or answer: more is a broken file."""
MAX_BLOCKS = 200_000_000
"""Of all arrivals together, some 8 bytes each."""

_BOM = b"\xef\xbb\xbf"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """How to read: see `trace.read`."""

    block: int | None = None
    closed: bool | None = None
    limit: int = 0

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ConfigError(f"block: {self.block}; a block has 1 token or more")
        if self.limit < 0:
            raise ConfigError(f"limit: {self.limit}; give the number of rows to read, 0 for all")


def refuse(path: Path, line: int, what: str) -> NoReturn:
    """Raise the ConfigError of a line."""
    raise ConfigError(f"{path}, line {line}: {what}")


class Lines:
    """The lines of a file, numbered from 1, without line ends; blank ones are left out. The last may lack its end.

    Iterating raises ConfigError for a line over MAX_LINE and for a file over MAX_FILE.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        size = 0
        try:
            with opened(self.path) as file:
                number = 0
                while line := file.readline(MAX_LINE + 1):
                    number += 1
                    size += len(line)
                    if len(line) > MAX_LINE:
                        refuse(self.path, number, f"longer than {MAX_LINE:,} bytes: is this a trace of one row a line?")
                    if size > MAX_FILE:
                        refuse(
                            self.path,
                            number,
                            f"the file has more than {MAX_FILE:,} bytes: cut it, or give a limit of rows",
                        )
                    if line := line.removeprefix(_BOM).strip():
                        yield number, line
        except (OSError, EOFError, gzip.BadGzipFile) as error:
            raise ConfigError(f"{self.path}: {getattr(error, 'strerror', None) or error}") from error

    def first(self) -> tuple[int, bytes]:
        """Return the first line that is not blank. Raises ConfigError if there is none."""
        for number, line in self:
            return number, line
        raise ConfigError(f"{self.path}: the file is empty")

    def refuse(self, line: int, what: str) -> NoReturn:
        """Raise the ConfigError of a line."""
        refuse(self.path, line, what)


def opened(path: Path) -> BinaryIO:
    """Open a file that may be gzip, whatever its name."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def rows(lines: Lines, kind: type[T], limit: int = 0) -> Iterator[tuple[int, T]]:
    """Yield the lines as JSON objects of a kind. Raises ConfigError with the line and the field."""
    decoder = msgspec.json.Decoder(kind)
    for count, (number, line) in enumerate(lines):
        if limit and count >= limit:
            return
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            lines.refuse(number, f"{error}")


class Columns:
    """Rows of a CSV file by the names of its header. The published traces quote nothing, so a quote is refused."""

    def __init__(self, lines: Lines, names: Sequence[str]) -> None:
        self.lines, self.names = lines, names
        self.number, header = lines.first()
        self.header = [each.strip() for each in header.decode("utf-8", "replace").split(",")]
        if missing := [name for name in names if name not in self.header]:
            lines.refuse(
                self.number, f"no column {', '.join(missing)} in the header; there is {', '.join(self.header)}"
            )

    def rows(self, optional: Sequence[str] = (), limit: int = 0) -> Iterator[tuple[int, list[str]]]:
        """Yield line number and values of the names, then of the optional ones ("" where the file has no such column)."""
        places = [self.header.index(name) for name in self.names]
        spare = [self.header.index(name) if name in self.header else -1 for name in optional]
        for count, (number, line) in enumerate(self.lines):
            if number == self.number:
                continue
            if limit and count > limit:
                return
            cells = line.decode("utf-8", "replace").split(",")
            if len(cells) != len(self.header):
                self.lines.refuse(number, f"{len(cells)} columns where the header has {len(self.header)}")
            yield (
                number,
                [cells[place].strip() for place in places] + [cells[p].strip() if p >= 0 else "" for p in spare],
            )


def tokens(lines: Lines, number: int, name: str, value: float | str) -> int:
    """Return a number of tokens, 0 or more, as int. Raises ConfigError for anything else."""
    if type(value) is int and 0 <= value <= MAX_TOKENS:
        return value
    try:
        found = float(value)
    except (ValueError, OverflowError):
        lines.refuse(number, f"{name}: {str(value)[:40]!r} is no number of tokens; 0 to {MAX_TOKENS:,} are")
    if not (isfinite(found) and 0 <= found <= MAX_TOKENS and found == int(found)):
        lines.refuse(number, f"{name}: {value} is no number of tokens; 0 to {MAX_TOKENS:,} are")
    return int(found)


def seconds(lines: Lines, number: int, name: str, value: float | str) -> float:
    """Return a finite number of seconds, not negative. Raises ConfigError for anything else."""
    try:
        found = float(value)
    except (ValueError, OverflowError):
        lines.refuse(number, f"{name}: {str(value)[:40]!r} is no time in seconds")
    if not isfinite(found) or found < 0:
        lines.refuse(number, f"{name}: {value}; times are finite and not negative")
    return found


def clock(lines: Lines, number: int, name: str, value: str) -> float:
    """Return the seconds since 1970 of a date and time as ISO 8601 has it, UTC unless it says otherwise.

    Fractions of a second of any length are read to the microsecond.
    """
    head, dot, rest = value.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    text = head + (dot + rest[:digits][:6].ljust(6, "0") if dot else "") + rest[digits:].replace("Z", "+00:00")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        lines.refuse(number, f"{name}: {value[:40]!r} is no date and time; they are like 2023-11-16 18:17:03.9799600")
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class Budget:
    """Refuses a trace of more blocks than fit into memory."""

    def __init__(self, lines: Lines) -> None:
        self.lines, self.used = lines, 0

    def take(self, number: int, count: int) -> None:
        """Count blocks of a line. Raises ConfigError past MAX_BLOCKS."""
        self.used += count
        if self.used > MAX_BLOCKS:
            self.lines.refuse(
                number, f"more than {MAX_BLOCKS:,} blocks so far: give a limit of rows, or a larger block"
            )


def multiple(path: Path, block: int | None, own: int, default: int | None = None) -> int:
    """Return the tokens of a block: what is asked for, else the default, else the format's own. Raises ConfigError unless a multiple of that."""
    chosen = block if block is not None else default or own
    if chosen % own:
        raise ConfigError(f"{path}: block: {chosen} is no multiple of the trace's own {own} tokens")
    return chosen
