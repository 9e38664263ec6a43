"""The words of routing: workers, what they report, links, a request, and the answer to it. Pure data.

Times are seconds (of one clock, the caller's), sizes tokens, pages or bytes, as the names say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

Path = Literal["DIRECT", "REMAP", "CONVERT", "REFUSED"]
Reason = Literal["no_worker", "no_room", "deadline", "tpot", "overload"]
Cause = Literal["worker_lost", "failed", "timeout", "draining", "queue_full", "transfer_failed"]
"""How an attempt failed: its worker died; said that it failed; was silent too long; takes nothing new; has no room; or the KV did not cross."""
Outcome = Literal["complete", "cancelled", "failed"]


class Load:
    """What a worker says of itself at one moment. None: it does not know."""

    __slots__ = (
        "cache_seq", "free_pages", "page_size", "pages", "prefill_tokens_per_s", "queued_tokens", "running", "tpot_s",
    )  # fmt: skip

    def __init__(
        self, queued_tokens: int | None = None, running: int | None = None, free_pages: int | None = None,
        pages: int | None = None, page_size: int | None = None, prefill_tokens_per_s: float | None = None,
        tpot_s: float | None = None, cache_seq: int | None = None,
    ) -> None:  # fmt: skip
        self.queued_tokens = queued_tokens
        """Prompt tokens that wait or are being computed; of these, cached ones do not count."""
        self.running = running
        """Requests that it holds as decode worker: those that decode, and those that wait for their KV."""
        self.free_pages, self.pages = free_pages, pages
        self.page_size = page_size
        """Tokens of one page."""
        self.prefill_tokens_per_s = prefill_tokens_per_s
        """Measured over real steps."""
        self.tpot_s = tpot_s
        """Seconds per output token, measured, at the `running` of now."""
        self.cache_seq = cache_seq
        """Number of its newest prefix-cache event; None: it gives no events."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What does not change while a worker lives."""

    name: str
    prefill: bool = False
    decode: bool = False
    computes: bool = False
    """As decode worker it can compute prompts itself."""
    slots: int = 32
    """Most requests that decode together."""
    prior_tokens_per_s: float | None = None
    """Speed at which it computes prompts, until it is measured. None: nobody knows; see `state.GUESS`."""
    model: str = ""
    """Only requests for this model go here; empty: any."""
    overhead_s: float = 0.0
    """What computing a prompt takes beyond its tokens."""
    attention_s: float = 0.0
    """Seconds that attention adds per pair of tokens: for one uncached token, per token before it."""
    cache_tokens: int | None = None
    """Tokens that its prefix cache holds; None: as its reported pool, or `route.assumed_tokens`. Counts only if it gives no events."""


@dataclass(frozen=True, slots=True)
class Link:
    """A pair of workers: how KV crosses between them, and how busy decode's NIC is."""

    prefill: str
    decode: str
    path: Path = "DIRECT"
    bytes_per_token: float = 0.0
    """On the wire, over all layers and ranks."""
    bytes_per_s: float = 0.0
    """Of this pair, measured or nominal; 0: unknown, transfers are taken for free."""
    nic_bytes_per_s: float = 0.0
    """Of decode's NIC, which all its senders share; 0: as the fastest of its links."""
    backlog_bytes: int = 0
    """What decode's flow control has admitted on that NIC and not received yet, from any sender."""
    convert_s_per_token: float = 0.0
    """Kernel time that is not hidden behind the wire."""

    def differs(self, other: Link | None) -> bool:
        """Return whether anything but the backlog is another."""
        return (
            other is None
            or self.path != other.path
            or self.bytes_per_token != other.bytes_per_token
            or self.bytes_per_s != other.bytes_per_s
            or self.nic_bytes_per_s != other.nic_bytes_per_s
            or self.convert_s_per_token != other.convert_s_per_token
        )


class Request(msgspec.Struct, frozen=True, gc=False):
    """One attempt to be placed."""

    id: str
    tenant: str = ""
    model: str = ""
    tokens: int = 1
    """Length of the prompt; of a resumed request, with what it had generated."""
    blocks: tuple[int, ...] = ()
    """Hashes of its full blocks (`regauge.blocks`), of `route.block_tokens` tokens each."""
    max_tokens: int = 256
    priority: int = 0
    """Higher is admitted longer when load rises."""
    ttft_s: float | None = None
    """Limit of the time to its first token; None: `route.ttft_s`."""
    tpot_s: float | None = None
    """Limit of the time per output token; None: `route.tpot_s`."""
    exclude: frozenset[str] = frozenset()
    """Workers that have failed it."""
    resume: bool = False
    """It goes on from what it has streamed already."""
    admitted: bool = False
    """An attempt of it was admitted before; so nothing but a lack of workers refuses it."""
    root: str = ""
    """The client's request that this is an attempt of; empty: `id`."""


class Candidate(NamedTuple):
    """A placement that was looked at."""

    prefill: str | None
    decode: str
    cached_tokens: int
    queue_s: float
    compute_s: float
    transfer_s: float
    wait_s: float
    wire_bytes: float
    tpot_s: float | None = None

    @property
    def score(self) -> float:
        """Predicted time to the first token, uncorrected."""
        return self.queue_s + self.compute_s + self.transfer_s + self.wait_s

    @property
    def terms(self) -> Mapping[str, float]:
        """The figures by name."""
        figures = {
            "queue_s": self.queue_s,
            "compute_s": self.compute_s,
            "transfer_s": self.transfer_s,
            "wait_s": self.wait_s,
            "cached_tokens": float(self.cached_tokens),
            "wire_bytes": self.wire_bytes,
        }
        if self.tpot_s is not None:
            figures["tpot_s"] = self.tpot_s
        return figures


class Route(msgspec.Struct, frozen=True, gc=False):
    """Where a request goes. Everything it needs there is reserved."""

    id: str
    policy: str
    prefill: str | None
    """None: decode computes the prompt."""
    decode: str
    cached_tokens: int
    """Of the prompt, expected to be cached where it is computed."""
    ttft_s: float
    """Predicted, corrected by what was measured lately."""
    candidates: tuple[Candidate, ...] = ()
    """The best few, this one first."""
    note: str = ""
    """What should be known of this decision: stale indexes, unknown links, workers left out."""

    @property
    def terms(self) -> Mapping[str, float]:
        """Of the pair: `queue_s`, `compute_s`, `transfer_s`, `wait_s` add up to the uncorrected prediction; and other figures."""
        return self.candidates[0].terms if self.candidates else {}

    @property
    def header(self) -> str:
        """The decision in short ASCII, for `X-Regauge-Route`."""
        pair = f"{self.prefill}>{self.decode}" if self.prefill else self.decode
        return f"{self.policy} {pair} ttft={self.ttft_s:.3f} cached={self.cached_tokens}"


class Refusal(msgspec.Struct, frozen=True, gc=False):
    """Why a request is not placed now."""

    reason: Reason
    message: str
    retry_after_s: int = 1
    """Whole seconds, at least 1: when it may be placed."""
    ttft_s: float | None = None
    """Predicted, if there was a worker for it."""
    role: Literal["prefill", "decode"] | None = None
    """What is lacking, for `no_worker` and `no_room`."""
