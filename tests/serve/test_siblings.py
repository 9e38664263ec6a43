"""Gateway processes of one port that ask one another: real processes, one that stands still, one that died, one that was started again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import MODEL, STEADY, WAIT_S
from test_place import START_S, Gateways, gateways

from regauge.config import ServeConfig
from regauge.config_gateway import GatewayConfig
from regauge.serve import siblings
from regauge.serve.place import Place
from regauge.serve.recent import Line, Recent, Requests, Story, TimeLine
from regauge.serve.siblings import ASK_S, Decision, Decisions, Heard, Kept, Siblings
from regauge.serve.text import Tokenizer

REQUESTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30)
"""Of each the process that answers it and its name, in the order in which they come."""


def kept_by(requests: list[tuple[str, int]]) -> Recent:
    found = Recent()
    for name, at in requests:
        found.add(name, Story(unix_s=float(at)))
    return found


def seen(found: Requests) -> list[tuple[str, float]]:
    return [(line.id, line.unix_s) for line in found.requests]


@given(REQUESTS, st.integers(1, 12))
@STEADY
def test_several_processes_show_what_one_would_that_had_answered_all(
    requests: list[tuple[int, int]], limit: int
) -> None:
    come = [(process, f"req-{name}", at) for at, (process, name) in enumerate(requests)]
    alone = kept_by([(name, at) for _, name, at in come])
    each = [kept_by([(name, at) for p, name, at in come if p == process]).newest(limit) for process in range(4)]
    merged = siblings.newest(each, limit, ["gateway-9"])
    assert seen(merged) == seen(alone.newest(limit))
    assert merged.hidden + len(merged.requests) == len({(process, name) for process, name, _ in come})
    assert merged.silent == ["gateway-9"]
    assert all(seen(siblings.newest(order, limit, [])) == seen(merged) for order in itertools.permutations(each))


@given(st.lists(st.lists(st.integers(0, 10**6), max_size=80), max_size=4))
@STEADY
def test_decisions_on_one_name_are_in_their_order_whoever_made_them(times: list[list[int]]) -> None:
    found = [Decisions([Decision(float(at), {"at": at}) for at in sorted(one)]) for one in times]
    told = siblings.routed(found, [])
    assert [each["at"] for each in told.requests] == sorted(itertools.chain(*times))[-siblings.MOST_DECISIONS :]


def test_of_requests_under_one_name_the_latest_is_meant() -> None:
    def kept(arrived: float) -> Kept:
        line = Line("one", 1.0, 1.0, "complete", "", None, 1, 1, "", "", "", "", 0, 1)
        return Kept(TimeLine(line, []), arrived)

    assert siblings.latest([kept(5.0), kept(7.0), kept(6.0)]) == kept(7.0)
    assert siblings.latest([]) is None


@pytest.mark.anyio
async def test_a_process_that_is_alone_asks_nobody(tmp_path: Path) -> None:
    for place, config in ((Place(), ServeConfig()), (Place(tmp_path, 0, 3), ServeConfig())):
        assert await place.siblings(config).kept("req-1") == Heard([], [])


@asynccontextmanager
async def odd(folder: Path, number: int, answer: bytes, *, then: bytes = b"") -> AsyncIterator[Path]:
    """Yield the socket of a sibling that answers so whatever is asked; `then` is sent on and on, and without either it never answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        gone = asyncio.ensure_future(reader.read())
        try:
            while then and not gone.done():
                writer.write(then)
                await writer.drain()
            if not answer:
                await gone
        except ConnectionError:
            pass
        writer.close()
        gone.cancel()

    path = folder / f"odd-{number}.sock"
    async with await asyncio.start_unix_server(serve, path):
        yield path


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "then", "says"),
    [
        (http(b"", "500 No"), b"", "g answers 500"),
        (http(b"", "302 Go\r\nlocation: /health"), b"", "g answers 302"),
        (http(b"{}"), b"", "g answers what it should not: Object missing required field `requests`"),
        (http(b"[" * 100_000), b"", "g answers what it should not: "),
        (http(b'"\xff"'), b"", "g answers what it should not: "),
        (b"SSH-2.0-OpenSSH\r\n", b"", "g does not answer: "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", b"", "g does not answer: "),
        (b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 20), f"g answers more than {siblings.MAX_ANSWER} bytes"),
    ],
)
async def test_a_sibling_that_answers_oddly_is_left_out_and_said(
    answer: bytes, then: bytes, says: str, tmp_path: Path
) -> None:
    async with odd(tmp_path, 0, answer, then=then) as path:
        heard = await Siblings({"g": path}).newest(10)
    assert heard.answers == []
    [why] = heard.silent
    assert why.startswith(says)
    assert str(tmp_path) not in why


