"""The prefill side of the transfer protocol: see `protocol.py` for the life of a transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.protocol import Action, Delivered, Failed, Granted, Range, Released, Send, Write


@dataclass(slots=True)
class _Outbound:
    peer: str
    tokens: int
    deadline: float
    grant: m.Grant | None = None
    renew_at: float = float("inf")
    ready: deque[tuple[Range, Range]] = field(default_factory=deque)
    """Chunks computed and not written: layers, tokens."""
    writing: int | None = None
    seq: int = 0
    wire_bytes: int = 0
    started: float | None = None
    handover: bytes | None = None
    finished: bool = False
    fenced: bool = False
    """Decode asked to stop: answer when no write is in flight."""
    failed: str = ""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """What one link can carry at once."""

    slots: int = 0
    """Staging slots of the receiver; 0: chunks go straight into pages."""
    layers_for: Callable[[int], int] = lambda tokens: 1 << 30  # noqa: ARG005
    """Most layers of a chunk of so many tokens: what fits into a slot; 0: not even one does."""


class Sender:
    """The prefill side of all transfers of one worker."""

    def __init__(self, *, offer_s: float, deadline_s: float) -> None:
        self._offer_s = offer_s
        self._deadline_s = deadline_s
        self._outbound: dict[str, _Outbound] = {}
        self._limits: dict[str, LinkLimits] = {}
        self._free: dict[str, list[int]] = {}
        self._busy: dict[str, str | None] = {}
        """Per peer: the transfer whose chunk is being written."""

    @property
    def transfers(self) -> dict[str, str]:
        """State of each transfer that is not over, for inspection."""
        return {n: "failed" if t.failed else "granted" if t.grant else "offered" for n, t in self._outbound.items()}

    def free_slots(self, peer: str) -> int:
        """Staging slots of a peer that no chunk occupies, for inspection."""
        return len(self._free.get(peer, ()))

    def link_up(self, peer: str, limits: LinkLimits) -> None:
        """A link to a decode worker stands."""
        self._limits[peer] = limits
        self._free[peer] = list(range(limits.slots))
        self._busy[peer] = None

    def offer(self, transfer: str, peer: str, tokens: int, now: float) -> list[Action]:
        """Announce a transfer of that many tokens. Raises ProtocolError for a name in use or a peer without a link."""
        if transfer in self._outbound or peer not in self._limits:
            raise ProtocolError(
                f"transfer {transfer!r} to {peer}: " + ("offered already" if peer in self._limits else "no link")
            )
        self._outbound[transfer] = _Outbound(peer, tokens, now + self._offer_s)
        return [Send(peer, m.Offer(transfer, tokens))]

    def ready(self, transfer: str, layers: Range, tokens: Range, now: float) -> list[Action]:
        """The engine has written these layers of these tokens into its pool. Unknown transfers are over: ignored."""
        t = self._outbound.get(transfer)
        if t is None or t.failed:
            return []
        t.started = now if t.started is None else t.started
        last = t.ready[-1] if t.ready else None
        if last is not None and last[1] == tokens and last[0][1] == layers[0]:
            t.ready[-1] = ((last[0][0], layers[1]), tokens)
        else:
            t.ready.append((layers, tokens))
        return list(self._pump(t.peer))

    def finish(self, transfer: str, handover: bytes) -> list[Action]:
        """Everything has been made ready; `handover` is what decode needs beside the KV."""
        t = self._outbound.get(transfer)
        if t is None or t.failed:
            return []
        t.handover = handover
        return self._maybe_finish(transfer, t)

    def cancel(self, transfer: str, reason: str) -> list[Action]:
        """The request is over. Unknown transfers have ended already: ignored."""
        t = self._outbound.get(transfer)
        return [] if t is None or t.failed else self._fail(transfer, t, reason)

    def on_message(self, peer: str, message: m.Message, now: float) -> list[Action]:
        """Take a message. Raises ProtocolError when the peer breaks the rules: the link must then end."""
        if isinstance(message, m.Freed):
            self._free_slot(peer, message.slot)
            return list(self._pump(peer))
        if not isinstance(message, m.Grant | m.Commit | m.Abort | m.Fence):
            raise ProtocolError(f"{peer} sent {type(message).__name__}, which decode does not say here")
        t = self._outbound.get(message.transfer)
        if t is None:
            return [Send(peer, m.Fenced(message.transfer))] if isinstance(message, m.Fence) else []
        if t.peer != peer:
            raise ProtocolError(f"{peer} speaks of transfer {message.transfer!r}, which is {t.peer}'s")
        return self._on_own(message.transfer, t, message, now)

    def _on_own(self, name: str, t: _Outbound, message: m.Message, now: float) -> list[Action]:
        match message:
            case m.Grant():
                if t.grant is not None or t.failed:
                    return []
                t.grant, t.renew_at, t.deadline = message, now + message.lease_s / 3, now + self._deadline_s
                return [Granted(name), *self._pump(t.peer)]
            case m.Commit():
                if not t.finished:
                    raise ProtocolError(f"{t.peer} committed {name!r} before it was finished")
                del self._outbound[name]
                return [Delivered(name, b"", t.wire_bytes, now - (t.started if t.started is not None else now))]
            case m.Fence():
                t.fenced = True
                return self._fail(name, t, f"{t.peer} gave the transfer up") if not t.failed else self._settle(name, t)
            case m.Abort():
                return [] if t.failed else self._fail(name, t, message.reason)
        return []

    def written(
        self, transfer: str, seq: int, layers: Range, tokens: Range, slot: int | None, nbytes: int
    ) -> list[Action]:
        """A `Write` has landed."""
        t = self._outbound.get(transfer)
        if t is None:
            return []  # the link went down meanwhile
        self._busy[t.peer] = None
        t.writing = None
        if t.failed:
            if slot is not None:
                self._free[t.peer].append(slot)
            return [*self._settle(transfer, t), *self._pump(t.peer)]
        t.wire_bytes += nbytes
        epoch = t.grant.epoch if t.grant else 0
        actions: list[Action] = [Send(t.peer, m.Written(transfer, epoch, seq, layers, tokens, slot, nbytes))]
        return [*actions, *self._maybe_finish(transfer, t), *self._pump(t.peer)]

    def link_lost(self, peer: str, reason: str) -> list[Action]:
        """The link is gone and its data connection fenced: nothing is in flight. Fail the peer's transfers."""
        for table in (self._limits, self._free, self._busy):
            table.pop(peer, None)
        actions: list[Action] = []
        for name, t in list(self._outbound.items()):
            if t.peer == peer:
                del self._outbound[name]
                actions.append(Released(name) if t.failed else Failed(name, reason, held=False))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Renew leases; fail what is past its deadline."""
        actions: list[Action] = []
        for name, t in list(self._outbound.items()):
            if t.failed:
                continue
            if t.deadline <= now:
                actions += self._fail(name, t, f"the transfer to {t.peer} did not complete in time")
            elif t.grant is not None and t.renew_at <= now:
                t.renew_at = now + t.grant.lease_s / 3
                actions.append(Send(t.peer, m.Renew(name)))
        return actions

    def _pump(self, peer: str) -> Iterator[Action]:
        """Start the next write of a peer: the oldest granted transfer that has a chunk ready."""
        if peer not in self._limits or self._busy[peer] is not None:
            return
        limits = self._limits[peer]
        if limits.slots and not self._free[peer]:
            return
        for name, t in self._outbound.items():
            if t.peer != peer or t.grant is None or t.failed or not t.ready:
                continue
            layers, tokens = self._take(t, limits)
            slot = self._free[peer].pop() if limits.slots else None
            self._busy[peer] = name
            t.writing = t.seq
            t.seq += 1
            yield Write(peer, name, t.writing, layers, tokens, tuple(t.grant.pages), t.grant.origin, slot)
            return

    @staticmethod
    def _take(t: _Outbound, limits: LinkLimits) -> tuple[Range, Range]:
        """Cut what fits off the oldest ready chunk: as many whole layers as fit, else some tokens of one layer."""
        (first, end), (start, stop) = t.ready.popleft()
        count = stop - start
        while limits.layers_for(count) == 0:
            if count == 1:
                raise ProtocolError(
                    f"a staging slot of {t.peer} does not hold one token of one layer: enlarge staging_bytes"
                )
            count = -(-count // 2)
        layers = min(end - first, limits.layers_for(count)) if count == stop - start else 1
        rest: list[tuple[Range, Range]] = []
        if count < stop - start:
            rest.append(((first, first + 1), (start + count, stop)))
        if first + layers < end:
            rest.append(((first + layers, end), (start, stop)))
        t.ready.extendleft(reversed(rest))
        return (first, first + layers), (start, start + count)

    def _maybe_finish(self, name: str, t: _Outbound) -> list[Action]:
        if t.handover is None or t.ready or t.writing is not None or t.grant is None or t.finished:
            return []
        t.finished = True
        return [Send(t.peer, m.Finish(name, t.grant.epoch, t.seq, t.handover))]

    def _fail(self, name: str, t: _Outbound, reason: str) -> list[Action]:
        t.failed = reason
        t.ready.clear()
        held = t.writing is not None
        return [Failed(name, reason, held=held), *self._settle(name, t, released=held)]

    def _settle(self, name: str, t: _Outbound, *, released: bool = True) -> list[Action]:
        """Once no write is in flight, tell decode and let the pages go."""
        if t.writing is not None:
            return []
        del self._outbound[name]
        word = m.Fenced(name) if t.fenced else m.Abort(name, t.failed)
        return [Send(t.peer, word), *([Released(name)] if released else [])]

    def _free_slot(self, peer: str, slot: int) -> None:
        limits = self._limits.get(peer)
        if limits is None:
            return
        if slot >= limits.slots or slot in self._free[peer]:
            raise ProtocolError(f"{peer} freed staging slot {slot}, which it does not hold")
        self._free[peer].append(slot)
