"""NIXL's UCX backend in a carrier (wheel nixl-cu12 1.5.1; ai-dynamo/nixl, api/python/_api.py and nixl_bindings.cpp).

The bindings are used, not the wrapper over them: that fixes the progress thread's pause at 0, at which an idle agent takes
42 % of a core (measured; 0.1 % at PROGRESS_US, as the thread also wakes when something arrives).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from regauge.move.library import wire
from regauge.move.library.engine import Library, LibraryError

MODULES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
PAUSE_S = 50e-6
"""Between polls: NIXL tells an initiator nothing of itself. Without it both sides starve each other on busy cores (34 instead of
0.6 ms per 256 KiB)."""
LIMIT_S = 86_400.0
"""Of one write: the worker's deadline kills this process long before."""
PROGRESS_US = 100_000


class Engine(Library):
    """One agent, and at most one peer. What the peer sends of itself is its agent's metadata: bytes, never a pickle."""

    def open(self, request: wire.Open) -> None:
        """Start it. Raises LibraryError unless UCX is told which devices it may use: it would take all of them."""
        if not request.devices or os.environ.get("UCX_NET_DEVICES") != ",".join(request.devices):
            raise LibraryError("UCX_NET_DEVICES does not name the devices: UCX would use every network of this host")
        self._nixl = _load()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_US
        with self._named("start UCX"):
            self._agent, self._target = self._nixl.nixlAgent(os.urandom(8).hex(), config), ""
            self._backends = [self._agent.createBackend("UCX", {})]
        self._held: dict[int, Any] = {}

    def register(self, base: int, nbytes: int) -> None:
        """See Library."""
        with self._named(f"register {nbytes} bytes"):
            memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(base, nbytes, 0, "")])
            self._agent.registerMem(memory, self._backends)
            self._held[base] = memory

    def forget(self, base: int, nbytes: int) -> None:
        """See Library."""
        with self._named(f"unregister {nbytes} bytes"):
            self._agent.deregisterMem(self._held.pop(base), self._backends)

    def describe(self) -> bytes:
        """Return the agent's metadata: addresses, and the keys of what is registered now."""
        with self._named("describe its memory"):
            return bytes(self._agent.getLocalMD())

    def connect(self, address: bytes) -> None:
        """Take the peer's metadata; the first write connects."""
        with self._named("take the peer's metadata"):
            name = self._agent.loadRemoteMD(address)
        self._target = name.decode() if isinstance(name, bytes) else str(name)

    def write(self, pieces: memoryview) -> None:
        """One request, polled until it ends."""
        table = np.frombuffer(pieces, dtype=np.int64).reshape(-1, 3)
        with self._named(f"write {len(table)} pieces"):
            request = self._agent.createXferReq(
                self._nixl.NIXL_WRITE, self._list(table, 0), self._list(table, 1), self._target, b"", self._backends
            )
            try:
                state = self._agent.postXferReq(request, b"")
                limit = time.monotonic() + LIMIT_S
                while state == self._nixl.NIXL_IN_PROG and time.monotonic() < limit:
                    time.sleep(PAUSE_S)
                    state = self._agent.getXferStatus(request)
            finally:
                self._agent.releaseXferReq(request)
        if state != self._nixl.NIXL_SUCCESS:
            raise LibraryError(f"NIXL did not write {len(table)} pieces: {state}; its log says why")

    def _list(self, table: npt.NDArray[np.int64], side: int) -> Any:
        rows = np.zeros((len(table), 3), dtype=np.uint64)  # address, length, device
        rows[:, 0], rows[:, 1] = table[:, side], table[:, 2]
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, rows)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Turn NIXL's exceptions, which share no base, into one that says what was tried."""
        try:
            yield
        except self._nixl.nixlRemoteDisconnectError as error:
            raise LibraryError(f"NIXL could not {what}: the peer's engine is gone ({error})", lost=True) from error
        except _errors(self._nixl) as error:
            raise LibraryError(f"NIXL could not {what}: {type(error).__name__} {error}") from error


def _errors(module: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of the bindings: one for each status, without a base of their own."""
    return tuple(each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Exception))


def _load() -> Any:
    """Import whichever build is installed; the package `nixl` itself asks for torch and for both CUDA builds."""
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{name}._bindings")
    raise LibraryError("no build of NIXL is installed: pip install --no-deps nixl-cu12==1.5.1")
