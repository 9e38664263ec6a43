"""The compiled network against the plain one, and both against what max-min fairness means."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge._native import Fluid
from regauge.sim import reference
from regauge.sim.clock import Clock
from regauge.sim.network import Network
from regauge.sim.topology import Ends, FatTree, Racks, Rails

PORTS = {0: 10.0, 1: 4.0, 2: 6.0, 3: 20.0, 4: 6.0}
PATHS = [(0,), (0, 2), (0, 3), (1, 2), (1, 3), (4, 2), (4, 3), (4, 0, 2), (1, 0, 3, 2)]
AMOUNT = st.sampled_from([0.0, 1.0, 2.0, 6.0, 10.0, 60.0]) | st.floats(0.01, 100)
SECONDS = st.sampled_from([0.5, 1.0, 2.0, 5.0]) | st.floats(0.01, 20)
WHICH = st.integers(0, 30)
STEP = st.one_of(
    st.tuples(st.just("open"), st.sampled_from(PATHS), st.sampled_from([0, 0, 0, 1, 2])),
    st.tuples(st.just("add"), WHICH, AMOUNT, st.booleans()),
    st.tuples(st.just("produce"), WHICH, AMOUNT, SECONDS, st.booleans()),
    st.tuples(st.just("close"), WHICH),
    st.tuples(st.just("rerank"), WHICH, st.integers(0, 2)),
    st.tuples(st.just("port"), st.sampled_from(sorted(PORTS)), st.sampled_from([0.0, 3.0, 6.0, 10.0])),
    st.tuples(st.just("wait"), SECONDS),
)
SCRIPT = st.lists(st.tuples(st.sampled_from(PATHS), AMOUNT, st.booleans()), max_size=8).flatmap(
    lambda flows: st.lists(STEP, max_size=25).map(lambda steps: (flows, steps))
)


@dataclass
class Given:
    """A flow, and what it was given."""

    number: int
    ports: tuple[int, ...]
    rank: int
    size: float = 0.0
    over: bool = False
    making: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Played:
    """One engine and what it did with a script."""

    fluid: Fluid | reference.Fluid
    now: float = 0.0
    rates: dict[int, float] = field(default_factory=lambda: dict(PORTS))
    flows: dict[int, Given] = field(default_factory=dict)
    """By order of opening."""
    opened: int = 0
    ended: dict[int, float] = field(default_factory=dict)
    crossed: dict[int, float] = field(default_factory=lambda: dict.fromkeys(PORTS, 0.0))
    """Bytes of flows that are over, by port."""
    events: int = 0

    def __post_init__(self) -> None:
        for rate in PORTS.values():
            self.fluid.add_port(rate)

    def play(self, script: tuple) -> Iterator[None]:  # type: ignore[type-arg]
        """Do a script; stop after each step."""
        flows, steps = script
        for ports, size, over in flows:
            self.do("open", ports, 0)
            self.do("add", self.opened - 1, size, over)
        for step in steps:
            self.do(*step)
            yield
        for number in list(self.flows):
            self.do("add", number, 0.0, True)
        for port in PORTS:
            self.do("port", port, 5.0)
        self.go(inf)
        yield

    def do(self, what: str, *args) -> None:  # type: ignore[no-untyped-def]
        if what == "wait":
            self.go(self.now + args[0])
        elif what == "port":
            port, self.rates[port] = args[0], args[1]
            self.fluid.set_port(port, args[1], self.now)
        elif what == "open":
            self.flows[self.opened] = Given(self.fluid.open(*args), *args)
            self.opened += 1
        elif args[0] in self.flows:
            flow = self.flows[args[0]]
            if what == "close":
                sent, _ = self.fluid.close(flow.number, self.now)
                self.over(args[0], sent)
            elif what == "rerank":
                flow.rank = args[1]
                self.fluid.rerank(flow.number, args[1], self.now)
            elif not flow.over:
                flow.size += args[1]
                flow.over = args[-1]
                if what == "produce":
                    flow.making.append((self.now + args[2], args[1] / args[2]))
                getattr(self.fluid, what)(flow.number, *args[1:], self.now)

    def go(self, until: float) -> None:
        while self.fluid.next() <= until and self.fluid.next() < inf:
            self.now = max(self.now, self.fluid.next())
            done, after = self.fluid.due(self.now)
            assert after == self.fluid.next()
            self.events += 1
            assert self.events < 1000, "events come without end"
            names = [next(name for name, flow in self.flows.items() if flow.number == number) for number in done]
            assert names == sorted(names)
            for name in names:
                self.ended[name] = self.now
                self.over(name, self.flows[name].size)
        self.now = until if until < inf else self.now

    def over(self, name: int, sent: float) -> None:
        for port in self.flows.pop(name).ports:
            self.crossed[port] += sent

    def check(self) -> None:
        """Each flow gets all that it produces, or has a port, full with its rank, where none of its rank has more."""
        rate = {name: self.fluid.rate(flow.number) for name, flow in self.flows.items()}
        for port, most in self.rates.items():
            over = [name for name, flow in self.flows.items() if port in flow.ports]
            assert self.fluid.used(port) == pytest.approx(sum(rate[name] for name in over), abs=1e-9)
            assert self.fluid.used(port) <= most * (1 + 1e-9)
            sent = {name: self.fluid.sent(self.flows[name].number, self.now) for name in over}
            assert self.fluid.carried(port, self.now) == pytest.approx(
                self.crossed[port] + sum(sent.values()), abs=1e-6
            )
            ready = sum(self.fluid.ready(self.flows[name].number, self.now) for name in over)
            assert self.fluid.backlog(port, self.now) == pytest.approx(ready, abs=1e-9)
        for name, flow in self.flows.items():
            made = sum(speed for end, speed in flow.making if end > self.now * (1 + 1e-12))
            ready = self.fluid.ready(flow.number, self.now)
            coming = sum(speed * max(0.0, end - self.now) for end, speed in flow.making)
            assert self.fluid.sent(flow.number, self.now) + ready + coming == pytest.approx(flow.size, abs=1e-6)
            satisfied = ready <= 1e-6 and rate[name] >= made - 1e-6
            assert satisfied or any(self.held(flow, rate[name], port, rate) for port in flow.ports)

    def held(self, flow: Given, own: float, port: int, rate: dict[int, float]) -> bool:
        over = {name: other for name, other in self.flows.items() if port in other.ports and other.rank <= flow.rank}
        full = sum(rate[name] for name in over) >= self.rates[port] * (1 - 1e-9)
        return full and all(rate[name] <= own + 1e-6 for name, other in over.items() if other.rank == flow.rank)


@settings(max_examples=300)
@given(SCRIPT)
def test_the_compiled_network_does_what_the_plain_one_does(script: tuple) -> None:  # type: ignore[type-arg]
    fast, plain = Played(Fluid()), Played(reference.Fluid())
    for _ in zip(fast.play(script), plain.play(script), strict=True):
        for port in PORTS:
            for what in ("carried", "backlog"):
                asked = [getattr(each.fluid, what)(port, each.now) for each in (fast, plain)]
                assert asked[0] == pytest.approx(asked[1], rel=1e-9, abs=1e-6)
    assert fast.ended == pytest.approx(plain.ended, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("engine", [Fluid, reference.Fluid])
@settings(max_examples=150)
@given(script=SCRIPT)
def test_shares_are_max_min_fair_and_no_byte_is_lost(engine: type, script: tuple) -> None:  # type: ignore[type-arg]
    played = Played(engine())
    for _ in played.play(script):
        played.check()
    assert not played.flows
    for port in PORTS:
        assert played.fluid.carried(port, played.now) == pytest.approx(played.crossed[port], rel=1e-9, abs=1e-6)


def times(fabric: Racks | FatTree | Rails, engine: Fluid | reference.Fluid, begin: float) -> list[float]:
    """When 150 transfers end, most of which are produced as they go, over cables that are shared."""
    clock, draw, ended = Clock(), random.Random(3), [0.0] * 150
    nics = {f"p{i}.{n}": 50e9 for i in range(8) for n in range(2)} | {
        f"d{i}.{n}": 25e9 for i in range(4) for n in range(2)
    }
    network = Network(clock, nics | fabric.ports(), engine)

    def begins(number: int) -> None:
        ends = draw.randrange(8), draw.randrange(fabric.ends.sender_nics), draw.randrange(4), draw.randrange(2)
        path = (f"p{ends[0]}.{ends[1]}", *fabric.path(*ends, number), f"d{ends[2]}.{ends[3]}")
        flow = network.open(path, lambda: ended.__setitem__(number, clock.now), draw.randrange(2))
        network.produce(flow, draw.expovariate(1 / 3e9), draw.choice([0.0, 0.1, 1.0]), last=True)

    for number in range(150):
        clock.at(begin + number / 50, partial(begins, number))
    clock.run()
    return ended


@pytest.mark.parametrize("begin", [0.0, 1e6])
@pytest.mark.parametrize(
    "fabric",
    [Racks(Ends(8, 4, 1, 2), 2, 2, 20e9), FatTree(Ends(8, 4, 1, 2), 4, 25e9), Rails(Ends(8, 4, 2, 2), 1, 30e9)],
)
def test_on_a_fabric_flows_end_when_the_plain_one_says(fabric: Racks | FatTree | Rails, begin: float) -> None:
    fast, plain = (times(fabric, engine, begin) for engine in (Fluid(), reference.Fluid()))
    assert min(fast) > begin
    assert fast == pytest.approx(plain, rel=1e-13, abs=1e-9)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda fluid: fluid.open([7], 0), "there is no port 7"),
        (lambda fluid: fluid.open([], 0), "at least one port"),
        (lambda fluid: fluid.open([0, 0], 0), "crosses port 0 twice"),
        (lambda fluid: fluid.add(3, 1.0, False, 0.0), "there is no flow 3"),
        (lambda fluid: fluid.add(fluid.open([0], 0), -1.0, False, 0.0), "size is not a finite number of 0 or more"),
        (lambda fluid: fluid.produce(fluid.open([0], 0), 1.0, -1.0, False, 0.0), "seconds is not a finite number"),
        (lambda fluid: fluid.set_port(0, inf, 0.0), "rate is not a finite number"),
        (lambda fluid: fluid.due(float("nan")), "now is not a number"),
        (lambda fluid: [fluid.close(flow, 0.0) for flow in [fluid.open([0], 0)] * 2], "there is no flow 0"),
    ],
)
def test_numbers_that_are_none_are_refused(call, said: str) -> None:  # type: ignore[no-untyped-def]
    fluid = Fluid()
    fluid.add_port(1.0)
    with pytest.raises(ValueError, match=said):
        call(fluid)
