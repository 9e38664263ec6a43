"""`regauge trace`: asks a gateway when each step of a request was, and shows it, or writes it for Perfetto (`cli_trace_view.py`)."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from regauge.cli_top import FILE_WIDTH, Gateway, plain
from regauge.cli_why import MAX_NAME
from regauge.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from regauge.serve.tracing import Traced

TRACE = "/debug/trace"


def arguments(trace: argparse.ArgumentParser) -> None:
    """Add the options of `regauge trace`."""
    trace.add_argument("request", metavar="REQUEST_ID", help="the answer's X-Request-Id, or a receipt's request")
    trace.add_argument(
        "--perfetto",
        metavar="FILE",
        help="write a time line for ui.perfetto.dev instead: layers, grants, chunks, decode steps",
    )
    trace.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, on its own machine; default %(default)s"
    )
    trace.epilog = (
        "Exit code 1: no gateway answers, or it does not know the request (any more): it keeps the newest 500."
    )


def run(options: argparse.Namespace) -> int:
    """Show or write a request's time line. Raises ConfigError, PeerLost, ProtocolError."""
    name = options.request
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise ConfigError(f"REQUEST_ID: give up to {MAX_NAME} printable characters, as X-Request-Id has them")
    gateway = Gateway.parse(options.url)
    path = f"{TRACE}/{quote(name, safe='')}"
    if options.perfetto is not None:
        return _write(gateway.fetch(f"{path}?format=perfetto"), Path(options.perfetto), gateway.url)
    body = gateway.fetch(path)
    if options.json:
        import msgspec

        print(msgspec.json.format(body, indent=2).decode())
        return 0
    _show(_decode(body, gateway.url))
    return 0


def _write(body: bytes, file: Path, url: str) -> int:
    import msgspec

    try:
        events = msgspec.json.decode(body)["traceEvents"]
        other = msgspec.json.decode(body)["otherData"]
        told = [str(word) for word in (*other["missing"], *other["doubts"])]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError) as error:
        raise ProtocolError(f"{url} is no gateway of this version: {plain(str(error))}") from error
    try:
        file.write_bytes(body)
    except OSError as error:
        raise ConfigError(f"--perfetto {file}: cannot be written: {error.strerror}") from error
    print(f"{file}: {len(events)} events; open it at https://ui.perfetto.dev")
    for word in told:
        print(plain(word))
    return 0


def _decode(body: bytes, url: str) -> Traced:
    import msgspec

    from regauge.serve.tracing import Traced

    try:
        return msgspec.json.decode(body, type=Traced)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{url} is no gateway of this version: {plain(str(error))}") from error


def _show(line: Traced) -> None:
    from rich.console import Console

    from regauge.cli_trace_view import render

    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH)
    console.print(render(line, console.width))
