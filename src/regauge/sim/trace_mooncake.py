"""Mooncake's traces (kvcache-ai/Mooncake, FAST25-release/traces): one JSON object a line.

`timestamp` in ms, `input_length`, `output_length` in tokens, `hash_ids`: one for each block of 512 tokens, equal ids = equal prefix, over the
whole trace. The conversation trace's arrivals are rounded to ticks of 3 s: `Trace.tick_s` says so, and `trace.spread` takes it back.
Read here: the conversation trace (but its last 111 lines) and the synthetic one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from regauge.errors import ConfigError
from regauge.sim.trace import BLOCK, Arrival, Trace, ordered
from regauge.sim.trace_files import Budget, Lines, Options, multiple, rows, seconds, tokens
from regauge.sim.trace_stats import tick

_OWN, _MOST = 1 << 50, 1 << 20
"""Names of blocks that one request alone has: from where on, and how many of each."""


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


def read(lines: Lines, options: Options) -> Trace:
    """Read the rows. Raises ConfigError with the line."""
    step = multiple(lines.path, options.block, BLOCK) // BLOCK
    budget, arrivals = Budget(lines), []
    for number, row in rows(lines, _Row, options.limit):
        prompt = max(1, tokens(lines, number, "input_length", row.input_length))
        output = max(1, tokens(lines, number, "output_length", row.output_length))
        at = seconds(lines, number, "timestamp", row.timestamp) / 1000
        # The last block is a partial one, which cannot be shared. Of coarser blocks, the last of each is the whole's name.
        blocks = row.hash_ids[: prompt // BLOCK][step - 1 :: step]
        budget.take(number, len(blocks))
        arrivals.append(Arrival(at, prompt, output, blocks))
    found = ordered(arrivals)
    return Trace(lines.path.stem, step * BLOCK, found, tick([each.at for each in found]))


def write(arrivals: Iterable[Arrival], path: Path, block: int = BLOCK) -> int:
    """Write arrivals in this format, for other simulators; return their number. Times are rounded to 1 ms, a partial last block gets a name of its own.

    Raises ConfigError for a turn that waits for another: the format has none.
    """
    encoder, count = msgspec.json.Encoder(), 0
    with path.open("wb") as file:
        for count, each in enumerate(arrivals, 1):
            if each.after >= 0:
                raise ConfigError(f"{path}: arrival {count} waits for another, which Mooncake's format cannot say")
            names = list(each.blocks)
            whole = -(-each.tokens // block)
            names += range(_OWN + count * _MOST, _OWN + count * _MOST + whole - len(names))
            file.write(encoder.encode(_Row(round(1000 * each.at), each.tokens, each.output, tuple(names))) + b"\n")
    return count
