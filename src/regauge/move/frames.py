"""Frames of the tcp transport, and vectored socket calls over raw addresses.

All integers are little-endian.

    frame:  "RGF2", piece count u32, ticket u64, generation u64, grant u64, payload bytes u64             40 bytes
            table int64[count, 2]: address at the receiver, length in bytes
            payload: the pieces' bytes, back to back
    ack:    "RGA1", status u16, reason bytes u16, ticket u64, payload bytes u64                           24 bytes
            reason, UTF-8

Python's own `sendmsg` and `recvmsg_into` want one buffer object per piece, which costs more than moving 4 KiB; here
the list of addresses is a numpy array that the kernel reads as it is.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.errors import ProtocolError
from regauge.move.pieces import Int64s, Region

MAX_PIECES = 1000
"""Pieces of a frame: with the header, one call's worth of buffers (IOV_MAX is 1024)."""
MAX_PAYLOAD = 16 << 20
"""Bytes of a frame's payload; a refused frame is drained, so it bounds what a bad sender costs."""
MAX_REASON = 1024

LANDED, REFUSED, MALFORMED = 0, 1, 2

_FRAME = struct.Struct("<4sIQQQQ")
_ACK = struct.Struct("<4sHHQQ")
_FRAME_MAGIC, _ACK_MAGIC = b"RGF2", b"RGA1"
HEADER_BYTES = _FRAME.size


@dataclass(frozen=True)
class Header:
    """A frame's header, checked for sense but not yet against any region."""

    ticket: int
    generation: int
    grant: int
    count: int
    payload: int


@dataclass(frozen=True)
class Ack:
    """The receiver's word on one frame."""

    ticket: int
    status: int
    payload: int
    reason: str


def encode_head(ticket: int, generation: int, pieces: Int64s, payload: int, grant: int = 0) -> npt.NDArray[np.uint8]:
    """Return header and table of a frame for pieces int64[N, 3] (local address, remote address, length)."""
    head = np.empty(HEADER_BYTES + 16 * len(pieces), dtype=np.uint8)
    _FRAME.pack_into(head.data, 0, _FRAME_MAGIC, len(pieces), ticket, generation, grant, payload)
    head[HEADER_BYTES:].view("<i8").reshape(-1, 2)[:] = pieces[:, 1:]
    return head


def decode_header(data: bytes | memoryview) -> Header:
    """Read a header of HEADER_BYTES bytes. Raises ProtocolError."""
    magic, count, ticket, generation, grant, payload = _FRAME.unpack(data)
    if magic != _FRAME_MAGIC:
        raise ProtocolError("what arrived is not a frame (wrong magic)")
    if not 1 <= count <= MAX_PIECES or not count <= payload <= MAX_PAYLOAD:
        raise ProtocolError(f"a frame of {count} pieces and {payload} bytes; at most {MAX_PIECES}, {MAX_PAYLOAD}")
    return Header(ticket, generation, grant, count, payload)


def decode_table(header: Header, data: npt.NDArray[np.uint8]) -> Int64s:
    """Read a frame's table, uint8[16 * count], as int64[count, 2]. Raises ProtocolError unless lengths add up."""
    table: Int64s = data.view("<i8").reshape(-1, 2).astype(np.int64, copy=False)
    lengths = table[:, 1]
    # Each is at most the payload, which is small: the sum cannot overflow.
    if lengths.min() < 1 or lengths.max() > header.payload or int(lengths.sum()) != header.payload:
        raise ProtocolError(f"a frame's lengths do not add up to its {header.payload} bytes")
    return table


def refusal(table: Int64s, region: Region | None, generation: int) -> str:
    """Return why a table int64[N, 2] may not land in `region`, or an empty string. Overflow-safe."""
    if region is None:
        return f"generation {generation} is over: the slab was unregistered or registered again; connect anew"
    offsets = table[:, 0] - np.int64(region.address)
    wild = (table[:, 0] < region.address) | (offsets > region.nbytes - table[:, 1])
    if not wild.any():
        return ""
    first = int(np.flatnonzero(wild)[0])
    return (
        f"piece {first}: {table[first, 1]} bytes at {table[first, 0]:#x} are not inside region {region.name!r} "
        f"({region.nbytes} bytes at {region.address:#x})"
    )


def encode_ack(ticket: int, status: int, payload: int, reason: str = "") -> bytes:
    """Return an acknowledgement."""
    text = reason.encode()[:MAX_REASON]
    return _ACK.pack(_ACK_MAGIC, status, len(text), ticket, payload) + text


class AckReader:
    """Cuts a stream of bytes into acknowledgements; never holds more than one unfinished one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Ack]:
        """Take bytes; return the acknowledgements that are whole by now. Raises ProtocolError."""
        buffer, at, acks = self._rest + data, 0, []
        while len(buffer) - at >= _ACK.size:
            magic, status, length, ticket, payload = _ACK.unpack_from(buffer, at)
            if magic != _ACK_MAGIC or length > MAX_REASON or status > MALFORMED:
                raise ProtocolError("what arrived is not an acknowledgement")
            end = at + _ACK.size + length
            if end > len(buffer):
                break
            acks.append(Ack(ticket, status, payload, buffer[at + _ACK.size : end].decode(errors="replace")))
            at = end
        self._rest = buffer[at:]
        return acks


class _MsgHdr(ctypes.Structure):
    """struct msghdr, recvmsg(2)."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    _call.restype = ctypes.c_ssize_t


def send_vector(fd: int, vector: Int64s) -> None:
    """Send the bytes at int64[N, 2] (address, length), N <= 1024, over a blocking socket. Raises OSError.

    The addresses are trusted: the caller has checked them and keeps the memory mapped. `vector` is used up.
    """
    _move(_libc.sendmsg, fd, vector, socket.MSG_NOSIGNAL)


def recv_vector(fd: int, vector: Int64s) -> None:
    """Receive into int64[N, 2] (address, length), N <= 1024, until all is full. As `send_vector`; OSError at the end."""
    _move(_libc.recvmsg, fd, vector, socket.MSG_WAITALL)


def _move(call: ctypes._NamedFuncPointer, fd: int, vector: Int64s, flags: int) -> None:
    ends = np.cumsum(vector[:, 1])
    total, done, first = int(ends[-1]), 0, 0
    header = _MsgHdr()
    while True:
        header.iov = vector.ctypes.data + 16 * first
        header.iovlen = len(vector) - first
        moved = call(fd, ctypes.byref(header), flags)
        if moved <= 0:
            code = ctypes.get_errno() if moved < 0 else 104  # nothing more comes: as ECONNRESET
            if code == 4:  # EINTR
                continue
            raise OSError(code, os.strerror(code))
        done += moved
        if done == total:
            return
        first = int(np.searchsorted(ends, done, side="right"))
        left = int(ends[first]) - done
        vector[first] = (vector[first, 0] + vector[first, 1] - left, left)
