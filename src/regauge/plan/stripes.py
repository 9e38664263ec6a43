"""Which tokens a context-parallel rank holds, and where in its pages. Pure arithmetic.

Tokens are dealt out in stripes (`Shard`): rank r of n holds stripes r, r + n, r + 2n, ... and packs them. This is vLLM's
interleave of decode context parallelism (`cp_kv_cache_interleave_size` tokens per stripe).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from regauge.layout.spec import Shard
from regauge.plan.tiles import Int64


def owned(shard: Shard, tokens: Int64) -> npt.NDArray[np.bool_]:
    """Say which tokens the rank holds, bool[n]."""
    held: npt.NDArray[np.bool_] = tokens // shard.cp_stripe % shard.cp_size == shard.cp_rank
    return held


def packed(shard: Shard, tokens: Int64) -> Int64:
    """Return the place of each token among those of its rank, int64[n]; for a token of another rank, of the next that is its own."""
    if shard.cp_size == 1:
        return tokens
    turn, inside = np.divmod(tokens, shard.cp_stripe * shard.cp_size)
    place: Int64 = turn * shard.cp_stripe + np.clip(inside - shard.cp_rank * shard.cp_stripe, 0, shard.cp_stripe)
    return place
