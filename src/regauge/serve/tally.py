"""What a client's request came to, for its log line and its headers."""

from __future__ import annotations

from dataclasses import dataclass, field

from regauge.route.cluster import Route


@dataclass
class Tally:
    """What a job came to; times in seconds of the monotonic clock, `ttft_s` of the choice that was first."""

    arrived: float
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """Of each prompt, as its first choice has found it."""
    wire_bytes: int = 0
    mode: str | None = None
    path: str | None = None
    ttft_s: float | None = None
    tpots_s: list[float] = field(default_factory=list)
    attempts: int = 0
    route: Route | None = None
    """The latest of the first choice that has one."""

    @property
    def tpot_s(self) -> float | None:
        """Mean of the choices' times per output token."""
        return sum(self.tpots_s) / len(self.tpots_s) if self.tpots_s else None
