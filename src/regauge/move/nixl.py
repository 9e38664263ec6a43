"""The nixl transport: NIXL over UCX. See docs/transports.md.

UCX uses every network that it finds unless it is told which: without devices this transport does not start.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

from regauge.config import NixlConfig
from regauge.errors import ConfigError
from regauge.move.library import wire
from regauge.move.library.carrier import environment
from regauge.move.library.nixl import MODULES
from regauge.move.library.transport import CAPS, LibraryTransport
from regauge.move.tls import Tls

INSTALL = "pip install --no-deps nixl-cu12==1.5.1 (its own requirements bring torch; without CUDA it does without)"
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")
_TRANSPORT = re.compile(r"[a-z0-9_]+")  # no negation: the rest of a list that nobody has seen
_SAME_HOST = {"sm", "shm", "posix", "sysv", "cma", "knem", "xpmem", "self", "all"}


class NixlTransport(LibraryTransport):
    """`host` names the compute plane (see `plane`) by this side's address on the first device; sessions listen there.

    Raises ConfigError when NIXL is not installed, without devices, for devices that do not exist, and when UCX
    listens elsewhere than on `host`; TransportError when it does not start.
    """

    kind = "nixl"
    caps = replace(CAPS, verifies_receiver_bounds=False)  # NIXL checks bounds at the initiator alone

    def __init__(
        self, *, key: bytes, name: str, host: str = "127.0.0.1", port: int = 0, tls: Tls | None = None,
        config: NixlConfig | None = None,
    ) -> None:  # fmt: skip
        config = config or NixlConfig()
        check_devices(config)
        if not any(importlib.util.find_spec(module) for module in MODULES):
            raise ConfigError(f"transfer.transport is 'nixl', which is not installed: {INSTALL}")
        forced = {"UCX_NET_DEVICES": ",".join(config.devices), "UCX_TLS": config.transports}
        super().__init__(
            key=key, name=name, host=host, port=port, tls=tls,
            request=wire.Open("regauge.move.library.nixl", host, "ucx", tuple(config.devices)),
            environment=environment(forced, {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}),
            peers_per_carrier=config.peers_per_carrier,
        )  # fmt: skip
        if self.exposed:
            self.close()
            where = ", ".join(f"{address} port {number}" for address, number in self.exposed)
            raise ConfigError(
                f"with devices {config.devices} UCX listens on {where}, not only on {self._request.host}; give the device "
                "of that address in transfer.nixl.devices"
            )


def check_devices(config: NixlConfig, sysfs: Path = Path("/sys/class")) -> None:
    """Raise ConfigError unless devices are named and exist, and transports are ones that a dead process ends."""
    if not config.devices:
        raise ConfigError(
            "transfer.nixl.devices is empty: UCX would use every network of this host, the business plane too; name the "
            "compute plane's devices, as devices = ['eth1'] or ['mlx5_0:1']"
        )
    for name in config.devices:
        device = name.partition(":")[0]
        if not _DEVICE.fullmatch(device) or not any((sysfs / kind / device).exists() for kind in ("net", "infiniband")):
            raise ConfigError(f"transfer.nixl.devices: this host has no network device {name!r}")
    chosen = [each.strip() for each in config.transports.split(",")]
    if bad := [each for each in chosen if each in _SAME_HOST or not _TRANSPORT.fullmatch(each)]:
        raise ConfigError(
            f"transfer.nixl.transports has {bad[0]!r}; name those that use the devices, as 'tcp' or 'rc'. Memory of this host "
            "would be written past them, by a process that no fence of its owner's ends: there, use transport 'shm'"
        )
