"""Layouts as TOML and JSON: sound once they are read, refused with the path of the first field that is not."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from regauge import toml
from regauge.errors import LayoutError
from regauge.layout.spec import Layout
from regauge.layout.validate import validate


def decode(data: bytes, *, format: Literal["toml", "json"]) -> Layout:  # noqa: A002
    """Read a layout. Raises LayoutError with the path of the field that is unknown, missing or wrong."""
    try:
        layout = toml.decode(data, Layout) if format == "toml" else msgspec.json.decode(data, type=Layout)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutError(str(error)) from error
    return validate(layout)


def encode(layout: Layout, *, format: Literal["toml", "json"]) -> bytes:  # noqa: A002
    """Write a layout; `decode` gives it back."""
    plain: Any = msgspec.to_builtins(layout)
    return msgspec.toml.encode(plain) if format == "toml" else msgspec.json.format(msgspec.json.encode(plain), indent=2)
