"""Settings of the network planes of this host: `[planes]`. `regauge.planes` binds what runs to them, and refuses what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from regauge.config_bounds import Port

PlaneName = Literal["compute", "business", "management"]
PLANES: Final[tuple[PlaneName, ...]] = ("compute", "business", "management")
MANAGEMENT_PORT: Final = 8_001


class PlanesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The planes of this host, each an address, a network (10.210.0.0/16) or an interface; empty: not declared, all is as other settings say."""

    compute: str = ""
    """KV: data and control connections of transfers."""
    business: str = ""
    """Clients, prompts, and the gateway's calls to workers."""
    management: str = ""
    """`/metrics`, `/debug/` and the dashboard, on a listener of their own at `management_port`, and then there alone."""
    management_port: Port = MANAGEMENT_PORT
    worker_port: Annotated[int, msgspec.Meta(ge=0, le=65_000)] = 0
    """First of the ports of the workers that are started here, in a row: a local one's HTTP (business) and control (compute), an engine's two and two
    for each of its ranks. 0: free ones are sought. For firewalls, which must know them."""

    def declared(self) -> Mapping[PlaneName, str]:
        """Return the planes that are declared, by name."""
        given: dict[PlaneName, str] = {
            "compute": self.compute,
            "business": self.business,
            "management": self.management,
        }
        return {name: value for name, value in given.items() if value}
