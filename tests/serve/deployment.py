"""A deployment as `regauge serve` makes it: real processes, the real model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from regauge.serve.ports import free_ports

READY_S = 240.0


@dataclass
class Served:
    """A running deployment."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def text(self) -> str:
        return self.log.read_text()

    def pid(self, name: str) -> int:
        """The process of a worker, by its spec file."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # gone meanwhile, or a kernel thread
                command = (entry / "cmdline").read_bytes().split(b"\0")
                status = (entry / "status").read_text()
                if (
                    any(part.endswith(f"/{name}.json".encode()) for part in command)
                    and f"PPid:\t{self.process.pid}\n" in status
                ):
                    return int(entry.name)
        raise AssertionError(f"no process of {name}")


def launch(tmp: Path, *arguments: str) -> Served:
    [port] = free_ports("127.0.0.1")
    log = tmp / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "regauge", "serve", "--port", str(port), *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Served(process, f"http://127.0.0.1:{port}", log)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def until(condition: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Poll a condition (it may be a coroutine function) until it is truthy."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"{what} did not come within {limit_s:g} s")


async def ready(session: aiohttp.ClientSession, served: Served) -> bool:
    assert served.process.poll() is None, served.text()
    with contextlib.suppress(aiohttp.ClientError):
        async with session.get(f"{served.url}/ready") as answer:
            return answer.status == 200 and (await answer.json())["status"] == "ready"
    return False


@contextlib.contextmanager
def deployment(tmp: Path) -> Iterator[Served]:
    """The default pair: prefill FP8, page 64, HND; decode bf16, page 16, NHD. Silent writers are given up after 3 s."""
    settings = ("transfer.lease_s=3", "limits.request_timeout_s=60", "limits.prefill_wait_s=20")
    found = launch(tmp, *(word for each in settings for word in ("--set", each)))
    try:
        yield found
    finally:
        found.process.send_signal(signal.SIGTERM)
        found.process.wait(40)
