"""The prefix index against a plain model, and that it says when it cannot be relied on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from route_rig import cluster, placed

from regauge.blocks import Cleared, Removed, Stored
from regauge.route.cluster import Load, Request, Worker
from regauge.route.prefix import PrefixIndex

NAMES = ("a", "b", "c")
BLOCKS = st.integers(0, 12)
HASHES = st.lists(BLOCKS, min_size=1, max_size=5).map(tuple)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stored"), st.sampled_from(NAMES), HASHES),
        st.tuples(st.just("removed"), st.sampled_from(NAMES), HASHES),
        st.tuples(st.just("cleared"), st.sampled_from(NAMES), st.just(())),
        st.tuples(st.just("rejoin"), st.sampled_from(NAMES), st.just(())),
    ),
    max_size=40,
)


def brute(held: set[int], prompt: list[int]) -> int:
    count = 0
    while count < len(prompt) and prompt[count] in held:
        count += 1
    return count


@given(STEPS, st.lists(BLOCKS, max_size=8, unique=True))
def test_the_index_equals_sets_of_blocks(steps: list[tuple[str, str, tuple[int, ...]]], prompt: list[int]) -> None:
    index = PrefixIndex(1_000, 10.0)
    model: dict[str, set[int]] = {name: set() for name in NAMES}
    seqs = dict.fromkeys(NAMES, 0)
    for name in NAMES:
        index.join(name, 100, 0.0)
    for kind, name, hashes in steps:
        seqs[name] += 1
        if kind == "stored":
            index.event(name, Stored(seqs[name], hashes), 0.0)
            model[name] |= set(hashes)
        elif kind == "removed":
            index.event(name, Removed(seqs[name], hashes), 0.0)
            model[name] -= set(hashes)
        elif kind == "cleared":
            index.event(name, Cleared(seqs[name]), 0.0)
            model[name] = set()
        else:
            index.join(name, 100, 0.0)
            model[name], seqs[name] = set(), 0
    assert all(index.blocks(name) == model[name] for name in NAMES)
    assert all(not index.stale(name, 1.0) for name in NAMES)
    expected = {name: count for name in NAMES if (count := brute(model[name], prompt))}
    assert index.overlap(prompt) == expected
    assert len(index) == sum(map(len, model.values()))
    for name in NAMES:
        index.leave(name)
    assert (len(index), index.hashes) == (0, 0)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_a_missing_event_is_noticed_whatever_comes_after(numbers: list[int]) -> None:
    index = PrefixIndex(1_000, 10.0)
    index.join("a", 100, 0.0)
    newest, gap = 0, False
    for number in numbers:
        gap = gap or number > newest + 1
        newest = max(newest, number)
        index.event("a", Stored(number, (number,)), 0.0)
    assert bool(index.stale("a", 0.0)) == gap
    assert index.stale_seen == gap
    index.event("a", Cleared(newest + 5), 0.0)
    assert not index.stale("a", 0.0)


def test_a_repeated_event_changes_nothing() -> None:
    index = PrefixIndex(1_000, 10.0)
    index.join("a", 100, 0.0)
    index.event("a", Stored(1, (1, 2)), 0.0)
    index.event("a", Removed(2, (2,)), 0.0)
    index.event("a", Stored(1, (1, 2)), 0.0)
    assert index.blocks("a") == {1}


def test_silence_and_a_lag_are_stale_and_end() -> None:
    index = PrefixIndex(1_000, 10.0)
    index.join("a", 100, 0.0)
    index.event("a", Stored(1, (1,)), 0.0)
    assert not index.stale("a", 10.0)
    assert "not heard of" in index.stale("a", 10.5)
    index.heard("a", 3, 11.0)
    assert not index.stale("a", 11.0)
    index.heard("a", 3, 22.0)
    assert "behind its events for 11.0 s" in index.stale("a", 22.0)
    index.event("a", Stored(2, (2,)), 22.0)
    index.event("a", Stored(3, (3,)), 22.0)
    assert not index.stale("a", 22.0)


def test_assumed_caches_forget_the_least_recently_used_prompts_end_first() -> None:
    index = PrefixIndex(1_000, 10.0)
    index.join("a", 4, 0.0)
    index.assume("a", (1, 2, 3))
    index.assume("a", (4, 5))
    assert index.blocks("a") == {1, 2, 4, 5}
    assert index.overlap((1, 2, 3)) == {"a": 2}
    index.assume("a", (1, 2))
    index.assume("a", (6,))
    assert index.blocks("a") == {1, 2, 4, 6}
    index.resize("a", 1)
    assert index.blocks("a") == {6}


def test_what_was_assumed_is_dropped_once_the_worker_tells() -> None:
    index = PrefixIndex(1_000, 10.0)
    index.join("a", 10, 0.0)
    index.assume("a", (1, 2))
    index.event("a", Stored(1, (7,)), 0.0)
    index.assume("a", (8,))
    assert index.blocks("a") == {7}
    assert not index.assumed("a")


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(NAMES), HASHES), max_size=40))
def test_memory_is_bounded(stored: list[tuple[str, tuple[int, ...]]]) -> None:
    index = PrefixIndex(6, 10.0)
    for name in NAMES:
        index.join(name, 100, 0.0)
    for number, (name, hashes) in enumerate(stored):
        index.event(name, Cleared(number), 0.0)
        index.event(name, Stored(number + 1, hashes), 0.0)
        assert len(index) <= 6
    assert len(index) == sum(len(index.blocks(name)) for name in NAMES)


def test_a_route_says_that_an_index_is_stale_and_counts_its_hits_less() -> None:
    router = cluster(block_tokens=10, policy="prefix", stale_weight=0.5)
    router.cache_event("p1", Stored(1, (1, 2, 3, 4)), 0.0)
    request = Request("a", tokens=45, blocks=(1, 2, 3, 4))
    route = placed(router, request, 0.0)
    assert (route.prefill, route.cached_tokens, route.note) == ("p1", 40, "")
    router.finished("a", 0.0)
    router.cache_event("p1", Stored(9, (5,)), 0.0)
    route = placed(router, request, 0.0)
    assert (route.prefill, route.cached_tokens) == ("p1", 20)
    assert route.note == "the cache index of p1 is stale (events 2 to 8 are missing): 40 tokens count 0.5"
    record = router.journal.of("a")
    assert record is not None
    assert "events 2 to 8 are missing" in record.text()


def test_a_cache_that_is_smaller_than_assumed_is_trusted_less() -> None:
    router = cluster(1, 1, block_tokens=10)
    expected = []
    for number in range(30):
        route = placed(router, Request(f"r{number}", tokens=41, blocks=(1, 2, 3, 4)), float(number))
        expected.append(route.cached_tokens)
        router.prefilled(route.id, float(number), 0, 41, 0.01)
        router.finished(route.id, float(number))
    assert expected[:2] == [0, 40]
    assert expected[-1] < 5


def test_never_is_all_of_a_prompt_expected_to_be_cached() -> None:
    router = cluster(1, 1, block_tokens=10)
    router.cache_event("p0", Stored(1, (1, 2)), 0.0)
    assert placed(router, Request("a", tokens=20, blocks=(1, 2)), 0.0).cached_tokens == 19


def test_an_assumed_cache_is_as_large_as_the_reported_pool() -> None:
    router = cluster(1, 1, block_tokens=10)
    router.report("p0", Load(pages=2, page_size=10), 0.0)
    placed(router, Request("a", tokens=45, blocks=(1, 2, 3, 4)), 0.0)
    assert router.index.blocks("p0") == {1, 2}
    router.join(Worker("p0", prefill=True, cache_tokens=30), 0.0)
    placed(router, Request("b", tokens=45, blocks=(1, 2, 3, 4)), 0.0)
    assert router.index.blocks("p0") == {1, 2, 3}


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["assume", "resize"]), st.lists(st.integers(0, 30), max_size=6, unique=True)),
        max_size=40,
    )
)
def test_the_oldest_go_first_whatever_was_used_again(steps: list[tuple[str, list[int]]]) -> None:
    index, order, capacity = PrefixIndex(1_000, 10.0), list[int](), 8
    index.join("a", capacity, 0.0)
    for what, blocks in steps:
        if what == "assume":
            index.assume("a", blocks)
            order = [block for block in order if block not in blocks] + blocks[::-1]
        else:
            capacity = 1 + len(blocks)
            index.resize("a", capacity)
        order = order[-capacity:]
        assert index.blocks("a") == set(order)


def test_doubtful_are_those_that_are_stale_or_guessed_at() -> None:
    index = PrefixIndex(1_000, 10.0)
    for name in ("guessed", "told", "gap"):
        index.join(name, 100, 0.0)
    index.event("told", Stored(1, (1,)), 0.0)
    index.event("gap", Stored(3, (1,)), 5.0)
    assert index.names(index.doubtful(9.0)) == ("guessed", "gap")
    assert index.names(index.doubtful(11.0)) == ("guessed", "told", "gap")
    index.heard("told", 1, 12.0)
    assert index.names(index.doubtful(13.0)) == ("guessed", "gap")
    assert index.matches((1, 2)) == [(0b110, 1)]
