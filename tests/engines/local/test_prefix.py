"""The prefix cache against a model: what a page holds is what its reader takes it for, and nothing is lost, shared wrongly or kept too long."""

from __future__ import annotations

import array
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.blocks import Cleared, Removed, Stored, hash_blocks
from regauge.engines.local.prefix import EventLog, Leased, PrefixCache, Prompt
from regauge.errors import EngineError, ProtocolError
from regauge.move.pages import PagePool


@dataclass
class Job:
    prompt: Prompt
    leased: Leased
    kept: bool = False


@dataclass
class World:
    """Requests on a small pool; `memory` holds, of each page, the text up to its end that it is part of."""

    cache: PrefixCache
    pool: PagePool
    jobs: dict[str, Job] = field(default_factory=dict)
    memory: dict[int, tuple[object, ...]] = field(default_factory=dict)
    seen: int = 0
    blocks: set[int] = field(default_factory=set)

    def begin(self, owner: str, prompt: Prompt) -> bool:
        size = self.pool.page_size
        before, available = self.pool.free, self.cache.available
        leased = self.cache.lease(owner, self.pool.pages_for(len(prompt.tokens)), prompt)
        if leased is None:
            assert (self.pool.free, self.cache.available) == (before, available)
            return False
        assert leased.cached < len(prompt.tokens)
        assert leased.cached % size == 0
        assert len(set(leased.pages)) == len(leased.pages) == self.pool.pages_for(len(prompt.tokens))
        for i, page in enumerate(leased.pages):
            text = (prompt.salt, *prompt.tokens[: (i + 1) * size])
            if i * size < leased.cached:
                assert self.memory[page] == text
            else:
                assert all(page not in job.leased.pages for job in self.jobs.values()), "somebody reads it"
                self.memory[page] = text
        self.jobs[owner] = Job(prompt, leased)
        return True

    def compute(self, owner: str) -> None:
        job = self.jobs[owner]
        self.cache.keep(owner, job.prompt, len(job.prompt.tokens))

    def end(self, owner: str) -> None:
        del self.jobs[owner]
        self.cache.release(owner)

    def check(self) -> None:
        self.pool.check_integrity()
        size = self.pool.page_size
        for job in self.jobs.values():
            for i, page in enumerate(job.leased.pages):
                assert self.memory[page] == (job.prompt.salt, *job.prompt.tokens[: (i + 1) * size])
        pinned = {page for job in self.jobs.values() for page in job.leased.pages}
        assert self.cache.available <= self.pool.pages - len(
            pinned
        )  # of two that computed alike, one pins pages that it does not read
        self.hear()

    def hear(self) -> None:
        """Follow the events, as a router does."""
        news = self.cache.news(self.seen, self.cache.events.instance)
        assert not news.anew
        for event in news.events:
            assert event.seq == self.seen + 1
            self.seen = event.seq
            if isinstance(event, Stored):
                assert not self.blocks & set(event.hashes)
                self.blocks |= set(event.hashes)
            elif isinstance(event, Removed):
                assert self.blocks >= set(event.hashes)
                self.blocks -= set(event.hashes)
            else:
                self.blocks.clear()
        whole = self.cache.news(0, "another")
        assert whole.anew
        assert set(whole.held) == self.blocks
        assert whole.seq == self.seen


def world(pages: int = 8, page: int = 2, block: int = 2) -> World:
    pool = PagePool(pages, page)
    return World(PrefixCache(pool, block=block), pool)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(2, 2), (4, 2), (2, 4), (3, 2)]), st.booleans())
def test_a_page_holds_what_its_reader_takes_it_for(seed: int, sizes: tuple[int, int], forge: bool) -> None:
    rng = random.Random(seed)
    w = world(10, *sizes)
    for number in range(60):
        match rng.randrange(6):
            case 0 | 1:
                text = [int(rng.random() < 0.15) for _ in range(rng.randint(1, 17))]
                prompt = w.cache.prompt(text, rng.choice([b"", b"other"]))
                if forge and rng.random() < 0.3:  # as if 64 bits did not tell them apart
                    prompt = Prompt(prompt.tokens, hash_blocks([0] * len(text), sizes[1], b""), prompt.salt)
                if w.pool.pages_for(len(text)) <= w.pool.pages:
                    w.begin(str(number), prompt)
            case 2 | 3 if w.jobs:
                w.compute(rng.choice(list(w.jobs)))
            case 4 if w.jobs:
                w.end(rng.choice(list(w.jobs)))
            case 5 if rng.random() < 0.2:
                w.cache.clear()
        w.check()
    for owner in list(w.jobs):
        w.end(owner)
    w.check()
    assert w.cache.available == w.pool.pages
    whole = w.cache.lease("all", w.pool.pages)
    assert whole is not None
    assert len(whole.pages) == w.pool.pages


def test_the_last_token_is_always_computed() -> None:
    w = world()
    for owner, text, cached in (("a", range(8), 0), ("b", range(8), 6), ("c", range(9), 8), ("d", range(7), 6)):
        prompt = w.cache.prompt(list(text))
        assert w.begin(owner, prompt)
        assert w.jobs[owner].leased.cached == cached
        w.compute(owner)
        w.end(owner)


def test_a_prompt_is_shared_as_soon_as_it_is_computed() -> None:
    w = world(5)
    w.begin("a", w.cache.prompt([1, 2, 3, 4, 5]))
    w.compute("a")
    assert w.begin("b", w.cache.prompt([1, 2, 3, 4, 6]))
    assert w.jobs["b"].leased.pages[:2] == w.jobs["a"].leased.pages[:2]
    assert w.pool.free == 1
    w.end("a")
    w.check()


