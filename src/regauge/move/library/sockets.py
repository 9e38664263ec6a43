"""Where a process listens, as the kernel says: the only way to know what a library has opened."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path

_LISTEN = "0A"  # TCP_LISTEN, include/net/tcp_states.h


def listening(pid: int) -> list[tuple[str, int]]:
    """Return (address, port) of every TCP socket on which the process listens, from /proc (Linux, proc(5))."""
    process = Path("/proc") / str(pid)
    inodes = set()
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            inodes.add(str(entry.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a host without IPv6
            for line in (process / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                    found.append(_parse(fields[1]))
    return sorted(found)


def _parse(text: str) -> tuple[str, int]:
    """Read `0100007F:1F90`: the address as 32-bit words in the host's order, the port as a number."""
    address, _, port = text.partition(":")
    words = bytes.fromhex(address)
    packed = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return str(ipaddress.ip_address(packed)), int(port, 16)
