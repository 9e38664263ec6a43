"""Links of the simulated cluster: control messages under way, and writes that have not landed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from regauge.move import messages as m
from regauge.move.protocol import Check, Part, Write


@dataclass(slots=True)
class Flight:
    """A write under way."""

    write: Write
    landed: bool = False
    spoilt: bool = False
    sent: bytes = b""
    """Digest of what was read at the source, once landed."""
    cells: tuple[int, ...] | None = None
    """What was read at the source, when its process cannot be read any more: bytes still in the network."""


@dataclass(slots=True)
class Link:
    """One connection of a prefill rank to a decode rank: control messages both ways in order, and a data connection."""

    number: int
    p: str
    d: str
    p_instance: int
    d_instance: int
    parts: tuple[Part, ...]
    heads: tuple[int, ...]
    slots: list[tuple[int, ...]]
    """Staging memory: what lies in each slot."""
    to_d: deque[m.Message] = field(default_factory=deque)
    to_p: deque[m.Message] = field(default_factory=deque)
    broken: bool = False
    """Nothing sent from now on gets across. What is under way may still be read, until that end notices."""
    p_end: Literal["up", "closing", "closed"] = "up"
    d_end: Literal["opening", "up", "gone", "closed"] = "opening"
    fencing: bool = False
    fenced: bool = False
    """Decode has ended the data connection: nothing lands any more."""
    flights: list[Flight] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    spoilt: set[tuple[str, int, int]] = field(default_factory=set)
    """(transfer, epoch, seq) of chunks that landed spoilt."""
    said_d: deque[m.Message] = field(default_factory=deque)
    said_p: deque[m.Message] = field(default_factory=deque)

    @property
    def over(self) -> bool:
        """Whether both ends have done with it."""
        return self.p_end == "closed" and self.d_end == "closed"

    def send(self, message: m.Message, *, to_decode: bool) -> None:
        """Put a message on its way, through its wire form."""
        if self.broken:
            return
        message = m.decode(m.encode(message)[4:])
        (self.to_d if to_decode else self.to_p).append(message)
        if not isinstance(message, m.Ready | m.Freed):  # those are of one connection, and never said again
            (self.said_d if to_decode else self.said_p).append(message)


Account = tuple[str, str, str]
"""Decode rank, prefill rank, transfer."""


@dataclass(slots=True)
class Ledger:
    """What decode ranks give credit for."""

    given: dict[Account, tuple[int, int]] = field(default_factory=dict)
    """Epoch, bytes."""
    taken: dict[Account, tuple[int, int, int]] = field(default_factory=dict)
    """Epoch, next seq, bytes."""

    def note(self, d: str, p: str, message: m.Message) -> None:
        """Note what a decode rank allows with a message."""
        if isinstance(message, m.Grant):
            if message.credit is not None:
                self.given[d, p, message.transfer] = (message.epoch, message.credit)
        elif isinstance(message, m.Credit) and (d, p, message.transfer) in self.given:  # else the peer has died
            epoch, given = self.given[d, p, message.transfer]
            self.given[d, p, message.transfer] = (epoch, max(given, message.upto) if epoch == message.epoch else given)

    def take(self, key: Account, epoch: int, seq: int, nbytes: int) -> bool:
        """Note a write; say whether credit covers it."""
        old, following, taken = self.taken.get(key, (0, 0, 0))
        if old != epoch:
            following, taken = 0, 0
        if seq >= following:  # else it is written again
            following, taken = seq + 1, taken + nbytes
        self.taken[key] = (epoch, following, taken)
        given = self.given.get(key)
        return given is None or given[0] != epoch or taken <= given[1]

    def drop(self, name: str) -> None:
        """Close the accounts of a rank or a transfer."""
        for book in (self.given, self.taken):
            for key in [key for key in book if name in key]:
                del book[key]
