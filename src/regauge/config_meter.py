"""Settings of receipts: `[meter]`."""

from __future__ import annotations

import msgspec


class MeterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who signs receipts, and where they are kept: docs/metering.md."""

    keys: str = ""
    """Folder of the signing keys of the gateway and the workers that are started here, and of the trusted public ones (`trust`). What lacks is made.
    Empty: keys are made for one run alone, so that its receipts cannot be verified after it."""
    state: str = ""
    """Folder of the workers' journals of receipts; empty: they last for one run."""
