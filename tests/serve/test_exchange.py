"""The HTTP client for engines, against a server that says byte for byte what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import STEADY, WAIT_S

from regauge.serve import exchange
from regauge.serve.exchange import Broken, Exchange, Exchanges, Origin, request

pytestmark = pytest.mark.anyio
OK = b"HTTP/1.1 200 OK\r\n"


class Server:
    """Answers each request with the next of `answers`; None ends the connection."""

    def __init__(self) -> None:
        self.answers: list[bytes | None] = []
        self.asked: list[bytes] = []
        self.connections = 0
        self.gone = asyncio.Event()
        self.running: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self.running[task] = writer
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0)
                self.asked.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                if b"connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        self.gone.set()
        writer.close()


@asynccontextmanager
async def served(*answers: bytes | None) -> AsyncIterator[tuple[Server, Exchanges, str]]:
    server = Server()
    server.answers = [*answers]
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    exchanges = Exchanges(keep_s=5)
    try:
        async with asyncio.timeout(WAIT_S):
            yield server, exchanges, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        exchanges.close()
        listening.close()
        for writer in server.running.values():
            writer.transport.abort()
        await asyncio.gather(*server.running)
        await asyncio.sleep(0)  # so that the transports, which are aborted, are closed


async def ask(exchanges: Exchanges, url: str, body: bytes | None = None) -> Exchange:
    origin, target = exchanges.origin(url + "/x?y=1", None)
    wire = exchanges.kept(origin) or await exchanges.connect(origin)
    found = wire.ask(request("POST", origin, target, {"A": "b"}, body))
    await found.begin()
    return found


@pytest.mark.parametrize(
    ("answer", "body", "again"),
    [
        (OK + b"content-length: 5\r\n\r\nhello", b"hello", True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n", b"hello", True),
        (OK + b"content-length: 0\r\n\r\n", b"", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 1\r\n\r\n!", b"!", True),
        (OK + b"content-length: 1\r\nconnection: close\r\n\r\n!", b"!", False),
        (OK + b"connection: close\r\n\r\nto the end", b"to the end", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\n!", b"!", False),
    ],
)
async def test_answers_of_all_lengths_and_which_connections_are_used_again(
    answer: bytes, body: bytes, again: bool
) -> None:
    async with served(answer, OK + b"content-length: 2\r\n\r\nok") as (server, exchanges, url):
        first = await ask(exchanges, url, b"data")
        assert (first.status, await first.read(), await first.read(), first.complete) == (200, body, body, True)
        first.release()
        first.release()
        second = await ask(exchanges, url)
        assert await second.read() == b"ok"
        second.release()
        assert server.connections == (1 if again else 2)
        assert server.asked[0].startswith(b"POST /x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
        assert server.asked[0].endswith(b"A: b\r\nContent-Length: 4\r\n\r\ndata")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "closed"),
        (b"nonsense\r\n\r\n", "no HTTP answer"),
        (OK + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\n!", "no HTTP answer"),
        (OK + b"x: " + b"y" * 100_000 + b"\r\n\r\n", "headers"),
    ],
)
async def test_what_is_no_answer_is_an_error(answer: bytes | None, words: str) -> None:
    async with served(answer) as (_, exchanges, url):
        with pytest.raises(Broken, match=words):
            await (await ask(exchanges, url)).read()


async def test_an_answer_that_breaks_off_gives_what_came_and_then_the_error() -> None:
    async with served(OK + b"content-length: 10\r\nconnection: close\r\n\r\nhalf") as (_, exchanges, url):
        found = await ask(exchanges, url)
        assert await found.readany() == b"half"
        with pytest.raises(Broken, match="closed"):
            await found.readany()
        with pytest.raises(Broken, match="closed"):  # and again
            await found.readany()
        found.release()


async def test_one_limit_holds_for_all_of_an_answer_and_a_failed_one_stays_so() -> None:
    async with served(OK + b"content-length: 10\r\n\r\nhalf") as (server, exchanges, url):
        found = await ask(exchanges, url)
        found.limit(asyncio.get_running_loop().time() + 0.05, TimeoutError("late"))
        assert await found.readany() == b"half"
        with pytest.raises(TimeoutError, match="late"):
            await found.readany()
        found.fail(ValueError("later"))
        with pytest.raises(TimeoutError, match="late"):
            await found.readany()
        found.release()
        await server.gone.wait()  # the connection was not kept


async def test_an_answer_that_is_left_in_its_midst_closes_its_connection() -> None:
    async with served(OK + b"content-length: 10\r\n\r\nhalf") as (server, exchanges, url):
        found = await ask(exchanges, url)
        found.release()
        await server.gone.wait()


async def test_a_connection_that_its_other_end_has_closed_is_not_used_again() -> None:
    answer = OK + b"content-length: 1\r\n\r\n!"
    async with served(answer, answer) as (server, exchanges, url):
        found = await ask(exchanges, url)
        await found.read()
        found.release()
        origin, _ = exchanges.origin(url, None)
        kept = exchanges.kept(origin)
        assert kept is not None
        kept.transport.abort()
        await server.gone.wait()
        assert exchanges.kept(origin) is None
        assert await (await ask(exchanges, url)).read() == b"!"
        assert server.connections == 2


async def test_one_that_has_been_idle_for_long_is_not_used_again() -> None:
    async with served(OK + b"content-length: 1\r\n\r\n!") as (_, _exchanges, url):
        exchanges = Exchanges(keep_s=0)
        found = await ask(exchanges, url)
        await found.read()
        found.release()
        assert exchanges.kept(exchanges.origin(url, None)[0]) is None


async def test_an_answer_that_nobody_reads_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 64 << 20
    async with served(OK + b"content-length: %d\r\n\r\n" % size + bytes(size)) as (_, exchanges, url):
        found = await ask(exchanges, url)
        for _ in range(200):
            await asyncio.sleep(0)
        assert found._held < 4 * exchange.HELD
        assert len(await found.read()) == size
        found.release()
    monkeypatch.setattr(exchange, "MAX_WHOLE", 1_000)
    async with served(OK + b"content-length: 2000\r\n\r\n" + bytes(2_000)) as (_, exchanges, url):
        with pytest.raises(Broken, match="over 1000 bytes"):
            await (await ask(exchanges, url)).read()


@STEADY
@given(st.text(max_size=20), st.text(max_size=20))
async def test_a_header_cannot_be_more_than_one(name: str, value: str) -> None:
    origin = Origin("h", 80, None)
    try:
        made = request("GET", origin, "/", {name: value}, None)
    except (ValueError, UnicodeEncodeError):
        return
    assert made.count(b"\r\n") == 4
    assert made.count(b"\n") == 4


@pytest.mark.parametrize("url", ["ftp://h/", "h:80", "http:///x", "http://h:99999/"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no http|Port out of range"):
        Origin.of(url, None)


def test_origins() -> None:
    assert Origin.of("http://h", None) == (Origin("h", 80, None), "/")
    origin, target = Origin.of("https://[::1]:9/a?b", None)
    assert (origin.authority, target, origin.trust is not None) == ("[::1]:9", "/a?b", True)
