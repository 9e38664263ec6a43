"""Settings of what goes to tools beside Prometheus: `[observe]`."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import msgspec

from regauge.errors import ConfigError

TRACES: Final = "/v1/traces"
"""Where a collector takes spans over HTTP: OTLP 1.x, "OTLP/HTTP Request"."""


class ObserveConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where spans go: docs/tracing.md."""

    otlp: str = ""
    """Base URL of an OpenTelemetry collector that takes OTLP over HTTP, as `http://collector:4318`: each request's spans go there. Empty: nowhere.
    Needs the extra `otlp`."""

    def __post_init__(self) -> None:
        if self.otlp and (fault := _fault(self.otlp)):
            raise ConfigError(
                f"observe.otlp: {fault}; give a URL as http://collector:4318, or leave it out for no spans"
            )

    @property
    def traces(self) -> str:
        """Where spans are posted."""
        return self.otlp.rstrip("/") + TRACES


def _fault(url: str) -> str:
    """Say what is wrong with it, without what may be a password."""
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        return f"is no URL ({error})"
    if parts.scheme not in ("http", "https"):
        return f"begins with neither http:// nor https:// (scheme {parts.scheme!r})"
    if not host or port == 0 or not url.isascii() or any(each <= " " for each in url):
        return "names no host and port"
    if parts.username is not None or parts.password is not None:
        return "has a user or password in it, which would be in every copy of the configuration"
    if parts.query or parts.fragment:
        return "has a query or a fragment"
    if parts.path.rstrip("/").endswith(TRACES):
        return f"ends with {TRACES}, which is added here"
    return ""
