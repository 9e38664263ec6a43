"""What a transfer library is to its carrier. Apart from `process`, which is `__main__` where it runs."""

from __future__ import annotations

import abc

from regauge.move.library import wire


class LibraryError(Exception):
    """The library refused or failed; `lost` when it says that the peer is gone."""

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


class Library(abc.ABC):
    """One engine of a library. Calls may block: whoever is tired of waiting kills the process."""

    @abc.abstractmethod
    def open(self, request: wire.Open) -> None:
        """Start the engine, and make sure that it is what was asked for."""

    @abc.abstractmethod
    def register(self, base: int, nbytes: int) -> None:
        """Make memory reachable for peers."""

    @abc.abstractmethod
    def forget(self, base: int, nbytes: int) -> None:
        """Undo `register`."""

    @abc.abstractmethod
    def describe(self) -> bytes:
        """Return where peers reach this engine and its memory."""

    @abc.abstractmethod
    def connect(self, address: bytes) -> None:
        """Take what a peer's engine described; pieces go there from now on."""

    @abc.abstractmethod
    def write(self, pieces: memoryview) -> None:
        """Write pieces, int64[N * 3]; return once all of them are in the peer's memory. Raises LibraryError."""
