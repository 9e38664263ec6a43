"""Records of what tenants spent: the arithmetic on a clock of its own, and several processes on one file."""

from __future__ import annotations

import math
import multiprocessing
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import STEADY

from regauge.errors import ConfigError
from regauge.serve.buckets import UNLIMITED, Buckets, Left, Limits, Over, Spent, charge, settle

LIMITS = Limits(tokens_per_s=10, token_burst=100, requests_per_s=1, request_burst=5)


@STEADY
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 120), st.floats(0, 1)), min_size=1, max_size=40),
    st.floats(0, 1e6),
)
def test_no_window_of_time_admits_more_than_burst_and_rate(
    events: list[tuple[float, int, float]], start: float
) -> None:
    spent, now, admitted = Spent(), start, []
    for pause, cost, share in events:
        now += pause
        spent = spent.drained(LIMITS, now, 0)
        after = charge(spent, 0, LIMITS, cost)
        if isinstance(after, Over):
            assert after.wait_s > 0
            continue
        used = int(cost * share)
        spent = settle(after, cost, used)
        admitted.append((now, used))
    for first in range(len(admitted)):
        for last in range(first, len(admitted)):
            span = admitted[last][0] - admitted[first][0]
            within = admitted[first : last + 1]
            assert sum(used for _, used in within) <= 100 + 10 * span + 1e-6
            assert len(within) <= 5 + span + 1e-6
    assert all(a[0] <= b[0] for a, b in pairwise(admitted))


@STEADY
@given(st.integers(0, 100), st.floats(0, 100))
def test_a_request_that_was_refused_fits_after_the_wait_that_it_was_told(cost: int, spent: float) -> None:
    before = Spent(tokens=spent, requests=4.5)
    answer = charge(before, 0, LIMITS, cost)
    if isinstance(answer, Over):
        later = before
        for _ in range(2):  # the requests' bucket is looked at first; the tokens' may ask for more
            assert isinstance(answer, Over)
            later = later.drained(LIMITS, later.at + answer.wait_s + 1e-9, 0)
            answer = charge(later, 0, LIMITS, cost)
            if isinstance(answer, Spent):
                break
    assert isinstance(answer, Spent)


def test_each_limit_is_named_and_what_no_wait_mends_says_so() -> None:
    limits = Limits(10, 100, 1, 5, month_tokens=1_000, concurrent=2)
    assert charge(Spent(), 2, limits, 1) == Over("concurrent", 1.0)
    assert charge(Spent(used=990), 0, limits, 11) == Over("month", math.inf)
    assert charge(Spent(), 0, limits, 101) == Over("tokens", math.inf)
    assert charge(Spent(requests=5), 0, limits, 1) == Over("requests", 1.0)
    assert charge(Spent(tokens=90), 0, limits, 40) == Over("tokens", 3.0)
    assert charge(Spent(tokens=60), 1, limits, 40) == Spent(100, 1, used=40)
    assert charge(Spent(1e18, 1e18, used=1 << 60), 10**6, UNLIMITED, 1 << 40) == Spent(
        1e18 + (1 << 40), 1e18 + 1, used=(1 << 60) + (1 << 40)
    )


def test_a_request_that_used_more_than_it_was_charged_leaves_a_debt() -> None:
    over = settle(Spent(tokens=100, used=100), 100, 160)
    assert over == Spent(tokens=160, used=160)
    assert charge(over, 0, LIMITS, 40) == Over("tokens", 10.0)


def test_a_new_month_begins_at_nothing_and_a_late_end_is_not_counted_in_it() -> None:
    buckets = Buckets()
    slot, limits = buckets.claim("acme"), Limits(month_tokens=1_000)
    assert isinstance(buckets.take(slot, limits, 900, 1.0, 5), Left)
    assert buckets.take(slot, limits, 200, 2.0, 5) == Over("month", math.inf)
    assert isinstance(buckets.take(slot, limits, 800, 3.0, 6), Left)
    buckets.settle(slot, 900, 0, 5)
    assert buckets.spent(slot)[0].used == 800
    buckets.settle(slot, 800, 30, 6)
    assert (buckets.spent(slot)[0].used, buckets.spent(slot)[1]) == (30, 0)
    buckets.count_month(slot, 6, 500)
    buckets.count_month(slot, 6, 400)
    assert buckets.spent(slot)[0].used == 500
    buckets.close()


def _spend(path: str, process: int, times: int, held: int) -> None:
    buckets = Buckets(Path(path), process)
    slot = buckets.claim("acme")
    for _ in range(times):
        answer = buckets.take(slot, UNLIMITED, 3, 1.0, 1)
        assert isinstance(answer, Left)
        buckets.settle(slot, 3, 2, 1)
    for _ in range(held):
        buckets.take(slot, UNLIMITED, 1, 1.0, 1)


def test_processes_count_together_and_one_that_died_holds_nothing(tmp_path: Path) -> None:
    Buckets.create(tmp_path / "buckets")
    spawn = multiprocessing.get_context("fork")
    children = [spawn.Process(target=_spend, args=(str(tmp_path / "buckets"), i, 2_000, i)) for i in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0
    mine = Buckets(tmp_path / "buckets", 5)
    slot = mine.claim("acme")
    assert mine.spent(slot)[0].used == 3 * 2_000 * 2 + 0 + 1 + 2
    assert mine.spent(slot)[1] == 3
    assert mine.take(slot, Limits(concurrent=3), 1, 1.0, 1) == Over("concurrent", 1.0)
    again = Buckets(tmp_path / "buckets", 2)  # process 2 was started again
    assert again.claim("acme") == slot
    assert mine.spent(slot)[1] == 1
    assert isinstance(mine.take(slot, Limits(concurrent=3), 1, 1.0, 1), Left)


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="no file of buckets"):
        Buckets(tmp_path / "other")
    Buckets.create(tmp_path / "buckets")
    with pytest.raises(ConfigError, match="for process 99"):
        Buckets(tmp_path / "buckets", 99)
    with pytest.raises(FileExistsError):
        Buckets.create(tmp_path / "buckets")


def test_many_tenants_have_records_of_their_own_and_one_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.serve.buckets.MAX_TENANTS", 8)
    buckets = Buckets()
    assert sorted(buckets.claim(f"t{i}") for i in range(8)) == list(range(8))
    assert buckets.claim("t3") == buckets.claim("t3")
    with pytest.raises(ConfigError, match="8 tenants have been here"):
        buckets.claim("one more")
