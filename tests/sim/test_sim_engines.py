"""Engines: an LRU as a plain one, decode's fluid against small steps, pages and slots, prompts that decode computes itself."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_cases import check, serve
from regauge.blocks import Removed, Stored
from regauge.config_route import RouteConfig
from regauge.errors import ConfigError
from regauge.sim.clock import Clock
from regauge.sim.cluster import Cluster
from regauge.sim.decode import Decode
from regauge.sim.engines import DecodeModel, Prefill, PrefillModel, Task
from regauge.sim.faults import Fault
from regauge.sim.fleet import Fleet
from regauge.sim.trace import Arrival


@given(st.lists(st.lists(st.integers(0, 12), max_size=6, unique=True), max_size=60), st.integers(0, 8))
def test_the_cache_is_an_lru_and_its_events_tell_all(prompts: list[list[int]], capacity: int) -> None:
    clock, plain = Clock(), OrderedDict[int, None]()
    worker = Prefill("p0", 0, PrefillModel(1e6, cache_blocks=capacity), clock, 16, lambda _: None, lambda _: None)
    told: set[int] = set()
    for number, blocks in enumerate(prompts):
        worker.submit(Task(f"r{number}", number, 0.0, 100, 1, tuple(blocks)))
        clock.run()
        for block in reversed(blocks):
            plain.pop(block, None)
            plain[block] = None
        while len(plain) > capacity:
            plain.popitem(last=False)
        assert worker.held() == set(plain)
        for seq, event in enumerate(worker.events, worker.seq - len(worker.events) + 1):
            assert event.seq == seq
            told = told | set(event.hashes) if isinstance(event, Stored) else told
            told = told - set(event.hashes) if isinstance(event, Removed) else told
        worker.events.clear()
        assert told == worker.held()


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5_000), st.integers(1, 60)), min_size=1, max_size=6),
    st.sampled_from((0.0, 2e-6, 2e-5)),
)
@settings(max_examples=40, deadline=None)
def test_tokens_come_as_in_small_steps(requests: list[tuple[float, int, int]], token_s: float) -> None:
    clock, ended = Clock(), dict[int, float]()
    model = DecodeModel(step_s=0.01, step_more_s=0.001, step_token_s=token_s)

    def end(task: Task) -> None:
        ended[task.number] = clock.now

    decode = Decode("d0", 0, model, clock, lambda _: None, end)
    for number, (at, tokens, output) in enumerate(requests):
        clock.call(at, decode.begin, Task(f"r{number}", number, at, tokens, output, ()))
        decode.seats += 1  # as `submit` would
    clock.run()
    expected = stepped(requests, model)
    for number, when in ended.items():
        assert when == pytest.approx(expected[number], abs=4e-3, rel=2e-3)
    assert len(ended) == len(requests)


def stepped(requests: list[tuple[float, int, int]], model: DecodeModel) -> dict[int, float]:
    """Return when each ends, by Euler's steps of 1 ms at most."""
    now, came, ended = 0.0, dict.fromkeys(range(len(requests)), 0.0), dict[int, float]()
    while len(ended) < len(requests):
        here = [i for i, (at, _, _) in enumerate(requests) if at <= now and i not in ended]
        over = [i for i in here if came[i] >= requests[i][2] - 1 - 1e-9]
        if over:
            ended |= dict.fromkeys(over, now)
            continue
        coming = [at for at, _, _ in requests if at > now]
        if not here:
            now = min(coming)
            continue
        step = model.step(len(here), sum(requests[i][1] + came[i] for i in here))
        first = min(requests[i][2] - 1 - came[i] for i in here) * step
        seconds = min([1e-3, first, *(at - now for at in coming)])
        now += seconds
        for i in here:
            came[i] += seconds / step
    return ended


def test_a_step_is_longer_with_more_resident_tokens() -> None:
    cluster = Cluster(1, 1, PrefillModel(1e6), DecodeModel(step_s=0.01, step_more_s=0.0, step_token_s=1e-6))
    _, result = serve(cluster, [Arrival(0.0, 10_000, 1_001, ())])
    # 1,000 steps, with 10,000 to 11,000 tokens.
    assert result.log.tpot()[0] == pytest.approx(0.01 + 1e-6 * 10_500)
    curve = DecodeModel(curve=lambda batch, resident: 0.01 * batch + 1e-6 * resident)
    _, measured = serve(Cluster(1, 1, PrefillModel(1e6), curve), [Arrival(0.0, 10_000, 1_001, ())])
    assert measured.log.tpot()[0] == pytest.approx(result.log.tpot()[0])


