"""What a worker's transfer layer shows of itself: its links, pools, incoming data connections, and what its transfers came to.

Transfers under way and links describe themselves (`protocol.TransferState`, `links.py`); ended transfers are counted (`ledger.py`).
Everything here belongs to the worker's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from regauge.config import Role
from regauge.errors import ProtocolError
from regauge.move.flow_types import LinkState as NicState
from regauge.move.protocol import TransferState

if TYPE_CHECKING:  # whoever only shows these figures needs no transfer layer
    from regauge.layout.spec import Group
    from regauge.move.pages import LentPages, PagePool
    from regauge.move.rails import Rails

SHOWN_DIGITS = 8
"""Of a session's name: enough to find it in a log, too few to name it to a transport."""
SHOWN: Final = 100
"""Things of each kind that are shown unless the query's `limit` says otherwise."""
MAX_SHOWN: Final = 1_000
MAX_LEGS: Final = 64
MAX_REASON: Final = 500
"""Characters of a reason; longer ones are cut."""


class LinkState(msgspec.Struct, frozen=True):
    """One link, as this end sees it."""

    peer: str
    state: str
    """`up`; `closing` (prefill: it broke, writes still end); `fencing` (decode: it broke, bytes may still land);
    `relinking` (prefill: transfers wait for a new one)."""
    path: str = ""
    modes: list[str] = []
    """How chunks are written, per pair of state groups."""
    up_s: float = 0.0
    """Seconds since both ends proved the key."""
    session: str = ""
    """Beginning of the name of its (first) data connection."""
    free_slots: int | None = None
    """Staging slots that no chunk occupies, 0 where none is needed; only prefill knows."""
    in_flight: int = 0
    """Chunks being written (prefill), or brought into place and compared (decode)."""
    resent: int = 0
    """Chunks that decode asked for again over this link, since their digests disagreed; only decode counts."""
    resumed: int = 0
    """Legs that went on over this link from where an earlier one broke; only decode counts."""


class PoolState(msgspec.Struct, frozen=True):
    """Pages of one pool by who may touch them: see `pages.py`."""

    pages: int
    page_size: int
    free: int | None
    """None: the engine allocates by itself, and whatever no transfer has is the engine's."""
    leased: int
    committed: int
    quarantined: int
    cached: int = 0


class SessionState(msgspec.Struct, frozen=True):
    """One incoming data connection."""

    peer: str
    session: str
    """Its beginning."""
    nbytes: int
    """Landed so far; 0 where writes are one-sided."""


class Totals(msgspec.Struct, frozen=True):
    """What the transfers of a worker came to since it started."""

    delivered: int = 0
    wire_bytes: int = 0
    """Of the delivered ones."""
    failed: dict[str, int] = {}
    """By class of reason: `observe.REASONS`."""
    resent: int = 0
    """Chunks written twice; counted on the decode side."""
    resumed: int = 0
    """Legs that went on over a new link; counted on the decode side."""
    chunks: int = 0
    """Whose digests were compared and agreed; counted on the decode side, of delivered transfers."""
    received: int = 0
    """Of `wire_bytes`, what came in; the rest went out."""
    grants: int = 0
    """Of pages to a prefill rank; counted on the decode side, as are the next three."""
    credits: int = 0
    """Words of credit."""
    credit_bytes: int = 0
    """That they let prefill write, padding left out."""
    landed: dict[str, int] = {}
    """Bytes of chunks that have landed, by path: at once, each as often as it crossed, and whatever became of its transfer."""
    sent: int = 0
    """Likewise, at others; counted on the prefill side."""

    def __add__(self, other: Totals) -> Totals:
        """Return the totals of two ranks together."""
        return self._with(other, lambda one, more: one + more)

    def since(self, before: Totals) -> Totals:
        """Return what came since an earlier word of the same worker; 0 of what went back, as where one of its ranks began anew."""
        return self._with(before, lambda now, then: max(0, now - then))

    def _with(self, other: Totals, merge: Callable[[int, int], int]) -> Totals:
        fields = dict[str, int | dict[str, int]]()
        for name in self.__struct_fields__:
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(mine, dict):
                fields[name] = {key: merge(mine.get(key, 0), its.get(key, 0)) for key in {**mine, **its}}
            else:
                fields[name] = merge(mine, its)
        return Totals(**fields)  # type: ignore[arg-type]


class Hidden(msgspec.Struct, frozen=True):
    """How many things of each kind are there and not shown, since an answer is bounded."""

    transfers: int = 0
    links: int = 0
    sessions: int = 0


class WorkerState(msgspec.Struct, frozen=True):
    """One worker."""

    name: str
    role: Role
    pid: int
    clock_s: float
    """`time.monotonic()` of the worker: rates are differences of two answers by this clock."""
    transfers: list[TransferState]
    links: list[LinkState]
    pools: list[PoolState]
    sessions: list[SessionState]
    """Incoming data connections."""
    totals: Totals
    nics: list[NicState] = []
    """Of the decode side: what flow control knows of each NIC (line rate: `transfer.flow.nic_bytes_per_s`)."""
    hidden: Hidden = Hidden()


def pool_states(pools: Iterable[PagePool]) -> list[PoolState]:
    """Count the pages of each pool by state."""
    return [
        PoolState(
            p.pages, p.page_size, p.free, p.count("leased"), p.count("committed"), p.count("quarantined"), p.cached
        )
        for p in pools
    ]


def lent_states(groups: Iterable[Group], lent: Iterable[LentPages]) -> list[PoolState]:
    """Count the pages that an engine has lent, of each group."""
    return [
        PoolState(g.pages, g.page_size, None, p.count("leased"), p.count("committed"), p.count("quarantined"))
        for g, p in zip(groups, lent, strict=True)
    ]


def session_states(rails: Rails) -> list[SessionState]:
    """Describe the live incoming data connections."""
    return [SessionState(x.peer, x.session[:SHOWN_DIGITS], x.nbytes) for x in rails.inbound()]


def bounded(state: WorkerState, limit: int) -> WorkerState:
    """Return the `limit` newest transfers, links and data connections of a worker, and of reasons and legs what can be read."""
    transfers = sorted(state.transfers, key=lambda t: t.age_s)[:limit]
    links = sorted(state.links, key=lambda link: link.up_s)[:limit]
    sessions = state.sessions[-limit:]
    hidden = Hidden(
        len(state.transfers) - len(transfers), len(state.links) - len(links), len(state.sessions) - len(sessions)
    )
    short = [msgspec.structs.replace(t, reason=t.reason[:MAX_REASON], legs=t.legs[:MAX_LEGS]) for t in transfers]
    return msgspec.structs.replace(state, transfers=short, links=links, sessions=sessions, hidden=hidden)


def shown(limit: str | None) -> int:
    """Read the query's `limit`. Raises ProtocolError unless it is a whole number from 1 to MAX_SHOWN."""
    if limit is None:
        return SHOWN
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_SHOWN)) and 1 <= int(limit) <= MAX_SHOWN):
        raise ProtocolError(f"limit must be a whole number from 1 to {MAX_SHOWN}")
    return int(limit)
