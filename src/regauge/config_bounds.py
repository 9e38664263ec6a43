"""Ranges of configured numbers, and how one outside is refused."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Annotated

import msgspec

from regauge.errors import ConfigError

MAX_S = 86_400.0
"""Longest time limit, in seconds: what the system's timers take without question."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Limit = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


def bound(
    owner: msgspec.Struct, where: str, names: Sequence[str], *, least: float | None = None, most: float = inf
) -> None:
    """Raise ConfigError for the first of these fields that is not from `least` (None: above 0) to `most`, and finite."""
    for name in names:
        value = getattr(owner, name)
        enough = value > 0 if least is None else value >= least  # neither is so for NaN
        if not (enough and value < inf and value <= most):
            low = "more than 0" if least is None else f"at least {least:g}"
            high = "finite" if most == inf else f"at most {most:g}"
            default = next(field.default for field in msgspec.structs.fields(owner) if field.name == name)
            raise ConfigError(f"{where}.{name}: must be {low} and {high}, not {value}; leave it out for {default}")
