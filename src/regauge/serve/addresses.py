"""A worker's addresses, from those of its rank 0."""

from __future__ import annotations

from pathlib import Path

from regauge.config import EngineName, Role
from regauge.errors import ConfigError, LayoutError
from regauge.layout import files
from regauge.serve import wire

HostPort = tuple[str, int]


def assemble(
    name: str, role: Role, url: str, engine: EngineName, *,
    control: HostPort | None, status: HostPort | None = None, count: int = 1, secure: bool = False,
) -> wire.WorkerAddress:  # fmt: skip
    """Return the addresses of a worker of `count` ranks, each of which has the ports after the one before it.

    An engine's ranks are named NAME.0, NAME.1 and so on; a local worker's one rank has its name. `secure`: the ranks' status is asked for by HTTPS.
    """
    ranks = [
        wire.RankAddress(
            name if engine == "local" else f"{name}.{i}",
            (control[0], control[1] + i) if control else None,
            url_of((status[0], status[1] + i), secure=secure) if status else "",
        )
        for i in range(1 if engine == "local" else count)
    ]
    return wire.WorkerAddress(name, role, url, ranks, engine)


def host_port(setting: str, text: str) -> HostPort:
    """Read HOST:PORT. Raises ConfigError that names the setting."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65_535):
        raise ConfigError(f"{setting} {text!r}: give HOST:PORT")
    return host.strip("[]"), int(port)


def url_of(address: HostPort, *, secure: bool = False) -> str:
    """Return the URL of a server."""
    host, port = address
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def layout_json(path: Path) -> str:
    """Read a layout's file, TOML or JSON; return its JSON. Raises OSError, and ConfigError for what is no layout."""
    try:
        layout = files.decode(path.read_bytes(), format="json" if path.suffix == ".json" else "toml")
    except LayoutError as error:
        raise ConfigError(str(error)) from error
    return files.encode(layout, format="json").decode()
