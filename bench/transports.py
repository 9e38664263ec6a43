"""How fast the transports move pages: GB/s, ratio to a baseline in the same run, CPU seconds per GiB.

    python bench/transports.py [--rounds N] [--json]

The receiver is a process of its own, on this host: the tcp transport uses its small local buffers. Pieces go from consecutive to permuted slots, so that nothing can be merged.
Every contender moves the same bytes, in turn, N times; the medians are shown. CPU time is of both processes together.
"tcp x4" is tcp with four lanes, "tls" with mutual TLS 1.3 (certificates are made with `openssl` for the run).

Mooncake and NIXL take part where they are installed (`make test-transports` installs them): over tcp, each side with its
carrier process, whose CPU time counts.

Baselines:
    memcpy   one numpy copyto of the same bytes between warm private buffers in one process (no permutation)
    socket   one plain Python TCP connection: table of pieces up front, then sendmsg and recvmsg_into of 64 buffers a
             call, one byte back at the end; TCP_NODELAY, the kernel's own buffer sizes
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from harness import cpu_of, print_table, write_json
from regauge.config import NixlConfig, TlsConfig, TransferConfig
from regauge.move.calibrate import medians
from regauge.move.library.peer import LibraryPeer
from regauge.move.memory import Slab
from regauge.move.transport import Peer, Transport
from regauge.move.transports import open_transport

MIB = 1 << 20
SLAB_BYTES = 128 * MIB
CASES = (("1 x 128 MiB", 1, 128 * MIB), ("512 x 256 KiB", 512, MIB // 4), ("1024 x 64 KiB", 1024, MIB // 16),
         ("1024 x 4 KiB", 1024, 4096))  # fmt: skip
BATCH = 64
HEAD = struct.Struct("<q")
LIBRARIES = {"mooncake": "mooncake", "nixl": "nixl_cu12"}
TARGETS = {"shm": 0.9, "tcp": 0.9}

Int64s = npt.NDArray[np.int64]


def receive(kind: str, key: bytes, tls: Path) -> None:
    """The receiving process: say where it is, then serve until stdin ends."""
    with Slab(SLAB_BYTES, "target") as slab:
        if kind == "socket":
            with socket.create_server(("127.0.0.1", 0)) as server:
                print(server.getsockname()[1], flush=True)
                receive_plain(server.accept()[0], slab)
            return
        with open_one(kind, key, tls) as transport:
            transport.register(slab)
            print(transport.export().hex(), flush=True)
            sys.stdin.read()


def open_one(kind: str, key: bytes, tls: Path) -> Transport:
    files = TlsConfig(*(str(tls / name) for name in ("worker.pem", "worker.key", "authority.pem")))
    config = msgspec.convert({"transport": "tcp" if kind in ("tls", "tcp x4") else kind}, TransferConfig)
    config = msgspec.structs.replace(
        config,
        nixl=NixlConfig(devices=["lo"]),
        lanes=4 if kind == "tcp x4" else 1,
        tls=files if kind == "tls" else None,
    )
    return open_transport(config, key=key, name=kind, grants=False)


def kinds() -> list[str]:
    """The transports to compare: ours, and the libraries that are installed."""
    return [
        "shm",
        "tcp",
        "tcp x4",
        "tls",
        *(kind for kind, module in LIBRARIES.items() if importlib.util.find_spec(module)),
    ]


def carriers(process: int, peer: Peer) -> list[int]:
    """The processes in which a library runs, on both sides."""
    if not isinstance(peer, LibraryPeer):
        return []
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [peer.carrier.pid, *(int(pid) for each in lists for pid in each.read_text(encoding="ascii").split())]


def make_certificates(folder: Path) -> None:
    """As docs/security.md says."""
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "9"]
    authority = ["-keyout", f"{folder}/authority.key", "-out", f"{folder}/authority.pem", "-subj", "/CN=authority"]
    signed = ["-CA", f"{folder}/authority.pem", "-CAkey", f"{folder}/authority.key", "-subj", "/CN=worker"]
    leaf = ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*new, *authority], check=True, capture_output=True)
    files = ["-keyout", f"{folder}/worker.key", "-out", f"{folder}/worker.pem"]
    subprocess.run([*new, *signed, *leaf, *files], check=True, capture_output=True)


def receive_plain(sock: socket.socket, slab: Slab) -> None:
    """The socket baseline's receiving side."""
    memory = memoryview(slab.array)  # type: ignore[arg-type]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while head := sock.recv(HEAD.size, socket.MSG_WAITALL):
        (count,) = HEAD.unpack(head)
        table = np.frombuffer(sock.recv(16 * count, socket.MSG_WAITALL), dtype=np.int64).reshape(-1, 2).tolist()
        for at in range(0, count, BATCH):
            views = [memory[start : start + length] for start, length in table[at : at + BATCH]]
            while views:
                views = advance(views, sock.recvmsg_into(views)[0])
        sock.sendall(b"!")


