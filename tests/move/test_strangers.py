"""Who connects to a control port and says nothing: few at once, not for long, and nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from links_rig import both, settle

from certificates import Authority
from regauge.config import TlsConfig
from regauge.move import channel, inbound

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def silent(address: tuple[str, int], count: int) -> AsyncIterator[list[Streams]]:
    made = [await asyncio.open_connection(*address) for _ in range(count)]
    try:
        yield made
    finally:
        for _, writer in made:
            writer.close()


async def ended(reader: asyncio.StreamReader) -> None:
    """Wait until the other end has closed the connection."""
    async with asyncio.timeout(5):
        with contextlib.suppress(ConnectionError):
            while await reader.read(100):
                pass


def files(folder: Path) -> TlsConfig:
    authority = Authority(folder)
    certificate, key = authority.issue("worker")
    return TlsConfig(str(certificate), str(key), str(authority.path))


@pytest.mark.anyio
@pytest.mark.parametrize("secure", [False, True])
async def test_strangers_are_counted_also_before_tls_and_end_with_the_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, secure: bool
) -> None:
    monkeypatch.setattr(inbound, "MAX_GREETING", 3)
    tls = files(tmp_path) if secure else None
    async with both("direct", "tcp", tls=tls) as b:
        async with silent(b.address, 3) as first:
            await settle(lambda: len(b.into._greeting) == 3)
            async with silent(b.address, 2) as more:
                await asyncio.gather(*(ended(reader) for reader, _ in more))
            assert len(b.into._greeting) == 3
            first[0][1].close()
            await settle(lambda: len(b.into._greeting) == 2)
            await b.out.connect("d", b.address)
            await settle(lambda: "p" in b.into._links)
            assert len(b.into._greeting) == 2
            await b.out.close()
            await b.into.close()
            await asyncio.gather(*(ended(reader) for reader, _ in first[1:]))
        assert b.into._greeting == set()


@pytest.mark.anyio
@pytest.mark.parametrize("secure", [False, True])
async def test_strangers_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, secure: bool) -> None:
    monkeypatch.setattr(channel, "HELLO_S", 0.1)
    async with both("direct", "tcp", tls=files(tmp_path) if secure else None) as b, silent(b.address, 2) as streams:
        await asyncio.gather(*(ended(reader) for reader, _ in streams))
        await settle(lambda: not b.into._greeting)
