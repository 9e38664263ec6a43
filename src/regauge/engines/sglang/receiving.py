"""A decode rank of SGLang: turns what its scheduler says of a room into a transfer. Knows nothing of SGLang's classes.

Life of a room: 1 `open` with the request: prefill's ranks are named by it, or asked for at its bootstrap address; 2 they are known: WAITING, the
scheduler allocates; 3 `receive`: TRANSFERRING, prefill is asked for the room; 4 everything is here and verified: SUCCESS, with the hand-over.

Methods are for the scheduler's thread and return at once. What the links' loop says of a room sets one of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from regauge.engines import handover
from regauge.engines.ended import Ended
from regauge.engines.ends import Ends
from regauge.engines.handover import Handover
from regauge.engines.sglang.callers import Callers
from regauge.engines.sglang.room import From, read_leg, room, transfer
from regauge.engines.sglang.state import State
from regauge.errors import EngineError, ProtocolError, RegaugeError
from regauge.move.outbound import Address

log = structlog.get_logger()


@dataclass(eq=False)
class Receiving:
    """One request's room."""

    room: int
    names: Sequence[str] | None = None
    """Prefill's ranks, once they are known. Set in the links' loop, as `failed` may be."""
    asked: bool = False
    """Whether prefill is asked for the room; else the request has named its ranks."""
    failed: str = ""
    aborted: bool = False
    """Whether its own engine has given it up, and wants it no more even if it comes."""
    inited: bool = False
    tokens: int = 0
    expecting: bool = False
    """Whether the scheduler has given pages for it."""
    begun: bool = False
    """Whether they are lent. Set in the links' loop."""
    done: Ended | None = None
    handover: Handover | None = None

    @property
    def name(self) -> str:
        """Of its transfer."""
        return transfer(self.room)

    def spoil(self, reason: str) -> None:
        """What came cannot be used."""
        self.done = Ended(self.name, reason)


class DecodeRank:
    """The rooms of one rank. `to`: every rank of this engine, in order, and its control address."""

    def __init__(self, ends: Ends, callers: Callers, to: Mapping[str, Address]) -> None:
        if ends.into is None:
            raise EngineError("a decode rank needs a receiving end")
        self._ends, self._into, self._callers, self._to = ends, ends.into, callers, to
        self._rooms: dict[int, Receiving] = {}

    def open(self, number: int, address: str) -> Receiving:
        """A request has come for a room; `address`: its bootstrap address."""
        made = Receiving(number)
        try:
            leg = read_leg(number, address, From, self._rooms)
        except ProtocolError as error:
            made.failed = str(error)
            return made
        self._rooms[number] = made
        if leg is not None:
            made.names = leg.ranks
        else:
            made.asked = True
            self._into.post(self._join, made, address)
        return made

    def poll(self, r: Receiving) -> State:
        """Return how far it is."""
        self._drain()
        if r.done is not None:
            return State.FAILED if r.done.error or r.aborted else State.SUCCESS
        if r.failed:
            return State.TRANSFERRING if r.expecting else State.FAILED
        if r.expecting:
            return State.TRANSFERRING
        return State.BOOTSTRAPPING if r.names is None or not r.inited else State.WAITING

    def receive(self, r: Receiving, tables: Sequence[tuple[Sequence[int], int]], first: int) -> None:
        """Tokens [first, all) are to come into these pages of each group, which begin with that token."""
        r.expecting = True
        self._into.post(self._expect, r, tables, first)

    def abort(self, r: Receiving, reason: str) -> None:
        """Its engine gives the room up; nothing writes its pages any more once `quiet`."""
        r.aborted = True
        self.cancel(r, reason)

    def cancel(self, r: Receiving, reason: str) -> None:
        """The room is not expected to come any more. For any thread."""
        if r.failed or r.done is not None:
            return
        r.failed = reason
        self._into.post(self._give_up, r)

    def reason(self, r: Receiving) -> str:
        """Why it failed; empty: on this rank it has not."""
        return r.failed or (r.done.error if r.done is not None else "")

    def quiet(self, number: int) -> bool:
        """Whether nothing writes the pages of a room that failed."""
        self._drain()
        r = self._rooms.get(number)
        return r is None or not r.expecting or r.done is not None

    def forget(self, r: Receiving) -> None:
        """The scheduler is done with the request."""
        self.abort(r, "the request is over")
        if r.done is not None:
            self._forget(r)

    def _forget(self, r: Receiving) -> None:
        if self._rooms.get(r.room) is r:
            del self._rooms[r.room]

    def _drain(self) -> None:
        for ended in self._into.ended():
            r = self._rooms.get(room(ended.transfer))
            if r is None:
                continue
            r.done = ended
            if ended.error:
                log.warning("kv not received", transfer=ended.transfer, error=ended.error)
                self._forget(r)
            else:
                self._take(r, ended)
            self._into.post(self._callers.leave, r.room, ended.error)

    def _take(self, r: Receiving, ended: Ended) -> None:
        try:
            r.handover = handover.decode(ended.handover, ", ".join(r.names or ()))
        except ProtocolError as error:
            r.done = Ended.failed(ended.transfer, error, ended.path, ended.mode)
            return
        log.info(
            "kv received", transfer=ended.transfer, path=ended.path, wire_bytes=ended.wire_bytes,
            seconds=round(ended.seconds, 6),
        )  # fmt: skip

    # ---- in the links' loop ----

    def over(self, number: int, reason: str) -> None:
        """Prefill will not send a room."""
        if (r := self._rooms.get(number)) is not None:
            self.cancel(r, reason)

    def _join(self, r: Receiving, address: str) -> None:
        def known(names: Sequence[str]) -> None:
            r.names = names

        if not r.failed:
            self._callers.join(r.room, address, known)

    def _expect(self, r: Receiving, tables: Sequence[tuple[Sequence[int], int]], first: int) -> None:
        if r.failed:
            r.expecting = False
            return
        try:
            self._ends.expect(r.name, r.names or (), r.tokens, tables, first=first)
        except RegaugeError as error:
            self.cancel(r, str(error))
            return
        r.begun = True
        if r.asked:
            self._callers.want(r.room, self._to)

    def _give_up(self, r: Receiving) -> None:
        self._callers.leave(r.room, r.failed)
        if r.begun:
            self._into.cancel(r.name, r.failed)  # its end comes by `ended`
        else:
            r.expecting = False
            self._forget(r)
