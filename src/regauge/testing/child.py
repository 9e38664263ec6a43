"""A worker process that a parent starts, orders about and brings to harm: the other end of `link_process`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from regauge.testing.violation import Violation

START_S, ANSWER_S, CLOSE_S = 60.0, 60.0, 30.0
"""Most seconds until a process is ready, has obeyed, has ended by itself."""
COMMAND = ("-m", "regauge.testing.link_process")


class Child:
    """One process with all that it starts (a process group), its answers, and what it tells by itself."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None  # noqa: S101  # asked for, as is the other
        assert process.stdout is not None  # noqa: S101
        self.process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self.facts: dict[str, Any] = {}
        self._count = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._events: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        self._ended = ""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, role: msgspec.Struct, *, command: Sequence[str] = COMMAND, limit_s: float = START_S) -> Child:
        """Start Python with `command`, tell it its role, and wait until it is ready. Raises Violation; it is ended then."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=16 << 20,
            process_group=0,
        )  # fmt: skip
        child = cls(process)
        try:
            child.facts = await child._answer(0, msgspec.json.encode(role), "its start", limit_s)
        except BaseException:  # undone, whatever broke
            child.signal(signal.SIGKILL)
            await child.close()
            raise
        return child

    async def ask(self, do: str, *, limit_s: float = ANSWER_S, **order: Any) -> Any:
        """Give an order, and return its answer. Raises Violation: the order failed, or nothing came in time."""
        self._count += 1
        line = json.dumps({"id": self._count, "do": do, **order}).encode()
        return await self._answer(self._count, line, do, limit_s)

    def event(self, kind: str, transfer: str) -> asyncio.Future[dict[str, Any]]:
        """Return what the process will tell of a transfer: `ended` or `reached`; a Violation if it ends before."""
        key = kind, transfer
        if key not in self._events:
            self._events[key] = asyncio.get_running_loop().create_future()
            if self._ended:
                _fail(self._events[key], self._ended)
        return self._events[key]

    def forget(self, transfer: str) -> None:
        """Let go of what was told of a transfer."""
        for key in [key for key in self._events if key[1] == transfer]:
            del self._events[key]

    def signal(self, number: signal.Signals, *, alone: bool = False) -> None:
        """Send a signal, also to what the process has started; `alone`: only to itself. Nothing if it is over."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.kill if alone else os.killpg)(self.process.pid, number)

    async def struck(self, over: asyncio.Future[dict[str, Any]], seconds: float) -> bool:
        """Wait until the process stands still or is dead: True; or until `over`, with a moment more for it: False."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.process.returncode is not None or _stands_still(self.process.pid):
                return True
            if over.done():
                limit = min(limit, time.monotonic() + 0.1)
            await asyncio.sleep(0.001)
        return False

    async def close(self) -> None:
        """Let the process end by itself, from wherever it stands still; kill it if it does not."""
        self.signal(signal.SIGCONT)
        self._stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), CLOSE_S)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.process.wait()
        await self._reader

    async def _answer(self, number: int, line: bytes, what: str, limit_s: float) -> Any:
        if self._ended:
            raise Violation(f"{what}: {self._ended}")
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._stdin.write(line + b"\n")
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            raise Violation(f"{what}: no answer within {limit_s:g} s") from None
        finally:
            self._answers.pop(number, None)

    async def _read(self) -> None:
        while line := await self._stdout.readline():
            self._heard(json.loads(line))
        self._ended = f"the process has ended with exit code {await self.process.wait()}"
        for future in (*self._answers.values(), *self._events.values()):
            _fail(future, self._ended)

    def _heard(self, facts: dict[str, Any]) -> None:
        if "id" in facts:
            future = self._answers.get(facts["id"])
        else:
            facts["at"] = time.monotonic()
            future = self.event(facts["event"], facts["transfer"])
        if future is None or future.done():
            return  # nobody waits any more
        if "error" in facts:
            _fail(future, facts["error"])
        else:
            future.set_result(facts["answer"] if "id" in facts else facts)


def _fail(future: asyncio.Future[Any], why: str) -> None:
    if not future.done():
        future.set_exception(Violation(why))
        future.exception()  # seen, also where nobody asks


def _stands_still(pid: int) -> bool:
    """Say whether a process is stopped (proc(5): the field after the name in parentheses)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False
