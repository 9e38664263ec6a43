"""Workers on shared cores: prompts are cut and put together as the real scheduler does it, and each kind of computing slows the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.config import EngineConfig, RouteConfig
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import Request, Scheduler
from regauge.errors import ConfigError
from regauge.sim.calibrate import Beside, PromptTimes, StepTimes
from regauge.sim.cluster import Cluster
from regauge.sim.curves import Measured
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.log import Log
from regauge.sim.shared import SharedFleet
from regauge.sim.trace import Arrival

CHUNK, BLOCK = 256, 64
TIMES = PromptTimes(Measured(((1, 0.0507), (256, 0.7013))), 1e-6, CHUNK)
ALONE = Beside()
STEPS = StepTimes(((1, 0.06), (4, 0.12)), 0.0)
FAST = 1e15


def _fleet(both: Beside = ALONE, **decode: Any) -> SharedFleet:
    model = DecodeModel(pages=10_000, page_size=16, step_s=0.06, curve=STEPS, **decode)
    prefill = PrefillModel(400.0, cache_blocks=1_000)
    cluster = Cluster(1, 1, prefill, model, bytes_per_token=1.0, prefill_nic=FAST, decode_nic=FAST, block=BLOCK)
    return SharedFleet(cluster, RouteConfig(block_tokens=BLOCK), TIMES, both)


def _run(arrivals: Sequence[Arrival], both: Beside = ALONE) -> Log:
    return _fleet(both).run(arrivals).log


class _Model:
    """Answers at once, and keeps what it was asked: the scheduler is what is compared."""

    num_layers, max_context, vocab, eos_ids = 1, 1 << 20, 8, frozenset[int]()

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []

    def forward(self, _tokens: object, segments: Sequence[Any], *_: object) -> torch.Tensor:
        self.parts = [(s.start, s.start + s.count) for s in segments]
        return torch.zeros(len(segments), self.vocab)


class _Store:
    page_size = 16


def _real(arrivals: Sequence[Arrival]) -> list[float]:
    """When each prompt is computed, by the engine's own scheduler, each of whose steps takes what `TIMES` says. Arrivals at one instant would be a tie."""
    model = _Model()
    config = EngineConfig(max_context=1 << 20, chunk_tokens=CHUNK)
    scheduler = Scheduler(model, _Store(), config)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    done, now, coming = dict[str, float](), 0.0, list(enumerate(arrivals))
    while len(done) < len(arrivals):
        if not scheduler.has_work:
            now = max(now, coming[0][1].at)
        while coming and coming[0][1].at <= now:
            number, each = coming.pop(0)
            pages = np.arange(-(-each.tokens // 16), dtype=np.int64)
            ids = (1,) * each.tokens
            scheduler.add(Request(str(number), ids, sampling, pages, arrived=each.at, prefill_only=True))
        outputs = scheduler.step()
        now += TIMES.step(model.parts)
        done |= {output.request_id: now for output in outputs}
    return [done[str(number)] for number in range(len(arrivals))]


_ARRIVALS = st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 700)), min_size=1, max_size=8)


@given(_ARRIVALS)
@settings(max_examples=60)
def test_prompts_are_computed_when_the_real_schedulers_are(given_: list[tuple[float, int]]) -> None:
    at, arrivals = 0.0, []
    for more, tokens in given_:
        at += more
        arrivals.append(Arrival(at, tokens, 1, ()))
    assert list(_run(arrivals).computed) == pytest.approx(_real(arrivals), abs=1e-6)


def test_a_cached_beginning_is_not_computed_again_if_it_was_there_when_the_prompt_came() -> None:
    blocks = (1, 2, 3)
    log = _run(
        [
            Arrival(0.0, 200, 2, blocks),
            Arrival(0.1, 220, 2, blocks),
            Arrival(9.0, 230, 2, blocks),
            Arrival(19.0, 192, 2, blocks),
        ]
    )
    assert list(log.cached) == [0, 0, 192, 128]
    assert log.computed[2] - 9.0 == pytest.approx(TIMES(230 - 192, 192))


