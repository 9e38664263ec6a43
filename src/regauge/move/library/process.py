"""The carrier: a process that maps a worker's slabs and drives one library. `python -m regauge.move.library.process FD`.

It ends as soon as its worker's end of the socket pair is closed, also in the middle of a call into the library.
"""

from __future__ import annotations

import array
import ctypes
import importlib
import mmap
import os
import secrets
import select
import signal
import socket
import sys
import threading

import msgspec

from regauge.move.library import wire
from regauge.move.library.engine import Library, LibraryError

_LOWEST, _HIGHEST = 1 << 43, 1 << 46
_MADV_POPULATE_WRITE = 23
SCRATCH_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_at_random(fd: int, nbytes: int) -> int:
    """Map a descriptor, or anonymous memory for -1, at an address that nobody can guess; returns it. Raises OSError.

    Mooncake checks no more of a write than that its address is registered, and a port may serve another engine by the
    time a stale writer comes: the address is the only secret that such a write has to know.
    """
    hint = _LOWEST + secrets.randbelow((_HIGHEST - _LOWEST) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = _libc.mmap(hint, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if base in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _libc.madvise(base, nbytes, _MADV_POPULATE_WRITE)  # only a gift: the worker has faulted the pages in
    return int(base)


class Carrier:
    """Serves one worker's requests, in turn."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._scratch = 0

    def serve(self, request: wire.Request, fd: int) -> wire.Answer:
        """Do what was asked. Raises LibraryError or OSError."""
        if isinstance(request, wire.Open):
            module = importlib.import_module(request.library)
            library: Library = module.Engine()
            library.open(request)
            self._scratch = map_at_random(-1, SCRATCH_BYTES)
            library.register(self._scratch, SCRATCH_BYTES)
            self._library = library
            return wire.Answer()
        if self._library is None:
            raise LibraryError("the library has not been opened")
        return self._answer(self._library, request, fd)

    def _answer(self, library: Library, request: wire.Request, fd: int) -> wire.Answer:
        match request:
            case wire.Register(nbytes):
                base = map_at_random(fd, nbytes)
                try:
                    library.register(base, nbytes)
                except LibraryError:
                    _libc.munmap(base, nbytes)
                    raise
                return wire.Answer(value=base)
            case wire.Forget(base, nbytes):
                library.forget(base, nbytes)
                _libc.munmap(base, nbytes)
            case wire.Describe():
                return wire.Answer(value=self._scratch, data=library.describe())
            case wire.Connect(address, scratch):
                library.connect(address)
                library.write(memoryview(array.array("q", (self._scratch, scratch, 64))))
            case wire.Write(pieces):
                library.write(memoryview(pieces).cast("q"))
        return wire.Answer()


def _end_with(sock: socket.socket) -> None:
    """End this process when the worker closes its end, or dies."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve until the worker's end is closed."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to whole groups; the worker decides, and this ends with it
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(sock,), daemon=True).start()
    carrier, decoder = Carrier(), msgspec.msgpack.Decoder(wire.Request)
    while True:
        data, fds, _, _ = socket.recv_fds(sock, wire.MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            break
        try:
            answer = carrier.serve(decoder.decode(data), fds[0] if fds else -1)
        except (LibraryError, OSError, ImportError) as error:
            answer = wire.Answer(False, str(error) or type(error).__name__, getattr(error, "lost", False))
        for fd in fds:
            os.close(fd)
        out = msgspec.msgpack.encode(answer)
        if len(out) > wire.MAX_MESSAGE:
            reason = f"the library describes itself in {len(out)} bytes; register fewer, larger slabs"
            out = msgspec.msgpack.encode(wire.Answer(False, reason))
        sock.send(out)
    os._exit(0)  # destructors of libraries wait for peers, or crash


if __name__ == "__main__":
    main()
