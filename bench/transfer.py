"""Goodput of a whole transfer (offer, plan, kernels, wire, digest on both sides, commit) against the raw bytes in the same run.

    python bench/transfer.py [--rounds N] [--tokens N] [--transport tcp|shm] [--only TEXT] [--set NAME=VALUE] [--json]
    python bench/transfer.py --pages [--rounds N] [--tokens N]

Two processes on this host, as a prefill and a decode worker have them, without a model: 32 layers, 8 KV heads of 128 (Llama 3.1 8B), pages
in random order. `at once`: all layers of the prompt are ready together. `layers`: prompt chunks of --chunk tokens, layer by layer, each
announced as soon as the one before, as an engine does that is faster than the link. Transports are the product's own: over tcp the receiver
checks a grant for every piece.

`--pages`: pages of 4 to 256 KiB over every transport that is installed, Mooncake and NIXL too (`make test-transports` installs them), in turn
within each round, at once, without a conversion and without staging: what is compared is pieces of a page's size. Over tcp, theirs too.

Baselines carry the transfer's wire bytes, in turn with it; medians are shown, targets are of the socket:
    socket   one plain connection between the same two processes, 1 MiB a call from and into one contiguous buffer, one byte back at
             the end. With socket buffers of 256 KiB, as the tcp transport has within a host: faster here than the kernel's own sizes.
    memcpy   one numpy copyto between two warm buffers, one thread

CPU is of both processes together, with those in which a library runs. What a prefill hides of a transfer: `overlap.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib.util
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
from os import getloadavg, getpid
from pathlib import Path

import msgspec
import numpy as np
import structlog

from harness import cpu_of, print_table, write_json
from regauge.config import TransferConfig
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Layout, Rope
from regauge.move.bound import Memory, bind, slab_bytes
from regauge.move.crossing import PageTable
from regauge.move.inbound import InboundLinks
from regauge.move.memory import Slab
from regauge.move.outbound import OutboundLinks
from regauge.move.outgoing import Outgoing
from regauge.move.pages import PagePool
from regauge.move.rails import Rails
from regauge.move.transports import open_rails

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
TRANSPORTS = ("tcp", "shm", "mooncake", "nixl")
OURS = TRANSPORTS[:2]
LIBRARIES = {"mooncake": "mooncake", "nixl": "nixl_cu12"}
PAGES = (2, 8, 32, 128)
"""Tokens of a page: 2 KiB a token for K or V of a layer."""
MIB = 1 << 20
CALL = MIB
BUFFERS = 256 << 10
WARM = 1


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
def opened(options: argparse.Namespace, key: bytes, name: str, memory: Memory) -> Iterator[Rails]:
    with open_rails(config(options), key=key, name=name) as rails:
        rails.register(memory.slab)
        yield rails


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
    with contextlib.closing(memory.slab), opened(options, key, "d", memory) as rails:
        pool = shuffled(memory)
        links = InboundLinks("d", key, memory, rails, [pool], config(options))
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
    changes: dict[str, object] = {"transport": options.transport, "nixl": {"devices": ["lo"]}}
    for pair in options.set:
        name, value = pair.split("=")
        *outer, last = name.split(".")
        inner = changes
        for each in outer:
            inner = inner.setdefault(each, {})  # type: ignore[assignment]
        inner[last] = value
    return msgspec.convert(changes, TransferConfig, strict=False)


# ---- prefill ----


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(each) for path in lists for each in path.read_text(encoding="ascii").split()]
    return children + [below for child in children for below in descendants(child)]


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
    processes: tuple[int, ...] = ()
    """Those that take part beside this one, once the link stands."""
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
        return time.process_time() + sum(map(cpu_of, self.processes))

    async def begin(self) -> tuple[Outgoing, PageTable]:
        """Offer a request's KV, which the decode side expects; return it once granted, with the pages that it is read from."""
        self.count += 1
        name, tokens = f"t{self.count}", self.options.tokens
        pages = PageTable(np.array(self.pool.lease(name, self.pool.pages_for(tokens)), np.int64))
        out = await self.links.start(name, {"d": self.control}, [pages], tokens, lambda: self.pool.release(name))
        await out.wait_granted()
        return out, pages

    def expect(self) -> None:
        """Have the decode side expect the next request."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"t{self.count + 1}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "expected\n"

    async def transfer(self, chunk: int, prefill_s: float = 0.0) -> AsyncIterator[None]:
        """One request's KV, ready in chunks of so many tokens, layer by layer, evenly over a time; 0: at once."""
        self.expect()
        yield
        out, _ = await self.begin()
        layers, tokens = MODELS[self.options.model].num_layers, self.options.tokens
        if chunk == 0:
            out.ready((0, layers), (0, tokens))
        begun = time.perf_counter()
        steps = [(first, layer) for first in range(0, tokens, chunk) for layer in range(layers)] if chunk else []
        for i, (first, layer) in enumerate(steps):
            await asyncio.sleep(max(0.0, begun + (i + 1) / len(steps) * prefill_s - time.perf_counter()))
            out.ready((layer, layer + 1), (first, min(first + chunk, tokens)))
        await self.end(out)

    async def end(self, out: Outgoing) -> float:
        """Everything is ready: return the seconds to the commit."""
        begun = time.perf_counter()
        out.finish(b"first token")
        self.wire_bytes = (await out.done()).wire_bytes
        self.after.append(time.perf_counter() - begun)
        if not self.processes:
            self.processes = tuple(descendants(getpid()))
        return self.after[-1]

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
        opened(options, key, "p", memory) as rails,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        links = OutboundLinks("p", key, memory, rails, config(options))
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


