"""Receivers and senders over a network that loses, repeats and reorders control messages, with senders that freeze and die.

No credit is exceeded or leaked, no page is lost, windows hold, and when the faults end every transfer ends.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from regauge.config import FlowConfig
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_sender import SenderFlow
from regauge.move.flow_types import Admit, Credit, Demand, FlowAction, NicLimits, Refuse

WINDOW, PAGES = 400, 20
LIMITS = FlowConfig(
    quantum_bytes=100, unscheduled_bytes=60, unscheduled_budget_bytes=150, lease_s=2.0, stall_s=0.05, max_wait_s=1.0
)
NICS = [NicLimits("a", 1_000.0, 0.01, WINDOW), NicLimits("b", 500.0, 0.01, WINDOW)]


class Network(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.count = 0
        self.receiver = ReceiverFlow(NICS, pages=PAGES, limits=LIMITS)
        self.senders = [SenderFlow([NicLimits("tx", 1e6)]) for _ in range(3)]
        self.frozen: set[int] = set()
        self.mail: list[Credit] = []
        self.data: list[tuple[str, int]] = []
        """On the wire, in order per transfer: the total that has landed once this has."""
        self.size: dict[str, int] = {}
        self.pages: dict[str, int] = {}
        """Lent by the receiver, by its own words."""
        self.most: dict[str, int] = {}
        """Highest credit ever issued."""
        self.sent: dict[str, int] = {}

    def take(self, actions: list[FlowAction]) -> None:
        for action in actions:
            if isinstance(action, Admit):
                self.pages[action.transfer] = action.pages
            elif isinstance(action, Credit):
                self.mail.append(action)
                self.most[action.transfer] = max(self.most.get(action.transfer, 0), action.data_bytes)
            elif isinstance(action, Refuse):
                self.senders[int(action.peer)].end(action.transfer)
                del self.size[action.transfer]

    def alive(self) -> list[str]:
        return sorted(name for name in self.size if int(name[0]) not in self.frozen)

    @rule(
        sender=st.integers(0, 2), nbytes=st.integers(1, 900), pages=st.integers(0, 12), tenant=st.sampled_from("xy"),
        unit=st.sampled_from([1, 50, 450]), within=st.sampled_from([None, 0.1, 2.0]),
        where=st.sampled_from([(), ("a",)]),
    )  # fmt: skip
    def arrive(
        self, sender: int, nbytes: int, pages: int, tenant: str, unit: int, within: float | None, where: tuple[str, ...]
    ) -> None:
        if len(self.size) >= 12:
            return
        name = f"{sender}:{self.count}"
        self.count += 1
        self.size[name] = nbytes
        self.senders[sender].offer(name, "d", nbytes, "tx")
        due = None if within is None else self.now + within
        demand = Demand(name, str(sender), nbytes, pages, tenant, due, where, min(unit, nbytes))
        self.take(self.receiver.arrive(demand, self.now))

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), part=st.floats(0, 1))
    def compute(self, data: st.DataObject, part: float) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        total = self.senders[int(name[0])].ready(name, int(self.size[name] * part))
        self.take(self.receiver.backlog(name, total, self.now))

    @precondition(lambda self: self.mail)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "repeat", "lose"]))
    def control(self, data: st.DataObject, fate: str) -> None:
        at = data.draw(st.integers(0, len(self.mail) - 1))
        credit = self.mail[at] if fate == "repeat" else self.mail.pop(at)
        if fate != "lose" and int(credit.peer) not in self.frozen:
            self.senders[int(credit.peer)].credit(credit, self.now)

    @rule(sender=st.integers(0, 2), most=st.integers(1, 300))
    def send(self, sender: int, most: int) -> None:
        turn = None if sender in self.frozen else self.senders[sender].choose("tx", self.now, most=most)
        if turn is not None:
            self.senders[sender].sent(turn.transfer, turn.nbytes, self.now)
            assert turn.start == self.sent.get(turn.transfer, 0)
            self.sent[turn.transfer] = turn.start + turn.nbytes
            assert self.sent[turn.transfer] <= self.most[turn.transfer], "no credit was ever that high"
            self.data.append((turn.transfer, self.sent[turn.transfer]))

    @precondition(lambda self: self.data)
    @rule()
    def land(self) -> None:
        name, total = self.data.pop(0)
        self.take(self.receiver.landed(name, total, self.now))
        if self.size.get(name) == total:
            self.finish(name)

    def finish(self, name: str) -> None:
        """The transfer is over here, and the sender hears of it; the pages stay lent."""
        self.take(self.receiver.end(name, self.now))
        self.senders[int(name[0])].end(name)
        self.size.pop(name, None)

    @precondition(lambda self: self.size)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(sorted(self.size))))

    @precondition(lambda self: self.pages.keys() - self.size.keys())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pages.keys() - self.size.keys())))
        del self.pages[name]
        self.take(self.receiver.free(name, self.now))

    @rule(sender=st.integers(0, 2))
    def freeze_or_thaw(self, sender: int) -> None:
        self.frozen ^= {sender}

    @rule(seconds=st.sampled_from([0.001, 0.06, 0.5, 2.5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name in self.alive():
            self.take(self.receiver.renew(name, self.now))
        self.take(self.receiver.tick(self.now))

    @invariant()
    def windows_hold(self) -> None:
        for state, nic in zip(self.receiver.links(), NICS, strict=True):
            flows = [f for f in self.receiver.transfers.values() if f.nic is not None and f.nic.limits is nic]
            scheduled = sum(f.outstanding for f in flows if not f.unscheduled)
            assert state.unscheduled_bytes == sum(f.outstanding for f in flows if f.unscheduled) <= 150
            assert state.granted_bytes - state.unscheduled_bytes == scheduled
            assert state.stalled_bytes == sum(f.outstanding for f in flows if f.stalled)
            # A chunk larger than the window goes alone; late landings of written-off bytes are nobody's choice.
            assert scheduled <= max(WINDOW * LIMITS.overcommit, 450)
            assert state.backlog_bytes == sum(f.remaining for f in flows)

    @invariant()
    def pages_add_up(self) -> None:
        assert self.receiver.pages_free == PAGES - sum(self.pages.values())
        assert self.receiver.pages_free >= 0

    @invariant()
    def credit_is_for_ready_bytes(self) -> None:
        for flow in self.receiver.transfers.values():
            assert flow.landed <= flow.granted <= (flow.total if flow.unscheduled else max(flow.ready, flow.landed, 60))

    def teardown(self) -> None:
        """Without faults, everything ends, and nothing is left."""
        self.frozen.clear()
        for _ in range(400):
            if not self.size and not self.pages:
                break
            for name in sorted(self.size):
                total = self.senders[int(name[0])].ready(name, self.size[name])
                self.take(self.receiver.backlog(name, total, self.now))
            for credit in self.mail:
                self.senders[int(credit.peer)].credit(credit, self.now)
            self.mail.clear()
            for sender in range(3):
                self.send(sender, 1_000)
            while self.data:
                self.land()
            for name in sorted(self.pages.keys() - self.size.keys()):
                del self.pages[name]
                self.take(self.receiver.free(name, self.now))
            self.now += 0.1
            self.take(self.receiver.tick(self.now))
        assert not self.size
        assert not self.receiver.transfers
        assert self.receiver.pages_free == PAGES
        for state in self.receiver.links():
            assert (state.granted_bytes, state.stalled_bytes, state.backlog_bytes) == (0, 0, 0)


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
