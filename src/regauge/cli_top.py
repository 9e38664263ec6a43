"""`regauge top`: asks a gateway how its transfers stand, once or every second, and shows it (`cli_top_view.py`)."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from regauge.errors import ConfigError, PeerLost, ProtocolError

if TYPE_CHECKING:
    from regauge.serve.debug import Live

LIMIT_S = 5.0
"""Most seconds for one answer; the gateway itself gives each worker two."""
MAX_ANSWER = 64 << 20
LIVE = "/debug/live"
WINDOW_S = 60.0
"""Percentiles are of what came in these last seconds."""
MAX_MESSAGE = 500
"""Characters of an error's text that are shown."""
_NO_JSON = (UnicodeDecodeError, RecursionError)
"""What msgspec raises beside its own errors for bytes that are no text, and for endless nesting."""
MIN_INTERVAL_S = 0.1
FILE_WIDTH = 160
"""Characters of a line where the output is no terminal and COLUMNS is not set."""


def arguments(top: argparse.ArgumentParser) -> None:
    """Add the options of `regauge top`."""
    top.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, on its own machine; default %(default)s"
    )
    top.add_argument("--once", action="store_true", help="print one look and end; so, too, where output is no terminal")
    top.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between looks, default %(default)s"
    )
    top.add_argument(
        "--limit", type=int, default=20, metavar="N", help="transfers shown per worker, default %(default)s"
    )
    top.epilog = "Exit code 1: no gateway answers, or, with --once or --json, a worker or one of several gateway processes does not. Ctrl-C ends the view."


@dataclass(frozen=True)
class Gateway:
    """Where a gateway answers."""

    url: str
    base: str
    """The URL without query and fragment."""

    @classmethod
    def parse(cls, url: str) -> Gateway:
        """Read a URL. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise ConfigError(f"--url {plain(url)}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {plain(url)}: give it as in http://127.0.0.1:8000")
        return cls(plain(url), urlunsplit((*parts[:3], "", "")).rstrip("/"))

    def fetch(self, path: str) -> bytes:
        """Return the JSON at a path, all of it within LIMIT_S. Raises PeerLost when nothing answers, ProtocolError for another answer."""
        import asyncio

        return asyncio.run(self._fetch(path))

    async def _fetch(self, path: str) -> bytes:
        import aiohttp  # costs more than `regauge --help` may take

        body = bytearray()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S), auto_decompress=False) as session,
                session.get(f"{self.base}{path}", allow_redirects=False) as answer,
            ):
                status = answer.status
                while len(body) <= MAX_ANSWER and (part := await answer.content.readany()):
                    body += part
        except (OSError, aiohttp.ClientError, ValueError) as error:  # the last for a host that can be no name
            late = isinstance(error, TimeoutError)
            reason = f"not within {LIMIT_S:g} s" if late else plain(str(error)) or type(error).__name__
            raise PeerLost(
                f"no gateway answers at {self.url} ({reason}): is `regauge serve` running? Name another with --url"
            ) from error
        if status != 200:
            raise ProtocolError(f"{self.url} answers {status}: {_message(bytes(body))}")
        if len(body) > MAX_ANSWER:
            raise ProtocolError(f"{self.url} answers more than {MAX_ANSWER} bytes")
        return bytes(body)


def _message(body: bytes) -> str:
    """Return what an error body says, or its beginning."""
    import msgspec

    try:
        return plain(str(msgspec.json.decode(body)["error"]["message"])[:MAX_MESSAGE])
    except (*_NO_JSON, msgspec.DecodeError, LookupError, TypeError):
        return repr(body[:80])


def _decode(body: bytes, url: str) -> Live:
    import msgspec

    from regauge.serve.debug import Live

    try:
        return msgspec.json.decode(body, type=Live)
    except (*_NO_JSON, msgspec.DecodeError) as error:
        raise ProtocolError(f"{url} is no gateway of this version: {plain(str(error))}") from error


def run(options: argparse.Namespace) -> int:
    """Show one look, or go on showing until Ctrl-C. Raises ConfigError, PeerLost, ProtocolError."""
    if not options.interval >= MIN_INTERVAL_S or options.interval == float("inf"):
        raise ConfigError(f"--interval {options.interval}: give at least {MIN_INTERVAL_S} seconds")
    from regauge.move.state import MAX_SHOWN

    if not 1 <= options.limit <= MAX_SHOWN:
        raise ConfigError(f"--limit {options.limit}: give 1 to {MAX_SHOWN}")
    gateway = Gateway.parse(options.url)
    body = gateway.fetch(f"{LIVE}?limit={options.limit}")
    look = _decode(body, gateway.url)
    if options.json:
        import msgspec

        print(msgspec.json.format(body, indent=2).decode())
    elif options.once or not sys.stdout.isatty():
        from rich.console import Console

        from regauge.cli_top_view import render

        wide = sys.stdout.isatty() or "COLUMNS" in os.environ
        console = Console(width=None if wide else FILE_WIDTH)
        console.print(render(look, width=console.width))
    else:
        return _watch(gateway, look, options.interval, options.limit)
    return 0 if all(worker.state is not None for worker in look.workers) and not look.silent else 1


def _watch(gateway: Gateway, look: Live, interval: float, limit: int) -> int:
    """Show look after look. A gateway that stops answering is waited for, with its last figures on the screen."""
    from rich.console import Console
    from rich.live import Live

    from regauge.cli_top_view import render

    console = Console()
    looks, note = [look], ""
    try:
        with Live(render(look, width=console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    looks, note = _kept(looks, _decode(gateway.fetch(f"{LIVE}?limit={limit}"), gateway.url)), ""
                except (PeerLost, ProtocolError) as error:
                    note = str(error)
                before, then = (looks[-2], looks[0]) if len(looks) > 1 else (None, None)
                live.update(render(looks[-1], before, then=then, note=note, width=console.width), refresh=True)
    except KeyboardInterrupt:
        return 0


def _kept(looks: list[Live], now: Live) -> list[Live]:
    """Return the looks of the window, the newest last; of a gateway that began anew, that one alone."""
    answered = [sum(one.value for one in look.metrics.get("regauge_requests_total", [])) for look in (looks[-1], now)]
    if answered[1] < answered[0]:
        return [now]
    return [*(look for look in looks if 0 < now.unix_s - look.unix_s <= WINDOW_S), now]


def plain(text: str) -> str:
    """Return text that cannot steer a terminal: names and reasons come from other processes."""
    return "".join(c if c.isprintable() else "?" for c in text)
