"""TOML files that people write, read within bounds. What comes over a network is JSON or msgpack."""

from __future__ import annotations

import tomllib
from decimal import Decimal
from typing import TypeVar

import msgspec

MAX_BYTES = 1 << 20

T = TypeVar("T")


def decode(data: bytes, kind: type[T], *, exact: bool = False) -> T:
    """Read a file's bytes. Raises msgspec.DecodeError, also for more than MAX_BYTES and for endless nesting or numbers.

    `exact`: numbers with a point are read as they are written, for fields of type Decimal; they fit none of type float.
    Dotted keys of thousands of parts take memory by the square of their number: do not read a stranger's file.
    """
    if len(data) > MAX_BYTES:
        raise msgspec.DecodeError(f"larger than {MAX_BYTES} bytes, which is the most that is read")
    try:
        if exact:
            return msgspec.convert(tomllib.loads(data.decode(), parse_float=Decimal), kind)
        return msgspec.toml.decode(data, type=kind)
    except msgspec.DecodeError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:  # as the standard library's parser lets them through
        raise msgspec.DecodeError(str(error)) from error
