"""The life of a transfer, sans-IO: events and the time go in, actions come out. The driver is `link.py`.

1. The gateway sends a request to both workers. Decode leases pages and *expects* the transfer; prefill *offers* it.
2. When both have happened, in either order, decode *grants* its pages. Prefill computes nothing before.
3. Prefill's engine finishes a layer of a prompt chunk: the chunk is *ready*. Ready chunks are written in order, several layers
   at a time when the link lags behind, one write in flight per link.
4. *Written* tells decode that a chunk has landed; from a staging slot decode scatters it into its pages and frees the slot.
5. *Finish* carries the first token. When every layer and token has arrived exactly once, decode *commits*: its engine may
   read the pages, and prefill may reuse its own.

A transfer that fails (abort, lease or deadline over, broken link, broken rule) is reported once. Its decode pages are quarantined until
prefill says *fenced*, or until the link is gone and its data connection is fenced. Its prefill pages are kept
until no write reads them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from regauge.errors import ProtocolError
from regauge.move import messages as m

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a peer."""

    peer: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Write:
    """Prefill: write a chunk into the peer's pages (page table `pages` from token `origin`) or staging slot."""

    peer: str
    transfer: str
    seq: int
    layers: Range
    tokens: Range
    pages: tuple[int, ...]
    origin: int
    slot: int | None


@dataclass(frozen=True, slots=True)
class Granted:
    """Prefill: decode has lent its pages; the engine may compute."""

    transfer: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """Decode: bring a chunk from a staging slot into the transfer's pages."""

    peer: str
    transfer: str
    seq: int
    layers: Range
    tokens: Range
    slot: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The transfer is complete. On decode the pages may be read; on prefill they may be reused."""

    transfer: str
    handover: bytes
    wire_bytes: int
    seconds: float
    """From the grant (decode) or the first ready chunk (prefill) to the commit."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer will not complete. `held`: its pages must not be reused until `Released`."""

    transfer: str
    reason: str
    held: bool


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing can touch the pages of a failed transfer any more."""

    transfer: str


@dataclass(frozen=True, slots=True)
class FenceLink:
    """Decode: end the peer's data connection for good, then call `link_fenced`."""

    peer: str


Action = Send | Write | Granted | Scatter | Delivered | Failed | Released | FenceLink


# -- decode ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Inbound:
    peer: str
    tokens: int
    pages: tuple[int, ...]
    origin: int
    epoch: int
    deadline: float
    offered: bool = False
    state: Literal["expected", "granted", "fencing"] = "expected"
    lease_until: float = float("inf")
    granted_at: float = 0.0
    arrived: list[int] = field(default_factory=list)
    """Per shared layer: the position up to which tokens have been written."""
    scattering: set[int] = field(default_factory=set)
    written: int = 0
    wire_bytes: int = 0
    finish: m.Finish | None = None
    quiet: bool = False
    """The writer has stopped; only a scatter of ours may still touch the pages."""


