"""Logs for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from regauge.sim.fleet import Result
from regauge.sim.log import COMPLETE, LIMITED, REFUSED, Log, Rows

DONE = (0.0, 1000, 400, 11, 0, 0, 0.1, 1.0, 2.0, 2.5, 2.5, 3.5, 6e8, 1, COMPLETE)
"""Waits a second, is computed in one, crosses in half of one, and gives 10 more tokens in a second."""
LATE = (1.0, 3000, 0, 101, 1, 1, 1.0, 4.0, 9.0, 11.0, 11.0, 21.0, 3e9, 1, COMPLETE)
TOO_MANY = (2.0, 500, 0, 5, -1, -1, nan, nan, nan, nan, nan, 2.0, 0.0, 0, LIMITED)
NO_ROOM = (3.0, 500, 0, 5, -1, -1, nan, nan, nan, nan, nan, 3.0, 0.0, 0, REFUSED)


def log(*rows: Sequence[float]) -> Log:
    """Return a log of rows in the order of its columns."""
    collected = Rows()
    for number, row in enumerate(rows):
        collected.add((number, *row))
    return collected.log()


def result(logged: Log, seconds: float = 20.0) -> Result:
    """Return a run of two prefill workers and two decode workers with a NIC each."""
    busy = {"p0": 5.0, "p1": 10.0, "d0": 20.0, "d1": 0.0}
    ports = {"p0": 1e9, "p1": 1e9, "d0": 1e9, "d1": 2e9}
    carried = {"p0": 6e8, "p1": 3e9, "d0": 6e8, "d1": 3e9}
    return Result(logged, seconds, busy, carried, ports, {"placed": 2, "deadline": 1, "no_room": 1}, 40)


def random_log(seed: int, count: int) -> Log:
    """Return a log of requests that are in order in every way, of four workers each side."""
    rng = np.random.default_rng(seed)
    at = np.sort(rng.uniform(0, 100, count))
    gaps = np.cumsum(rng.exponential(1.0, (5, count)), axis=0)
    seated, began, computed, landed, ended = at + gaps
    outcome = rng.choice(np.array([0, 0, 0, 1, 2, 3], np.uint8), count)
    for column in (seated, began, computed, landed):
        column[outcome != COMPLETE] = nan
    prompt, there = rng.integers(2, 5_000, count), outcome == COMPLETE
    workers = (np.where(there, rng.integers(0, 4, count), -1).astype(np.int16) for _ in range(2))
    nbytes = np.where(there, prompt * 1e5, 0.0)
    return Log(
        at, prompt, prompt // 3, rng.integers(1, 300, count), *workers, seated, began, computed, landed,
        landed.copy(), ended, nbytes, np.ones(count, np.int16), outcome,
    )  # fmt: skip
