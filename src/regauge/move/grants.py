"""Grants: which bytes of this side's memory a writer may write, for how long. What a receiver that takes part in writes checks.

A grant is named by a number that both sides derive (`grant_id`) and that every frame carries. A frame whose grant has been
revoked is refused though its pages may have been granted anew, to the same writer even: late writes of an ended transfer
land nowhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from regauge.errors import TransportError
from regauge.move.pieces import Int64s
from regauge.plan import Plan, Side, instantiate, pieces

MAX_GRANTS = 1 << 16
"""Grants of a transport at once: the caller revokes what it allows."""


def grant_id(name: str, epoch: int = 0) -> int:
    """Return the number of a transfer's grant in an epoch, or of a staging area's: 63 bits of SHA-256, never 0."""
    digest = hashlib.sha256(f"regauge-grant {epoch} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1 | 1


STAGING_GRANT = grant_id("staging", -1)
"""The grant of a link's staging slots, for as long as the link."""


class Grants:
    """Grants of all sessions. Not thread-safe."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, int], tuple[Int64s, Int64s]] = {}

    def allow(self, session: str, grant: int, ranges: Int64s) -> None:
        """Grant ranges int64[N, 2] (address, length) of any order; replaces an earlier grant of that name.

        Raises TransportError beyond MAX_GRANTS.
        """
        if len(self._spans) >= MAX_GRANTS and (session, grant) not in self._spans:
            raise TransportError(f"{MAX_GRANTS} grants are live already; revoke those of transfers that have ended")
        starts, ends = ranges[:, 0], ranges[:, 0] + ranges[:, 1]
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        first = np.concatenate(([True], starts[1:] > ends[:-1])) if len(starts) else np.empty(0, bool)
        last = np.concatenate((first[1:], [True])) if len(starts) else first
        self._spans[session, grant] = (starts[first], ends[last])  # apart: a merged piece lies in one of them

    def revoke(self, session: str, grant: int) -> None:
        """Withdraw a grant. Unknown ones are ignored."""
        self._spans.pop((session, grant), None)

    def forget(self, session: str) -> None:
        """Withdraw every grant of a session."""
        for key in [key for key in self._spans if key[0] == session]:
            del self._spans[key]

    def refusal(self, session: str, grant: int, table: Int64s) -> str:
        """Return why a table int64[N, 2] (address, length > 0) may not be written, or an empty string.

        The table must lie in a region: addresses and ends are then sane.
        """
        found = self._spans.get((session, grant))
        if found is None:
            return f"grant {grant:#x} is over, or was never given to this connection"
        starts, ends = found
        at, until = table[:, 0], table[:, 0] + table[:, 1]
        index = np.searchsorted(starts, at, side="right") - 1
        outside = (index < 0) | (until > ends[np.maximum(index, 0)]) if len(starts) else np.ones(len(at), bool)
        if not outside.any():
            return ""
        first = int(np.flatnonzero(outside)[0])
        return f"piece {first}: {table[first, 1]} bytes at {table[first, 0]:#x} are not in grant {grant:#x}"


def page_ranges(
    own: Plan, pages: Int64s, bases: Mapping[str, int], tokens: tuple[int, int], *, origin: int = 0,
    pair: tuple[int, int] | None = None,
) -> Int64s:  # fmt: skip
    """Return where tokens [first, end) lie in the pages of one's own layout: int64[N, 2] (address, length).

    `own` is the plan from that layout to itself; `pages` is the page table from token `origin`. Raises PlanError as
    `plan.instantiate` does.
    """
    side = Side(pages, bases, origin)
    return pieces(instantiate(own, side, side, tokens, pair=pair))[:, 1:]
