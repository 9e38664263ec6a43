"""The prefill side of the transfer protocol: see `protocol.py` for the life of a transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.flow_sender import Pace
from regauge.move.outleg import LinkTerms, OutLeg
from regauge.move.protocol import (
    Action,
    Failed,
    Granted,
    Range,
    Released,
    Relink,
    Send,
    TransferState,
    Write,
    delivered,
)

MAX_LOSSES = 3
"""Links in a row that a leg may lose without a single chunk getting through."""

MAX_UNTOLD = 1_000
"""Transfers given up that are remembered for a peer's next link."""


@dataclass(slots=True)
class _Outbound:
    tokens: int
    begun: float
    deadline: float
    legs: dict[str, OutLeg]
    announced: bool = False
    """`Granted` has been said."""
    ready: dict[int, int] = field(default_factory=dict)
    """Per layer of the model: the token before which everything is computed."""
    started: float | None = None
    handover: bytes | None = None
    failed: str = ""


class Sender:
    """The prefill side of all transfers of one rank."""

    def __init__(
        self, *, offer_s: float, deadline_s: float, resume_s: float, most_writes: int = 1 << 30,
        paces: Sequence[Pace] = (),
    ) -> None:  # fmt: skip
        """`most_writes`: writes in flight over all links together; few, where they share a NIC, keep the receivers' order.

        `paces`: how fast each NIC of this side may send; as fast as it can, without.
        """
        self._offer_s = offer_s
        self._deadline_s = deadline_s
        self._resume_s = resume_s
        self._most_writes = most_writes
        self._paces = tuple(paces)
        self.wake: float | None = None
        """When `resume` may start writes that a NIC's pace holds back; None: nothing is held back."""
        self._outbound: dict[str, _Outbound] = {}
        self._terms: dict[str, LinkTerms] = {}
        self._free: dict[str, list[int]] = {}
        self._flying: dict[str, int] = {}
        self._lost: dict[str, float] = {}
        """Peers whose link is gone while transfers wait for it: until when they wait."""
        self._instances: dict[str, str] = {}
        self._before: dict[str, int] = {}
        """Epoch of the last grant that a peer had given when its link was made: one that is not newer is of an earlier link."""
        self._untold: dict[str, dict[str, str]] = {}
        """Transfers that were given up before a peer had granted them, or while its link was gone: it may not have heard. By peer the
        name and the reason, for its next link."""

    def transfers(self, now: float) -> list[TransferState]:
        """Describe each transfer that is not over."""
        return [
            TransferState(
                name, "prefill", "failed" if t.failed else "granted" if t.announced else "offered", t.tokens,
                now - t.begun, t.deadline - now, t.failed, [leg.describe() for leg in t.legs.values()],
            )
            for name, t in self._outbound.items()
        ]  # fmt: skip

    def free_slots(self, peer: str) -> int:
        """Staging slots of a peer that no chunk occupies, for inspection."""
        return len(self._free.get(peer, ()))

    def link_up(self, peer: str, terms: LinkTerms, instance: str, epoch: int = 0) -> list[Action]:
        """A link to a decode rank stands, whose last grant had `epoch`. Transfers that waited are offered again, unless it was restarted."""
        self._terms[peer], self._before[peer] = terms, epoch
        self._free[peer] = list(range(terms.slots))
        self._flying[peer] = 0
        before, self._instances[peer] = self._instances.get(peer, instance), instance
        untold = self._untold.pop(peer, {})
        if before != instance:
            return self.link_refused(peer, f"decode worker {peer} has been restarted")
        self._lost.pop(peer, None)
        actions: list[Action] = [Send(peer, m.Abort(name, reason)) for name, reason in untold.items()]
        for name, t in self._outbound.items():
            leg = t.legs.get(peer)
            if leg is not None and leg.state == "lost" and not t.failed:
                leg.state = "offered"
                actions.append(Send(peer, m.Offer(name, t.tokens)))
        return actions

    def offer(self, transfer: str, peers: Sequence[str], tokens: int, now: float) -> list[Action]:
        """Announce a transfer of that many tokens to one or several decode ranks.

        Raises ProtocolError for a name in use or a peer without a link.
        """
        if transfer in self._outbound:
            raise ProtocolError(f"transfer {transfer!r} is offered already")
        if missing := [peer for peer in peers if peer not in self._terms]:
            raise ProtocolError(f"transfer {transfer!r}: no link to {', '.join(missing)}")
        legs = {peer: OutLeg(peer) for peer in peers}
        for peer in peers:
            self._untold.get(peer, {}).pop(transfer, None)
        self._outbound[transfer] = _Outbound(tokens, now, now + self._offer_s, legs)
        return [Send(peer, m.Offer(transfer, tokens)) for peer in legs]

    def ready(self, transfer: str, layers: Range, tokens: Range, now: float) -> list[Action]:
        """The engine has written layers [first, end) of the model for these tokens into its pool.

        Unknown transfers are over: ignored. Raises ProtocolError for tokens that do not follow those ready before.
        """
        t = self._outbound.get(transfer)
        if t is None or t.failed:
            return []
        t.started = now if t.started is None else t.started
        for layer in range(*layers):
            if t.ready.get(layer, tokens[0]) != tokens[0]:
                raise ProtocolError(
                    f"{transfer!r} layer {layer}: tokens from {tokens[0]} are ready, those before end at {t.ready[layer]}"
                )
            t.ready[layer] = tokens[1]
        actions: list[Action] = []
        for leg in t.legs.values():
            if leg.state == "granted":
                actions += self._computed(transfer, t, leg, layers)
        return [*actions, *self._pump(now)]

    def finish(self, transfer: str, handover: bytes) -> list[Action]:
        """Everything has been made ready; `handover` is what decode needs beside the KV."""
        t = self._outbound.get(transfer)
        if t is None or t.failed:
            return []
        t.handover = handover
        return [action for leg in t.legs.values() for action in self._maybe_finish(transfer, t, leg)]

    def cancel(self, transfer: str, reason: str) -> list[Action]:
        """The request is over. Unknown transfers have ended already: ignored."""
        t = self._outbound.get(transfer)
        return [] if t is None or t.failed else self._fail(transfer, t, reason)

    def on_message(self, peer: str, message: m.Message, now: float) -> list[Action]:
        """Take a message. Raises ProtocolError when the peer breaks the rules: the link must then end."""
        if isinstance(message, m.Freed):
            self._free_slot(peer, message.slot)
            return list(self._pump(now))
        if not isinstance(message, m.Grant | m.Credit | m.Again | m.Commit | m.Abort | m.Fence):
            raise ProtocolError(f"{peer} sent {type(message).__name__}, which decode does not say here")
        t = self._outbound.get(message.transfer)
        if t is None:
            return [Send(peer, m.Fenced(message.transfer))] if isinstance(message, m.Fence) else []
        leg = t.legs.get(peer)
        if leg is None:
            raise ProtocolError(f"{peer} speaks of transfer {message.transfer!r}, which is {', '.join(t.legs)}'s")
        return self._on_own(message.transfer, t, leg, message, now)

    def written(
        self, transfer: str, peer: str, epoch: int, seq: int, nbytes: int, digest: bytes, now: float
    ) -> list[Action]:  # fmt: skip
        """A `Write` has landed; `digest` is of what was written."""
        t = self._outbound.get(transfer)
        leg = None if t is None else t.legs.get(peer)
        if t is None or leg is None or leg.epoch != epoch:
            return []  # the link went down meanwhile
        self._flying[peer] -= 1
        chunk = leg.flight[seq]
        slot, leg.wire_bytes = chunk.slot, leg.wire_bytes + nbytes
        chunk.written = m.Written(transfer, epoch, seq, chunk.pair, chunk.layers, chunk.tokens, slot, nbytes, digest)
        if t.failed:
            if slot is not None:
                self._free[peer].append(slot)
            del leg.flight[seq]
            return [*self._settle(transfer, t), *self._pump(now)]
        told: list[Action] = [Send(peer, word) for word in leg.landed()]
        return [*told, *self._maybe_finish(transfer, t, leg), *self._pump(now)]

    def link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The link is gone and its data connection fenced: nothing is in flight. Transfers wait `resume_s` for a new one."""
        self._terms.pop(peer, None)
        self._free.pop(peer, None)
        self._flying.pop(peer, None)
        actions: list[Action] = []
        waiting = False
        for name, t in list(self._outbound.items()):
            leg = t.legs.get(peer)
            if leg is None or leg.state == "over":
                continue
            leg.lose()
            if t.failed:
                actions += self._settle(name, t)
            elif self._resume_s <= 0 or leg.losses > MAX_LOSSES:
                actions += self._fail(name, t, reason)
            else:
                waiting = True
        if waiting:
            self._lost[peer] = now + self._resume_s
            actions.append(Relink(peer))
        return [*actions, *self._pump(now)]

    def resume(self, now: float) -> list[Action]:
        """Start what a NIC's pace held back: for `wake`."""
        return list(self._pump(now))

    def waits_for(self, peer: str) -> bool:
        """Whether transfers wait for a new link to a peer."""
        return peer in self._lost

    def give_up(self, reason: str) -> list[Action]:
        """Wait for no new link from now on: the worker is closing."""
        self._resume_s = 0.0
        return [action for peer in list(self._lost) for action in self.link_refused(peer, reason)]

    def link_refused(self, peer: str, reason: str) -> list[Action]:
        """No new link to this instance of a peer can be made, now or ever: what waits for it fails."""
        self._lost.pop(peer, None)
        actions: list[Action] = []
        for name, t in list(self._outbound.items()):
            if peer in t.legs and t.legs[peer].state == "lost" and not t.failed:
                actions += self._fail(name, t, reason)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Renew leases; fail what is past its deadline, or has waited too long for a new link."""
        actions: list[Action] = []
        for peer in [p for p, until in self._lost.items() if until <= now]:
            actions += self.link_refused(
                peer, f"lost the link to {peer}, and no new one stands after {self._resume_s:g} s"
            )
        for name, t in list(self._outbound.items()):
            if t.failed:
                continue
            if t.deadline <= now:
                actions += self._fail(name, t, f"the transfer to {', '.join(t.legs)} did not complete in time")
                continue
            for leg in t.legs.values():
                if leg.grant is not None and leg.renew_at <= now:
                    leg.renew_at = now + leg.grant.lease_s / 3
                    actions.append(Send(leg.peer, m.Renew(name)))
        return actions

    # ---- messages ----

    def _on_own(self, name: str, t: _Outbound, leg: OutLeg, message: m.Message, now: float) -> list[Action]:
        match message:
            case m.Grant():
                due = leg.state == "offered" and message.epoch > self._before[leg.peer] and not t.failed
                return self._granted(name, t, leg, message, now) if due else []
            case m.Credit():
                if message.epoch == leg.epoch and leg.credit is not None:
                    if message.nic >= len(self._terms[peer := leg.peer].ways):
                        raise ProtocolError(f"{peer} gives credit for its NIC {message.nic}, which it does not have")
                    leg.credit, leg.rank, leg.nic = max(leg.credit, message.upto), message.rank, message.nic
                    return list(self._pump(now))
            case m.Again():
                if not t.failed and message.epoch == leg.epoch:
                    leg.ask_again(message.seq)
                    return list(self._pump(now))
            case m.Commit():
                return self._on_commit(name, t, leg, now)
            case m.Fence():
                leg.fenced = True
                return (
                    self._fail(name, t, f"{leg.peer} gave the transfer up") if not t.failed else self._settle(name, t)
                )
            case m.Abort():
                return [] if t.failed else self._fail(name, t, message.reason)
        return []

    def _granted(self, name: str, t: _Outbound, leg: OutLeg, grant: m.Grant, now: float) -> list[Action]:
        if t.deadline <= now:  # this process stood still
            return self._fail(name, t, f"the transfer to {', '.join(t.legs)} did not complete in time")
        leg.granted(grant, self._terms[leg.peer].parts, t.tokens, now + grant.lease_s / 3)
        actions: list[Action] = []
        if not t.announced and all(each.state == "granted" for each in t.legs.values()):
            t.announced, t.deadline = True, now + self._deadline_s
            actions.append(Granted(name, min(each.grant.first for each in t.legs.values() if each.grant is not None)))
        return [*actions, *self._computed(name, t, leg), *self._pump(now), *self._maybe_finish(name, t, leg)]

    def _on_commit(self, name: str, t: _Outbound, leg: OutLeg, now: float) -> list[Action]:
        if leg.state == "over" or t.failed:
            return []
        if not leg.finished:
            raise ProtocolError(f"{leg.peer} committed {name!r} before it was finished")
        leg.state = "over"
        if any(each.state != "over" for each in t.legs.values()):
            return []
        del self._outbound[name]
        return [delivered(name, b"", t.legs.values(), now - (t.started if t.started is not None else now))]

    # ---- chunks ----

    def _computed(self, name: str, t: _Outbound, leg: OutLeg, layers: Range | None = None) -> list[Action]:
        leg.computed(self._terms[leg.peer].parts, t.ready, t.tokens, layers)
        return self._want(name, leg)

    def _want(self, name: str, leg: OutLeg) -> list[Action]:
        more = leg.want(self._terms[leg.peer])
        return [] if more is None else [Send(leg.peer, m.Want(name, leg.epoch, more))]

    def _pump(self, now: float) -> Iterator[Action]:
        """Start writes: in the receivers' order, what has least left first, then the oldest; as many as links and NIC carry."""
        able = [
            (leg.rank, leg.remaining if leg.credit is not None else 0, i, name, leg)
            for i, (name, t) in enumerate(self._outbound.items())
            if not t.failed
            for leg in t.legs.values()
            if leg.state == "granted" and leg.peer in self._terms
        ]
        self.wake = None
        for *_, name, leg in sorted(able, key=lambda x: x[:3]):
            terms, peer = self._terms[leg.peer], leg.peer
            while self._flying[peer] < terms.depth and sum(self._flying.values()) < self._most_writes:
                pace = self._paces[terms.ways[leg.nic]] if self._paces else None
                if pace is not None and (wait := pace.wait(now)) > 0:
                    if leg.waiting:
                        self.wake = min(now + wait, self.wake if self.wake is not None else float("inf"))
                    break
                seq = leg.next(terms, self._free[peer])
                if seq is None or leg.grant is None:
                    break
                chunk = leg.chunks[seq]
                self._flying[peer] += 1
                if pace is not None:
                    pace.take(chunk.nbytes, now)
                table = leg.grant.tables[terms.parts[chunk.pair].group]
                yield Write(
                    peer, name, leg.epoch, seq, chunk.pair, chunk.layers, chunk.tokens, table, chunk.slot, leg.nic
                )

    def _maybe_finish(self, name: str, t: _Outbound, leg: OutLeg) -> list[Action]:
        if t.handover is None or leg.state != "granted" or leg.finished or not leg.all_sent:
            return []
        leg.finished = True
        return [Send(leg.peer, m.Finish(name, leg.epoch, len(leg.chunks), t.handover))]

    # ---- endings ----

    def _fail(self, name: str, t: _Outbound, reason: str) -> list[Action]:
        t.failed = reason
        held = any(leg.busy for leg in t.legs.values())
        for leg in t.legs.values():
            leg.again.clear()
            for seq in [s for s, c in leg.flight.items() if c.written is not None]:
                slot = leg.flight.pop(seq).slot
                if slot is not None:
                    self._free[leg.peer].append(slot)
        return [Failed(name, reason, held=held), *self._settle(name, t, released=held)]

    def _settle(self, name: str, t: _Outbound, *, released: bool = True) -> list[Action]:
        """Tell each decode rank once no write to it is in flight; let the pages go once none is at all."""
        actions: list[Action] = []
        for leg in t.legs.values():
            if leg.busy or leg.state == "over":
                continue
            if leg.state in ("lost", "offered"):
                self._keep_untold(leg.peer, name, t.failed)
            if leg.state != "lost":
                actions.append(Send(leg.peer, m.Fenced(name) if leg.fenced else m.Abort(name, t.failed)))
            leg.state = "over"
        if all(leg.state == "over" for leg in t.legs.values()):
            del self._outbound[name]
            actions += [Released(name)] if released else []
        return actions

    def _keep_untold(self, peer: str, name: str, reason: str) -> None:
        untold = self._untold.setdefault(peer, {})
        untold[name] = reason
        if len(untold) > MAX_UNTOLD:
            del untold[next(iter(untold))]

    def _free_slot(self, peer: str, slot: int) -> None:
        terms = self._terms.get(peer)
        if terms is None:
            return
        if slot >= terms.slots or slot in self._free[peer]:
            raise ProtocolError(f"{peer} freed staging slot {slot}, which it does not hold")
        self._free[peer].append(slot)
