"""Clients that nobody has to trust, over raw sockets, against the real server: slow, greedy, broken and forged requests."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from serve_rig import MODEL, WAIT_S, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.config_gateway import GatewayConfig
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
RULES = GatewayConfig(
    header_s=0.3, body_s=0.3, idle_s=0.3, write_s=0.3, max_header_bytes=4_096, max_connections=8
)  # fmt: skip
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"


class Raw:
    """A connection that sends what it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read one answer that has a length."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return int(status.split()[1]), headers, body

    async def rest(self) -> bytes:
        """Read until the server ends the connection."""
        data = b""
        async with asyncio.timeout(WAIT_S):
            try:
                while part := await self.reader.read(65_536):
                    data += part
            except ConnectionResetError:  # closed while more was on its way to it
                pass
        return data


@asynccontextmanager
async def raw(rig: Rig) -> AsyncIterator[Raw]:
    host, port = rig.base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


@pytest.fixture(scope="module")
async def rig(tokenizer: Tokenizer, anyio_backend: str) -> AsyncIterator[Rig]:
    limits = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=0, max_body_bytes=100_000)
    async with open_rig(tokenizer, rules=RULES, limits=limits) as opened:
        yield opened


def faults(rig: Rig, reason: str) -> float:
    return rig.sample("regauge_client_faults_total", reason=reason)


async def drip(rig: Rig, client: Raw, data: bytes) -> None:
    """Send a little at a time, until the server has had enough; round trips of another's between, for so long that time is up before a head is full."""
    pause = RULES.header_s / 20
    try:
        while not client.reader.at_eof():
            client.send(data)
            await client.writer.drain()
            until = time.monotonic() + pause
            while time.monotonic() < until:
                await rig.get("/health")
    except ConnectionError:
        pass


@pytest.mark.parametrize(
    ("begin", "more", "reason", "answer"),
    [
        (b"", b"", "header", b"408"),
        (b"", b"\r\n", "header", b"408"),
        (b"GET /health HTTP/1.1\r\nX-Slow: ", b"a", "header", b"408"),
        (b"GET /health HTTP/1.1\r\n", b"X-Slow: a\r\n", "header", b"408"),
        (HEAD + b"Content-Length: 10000\r\n\r\n", b"{", "body", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", "body", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=", b"y", "body", b"408"),
    ],
)
async def test_what_never_ends_is_ended(rig: Rig, begin: bytes, more: bytes, reason: str, answer: bytes) -> None:
    before = faults(rig, reason)
    async with raw(rig) as client:
        client.send(begin)
        dripping = asyncio.create_task(drip(rig, client, more))
        assert (await client.rest()).startswith(b"HTTP/1.1 " + answer)
        dripping.cancel()
    assert faults(rig, reason) == before + 1


async def test_a_connection_between_requests_is_kept_a_while_and_no_longer(rig: Rig) -> None:
    async with raw(rig) as client:
        for _ in range(3):
            client.send(HEALTH)
            assert (await client.answer())[0] == 200
        assert await client.rest() == b""