def test_alone_neither_waits_for_the_other() -> None:
    log = _run([Arrival(0.0, 100, 11, ())], Beside(2.0, 3.0))
    assert log.first[0] == pytest.approx(TIMES(100, 0), abs=1e-6)
    assert log.ended[0] - log.first[0] == pytest.approx(10 * 0.06, abs=1e-6)


def test_a_prompt_takes_longer_while_others_decode_and_they_while_it_is_computed() -> None:
    both = Beside(prompt=2.0, step=3.0)
    first = TIMES(1, 0)
    log = _run([Arrival(0.0, 1, 21, ()), Arrival(first, 1, 1, ())], both)
    alone = TIMES(1, 0)
    assert log.computed[1] - log.began[1] == pytest.approx(2.0 * alone, abs=1e-3)
    assert log.ended[0] - log.first[0] == pytest.approx(20 * 0.06 + 2 * alone * (1 - 1 / 3), abs=1e-3)


def test_the_pace_changes_under_way() -> None:
    """The answer ends in the middle of the prompt's step, of which the rest then goes at full speed."""
    both = Beside(prompt=2.0)
    first = TIMES(1, 0)
    log = _run([Arrival(0.0, 1, 6, ()), Arrival(first, 256, 1, ())], both)
    beside = log.ended[0] - log.first[0]
    assert beside == pytest.approx(5 * 0.06, abs=1e-3)
    assert log.computed[1] - log.began[1] == pytest.approx(beside + TIMES(256, 0) - beside / 2, abs=1e-3)


def test_prompts_stay_slow_when_one_answer_takes_the_place_of_another() -> None:
    """Of two answers that begin at once, the first ends with its only step, and the second begins in that instant: somebody decodes all the while."""
    both = Beside(1.3, 1.6)
    log = _run([Arrival(0.0, tokens, output, ()) for tokens, output in ((1, 8), (1, 2), (214, 5), (55, 1))], both)
    assert log.ended[1] < log.computed[3] < log.ended[2]
    assert log.computed[3] - log.began[3] == pytest.approx(1.3 * TIMES(55, 0), abs=1e-3)


def test_a_request_joins_between_two_steps() -> None:
    """The first answer's step is under way when the second prompt is there: its first step is the one after."""
    steps = TIMES(1, 0) / 0.06
    log = _run([Arrival(0.0, 1, 40, ()), Arrival(TIMES(1, 0), 1, 2, ())])
    waits = (1 - steps % 1) * 0.06
    assert log.ended[1] - log.first[1] == pytest.approx(waits + 0.08, abs=1e-4)


def test_of_two_at_one_instant_the_second_misses_the_first_step() -> None:
    log = _run(
        [Arrival(0.0, 20, 3, ()), Arrival(0.001, 200, 1, ()), Arrival(0.002, 20, 3, ()), Arrival(0.003, 20, 3, ())]
    )
    assert log.first[2] == pytest.approx(log.first[3], abs=1e-6)
    took = sorted(log.ended[2:] - log.first[2:])
    assert took == pytest.approx([0.06 + 0.08, 0.06 + 0.08 + 0.06], abs=1e-6)  # alone, both, the other alone


@given(_ARRIVALS, st.floats(1.0, 3.0), st.floats(1.0, 3.0))
@settings(max_examples=40)
def test_every_request_ends_and_the_factors_bound_its_times(
    given_: list[tuple[float, int]], prompt: float, step: float
) -> None:
    arrivals = [Arrival(float(i), tokens, 1 + tokens % 7, ()) for i, (_, tokens) in enumerate(given_)]
    alone, both = _run(arrivals), _run(arrivals, Beside(prompt, step))
    assert both.complete.all()
    assert (both.first >= alone.first - 1e-6).all()
    busy, lower = both.computed - both.began, np.array([TIMES(each.tokens, 0) for each in arrivals])
    assert (busy >= lower - 1e-6).all()


def test_decode_workers_that_compute_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="compute no prompts"):
        _fleet(computer=PrefillModel(400.0))
