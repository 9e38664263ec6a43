"""The load of `bench/gateway.py`: connections that ask again and again, and check every answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import httptools
import msgspec

PROMPT: Final = "Tell me how a track gauge changes at a border. " * 40
"""About 2 kB."""


@dataclass(frozen=True)
class Load:
    """How requests are made; `chunks` 0: not streamed."""

    connections: int
    requests: int
    chunks: int = 0
    tokens: int = 16


@dataclass(frozen=True)
class Came:
    """What came of a load."""

    requests: int
    chunks: int
    seconds: float
    median_ms: float


class _Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, port: int, load: Load) -> None:
        chat = {
            "model": "echo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": load.chunks or load.tokens,
            "stream": bool(load.chunks), "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        body = msgspec.json.encode(chat)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._expected = load.chunks
        self.chunks = 0
        self.times: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self) -> asyncio.Future[None]:
        """Send a request; the future is done when the answer is whole."""
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked = time.perf_counter()
        self._transport.write(self._request)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status, body = self._parser.get_status_code(), bytes(self._body)
        if status != 200:
            self._done.set_exception(AssertionError(f"{status}: {body[:300]!r}"))
            return
        if self._expected:
            words = body.count(b'"content":" gauge"')
            if (
                not body.endswith(b"data: [DONE]\n\n") or words < self._expected - 1
            ):  # the last may be an end without a word
                self._done.set_exception(AssertionError(f"{words} words of {self._expected}: {body[-300:]!r}"))
                return
            self.chunks += self._expected
        elif b" gauge gauge" not in body:
            self._done.set_exception(AssertionError(f"{body[:300]!r}"))
            return
        self.times.append(time.perf_counter() - self._asked)
        self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_done") and not self._done.done():
            self._done.set_exception(AssertionError(f"the connection was closed: {exc}"))


async def run(port: int, load: Load) -> Came:
    """Make the requests. Raises AssertionError for a wrong answer."""
    loop = asyncio.get_running_loop()
    clients: Sequence[_Client] = [
        (await loop.create_connection(lambda: _Client(port, load), "127.0.0.1", port))[1]
        for _ in range(load.connections)
    ]
    left = load.requests

    async def again(client: _Client) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await client.ask()

    begun = time.perf_counter()
    await asyncio.gather(*(again(client) for client in clients))
    seconds = time.perf_counter() - begun
    for client in clients:
        client._transport.close()
    times = sorted(each for client in clients for each in client.times)
    return Came(len(times), sum(client.chunks for client in clients), seconds, times[len(times) // 2] * 1e3)