def test_what_is_used_least_goes_first_and_ends_before_beginnings() -> None:
    w = world(6)
    for owner, text in (("a", [1, 1, 1, 1, 1]), ("b", [2, 2, 2, 2, 2])):
        w.begin(owner, w.cache.prompt(text))
        w.compute(owner)
        w.end(owner)
    w.begin("again", w.cache.prompt([1, 1, 1, 1, 1]))
    w.end("again")
    w.begin("c", w.cache.prompt([3, 3, 3, 3, 3]))  # takes the two free pages and one more
    w.end("c")
    assert w.begin("probe", w.cache.prompt([2, 2, 2, 2, 2]))
    assert w.jobs["probe"].leased.cached == 2
    assert w.begin("other", w.cache.prompt([1, 1, 9]))
    assert w.jobs["other"].leased.cached == 2


def test_what_failed_is_not_kept() -> None:
    w = world()
    w.begin("a", w.cache.prompt([1, 2, 3, 4]))
    w.end("a")
    assert w.pool.free == w.pool.pages
    assert w.cache.events.seq == 0


def test_what_was_written_in_part_is_kept_in_part() -> None:
    w = world()
    prompt = w.cache.prompt([1, 2, 3, 4, 5, 6])
    w.begin("a", prompt)
    w.cache.keep("a", prompt, 5)
    w.end("a")
    assert w.cache.news(0, "").held == prompt.hashes[:2]


def test_a_prompt_grows_by_its_answer() -> None:
    w = world()
    w.cache.lease("a", 4, w.cache.prompt([1, 2, 3]))
    w.cache.keep("a", w.cache.prompt([1, 2, 3]), 3)
    w.cache.keep("a", w.cache.prompt([1, 2, 3, 4, 5, 6]), 5)
    w.cache.release("a")
    again = w.cache.lease("b", 4, w.cache.prompt([1, 2, 3, 4, 5, 6]))
    assert again is not None
    assert again.cached == 4


def test_pages_leased_without_a_prompt_are_the_pools_matter() -> None:
    w = world()
    w.cache.lease("a", 3)
    w.cache.keep("a", w.cache.prompt([1, 2, 3, 4]), 4)
    w.pool.release("a")
    w.cache.release("a")
    assert w.pool.free == w.pool.pages
    w.cache.lease("b", 3)
    with pytest.raises(ProtocolError, match="'b' owns pages already"):
        w.cache.lease("b", 1, w.cache.prompt([1]))


def test_a_cache_that_is_off_keeps_nothing() -> None:
    pool = PagePool(4, 2)
    cache = PrefixCache(pool, block=2, enabled=False)
    for owner in "ab":
        leased = cache.lease(owner, 2, cache.prompt([1, 2, 3]))
        assert leased is not None
        assert leased.cached == 0
        cache.keep(owner, cache.prompt([1, 2, 3]), 3)
        cache.release(owner)
    assert (pool.free, cache.events.seq) == (4, 0)


def test_what_is_no_token_is_refused() -> None:
    with pytest.raises(EngineError, match="token ids must be whole numbers"):
        world().cache.prompt([-1])


def test_all_given_up_is_one_event_and_what_is_read_stays() -> None:
    w = world()
    w.begin("a", w.cache.prompt([1, 2, 3, 4, 5]))
    w.compute("a")
    w.begin("b", w.cache.prompt([1, 2, 9]))
    w.end("a")
    w.cache.clear()
    w.check()
    assert w.cache.news(1, w.cache.events.instance).events == (Removed(2, hash_blocks([1, 2, 3, 4], 2)[1:]),)
    w.end("b")
    w.cache.clear()
    assert w.cache.news(2, w.cache.events.instance).events == (Cleared(3),)
    w.check()
    assert w.pool.free == w.pool.pages


def test_whoever_asks_too_late_or_of_another_process_starts_anew() -> None:
    log = EventLog(most_events=3, most_hashes=10)
    for n in range(5):
        log.stored([n])
    assert log.after(2, log.instance) == (Stored(3, (2,)), Stored(4, (3,)), Stored(5, (4,)))
    assert log.after(4, log.instance) == (Stored(5, (4,)),)
    assert log.after(5, log.instance) == ()
    assert log.after(1, log.instance) is None
    assert log.after(6, log.instance) is None
    assert log.after(5, EventLog().instance) is None
    log.removed(range(9))
    assert log.after(4, log.instance) == (Stored(5, (4,)), Removed(6, tuple(range(9))))
    assert log.after(3, log.instance) is None
    log.stored(range(11))  # more than is kept at all
    assert log.after(6, log.instance) is None
    assert log.after(7, log.instance) == ()


def test_a_prompt_is_kept_as_it_was_given() -> None:
    prompt = world().cache.prompt([5, 6, 7], b"salt")
    assert (prompt.tokens, prompt.hashes) == (array.array("I", [5, 6, 7]), hash_blocks([5, 6], 2, b"salt"))


def test_a_forged_hash_gives_nobody_anothers_state() -> None:
    true = [0, 0, 0, 0, 0]
    first, second = hash_blocks(true, 2)
    own = hash_blocks([1, 1], 2)[0]
    for hashes in ((first, second), (own, second)):  # the beginning's hash is another's, or only the end's is
        w = world()
        w.begin("short", w.cache.prompt(true[:3]))
        w.compute("short")
        w.begin("forged", Prompt(array.array("I", [1, 1, 0, 0, 0]), hashes, b""))
        assert w.jobs["forged"].leased.cached == 0
        w.compute("forged")
        assert w.begin("true", w.cache.prompt(true))  # compares what the pages hold
        assert w.jobs["true"].leased.cached == 2
