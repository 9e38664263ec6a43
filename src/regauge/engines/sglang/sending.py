"""A prefill rank of SGLang: turns what its scheduler says of a room into a transfer. Knows nothing of SGLang's classes.

Life of a room: 1 `open` with the request; 2 `begin`, once its prompt's length is known: the board is told, or, where the request names decode's
ranks itself, the transfer is offered; 3 decode has asked for it, or granted its pages: WAITING, the scheduler computes; 4 `send`, chunk by
chunk; 5 the last chunk brings the hand-over: TRANSFERRING; 6 decode has committed: SUCCESS, the pages are the scheduler's again.

Methods are for the scheduler's thread and return at once, but `abandon`. What the links' loop says of a room sets one of its fields.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog

from regauge.engines.ended import Ended
from regauge.engines.ends import Ends
from regauge.engines.sglang.room import To, read_leg, transfer
from regauge.engines.sglang.room import room as room_of
from regauge.engines.sglang.rooms import Board
from regauge.engines.sglang.state import State
from regauge.errors import EngineError, ProtocolError
from regauge.move.outbound import Address
from regauge.move.protocol import Range

log = structlog.get_logger()

ABANDON_S: Final = 5.0
"""Most seconds for a transfer that another rank's failure ends."""


@dataclass(eq=False)
class Sending:
    """One request's room."""

    room: int
    to: To | None = None
    """Decode's ranks where the request names them; None: whoever asks for the room."""
    tokens: int = 0
    begun: bool = False
    """Whether the transfer was offered. Set in the links' loop, as `ready` and `failed` may be."""
    ready: bool = False
    """Whether the scheduler may compute."""
    failed: str = ""
    """Why there is no transfer."""
    sending: bool = False
    """Whether the scheduler has taken it up (`init`)."""
    pages: list[int] = field(default_factory=list)
    sent: int = 0
    finished: bool = False
    done: Ended | None = None

    @property
    def name(self) -> str:
        """Of its transfer."""
        return transfer(self.room)


