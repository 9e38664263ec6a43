"""A transfer library as careless as the real ones, so that what is built around them is tested without them.

It writes wherever it is told by whoever comes, checks nothing, knows no time limit, and what was sent before it was given
up lands later. Its transport is `careless.CarelessTransport`; this module is what runs in the carriers.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading

from regauge.move.library import wire
from regauge.move.library.engine import Library, LibraryError

HEAD = struct.Struct("<qq")
BREAKS = "CARELESS_BREAKS"
"""A file whose presence makes writes fail, as libraries do now and then."""
HANGS = "CARELESS_HANGS"
"""A file whose presence makes registering memory take for ever."""


class Engine(Library):
    def open(self, request: wire.Open) -> None:
        self.server = socket.create_server((request.host, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def register(self, base: int, nbytes: int) -> None:  # noqa: ARG002  # any memory may be written anyway
        if present(HANGS):
            threading.Event().wait()

    def forget(self, base: int, nbytes: int) -> None: ...

    def describe(self) -> bytes:
        return ":".join(map(str, self.server.getsockname())).encode()

    def connect(self, address: bytes) -> None:
        host, port = address.decode().split(":")
        self.sock = socket.create_connection((host, int(port)))

    def write(self, pieces: memoryview) -> None:
        numbers = pieces.tolist()
        for local, remote, length in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
            self.sock.sendall(HEAD.pack(remote, length))
            self.sock.sendall(memory(local, length))
        self.sock.sendall(HEAD.pack(0, 0))
        if present(BREAKS):
            raise LibraryError("something is wrong (-1)")
        if not self.sock.recv(1):
            raise LibraryError("the connection has ended", lost=True)

    def _accept(self) -> None:
        while True:
            sock, _ = self.server.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        while head := sock.recv(HEAD.size, socket.MSG_WAITALL):
            address, length = HEAD.unpack(head)
            view = memory(address, length) if length else memoryview(b"")
            while view:
                got = sock.recv_into(view)
                if not got:
                    return
                view = view[got:]
            if not length:
                sock.sendall(b"!")


def present(name: str) -> bool:
    return os.path.exists(os.environ.get(name, ""))  # noqa: PTH110  # "" must not be "."


def memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")
