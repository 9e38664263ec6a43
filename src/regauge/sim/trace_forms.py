"""Which format is a trace in, and who reads it?"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import msgspec

from regauge.errors import ConfigError
from regauge.sim import trace_azure, trace_burstgpt, trace_mooncake, trace_qwen, trace_tracelab, trace_weka
from regauge.sim.trace import Trace
from regauge.sim.trace_files import Lines, Options

Reader = Callable[[Lines, Options], Trace]

_READERS: dict[str, tuple[Reader, frozenset[str]]] = {
    "mooncake": (trace_mooncake.read, frozenset({"timestamp", "input_length", "output_length", "hash_ids"})),
    "qwen": (trace_qwen.read, frozenset({"chat_id", "parent_chat_id", "timestamp", "input_length", "hash_ids"})),
    "weka": (trace_weka.read, frozenset({"id", "block_size", "hash_id_scope", "requests"})),
    "weka-compact": (trace_weka.read_compact, frozenset({"id", "bs", "r"})),
    "tracelab": (trace_tracelab.read, frozenset({"session_id", "round_index", "input_tokens_total", "prefix_tokens"})),
    "azure": (trace_azure.read, frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"})),
    "burstgpt": (trace_burstgpt.read, frozenset({"Timestamp", "Request tokens", "Response tokens"})),
}
"""Reader, and the fields or columns by which a first line is known. What has more of them is the better match."""

LOOPS = frozenset({"weka", "weka-compact", "tracelab", "burstgpt"})
"""Formats that say which turn waits for which, and how long."""


def forms() -> tuple[str, ...]:
    """Return the names of the formats."""
    return tuple(_READERS)


def read(path: Path, form: str, options: Options) -> Trace:
    """Read a trace: see `trace.read`."""
    if path.is_dir():
        if form not in ("auto", "weka"):
            raise ConfigError(f"{path}: is a folder; only Weka's sessions are one, a file each")
        return trace_weka.read_folder(path, options)
    lines = Lines(path)
    if form == "auto":
        form = detect(lines)
    if form not in _READERS:
        near = difflib.get_close_matches(form, _READERS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"format: {form!r} is none of traces; {hint}There are {', '.join(_READERS)}, and auto")
    if options.closed and form not in LOOPS:
        raise ConfigError(f"{path}: closed: {form} does not say who waits for whom; {', '.join(sorted(LOOPS))} do")
    trace = _READERS[form][0](lines, options)
    if not trace.arrivals:
        raise ConfigError(f"{path}: no request in it")
    return trace


def detect(lines: Lines) -> str:
    """Return the format that the first line is in. Raises ConfigError that names the formats."""
    number, line = lines.first()
    names = _names(line)
    found = [(len(marks), form) for form, (_, marks) in _READERS.items() if marks <= names]
    if not found:
        what = "fields" if line.startswith(b"{") else "columns"
        seen = ", ".join(sorted(names))[:200] or line[:60].decode("utf-8", "replace")
        seen = "".join(each if each.isprintable() else "?" for each in seen)
        known = "; ".join(f"{form}: {', '.join(sorted(marks))}" for form, (_, marks) in _READERS.items())
        lines.refuse(number, f"of no known format of traces ({what} {seen}). Known are, by their {what}: {known}")
    return max(found)[1]


def _names(line: bytes) -> frozenset[str]:
    if line.startswith(b"{"):
        try:
            return frozenset(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
        except (msgspec.DecodeError, RecursionError):
            return frozenset()
    return frozenset(each.strip() for each in line.decode("utf-8", "replace").split(","))
