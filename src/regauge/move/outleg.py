"""One leg of a transfer on the prefill side: what is computed, taken into chunks, in flight, and covered by credit. Pure.

See `protocol.py` for the life of a transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.counted import Counted, within
from regauge.move.protocol import LegState, Part, Range

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """What one link carries, and how much at once."""

    parts: tuple[Part, ...]
    layer_bytes: Callable[[int, int], int]
    """Bytes of one layer of so many tokens in a staging slot, padding included: (pair, tokens)."""
    staged: frozenset[int] = frozenset()
    """Pairs whose chunks go into a staging slot; the others go straight into pages."""
    slots: int = 0
    slot_bytes: int = 0
    chunk_bytes: int = CHUNK_BYTES
    """Most bytes of a chunk that needs no slot: what one re-send costs."""
    depth: int = 2
    """Most writes in flight."""
    ways: tuple[int, ...] = (0,)
    """For each of the peer's NICs the NIC of this side that it is reached from."""


ROUND_TOKENS = 128
"""Chunks that do not take all of a layer's tokens take a multiple of so many: every other number needs boxes of its own."""


@dataclass(slots=True)
class Chunk:
    """Some layers and tokens of a pair of groups. Landed and not announced yet where `written` is set."""

    pair: int
    layers: Range
    tokens: Range
    nbytes: int
    slot: int | None = None
    written: m.Written | None = None
    resent: bool = False


@dataclass(slots=True)
class Progress:
    """How far one part has come, per layer: the token before which everything is computed, and is taken into chunks."""

    need: Range
    computed: list[int]
    sent: list[int]