@pytest.mark.anyio
async def test_all_together_cost_one_limit_and_not_to_know_is_no_silence(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        frozen = [await stack.enter_async_context(odd(tmp_path, n, b"")) for n in range(10)]
        ignorant = await stack.enter_async_context(odd(tmp_path, 10, http(b"", "404 No")))
        asked = Siblings({"i": ignorant, "gone": tmp_path / "no", **{f"f{n}": at for n, at in enumerate(frozen)}})
        began = time.monotonic()
        heard = await asked.kept("req-1")
        took = time.monotonic() - began
    assert heard.answers == []
    assert heard.silent == [
        "gone does not answer: No such file or directory",
        *(f"f{n} does not answer within 1 s" for n in range(10)),
    ]
    assert ASK_S <= took < 5 * ASK_S, "one after the other would be ten times that"


@dataclass
class Client:
    """Asks each process by its own port."""

    all_: Gateways
    session: aiohttp.ClientSession

    async def generate(self, number: int, name: str) -> None:
        body = {"model": MODEL, "prompt": "a b c", "max_tokens": 2}
        url = f"{self.all_.url(number)}/v1/completions"
        async with self.session.post(url, json=body, headers={"X-Request-Id": name}) as answer:
            assert answer.status == 200, await answer.text()
        async with asyncio.timeout(WAIT_S):  # it is noted after its answer has gone out
            while (await self.ask(number, f"/debug/trace/{name}"))["request"]["outcome"] == "running":
                pass

    async def ask(self, number: int, path: str, status: int = 200) -> Any:
        async with self.session.get(self.all_.url(number) + path) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def newest(self, number: int) -> tuple[list[str], list[str]]:
        """Return the names of the newest requests, and who is silent."""
        found = await self.ask(number, "/debug/requests?limit=10")
        return [line["id"] for line in found["requests"]], found["silent"]

    async def until(self, number: int, path: str, what: str, wanted: object) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.ask(number, path))[what] != wanted:
                pass


@asynccontextmanager
async def two(tokenizer: Tokenizer, folder: Path) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        gateways(tokenizer, folder, GatewayConfig(processes=2), apart=True) as all_,
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        yield Client(all_, session)


@pytest.fixture(scope="module")
async def client(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """Two processes for the tests that leave both running."""
    async with two(tokenizer, tmp_path_factory.mktemp("siblings")) as found:
        yield found


async def top(url: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "regauge", "top", "--once", "--url", url, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), START_S)
    return process.returncode, out.decode()


