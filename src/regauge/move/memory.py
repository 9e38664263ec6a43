"""Slabs: the host memory that transports move bytes between.

A slab is one anonymous shared segment (`memfd_create`), so that a process on the same host can map it from its
file descriptor, and nothing is left behind when its owner is killed: no name in any file system refers to it.
Register few, large slabs; pages are offsets in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from regauge.errors import TransportError

_MADV_POPULATE_WRITE = 23  # Linux 5.14, madvise(2); absent from Python's mmap module
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Slab:
    """One shared, pre-faulted segment of host memory.

    `nbytes` is rounded up to whole OS pages. Raises TransportError when the memory is not to be had, and
    ValueError for a size below one byte.

    The slab must be closed (it is a context manager). Views of `array` that outlive `close()` stay valid: the
    mapping goes with the last of them. The size is sealed, so that no process that maps the slab can be made to
    fault by truncation.
    """

    def __init__(self, nbytes: int, name: str = "slab") -> None:
        self._map: mmap.mmap | None = None
        self._array: npt.NDArray[np.uint8] | None = None
        self._fd = -1
        if nbytes < 1:
            raise ValueError(f"slab {name!r}: a size of {nbytes} bytes; at least one is needed")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        available = available_bytes()
        if size > available:
            raise TransportError(
                f"slab {name!r}: {size} bytes asked for, {available} available on this host; "
                "make the pool or the staging slab smaller"
            )
        try:
            fd = os.memfd_create(f"regauge:{name[:200]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (OSError, ValueError) as error:
            raise TransportError(f"slab {name!r}: cannot make a memory segment: {error}") from error
        try:
            # Reserving first turns "no memory" into an error here; a later first touch would be a SIGBUS.
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self._adopt(fd, size, name)
        except OSError as error:
            os.close(fd)
            raise TransportError(
                f"slab {name!r}: cannot allocate {size} bytes: {error.strerror}; "
                "make the pool or the staging slab smaller, or raise the memory limit"
            ) from error

    def _adopt(self, fd: int, nbytes: int, name: str) -> None:
        """Map and pre-fault `fd`, which belongs to this slab from here on. Raises OSError; `fd` is then untouched."""
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        array = np.frombuffer(mapping, dtype=np.uint8)
        self._address = int(array.ctypes.data)
        with contextlib.suppress(OSError):  # huge pages are a gift: many kernels have them off for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
        _populate(self._address, nbytes, array)
        self._map, self._array, self._fd, self._nbytes, self._name = mapping, array, fd, nbytes, name

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""
        return self._address

    @property
    def nbytes(self) -> int:
        """Size in bytes: a multiple of the OS page."""
        return self._nbytes

    @property
    def name(self) -> str:
        """The name it was made with."""
        return self._name

    @property
    def fd(self) -> int:
        """File descriptor of the segment (close-on-exec). Raises TransportError once closed."""
        if self._fd < 0:
            raise TransportError(f"slab {self._name!r} is closed")
        return self._fd

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8[nbytes], writable. Raises TransportError once closed."""
        if self._array is None:
            raise TransportError(f"slab {self._name!r} is closed")
        return self._array

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._array is None

    def close(self) -> None:
        """Give the memory back; idempotent. While views of `array` live, the mapping waits for the last of them."""
        fd, self._fd = self._fd, -1
        mapping, self._map, self._array = self._map, None, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # someone holds a view: the mapping goes with it
                mapping.close()
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<Slab {self._name!r} {self._nbytes} bytes at {self._address:#x}{state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        if self._fd >= 0:
            _warn(f"slab {self._name!r} was never closed", ResourceWarning, source=self)
            self.close()


def attach(fd: int, nbytes: int, name: str = "attached") -> Slab:
    """Map a slab of another process from its descriptor, pre-faulted. The caller keeps `fd` and may close it.

    Raises TransportError when `fd` is not a sealed segment of at least `nbytes` (a segment that its owner could
    still shrink would let the owner crash this process), or cannot be mapped.
    """
    try:
        size = os.fstat(fd).st_size
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransportError(f"cannot attach slab {name!r}: not a memory segment: {error.strerror}") from error
    if nbytes < 1 or nbytes % mmap.PAGESIZE or size < nbytes or not seals & fcntl.F_SEAL_SHRINK:
        raise TransportError(
            f"cannot attach slab {name!r}: {nbytes} bytes asked for; the segment has {size} and seals {seals:#x}"
        )
    own = os.dup(fd)
    slab = Slab.__new__(Slab)
    slab._map, slab._array, slab._fd = None, None, -1
    try:
        slab._adopt(own, nbytes, name)
    except OSError as error:
        os.close(own)
        raise TransportError(f"cannot map {nbytes} bytes of slab {name!r}: {error.strerror}") from error
    return slab


def available_bytes() -> int:
    """Return the bytes that may still be allocated: the host's MemAvailable and the cgroup v2 limit, whichever is less."""
    available = 1 << 62
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, StopIteration, ValueError):  # no cgroup v2, or "max"
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = Path("/sys/fs/cgroup") / next(x[4:] for x in lines if x.startswith("0::/"))
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        available = min(available, max(0, limit - used))
    return available


def _populate(address: int, nbytes: int, array: npt.NDArray[np.uint8]) -> None:
    """Fault every page in for writing: a first touch during a transfer costs ten times the copy. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL during the call, which Python's own madvise does not
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code == 22:  # EINVAL: a kernel before 5.14; the blocks are reserved, so touching them is safe
        array[:: mmap.PAGESIZE] |= 0
        return
    raise OSError(code, os.strerror(code))
