"""TraceLab's rounds of coding agents (uw-syfi/TraceLab, round_trace.jsonl): closed loops, one JSON object a call of a model.

`session_id`, `round_index`, `input_tokens_total` = `prefix_tokens` (cached) + `newly_append_tokens`, `output_tokens`, `timing_events` with an ISO
`timestamp` each: the first is what the round answers, the last the end of its answer. Read here: the repository's example of two sessions; the releases
(357 K rounds and more) were not at hand.

The trace counts tokens and has no blocks, so a block has as many tokens as asked for (512). What was cached may be an answer as well; here only prompts
are shared, and what another session left cached does not count.
"""

from __future__ import annotations

import msgspec

from regauge.sim.trace import BLOCK, Arrival, Trace, ordered
from regauge.sim.trace_files import Budget, Lines, Options, clock, rows, tokens
from regauge.sim.trace_prefix import History, Numbers


class _Event(msgspec.Struct):
    timestamp: str


class _Row(msgspec.Struct):
    session_id: str
    round_index: int
    input_tokens_total: int
    prefix_tokens: int
    output_tokens: int
    timing_events: list[_Event] = []


def read(lines: Lines, options: Options) -> Trace:
    """Read the rounds, of each session in order of their index; the first session begins at 0. Raises ConfigError with the line."""
    sessions: dict[str, list[tuple[int, _Row]]] = {}
    for number, row in rows(lines, _Row, options.limit):
        sessions.setdefault(row.session_id, []).append((number, row))
    block, numbers, budget = options.block or BLOCK, Numbers(), Budget(lines)
    arrivals: list[Arrival] = []
    for rounds in sessions.values():
        history, root, ended = History(numbers, block), 0.0, 0.0
        for turn, (number, row) in enumerate(sorted(rounds, key=lambda each: each[1].round_index)):
            if not row.timing_events:
                lines.refuse(number, "timing_events: empty; the first and the last say when a round begins and ends")
            began, done = (clock(lines, number, "timing_events", row.timing_events[k].timestamp) for k in (0, -1))
            prompt = max(1, tokens(lines, number, "input_tokens_total", row.input_tokens_total))
            output = max(1, tokens(lines, number, "output_tokens", row.output_tokens))
            known = tokens(lines, number, "prefix_tokens", row.prefix_tokens)
            if known > prompt:
                lines.refuse(number, f"prefix_tokens: {known} of a prompt of {prompt}")
            blocks = history.prompt(prompt, known)
            budget.take(number, len(blocks))
            if turn == 0 or options.closed is False:
                root = began
                arrivals.append(Arrival(root, prompt, output, blocks))
            else:
                arrivals.append(Arrival(root, prompt, output, blocks, len(arrivals) - 1, max(0.0, began - ended)))
            ended = done
    begin = min((each.at for each in arrivals), default=0.0)
    moved = [Arrival(a.at - begin, a.tokens, a.output, a.blocks, a.after, a.think_s) for a in arrivals]
    return Trace(lines.path.stem, block, ordered(moved))
