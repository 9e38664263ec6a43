"""Makes the transports that a configuration names."""

from __future__ import annotations

import msgspec

from regauge.config import TransferConfig
from regauge.errors import ConfigError
from regauge.move.rails import Rails
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.tls import from_config
from regauge.move.transport import Transport


def uses_rdma(config: TransferConfig) -> bool:
    """Whether KV may cross by RDMA, which the counters of network interfaces leave out."""
    match config.transport:
        case "mooncake":
            return config.mooncake.protocol == "rdma"
        case "nixl":
            return not set(config.nixl.transports.split(",")) <= {"tcp", "self", "sm"}
    return False


def open_rails(config: TransferConfig, *, key: bytes, name: str, grants: bool = True) -> Rails:
    """Return a transport for each NIC that the configuration names. Raises as `open_transport`."""
    if not config.nics:
        return Rails([open_transport(config, key=key, name=name, grants=grants)], [config.host])
    if config.transport != "tcp":
        raise ConfigError(f"transfer.nics is for tcp; {config.transport} takes its devices in a table of its own")
    made: list[Transport] = []
    try:
        for host in config.nics:
            own = msgspec.structs.replace(config, host=host)
            made.append(open_transport(own, key=key, name=name, grants=grants))
        return Rails(made, config.nics)
    except BaseException:  # undone, whatever broke
        for transport in made:
            transport.close()
        raise


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
