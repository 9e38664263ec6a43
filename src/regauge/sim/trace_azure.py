"""Azure's traces of LLM inference (Azure/AzurePublicDataset), CSV: lengths and times, nothing on reuse.

2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`; times to 100 ns, without a zone (2023) or with one (2024). Multimodal, 2025: the column
`NumImages` too, whose images are no tokens of ours and are left out. Read here: both files of 2023 (CRLF, the last line without its end). The
columns of 2024 and 2025 were looked up in the dataset's descriptions; the files were not at hand.
"""

from __future__ import annotations

from regauge.sim.trace import Arrival, Trace, ordered
from regauge.sim.trace_files import Columns, Lines, Options, clock, tokens
from regauge.sim.trace_stats import tick

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(lines: Lines, options: Options) -> Trace:
    """Read the rows; the first comes at 0. Raises ConfigError with the line."""
    arrivals, empty = [], 0
    columns = Columns(lines, COLUMNS)
    for number, (time, prompt, output) in columns.rows(limit=options.limit):
        at = clock(lines, number, "TIMESTAMP", time)
        count = tokens(lines, number, "ContextTokens", prompt)
        answer = tokens(lines, number, "GeneratedTokens", output)
        empty += count == 0
        arrivals.append(Arrival(at, max(1, count), max(1, answer), ()))
    begin = min((each.at for each in arrivals), default=0.0)
    found = ordered(Arrival(each.at - begin, each.tokens, each.output, ()) for each in arrivals)
    notes = [f"{empty} requests without a prompt are read with one token"] if empty else []
    if "NumImages" in columns.header:
        notes.append("images are left out: the trace has their number, not their tokens")
    return Trace(lines.path.stem, 0, found, tick([each.at for each in found]), tuple(notes))