class Receiver:
    """The decode side of all transfers of one worker."""

    def __init__(self, *, lease_s: float, offer_s: float, deadline_s: float) -> None:
        self._lease_s = lease_s
        self._offer_s = offer_s
        self._deadline_s = deadline_s
        self._inbound: dict[str, _Inbound] = {}
        self._early: dict[tuple[str, str], tuple[int, float]] = {}
        """Offers that came before the request: (peer, transfer) -> tokens, expiry."""
        self._epoch = 0
        self._layers: dict[str, int] = {}

    @property
    def transfers(self) -> dict[str, str]:
        """State of each transfer that is not over, for inspection."""
        return {name: t.state for name, t in self._inbound.items()}

    def link_up(self, peer: str, layers: int) -> None:
        """A link to a prefill worker stands; the pair shares so many layers."""
        self._layers[peer] = layers

    def expect(
        self,
        transfer: str,
        peer: str,
        tokens: int,
        pages: tuple[int, ...],
        now: float,
        *,
        origin: int = 0,
    ) -> list[Action]:
        """A request waits for tokens [origin, tokens) in the leased pages. Raises ProtocolError for a name in use."""
        if transfer in self._inbound:
            raise ProtocolError(f"transfer {transfer!r} is expected already")
        self._epoch += 1
        t = _Inbound(peer, tokens, pages, origin, self._epoch, now + self._offer_s)
        self._inbound[transfer] = t
        early = self._early.pop((peer, transfer), None)
        if early is None:
            return []
        return self._offered(transfer, t, early[0], now)

    def cancel(self, transfer: str, reason: str, now: float) -> list[Action]:
        """The request is over before its KV came. Unknown transfers are ignored: they have ended already."""
        t = self._inbound.get(transfer)
        return self._fail(transfer, t, reason, now) if t is not None and t.state != "fencing" else []

    def on_message(self, peer: str, message: m.Message, now: float) -> list[Action]:
        """Take a message. Raises ProtocolError when the peer breaks the rules: the link must then end."""
        match message:
            case m.Offer():
                return self._on_offer(peer, message, now)
            case m.Written() | m.Finish() | m.Renew() | m.Abort() | m.Fenced():
                t = self._inbound.get(message.transfer)
                if t is None:
                    # It has ended here, or was never asked for: a late word about it changes nothing.
                    self._early.pop((peer, message.transfer), None)
                    return []
                if t.peer != peer:
                    raise ProtocolError(f"{peer} speaks of transfer {message.transfer!r}, which is {t.peer}'s")
                return self._on_own(message.transfer, t, message, now)
        raise ProtocolError(f"{peer} sent {type(message).__name__}, which prefill does not say here")

    def scattered(self, transfer: str, seq: int, slot: int, now: float, *, error: str = "") -> list[Action]:
        """A `Scatter` has run (or failed): its slot is empty."""
        t = self._inbound.get(transfer)
        if t is None:
            return []
        actions: list[Action] = [Send(t.peer, m.Freed(slot))]
        t.scattering.discard(seq)
        if t.state == "fencing":
            return actions + self._release(transfer, t)
        if error:
            return actions + self._fail(transfer, t, error, now)
        return actions + self._maybe_commit(transfer, t, now)

    def link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The control connection is gone: fail the peer's transfers, and fence its data connection."""
        self._layers.pop(peer, None)
        for key in [k for k in self._early if k[0] == peer]:
            del self._early[key]
        actions: list[Action] = []
        for name, t in list(self._inbound.items()):
            if t.peer == peer and t.state == "granted":
                actions += [a for a in self._fail(name, t, reason, now) if not isinstance(a, Send)]
        return [*actions, FenceLink(peer)]

    def link_fenced(self, peer: str) -> list[Action]:
        """Nothing that the peer wrote can land any more, and no scatter from its slots is running."""
        actions: list[Action] = []
        for name, t in list(self._inbound.items()):
            if t.peer == peer and t.state == "fencing":
                t.quiet = True
                actions += self._release(name, t)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fail what is past its lease or deadline."""
        for key in [k for k, (_, until) in self._early.items() if until <= now]:
            del self._early[key]
        actions: list[Action] = []
        late = set()
        for name, t in list(self._inbound.items()):
            if t.lease_until <= now:
                late.add(t.peer)
                if t.state != "fencing":
                    actions += self._fail(name, t, f"no sign of life from {t.peer} for {self._lease_s:g} s", now)
                t.lease_until = now + self._lease_s
            elif t.state == "fencing":
                continue
            elif t.deadline <= now:
                actions += self._fail(name, t, f"the KV cache did not arrive from {t.peer} in time", now)
        # A silent writer cannot be asked to fence: its connection is ended for it.
        return actions + [FenceLink(peer) for peer in sorted(late)]

    def _on_offer(self, peer: str, message: m.Offer, now: float) -> list[Action]:
        t = self._inbound.get(message.transfer)
        if t is None:
            if len(self._early) >= 10_000:
                raise ProtocolError(f"{peer} offers more transfers than anybody asked for")
            self._early[peer, message.transfer] = (message.tokens, now + self._offer_s)
            return []
        if t.peer != peer:
            raise ProtocolError(f"{peer} offers transfer {message.transfer!r}, which is {t.peer}'s")
        if t.offered:
            return []
        return self._offered(message.transfer, t, message.tokens, now)

    def _offered(self, name: str, t: _Inbound, tokens: int, now: float) -> list[Action]:
        t.offered = True
        if tokens != t.tokens:
            return self._fail(name, t, f"{t.peer} offers {tokens} tokens, the request has {t.tokens}", now)
        t.state, t.granted_at = "granted", now
        t.lease_until, t.deadline = now + self._lease_s, now + self._deadline_s
        t.arrived = [t.origin] * self._layers[t.peer]
        return [Send(t.peer, m.Grant(name, t.epoch, list(t.pages), t.origin, self._lease_s))]

    def _on_own(self, name: str, t: _Inbound, message: m.Message, now: float) -> list[Action]:
        if t.state == "fencing" and isinstance(message, m.Fenced | m.Abort):
            t.quiet = True
            return self._release(name, t)
        if t.state == "fencing":
            # The writer had not seen the fence yet. Its slot is empty at once: nobody will scatter it.
            slot = message.slot if isinstance(message, m.Written) else None
            return [] if slot is None else [Send(t.peer, m.Freed(slot))]
        if isinstance(message, m.Abort):
            t.quiet = True
            held = bool(t.scattering)
            t.state = "fencing"
            return [Failed(name, message.reason, held=held), *(self._release(name, t) if held else self._drop(name))]
        if t.state != "granted":
            raise ProtocolError(f"{t.peer} sent {type(message).__name__} for {name!r} before any page was granted")
        t.lease_until = now + self._lease_s
        if isinstance(message, m.Written):
            return self._on_written(name, t, message)
        if isinstance(message, m.Finish):
            self._check_epoch(name, t, message.epoch)
            t.finish = message
            return self._maybe_commit(name, t, now)
        return []

    def _on_written(self, name: str, t: _Inbound, message: m.Written) -> list[Action]:
        self._check_epoch(name, t, message.epoch)
        (first, end), (start, stop) = message.layers, message.tokens
        if not (first < end <= len(t.arrived) and start < stop <= t.tokens):
            raise ProtocolError(f"{t.peer}: {name!r} has no layers {first}..{end - 1}, tokens {start}..{stop - 1}")
        if t.finish is not None or any(at != start for at in t.arrived[first:end]):
            raise ProtocolError(
                f"{t.peer}: {name!r} layers {first}..{end - 1} from token {start} come twice or out of order"
            )
        t.arrived[first:end] = [stop] * (end - first)
        t.written += 1
        t.wire_bytes += message.nbytes
        if message.slot is None:
            return []
        t.scattering.add(message.seq)
        return [Scatter(t.peer, name, message.seq, message.layers, message.tokens, message.slot)]

    def _maybe_commit(self, name: str, t: _Inbound, now: float) -> list[Action]:
        if t.finish is None or t.scattering:
            return []
        if t.finish.chunks != t.written or any(at != t.tokens for at in t.arrived):
            raise ProtocolError(f"{t.peer} finished {name!r} with chunks missing")
        del self._inbound[name]
        done = Delivered(name, t.finish.handover, t.wire_bytes, now - t.granted_at)
        return [Send(t.peer, m.Commit(name)), done]

    def _release(self, name: str, t: _Inbound) -> list[Action]:
        if not t.quiet or t.scattering:
            return []
        return [*self._drop(name), Released(name)]

    def _drop(self, name: str) -> list[Action]:
        del self._inbound[name]
        return []

    def _fail(self, name: str, t: _Inbound, reason: str, now: float) -> list[Action]:
        if t.state == "expected":
            del self._inbound[name]
            told = [Send(t.peer, m.Abort(name, reason))] if t.offered else []
            return [*told, Failed(name, reason, held=False)]
        t.state, t.lease_until = "fencing", now + self._lease_s
        return [Send(t.peer, m.Fence(name)), Failed(name, reason, held=True)]

    @staticmethod
    def _check_epoch(name: str, t: _Inbound, epoch: int) -> None:
        if epoch != t.epoch:
            raise ProtocolError(f"{t.peer}: {name!r} has epoch {t.epoch}, not {epoch}")


# -- prefill -----------------------------------------------------------------------------------------------------------


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