def advance(views: list[memoryview], moved: int) -> list[memoryview]:
    """Drop `moved` bytes from the front."""
    for i, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[i + 1 :]]
        moved -= len(view)
    return []


def send_plain(sock: socket.socket, memory: memoryview, rows: list[list[int]], table: bytes) -> None:
    """The socket baseline's sending side; rows of (start here, start there, length)."""
    sock.sendall(HEAD.pack(len(rows)) + table)
    for at in range(0, len(rows), BATCH):
        views = [memory[start : start + length] for start, _, length in rows[at : at + BATCH]]
        while views:
            views = advance(views, sock.sendmsg(views))
    assert sock.recv(1) == b"!"


@dataclass
class Contender:
    """One way to move the bytes, and what it cost."""

    move: Callable[[Int64s], None]
    pids: list[int] = field(default_factory=list)
    """Processes beside this one that take part."""
    cpu: list[float] = field(default_factory=list)

    def work(self, offsets: Int64s) -> Callable[[], None]:
        """Return the measured action."""

        def run() -> None:
            before = self._cpu()
            self.move(offsets)
            self.cpu.append(self._cpu() - before)

        return run

    def _cpu(self) -> float:
        return time.process_time() + sum(map(cpu_of, self.pids))


@contextlib.contextmanager
def receiver(kind: str, key: bytes, tls: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a receiving process; yields it and its address."""
    command = [sys.executable, __file__, "--receiver", kind, "--key", key.hex(), "--tls", str(tls)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.stdin.close()


def through_transport(peer: Peer, source: Slab) -> Callable[[Int64s], None]:
    base = peer.regions[0].address

    def move(offsets: Int64s) -> None:
        ticket = peer.post(offsets + np.array((source.address, base, 0)), 60)
        assert ticket.wait(60)
        ticket.check()

    return move


def through_socket(sock: socket.socket, source: Slab) -> Callable[[Int64s], None]:
    memory = memoryview(source.array)  # type: ignore[arg-type]

    def move(offsets: Int64s) -> None:
        send_plain(sock, memory, offsets.tolist(), np.ascontiguousarray(offsets[:, 1:]).tobytes())

    return move


def by_memcpy() -> Callable[[Int64s], None]:
    here, there = np.ones(SLAB_BYTES, dtype=np.uint8), np.ones(SLAB_BYTES, dtype=np.uint8)

    def move(offsets: Int64s) -> None:
        nbytes = int(offsets[:, 2].sum())
        np.copyto(there[:nbytes], here[:nbytes])

    return move


def slots(count: int, size: int) -> Int64s:
    """Pieces int64[count, 3]: (offset here, offset there, length), targets permuted."""
    order = np.random.default_rng(count).permutation(count)
    return np.column_stack((np.arange(count), order, np.ones(count))).astype(np.int64) * size


def measure(rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Slab(SLAB_BYTES, "source"))
        source.array[:] = np.random.default_rng(0).integers(0, 256, SLAB_BYTES, dtype=np.uint8)
        contenders = {"memcpy": Contender(by_memcpy())}
        tls = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_certificates(tls)
        for kind in kinds():
            process, address = stack.enter_context(receiver(kind, key, tls))
            transport = stack.enter_context(open_one(kind, key, tls))
            transport.register(source)
            peer = stack.enter_context(transport.connect(bytes.fromhex(address), 30))
            contenders[kind] = Contender(through_transport(peer, source), [process.pid, *carriers(process.pid, peer)])
        process, address = stack.enter_context(receiver("socket", key, tls))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", int(address))))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        contenders["socket"] = Contender(through_socket(sock, source), [process.pid])
        for label, count, size in CASES:
            offsets = slots(count, size)
            for each in contenders.values():
                each.cpu.clear()
            times = medians({name: each.work(offsets) for name, each in contenders.items()}, rounds)
            for name, each in contenders.items():
                rows.append(row(label, name, count * size, times, statistics.median(each.cpu)))
    return rows


def row(label: str, name: str, nbytes: int, times: dict[str, float], cpu: float) -> dict[str, object]:
    baseline = "memcpy" if name in ("memcpy", "shm") else "socket"
    ratio, target = times[baseline] / times[name], TARGETS.get(name)
    return {
        "pieces": label,
        "transport": name,
        "GB/s": nbytes / times[name] / 1e9,
        "of": baseline,
        "ratio": ratio,
        "CPU s/GiB": cpu / nbytes * 2**30,
        "target": "" if target is None else f"{target:.2f}",
        "met": "" if target is None else ("yes" if ratio >= target else "no"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="also write bench/out/transports.json")
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    parser.add_argument("--tls", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receiver:
        receive(options.receiver, bytes.fromhex(options.key), options.tls)
        return
    rows = measure(options.rounds)
    print_table(rows)
    if options.json:
        print(write_json("transports", rows))


if __name__ == "__main__":
    main()
