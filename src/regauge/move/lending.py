"""What a decode side lends to which data connection, transfer by transfer, and how it takes it back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog

from regauge.move.grants import STAGING_GRANT, grant_id
from regauge.move.messages import Staging
from regauge.move.pieces import Int64s
from regauge.move.rails import Rails

log = structlog.get_logger()


class Lending:
    """The grants of one decode side. Where the transport checks none, nothing happens."""

    def __init__(self, rails: Rails) -> None:
        self._rails = rails
        self.checked = rails.caps.checks_grants
        """Whether there is anything to lend."""
        self._lent: dict[str, set[tuple[tuple[str, ...], int]]] = {}

    def slots(self, sessions: Sequence[str], staging: Staging) -> None:
        """Let a link's data connections write its staging slots, until they are fenced. Raises TransportError as `Transport.allow`."""
        whole = np.array([[staging.address, staging.slots * staging.slot_bytes]], np.int64)
        self._rails.allow(sessions, STAGING_GRANT, whole)

    def lend(self, transfer: str, epoch: int, sessions: Sequence[str], ranges: Int64s) -> None:
        """Let a link's data connections write ranges int64[N, 2] for an epoch of a transfer. Raises as `slots`."""
        grant = grant_id(transfer, epoch)
        self._rails.allow(sessions, grant, ranges)
        self._lent.setdefault(transfer, set()).add((tuple(sessions), grant))

    def take_back(self, transfer: str) -> None:
        """Withdraw what a transfer was lent: nothing of it lands any more. A write that is landing is cut, with its connection.

        For transfers whose writers have nothing to write any more: what still lands comes from no honest peer.
        """
        for sessions, grant in self._lent.pop(transfer, ()):
            if not self._rails.revoke(sessions, grant, 0.0):
                log.warning(
                    "a grant could not be taken back", transfer=transfer, sessions=[each[:8] for each in sessions]
                )
