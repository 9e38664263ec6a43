"""What is kept of a trace to make others like it: tables and a few numbers, no request of it. Can be written as JSON and read again."""

from __future__ import annotations

from bisect import bisect_right
from math import isfinite
from pathlib import Path

import msgspec

from regauge.errors import ConfigError

LEVELS = (*(k / 100 for k in range(100)), 0.9925, 0.995, 0.9975, 0.999, 0.9995, 1.0)
"""Of the quantiles in a table: closer where tails are."""
MAX_BYTES = 1 << 20

Quantiles = tuple[float, ...]
"""One for each of LEVELS, ascending."""


def quantile(table: Quantiles, level: float) -> float:
    """Return the quantile of a level from 0 to 1, on a line between those of the table."""
    at = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[at - 1], LEVELS[at]
    return table[at - 1] + (table[at] - table[at - 1]) * (level - low) / (high - low)


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When requests come (or sessions, of a closed loop): a renewal process of Gamma gaps, whose clock runs at one of two speeds.

    The speeds' mean is 1; both stay for an exponential time. `low` = `high` = 1: one speed only.
    """

    per_s: float
    """0: the trace does not say."""
    cv: float = 1.0
    """Of the gaps, at one speed."""
    high: float = 1.0
    low: float = 1.0
    high_s: float = 1.0
    low_s: float = 1.0
    """Mean stay, seconds."""


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of prompts and answers, tokens; joined by a Gaussian copula."""

    prompt: Quantiles
    output: Quantiles
    correlation: float
    """Of the normal scores of prompt and output."""


class Reuse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What prompts of an open loop have in common with earlier ones."""

    common: int
    """Blocks that prompts of new sessions begin with."""
    follow: float
    """Share of the requests that go on from an earlier prompt, beyond what is common."""
    following: Lengths
    kept: Quantiles
    """Of those, the share of the prompt that came before."""
    correlation: float
    """Of the normal scores of prompt and kept share."""
    gap_s: Quantiles
    """Between the request and the one that it goes on from."""


class Sessions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Closed loops. A session's prompts keep their rank among those of their phase, and now and then take another."""

    turns: Quantiles
    think_s: Quantiles
    phases: tuple[Quantiles, ...]
    """Prompts at the begin, the end, and in between at equal parts of the session's turns."""
    steady: float
    """Share of the turns that keep the rank of the one before."""
    kept: Quantiles
    """Of what a turn's prompt could have in common with the one before, by their lengths: the share that it has."""


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trace's likeness."""

    name: str
    block: int
    times: Times
    fresh: Lengths
    """Of requests that go on from none; of a closed loop, of all."""
    reuse: Reuse | None = None
    sessions: Sessions | None = None


def dump(fitted: Fitted) -> bytes:
    """Return as JSON."""
    return msgspec.json.format(msgspec.json.encode(fitted), indent=0)


def load(path: Path) -> Fitted:
    """Read what `dump` wrote, perhaps with changes. Raises ConfigError that names the file and the field."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes, which is the most that is read")
        fitted = msgspec.json.decode(data, type=Fitted)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    for field, table in _tables(fitted):
        if len(table) != len(LEVELS) or list(table) != sorted(table) or not all(isfinite(x) and x >= 0 for x in table):
            raise ConfigError(
                f"{path}: {field}: a table has {len(LEVELS)} quantiles, ascending, finite and not negative"
            )
    _check(path, fitted)
    return fitted


def _tables(fitted: Fitted) -> list[tuple[str, Quantiles]]:
    found = [("fresh.prompt", fitted.fresh.prompt), ("fresh.output", fitted.fresh.output)]
    if (reuse := fitted.reuse) is not None:
        found += [
            ("reuse.following.prompt", reuse.following.prompt),
            ("reuse.following.output", reuse.following.output),
        ]
        found += [("reuse.kept", reuse.kept), ("reuse.gap_s", reuse.gap_s)]
    if (sessions := fitted.sessions) is not None:
        found += [("sessions.turns", sessions.turns), ("sessions.think_s", sessions.think_s)]
        found += [(f"sessions.phases[{k}]", phase) for k, phase in enumerate(sessions.phases)]
        found += [("sessions.kept", sessions.kept)]
    return found


def _check(path: Path, fitted: Fitted) -> None:
    times = fitted.times
    limits = {
        "times.per_s": (times.per_s, 0.0, 1e9),
        "times.cv": (times.cv, 0.01, 100.0),
        "times.high": (times.high, 1.0, 1e6),
        "times.low": (times.low, 0.0, 1.0),
        "times.high_s": (times.high_s, 1e-6, 1e9),
        "times.low_s": (times.low_s, 1e-6, 1e9),
        "fresh.correlation": (fitted.fresh.correlation, -1.0, 1.0),
        "block": (fitted.block, 0, 1 << 20),
    }
    if fitted.reuse is not None:
        limits["reuse.follow"] = (fitted.reuse.follow, 0.0, 1.0)
        limits["reuse.correlation"] = (fitted.reuse.correlation, -1.0, 1.0)
        limits["reuse.common"] = (fitted.reuse.common, 0, 1 << 20)
    if fitted.sessions is not None:
        limits["sessions.steady"] = (fitted.sessions.steady, 0.0, 1.0)
        limits["sessions.phases"] = (len(fitted.sessions.phases), 2, 100)
    for field, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ConfigError(f"{path}: {field}: {value}; it lies from {low:g} to {high:g}")
    if not fitted.block and fitted.reuse:
        raise ConfigError(f"{path}: block: 0, so there is no reuse; leave it out, or give the tokens of a block")
