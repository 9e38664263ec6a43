"""Qwen-Bailian's traces (alibaba-edu/qwen-bailian-usagetraces-anon): one JSON object a line.

`chat_id`, `parent_chat_id` (-1: none), `timestamp` (s), `input_length`, `output_length`, `type`, `turn`, `hash_ids` of 16 tokens each. An id is of a
block's content alone: the same text behind another prefix has the same id, whose KV is another. So a block is named here by its id and all
before it. Read: the dataset's description; the files are pointers to a store that was not at hand.

The trace has no service times, so it is replayed at its times; who follows whom (`parent_chat_id`) is in the blocks.
"""

from __future__ import annotations

import msgspec

from regauge.sim.trace import Arrival, Trace, ordered
from regauge.sim.trace_files import Budget, Lines, Options, multiple, rows, seconds, tokens
from regauge.sim.trace_prefix import Prefixes
from regauge.sim.trace_stats import tick

BLOCK = 16


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    chat_id: int
    parent_chat_id: int


def read(lines: Lines, options: Options) -> Trace:
    """Read the rows. Raises ConfigError with the line."""
    step = multiple(lines.path, options.block, BLOCK) // BLOCK
    names = Prefixes()
    budget, arrivals = Budget(lines), []
    for number, row in rows(lines, _Row, options.limit):
        prompt = max(1, tokens(lines, number, "input_length", row.input_length))
        output = max(1, tokens(lines, number, "output_length", row.output_length))
        at = seconds(lines, number, "timestamp", row.timestamp)
        blocks = names.chain(row.hash_ids[: prompt // BLOCK], step)
        budget.take(number, len(blocks))
        arrivals.append(Arrival(at, prompt, output, blocks))
    found = ordered(arrivals)
    return Trace(lines.path.stem, step * BLOCK, found, tick([each.at for each in found]))
