"""Weka's agent sessions (callanjfox/kv-cache-tester, traces/trace_NNNN.json): closed loops, one JSON object a session.

A file for each session, or a line for each. `block_size` (64), `hash_id_scope` ("local": ids are those of the session), and `requests` with `t` (s from the
session's begin), `type` ("n", "s": normal, streaming; "subagent": holds `requests` of its own), `in`, `out`, `hash_ids`, `api_time`, `think_time`.
Read here: 30 sessions without subagents; how these nest was looked up in the tool's documentation and in another reader's tests.

The compact form has `id, bs, r`, and `r` lists `[t, in, out, tokens of the prompt that came before in the session]`, subagents among them in
time order. It has no service times: what the sample's are, by length of the answer (`SERVICE_S`), is taken from the times between requests.

Sessions have no begin: all come at 0, and `trace_shape.staggered` gives them one. Reuse between sessions (tools, system prompt) is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from regauge.errors import ConfigError
from regauge.sim.trace import BLOCK, Arrival, Trace, ordered
from regauge.sim.trace_files import MAX_LINE, Budget, Lines, Options, multiple, opened, rows, seconds, tokens
from regauge.sim.trace_prefix import History, Numbers, Prefixes

SERVICE_S = (1.6, 0.0185)
"""Seconds of an answer, and for each of its tokens: the line of least absolute error through 535 `api_time` of the 30 sessions."""
NOTES = ("sessions have no begin of their own: all come at 0 (staggered gives them one)",)


class _Request(msgspec.Struct):
    t: float
    type: str = "n"
    input: int = msgspec.field(name="in", default=0)
    output: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None
    requests: list[_Request] = []


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Request]
    hash_id_scope: str = "local"


class _Compact(msgspec.Struct):
    id: str
    bs: int
    r: list[tuple[float, int, int, int]]


@dataclass(slots=True)
class _Reading:
    """A file that is being read, session by session."""

    lines: Lines
    options: Options
    sessions: int = 0
    own: int = 0
    block: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    names: Prefixes = field(default_factory=Prefixes)
    numbers: Numbers = field(default_factory=Numbers)

    def begin(self, number: int, own: int) -> None:
        """Check a session's block against those before."""
        if own < 1:
            self.lines.refuse(number, f"block_size: {own}; a block has 1 token or more")
        if self.own and own != self.own:
            self.lines.refuse(number, f"block_size: {own} where the sessions before have {self.own}")
        if not self.own:
            self.own = own
            self.block = multiple(self.lines.path, self.options.block, own, BLOCK if BLOCK % own == 0 else own)
        self.sessions += 1

    def trace(self, name: str) -> Trace:
        open_loop = self.options.closed is False
        return Trace(name, self.block, ordered(self.arrivals), 0.0, () if open_loop else NOTES)


def read(lines: Lines, options: Options) -> Trace:
    """Read sessions, one a line. Raises ConfigError with the line."""
    reading, budget = _Reading(lines, options), Budget(lines)
    for number, session in rows(lines, _Session, options.limit):
        _session(reading, budget, number, session)
    return reading.trace(lines.path.stem)


