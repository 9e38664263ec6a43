"""Stripes deal every token to one rank, which packs its own in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from regauge.layout.spec import Shard
from regauge.plan.reference import holds
from regauge.plan.stripes import owned, packed


@given(size=st.integers(1, 5), stripe=st.integers(1, 7), first=st.integers(0, 50), count=st.integers(1, 60))
def test_every_token_has_one_owner_and_owners_pack_without_gaps(size: int, stripe: int, first: int, count: int) -> None:
    tokens = np.arange(first, first + count)
    ranks = [Shard(cp_rank=r, cp_size=size, cp_stripe=stripe) for r in range(size)]
    assert (sum(owned(rank, tokens).astype(int) for rank in ranks) == 1).all()
    for rank in ranks:
        mine = tokens[owned(rank, tokens)]
        assert mine.tolist() == [t for t in tokens.tolist() if holds(rank, t)]
        before = sum(holds(rank, t) for t in range(first))
        assert packed(rank, mine).tolist() == list(range(before, before + len(mine)))
        for token in tokens.tolist():  # of another rank's token: the place of the next of its own
            assert packed(rank, np.array(token)) == sum(holds(rank, t) for t in range(token))
