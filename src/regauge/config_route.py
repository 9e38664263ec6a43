"""Settings of routing and admission: table `[route]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from regauge.config_bounds import MAX_S, Count, Limit, bound

PolicyName = Literal["round-robin", "least-load", "prefix", "cache+load", "network-aware"]


class RouteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where requests go, and which are admitted; docs/routing.md says how."""

    policy: PolicyName = "network-aware"
    block_tokens: Count = 64
    """Tokens of a block of the prefix index, as the workers' events count."""
    index_blocks: Count = 2_000_000
    """Most blocks that the index remembers, over all workers: some 200 bytes each."""
    assumed_tokens: Count = 1_000_000
    """Tokens that a worker's prefix cache is taken to hold, if it neither says so nor gives events."""
    stale_s: float = 10.0
    """A worker whose cache was not heard of for so long, or is so long behind its own events, counts as stale."""
    stale_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """What expected hits of a stale index count; 0: nothing."""

    ttft_s: float | None = None
    """Limit of the predicted time to the first token: a request that would take longer is told 429. Left out: none."""
    tpot_s: float | None = None
    """Limit of the predicted time per output token: decode workers above it are avoided, and where all are, a request is told 429. Left out: none."""
    admit_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    """Of `ttft_s`, what requests of priority 0 may use up; each step of priority adds or takes 0.1. Of `tpot_s` and `limits.max_queue` they may use up
    all, and each step below takes 0.1."""
    offload: Literal["fixed", "auto"] = "fixed"
    """Which prompts a decode worker that can computes itself. "fixed": uncached parts of at most `offload_tokens`. "auto": those that have their first token
    earlier so, without harm to the others' tokens beyond `offload_harm`."""
    offload_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """0 with "fixed": none, unless there is no prefill worker."""
    offload_harm: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.25
    """Share by which a prompt may lengthen the time per output token of those that decode beside it."""

    cache_weight: Limit = 1.0
    """Policy "cache+load": what an uncached token of the prompt costs,"""
    queue_weight: Limit = 1.0
    """a token in prefill's queue,"""
    slots_weight: Limit = 1.0
    """the share of decode's slots that is in use,"""
    pages_weight: Limit = 1.0
    """and of its pages."""

    retries: Annotated[int, msgspec.Meta(ge=0, le=100)] = 3
    """Most attempts beyond the first, resumptions included."""
    poison_kills: Annotated[int, msgspec.Meta(ge=1, le=100)] = 2
    """Workers that may die with a request in hand before it is stopped."""
    eject_failures: Count = 3
    """Failures in a row after which a worker is ejected."""
    eject_ratio: float = 4.0
    """A worker whose measured over predicted times are so many times its peers' is slow, and ejected."""
    eject_s: float = 5.0
    """First ejection's length; doubles with each that follows,"""
    eject_most_s: float = 120.0
    """up to this. Then one request at a time probes the worker."""
    keep_routes: Count = 5_000
    """Requests whose routes `regauge why` knows."""

    def __post_init__(self) -> None:
        bound(self, "route", ("stale_s", "eject_s", "eject_most_s"), most=MAX_S)
        bound(self, "route", ("eject_ratio",), least=1)
        for name in ("ttft_s", "tpot_s"):
            if getattr(self, name) is not None:
                bound(self, "route", (name,), most=MAX_S)
