"""The network as a fluid: flows over ports share each port max-min fairly, rank by rank.

That is the best that congestion control can do without knowing what the flows are for; 12 senders into one receiver get a twelfth each. A flow's bytes
are given at once or become ready at a rate (a prompt's KV while it is computed); with nothing ready it takes no more than becomes ready. Nothing is
lost, and delays are not counted. Within that the times are exact: rates are constant between events, so each event's time is a quotient.

Sizes are bytes, rates bytes per second, times seconds of the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from math import inf, isfinite
from typing import TYPE_CHECKING

from regauge._native import Fluid
from regauge.errors import ConfigError
from regauge.sim.clock import Clock

if TYPE_CHECKING:
    from regauge.sim import reference

OVER = -1


class Flow:
    """One transfer, as its owner knows it."""

    __slots__ = ("done", "number")

    def __init__(self, number: int, done: Callable[[], None]) -> None:
        self.number = number
        """For the network; `OVER` once it is done or closed."""
        self.done = done


class Network:
    """Ports of given rates, and the flows over them."""

    def __init__(self, clock: Clock, ports: Mapping[str, float], fluid: Fluid | reference.Fluid | None = None) -> None:
        """`fluid`: what computes, without ports yet; `reference.Fluid` does the same, slowly."""
        self.ports: dict[str, float] = {}
        """Rate of each port now."""
        self._clock = clock
        self._fluid = Fluid() if fluid is None else fluid
        self._numbers: dict[str, int] = {}
        self._flows: dict[int, Flow] = {}
        self._wakes = inf
        """The first time at which the clock will call."""
        for name, rate in ports.items():
            _check_rate(name, rate)
            self.ports[name] = rate
            self._numbers[name] = self._fluid.add_port(rate)

    def open(self, ports: Sequence[str], done: Callable[[], None], rank: int = 0) -> Flow:
        """Begin a flow without bytes; `done` is called when its last byte has crossed. Ranks are served in order, 0 first.

        Raises:
            ConfigError: A port is not known, or named twice.
        """
        if not ports or len(set(ports)) < len(ports):
            raise ConfigError(f"a flow crosses each of its ports once, and at least one: not {list(ports)}")
        flow = Flow(self._fluid.open([self._number(name) for name in ports], rank), done)
        self._flows[flow.number] = flow
        return flow

    def add(self, flow: Flow, size: float, *, last: bool = False) -> None:
        """Give a flow more bytes, all at once; `last`: no more will come."""
        _check_size(size)
        self._wake(self._fluid.add(_live(flow), size, last, self._clock.now))

    def produce(self, flow: Flow, size: float, seconds: float, *, last: bool = False) -> None:
        """Have `size` bytes become ready evenly over `seconds` from now; what is produced at one time adds up."""
        _check_size(size)
        if not 0 <= seconds < inf:
            raise ValueError(f"bytes become ready over {seconds} s: give a time of 0 or more")
        self._wake(self._fluid.produce(_live(flow), size, seconds, last, self._clock.now))

    def finish(self, flow: Flow) -> None:
        """Say that nothing more comes: the flow is done when what was given has crossed. `done` is called by the clock, not here."""
        self._wake(self._fluid.add(_live(flow), 0.0, True, self._clock.now))

    def close(self, flow: Flow) -> float:
        """End a flow at once, without `done`; return the bytes that crossed."""
        number = _live(flow)
        sent, soonest = self._fluid.close(number, self._clock.now)
        flow.number = OVER
        del self._flows[number]
        self._wake(soonest)
        return sent

    def rerank(self, flow: Flow, rank: int) -> None:
        """Change a flow's rank."""
        self._wake(self._fluid.rerank(_live(flow), rank, self._clock.now))

    def port(self, name: str, bytes_per_s: float) -> None:
        """Change a port's rate; at 0 the flows over it stand still.

        Raises:
            ConfigError: The port is not known, or the rate is none.
        """
        number = self._number(name)
        _check_rate(name, bytes_per_s)
        self.ports[name] = bytes_per_s
        self._wake(self._fluid.set_port(number, bytes_per_s, self._clock.now))

    def rate(self, flow: Flow) -> float:
        """Return a flow's rate now."""
        return self._fluid.rate(_live(flow))

    def sent(self, flow: Flow) -> float:
        """Return the bytes of a flow that have crossed."""
        return self._fluid.sent(_live(flow), self._clock.now)

    def ready(self, flow: Flow) -> float:
        """Return the bytes of a flow that are ready and have not crossed."""
        return self._fluid.ready(_live(flow), self._clock.now)

    def carried(self, port: str) -> float:
        """Return the bytes that have crossed a port."""
        return self._fluid.carried(self._number(port), self._clock.now)

    def backlog(self, port: str) -> float:
        """Return the bytes that are ready and wait for a port."""
        return self._fluid.backlog(self._number(port), self._clock.now)

    def load(self, port: str) -> float:
        """Return the share of a port's rate that is used now; of a port that is down, 0."""
        used, rate = self._fluid.used(self._number(port)), self.ports[port]
        return used / rate if rate else 0.0

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            close = get_close_matches(name, self._numbers, 1)
            raise ConfigError(f"the network has no port {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        return number

    def _wake(self, soonest: float) -> None:
        """Have the clock call at `soonest`, unless it calls before anyway."""
        if soonest < self._wakes:
            self._wakes = soonest
            self._clock.call(soonest, self._look, None)

    def _look(self, _: object) -> None:
        now = self._clock.now
        if now < self._wakes:
            return  # by then it was known that something comes sooner
        self._wakes = inf
        done, soonest = self._fluid.due(now)
        self._wake(soonest)
        over = [self._flows.pop(number) for number in done]  # before anything is opened: numbers are given again
        for flow in over:
            flow.number = OVER
        for flow in over:
            flow.done()


def _live(flow: Flow) -> int:
    if flow.number == OVER:
        raise ValueError("the flow is over: it was done or closed")
    return flow.number


def _check_size(size: float) -> None:
    if not 0 <= size < inf:
        raise ValueError(f"a flow is given {size} bytes: give 0 or more")


def _check_rate(name: str, rate: float) -> None:
    if not (isfinite(rate) and rate >= 0):
        raise ConfigError(f"port {name}: rate is {rate} bytes/s; give a finite one, 0 or more")
