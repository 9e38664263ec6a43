"""What a placement comes to: the time to the first token, and the time per token, of one request on one pair of workers.

    waiting_s   computation in front of it at prefill          queue_s
    + compute   of its uncached tokens                         compute_s
    + what of the transfer is not hidden behind that           transfer_s
    + what of decode's wait for a slot and pages is longer
      than the queue                                           wait_s

KV goes layer by layer while the prompt is computed, and that does not begin before decode has a slot and pages for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import cast

from regauge.config_route import RouteConfig
from regauge.route.cluster import Candidate, Request
from regauge.route.state import UNKNOWN, Standing

HARM: float = 0.5
"""What a second by which a request's KV delays others' counts against a second of its own."""
_candidate = cast("Callable[[type[Candidate], Sequence[object]], Candidate]", tuple.__new__)
"""Two thirds of the time of the class's own way."""


@dataclass(slots=True)
class View:
    """What a policy sees: the workers that may serve the request, and what is cached where."""

    config: RouteConfig
    now: float
    rng: Random
    prefills: list[Standing]
    decodes: list[Standing]
    cached: dict[str, int]
    """Tokens expected to be cached, by worker; at most all but the last."""
    turns: dict[str, int] = field(default_factory=dict)
    """Of `round-robin`: how often each role had its turn."""
    alone: list[Standing] = field(default_factory=list)
    """The decode workers that can compute prompts themselves."""
    few: int = 4
    """How many placements are wanted, at least, if there are so many."""


class Estimate:
    """One placement, predicted."""

    __slots__ = (
        "cached", "compute_s", "decode", "harm_s", "known", "prefill", "queue_s", "ready", "tpot_s", "transfer_s", "wait_s",
        "wire_bytes",
    )  # fmt: skip

    def __init__(
        self, prefill: Standing | None, decode: Standing, cached: int, queue_s: float, compute_s: float
    ) -> None:
        self.prefill, self.decode, self.cached, self.queue_s, self.compute_s = (
            prefill,
            decode,
            cached,
            queue_s,
            compute_s,
        )
        self.transfer_s = self.wait_s = self.harm_s = self.wire_bytes = 0.0
        self.tpot_s: float | None = None
        self.ready = 0.0
        """When computing begins."""
        self.known = True
        """Whether the rate of the link is."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.queue_s + self.compute_s + self.transfer_s + self.wait_s

    @property
    def computer(self) -> Standing:
        """Who computes the prompt."""
        return self.prefill or self.decode

    def candidate(self) -> Candidate:
        """Return what is said of it."""
        return _candidate(
            Candidate,
            (
                self.prefill.name if self.prefill else None, self.decode.name, self.cached, self.queue_s, self.compute_s,
                self.transfer_s, self.wait_s, self.wire_bytes, self.tpot_s,
            ),
        )  # fmt: skip


def estimate(request: Request, view: View, prefill: Standing | None, decode: Standing) -> Estimate | None:
    """Predict a placement; None: the pair is refused or no pair, or the request never fits."""
    if prefill is None:
        return _alone(request, view, decode)
    link = prefill.links.get(decode.name, UNKNOWN)
    wait = decode.wait_s(request.tokens + request.max_tokens)
    if link.path == "REFUSED" or wait == inf or prefill is decode:
        return None
    now = view.now
    cached = view.cached.get(prefill.name, 0)
    queue = prefill.waiting_s(now)
    compute = prefill.compute_s(request.tokens - cached, cached)
    late = wait - queue if wait > queue else 0.0
    begin = now + queue + late
    size = link.bytes_per_token * request.tokens
    landed, harm = decode.nic.finish(size, begin, begin + compute, now, link.bytes_per_s)
    transfer = landed - begin - compute + link.convert_s_per_token * request.tokens
    made = Estimate(prefill, decode, cached, queue, compute)
    made.transfer_s, made.wait_s, made.harm_s, made.wire_bytes = transfer, late, harm, size
    made.tpot_s, made.ready, made.known = decode.tpot_s(), begin, link.bytes_per_s > 0
    return made


def _alone(request: Request, view: View, decode: Standing) -> Estimate | None:
    wait = decode.wait_s(request.tokens + request.max_tokens)
    if wait == inf or not decode.worker.computes:
        return None
    cached = view.cached.get(decode.name, 0)
    queue = decode.waiting_s(view.now)
    compute = decode.compute_s(request.tokens - cached, cached)
    made = Estimate(None, decode, cached, queue, compute)
    made.wait_s, made.tpot_s, made.ready = max(0.0, wait - queue), decode.tpot_s(), view.now + queue
    return made


def stall(decode: Standing, compute_s: float) -> float:
    """Return the share by which a prompt that decode computes lengthens its other requests' time per token."""
    return compute_s / max(decode.hold_s, 1e-3) if decode.taken else 0.0
