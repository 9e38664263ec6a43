"""Two gateway processes as `regauge serve` starts them: commands ask once, whichever answers; one that is started again is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from deployment import READY_S, Served, launch, ready, until

from regauge.cli import main
from regauge.config import BUNDLED_MODEL
from regauge.serve.place import private_socket

pytestmark = [pytest.mark.model, pytest.mark.process, pytest.mark.timeout(600)]


@contextlib.contextmanager
def two(tmp: Path) -> Iterator[Served]:
    found = launch(tmp, "--set", "gateway.processes=2")
    try:
        yield found
    finally:
        found.process.send_signal(signal.SIGTERM)
        found.process.wait(40)


def gateway(served: Served, number: int) -> tuple[int, Path]:
    """Return a gateway process, and the private folder."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # gone meanwhile, or no process
            words = (entry / "cmdline").read_bytes().split(b"\0")
            ours = f"PPid:\t{served.process.pid}\n" in (entry / "status").read_text()
            if ours and b"regauge.serve.gateway" in words and words[4] == str(number).encode():
                return int(entry.name), Path(os.fsdecode(words[3])).parent
    raise AssertionError(f"no process of gateway-{number}")


async def get(url: str, path: str, socket: Path | None = None) -> Any:
    """Ask over a connection of its own: the system deals it to either process."""
    connector = None if socket is None else aiohttp.UnixConnector(str(socket))
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url + path) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def own(served: Served, number: int) -> list[str]:
    """Return the names of the requests that a process keeps."""
    _, folder = gateway(served, number)
    found = await get("http://g", "/own/requests/100", private_socket(folder, number))
    return [line["id"] for line in found["requests"]]


async def generate(served: Served, name: str) -> None:
    body = {"model": BUNDLED_MODEL, "prompt": "A train", "max_tokens": 2}
    async with (
        aiohttp.ClientSession(headers={"X-Request-Id": name}) as session,
        session.post(f"{served.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def generate_until_each_has(served: Served, names: Iterator[str], made: list[str]) -> None:
    async def both() -> bool:
        made.append(next(names))
        await generate(served, made[-1])
        return all([set(await own(served, number)) & set(made) for number in (0, 1)])

    await until(both, 60, "a request at each process")


@pytest.mark.anyio
async def test_whichever_process_answers_knows_of_all_and_finds_one_that_was_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, made = (f"req-{n}" for n in range(1_000)), list[str]()
    with two(tmp_path) as served:
        async with aiohttp.ClientSession() as session:
            await until(lambda: ready(session, served), READY_S, "a ready endpoint")
        await generate_until_each_has(served, names, made)
        for _ in range(12):
            found = await get(served.url, "/debug/requests?limit=1000")
            assert ([line["id"] for line in found["requests"]], found["silent"]) == (made[::-1], [])
        for name in (made[0], made[-1]):
            for command in ("why", "trace"):
                assert await asyncio.to_thread(main, [command, name, "--url", served.url]) == 0
                assert "does not answer" not in capsys.readouterr().out

        pid, _ = gateway(served, 1)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: "gateway-1 is started again" in served.text(), 20, "the supervisor's word")
        kept = await own(served, 0)

        async def whole() -> bool:
            return not (await get(served.url, "/debug/live"))["silent"]

        await until(whole, 60, "the new process")
        made = [*kept[::-1]]
        await generate_until_each_has(served, names, made)
        for _ in range(12):
            found = await get(served.url, "/debug/requests?limit=1000")
            assert [line["id"] for line in found["requests"]] == made[::-1]
