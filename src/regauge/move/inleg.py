"""A transfer and its legs on the decode side: what has been written, is being checked, and is verified. Pure.

See `protocol.py` for the life of a transfer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.counted import Counted, whole
from regauge.move.protocol import Check, LegState, Part, Range, Stages


@dataclass(slots=True)
class Chunk:
    """Some layers and tokens of a pair of groups."""

    pair: int
    layers: Range
    tokens: Range
    tries: int = 1
    nbytes: int = 0
    """On the wire, as of the last try; the digest likewise."""
    digest: bytes = b""


@dataclass(slots=True)
class Progress:
    """How far one part has come, per layer: the token before which everything is written, and is verified."""

    need: Range
    written: list[int]
    verified: list[int]
    token_bytes: int


@dataclass(slots=True)
class InLeg:
    """`expected`: not offered. `granted`: may be written. `lost`: its link is gone and not fenced. `parked`: nothing can land, a
    new link is awaited. `fencing`: failed, and something may land. `over`: nothing can land, and nothing will be granted."""

    peer: str
    state: Literal["expected", "granted", "lost", "parked", "fencing", "over"] = "expected"
    epoch: int = 0
    lease_until: float = float("inf")
    parts: list[Progress] = field(default_factory=list)
    checking: dict[int, Chunk] = field(default_factory=dict)
    """Written, and being brought into place and compared, by seq."""
    again: dict[int, Chunk] = field(default_factory=dict)
    """To be written once more, by seq."""
    kept: list[Chunk] = field(default_factory=list)
    """Verified, of all epochs."""
    seq: int = 0
    """Of the next chunk."""
    resent: int = 0
    landed: int = 0
    """Bytes of this epoch, in units of credit; re-sent chunks count once."""
    credit: int | None = None
    """Bytes that may be written in this epoch; None: all."""
    nic: int = 0
    """Position of this side's NIC that they come over."""
    wire_bytes: int = 0
    finish: m.Finish | None = None

    @property
    def complete(self) -> bool:
        """Whether everything has come and is verified."""
        return (
            self.finish is not None
            and not (self.checking or self.again)
            and all(at == p.need[1] for p in self.parts for at in p.verified)
        )

    @property
    def counted(self) -> Counted:
        """What counts of it: see `counted.py`."""
        total = Counted()
        for chunk in self.kept:
            total = total.chunk(chunk.nbytes, chunk.digest)
        return total

    @property
    def missing(self) -> int:
        """Bytes that are still to be written, in units of credit."""
        return sum((p.need[1] - at) * p.token_bytes for p in self.parts for at in p.written)

    @property
    def quiet(self) -> bool:
        """Whether neither a write nor a check can touch the pages."""
        return self.state in ("expected", "parked", "over") and not self.checking

    def grant(
        self, epoch: int, parts: tuple[Part, ...], first: int, tokens: int, lease_until: float
    ) -> list[list[int]]:
        """Begin an epoch; return where each part's layers go on, empty for the first epoch."""
        done = [list(p.verified) for p in self.parts]
        self.kept = whole(self.kept, done)
        needs = [part.live((first, tokens), tokens) for part in parts]
        starts = done or [[need[0]] * len(part.layers) for need, part in zip(needs, parts, strict=True)]
        self.parts = [
            Progress(need, list(at), list(at), part.token_bytes)
            for need, at, part in zip(needs, starts, parts, strict=True)
        ]
        self.state, self.epoch, self.lease_until = "granted", epoch, lease_until
        self.seq, self.landed, self.finish, self.credit = 0, 0, None, None
        return done

    def written(self, message: m.Written) -> Check:
        """Take the word that a chunk has landed. Raises ProtocolError for one that is not due."""
        name, (first, end), (start, stop) = message.transfer, message.layers, message.tokens
        chunk = self.again.pop(message.seq, None)
        if chunk is None:
            chunk = self._next(message)
        elif (chunk.pair, chunk.layers, chunk.tokens) != (message.pair, message.layers, message.tokens):
            raise ProtocolError(f"{self.peer}: chunk {message.seq} of {name!r} is another one the second time")
        chunk.nbytes, chunk.digest = message.nbytes, message.digest
        self.wire_bytes += message.nbytes
        self.checking[message.seq] = chunk
        return Check(
            self.peer,
            name,
            self.epoch,
            message.seq,
            message.pair,
            (first, end),
            (start, stop),
            message.slot,
            message.digest,
        )

    def _next(self, message: m.Written) -> Chunk:
        name, (first, end), (start, stop) = message.transfer, message.layers, message.tokens
        progress = self.parts[message.pair] if message.pair < len(self.parts) else None
        if progress is None or not (first < end <= len(progress.written) and start < stop <= progress.need[1]):
            raise ProtocolError(
                f"{self.peer}: {name!r} has no layers {first}..{end - 1}, tokens {start}..{stop - 1} of pair {message.pair}"
            )
        in_order = message.seq == self.seq and all(at == start for at in progress.written[first:end])
        if not in_order or self.finish is not None:
            raise ProtocolError(
                f"{self.peer}: {name!r} layers {first}..{end - 1} from token {start} come twice or out of order"
            )
        progress.written[first:end] = [stop] * (end - first)
        self.landed += (end - first) * (stop - start) * progress.token_bytes
        self.seq += 1
        return Chunk(message.pair, message.layers, message.tokens)

    def finished(self, message: m.Finish) -> None:
        """Take the word that nothing more comes. Raises ProtocolError while something is missing."""
        if message.chunks != self.seq or any(at != p.need[1] for p in self.parts for at in p.written):
            raise ProtocolError(f"{self.peer} finished {message.transfer!r} with chunks missing")
        self.finish = message

    def verify(self, chunk: Chunk) -> None:
        """Note a chunk that is what was sent: a layer is verified up to where its first unverified chunk begins."""
        self.kept.append(chunk)
        progress = self.parts[chunk.pair]
        open_ = [c for c in (*self.checking.values(), *self.again.values()) if c.pair == chunk.pair]
        for layer in range(*chunk.layers):
            starts = [c.tokens[0] for c in open_ if c.layers[0] <= layer < c.layers[1]]
            progress.verified[layer] = min([progress.written[layer], *starts])

    def describe(self) -> LegState:
        """Say where the leg stands."""
        total = sum((p.need[1] - p.need[0]) * len(p.verified) for p in self.parts)
        done = sum(at - p.need[0] for p in self.parts for at in p.verified)
        return LegState(
            peer=self.peer, state=self.state, epoch=self.epoch, in_flight=len(self.checking),
            chunks=self.seq - len(self.checking) - len(self.again), resent=self.resent, wire_bytes=self.wire_bytes,
            credit=self.credit, nic=self.nic, progress=done / total if total else 0.0,
        )  # fmt: skip


@dataclass(slots=True)
class Inbound:
    """A transfer that is expected, until it is delivered or nothing can touch its pages. Times are the machine's."""

    tokens: int
    tables: tuple[m.Table, ...]
    first: int
    begun: float
    deadline: float
    legs: dict[str, InLeg]
    tenant: str = ""
    due: float | None = None
    """By when the KV should be here: what flow control goes by."""
    offered_at: float | None = None
    granted_at: float | None = None
    first_at: float | None = None
    """When its first chunk had landed."""
    last_at: float | None = None
    handover: bytes = b""
    failed: str = ""

    @property
    def state(self) -> str:
        """As `protocol.TransferState` has it."""
        if self.failed:
            return "quarantined"
        return "expected" if any(leg.state == "expected" for leg in self.legs.values()) else "granted"

    def stages(self, now: float) -> Stages:
        """Return how long it was in each stage, if it is committed now."""
        offered = self.begun if self.offered_at is None else self.offered_at
        granted = now if self.granted_at is None else self.granted_at
        first, last = (now if at is None else at for at in (self.first_at, self.last_at))
        return Stages(max(0.0, offered - self.begun), granted - offered, first - granted, last - first, now - last)
