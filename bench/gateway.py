"""What the gateway adds: CPU per request and per streamed chunk, before trivial engines, beside other routers in the same run.

    python bench/gateway.py [--rounds 5] [--router-python DIR/bin/python] [--memory 100000]

All routers stand before the same prefill and decode engine (`gateway_engine.py`), in the order of the rounds in turn. CPU is of the router's process with all
its threads, less what it takes idle. `--router-python`: an environment with sglang-router and vllm-router (`pip install --no-deps sglang-router==0.3.2`;
vllm-router 0.1.17 also wants setproctitle, aiohttp, requests, orjson, uvicorn, fastapi). `--memory`: also so many requests, and what the gateway's memory was.

One request: 2 kB of prompt, 16 tokens at once, over 16 connections. One chunk: 64 streams of 100 chunks, one every 20 ms each; less the cost of the request.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import uvloop

from gateway_load import Came, Load, run
from harness import cpu_of, print_table, write_json
from regauge.config import BUNDLED_MODEL, EngineConfig, ServeConfig, ServedConfig, ServerConfig, cache_dir
from regauge.engines.local.prepare import prepare
from regauge.serve import wire

HERE = Path(__file__).parent
WHOLE = Load(connections=16, requests=400)
STREAM = Load(connections=64, requests=64, chunks=100)
IDLE_S = 1.0


@dataclass
class Router:
    """A router that runs."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    request_us: list[float] = field(default_factory=list)
    chunk_us: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)

    @property
    def cpu(self) -> float:
        """CPU seconds so far."""
        return cpu_of(self.process.pid)

    @property
    def rss(self) -> float:
        """Resident memory, MiB."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_answer(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        with contextlib.suppress(OSError), urlopen(url, timeout=2) as answer:  # noqa: S310  # loopback
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{url} did not answer")


def start(stack: contextlib.ExitStack, *command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.send_signal, signal.SIGKILL)  # nothing, where it has ended
    return process


def engines(stack: contextlib.ExitStack) -> tuple[str, str]:
    urls = []
    for mode in ("prefill", "decode"):
        port = free_port()
        process = start(stack, sys.executable, str(HERE / "gateway_engine.py"), str(port), mode)
        urls.append(f"http://127.0.0.1:{port}")
        await_answer(urls[-1] + "/health", process)
    return urls[0], urls[1]


def ours(stack: contextlib.ExitStack, kind: str, prefill: str, decode: str) -> Router:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    port, model = free_port(), prepare(BUNDLED_MODEL, cache_dir(), lambda _: None)

    def engine(name: str, url: str) -> EngineConfig:
        served = ServedConfig(server=ServerConfig(url, name, control="127.0.0.1:9"))
        return EngineConfig(
            max_context=8_192, vllm=served if kind == "vllm" else None, sglang=served if kind == "sglang" else None
        )

    config = ServeConfig(port=port, prefill=engine("p", prefill), decode=engine("d", decode))
    ranks = [wire.RankAddress("d.0", ("127.0.0.1", 9))]
    workers = [
        wire.WorkerAddress("p", "prefill", prefill, [wire.RankAddress("p.0", None)], kind),  # type: ignore[arg-type]
        wire.WorkerAddress("d", "decode", decode, ranks, kind),  # type: ignore[arg-type]
    ]
    token = secrets.token_hex(8)
    spec = wire.GatewaySpec(config, str(model), "echo", token, workers, wire.VerdictInfo("DIRECT"), key="00" * 32)
    wire.write_spec(folder / "spec.json", spec)
    process = start(stack, sys.executable, "-m", "regauge.serve.gateway", str(folder / "spec.json"))
    await_answer(f"http://127.0.0.1:{port}/ready", process)
    return Router(f"regauge, {kind}", port, process)


def others(stack: contextlib.ExitStack, python: Path, prefill: str, decode: str) -> Iterator[Router]:
    common = ["--host", "127.0.0.1", "--policy", "round_robin", "--prefill", prefill]
    for name, command in (
        ("sglang-router", ["smg", "launch", "--pd-disaggregation", "--log-level", "error"]),
        ("vllm-router", ["vllm-router", "--vllm-pd-disaggregation", "--log-level", "error"]),
    ):
        port, metrics = free_port(), free_port()
        extra = ["9"] if name == "sglang-router" else []
        process = start(
            stack, str(python.parent / command[0]), *command[1:], *common, *extra, "--decode", decode, "--port", str(port),
            "--prometheus-port", str(metrics),
        )  # fmt: skip
        await_answer(f"http://127.0.0.1:{port}/health", process)
        yield Router(name, port, process)


def load(router: Router, what: Load) -> tuple[float, Came]:
    """Return the CPU seconds that a load took, less those of doing nothing, and what came of it."""
    before = router.cpu
    time.sleep(IDLE_S)
    idle, begun = (router.cpu - before) / IDLE_S, router.cpu
    came = uvloop.run(run(router.port, what))
    return router.cpu - begun - idle * came.seconds, came


def one_round(router: Router) -> None:
    cpu, came = load(router, WHOLE)
    request = cpu / came.requests
    router.request_us.append(request * 1e6)
    router.p50_ms.append(came.median_ms)
    cpu, came = load(router, STREAM)
    router.chunk_us.append((cpu - request * came.requests) / came.chunks * 1e6)


def memory(router: Router, total: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for part in range(11):
        rows.append({"requests": part * total // 10, "RSS MiB": router.rss})
        if part < 10:
            uvloop.run(run(router.port, Load(connections=16, requests=total // 10)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--router-python", type=Path, help="interpreter of an environment with the other routers")
    parser.add_argument("--memory", type=int, default=0, help="requests of the memory's run")
    parser.add_argument("--json", action="store_true", help="also write bench/out/gateway.json")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        prefill, decode = engines(stack)
        routers = [ours(stack, kind, prefill, decode) for kind in ("sglang", "vllm")]
        if options.router_python:
            routers += others(stack, options.router_python, prefill, decode)
        for router in routers:
            uvloop.run(run(router.port, Load(connections=16, requests=100)))
        for _ in range(options.rounds):
            for router in routers:
                one_round(router)
        rows: list[dict[str, object]] = []
        for each in routers:
            request, chunk = statistics.median(each.request_us), statistics.median(each.chunk_us)
            rows.append({"router": each.name, "us/request": request, "us/chunk": chunk, "chunks/s per core": round(1e6 / chunk),
                         "p50 ms, 16 at once": statistics.median(each.p50_ms), "RSS MiB": each.rss,
                         "range us/request": f"{min(each.request_us):.0f}-{max(each.request_us):.0f}",
                         "range us/chunk": f"{min(each.chunk_us):.1f}-{max(each.chunk_us):.1f}"})  # fmt: skip
        print_table(rows)
        if options.memory:
            print()
            print_table(memory(routers[0], options.memory))
        if options.json:
            write_json("gateway", rows)


if __name__ == "__main__":
    main()
