"""What decode needs beside the KV: rows of SGLang's `MetadataBuffers`, as the hand-over carries them between any two engines."""

from __future__ import annotations

import math
from typing import Any, Final

from regauge.engines.handover import Handover
from regauge.errors import EngineError

TENSORS: Final = (
    "output_ids", "cached_tokens", "output_token_logprobs_val", "output_token_logprobs_idx", "output_top_logprobs_val",
    "output_top_logprobs_idx", "bootstrap_room",
)  # fmt: skip
"""What is read and written here; each has a row for every request."""
_TIERS: Final = slice(1, 4)
"""Of `cached_tokens`: on the device, in host memory, in storage; 0 is their sum."""


def read(buffers: Any, index: int, logprobs: int | None) -> Handover:
    """Return what prefill's scheduler has put into a row; `logprobs`: alternatives that the request wants, None: no log-probabilities."""
    logprob = top = None
    if logprobs is not None:
        logprob = float(buffers.output_token_logprobs_val[index][0])
        values = buffers.output_top_logprobs_val[index][:logprobs].tolist()
        top = list(zip(buffers.output_top_logprobs_idx[index][:logprobs].tolist(), values, strict=True))
    device, host, storage = buffers.cached_tokens[index][_TIERS].tolist()
    return Handover(
        int(buffers.output_ids[index][0]), logprob=logprob, top=top, cached=(int(device), int(host), int(storage))
    )


def write(buffers: Any, index: int, handover: Handover, room: int) -> None:
    """Fill decode's row as SGLang's own backends do; the room, by which its scheduler knows that the row is there, comes last.

    A log-probability that prefill does not know is not a number, which the API shows as null.

    Raises EngineError for more alternatives than a row holds.
    """
    top = handover.top or []
    width = buffers.output_top_logprobs_val.shape[1]
    if len(top) > width:
        raise EngineError(f"prefill sent {len(top)} alternatives to the first token; SGLang takes {width}")
    cached = handover.cached or (0, 0, 0)
    buffers.output_ids[index][0] = handover.token
    buffers.cached_tokens[index].zero_()
    buffers.cached_tokens[index][0] = sum(cached)
    for position, count in enumerate(cached, start=1):
        buffers.cached_tokens[index][position] = count
    buffers.output_token_logprobs_val[index][0] = math.nan if handover.logprob is None else handover.logprob
    buffers.output_token_logprobs_idx[index][0] = handover.token
    buffers.output_top_logprobs_val[index].zero_()
    buffers.output_top_logprobs_idx[index].zero_()
    for position, (token, logprob) in enumerate(top):
        buffers.output_top_logprobs_val[index][position] = logprob
        buffers.output_top_logprobs_idx[index][position] = token
    buffers.bootstrap_room[index][0] = room
