"""What a decode side lends to which data connection, transfer by transfer, and how it takes it back."""

from __future__ import annotations

import numpy as np
import structlog

from regauge.move.grants import STAGING_GRANT, grant_id
from regauge.move.messages import Staging
from regauge.move.pieces import Int64s
from regauge.move.transport import Transport

log = structlog.get_logger()


class Lending:
    """The grants of one decode side. Where the transport checks none, nothing happens."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.checked = transport.caps.checks_grants
        """Whether there is anything to lend."""
        self._lent: dict[str, set[tuple[str, int]]] = {}

    def slots(self, session: str, staging: Staging) -> None:
        """Let a data connection write its staging slots, until it is fenced. Raises TransportError as `Transport.allow`."""
        whole = np.array([[staging.address, staging.slots * staging.slot_bytes]], np.int64)
        self._transport.allow(session, STAGING_GRANT, whole)

    def lend(self, transfer: str, epoch: int, session: str, ranges: Int64s) -> None:
        """Let a data connection write ranges int64[N, 2] for an epoch of a transfer. Raises as `slots`."""
        grant = grant_id(transfer, epoch)
        self._transport.allow(session, grant, ranges)
        self._lent.setdefault(transfer, set()).add((session, grant))

    def take_back(self, transfer: str) -> None:
        """Withdraw what a transfer was lent: nothing of it lands any more. A write that is landing is cut, with its connection.

        For transfers whose writers have nothing to write any more: what still lands comes from no honest peer.
        """
        for session, grant in self._lent.pop(transfer, ()):
            if not self._transport.revoke(session, grant, 0.0):
                log.warning("a grant could not be taken back", transfer=transfer, session=session[:8])
