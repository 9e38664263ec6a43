"""What the doctor finds: where something is not as it must be, why that matters, and the command that mends it."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["error", "warning", "unknown"]
"""An error loses requests or speed, or gives wrong answers; a warning may; unknown: what cannot be looked at is not taken to be well."""


class Finding(msgspec.Struct, frozen=True):
    """One thing."""

    check: str
    """Name of the check, as docs/doctor.md lists them."""
    plane: str
    """`compute`, `business`, `management`; `host` for what belongs to none."""
    where: str
    """Interface, device, file or peer."""
    what: str
    """What is, and what should be."""
    why: str
    mend: str
    """A command, as far as one does it."""
    severity: Severity = "error"
