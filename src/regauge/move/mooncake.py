"""The mooncake transport: Mooncake's Transfer Engine over RDMA, or over TCP where there is none. See docs/transports.md.

Mooncake's own ports know no key and listen on every interface: firewall them to the compute plane.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

from regauge.config import MooncakeConfig
from regauge.errors import ConfigError, TransportError
from regauge.move.dial import split
from regauge.move.library import wire
from regauge.move.library.carrier import environment
from regauge.move.library.transport import CAPS, LibraryTransport
from regauge.move.plane import resolve
from regauge.move.tls import Tls

INFINIBAND = Path("/sys/class/infiniband")
INSTALL = "pip install 'regauge[mooncake]' and the system's libibverbs1 (apt-get install libibverbs1)"
_FORCED = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # its 1,024 fail a batch whose pieces are cut into many slices
    "MC_TRANSFER_TIMEOUT": "86400",  # seconds; our deadlines end a write, and say so
}
_DEFAULTS = {"MC_LOG_LEVEL": "ERROR"}
_log = logging.getLogger(__name__)


class MooncakeTransport(LibraryTransport):
    """`host` names the compute plane (see `plane`), where this side has an IPv4 address; data goes to it.

    Raises ConfigError when Mooncake is not installed, for a protocol or device that it would not have taken, and for a
    host that is not to be had; TransportError when it does not start.
    """

    kind = "mooncake"
    caps = CAPS

    def __init__(
        self, *, key: bytes, name: str, host: str = "127.0.0.1", port: int = 0, tls: Tls | None = None,
        config: MooncakeConfig | None = None,
    ) -> None:  # fmt: skip
        config = config or MooncakeConfig()
        address = check_host(host)
        check_protocol(config)
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(f"transfer.transport is 'mooncake', which is not installed: {INSTALL}")
        request = wire.Open("regauge.move.library.mooncake", address, config.protocol, tuple(config.devices))
        refused = ("MC_FORCE_TCP",) if config.protocol == "rdma" else ()
        super().__init__(
            key=key, name=name, host=host, port=port, tls=tls, request=request,
            environment=environment(_FORCED, _DEFAULTS, refused), peers_per_carrier=config.peers_per_carrier,
        )  # fmt: skip
        if self.exposed:
            where = ", ".join(sorted({address for address, _ in self.exposed}))
            _log.warning("mooncake listens on %s, not only on %s; anybody who reaches its ports can write: firewall them "
                         "to the compute plane (docs/transports.md)", where, address)  # fmt: skip

    def _check_address(self, theirs: bytes, control: str) -> None:
        host, _ = split(theirs.decode("ascii", "replace"))
        if host != split(control)[0]:
            raise TransportError(f"the peer's engine is at {host}, but the peer at {control}; give both one address")


def check_host(host: str) -> str:
    """Return the address of the plane that `host` names. Raises ConfigError unless it is IPv4: Mooncake's others are untried."""
    address = resolve(host).address
    if ":" in address:
        raise ConfigError(f"transfer.host is {address}; mooncake needs an IPv4 address on the compute plane")
    return address


def check_protocol(config: MooncakeConfig, infiniband: Path = INFINIBAND) -> None:
    """Raise ConfigError for RDMA without devices that are there and up: Mooncake would take TCP and say nothing."""
    if config.protocol == "tcp":
        if config.devices:
            raise ConfigError("transfer.mooncake.devices are for protocol 'rdma'; over tcp, transfer.host says the way")
        return
    if not config.devices:
        raise ConfigError("transfer.mooncake.protocol is 'rdma': name its devices, as devices = ['mlx5_0']")
    for name in config.devices:
        states = sorted((infiniband / name / "ports").glob("*/state"))
        if not any(each.read_text(encoding="ascii").startswith("4:") for each in states):  # 4: ACTIVE
            found = ", ".join(sorted(each.name for each in infiniband.glob("*"))) or "none"
            raise ConfigError(
                f"transfer.mooncake.devices: {name!r} is no RDMA device of this host with an active port (there are: "
                f"{found}); Mooncake would silently take TCP instead"
            )
