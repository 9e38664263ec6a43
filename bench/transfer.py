"""Goodput of a whole transfer (offer, plan, kernels, wire, digest on both sides, commit) against the raw bytes in the same run.

    python bench/transfer.py [--rounds N] [--tokens N] [--transport tcp|shm] [--only TEXT] [--set NAME=VALUE] [--json]
    python bench/transfer.py --overlap --model smollm2-135m --tokens 1500

Two processes on this host, as a prefill and a decode worker have them, without a model: 32 layers, 8 KV heads of 128 (Llama 3.1 8B), pages
in random order. `at once`: all layers of the prompt are ready together. `layers`: prompt chunks of --chunk tokens, layer by layer, each
announced as soon as the one before, as an engine does that is faster than the link.

Baselines carry the transfer's wire bytes, in turn with it; medians are shown, targets are of the socket:
    socket   one plain connection between the same two processes, 1 MiB a call from and into one contiguous buffer, one byte back at
             the end. With socket buffers of 256 KiB, as the tcp transport has within a host: faster here than the kernel's own sizes.
    memcpy   one numpy copyto between two warm buffers, one thread

`--overlap`: what is left after the last layer, of prefills that take some times as long as the whole transfer takes alone.
CPU is of both processes together. `TRANSPORTS` has one line per transport.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from os import getloadavg

import msgspec
import numpy as np
import structlog

from harness import cpu_of, print_table, write_json
from regauge.config import TransferConfig
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Layout, Rope
from regauge.move.crossing import Memory, PageTable, bind, slab_bytes
from regauge.move.inbound import InboundLinks
from regauge.move.memory import Slab
from regauge.move.outbound import OutboundLinks
from regauge.move.pages import PagePool
from regauge.move.rails import Rails
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Transport

MODELS = {
    "llama-3.1-8b": attention_model("llama-3.1-8b", 32, Array(8, 128), rope=Rope(5e5, 128)),
    "smollm2-135m": attention_model("smollm2-135m", 30, Array(3, 64), rope=Rope(1e5, 64)),
}
PAIRS = {
    "DIRECT bf16 16 NHD": ("bf16,page=16", "bf16,page=16", 0.85),
    "DIRECT bf16 64 HND": ("bf16,page=64,hnd", "bf16,page=64,hnd", 0.85),
    "REMAP  64 HND -> 16 NHD": ("bf16,page=64,hnd", "bf16,page=16,nhd", 0.75),
    "REMAP  64 NHD -> 16 NHD": ("bf16,page=64", "bf16,page=16", 0.75),
    "CONVERT bf16 -> fp8": ("bf16,page=16,nhd", "fp8_e4m3,page=64,hnd", 0.75),
    "CONVERT fp8 -> bf16": ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd", 0.75),
}
TRANSPORTS: dict[str, Callable[[bytes, str, TransferConfig], Transport]] = {
    "tcp": lambda key, name, config: TcpTransport(key=key, name=name, lanes=config.lanes),
    "shm": lambda key, name, _: ShmTransport(key=key, name=name),
}
MIB = 1 << 20
CALL = MIB
BUFFERS = 256 << 10
WARM = 1
FACTORS = (2, 4, 16)


def allocate(text: str, options: argparse.Namespace) -> Memory:
    """A pool of so many tokens and a few pages, filled with numbers that are finite in every type."""
    page = next(int(word[5:]) for word in text.split(",") if word.startswith("page="))
    layout: Layout = from_short(text, MODELS[options.model], pages=-(-options.tokens // page) + 3)
    slab = Slab(slab_bytes(layout), "kv")
    slab.array[:] = np.resize(np.random.default_rng(0).integers(0, 100, 1 << 20, dtype=np.uint8), slab.nbytes)
    return Memory(bind(layout, slab), slab)


def shuffled(memory: Memory) -> PagePool:
    """A pool whose free pages come in random order."""
    group = memory.layout.groups[0]
    pool = PagePool(group.pages, group.page_size)
    for i in range(group.pages):
        pool.lease(str(i), 1)
    for i in np.random.default_rng(1).permutation(group.pages):
        pool.release(str(i))
    return pool


@contextlib.contextmanager
def opened(options: argparse.Namespace, key: bytes, name: str, memory: Memory) -> Iterator[Transport]:
    with TRANSPORTS[options.transport](key, name, config(options)) as transport:
        transport.register(memory.slab)
        yield transport


# ---- decode ----


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFERS)


def receive_plain(server: socket.socket, slab: Slab) -> None:
    """The socket baseline's receiving side: an 8-byte length, then so many bytes into the slab."""
    sock = server.accept()[0]
    tune(sock)
    memory = memoryview(slab.array)  # type: ignore[arg-type]
    while head := sock.recv(8, socket.MSG_WAITALL):
        total, done = int.from_bytes(head, "little"), 0
        while done < total:
            at = done % slab.nbytes
            done += sock.recv_into(memory[at : at + min(CALL, total - done)], 0, socket.MSG_WAITALL)
        sock.sendall(b"!")