async def test_a_reader_that_does_not_read_is_given_up(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, rules=RULES) as rig:
        async with raw(rig) as client:
            client.writer.transport.pause_reading()
            # Answers to requests in a row, none of which is read: more than the system keeps between the two.
            client.send(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n" * 2_000)
            async with asyncio.timeout(WAIT_S):
                while not faults(rig, "write"):
                    await rig.get("/health")
        assert (await rig.get("/health"))[0] == 200


async def test_a_head_has_a_size(rig: Rig) -> None:
    for head in (
        b"GET /health?" + b"q" * 5_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 5_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1_500 + b"\r\n",
        b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 1_000_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 1_500,
    ):
        async with raw(rig) as client:
            client.send(head)
            answer = await client.rest()
            assert answer.startswith(b"HTTP/1.1 431 "), head[:40]
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"
    async with raw(rig) as client:
        client.send(b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 3_500 + b"\r\n\r\n")
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS on a port without
        b"nonsense\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        HEAD + b"Content-Length: 5, 5\r\n\r\nhello",
        HEAD + b"Content-Length: +5\r\n\r\nhello",
        HEAD + b"Content-Length: -1\r\n\r\nhello",
        HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\nHost: h\nContent-Length : 5\n\nhello",
        HEAD + b"X-A: a\r\n folded: b\r\n\r\n\x00",
        HEAD + b"X\x00A: a\r\n\r\n",
        b"GET http://[/ HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
async def test_what_is_no_http_or_could_smuggle_a_second_request_is_400_and_the_end(
    rig: Rig, request_bytes: bytes
) -> None:
    async with raw(rig) as client:
        client.send(request_bytes + HEALTH)
        answer = await client.rest()
    statuses = re.findall(rb"HTTP/1\.1 (\d+)", answer)
    assert statuses == [b"400"]
    assert b'"status":"ok"' not in answer


async def test_a_body_has_a_size_whether_its_length_is_told_or_not(rig: Rig) -> None:
    async with raw(rig) as client:
        client.send(HEAD + b"Content-Length: 200000\r\n\r\n")
        assert (await client.answer())[0] == 413
    async with raw(rig) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        for _ in range(5):
            client.send(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        assert (await client.answer())[0] == 413
    assert (await rig.get("/health"))[0] == 200


async def test_requests_in_a_row_are_answered_in_their_order(rig: Rig) -> None:
    body = msgspec.json.encode({"model": MODEL, "prompt": "a b c", "max_tokens": 4})
    asked = HEAD + b"Content-Length: %d\r\nX-Request-Id: %%s\r\n\r\n" % len(body) + body
    async with raw(rig) as client:
        client.send(asked % b"first" + HEALTH + asked % b"second")
        first, health, second = [await client.answer() for _ in range(3)]
    assert (first[0], first[1]["x-request-id"]) == (200, "first")
    assert (health[0], json.loads(health[2])) == (200, {"status": "ok"})
    assert (second[0], second[1]["x-request-id"]) == (200, "second")


async def test_a_body_that_waits_behind_a_long_answer_has_its_time_from_then_on(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer, rules=RULES) as rig:
        rig.decode.hold = asyncio.Event()
        body = msgspec.json.encode({"model": MODEL, "prompt": "a", "max_tokens": 2})
        head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
        async with raw(rig) as client:
            client.send(head + body + head + body[:5])
            late = asyncio.get_running_loop().time() + 1.2  # a few sweeps, which must let it pass
            await rig.until(lambda: asyncio.get_running_loop().time() > late)
            assert faults(rig, "body") == 0
            rig.decode.hold.set()
            assert (await client.answer())[0] == 200
            client.send(body[5:])
            assert (await client.answer())[0] == 200


async def test_an_upgrade_is_answered_as_a_request_and_ends_the_connection(rig: Rig) -> None:
    async with raw(rig) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n" + HEALTH)
        answer = await client.rest()
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200"]
    async with raw(rig) as client:
        client.send(b"CONNECT h:443 HTTP/1.1\r\nHost: h\r\n\r\n")
        assert re.match(rb"HTTP/1\.1 40[045]", await client.rest())


async def test_one_connection_too_many_is_told_so(rig: Rig) -> None:
    held = []
    try:
        for _ in range(RULES.max_connections):
            host, port = rig.base.removeprefix("http://").split(":")
            held.append(await asyncio.open_connection(host, int(port)))
        async with raw(rig) as client:
            status, headers, _ = await client.answer()
            assert (status, headers["retry-after"]) == (503, "1")
    finally:
        for _, writer in held:
            writer.close()
    async with asyncio.timeout(WAIT_S):
        while True:
            async with raw(rig) as client:
                client.send(HEALTH)
                if (await client.answer())[0] == 200:
                    break


@pytest.mark.parametrize("forged", [b"a\tb", b"<script>", b"a" * 129, b"a b", b"\xc3\xa9", b"a,b", b""])
async def test_a_forged_request_id_is_not_given_back(rig: Rig, forged: bytes) -> None:
    async with raw(rig) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: h\r\nX-Request-Id: " + forged + b"\r\n\r\n")
        _, headers, _ = await client.answer()
    assert re.fullmatch(r"req-[0-9a-f]{24}", headers["x-request-id"])


async def test_a_header_after_the_body_changes_nothing(rig: Rig) -> None:
    async with raw(rig) as client:
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Request-Id: late\r\n\r\n")
        status, headers, _ = await client.answer()
    assert status == 400
    assert headers["x-request-id"] != "late"
