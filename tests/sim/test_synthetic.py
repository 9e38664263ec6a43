"""Likenesses: what is generated has the figures of the trace that it was fitted to, and others when these are changed."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import DATA, check

from regauge.errors import ConfigError
from regauge.sim.synthetic import Fitted, dump, fit, generate, load
from regauge.sim.synthetic_model import LEVELS, Times, quantile
from regauge.sim.trace import Arrival, Trace, read
from regauge.sim.trace import generate as conversations
from regauge.sim.trace_shape import replicated, staggered
from regauge.sim.trace_stats import Description, describe, dispersion, variation


def again(trace: Trace, count: int, rate: float | None = None, seed: int = 1) -> Description:
    arrivals = tuple(generate(fit(trace), count, rate, seed))
    check(arrivals)
    assert len(arrivals) == count
    return describe(Trace("again", trace.block, arrivals))


def like(found: Description, trace: Description, *, lengths: float = 0.1) -> None:
    """Assert that lengths (mean, median, tails) and the hit rate are near those of the trace."""
    for got, given_ in ((found.prompt, trace.prompt), (found.output, trace.output)):
        for name in ("mean", "p50", "p90", "p99"):
            assert getattr(got, name) == pytest.approx(getattr(given_, name), rel=lengths, abs=2), name
    if trace.hit is not None:
        assert found.hit == pytest.approx(trace.hit, abs=0.05)


def test_conversations_of_an_open_loop() -> None:
    trace = Trace("t", 512, tuple(conversations(3, 4_000, 5.0)))
    found, given_ = again(trace, 4_000), describe(trace)
    like(found, given_)
    assert given_.hit is not None
    assert given_.hit > 0.3
    assert found.cv == pytest.approx(1.0, abs=0.08)
    assert found.span_s == pytest.approx(given_.span_s, rel=0.1)
    assert 4_000 / again(trace, 4_000, 50.0).span_s == pytest.approx(50, rel=0.1)


def test_prompts_go_on_from_ones_as_old_as_in_the_trace() -> None:
    """What a small cache holds is told by the time until reuse."""

    def ages(arrivals: tuple[Arrival, ...]) -> list[float]:
        last: dict[int, float] = {}
        found = []
        for each in arrivals:
            names = [name for name in each.blocks[1:] if name in last]
            if names:
                found.append(each.at - last[names[-1]])
            last.update(dict.fromkeys(each.blocks, each.at))
        return sorted(found)

    trace = Trace("t", 512, tuple(conversations(3, 3_000, 5.0)))
    given_, found = ages(trace.arrivals), ages(tuple(generate(fit(trace), 3_000, None, 2)))
    assert len(found) == pytest.approx(len(given_), rel=0.1)
    for level in (0.25, 0.5, 0.75):
        assert found[int(level * len(found))] == pytest.approx(given_[int(level * len(given_))], rel=0.25)


def test_sessions_of_a_closed_loop() -> None:
    trace = staggered(replicated(read(DATA / "weka_agent_compact.jsonl"), 40, 1), 0.5, 1)
    found, given_ = again(trace, 6_000, 0.5), describe(trace)
    like(found, given_, lengths=0.15)
    for name in ("think_p50", "think_p90"):
        assert getattr(found, name) == pytest.approx(getattr(given_, name), rel=0.15)
    assert found.requests / found.sessions == pytest.approx(given_.requests / given_.sessions, rel=0.1)
    assert found.sessions / found.span_s == pytest.approx(0.5, rel=0.1)


def test_prompts_may_share_only_how_they_begin() -> None:
    arrivals = tuple(Arrival(k, 2_000 + k, 9, (0, 1, 2 * k + 2, 2 * k + 3)) for k in range(300))
    fitted = fit(Trace("t", 300, arrivals))
    assert fitted.reuse is not None
    assert (fitted.reuse.common, fitted.reuse.follow) == (2, 0.0)
    assert again(Trace("t", 300, arrivals), 300).hit == pytest.approx(describe(Trace("t", 300, arrivals)).hit, abs=0.01)


def test_sessions_of_which_nothing_is_known_but_the_lengths() -> None:
    arrivals = [Arrival(10.0 * (k // 4), 100 + k, 9, (), k - 1 if k % 4 else -1, 2.0 * (k % 4)) for k in range(400)]
    found = again(Trace("t", 0, tuple(arrivals)), 400)
    assert (found.hit, found.sessions, found.think_p50) == (None, 100, pytest.approx(4.0))
    assert found.prompt.mean == pytest.approx(300, rel=0.1)


def test_prompt_and_answer_go_together_as_in_the_trace() -> None:
    rng = random.Random(1)
    tokens = [int(rng.lognormvariate(7, 1)) + 1 for _ in range(3_000)]
    arrivals = tuple(Arrival(k, each, each // 10 + 1, ()) for k, each in enumerate(tokens))
    fitted = fit(Trace("t", 0, arrivals))
    assert fitted.fresh.correlation == pytest.approx(1.0, abs=0.01)
    assert all(each.output == pytest.approx(each.tokens / 10 + 1, rel=0.2, abs=2) for each in generate(fitted, 500))


@pytest.mark.parametrize(("cv", "name"), [(0.3, "even"), (1.0, "Poisson"), (2.0, "bursts")])
def test_gaps_vary_as_in_the_trace(cv: float, name: str) -> None:
    rng = random.Random(1)
    times = list(accumulate(rng.gammavariate(cv**-2, cv**2 / 4.0) for _ in range(8_000)))
    fitted = fit(Trace(name, 0, tuple(Arrival(at, 10, 1, ()) for at in times)))
    assert fitted.times.high == fitted.times.low
    assert variation([each.at for each in generate(fitted, 8_000)]) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(("high", "low"), [(1.6, 0.4), (4.0, 0.0)])
def test_slow_waves_and_silences_stay(high: float, low: float) -> None:
    """Two speeds, even around 1 or on and off: dispersion over a minute is far above that of a second, and comes back."""
    share = (1.0 - low) / (high - low)
    made = Times(5.0, 1.0, high, low, 40.0, 40.0 * (1 - share) / share)
    base = fit(Trace("t", 0, tuple(Arrival(k / 5, 10, 1, ()) for k in range(100))))
    given_ = tuple(generate(msgspec.structs.replace(base, times=made), 40_000))
    fitted = fit(Trace("t", 0, given_))
    assert fitted.times.per_s == pytest.approx(5.0, rel=0.15)
    assert fitted.times.high > 1.2
    found = [each.at for each in generate(fitted, 40_000, None, 3)]
    for window in (10.0, 60.0):
        before = dispersion([each.at for each in given_], window)
        assert before is not None
        assert before > 3
        assert dispersion(found, window) == pytest.approx(before, rel=0.35)


@given(st.floats(0, 1))
def test_quantiles_lie_on_the_table(level: float) -> None:
    table = tuple(level**2 for level in LEVELS)
    assert quantile(table, level) == pytest.approx(level**2, abs=1e-4)


def test_a_likeness_is_written_and_read_again(tmp_path: Path) -> None:
    for name in ("mooncake_synthetic.jsonl", "weka_agent_compact.jsonl", "azure2023_code.csv"):
        fitted = fit(read(DATA / name))
        path = tmp_path / "like.json"
        path.write_bytes(dump(fitted))
        assert load(path) == fitted
        assert list(generate(load(path), 50, 1.0, 7)) == list(generate(fitted, 50, 1.0, 7))
        assert list(generate(fitted, 50, 1.0, 8)) != list(generate(fitted, 50, 1.0, 7))


def test_a_likeness_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    fitted = msgspec.to_builtins(fit(read(DATA / "mooncake_synthetic.jsonl")))
    path = tmp_path / "like.json"
    cases: dict[str, dict[str, object]] = {
        r"like\.json: times\.cv: -1\.0; it lies from 0\.01 to 100": {"times": fitted["times"] | {"cv": -1.0}},
        r"fresh\.prompt: a table has 106 quantiles, ascending": {"fresh": fitted["fresh"] | {"prompt": [1.0]}},
        r"unknown field `tempo`": {"tempo": 3},
        r"block: 0, so there is no reuse; leave it out": {"block": 0},
        r"missing required field `name`": {"name": None},
    }
    for match, change in cases.items():
        changed = {key: value for key, value in (fitted | change).items() if value is not None}
        path.write_bytes(msgspec.json.encode(changed))
        with pytest.raises(ConfigError, match=match):
            load(path)
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none")


def test_nonsense_is_refused() -> None:
    fitted: Fitted = fit(read(DATA / "weka_agent_compact.jsonl"))
    with pytest.raises(ConfigError, match="does not say how often sessions begin; give a rate"):
        next(generate(fitted, 5))
    with pytest.raises(ConfigError, match="rate: -1; give a positive number"):
        next(generate(fitted, 5, -1))
    with pytest.raises(ConfigError, match="count: 0; give 1 or more"):
        next(generate(fitted, 0, 1.0))
    trace = read(DATA / "azure2023_code.csv")
    with pytest.raises(ConfigError, match="5 requests are too few to fit; give 30 or more"):
        fit(replace(trace, arrivals=trace.arrivals[:5]))


def test_arrivals_come_one_at_a_time() -> None:
    fitted = fit(read(DATA / "mooncake_synthetic.jsonl"))
    assert len(list(islice(generate(fitted, 10**9, 1.0), 5))) == 5
