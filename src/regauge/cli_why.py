"""`regauge why`: asks a gateway why a request went where it went."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING
from urllib.parse import quote

from regauge.cli_top import Gateway, plain
from regauge.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAME = 256


def arguments(why: argparse.ArgumentParser) -> None:
    """Add the options of `regauge why`."""
    why.add_argument("request", metavar="REQUEST_ID", help="the answer's X-Request-Id, or a receipt's request")
    why.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the gateway, on its own machine; default %(default)s"
    )
    why.epilog = "Exit code 1: no gateway answers, or it does not know the request (any more): see route.keep_routes."


def run(options: argparse.Namespace, *, say: Callable[[str], None] = print) -> int:
    """Show the decisions for a request. Raises ConfigError, PeerLost, ProtocolError."""
    import msgspec

    name = options.request
    if not (0 < len(name) <= MAX_NAME and name.isprintable()):
        raise ConfigError(f"REQUEST_ID: give up to {MAX_NAME} printable characters, as X-Request-Id has them")
    body = Gateway.parse(options.url).fetch(f"/debug/why/{quote(name, safe='')}")
    if options.json:
        say(msgspec.json.format(body, indent=2).decode())
        return 0
    try:
        found = msgspec.json.decode(body)
        texts = [str(each["text"]) for each in found["requests"]]
        texts += [f"{each}: what it knows is not here" for each in found.get("silent", [])]
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ProtocolError(f"{options.url} is no gateway of this version: {plain(str(error))}") from error
    say("\n\n".join("\n".join(map(plain, text.splitlines())) for text in texts))
    return 0
