"""The transfer protocol under any interleaving of events: what must always hold, and what must come in the end.

Two prefill and two decode workers, several transfers, links that break and come back, aborts on either side, lost time. Messages of one
connection keep their order, as over TCP; everything else may happen at any moment.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.pages import PagePool
from regauge.move.protocol import Action, Delivered, Failed, FenceLink, Granted, Released, Scatter, Send, Write
from regauge.move.receiver import Receiver
from regauge.move.sender import LinkLimits, Sender

LAYERS, PAGE = 3, 4
TIMES = {"offer_s": 60.0, "deadline_s": 30.0}


@dataclass
class Transfer:
    name: str
    p: str
    d: str
    tokens: int
    cells: list[tuple[int, tuple[int, int]]] = field(default_factory=list)
    """What the engine will make ready, in order: layer, tokens."""
    offered: bool = False
    expected: bool = False
    granted: bool = False
    finished: bool = False
    sender_end: str | None = None
    receiver_end: str | None = None
    landed: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class World:
    """Drives senders and receivers as the real drivers do, one event at a time, with checks after each."""

    def __init__(self, slots: int) -> None:
        self.now = 0.0
        self.slots = slots
        self.senders = {p: Sender(**TIMES) for p in ("p0", "p1")}
        self.receivers = {d: Receiver(lease_s=10.0, **TIMES) for d in ("d0", "d1")}
        self.pools = {d: PagePool(24, PAGE) for d in self.receivers}
        self.sources = {p: PagePool(24, PAGE) for p in self.senders}
        self.queues: dict[tuple[str, str], deque[m.Message]] = defaultdict(deque)
        self.up: set[tuple[str, str]] = set()
        self.writes: dict[tuple[str, str], Write] = {}
        self.scatters: dict[str, list[Scatter]] = defaultdict(list)
        self.fences: set[tuple[str, str]] = set()
        self.dying: set[tuple[str, str]] = set()
        """Links whose prefill side waits for its write to end."""
        self.transfers: dict[str, Transfer] = {}
        self.filled: dict[tuple[str, str], set[int]] = defaultdict(set)
        for p in self.senders:
            for d in self.receivers:
                self.connect(p, d)

    def connect(self, p: str, d: str) -> None:
        self.up.add((p, d))
        self.senders[p].link_up(d, LinkLimits(self.slots, lambda n: max(0, 8 // n)))
        self.receivers[d].link_up(p, LAYERS)

    # -- actions ------------------------------------------------------------------------------------------------------

    def run(self, who: str, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, message):
                    link = (who, peer) if who in self.senders else (peer, who)
                    if link in self.up:
                        self.queues[who, peer].append(m.decode(m.encode(message)[4:]))
                case Write(peer):
                    assert (who, peer) not in self.writes, "two writes at once on one link"
                    if (who, peer) in self.up:
                        self.writes[who, peer] = action
                        self.check_write(who, action)
                case Granted(name):
                    self.transfers[name].granted = True
                case Scatter():
                    self.scatters[who].append(action)
                case FenceLink(peer):
                    if (peer, who) in self.up:
                        self.break_link(peer, who)
                    else:
                        self.fences.add((peer, who))
                case Delivered(name) | Failed(name) | Released(name):
                    self.end(who, name, action)

    def end(self, who: str, name: str, action: Delivered | Failed | Released) -> None:
        t = self.transfers[name]
        pool = self.sources[who] if who in self.sources else self.pools[who]
        if isinstance(action, Released):
            assert (t.sender_end if who == t.p else t.receiver_end) == "failed"
            self.no_write(t, who)
            pool.release(name)
            return
        kind = "delivered" if isinstance(action, Delivered) else "failed"
        if who == t.p:
            assert t.sender_end is None, "the prefill side ended twice"
            t.sender_end = kind
        else:
            assert t.receiver_end is None, "the decode side ended twice"
            t.receiver_end = kind
        if kind == "delivered":
            if who == t.d:
                assert all(t.landed[layer] == t.tokens for layer in range(LAYERS)), "committed with a hole"
                assert not any(s.transfer == name for s in self.scatters[who])
                pool.commit(name)
            else:
                assert t.receiver_end == "delivered", "prefill believes in a commit that was not made"
                pool.release(name)
        elif isinstance(action, Failed) and not action.held:
            self.no_write(t, who)
            pool.release(name)
        elif who == t.d:
            pool.quarantine(name)

    def no_write(self, t: Transfer, who: str) -> None:
        write = self.writes.get((t.p, t.d))
        assert write is None or write.transfer != t.name, f"{who} frees pages of {t.name} under a write"
        if who == t.d:
            assert not any(s.transfer == t.name for s in self.scatters[who]), "pages freed under a scatter"

    def check_write(self, who: str, write: Write) -> None:
        t = self.transfers[write.transfer]
        if self.slots:
            assert write.slot is not None
            assert not any(s.slot == write.slot and s.peer == who for s in self.scatters[write.peer]), "slot in use"
        else:
            state = self.pools[t.d].state(write.transfer)
            assert state in ("leased", "quarantined"), f"a write into {state} pages"
            assert list(write.pages) == self.pools[t.d].owned(write.transfer)

    # -- events -------------------------------------------------------------------------------------------------------

    def begin(self, tokens: int, p: str, d: str) -> None:
        need = -(-tokens // PAGE)
        if self.pools[d].free < need or self.sources[p].free < need:
            return
        name = f"t{len(self.transfers)}"
        cells = [(layer, (a, min(a + 5, tokens))) for a in range(0, tokens, 5) for layer in range(LAYERS)]
        self.transfers[name] = Transfer(name, p, d, tokens, cells)
        self.sources[p].lease(name, need)
        self.pools[d].lease(name, need)

    def offer(self, t: Transfer) -> None:
        t.offered = True
        if (t.p, t.d) not in self.up:
            t.sender_end = "failed"
            self.sources[t.p].release(t.name)
            return
        self.run(t.p, self.senders[t.p].offer(t.name, t.d, t.tokens, self.now))

    def expect(self, t: Transfer) -> None:
        t.expected = True
        pages = tuple(self.pools[t.d].owned(t.name))
        self.run(t.d, self.receivers[t.d].expect(t.name, t.p, t.tokens, pages, self.now))

    def compute(self, t: Transfer) -> None:
        if t.cells:
            layer, tokens = t.cells.pop(0)
            self.run(t.p, self.senders[t.p].ready(t.name, (layer, layer + 1), tokens, self.now))
        else:
            t.finished = True
            self.run(t.p, self.senders[t.p].finish(t.name, b"first"))

    def land(self, p: str, d: str) -> None:
        write = self.writes.pop((p, d))
        t = self.transfers[write.transfer]
        if write.slot is None:
            assert self.pools[d].state(write.transfer) in ("leased", "quarantined"), "a write landed in foreign pages"
            self.arrive(t, write.layers, write.tokens)
        if (p, d) in self.dying:
            self.lose_sender(p, d)
        else:
            self.run(p, self.senders[p].written(write.transfer, write.seq, write.layers, write.tokens, write.slot, 7))

    def arrive(self, t: Transfer, layers: tuple[int, int], tokens: tuple[int, int]) -> None:
        for layer in range(*layers):
            assert t.landed[layer] == tokens[0]
            t.landed[layer] = tokens[1]

    def scatter(self, d: str, index: int) -> None:
        s = self.scatters[d].pop(index % len(self.scatters[d]))
        assert self.pools[d].state(s.transfer) in ("leased", "quarantined"), "a scatter into foreign pages"
        t = self.transfers[s.transfer]
        for layer in range(*s.layers):
            t.landed[layer] = max(t.landed[layer], s.tokens[1])
        self.run(d, self.receivers[d].scattered(s.transfer, s.seq, s.slot, self.now))

    def receive(self, source: str, target: str) -> None:
        message = self.queues[source, target].popleft()
        machine = self.senders.get(target) or self.receivers[target]
        self.run(target, machine.on_message(source, message, self.now))

    def break_link(self, p: str, d: str) -> None:
        self.up.discard((p, d))
        self.queues[p, d].clear()
        self.queues[d, p].clear()
        self.run(d, self.receivers[d].link_lost(p, "the link broke", self.now))
        if (p, d) in self.writes:
            self.dying.add((p, d))
        else:
            self.lose_sender(p, d)

    def lose_sender(self, p: str, d: str) -> None:
        self.dying.discard((p, d))
        self.run(p, self.senders[p].link_lost(d, "the link broke"))

    def fence(self, p: str, d: str) -> None:
        """Possible only when the data connection carries nothing any more, and no slot of it is being emptied."""
        self.fences.discard((p, d))
        self.run(d, self.receivers[d].link_fenced(p))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for name, machine in {**self.senders, **self.receivers}.items():
            self.run(name, machine.tick(self.now))

    def events(self) -> list[tuple]:
        out: list[tuple] = []
        for t in self.transfers.values():
            out += [] if t.offered else [(self.offer, t)]
            out += [] if t.expected else [(self.expect, t)]
            if t.granted and not t.finished and t.sender_end is None:
                out.append((self.compute, t))
        out += [(self.land, *link) for link in self.writes]
        out += [(self.receive, *way) for way, queue in self.queues.items() if queue]
        out += [(self.scatter, d, 0) for d, work in self.scatters.items() if work]
        out += [(self.fence, p, d) for p, d in self.fences
                if (p, d) not in self.writes and not any(s.peer == p for s in self.scatters[d])]  # fmt: skip
        out += [(self.connect, p, d) for p in self.senders for d in self.receivers
                if (p, d) not in self.up | self.dying | self.fences]  # fmt: skip
        return out

    def check(self) -> None:
        for pool in (*self.pools.values(), *self.sources.values()):
            pool.check_integrity()

    def settle(self) -> None:
        """Let everything happen that can; then let time pass, until nothing is left."""
        for _ in range(40):
            for _ in range(2000):
                found = self.events()
                if not found:
                    break
                event, *arguments = found[0]
                event(*arguments)
                self.check()
            self.pass_time(4.0)


def drive(rng: random.Random, world: World, steps: int) -> None:
    for _ in range(steps):
        found = world.events()
        choice = rng.randrange(100)
        running = [t for t in world.transfers.values() if t.offered and t.expected]
        if choice < 12 and len(world.transfers) < 12:
            world.begin(rng.randint(1, 23), rng.choice(["p0", "p1"]), rng.choice(["d0", "d1"]))
        elif choice < 15 and running:
            t = rng.choice(running)
            world.run(t.p, world.senders[t.p].cancel(t.name, "abort at prefill"))
        elif choice < 18 and running:
            t = rng.choice(running)
            world.run(t.d, world.receivers[t.d].cancel(t.name, "abort at decode", world.now))
        elif choice < 20 and world.up:
            world.break_link(*rng.choice(sorted(world.up)))
        elif choice < 24:
            world.pass_time(rng.choice([0.5, 4.0, 11.0]))
        elif found:
            event, *arguments = rng.choice(found)
            event(*arguments)
        world.check()


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), slots=st.sampled_from([0, 1, 3]), steps=st.integers(1, 200))
def test_every_transfer_ends_and_no_page_is_lost(seed: int, slots: int, steps: int) -> None:
    world = World(slots)
    drive(random.Random(seed), world, steps)
    world.settle()
    for t in world.transfers.values():
        assert t.sender_end is not None, f"{t.name} never ended at prefill"
        assert t.receiver_end is not None, f"{t.name} never ended at decode"
        if t.receiver_end == "delivered":
            world.pools[t.d].release(t.name)
    assert all(world.senders[p].free_slots(d) == slots for p, d in world.up), "a staging slot is lost"
    assert not any(s.transfers for s in world.senders.values())
    assert not any(r.transfers for r in world.receivers.values())
    assert all(pool.free == pool.pages for pool in (*world.pools.values(), *world.sources.values()))


@pytest.mark.parametrize("slots", [0, 2])
def test_without_faults_every_transfer_is_delivered(slots: int) -> None:
    world = World(slots)
    for i in range(4):
        world.begin(5 + i, f"p{i % 2}", f"d{i // 2}")
    world.settle()
    assert [(t.sender_end, t.receiver_end) for t in world.transfers.values()] == [("delivered", "delivered")] * 4


def machines() -> tuple[Sender, Receiver]:
    sender, receiver = Sender(**TIMES), Receiver(lease_s=10.0, **TIMES)
    sender.link_up("d", LinkLimits())
    receiver.link_up("p", LAYERS)
    return sender, receiver


def test_layers_that_wait_are_written_together() -> None:
    sender, _ = machines()
    sender.offer("t", "d", 8, 0.0)
    grant = m.Grant("t", 1, [5, 6], 0, 10.0)
    assert [type(a) for a in sender.on_message("d", grant, 0.0)] == [Granted]
    (first,) = sender.ready("t", (0, 1), (0, 8), 0.0)
    assert sender.ready("t", (1, 2), (0, 8), 0.0) == sender.ready("t", (2, 3), (0, 8), 0.0) == []
    assert isinstance(first, Write)
    word, second = sender.written("t", 0, first.layers, first.tokens, None, 1)
    assert isinstance(word, Send)
    assert isinstance(second, Write)
    assert (second.layers, second.tokens, second.pages) == ((1, 3), (0, 8), (5, 6))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (m.Written("t", 9, 0, (0, 1), (0, 8), None, 1), "has epoch 1, not 9"),
        (m.Written("t", 1, 0, (0, 4), (0, 8), None, 1), "has no layers 0..3"),
        (m.Written("t", 1, 0, (1, 1), (0, 8), None, 1), "has no layers"),
        (m.Written("t", 1, 0, (0, 1), (0, 9), None, 1), "tokens 0..8"),
        (m.Written("t", 1, 0, (0, 1), (4, 8), None, 1), "twice or out of order"),
        (m.Finish("t", 1, 0, b""), "finished 't' with chunks missing"),
        (m.Finish("t", 2, 0, b""), "has epoch 1, not 2"),
        (m.Grant("t", 1, [], 0, 1.0), "which prefill does not say here"),
    ],
)
def test_a_prefill_that_breaks_the_rules_is_named(message: m.Message, complaint: str) -> None:
    _, receiver = machines()
    receiver.expect("t", "p", 8, (0, 1), 0.0)
    receiver.on_message("p", m.Offer("t", 8), 0.0)
    with pytest.raises(ProtocolError, match=complaint):
        receiver.on_message("p", message, 0.0)


def test_a_peer_cannot_speak_of_anothers_transfer() -> None:
    sender, receiver = machines()
    receiver.link_up("q", LAYERS)
    receiver.expect("t", "p", 8, (0, 1), 0.0)
    for message in (m.Offer("t", 8), m.Abort("t", "no")):
        with pytest.raises(ProtocolError, match="which is p's"):
            receiver.on_message("q", message, 0.0)
    sender.offer("t", "d", 8, 0.0)
    with pytest.raises(ProtocolError, match="which is d's"):
        sender.on_message("e", m.Commit("t"), 0.0)
    with pytest.raises(ProtocolError, match="before it was finished"):
        sender.on_message("d", m.Commit("t"), 0.0)
    with pytest.raises(ProtocolError, match="freed staging slot 0"):
        sender.on_message("d", m.Freed(0), 0.0)
    with pytest.raises(ProtocolError, match="no link"):
        sender.offer("u", "nobody", 8, 0.0)
    with pytest.raises(ProtocolError, match="expected already"):
        receiver.expect("t", "p", 8, (0, 1), 0.0)


def test_a_slot_that_holds_nothing_is_an_error_not_a_hang() -> None:
    sender = Sender(**TIMES)
    sender.link_up("d", LinkLimits(1, lambda _: 0))
    sender.offer("t", "d", 8, 0.0)
    sender.on_message("d", m.Grant("t", 1, [0], 0, 10.0), 0.0)
    with pytest.raises(ProtocolError, match="enlarge staging_bytes"):
        sender.ready("t", (0, 1), (0, 8), 0.0)


def test_leases_are_renewed_while_prefill_computes() -> None:
    sender, receiver = machines()
    receiver.expect("t", "p", 8, (0, 1), 0.0)
    sender.offer("t", "d", 8, 0.0)
    sender.on_message("d", m.Grant("t", 1, [0, 1], 0, 10.0), 0.0)
    receiver.on_message("p", m.Offer("t", 8), 0.0)
    for now in (4.0, 8.0, 12.0, 16.0):
        (renew,) = sender.tick(now)
        assert renew == Send("d", m.Renew("t"))
        receiver.on_message("p", m.Renew("t"), now)
        assert receiver.tick(now) == []
    silent = receiver.tick(27.0)
    assert silent[0] == Send("p", m.Fence("t"))
    assert isinstance(silent[1], Failed)
    assert silent[-1] == FenceLink("p")
