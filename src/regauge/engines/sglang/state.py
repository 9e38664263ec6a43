"""How far a room is, as SGLang's schedulers poll it."""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """`KVPoll`'s values; the ranks of an engine agree on the least of theirs."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING = 2
    """The other side is known: prefill may compute, decode may allocate."""
    TRANSFERRING = 3
    SUCCESS = 4
