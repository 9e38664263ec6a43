"""Which trace a request belongs to: the client's `traceparent` and `tracestate`, and what goes on to workers.

Format: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context-1/). What is malformed there is ignored, as it asks for: the client is not told.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

SAMPLED: Final = 1
MAX_STATE: Final = 512
"""Characters of a `tracestate` that go on; of a longer one nothing does."""
MAX_MEMBERS: Final = 32
_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MEMBER: Final = re.compile(
    r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


class Context(msgspec.Struct, frozen=True):
    """A span's place in its trace."""

    trace_id: str
    """32 hexadecimal digits, not all 0."""
    span_id: str
    """16 of them, likewise."""
    parent: str = ""
    """The span above; empty: it is the first of its trace."""
    flags: int = SAMPLED
    state: str = ""
    """`tracestate`, as it came; empty: there was none."""
    recorded: bool = False
    """Whether the gateway exports this span; else it is the client's, passed on as it came."""

    def child(self) -> Context:
        """Return the place of a span under this one: of a trace that is not recorded, the same."""
        if not self.recorded:
            return self
        return Context(self.trace_id, _id(8), self.span_id, self.flags, self.state, True)

    def headers(self) -> dict[str, str]:
        """Return what tells whoever does the span's work."""
        told = {"traceparent": f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"}
        return {**told, "tracestate": self.state} if self.state else told


def of_client(headers: Iterable[tuple[bytes, bytes]]) -> Context | None:
    """Return the client's span, of headers with lower-case names; None: there is none, it is malformed, or there are several."""
    parents, states = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value.decode("latin-1").strip(" \t"))
        elif name == b"tracestate":
            states.append(value.decode("latin-1"))
    found = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not (trace_id.strip("0") and span_id.strip("0")):
        return None
    return Context(trace_id, span_id, flags=int(flags, 16), state=_state(states))


def begin(client: Context | None, *, records: bool) -> Context | None:
    """Return the place of a request's own span, where spans are exported and the client does not say that this trace is not sampled; else the client's."""
    if not records:
        return client
    if client is None:
        return Context(_id(16), _id(8), recorded=True)
    return msgspec.structs.replace(client, recorded=True).child() if client.flags & SAMPLED else client


def onward(headers: Mapping[str, str], context: Context | None) -> Mapping[str, str]:
    """Return a request's headers for the workers of an attempt, whose span this is."""
    return headers if context is None else {**headers, **context.headers()}


def _state(values: list[str]) -> str:
    members = [each for value in values for member in value.split(",") if (each := member.strip(" \t"))]
    state = ",".join(members)
    keys = {member.partition("=")[0] for member in members}
    sound = (
        len(state) <= MAX_STATE and len(keys) == len(members) <= MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    )
    return state if sound else ""


def _id(size: int) -> str:
    while not (found := os.urandom(size).hex()).strip("0"):
        pass
    return found