def test_a_measured_curve_takes_the_place_of_prefills_constants() -> None:
    model = PrefillModel(1_000.0, curve=lambda tokens, cached: 0.5 + tokens / 1e4 + cached / 1e5)
    blocks = tuple(range(10))
    arrivals = [Arrival(0.0, 5_121, 1, blocks), Arrival(9.0, 5_121, 1, blocks)]
    _, result = serve(Cluster(1, 1, model, bytes_per_token=1.0), arrivals)
    assert list(result.log.computed - result.log.began) == pytest.approx([1.0121, 0.5 + 1e-4 + 0.0512])
    assert list(result.log.cached) == [0, 5_120]


def test_slots_and_pages_hold_requests_back() -> None:
    arrivals = [Arrival(0.0, 640, 11, ()) for _ in range(3)]
    for model in (DecodeModel(slots=1), DecodeModel(pages=11 * 2 - 1)):
        fleet, result = serve(Cluster(1, 1, PrefillModel(1e6), model), arrivals)
        check(fleet, result, arrivals)
        log = result.log
        assert list(log.seated[1:]) == pytest.approx(list(log.ended[:-1]))
    _, free = serve(Cluster(1, 1, PrefillModel(1e6), DecodeModel()), arrivals)
    assert list(free.log.seated) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("beside", [0.0, 0.5])
def test_decode_computes_short_prompts_itself_and_its_others_wait(beside: float) -> None:
    model = DecodeModel(step_s=0.01, step_more_s=0.0, computer=PrefillModel(1_000.0, 0.0), beside=beside)
    arrivals = [Arrival(0.0, 100_000, 201, ()), Arrival(2.5, 1_000, 1, ())]
    cluster = Cluster(1, 1, PrefillModel(50_000.0, 0.0), model, bytes_per_token=1.0)
    fleet, result = serve(cluster, arrivals, offload_tokens=2_000)
    check(fleet, result, arrivals)
    log = result.log
    assert list(log.prefill) == [0, -1]
    assert list(log.decode) == [0, 0]
    assert log.first[1] == pytest.approx(3.5)
    assert log.nbytes[1] == 0
    assert log.ended[0] - log.first[0] == pytest.approx(2.0 + (1 - beside) * 1.0)


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_decode_that_only_computes_is_busy_and_slow_if_it_is(slower: float) -> None:
    model = DecodeModel(computer=PrefillModel(1_000.0, 0.0))
    slow = Fault(at=0.0, what="slow", who="d0", factor=slower)
    fleet = Fleet(Cluster(1, 1, PrefillModel(50_000.0), model), RouteConfig(offload_tokens=2_000), faults=[slow])
    result = fleet.run([Arrival(1.0, 1_000, 1, ())])
    assert result.log.prefill[0] == -1
    assert result.log.first[0] == pytest.approx(1.0 + slower)
    assert result.busy["d0"] == pytest.approx(slower)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrefillModel(-1.0), r"prefill\.tokens_per_s: must be more than 0"),
        (lambda: PrefillModel(float("nan")), r"prefill\.tokens_per_s"),
        (lambda: PrefillModel(1.0, cache_blocks=-1), r"prefill\.cache_blocks: must be 0 or more"),
        (lambda: DecodeModel(slots=0), r"decode\.slots: must be more than 0"),
        (lambda: DecodeModel(beside=1.5), r"decode\.beside: 1\.5 is more than 1"),
        (lambda: Cluster(0, 1), r"cluster\.prefills: must be 1 or more, not 0"),
        (lambda: Cluster(decode_nic=float("inf")), r"cluster\.decode_nic: must be more than 0 and finite"),
        (lambda: Cluster(delay_s=-1.0), r"cluster\.delay_s: must be 0 or more"),
        (lambda: Cluster(slow={12: 0.5}), r"cluster\.slow: worker 12, speed 0\.5: workers are 0 to 11"),
    ],
)
def test_nonsense_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=message):
        make()
