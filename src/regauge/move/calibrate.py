"""Measures the constants of `plan.cost` on this machine, with the kernels and transports that move KV.

All figures are medians. Kernels work on pages at random places in buffers that exceed the caches; transports write into another
process on this host, so that `tcp` is a loopback figure: over a network, give the link's rate beside it. Memory that two
processes share and loopback say nothing of RDMA, whose constants stay those of the defaults.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from regauge.errors import TransportError
from regauge.layout.dtypes import DTYPES
from regauge.move import kernels
from regauge.move.memory import Slab
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Peer, Transport
from regauge.plan.boxes import pieces
from regauge.plan.cost import DEFAULTS, Constants, KernelConstants, Rate, TransportConstants
from regauge.plan.tiles import Convert, Int64, Tiles

Kind = Literal["shm", "tcp"]
Say = Callable[[str], None]

BUFFER = 64 << 20
HEADS, DIM, PAGE = 8, 128, 16
RUNS = (64, 256, 1024, 4096, 32768)
LARGE, SMALL, MANY = 32 << 20, 4096, 4096
_TIMEOUT_S = 60.0


def measure(*, threads: int = 1, rounds: int = 9, say: Say = lambda _: None) -> Constants:
    """Measure everything that can be measured on this machine. Takes some seconds; `say` is told what is under way."""
    say("kernels")
    found = _Kernels(threads, rounds).measure()
    transports = dict(DEFAULTS.transports)
    for kind in ("shm", "tcp"):
        say(f"transport {kind}")
        transports[kind] = _transport(kind, rounds)
    say("planner")
    machine = f"{os.cpu_count()} cores {platform.machine()}, kernels {kernels.isa()}, {threads} thread" + "s" * (
        threads > 1
    )
    source = f"regauge bench calibrate ({machine}); rdma from published figures"
    return Constants(source, _expand(rounds), found, transports)


def medians(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median wall-clock seconds of every case; cases take turns, so that a busy machine slows all alike."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, work in cases.items():
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t[1:]) for name, t in times.items()}


class _Kernels:
    """Boxes between two buffers, one of each kind that the model tells apart."""

    def __init__(self, threads: int, rounds: int) -> None:
        self._threads, self._rounds = threads, rounds
        self._rng = np.random.default_rng(0)
        values = self._rng.standard_normal(1 << 20, dtype=np.float32)
        self._bf16 = aligned(np.resize((values.view(np.uint32) >> 16).astype(np.uint16), BUFFER // 2).view(np.uint8))
        codes = self._rng.integers(0, 120, 1 << 20, dtype=np.uint8)  # finite e4m3fn codes
        self._codes = aligned(np.resize(codes, BUFFER))
        self._out = aligned(np.zeros(BUFFER, np.uint8))
        self._scales = np.ones(BUFFER // DIM, np.float32)

    def measure(self) -> KernelConstants:
        """Return the rates, bytes read plus written per second."""
        elements = BUFFER // 4  # half of a buffer of bf16: a target of any type fits
        copies = {2: (self._transpose(elements), 4 * elements), **{run: (self._runs(run), 2 * BUFFER) for run in RUNS}}
        convert = {
            name: (self._rows(*dtypes, elements, dynamic=name == "dynamic"),
                   elements * sum(DTYPES[x].itemsize for x in dtypes))
            for name, dtypes in {
                "narrow": ("bfloat16", "float8_e4m3fn"), "widen": ("float8_e4m3fn", "bfloat16"),
                "dynamic": ("bfloat16", "float8_e4m3fn"), "alike": ("float8_e4m3fn", "float8_e5m2"),
            }.items()
        }  # fmt: skip
        boxes = {**{str(run): case for run, case in copies.items()}, **convert}
        work: dict[str, Callable[[], object]] = {name: self._work(tiles) for name, (tiles, _) in boxes.items()}
        seconds = medians(work, self._rounds)
        rate = {name: nbytes / seconds[name] for name, (_, nbytes) in boxes.items()}
        return KernelConstants(
            copy=tuple(Rate(run, rate[str(run)]) for run in copies),
            threads=self._threads,
            **{name: rate[name] for name in convert},
        )

    def _work(self, tiles: Tiles) -> Callable[[], None]:
        return lambda: kernels.run([tiles], threads=self._threads)

    def _pages(self, base: int, page_bytes: int, count: int) -> Int64:
        order: Int64 = base + self._rng.permutation(count).astype(np.int64) * page_bytes
        return order

    def _runs(self, run: int) -> Tiles:
        """NHD to HND with heads of `run` bytes; runs of a page and more go one by one."""
        if run >= PAGE * DIM * 2:  # longer than a head of a page
            count = BUFFER // run
            return Tiles(self._pages(self._bf16.ctypes.data, run, count), self._pages(self._out.ctypes.data, run, count),
                         (), (), (), run)  # fmt: skip
        page = PAGE * HEADS * run
        src, dst = (self._pages(x.ctypes.data, page, BUFFER // page) for x in (self._bf16, self._out))
        return Tiles(src, dst, (PAGE, HEADS), (HEADS * run, run), (run, PAGE * run), run)

    def _transpose(self, elements: int) -> Tiles:
        """K that lies dim-major in its page, to NHD: elements of 2 bytes change places."""
        page = PAGE * HEADS * DIM * 2
        src, dst = (self._pages(x.ctypes.data, page, elements * 2 // page) for x in (self._bf16, self._out))
        row = HEADS * DIM * 2
        return Tiles(src, dst, (HEADS, PAGE, DIM), (DIM * PAGE * 2, 2, PAGE * 2), (DIM * 2, row, 2), 2)

    def _rows(self, src_dtype: str, dst_dtype: str, elements: int, *, dynamic: bool) -> Tiles:
        """NHD to HND with rows of one head converted."""
        a, b = DTYPES[src_dtype].itemsize, DTYPES[dst_dtype].itemsize
        count = elements // (PAGE * HEADS * DIM)
        source = self._bf16 if src_dtype == "bfloat16" else self._codes
        src = self._pages(source.ctypes.data, PAGE * HEADS * DIM * a, count)
        dst = self._pages(self._out.ctypes.data, PAGE * HEADS * DIM * b, count)
        scales = self._scales.ctypes.data + np.arange(count, dtype=np.int64) * (PAGE * HEADS * 4)
        convert = Convert(src_dtype, dst_dtype, a, b)
        if dynamic:
            convert = Convert(
                src_dtype, dst_dtype, a, b, dst_scale=scales, dst_scale_stride=(HEADS * 4, 4), dynamic=True
            )
        return Tiles(src, dst, (PAGE, HEADS), (HEADS * DIM * a, DIM * a), (DIM * b, PAGE * DIM * b), DIM, convert)


def aligned(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Copy to the start of an OS page, where pools and staging slabs begin."""
    room = np.empty(len(values) + 4096, np.uint8)
    at = -room.ctypes.data % 4096
    room[at : at + len(values)] = values
    return room[at : at + len(values)]


