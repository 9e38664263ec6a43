"""What a rank of an engine with an API of its own tells about its transfers: HTTP/1.1 beside that API, on the control plane.

vLLM's answers cannot say which path a transfer took, how many bytes, or why it failed: their parameters are made before a byte has moved.

| call | answer |
|---|---|
| `GET /status?limit=N` | `Status`, of each kind of thing the N newest (1 to 1,000; 100) |
| `GET /transfers/NAME?wait_s=S` | `TransferEnd`, once the transfer has ended; 404 where it has not within S seconds (0 to 30; 0), or is not known |
| `GET /trace/NAME` | `move.events.Traces`: what has happened to the transfer, by end |

A call carries `Authorization: Bearer TOKEN`, where TOKEN is `token(key)`: who holds the links' key may ask. An error is a `Problem` under
400, 401, 404 or 405. With `transfer.tls` it is HTTPS, and wants a certificate like the links do.

This is the contract, without the transfer layer; `status_door.py` answers.
"""

from __future__ import annotations

import hmac
from typing import Final

import msgspec

from regauge.config import Role
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.move.protocol import Stages
from regauge.move.state import WorkerState

STATUS_PATH: Final = "/status"
TRANSFERS_PATH: Final = "/transfers/"
TRACE_PATH: Final = "/trace/"
MAX_WAIT_S: Final = 30.0


class Status(msgspec.Struct, frozen=True):
    """One rank of an engine."""

    name: str
    engine: str
    version: str
    """Of regauge."""
    layout: msgspec.Raw
    """Its pages, as `layout.files` writes them in JSON; no addresses."""
    states: list[WorkerState]
    """Of each role that the rank has."""

    def read_layout(self) -> Layout:
        """Return the layout. Raises LayoutError with the path of the field that is wrong."""
        return files.decode(bytes(self.layout), format="json")


class TransferEnd(msgspec.Struct, frozen=True):
    """How one transfer has ended, as one of its ends knows it."""

    transfer: str
    role: Role
    error: str = ""
    """Why it failed; empty: decode has all of it, verified."""
    reason: str = ""
    """Class of the error, one of `observe.REASONS`."""
    path: str = ""
    """Of the pair of layouts; empty: there was no link, or this rank had nothing to send."""
    mode: str = ""
    wire_bytes: int = 0
    seconds: float = 0.0
    """From the grant to the commit."""
    stages: Stages | None = None
    """Known on decode."""
    spans: int = 0
    """Boxes in which its bytes lie on decode; 0: not known."""


class Problem(msgspec.Struct, frozen=True):
    """Why a call has no answer."""

    error: str


def token(key: bytes) -> str:
    """Return what whoever asks must show; it tells nothing of the key."""
    return hmac.digest(key, b"regauge status", "sha256").hex()
