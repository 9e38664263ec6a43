"""Requests of a published trace, or generated ones like them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from regauge.errors import ConfigError

BLOCK = 512
"""Tokens of a block in Mooncake's traces."""
TICK_S = 3.0
"""Mooncake's conversation trace has its arrivals rounded to ticks of 3 s: replayed as they are, 10 requests on average come at one instant."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes (seconds), its lengths in tokens, and its prefix blocks."""

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]
    after: int = -1
    """Position in the trace of the turn before: it comes `think_s` after that one's end. -1: there is none."""
    think_s: float = 0.0


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path) -> list[Arrival]:
    """Read a Mooncake trace (one JSON object a line, times in ms), in order of time. Raises ConfigError that names file and line."""
    decoder = msgspec.json.Decoder(_Line)
    arrivals = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
        tokens = max(1, row.input_length)
        # The last block is a partial one, which cannot be shared.
        blocks = tuple(row.hash_ids[: tokens // BLOCK])
        arrivals.append(Arrival(row.timestamp / 1000, tokens, max(1, row.output_length), blocks))
    return sorted(arrivals, key=lambda each: each.at)


def spread(arrivals: Sequence[Arrival], seed: int, tick_s: float = TICK_S) -> list[Arrival]:
    """Return the arrivals with each moved by a random part of a tick, in order of time."""
    rng = random.Random(seed)  # noqa: S311  # a simulation
    return sorted((replace(each, at=each.at + rng.uniform(0, tick_s)) for each in arrivals), key=lambda each: each.at)


def paced(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """Return the arrivals `speed` times as fast, the first at 0."""
    first = arrivals[0].at if arrivals else 0.0
    return [replace(each, at=(each.at - first) / speed) for each in arrivals]


def generate(seed: int, count: int, per_s: float) -> list[Arrival]:
    """Make conversations: Poisson arrivals; lengths with a heavy tail; turns that repeat what went before, behind a system prompt of all."""
    rng = random.Random(seed)  # noqa: S311  # a simulation
    at, fresh = 0.0, 1
    talks: list[tuple[int, ...]] = []
    arrivals = []
    for _ in range(count):
        at += rng.expovariate(per_s)
        talk = rng.choice(talks) if talks and rng.random() < 0.5 else (0,)
        tokens = min(100_000, int(rng.lognormvariate(8.3, 1.1)) + BLOCK)
        new = max(1, tokens // BLOCK)
        blocks = (*talk, *range(fresh, fresh + new))
        fresh += new
        if len(blocks) * BLOCK < 100_000:
            talks.append(blocks)
            del talks[:-200]
        arrivals.append(
            Arrival(at, len(blocks) * BLOCK + rng.randrange(BLOCK), 1 + int(rng.expovariate(1 / 300)), blocks)
        )
    return arrivals