def _expand(rounds: int) -> float:
    """Seconds in which the planner makes one piece: boxes of one run each, at random places."""
    rng = np.random.default_rng(0)
    count = 1 << 16
    src, dst = (rng.permutation(count * 2)[:count].astype(np.int64) * SMALL * 2 for _ in range(2))
    tiles = Tiles(src, dst, (), (), (), SMALL)
    return medians({"expand": lambda: pieces([tiles])}, rounds)["expand"] / count


def _transport(kind: Kind, rounds: int) -> TransportConstants:
    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(Slab(LARGE, "calibrate"))
        exported = stack.enter_context(_receiver(kind, key))
        transport = stack.enter_context(_open(kind, key, "calibrate"))
        transport.register(source)
        peer = stack.enter_context(transport.connect(exported, _TIMEOUT_S))
        order = np.random.default_rng(0).permutation(MANY)
        many = np.column_stack((np.arange(MANY), order, np.ones(MANY, np.int64))) * SMALL
        cases = {"post": _one(SMALL), "one": _one(MANY * SMALL), "many": many, "large": _one(LARGE)}
        t = medians({name: _write(peer, source, list_) for name, list_ in cases.items()}, rounds)
        maps = transport.caps.maps_memory
    return TransportConstants(
        post_s=t["post"],
        piece_s=max(0.0, (t["many"] - t["one"]) / MANY),
        bytes_per_s=LARGE / max(t["large"] - t["post"], 1e-9),
        maps_memory=maps,
    )


def _one(nbytes: int) -> Int64:
    return np.array([[0, 0, nbytes]], np.int64)


def _write(peer: Peer, source: Slab, list_: Int64) -> Callable[[], None]:
    absolute = list_ + np.array((source.address, peer.regions[0].address, 0))

    def work() -> None:
        ticket = peer.post(absolute, _TIMEOUT_S)
        ticket.wait(_TIMEOUT_S + 5.0)
        ticket.check()

    return work


def _open(kind: Kind, key: bytes, name: str) -> Transport:
    return ShmTransport(key=key, name=name) if kind == "shm" else TcpTransport(key=key, name=name)


@contextlib.contextmanager
def _receiver(kind: Kind, key: bytes) -> Iterator[bytes]:
    """Start a process that offers a slab; yields what it exports. The key goes in through a pipe, not the command line."""
    command = [sys.executable, "-m", "regauge.move.calibrate", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # our own module
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018, S101  # both are pipes
        try:
            print(key.hex(), file=process.stdin, flush=True)
            line = process.stdout.readline().strip()
            if not line:
                raise TransportError(f"the receiving process of {kind} ended: its message is above")
            yield bytes.fromhex(line)
        finally:
            process.stdin.close()


def _receive(kind: Kind) -> None:
    key = bytes.fromhex(sys.stdin.readline())
    with Slab(LARGE, "target") as slab, _open(kind, key, "target") as transport:
        transport.register(slab)
        print(transport.export().hex(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _receive("shm" if sys.argv[1] == "shm" else "tcp")