class PrefillRank:
    """The rooms of one rank."""

    def __init__(self, ends: Ends, page_size: int, windowed: frozenset[int], *, wait_s: float) -> None:
        """`windowed`: the groups whose pages come with the last chunk only, in a table of their own."""
        if ends.out is None:
            raise EngineError("a prefill rank needs a sending end")
        self._ends, self._out = ends, ends.out
        self._page_size = page_size
        self._rooms: dict[int, Sending] = {}
        self.board = Board(self._wanted, self._dropped, wait_s=wait_s)
        groups = list(enumerate(ends.layout.groups))
        self._full = _runs(sorted(layer for i, group in groups if i not in windowed for layer in group.layer_ids))
        self._late = _runs(sorted(layer for i, group in groups if i in windowed for layer in group.layer_ids))

    def open(self, room: int, address: str) -> Sending:
        """A request has come for a room; `address`: its bootstrap address."""
        made = Sending(room)
        try:
            made.to = read_leg(room, address, To, self._rooms)
        except ProtocolError as error:
            made.failed = str(error)
            return made
        self._rooms[room] = made
        return made

    def begin(self, s: Sending, tokens: int) -> None:
        """The request's prompt has so many tokens."""
        s.tokens = tokens
        if s.failed:
            return
        if s.to is None:
            self._out.post(self._open, s)
        else:
            self._offer(s, s.to.ranks)

    def poll(self, s: Sending) -> State:
        """Return how far it is."""
        self._drain()
        if s.done is not None and s.done.error:
            return State.FAILED
        if s.done is None and s.failed:
            return State.TRANSFERRING if s.begun and s.sending else State.FAILED
        if not s.sending:
            return State.WAITING if s.ready else State.BOOTSTRAPPING
        if s.done is not None and s.finished:
            return State.SUCCESS
        return State.TRANSFERRING if s.finished else State.WAITING

    def send(
        self, s: Sending, pages: Sequence[int], tokens: int, handover: bytes | None = None,
        windows: Mapping[int, Sequence[int]] = {},
    ) -> None:  # fmt: skip
        """The next `tokens` tokens of the prompt lie in these pages, the last of which may be filled by what follows.

        `handover`: with the last chunk. `windows`: with it, too, of each windowed group the pages of the prompt's end.
        """
        if s.failed or s.done is not None:
            s.finished = s.finished or handover is not None
            return
        first, s.sent = s.sent, s.sent + tokens
        last = handover is not None
        if first % self._page_size or s.sent > s.tokens or (last and s.sent != s.tokens):
            self.cancel(s, f"SGLang sent tokens {first} to {s.sent} of {s.tokens}, in pages of {self._page_size}")
            return
        s.pages += pages
        whole = -(-s.tokens // self._page_size) * self._page_size
        tables = [
            (own, whole - len(own) * self._page_size) if (own := windows.get(i)) is not None else (s.pages, 0)
            for i in range(len(self._ends.layout.groups))
        ]
        self._out.pages(s.name, tables)
        if tokens:
            for layers in self._full:
                self._out.ready(s.name, layers, (first, s.sent))
        if handover is not None:
            for layers in self._late:
                self._out.ready(s.name, layers, (0, s.tokens))
            s.finished = True
            self._out.finish(s.name, handover)

    def cancel(self, s: Sending, reason: str) -> None:
        """Give the room up. For any thread."""
        if s.failed or s.done is not None:
            return
        s.failed = reason
        self._out.post(self._give_up, s)

    def reason(self, s: Sending) -> str:
        """Why it failed; empty: on this rank it has not."""
        return (s.done.error if s.done is not None else "") or s.failed

    def abandon(self, s: Sending) -> None:
        """The scheduler takes the pages back, whatever this rank's transfer does: another rank's has failed.

        Waits until nothing reads them, for at most ABANDON_S.
        """
        if s.done is not None or not (s.begun and s.sent):
            return
        self.cancel(s, "it failed on another rank of this engine")
        ended = self._out.run(self._out.end_of(s.name, ABANDON_S), 2 * ABANDON_S)
        if ended is None:
            log.error("pages are reused while a transfer may still read them", transfer=s.name)

    def forget(self, s: Sending) -> None:
        """The scheduler is done with the request."""
        self.cancel(s, "the request is over")
        if s.done is not None and self._rooms.get(s.room) is s:
            del self._rooms[s.room]

    def _drain(self) -> None:
        for ended in self._out.ended():
            if ended.error:
                log.warning("kv not sent", transfer=ended.transfer, error=ended.error)
            if (s := self._rooms.get(room_of(ended.transfer))) is not None:
                s.done = ended
                self._out.post(self._over, s, ended.error)

    # ---- in the links' loop ----

    def _open(self, s: Sending) -> None:
        if not s.failed:
            self.board.open(s.room, time.monotonic())

    def _give_up(self, s: Sending) -> None:
        if s.begun:
            self._out.cancel(s.name, s.failed)  # its end comes by `ended`
        else:
            self._over(s, s.failed)

    def _over(self, s: Sending, reason: str) -> None:
        # The scheduler may have forgotten the room by now. A new request of its number is opened behind this in the loop.
        self.board.close(s.room, reason, time.monotonic())
        if reason and self._rooms.get(s.room) is s:
            del self._rooms[s.room]

    def _wanted(self, room: int, to: Mapping[str, Address]) -> None:
        s = self._rooms.get(room)
        if s is not None and not s.failed:
            self._offer(s, to)
            s.ready = True

    def _dropped(self, room: int, reason: str) -> None:
        if (s := self._rooms.get(room)) is not None:
            self.cancel(s, f"decode gave it up: {reason}")

    def _offer(self, s: Sending, to: Mapping[str, Address]) -> None:
        def granted() -> None:
            s.ready = True

        s.done = self._ends.offer(s.name, to, s.tokens, granted)
        s.begun = s.done is None
        s.ready = s.ready or not s.begun


def _runs(layers: Sequence[int]) -> list[Range]:
    """Return ascending numbers as ranges [first, end)."""
    out: list[Range] = []
    for layer in layers:
        if out and out[-1][1] == layer:
            out[-1] = (out[-1][0], layer + 1)
        else:
            out.append((layer, layer + 1))
    return out
