"""Settings of receipts: `[meter]`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from regauge.config_bounds import MAX_S, bound
from regauge.errors import ConfigError


class MeterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who signs receipts, and where they are kept: docs/metering.md."""

    store: str = ""
    """Where receipts are kept: a file of SQLite, or `postgresql://USER@HOST/NAME`. Empty: nothing is metered."""
    keys: str = ""
    """Folder of the signing keys of the gateway and the workers that are started here, and of the trusted public ones (`trust`). What lacks is made.
    Empty: keys are made for one run alone, so that its receipts cannot be verified after it."""
    state: str = ""
    """Folder of the workers' journals of receipts; empty: they last for one run."""
    queue: Annotated[int, msgspec.Meta(ge=100, le=10_000_000)] = 10_000
    """Receipts of one gateway process that may wait for the store; with more, requests are told 503: what cannot be billed is not begun."""
    collect_s: float = 2.0
    """Seconds between two rounds that ask the workers for receipts which did not come with answers."""
    recover_s: float = 60.0
    """A request whose gateway receipt lacks for so long after its end has lost it with a gateway: it is made again from the workers'."""

    def __post_init__(self) -> None:
        bound(self, "meter", ("collect_s", "recover_s"), most=MAX_S)
        if self.store and not self.keys:
            raise ConfigError("meter.keys: give a folder: what is in a store must be verifiable after this run")