async def decode(options: argparse.Namespace, key: bytes) -> None:
    """The decode process: expect a transfer for every line of stdin."""
    memory = allocate(options.layout, options)
    with contextlib.closing(memory.slab), opened(options, key, "d", memory) as transport:
        pool = shuffled(memory)
        links = InboundLinks("d", key, memory, Rails([transport]), [pool], config(options))
        address = await links.start("127.0.0.1")
        server = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=receive_plain, args=(server, memory.slab), daemon=True).start()
        print(json.dumps({"control": address, "raw": server.getsockname()[1]}), flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            pool.lease(line, pool.pages_for(options.tokens))
            arrival = links.expect(line, ["p"], options.tokens)
            print("expected", flush=True)
            await arrival
            pool.release(line)
        await links.close()
        server.close()


def config(options: argparse.Namespace) -> TransferConfig:
    changes: dict[str, object] = {}
    for pair in options.set:
        name, value = pair.split("=")
        *outer, last = name.split(".")
        inner = changes
        for each in outer:
            inner = inner.setdefault(each, {})  # type: ignore[assignment]
        inner[last] = value
    return msgspec.convert(changes, TransferConfig, strict=False)


# ---- prefill ----


@dataclass
class Bench:
    """A prefill side, linked with a decode process."""

    links: OutboundLinks
    pool: PagePool
    memory: Memory
    process: subprocess.Popen[str]
    control: tuple[str, int]
    sock: socket.socket
    options: argparse.Namespace
    count: int = 0
    wire_bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    scratch: tuple[np.ndarray, np.ndarray] | None = None
    after: list[float] = field(default_factory=list)
    """Seconds from the last layer to the commit, transfer by transfer."""

    async def measure(self, name: str, start: Callable[[], AsyncIterator[None]]) -> None:
        """Time one contender: from its first `yield`, when it is prepared, to its end."""
        work = start()
        await anext(work)
        cpu, begun = self._cpu(), time.perf_counter()
        async for _ in work:
            pass
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        self.cpu.setdefault(name, []).append(self._cpu() - cpu)

    def _cpu(self) -> float:
        return time.process_time() + cpu_of(self.process.pid)

    async def transfer(self, chunk: int, prefill_s: float = 0.0) -> AsyncIterator[None]:
        """One request's KV, ready in chunks of so many tokens, layer by layer, evenly over a time; 0: at once."""
        self.count += 1
        name, tokens = f"t{self.count}", self.options.tokens
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "expected\n"
        pages = np.array(self.pool.lease(name, self.pool.pages_for(tokens)), np.int64)
        yield
        out = await self.links.start(
            name, {"d": self.control}, [PageTable(pages)], tokens, lambda: self.pool.release(name)
        )
        await out.wait_granted()
        layers = MODELS[self.options.model].num_layers
        if chunk == 0:
            out.ready((0, layers), (0, tokens))
        begun = time.perf_counter()
        steps = [(first, layer) for first in range(0, tokens, chunk) for layer in range(layers)] if chunk else []
        for i, (first, layer) in enumerate(steps):
            await asyncio.sleep(max(0.0, begun + (i + 1) / len(steps) * prefill_s - time.perf_counter()))
            out.ready((layer, layer + 1), (first, min(first + chunk, tokens)))
        last = time.perf_counter()
        out.finish(b"first token")
        self.wire_bytes = (await out.done()).wire_bytes
        self.after.append(time.perf_counter() - last)

    async def socket(self) -> AsyncIterator[None]:
        """The same bytes, as plain as can be."""
        yield
        await asyncio.to_thread(self._send)

    async def memcpy(self) -> AsyncIterator[None]:
        """The same bytes without leaving the process."""
        if self.scratch is None:
            self.scratch = np.ones(self.wire_bytes, np.uint8), np.ones(self.wire_bytes, np.uint8)
        yield
        np.copyto(*self.scratch)

    def _send(self) -> None:
        memory = memoryview(self.memory.slab.array)  # type: ignore[arg-type]
        self.sock.sendall(self.wire_bytes.to_bytes(8, "little"))
        done = 0
        while done < self.wire_bytes:
            at = done % (len(memory) // CALL * CALL)
            step = min(CALL, self.wire_bytes - done)
            self.sock.sendall(memory[at : at + step])
            done += step
        assert self.sock.recv(1) == b"!"


@contextlib.asynccontextmanager
async def linked(options: argparse.Namespace, source: str, target: str) -> AsyncIterator[Bench]:
    """Start a decode process and link with it."""
    key = secrets.token_bytes(32)
    command = [sys.executable, __file__, "--layout", target, "--key", key.hex(), "--transport", options.transport,
               "--tokens", str(options.tokens), "--model", options.model, *(word for pair in options.set for word in ("--set", pair))]  # fmt: skip
    memory = allocate(source, options)
    with (
        contextlib.closing(memory.slab),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,  # noqa: ASYNC220  # once, before
        opened(options, key, "p", memory) as transport,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        links = OutboundLinks("p", key, memory, Rails([transport]), config(options))
        with socket.create_connection(("127.0.0.1", said["raw"])) as sock:
            tune(sock)
            try:
                yield Bench(links, shuffled(memory), memory, process, tuple(said["control"]), sock, options)
            finally:
                await links.close()
                process.stdin.close()


async def case(options: argparse.Namespace, name: str) -> list[dict[str, object]]:
    source, target, goal = PAIRS[name]
    ways = {"at once": 0, f"layers of {options.chunk}": options.chunk}
    async with linked(options, source, target) as bench:
        for round_ in range(options.rounds + WARM):
            for way, chunk in ways.items():
                await bench.measure(way, functools.partial(bench.transfer, chunk))
            await bench.measure("socket", bench.socket)
            await bench.measure("memcpy", bench.memcpy)
            if round_ < WARM:
                bench.seconds.clear()
                bench.cpu.clear()
        mode = bench.links._links["d"].writer.modes[0]
        seconds = {each: statistics.median(times) for each, times in bench.seconds.items()}
        cpu = {each: statistics.median(times) / bench.wire_bytes * 2**30 for each, times in bench.cpu.items()}
        return [
            {
                "pair": name,
                "transport": options.transport,
                "mode": mode,
                "ready": way,
                "MiB": bench.wire_bytes >> 20,
                "GB/s": bench.wire_bytes / seconds[way] / 1e9,
                "socket GB/s": bench.wire_bytes / seconds["socket"] / 1e9,
                "of socket": seconds["socket"] / seconds[way],
                "of memcpy": seconds["memcpy"] / seconds[way],
                "CPU s/GiB": cpu[way],
                "socket CPU": cpu["socket"],
                "target": goal,
                "met": "yes" if seconds["socket"] / seconds[way] >= goal else "no",
            }
            for way in ways
        ]


async def overlap(options: argparse.Namespace, name: str) -> list[dict[str, object]]:
    """How much of a transfer is hidden behind a prefill that takes so many times as long as the transfer alone."""
    source, target, _ = PAIRS[name]
    async with linked(options, source, target) as bench:
        left: dict[int, list[float]] = {factor: [] for factor in FACTORS}
        for round_ in range(options.rounds + WARM):
            await bench.measure("alone", functools.partial(bench.transfer, 0))
            if round_ < WARM:
                bench.seconds.clear()
                continue
            alone = statistics.median(bench.seconds["alone"])
            for factor in FACTORS:
                await bench.measure("paced", functools.partial(bench.transfer, 256, factor * alone))
                left[factor].append(bench.after[-1])
        alone = statistics.median(bench.seconds["alone"])
        return [
            {
                "pair": name,
                "transport": options.transport,
                "tokens": options.tokens,
                "MiB": bench.wire_bytes >> 20,
                "alone ms": alone * 1e3,
                "prefill ms": factor * alone * 1e3,
                "after ms": statistics.median(left[factor]) * 1e3,
                "hidden %": 100 * (1 - statistics.median(left[factor]) / alone),
                "target": 90,
            }
            for factor in FACTORS
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of one prefill step")
    parser.add_argument("--transport", choices=TRANSPORTS, default=None, help="default: all")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="geometry")
    parser.add_argument("--overlap", action="store_true", help="instead: what a prefill hides, in steps of 256 tokens")
    parser.add_argument("--only", default="", help="run only pairs whose name contains this")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of [transfer], as mode=staged or flow.quantum_bytes=1000"
    )
    parser.add_argument("--json", action="store_true", help="also write bench/out/transfer.json")
    parser.add_argument("--layout", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30), logger_factory=structlog.PrintLoggerFactory(sys.stderr)
    )
    if options.layout:
        asyncio.run(decode(options, bytes.fromhex(options.key)))
        return
    rows: list[dict[str, object]] = []
    work = overlap if options.overlap else case
    for transport in [options.transport] if options.transport else TRANSPORTS:
        options.transport = transport
        mine = [row for name in PAIRS if options.only in name for row in asyncio.run(work(options, name))]
        print_table(mine)
        print(f"load {getloadavg()[0]:.1f}\n")
        rows += mine
    if options.json:
        print(write_json("overlap" if options.overlap else "transfer", rows))


if __name__ == "__main__":
    main()
