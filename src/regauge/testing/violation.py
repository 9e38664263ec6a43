"""What the kit raises when a promise is broken."""

from __future__ import annotations

from regauge.errors import RegaugeError


class Violation(RegaugeError):
    """An invariant does not hold: in a simulated cluster, or between real processes."""
