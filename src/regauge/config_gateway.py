"""Settings of the gateway's face to clients: `[gateway]`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from regauge.config_bounds import MAX_S, Count, bound

MAX_PROCESSES: Final = 32
"""Most gateway processes on one port."""


class ClientTlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files for TLS towards clients; read anew on SIGHUP, for connections that come then."""

    certificate: str
    """The gateway's certificate, and whatever lies between it and the authority's."""
    key: str
    authority: str = ""
    """Certificates that sign clients, who then must have one; empty: clients need none."""


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway's face to clients."""

    tenants: str = ""
    """TOML file of tenants, their API keys and limits (docs/gateway.md); empty: anybody may ask, without limits."""
    processes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROCESSES)] = 1
    """Gateway processes on the one port."""
    tls: ClientTlsConfig | None = None
    passthrough: Literal["auto", "never"] = "auto"
    """Where all workers are of one engine with an API of its own: "auto" passes the client's body on as it came, with all that only the engine
    knows; "never" tokenises here, as for other fleets, so that another worker can go on with an answer whose decode worker has died."""
    isolate_prefixes: bool | None = None
    """Whether no tenant's prompts are served from KV that another's have left in prefix caches: how soon the first token comes would tell what others
    have asked. Left out: if there are tenants. Requests to /v1/messages are then answered by the gateway's own tokeniser, as with passthrough "never"."""
    max_connections: Count = 4_096
    """Connections of one process; one more is answered 503 and closed."""
    max_header_bytes: Annotated[int, msgspec.Meta(ge=1_024, le=1 << 20)] = 32_768
    """Request line and headers of one request; more is answered 431."""
    header_s: float = 10.0
    """Most seconds from a request's first byte to its headers' end, and from a connection to its first byte."""
    body_s: float = 60.0
    """Most seconds from there to the body's end; a body that is late is answered 408."""
    idle_s: float = 30.0
    """Seconds that a connection is kept between two requests."""
    write_s: float = 30.0
    """A client that reads nothing of its answer for so long is given up."""

    def __post_init__(self) -> None:
        bound(self, "gateway", ("header_s", "body_s", "idle_s", "write_s"), most=MAX_S)
