"""The decode side of the transfer protocol: see `protocol.py` for the life of a transfer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import Credit, Demand, FlowAction, Refuse
from regauge.move.inleg import Inbound, InLeg
from regauge.move.protocol import Action, Check, Failed, FenceLink, Part, Released, Send, TransferState, delivered

MAX_EARLY = 10_000
"""Offers that wait for their request, and ends that are remembered."""


class Receiver:
    """The decode side of all transfers of one rank."""

    def __init__(
        self, *, lease_s: float, offer_s: float, deadline_s: float, resume_s: float, flow: ReceiverFlow | None = None
    ) -> None:  # fmt: skip
        """Without `flow` every grant is for all of a transfer's bytes at once."""
        self._lease_s = lease_s
        self._offer_s = offer_s
        self._deadline_s = deadline_s
        self._resume_s = resume_s
        self._inbound: dict[str, Inbound] = {}
        self._early: dict[tuple[str, str], tuple[int, float, float]] = {}
        """Offers that came before the request: (peer, transfer) -> tokens, expiry, arrival."""
        self._withdrawn: OrderedDict[tuple[str, str], str] = OrderedDict()
        """What prefill gave up before the request came: (peer, transfer) -> reason."""
        self._ended: OrderedDict[tuple[str, str], str] = OrderedDict()
        """How transfers ended, for a peer that lost the word: (peer, transfer) -> reason, empty if delivered."""
        self.epoch = 0
        """Of the last grant."""
        self.grants = self.credits = self.credited = 0
        """Given since the start: grants, words of credit, bytes of credit."""
        self.flow = flow
        self._nics = {} if flow is None else {state.nic: i for i, state in enumerate(flow.links())}
        self._flowing: dict[str, tuple[str, str]] = {}
        """Legs that flow control knows, by epoch: (transfer, peer)."""
        self._parts: dict[str, tuple[Part, ...]] = {}
        self._instances: dict[str, str] = {}

    def transfers(self, now: float) -> list[TransferState]:
        """Describe each transfer that is not over."""
        return [
            TransferState(
                name, "decode", t.state, t.tokens, now - t.begun, t.deadline - now, t.failed,
                [leg.describe() for leg in t.legs.values()],
            )
            for name, t in self._inbound.items()
        ]  # fmt: skip

    def link_up(self, peer: str, parts: Sequence[Part], instance: str, now: float) -> list[Action]:
        """A link to a prefill rank stands. A restarted peer is another instance, and knows nothing of what was under way."""
        self._parts[peer] = tuple(parts)
        before, self._instances[peer] = self._instances.get(peer, instance), instance
        if before == instance:
            return []
        actions: list[Action] = []
        for name, t in list(self._inbound.items()):
            leg = t.legs.get(peer)
            if leg is not None and leg.state in ("lost", "parked") and not (leg.complete or t.failed):
                actions += self._fail(name, t, f"prefill worker {peer} has been restarted", now)
        return actions

    def expect(
        self, transfer: str, peers: Sequence[str], tokens: int, tables: Sequence[m.Table], now: float,
        *, first: int = 0, tenant: str = "", due: float | None = None,
    ) -> list[Action]:  # fmt: skip
        """A request waits for tokens [first, tokens) from every peer, in leased pages: a table for each state group.

        `tenant` and `due` (by when it should be here) are for flow control. Raises ProtocolError for a name in use.
        """
        if transfer in self._inbound:
            raise ProtocolError(f"transfer {transfer!r} is expected already")
        t = Inbound(tokens, tuple(tables), first, now, now + self._offer_s, {p: InLeg(p) for p in peers}, tenant, due)
        self._inbound[transfer] = t
        actions: list[Action] = []
        for peer in peers:
            self._ended.pop((peer, transfer), None)
        for peer in peers:
            early, withdrawn = self._early.pop((peer, transfer), None), self._withdrawn.pop((peer, transfer), None)
            if withdrawn is not None and not t.failed:
                actions += self._fail(transfer, t, withdrawn, now)
            elif early is not None and t.failed:
                actions.append(Send(peer, m.Abort(transfer, t.failed)))
            elif early is not None:
                t.offered_at = early[2] if t.offered_at is None else min(t.offered_at, early[2])
                actions += self._offered(transfer, t, t.legs[peer], early[0], now)
        return actions

    def cancel(self, transfer: str, reason: str, now: float) -> list[Action]:
        """The request is over before its KV came. Unknown transfers are ignored: they have ended already."""
        t = self._inbound.get(transfer)
        return self._fail(transfer, t, reason, now) if t is not None and not t.failed else []

    def on_message(self, peer: str, message: m.Message, now: float) -> list[Action]:
        """Take a message. Raises ProtocolError when the peer breaks the rules: the link must then end."""
        match message:
            case m.Offer():
                return self._on_offer(peer, message, now)
            case m.Want() | m.Written() | m.Finish() | m.Renew() | m.Abort() | m.Fenced():
                t = self._inbound.get(message.transfer)
                if t is None:  # it has ended here, and a late word changes nothing; or nobody has asked for it yet
                    key = peer, message.transfer
                    self._early.pop(key, None)
                    if isinstance(message, m.Abort) and key not in self._ended:
                        _keep(self._withdrawn, key, message.reason)
                    return []
                leg = t.legs.get(peer)
                if leg is None:
                    raise ProtocolError(
                        f"{peer} speaks of transfer {message.transfer!r}, which is {', '.join(t.legs)}'s"
                    )
                return self._on_own(message.transfer, t, leg, message, now)
        raise ProtocolError(f"{peer} sent {type(message).__name__}, which prefill does not say here")

    def checked(self, check: Check, now: float, *, agrees: bool = True, error: str = "") -> list[Action]:
        """A `Check` has run (or failed): its slot is empty, and the chunk is what was sent, or is not."""
        actions: list[Action] = []
        if check.slot is not None and check.peer in self._parts:
            actions.append(Send(check.peer, m.Freed(check.slot)))
        name, t = check.transfer, self._inbound.get(check.transfer)
        leg = None if t is None else t.legs.get(check.peer)
        chunk = None if leg is None or leg.epoch != check.epoch else leg.checking.pop(check.seq, None)
        if t is None or leg is None or chunk is None:
            return actions
        if t.failed:
            return actions + self._settle(name, t)
        if error:
            return actions + self._fail(name, t, error, now)
        if agrees:
            leg.verify(chunk)
            return actions + self._maybe_commit(name, t, now)
        if chunk.tries > 1:
            return actions + self._fail(name, t, f"chunk {check.seq} from {leg.peer} arrived corrupted twice", now)
        leg.again[check.seq] = chunk  # also when its link is gone: nothing from here on counts as verified
        if leg.state != "granted":
            return actions
        chunk.tries += 1
        leg.resent += 1
        return [*actions, Send(leg.peer, m.Again(name, leg.epoch, check.seq))]

    def link_lost(self, peer: str, reason: str, now: float) -> list[Action]:
        """The control connection is gone. The data connection is fenced; what is under way waits for a new link."""
        self._parts.pop(peer, None)
        for key in [k for k in self._early if k[0] == peer]:
            del self._early[key]
        actions: list[Action] = []
        for name, t in list(self._inbound.items()):
            leg = t.legs.get(peer)
            if leg is None or leg.state != "granted":
                continue
            actions += self._leaves(leg, now)
            if leg.complete:  # nothing more was to come; only the commit may have to be said twice
                leg.state, leg.lease_until = "parked", float("inf")
                continue
            leg.state, leg.lease_until = "lost", now + self._resume_s
            if self._resume_s <= 0:
                actions += self._fail(name, t, reason, now)
        return [*actions, FenceLink(peer)]

    def give_up(self) -> None:
        """Wait for no new link from now on: the worker is closing."""
        self._resume_s = 0.0

    def link_fenced(self, peer: str, now: float) -> list[Action]:
        """Nothing that the peer wrote can land any more, and no check of its chunks is running."""
        actions: list[Action] = []
        for name, t in list(self._inbound.items()):
            leg = t.legs.get(peer)
            if leg is None or leg.state not in ("lost", "fencing"):
                continue
            leg.state = "over" if t.failed else "parked"
            leg.checking.clear()
            leg.again.clear()
            if t.failed:
                actions += self._settle(name, t)
            elif leg.lease_until <= now:
                actions += self._fail(name, t, f"no new link from {peer} within {self._resume_s:g} s", now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fail what is past its lease or deadline."""
        for key in [k for k, (_, until, _) in self._early.items() if until <= now]:
            del self._early[key]
        actions: list[Action] = []
        late = set()
        for name, t in list(self._inbound.items()):
            for leg in t.legs.values():
                if leg.lease_until > now or leg.state in ("expected", "over"):
                    continue
                leg.lease_until = now + self._lease_s
                if leg.state in ("granted", "fencing"):
                    late.add(leg.peer)
                    reason = f"no sign of life from {leg.peer} for {self._lease_s:g} s"
                else:
                    reason = f"lost the link to {leg.peer}, and no new one stands after {self._resume_s:g} s"
                if not t.failed:
                    actions += self._fail(name, t, reason, now)
            if not t.failed and t.deadline <= now:
                waiting = ", ".join(leg.peer for leg in t.legs.values() if not leg.complete)
                actions += self._fail(name, t, f"the KV cache did not arrive from {waiting} in time", now)
        if self.flow is not None:
            actions += self._credited(self.flow.tick(now))
        # A silent writer cannot be asked to fence: its connection is ended for it.
        return actions + [FenceLink(peer) for peer in sorted(late)]

    # ---- messages ----

    def _on_offer(self, peer: str, message: m.Offer, now: float) -> list[Action]:
        name, t = message.transfer, self._inbound.get(message.transfer)
        if t is None:
            if (ended := self._ended.get((peer, name))) is not None:
                return [Send(peer, m.Abort(name, ended) if ended else m.Commit(name))]
            if len(self._early) >= MAX_EARLY:
                raise ProtocolError(f"{peer} offers more transfers than anybody asked for")
            self._withdrawn.pop((peer, name), None)
            self._early[peer, name] = (message.tokens, now + self._offer_s, now)
            return []
        leg = t.legs.get(peer)
        if leg is None:
            raise ProtocolError(f"{peer} offers transfer {name!r}, which is {', '.join(t.legs)}'s")
        if t.failed:
            return [Send(peer, m.Abort(name, t.failed))]
        if leg.state not in ("expected", "parked"):
            return []
        return self._offered(name, t, leg, message.tokens, now)

    def _offered(self, name: str, t: Inbound, leg: InLeg, tokens: int, now: float) -> list[Action]:
        if tokens != t.tokens:
            reason = f"{leg.peer} offers {tokens} tokens, the request has {t.tokens}"
            return [Send(leg.peer, m.Abort(name, reason)), *self._fail(name, t, reason, now)]
        if t.deadline <= now:  # this process stood still
            reason = f"{leg.peer} offers {name!r} after the request's time"
            return [Send(leg.peer, m.Abort(name, reason)), *self._fail(name, t, reason, now)]
        parts = self._parts[leg.peer]
        if any(part.group >= len(t.tables) for part in parts):
            raise ProtocolError(
                f"{name!r}: {len(t.tables)} page tables, but the link of {leg.peer} carries more groups"
            )
        self.epoch += 1
        done = leg.grant(self.epoch, parts, t.first, t.tokens, now + self._lease_s)
        self.grants += 1
        t.offered_at = now if t.offered_at is None else t.offered_at
        if t.granted_at is None:
            t.granted_at = now
        if all(each.state != "expected" for each in t.legs.values()):
            t.deadline = min(t.deadline, now + self._deadline_s) if done else now + self._deadline_s
        credit = self._arrives(name, t, leg, now)
        grant = m.Grant(name, leg.epoch, list(t.tables), t.first, self._lease_s, None if self.flow is None else 0, done)
        return [Send(leg.peer, grant), *credit]

    def _on_own(
        self, name: str, t: Inbound, leg: InLeg, message: m.Want | m.Written | m.Finish | m.Renew | m.Abort | m.Fenced,
        now: float,
    ) -> list[Action]:  # fmt: skip
        if isinstance(message, m.Fenced | m.Abort):
            return self._on_quiet(name, t, leg, message, now)
        if t.failed:
            # The writer had not seen the fence yet. Its slot is empty at once: nobody will read it.
            if leg.state != "fencing" or not isinstance(message, m.Written) or message.epoch != leg.epoch:
                return []
            return [] if message.slot is None else [Send(leg.peer, m.Freed(message.slot))]
        if leg.state == "expected":
            raise ProtocolError(f"{leg.peer} sent {type(message).__name__} for {name!r} before any page was granted")
        stale = not isinstance(message, m.Renew) and message.epoch < leg.epoch
        if leg.state != "granted" or stale:
            return []  # a word of an earlier link: it changes nothing, and its slot was of that link
        leg.lease_until = now + self._lease_s
        key = str(leg.epoch)
        if isinstance(message, m.Renew):
            return [] if self.flow is None else self._credited(self.flow.renew(key, now))
        if message.epoch != leg.epoch:
            raise ProtocolError(f"{leg.peer}: {name!r} has epoch {leg.epoch}, not {message.epoch}")
        match message:
            case m.Written():
                check = leg.written(message)
                t.first_at, t.last_at = now if t.first_at is None else t.first_at, now
                landed = [] if self.flow is None else self._credited(self.flow.landed(key, leg.landed, now))
                return [check, *landed]
            case m.Want():
                return [] if self.flow is None else self._credited(self.flow.backlog(key, message.nbytes, now))
            case m.Finish():
                leg.finished(message)
                t.handover = message.handover or t.handover
                return [*self._leaves(leg, now), *self._maybe_commit(name, t, now)]
        return []

    def _on_quiet(self, name: str, t: Inbound, leg: InLeg, message: m.Fenced | m.Abort, now: float) -> list[Action]:
        """The writer says that nothing is in flight any more, and that it has given the transfer up."""
        if t.failed:
            if leg.state != "fencing":
                return []
            leg.state = "over"
            return self._settle(name, t)
        if isinstance(message, m.Fenced):
            raise ProtocolError(f"{leg.peer} says that {name!r} is fenced, which nobody asked for")
        leg.state = "over"
        return self._fail(name, t, message.reason, now)

    def _maybe_commit(self, name: str, t: Inbound, now: float) -> list[Action]:
        if not all(leg.complete for leg in t.legs.values()):
            return []
        del self._inbound[name]
        actions: list[Action] = []
        for leg in t.legs.values():
            _keep(self._ended, (leg.peer, name), "")
            if leg.state == "granted":
                actions.append(Send(leg.peer, m.Commit(name)))
        begun = t.granted_at if t.granted_at is not None else now
        return [*actions, delivered(name, t.handover, t.legs.values(), now - begun, t.stages(now))]

    # ---- flow control: a leg is known there by its epoch ----

    def _arrives(self, name: str, t: Inbound, leg: InLeg, now: float) -> list[Action]:
        if self.flow is None:
            return []
        leg.credit = 0
        self._flowing[str(leg.epoch)] = (name, leg.peer)
        unit = max((p.token_bytes for p in leg.parts), default=1)
        demand = Demand(str(leg.epoch), leg.peer, leg.missing, tenant=t.tenant, deadline=t.due, unit_bytes=unit)
        return self._credited(self.flow.arrive(demand, now))

    def _leaves(self, leg: InLeg, now: float) -> list[Action]:
        if self.flow is None or self._flowing.pop(str(leg.epoch), None) is None:
            return []
        return self._credited(self.flow.end(str(leg.epoch), now))

    def _credited(self, actions: Sequence[FlowAction]) -> list[Action]:
        out: list[Action] = []
        for action in actions:
            name, peer = self._flowing.get(action.transfer, ("", ""))
            t = self._inbound.get(name)
            leg = None if t is None else t.legs[peer]
            if leg is None or leg.state != "granted" or str(leg.epoch) != action.transfer:
                continue
            if isinstance(action, Credit):
                self.credits += 1
                self.credited += max(0, action.data_bytes - (leg.credit or 0))
                leg.credit, leg.nic = action.data_bytes, self._nics[action.nic]
                out.append(Send(peer, m.Credit(name, leg.epoch, action.data_bytes, int(action.rank), leg.nic)))
            elif isinstance(action, Refuse):
                out.append(Send(peer, m.Abort(name, f"flow control does not take it: {action.reason}")))
        return out

    # ---- endings ----

    def _fail(self, name: str, t: Inbound, reason: str, now: float) -> list[Action]:
        t.failed = reason
        actions: list[Action] = []
        for leg in t.legs.values():
            leg.again.clear()
            actions += self._leaves(leg, now)
            if leg.state == "granted":
                leg.state, leg.lease_until = "fencing", now + self._lease_s
                actions.append(Send(leg.peer, m.Fence(name)))
            elif leg.state == "lost":
                leg.state = "fencing"  # `link_fenced` comes
                leg.lease_until = float("inf")
            elif leg.state in ("expected", "parked"):
                leg.state = "over"
        held = not all(leg.quiet for leg in t.legs.values())
        return [*actions, Failed(name, reason, held=held), *self._settle(name, t, released=held)]

    def _settle(self, name: str, t: Inbound, *, released: bool = True) -> list[Action]:
        """Let the pages of a failed transfer go once nothing can touch them."""
        if not all(leg.quiet for leg in t.legs.values()):
            return []
        del self._inbound[name]
        for leg in t.legs.values():
            _keep(self._ended, (leg.peer, name), t.failed)
        return [Released(name)] if released else []


def _keep(words: OrderedDict[tuple[str, str], str], key: tuple[str, str], reason: str) -> None:
    words[key] = reason
    while len(words) > MAX_EARLY:
        words.popitem(last=False)
