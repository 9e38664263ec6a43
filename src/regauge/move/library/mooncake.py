"""Mooncake's Transfer Engine in a carrier (wheel 0.3.13.post1; kvcache-ai/Mooncake, transfer_engine_py)."""

from __future__ import annotations

from pathlib import Path

from regauge.move.library import wire
from regauge.move.library.engine import Library, LibraryError

METADATA = "P2PHANDSHAKE"  # no metadata service: engines ask each other


class Engine(Library):
    """One TransferEngine, and at most one peer."""

    def open(self, request: wire.Open) -> None:
        """Start it. Raises LibraryError when it cannot do the protocol that was asked for: it would take TCP silently."""
        from mooncake.engine import TransferEngine

        self._engine, self._host, self._target = TransferEngine(), request.host, ""
        if self._engine.initialize(request.host, METADATA, request.protocol, ",".join(request.devices)) != 0:
            raise LibraryError(f"Mooncake does not start on {request.host} with {request.protocol!r}; see its log")
        if request.protocol == "rdma":
            topology = self._engine.get_local_topology()
            absent = [name for name in request.devices if f'"{name}"' not in topology]
            if absent or not _holds_rdma_device():
                raise LibraryError(f"Mooncake has not taken the RDMA devices {', '.join(absent or request.devices)}")

    def register(self, base: int, nbytes: int) -> None:
        """See Library."""
        if (code := self._engine.register_memory(base, nbytes)) != 0:
            raise LibraryError(f"Mooncake does not register {nbytes} bytes (code {code}); check the memlock limit")

    def forget(self, base: int, nbytes: int) -> None:
        """See Library."""
        if (code := self._engine.unregister_memory(base)) != 0:
            raise LibraryError(f"Mooncake does not unregister {nbytes} bytes (code {code})")

    def describe(self) -> bytes:
        """Return `host:port` of its handshake; the port of the data is asked for there."""
        return f"{self._host}:{self._engine.get_rpc_port()}".encode()

    def connect(self, address: bytes) -> None:
        """Note the address; the first write opens it."""
        self._target = address.decode("ascii", "replace")

    def write(self, pieces: memoryview) -> None:
        """One batch. Its result is -1 whatever the reason; the log on stderr says more."""
        numbers = pieces.tolist()
        local, remote, lengths = numbers[::3], numbers[1::3], numbers[2::3]
        if self._engine.batch_transfer_sync_write(self._target, local, remote, lengths) != 0:
            raise LibraryError(f"Mooncake did not write {len(local)} pieces to {self._target}; its log says why")


def _holds_rdma_device() -> bool:
    """Whether this process has an RDMA device open: what the library says of itself is no proof."""
    links = (str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return any(link.startswith("/dev/infiniband/uverbs") for link in links)
