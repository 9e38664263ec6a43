"""Writes to sockets, gathered until the event loop has done what it was at.

A write to a process that sleeps wakes it, which costs the writer more than the rest of a write; to one that is awake already it costs a sixth.
So what several requests have to say in one turn of the loop is said in a row at its end. An idle loop waits for nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


class Outbox:
    """For one event loop."""

    def __init__(self) -> None:
        self._full: list[Gathered] = []

    def add(self, transport: Gathered) -> None:
        """Have a transport flushed at the end of this turn."""
        if not self._full:
            asyncio.get_running_loop().call_soon(self._flush)
        self._full.append(transport)

    def _flush(self) -> None:
        full, self._full = self._full, []
        for each in full:
            each.flush()


class Gathered(asyncio.Transport):
    """A transport whose writes go out together; all else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, outbox: Outbox) -> None:
        super().__init__()
        self._transport = transport
        self._outbox = outbox
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write at the end of this turn of the loop."""
        if not self._parts:
            self._outbox.add(self)
        self._parts.append(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        """As `write`."""
        self.write(b"".join(list_of_data))

    def flush(self) -> None:
        """Write now."""
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        """Write what there is, and close."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._parts = []
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it closes, or is closed."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that are not with the system yet."""
        return self._transport.get_write_buffer_size() + sum(map(len, self._parts))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As the transport has it."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """As the transport has it."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """As the transport has it."""
        self._transport.resume_reading()

    def is_reading(self) -> bool:
        """As the transport has it."""
        return self._transport.is_reading()
