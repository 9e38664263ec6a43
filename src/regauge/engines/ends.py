"""What a rank of an engine with an API of its own sends and receives with, and what tells of it; made from the user's settings.

Such an engine's adapter knows its peers by the names of all their ranks; which of them a rank has to do with, the layouts say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache

import structlog

from regauge.engines.bridge import ReceivingEnd, SendingEnd
from regauge.engines.ended import Ended
from regauge.engines.settings import Settings
from regauge.engines.status_door import StatusDoor
from regauge.errors import PlanError, RegaugeError
from regauge.layout.spec import Layout
from regauge.move.bound import Borrowed
from regauge.move.outbound import Address
from regauge.plan.ranks import leg

log = structlog.get_logger()

Family = Callable[[int, int], Layout]
"""The layout of a rank of so many tensor-parallel ranks, as far as which heads it holds: (rank, size)."""


class Ends:
    """The ends of one rank. Every method is for any thread, and returns at once."""

    def __init__(
        self, layout: Layout, family: Family, *, out: SendingEnd | None, into: ReceivingEnd | None,
        door: StatusDoor | None = None,
    ) -> None:  # fmt: skip
        """Takes over what it is given: `close` ends it."""
        self.layout, self.out, self.into = layout, out, into
        self._door = door

        @lru_cache(maxsize=256)
        def concerns(size: int, index: int, *, sends: bool) -> bool:
            other = family(index, size)
            return bool((leg(layout, other) if sends else leg(other, layout)).lanes)

        self._concerns = concerns

    def offer(
        self, transfer: str, to: Mapping[str, Address], tokens: int, granted: Callable[[], None] | None = None
    ) -> Ended | None:
        """Announce a transfer to those of a decode engine's ranks that it concerns. `granted` is called as `SendingEnd.offer` says.

        Returns how it has ended where it has already; else `out.ended` will say.
        """
        if self.out is None:
            return Ended(transfer, "this engine does not prefill for others")
        try:
            peers = {name: at for i, (name, at) in enumerate(to.items()) if self._concerns(len(to), i, sends=True)}
        except RegaugeError as error:
            ended = Ended.failed(transfer, error)
            self.out.note(ended)
            return ended
        if not peers:
            ended = Ended(transfer)  # other ranks hold what decode needs
            self.out.note(ended)
            return ended
        self.out.offer(transfer, peers, tokens, granted)
        return None

    def expect(
        self, transfer: str, senders: Sequence[str], tokens: int, tables: Sequence[tuple[Sequence[int], int]], *, first: int = 0
    ) -> None:  # fmt: skip
        """Wait for tokens [first, tokens) from those of a prefill engine's ranks that hold some; see `ReceivingEnd.expect`.

        Raises PlanError where none does, or this engine does not decode for others.
        """
        if self.into is None:
            raise PlanError("this engine does not decode for others")
        try:
            peers = [name for i, name in enumerate(senders) if self._concerns(len(senders), i, sends=False)]
            if not peers:
                raise PlanError(f"none of {', '.join(senders)} holds what this rank keeps")
        except RegaugeError as error:
            self.into.note(Ended.failed(transfer, error))
            raise
        self.into.expect(transfer, peers, tokens, tables, first=first)

    def close(self) -> None:
        """End the links."""
        if self._door is not None:
            self._door.close()
        for end in (self.out, self.into):
            if end is not None:
                end.close()


def open_ends(
    layout: Layout, family: Family, settings: Settings, rank: int, *, engine: str, sends: bool, receives: bool
) -> Ends:
    """Bind a verified layout and open what is asked for. Raises ConfigError for settings that cannot be carried out."""
    name = f"{settings.name}.{rank}"
    own, key, config = Borrowed(layout), settings.key(), settings.transfer
    port, status_port = settings.ports(rank)
    with ExitStack() as undo:
        out = SendingEnd(name, key, own, config) if sends else None
        if out is not None:
            undo.callback(out.close)
        into = ReceivingEnd(name, key, own, config, port=port) if receives else None
        if into is not None:
            undo.callback(into.close)
        ends = [end for end in (out, into) if end is not None]
        door = None
        if status_port:
            door = StatusDoor(ends, layout, key, config, engine=engine, port=status_port)
            log.info("status", rank=name, address=door.address)
        undo.pop_all()
    return Ends(layout, family, out=out, into=into, door=door)
