"""The page's own arithmetic, in the browser, against Python's."""

from __future__ import annotations

import json
import math
import random

import pytest
from deployment import Served
from selenium.webdriver import Chrome

from regauge.percentiles import percentile
from regauge.rates import Sample, rate

QUANTILES = """
const [cases, done] = arguments;
const table = (pairs) => new Map(pairs.map(([bound, count]) => [bound === null ? Infinity : bound, count]));
import('/dashboard/series.js').then(({ quantile }) => done(cases.map(([q, before, after]) => quantile(q, table(before), table(after)))));
"""
RATES = """
const [cases, done] = arguments;
import('/dashboard/series.js').then(({ rate }) => done(cases.map(([before, after, seconds]) => rate(before, after, seconds))));
"""
BOUNDS = (0.01, 0.1, 0.5, 1.0, 2.5, math.inf)


def cumulative(dice: random.Random, below: dict[float, float]) -> dict[float, float]:
    """Counts that are `below` and some, or now and then fewer."""
    found, run = {}, 0
    for bound in BOUNDS:
        run += dice.choice((0, 0, 1, 3, 20))
        found[bound] = max(0.0, below.get(bound, 0.0) + run - (dice.random() < 0.05))
    return found


def test_percentiles_are_pythons(page: Chrome, served: Served) -> None:
    dice = random.Random(7)
    cases = []
    for _ in range(400):
        before = cumulative(dice, {})
        cases.append((dice.choice((0.5, 0.9, 0.99)), before, cumulative(dice, before)))
    wired = [
        [q, *([[None if math.isinf(b) else b, n] for b, n in part.items()] for part in parts)] for q, *parts in cases
    ]
    page.get(f"{served.url}/dashboard")
    found = page.execute_async_script(QUANTILES, json.loads(json.dumps(wired)))
    wanted = [percentile(*case) for case in cases]
    assert sum(value is None for value in wanted) in range(5, 200)
    assert found == [None if value is None else pytest.approx(value) for value in wanted]


def test_rates_are_pythons(page: Chrome, served: Served) -> None:
    dice = random.Random(8)
    cases = [(dice.randrange(100), dice.randrange(100), dice.choice((-1.0, 0.0, 0.5, 2.0))) for _ in range(200)]
    page.get(f"{served.url}/dashboard")
    found = page.execute_async_script(RATES, cases)
    wanted = [rate(Sample(before, 10.0), Sample(after, 10.0 + seconds)) for before, after, seconds in cases]
    assert None in wanted
    assert found == [None if value is None else pytest.approx(value) for value in wanted]