@dataclass(slots=True)
class OutLeg:
    """`offered`: no pages yet. `lost`: its link is gone, and a new one awaited. `over`: no write is or will be in flight."""

    peer: str
    state: Literal["offered", "granted", "lost", "over"] = "offered"
    grant: m.Grant | None = None
    parts: list[Progress] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    """All of this epoch, by seq."""
    earlier: Counted = field(default_factory=Counted)
    """What counts of the epochs before."""
    flight: dict[int, Chunk] = field(default_factory=dict)
    """Being written, or landed and not announced, by seq."""
    again: deque[int] = field(default_factory=deque)
    """To be written once more, by seq."""
    credit: int | None = None
    """Bytes that may be taken in this epoch; None: all."""
    rank: int = 0
    """Class given with the credit: see `messages.Credit`."""
    nic: int = 0
    """The peer's NIC, likewise."""
    taken: int = 0
    """Bytes of this epoch taken into chunks, re-sent ones once: in units of credit, as `credit` and `wanted`."""
    wanted: int = 0
    before: int = 0
    """Bytes that had arrived before this epoch."""
    wire_bytes: int = 0
    renew_at: float = float("inf")
    losses: int = 0
    """Links lost since a chunk got through."""
    finished: bool = False
    fenced: bool = False
    """Decode asked to stop: answer when no write is in flight."""

    @property
    def epoch(self) -> int:
        """The epoch of the grant; 0 without one."""
        return self.grant.epoch if self.grant is not None else 0

    @property
    def busy(self) -> bool:
        """Whether a write may still read the source pages."""
        return any(c.written is None for c in self.flight.values())

    @property
    def all_sent(self) -> bool:
        """Whether everything of this epoch has been written and announced."""
        return not (self.flight or self.again) and all(at == p.need[1] for p in self.parts for at in p.sent)

    @property
    def counted(self) -> Counted:
        """What counts of it once decode has committed: see `counted.py`."""
        return self._sum(self.earlier, self.chunks)

    @staticmethod
    def _sum(total: Counted, chunks: list[Chunk]) -> Counted:
        for word in (c.written for c in chunks):
            if word is not None:
                total = total.chunk(word.nbytes, word.digest)
        return total

    def granted(self, grant: m.Grant, parts: tuple[Part, ...], tokens: int, renew_at: float) -> None:
        """Begin an epoch. Raises ProtocolError for a grant that does not fit the parts."""
        if any(part.group >= len(grant.tables) for part in parts) or grant.first > tokens:
            raise ProtocolError(
                f"{self.peer} grants {len(grant.tables)} page tables from token {grant.first} for {grant.transfer!r}"
            )
        needs = [part.live((grant.first, tokens), tokens) for part in parts]
        done = grant.done or [[need[0]] * len(part.layers) for need, part in zip(needs, parts, strict=True)]
        if [len(x) for x in done] != [len(part.layers) for part in parts] or any(
            not need[0] <= at <= need[1] for need, layers in zip(needs, done, strict=True) for at in layers
        ):
            raise ProtocolError(
                f"{self.peer} says that tokens of {grant.transfer!r} have arrived which it never wanted"
            )
        self.earlier = self._sum(self.earlier, [c for c in self.chunks if within(c, done)]) if grant.done else Counted()
        self.state, self.grant, self.credit = "granted", grant, grant.credit
        self.nic = 0
        self.parts = [Progress(need, list(at), list(at)) for need, at in zip(needs, done, strict=True)]
        self.before = sum(
            (at - p.need[0]) * part.token_bytes for part, p in zip(parts, self.parts, strict=True) for at in p.sent
        )
        self.renew_at, self.finished, self.taken, self.wanted = renew_at, False, 0, 0
        self.chunks = []
        self.again.clear()

    def lose(self) -> None:
        """The link is gone, and nothing is in flight any more."""
        self.state, self.grant, self.losses = "lost", None, self.losses + 1
        self.flight.clear()

    def computed(
        self, parts: tuple[Part, ...], ready: dict[int, int], tokens: int, layers: Range | None = None
    ) -> None:
        """Carry over what the engine has computed: per layer of the model the token before which everything is ready.

        `layers`: only those of the model in [first, end) can have changed.
        """
        for part, progress in zip(parts, self.parts, strict=True):
            for i, layer in enumerate(part.layers):
                if layers is not None and not layers[0] <= layer < layers[1]:
                    continue
                until = part.live((0, ready.get(layer, 0)), tokens)[1]
                progress.computed[i] = max(progress.computed[i], min(until, progress.need[1]))

    def want(self, terms: LinkTerms) -> int | None:
        """Return the bytes that could be written in this epoch, given credit; None if they were said before."""
        if self.credit is None:
            return None
        total = sum(
            (sum(p.computed) - p.need[0] * len(p.computed)) * part.token_bytes
            for part, p in zip(terms.parts, self.parts, strict=True)
        )
        total -= self.before
        if total <= self.wanted:
            return None
        self.wanted = total
        return total

    @property
    def remaining(self) -> int:
        """Layers times tokens that are not taken into chunks yet."""
        return sum(p.need[1] * len(p.sent) - sum(p.sent) for p in self.parts)

    @property
    def waiting(self) -> bool:
        """Whether something is computed and covered by credit, and not taken into a chunk: for as many slots as it needs."""
        return bool(self.again) or (self._first() is not None and (self.credit is None or self.credit > self.taken))

    def ask_again(self, seq: int) -> None:
        """Queue a chunk once more. Raises ProtocolError unless it was written and announced, once."""
        known = seq < len(self.chunks) and seq not in self.flight and seq not in self.again
        if not known or self.chunks[seq].resent:
            raise ProtocolError(f"{self.peer} wants chunk {seq} again, which was not written, or was twice")
        self.chunks[seq].resent = True
        self.again.append(seq)

    def next(self, terms: LinkTerms, free: list[int]) -> int | None:
        """Take the next chunk, with one of the free slots if it needs one, and return its seq; None if nothing can go now."""
        if self.again:
            seq = self.again[0]
            chunk = self.chunks[seq]
            if chunk.pair in terms.staged and not free:
                return None
            self.again.popleft()
        else:
            where = self._first()
            if where is None or (where[0] in terms.staged and not free):
                return None
            cut = self._cut(terms, *where)
            if cut is None:
                return None
            seq, chunk = len(self.chunks), cut
            first, end = chunk.layers
            self.parts[chunk.pair].sent[first:end] = [chunk.tokens[1]] * (end - first)
            self.taken += chunk.nbytes
            self.chunks.append(chunk)
        chunk.slot = free.pop() if chunk.pair in terms.staged else None
        chunk.written = None
        self.flight[seq] = chunk
        return seq

    def landed(self) -> list[m.Written]:
        """Take the chunks that are to be announced now: landed, and all before them too."""
        out: list[m.Written] = []
        for seq, chunk in list(self.flight.items()):
            if chunk.written is None:
                break
            out.append(chunk.written)
            self.losses = 0
            del self.flight[seq]
        return out

    def _first(self) -> tuple[int, int] | None:
        """Return (pair, position) of the layer whose earliest tokens wait; the first of those that wait alike."""
        best: tuple[int, int, int] | None = None
        for pair, p in enumerate(self.parts):
            for i, (sent, computed) in enumerate(zip(p.sent, p.computed, strict=True)):
                if sent < computed and (best is None or sent < best[0]):
                    best = (sent, pair, i)
        return None if best is None else best[1:]

    def _cut(self, terms: LinkTerms, pair: int, position: int) -> Chunk | None:
        """Cut what fits: as many whole layers as fit, else some tokens of one layer. None without credit for one token."""
        progress, unit = self.parts[pair], terms.parts[pair].token_bytes
        start, stop = progress.sent[position], progress.computed[position]
        staged = pair in terms.staged
        room = terms.slot_bytes if staged else terms.chunk_bytes
        credit = (stop - start) * unit * len(progress.sent) if self.credit is None else self.credit - self.taken
        count = min(stop - start, credit // unit)
        if count < stop - start and count % ROUND_TOKENS:
            if count < ROUND_TOKENS and self.flight:
                return None  # more credit comes when that has landed
            count = _round(count)
        if count == 0:
            return None
        while (each := terms.layer_bytes(pair, count)) > room and count > 1:
            count = _round(max(1, min(count - 1, count * room // each)))
        if each > room and staged:
            raise ProtocolError(
                f"a staging slot of {self.peer} does not hold one token of one layer: enlarge staging_bytes"
            )
        end = position + 1
        if count == stop - start:
            most = position + max(1, min(room // each, credit // (count * unit)))
            while end < min(len(progress.sent), most) and (progress.sent[end], progress.computed[end]) == (start, stop):
                end += 1
        return Chunk(pair, (position, end), (start, start + count), count * unit * (end - position))

    def describe(self) -> LegState:
        """Say where the leg stands."""
        total = sum((p.need[1] - p.need[0]) * len(p.sent) for p in self.parts)
        done = sum(at - p.need[0] for p in self.parts for at in p.sent)
        return LegState(
            peer=self.peer, state=self.state, epoch=self.epoch, in_flight=len(self.flight), chunks=len(self.chunks),
            resent=sum(c.resent for c in self.chunks), wire_bytes=self.wire_bytes, credit=self.credit,
            nic=self.nic, progress=done / total if total else 0.0,
        )  # fmt: skip


def _round(tokens: int) -> int:
    """Return the multiple of ROUND_TOKENS, or below it the power of two, that is not more than so many tokens."""
    if tokens < ROUND_TOKENS:
        return 1 << tokens.bit_length() >> 1
    return tokens // ROUND_TOKENS * ROUND_TOKENS
