"""How log lines are written; what is in them is named in `observe.py`."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

import structlog
from structlog.typing import FilteringBoundLogger

WORKER: Final = "worker"
"""The field that says whose line it is."""

_CONSOLE: Final = structlog.dev.ConsoleRenderer(colors=False)
_ODD: Final = frozenset(("exc_info", "exception", "stack", "logger", "logger_name"))
_QUOTED: Final = re.compile("[ \\t=\\r\\n\"']")


def setup_logging(level: str, json: bool, worker: str, *, stream: TextIO | None = None) -> None:
    """Send this process's log lines, the standard library's included, to `stream` (standard error).

    `level` is a standard name ("info", "DEBUG", ...); raises ValueError for another. `worker` is put on every
    line. Lines are for a person's eyes, or JSON objects with `json`.
    """
    out = stream if stream is not None else sys.stderr

    def name_worker(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault(WORKER, worker)
        return event

    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        name_worker,
    ]
    renderer: structlog.types.Processor
    if json:
        shared.append(structlog.processors.format_exc_info)
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=True) if out.isatty() else plain
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.setLevel(level.upper())
    root.handlers[:] = [handler]
    structlog.configure(
        # Our own lines do not go through the standard library's records: twice the cost of a request's line.
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(root.level),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=False,
    )


def plain(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    """Write a line as structlog's ConsoleRenderer does without colours, in a fifth of its time; those with a traceback or an odd field it does itself."""
    if not _ODD.isdisjoint(event) or "event" not in event or "level" not in event or "timestamp" not in event:
        return _CONSOLE(logger, name, event)
    stamp, level, said = event.pop("timestamp"), event.pop("level"), event.pop("event")
    words = [f"{stamp} [{level:<9}] {said!s:<30}"]
    for key in sorted(event):
        value = event[key]
        quoted = not isinstance(value, str) or _QUOTED.search(value) is not None
        words.append(f"{key}={value!r}" if quoted else f"{key}={value}")
    return " ".join(words).rstrip(" ")


def get_logger(**fields: object) -> FilteringBoundLogger:
    """Return a logger with fields bound to it; works before `setup_logging`, too."""
    logger: FilteringBoundLogger = structlog.get_logger(**fields)
    return logger
