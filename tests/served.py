"""A running `regauge serve` over whatever engines its two workers are, as tests ask it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
from tokenizers import Tokenizer

READY_S = 400.0
ANSWER_S = 120.0
TOKENS = 12


@dataclass(frozen=True)
class Side:
    """One worker: the embedded engine with a layout, or a server of another engine with options."""

    engine: Literal["local", "vllm", "sglang"]
    layout: str = ""
    args: tuple[str, ...] = ()
    python: str = ""
    """Empty: the one that runs the test."""

    def lines(self, role: str) -> list[str]:
        """Return its tables of the configuration."""
        lines = [f"[{role}]", "max_context = 1_500", "threads = 1"]
        if self.engine != "local":
            lines += [
                f"[{role}.{self.engine}]",
                f"python = {json.dumps(self.python)}",
                f"args = {json.dumps(self.args)}",
            ]
        return lines


class Served:
    """A running `regauge serve`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: Path, log: Path) -> None:
        self.process, self.base, self.name, self.log = process, f"http://127.0.0.1:{port}", model.name, log
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    async def ask(self, session: aiohttp.ClientSession, ids: list[int], **given: Any) -> dict[str, Any]:
        """Return the answer to token ids; greedy. Fails where there is none."""
        status, answer = await self.try_to(session, ids, **given)
        assert status == 200, answer
        return answer

    async def try_to(self, session: aiohttp.ClientSession, ids: list[int], **given: Any) -> tuple[int, dict[str, Any]]:
        """Likewise; return the status, too."""
        body = {"model": self.name, "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **given}
        async with session.post(f"{self.base}/v1/completions", json=body) as answer:
            return answer.status, dict(await answer.json())

    async def stream(self, session: aiohttp.ClientSession, path: str, **body: Any) -> str:
        given = {"model": self.name, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, **body}
        text = ""
        async with session.post(self.base + path, json=given) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text += choice.get("text", "") or choice.get("delta", {}).get("content", "")
        return text

    async def get(self, session: aiohttp.ClientSession, path: str) -> Any:
        async with session.get(self.base + path) as answer:
            return await answer.json(content_type=None)

    async def metric(self, session: aiohttp.ClientSession, name: str) -> float:
        """Return a metric without labels."""
        async with session.get(f"{self.base}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    async def answers(self, prompts: Sequence[list[int]]) -> list[str]:
        """All at once."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            found = await asyncio.gather(*(self.ask(session, ids) for ids in prompts))
        return [answer["choices"][0]["text"] for answer in found]


@contextlib.contextmanager
def served(
    folder: Path, model: Path, prefill: Side, decode: Side, limits: Mapping[str, float] = {}
) -> Iterator[Served]:
    """Start it, wait until it is ready, end it."""
    port, log = _free_port(), folder / "serve.log"
    file = folder / "serve.toml"
    lines = [f'model = "{model}"', f"port = {port}"]
    lines += [
        f'{role}_layout = "{side.layout}"' for role, side in (("prefill", prefill), ("decode", decode)) if side.layout
    ]
    lines += ["[limits]", *(f"{name} = {value}" for name, value in limits.items())]
    lines += ["[transfer]", 'transport = "tcp"', "staging_bytes = 8_388_608", "resume_s = 1.0", "lease_s = 3.0"]
    file.write_text("\n".join([*lines, *prefill.lines("prefill"), *decode.lines("decode")]) + "\n")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "regauge", "serve", "--config", str(file)], stdout=out, stderr=out,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "0"},
        )  # fmt: skip
    try:
        limit = time.monotonic() + READY_S
        while b"\nready " not in log.read_bytes():
            running = process.poll() is None and time.monotonic() < limit
            assert running, log.read_text(errors="replace")[-6_000:]
            time.sleep(0.2)
        yield Served(process, port, model, log)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
