"""The decode side of the transfer protocol: see `protocol.py` for the life of a transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.protocol import Action, Delivered, Failed, FenceLink, Released, Scatter, Send


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
