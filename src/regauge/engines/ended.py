"""How a transfer has ended, as an engine is told."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from regauge.move.protocol import Stages
from regauge.move.reasons import reason_class
from regauge.plan.cost import Mode


@dataclass(frozen=True)
class Ended:
    """A transfer whose pages are the engine's again."""

    transfer: str
    error: str = ""
    """Why it failed; empty if it is complete: what decode's pages then hold is verified."""
    handover: bytes = b""
    """On decode: what prefill sent beside the KV."""
    path: str = ""
    mode: Mode | Literal[""] = ""
    """How its chunks were written, in the first pair of state groups; empty: none were."""
    wire_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    """Class of the error, one of `observe.REASONS`."""
    computed: float = 0.0
    """On prefill: when the engine last said that something is ready. CLOCK_MONOTONIC, which one machine's processes share; 0: never."""
    stages: Stages | None = None
    """On decode: how long it was in each stage."""
    spans: int = 0
    """On decode: boxes in which its bytes lie."""
    at: float = field(default_factory=time.monotonic, compare=False)
    """When it ended, by the same clock."""

    @classmethod
    def failed(cls, transfer: str, error: BaseException, path: str = "", mode: Mode | Literal[""] = "") -> Ended:
        """Return the end of a transfer that this error has ended."""
        text = str(error) or type(error).__name__
        return cls(transfer, text, path=path, mode=mode, reason=reason_class(error))
