"""A gateway process's place among others: its number, its listening socket, and the folder that it shares with its supervisor.

Requests in the house are divided: each process admits its share of `limits.max_queue`, since connections are dealt out evenly. Tenants' limits and
metrics are of all processes together.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from regauge import __version__
from regauge.config import LimitsConfig, ServeConfig
from regauge.config_gateway import GatewayConfig
from regauge.errors import ConfigError
from regauge.observe import SHARED, Metrics
from regauge.planes import listening, management
from regauge.serve.buckets import Buckets
from regauge.serve.server import listen
from regauge.serve.siblings import Siblings

BUCKETS: Final = "buckets"
METRICS: Final = "metrics"


def private_socket(folder: Path, number: int) -> Path:
    """Return where a gateway process answers its supervisor and its siblings, without TLS."""
    return folder / f"gateway-{number}.sock"


@dataclass(frozen=True)
class Place:
    """`handle`: of the listening socket; None: it makes one itself, and is alone. `management`: likewise, of the management plane's."""

    folder: Path | None = None
    number: int = 0
    handle: int | None = None
    management: int | None = None

    def listener(self, config: ServeConfig) -> socket.socket:
        """Return the listening socket. Raises ConfigError."""
        if self.handle is None:
            return listen(config.host, config.port, plane=listening(config.planes.business, config.host))
        return _passed(self.handle)

    def management_listener(self, config: ServeConfig) -> socket.socket | None:
        """Return the listening socket on the management plane; None: that is not declared. Raises ConfigError."""
        if (plane := management(config.planes)) is None:
            return None
        if self.management is not None:
            return _passed(self.management)
        return listen(plane.address, config.planes.management_port, plane=plane, setting="planes.management_port")

    def buckets(self) -> Buckets:
        """Return what tenants spent: shared, where there is a file. Raises ConfigError."""
        path = None if self.folder is None else self.folder / BUCKETS
        return Buckets(path, self.number) if path is not None and path.exists() else Buckets()

    def metrics(self, config: ServeConfig) -> Metrics:
        """Return this process's metrics, which are kept in the shared folder where there are several."""
        resumed = config.gateway.processes > 1 and any(Path(os.environ[SHARED]).iterdir())
        return Metrics.create(__version__, counts_workers=self.number == 0, resumed=resumed)

    @property
    def private(self) -> Path | None:
        """Where its supervisor and its siblings ask it."""
        return private_socket(self.folder, self.number) if self.folder is not None and self.handle is not None else None

    def siblings(self, config: ServeConfig) -> Siblings:
        """Return the other gateway processes on its port."""
        folder = self.folder
        if folder is None or self.handle is None:
            return Siblings()
        others = (number for number in range(config.gateway.processes) if number != self.number)
        return Siblings({f"gateway-{number}": private_socket(folder, number) for number in others})


ALONE: Final = Place()


def _passed(handle: int) -> socket.socket:
    try:
        return socket.socket(fileno=handle)
    except OSError as error:
        raise ConfigError(f"listening socket {handle}: {error.strerror}; `regauge serve` passes it on") from error


def share(config: ServeConfig) -> LimitsConfig:
    """Return the limits of one gateway process."""
    limits = config.limits
    return msgspec.structs.replace(limits, max_queue=-(-limits.max_queue // config.gateway.processes))


def is_open(host: str, rules: GatewayConfig) -> bool:
    """Whether anybody on a network may ask without a key or a certificate."""
    if rules.tenants or (rules.tls is not None and rules.tls.authority):
        return False
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return True
