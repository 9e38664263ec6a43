"""BurstGPT (HPMLL/BurstGPT), CSV: lengths and times of a campus' requests to ChatGPT and GPT-4, nothing on reuse.

The first release has `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`; the second puts `Session ID,Elapsed time` between
`Timestamp` and `Model`, and gives an id only to rows of the conversation log. Times are seconds, the second release's not from 0. Failed requests have 0
response tokens, and are left out: they took nothing. Looked up, both: the files are pointers to a store that was not at hand.

`closed=True`: rows of a session wait for the one before, and think for what is left between its end (begin + elapsed time) and the next.
"""

from __future__ import annotations

from regauge.sim.trace import Arrival, Trace, ordered
from regauge.sim.trace_files import Columns, Lines, Options, seconds, tokens
from regauge.sim.trace_stats import tick

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Session ID", "Elapsed time")


def read(lines: Lines, options: Options) -> Trace:
    """Read the rows; the first comes at 0. Raises ConfigError with the line."""
    failed = 0
    read: list[tuple[float, int, int, str, float]] = []
    for number, (time, prompt, output, session, elapsed) in Columns(lines, COLUMNS).rows(OPTIONAL, options.limit):
        at = seconds(lines, number, "Timestamp", time)
        count, answer = (
            tokens(lines, number, name, value) for name, value in zip(COLUMNS[1:], (prompt, output), strict=True)
        )
        if answer == 0 or count == 0:
            failed += 1
            continue
        read.append((at, count, answer, session, seconds(lines, number, "Elapsed time", elapsed) if elapsed else 0.0))
    read.sort(key=lambda row: row[0])
    begin = read[0][0] if read else 0.0
    arrivals: list[Arrival] = []
    last: dict[str, tuple[int, float]] = {}
    for at, count, answer, session, took in read:
        before = last.get(session) if session and options.closed else None
        if before is None:
            arrivals.append(Arrival(at - begin, count, answer, ()))
        else:
            turn, ended = before
            arrivals.append(Arrival(arrivals[turn].at, count, answer, (), turn, max(0.0, at - ended)))
        last[session] = len(arrivals) - 1, at + took
    notes = (f"{failed} failed requests (no tokens) are left out",) if failed else ()
    return Trace(lines.path.stem, 0, ordered(arrivals), tick([row[0] for row in read]), notes)