def installed() -> list[str]:
    return [each for each in TRANSPORTS if each in OURS or importlib.util.find_spec(LIBRARIES[each])]


async def by_pages(options: argparse.Namespace, page: int) -> list[dict[str, object]]:
    """Pages of one size over every transport, in turn."""
    layout = f"bf16,page={page}"
    async with contextlib.AsyncExitStack() as stack:
        benches: dict[str, Bench] = {}
        for transport in installed():
            own = argparse.Namespace(**{**vars(options), "transport": transport})
            own.set = ["mode=fused" if transport == "shm" else "mode=mapped", *options.set]
            benches[transport] = await stack.enter_async_context(linked(own, layout, layout))
        for round_ in range(options.rounds + WARM):
            for bench in benches.values():
                await bench.measure("transfer", functools.partial(bench.transfer, 0))
                await bench.measure("socket", bench.socket)
                if round_ < WARM:
                    bench.seconds.clear()
                    bench.cpu.clear()
        return [page_row(page, transport, bench) for transport, bench in benches.items()]


def page_row(page: int, transport: str, bench: Bench) -> dict[str, object]:
    seconds = {each: statistics.median(times) for each, times in bench.seconds.items()}
    return {
        "page KiB": page * 2,
        "transport": transport,
        "MiB": bench.wire_bytes >> 20,
        "GB/s": bench.wire_bytes / seconds["transfer"] / 1e9,
        "socket GB/s": bench.wire_bytes / seconds["socket"] / 1e9,
        "of socket": seconds["socket"] / seconds["transfer"],
        "CPU s/GiB": statistics.median(bench.cpu["transfer"]) / bench.wire_bytes * 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of one prefill step")
    parser.add_argument("--transport", choices=TRANSPORTS, default=None, help="default: tcp, then shm")
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b", help="geometry")
    parser.add_argument("--pages", action="store_true", help="instead: pages of 4 to 256 KiB over every transport")
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
    if options.pages:
        rows = [row for page in PAGES for row in asyncio.run(by_pages(options, page))]
        print_table(rows)
        print(f"load {getloadavg()[0]:.1f}\n")
    for transport in () if options.pages else [options.transport] if options.transport else OURS:
        options.transport = transport
        mine = [row for name in PAIRS if options.only in name for row in asyncio.run(case(options, name))]
        print_table(mine)
        print(f"load {getloadavg()[0]:.1f}\n")
        rows += mine
    if options.json:
        print(write_json("pages" if options.pages else "transfer", rows))


if __name__ == "__main__":
    main()