@pytest.mark.process
@pytest.mark.anyio
async def test_it_does_not_matter_which_process_is_asked(client: Client) -> None:
    for number, name in ((0, "one"), (1, "two"), (0, "same"), (1, "same")):
        await client.generate(number, name)
    told = [
        [await client.ask(number, f"/debug/{path}") for path in ("requests", "trace/one", "trace/two", "why/one", "why/two", "trace/same", "why/same")]
        for number in (0, 1)
    ]  # fmt: skip
    assert told[0] == told[1]
    newest, one, two_, why_one, why_two, same, why_same = told[0]
    assert [line["id"] for line in newest["requests"]] == ["same", "two", "one"]
    assert (newest["hidden"], newest["silent"]) == (1, []), "of two under one name the newer is shown"
    assert [each["request"]["id"] for each in (one, two_, same)] == ["one", "two", "same"]
    assert same["request"] == newest["requests"][0], "the later of the two"
    assert [len(each["tries"]) for each in (one, two_, same)] == [1, 1, 1]
    assert [len(each["requests"]) for each in (why_one, why_two, why_same)] == [1, 1, 2]
    assert why_one["requests"][0]["text"] != why_two["requests"][0]["text"]
    attempt = one["tries"][0]["name"]
    assert (await client.ask(1, f"/debug/trace/{attempt}"))["request"]["id"] == "one"
    error = (await client.ask(0, "/debug/why/three", 404))["error"]
    assert (
        error["message"] == "request 'three' is not known: a gateway process keeps the newest route.keep_routes alone"
    )

    hold = client.all_.rig.decode.hold = asyncio.Event()
    asked = asyncio.create_task(client.generate(1, "held"))
    for path in ("/debug/live", "/debug/transfers"):
        for number in (0, 1):
            await client.until(number, path, "requests", 1)
    hold.set()
    await asked
    await client.until(0, "/debug/live", "requests", 0)


@pytest.mark.process
@pytest.mark.anyio
async def test_what_siblings_ask_is_answered_on_the_private_socket_alone_and_not_passed_on(
    client: Client,
) -> None:
    for number, name in ((0, "mine"), (1, "yours")):
        await client.generate(number, name)
        status, text = await client.all_.private(number, "/own/requests/1000000")
        assert status == 200
        assert {line["id"] for line in msgspec.json.decode(text)["requests"]} & {"mine", "yours"} == {name}
        assert (client.all_.folder / f"gateway-{number}.sock").stat().st_mode & 0o777 == 0o600
    assert (await client.all_.private(0, "/own/request/yours"))[0] == 404
    assert msgspec.json.decode((await client.all_.private(0, "/own/decisions/yours"))[1]) == {"found": []}
    for path in ("/debug/requests", "/debug/live", "/v1/models", "/dashboard"):
        assert (await client.all_.private(0, path))[0] == 404
    for path in ("/own/requests/5", "/own/request/mine", "/own/decisions/mine"):
        await client.ask(0, path, 404)


@pytest.mark.process
@pytest.mark.anyio
async def test_one_that_stands_still_costs_a_second_one_that_died_nothing_and_both_are_said(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with two(tokenizer, tmp_path) as client:
        await client.generate(0, "one")
        await client.generate(1, "two")
        frozen = client.all_.running[1]
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            silent = ["gateway-1 does not answer within 1 s"]
            for path in ("live", "why/one"):
                began = time.monotonic()
                assert (await client.ask(0, f"/debug/{path}"))["silent"] == silent
                assert ASK_S <= time.monotonic() - began < ASK_S + 2
            assert await client.newest(0) == (["one"], silent)
            assert silent[0] in (await client.ask(0, "/debug/trace/one"))["missing"]
            message = (await client.ask(0, "/debug/why/two", 404))["error"]["message"]
            assert message.startswith("request 'two' is not known")
            assert message.endswith(f"; {silent[0]}")
            code, text = await top(client.all_.url(0))
            assert code == 1
            assert f"\n{silent[0]}\n" in text
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        await client.until(0, "/debug/requests", "silent", [])
        assert await client.newest(0) == (["two", "one"], [])

        await client.all_.kill(1)
        assert await client.newest(0) == (["one"], ["gateway-1 does not answer: Connection refused"])
        await client.all_.start(1)
        await client.all_.ready(1)
        await client.generate(1, "new")
        assert await client.newest(0) == (["new", "one"], [])
        assert (await client.ask(0, "/debug/trace/new"))["request"]["id"] == "new"
