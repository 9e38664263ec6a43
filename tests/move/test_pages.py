"""A pool's pages have one owner each, whatever is asked for."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from regauge.errors import PoolExhausted, ProtocolError
from regauge.move.pages import PagePool


class Pages(RuleBasedStateMachine):
    """Compared with a plain dictionary of owners."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, 4)
        self.model: dict[str, tuple[str, int]] = {}

    @rule(owner=st.sampled_from("abcd"), count=st.integers(0, 6))
    def lease(self, owner: str, count: int) -> None:
        free = 12 - sum(n for _, n in self.model.values())
        if owner in self.model:
            with pytest.raises(ProtocolError, match="owns pages already"):
                self.pool.lease(owner, count)
        elif count > free:
            with pytest.raises(PoolExhausted, match=f"{count} pages are asked for, {free} of 12 are free"):
                self.pool.lease(owner, count)
        else:
            assert self.pool.lease(owner, count) == self.pool.owned(owner)
            self.model[owner] = ("leased", count)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), verb=st.sampled_from(["commit", "quarantine"]))
    def move(self, data: st.DataObject, verb: str) -> None:
        owner = data.draw(st.sampled_from(sorted(self.model)))
        state, count = self.model[owner]
        if state == "leased":
            getattr(self.pool, verb)(owner)
            self.model[owner] = ("committed" if verb == "commit" else "quarantined", count)
        else:
            with pytest.raises(ProtocolError, match=f"are {state}, not leased"):
                getattr(self.pool, verb)(owner)

    @rule(owner=st.sampled_from("abcd"))
    def release(self, owner: str) -> None:
        if owner in self.model:
            self.pool.release(owner)
            del self.model[owner]
        else:
            with pytest.raises(ProtocolError, match="owns no pages"):
                self.pool.release(owner)

    @invariant()
    def agree(self) -> None:
        self.pool.check_integrity()
        assert self.pool.free == 12 - sum(n for _, n in self.model.values())
        for state in ("leased", "committed", "quarantined"):
            assert self.pool.count(state) == sum(n for s, n in self.model.values() if s == state)
        for owner in "abcd":
            assert self.pool.state(owner) == (self.model[owner][0] if owner in self.model else None)


TestPages = Pages.TestCase


def test_pages_for_tokens_round_up() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_page_that_is_lost_is_noticed() -> None:
    pool = PagePool(4, 16)
    pool._free.pop()
    with pytest.raises(ProtocolError, match="4 pages, but 3 are accounted for"):
        pool.check_integrity()
