"""Makes the transport that a configuration names."""

from __future__ import annotations

from regauge.config import TransferConfig
from regauge.errors import ConfigError
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.tls import from_config
from regauge.move.transport import Transport


def open_transport(config: TransferConfig, *, key: bytes, name: str, grants: bool = True) -> Transport:
    """Return a transport of `config.transport`; close it. With `grants` its peers may write what they are granted only.

    Where the receiver takes no part in a write, nothing can hold them to that (`Caps.checks_grants`). Raises ConfigError, also
    for a library that is not installed.
    """
    match config.transport:
        case "shm":
            return ShmTransport(key=key, name=name)
        case "tcp":
            return TcpTransport(
                key=key, name=name, host=config.host, lanes=config.lanes, grants=grants, tls=from_config(config.tls)
            )
        case "mooncake":
            from regauge.move.mooncake import MooncakeTransport

            return MooncakeTransport(
                key=key, name=name, host=config.host, tls=from_config(config.tls), config=config.mooncake
            )
        case "nixl":
            from regauge.move.nixl import NixlTransport

            return NixlTransport(key=key, name=name, host=config.host, tls=from_config(config.tls), config=config.nixl)
    raise ConfigError(f"transfer.transport: {config.transport!r} is none of shm, tcp, mooncake, nixl")
