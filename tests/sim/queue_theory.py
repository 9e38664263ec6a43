"""One port as a queue: what the network does with random flows, and what queueing theory says of it.

Rates are 1 byte per second and sizes have mean 1, so that the load is the arrival rate.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.sim.clock import Clock
from regauge.sim.network import Flow, Network

Quantile = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
BATCHES = 20
GRID = 400_000
ALPHA, SPAN = 1.5, 1e2


def exponential(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Quantiles of the exponential distribution."""
    return -np.log1p(-share)


def deterministic(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """All sizes are 1."""
    return np.ones_like(share)


def heavy(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Bounded Pareto, alpha 1.5, largest 100 times the smallest: CV^2 is 2.7."""
    least = (1 - SPAN**-ALPHA) / (1 - SPAN ** (1 - ALPHA)) * (ALPHA - 1) / ALPHA
    return np.asarray(least * (1 - share * (1 - SPAN**-ALPHA)) ** (-1 / ALPHA))


SIZES: dict[str, Quantile] = {"exponential": exponential, "deterministic": deterministic, "heavy-tailed": heavy}


def grid(quantile: Quantile) -> npt.NDArray[np.float64]:
    """Sizes at the middles of equal shares of the flows."""
    return quantile((np.arange(GRID) + 0.5) / GRID)


def ps_slowdown(load: float) -> float:
    """Mean of response over size with processor sharing, whatever the sizes (Kleinrock, Queueing Systems II, 4.4)."""
    return 1 / (1 - load)


def fifo_response(load: float) -> float:
    """Mean response of M/D/1, first come first served (Pollaczek-Khinchine)."""
    return 1 + load / (2 * (1 - load))


def srpt_response(load: float, quantile: Quantile) -> float:
    """Mean response by shortest remaining processing time (Schrage and Miller, Operations Research 14, 1966), integrated over quantiles.

    T(x) = load (m2(x) + x^2 (1 - F(x))) / (2 (1 - rho(x))^2) + int_0^x dt / (1 - rho(t)), with rho(x) and m2(x) over the sizes up to x.
    """
    sizes = grid(quantile)
    rho = load * (np.cumsum(sizes) - sizes / 2) / GRID
    second = (np.cumsum(sizes**2) - sizes**2 / 2) / GRID
    beyond = 1 - (np.arange(GRID) + 0.5) / GRID
    waiting = load * (second + sizes**2 * beyond) / (2 * (1 - rho) ** 2)
    steps = np.diff(sizes, prepend=0.0)
    inner = np.cumsum(steps / (1 - np.concatenate(([0.0], (rho[1:] + rho[:-1]) / 2))))
    return float(np.mean(waiting + inner))


@dataclass(frozen=True, slots=True)
class Found:
    """A mean, and its standard error by the means of batches."""

    mean: float
    error: float


class Queue:
    """Poisson arrivals at one port. Order: `ps`, `fifo` (a rank for each flow) or `srpt` (the flow with the least left has the better rank)."""

    def __init__(self, order: str, load: float, quantile: Quantile, arrivals: int, seed: int) -> None:
        draw = random.Random(seed)
        shares = np.array([draw.random() for _ in range(arrivals)])
        self._sizes: list[float] = quantile(shares).tolist()
        self._order, self._load, self._draw = order, load, draw
        self._clock = Clock()
        self._network = Network(self._clock, {"port": 1.0})
        self._responses = [0.0] * arrivals
        self._begun = 0
        self._going: tuple[int, Flow] | None = None
        self._waiting: list[tuple[float, int, Flow]] = []

    def run(self) -> list[tuple[float, float]]:
        """Return size and response of each flow, in order of arrival."""
        self._clock.at(0.0, self._arrive)
        self._clock.run()
        return list(zip(self._sizes, self._responses, strict=True))

    def _arrive(self) -> None:
        number, begun = self._begun, self._clock.now
        self._begun += 1
        size = self._sizes[number]

        def done() -> None:
            self._responses[number] = self._clock.now - begun
            if self._order == "srpt":
                self._next()

        flow = self._network.open(("port",), done, number if self._order == "fifo" else int(self._order == "srpt"))
        self._network.add(flow, size, last=True)
        if self._order == "srpt":
            self._compare(size, number, flow)
        if self._begun < len(self._sizes):
            self._clock.after(self._draw.expovariate(self._load), self._arrive)

    def _compare(self, size: float, number: int, flow: Flow) -> None:
        if self._going is None:
            self._first(number, flow)
            return
        other = self._network.ready(self._going[1])
        if size < other:
            heapq.heappush(self._waiting, (other, *self._going))
            self._network.rerank(self._going[1], 1)
            self._first(number, flow)
        else:
            heapq.heappush(self._waiting, (size, number, flow))

    def _first(self, number: int, flow: Flow) -> None:
        self._going = number, flow
        self._network.rerank(flow, 0)

    def _next(self) -> None:
        self._going = None
        if self._waiting:
            self._first(*heapq.heappop(self._waiting)[1:])


def measure(order: str, load: float, sizes: str, arrivals: int, seed: int = 1) -> Found:
    """Return mean slowdown (`ps`) or mean response; the first tenth of the arrivals does not count.

    Of a response its own size is taken, and 1, the mean of sizes, added: chance in the sizes themselves is nothing that the network does.
    """
    flows = Queue(order, load, SIZES[sizes], arrivals, seed).run()[arrivals // 10 :]
    values = [response / size if order == "ps" else 1 + response - size for size, response in flows]
    each = len(values) // BATCHES
    means = [statistics.fmean(values[i * each : (i + 1) * each]) for i in range(BATCHES)]
    return Found(statistics.fmean(means), statistics.stdev(means) / BATCHES**0.5)


def expected(order: str, load: float, sizes: str) -> float:
    """Return what `measure` should find."""
    if order == "ps":
        return ps_slowdown(load)
    return fifo_response(load) if order == "fifo" else srpt_response(load, SIZES[sizes])