def read_folder(folder: Path, options: Options) -> Trace:
    """Read the sessions of a folder, one a file, in order of name. Raises ConfigError with the file."""
    files = sorted(folder.glob("*.json")) + sorted(folder.glob("*.json.gz"))
    if not files:
        raise ConfigError(f"{folder}: no *.json in it; a folder holds Weka sessions, one a file")
    reading = _Reading(Lines(folder), options)
    budget, decoder = Budget(reading.lines), msgspec.json.Decoder(_Session)
    for path in files[: options.limit or None]:
        reading.lines = Lines(path)
        try:
            with opened(path) as file:
                data = file.read(MAX_LINE + 1)
            if len(data) > MAX_LINE:
                raise ConfigError(
                    f"{path}: larger than {MAX_LINE:,} bytes, which is the most that is read of a session"
                )
            session = decoder.decode(data)
        except (OSError, EOFError, msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        _session(reading, budget, 1, session)
    return reading.trace(folder.name)


def _session(reading: _Reading, budget: Budget, number: int, session: _Session) -> None:
    reading.begin(number, session.block_size)
    scope = 0 if session.hash_id_scope == "global" else reading.sessions
    _Loop(reading, budget, number, scope).run(session.requests)


@dataclass(slots=True)
class _Turn:
    """One that another may wait for."""

    place: int
    ended: float


class _Loop:
    """Turns of a session and its subagents, in the order in which they wait for each other."""

    def __init__(self, reading: _Reading, budget: Budget, number: int, scope: int) -> None:
        self.reading, self.budget, self.number, self.scope = reading, budget, number, scope

    def run(self, requests: list[_Request], parent: _Turn | None = None) -> _Turn | None:
        """Take a list of requests; return the turn of it that ended last.

        A turn waits for one other: of the turn before and the subagents since, that which ended last before the turn came (`t` is
        rounded to a second). One launched and left alone is waited for by nobody.
        """
        before, since = parent, list[_Turn]()
        for request in requests:
            if request.type == "subagent":
                inner = self.run(request.requests, before)
                since += [inner] if inner is not None and inner is not before else []
                continue
            waited = max(
                [each for each in since if each.ended <= request.t + 1], key=lambda each: each.ended, default=before
            )
            if before is not None and waited is not None and waited.ended < before.ended:
                waited = before
            alone = waited is before and before is not parent
            before, since = self.turn(request, waited, alone), []
        return max([before, *since], key=lambda each: each.ended) if before is not None else None

    def turn(self, request: _Request, waited: _Turn | None, alone: bool) -> _Turn:
        """Add a request that waits for another; `alone`: for the one before it, whose think time is written down."""
        lines, number, reading = self.reading.lines, self.number, self.reading
        at = seconds(lines, number, "t", request.t)
        prompt = max(1, tokens(lines, number, "in", request.input))
        output = max(1, tokens(lines, number, "out", request.output))
        step = reading.block // reading.own
        blocks = reading.names.chain(request.hash_ids[: prompt // reading.own], step, self.scope)
        self.budget.take(number, len(blocks))
        place = len(reading.arrivals)
        if waited is None or reading.options.closed is False:
            reading.arrivals.append(Arrival(at, prompt, output, blocks))
        else:
            think = request.think_time if alone and request.think_time is not None else at - waited.ended
            root = reading.arrivals[waited.place].at
            think = max(0.0, seconds(lines, number, "think_time", max(0.0, think)))
            reading.arrivals.append(Arrival(root, prompt, output, blocks, waited.place, think))
        return _Turn(place, at + seconds(lines, number, "api_time", request.api_time or 0.0))


def read_compact(lines: Lines, options: Options) -> Trace:
    """Read sessions of the compact form, one a line. Raises ConfigError with the line."""
    reading, budget = _Reading(lines, options), Budget(lines)
    for number, session in rows(lines, _Compact, options.limit):
        reading.begin(number, session.bs)
        history, ended = History(reading.numbers, reading.block), 0.0
        for turn, (time, prompt, output, before) in enumerate(session.r):
            at = seconds(lines, number, f"r[{turn}][0]", time)
            count = max(1, tokens(lines, number, f"r[{turn}][1]", prompt))
            answer = max(1, tokens(lines, number, f"r[{turn}][2]", output))
            known = tokens(lines, number, f"r[{turn}][3]", before)
            if known > count:
                lines.refuse(number, f"r[{turn}]: {known} tokens came before, of a prompt of {count}")
            blocks = history.prompt(count, known)
            budget.take(number, len(blocks))
            if options.closed is False:
                reading.arrivals.append(Arrival(at, count, answer, blocks))
            elif turn == 0:
                reading.arrivals.append(Arrival(0.0, count, answer, blocks))
            else:
                waits = len(reading.arrivals) - 1
                reading.arrivals.append(Arrival(0.0, count, answer, blocks, waits, max(0.0, at - ended)))
            ended = at + SERVICE_S[0] + SERVICE_S[1] * answer
    return reading.trace(lines.path.stem)
