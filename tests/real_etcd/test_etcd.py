"""Workers in a real etcd: they come, renew their leases, go, and stay known while etcd itself is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from etcd_server import Server
from serve_rig import MODEL, TEMPLATE, TOKEN, WAIT_S, open_rig, train
from told import following, one_by_one

from regauge.config_discovery import EtcdConfig
from regauge.errors import ProtocolError
from regauge.serve import wire
from regauge.serve.etcd import Etcd, EtcdSource, keep_in_etcd
from regauge.serve.registry import Change, Drained, Entry, Joined, Left
from regauge.serve.text import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


def entry(name: str, port: int = 1, **fields: object) -> Entry:
    address = wire.WorkerAddress(name, "prefill", f"http://127.0.0.1:{port}", [wire.RankAddress(name)])
    return Entry(address, instance="1", **fields)  # type: ignore[arg-type]


@asynccontextmanager
async def kept(config: EtcdConfig, *entries: Entry, lease_s: float = 10.0) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(keep_in_etcd(config, each, lease_s)) for each in entries]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def watched(config: EtcdConfig, limit: int = 100) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
    """Give the changes, one at a time."""
    return one_by_one(EtcdSource(config, limit))


async def put(etcd: Etcd, name: str, value: bytes) -> None:
    await etcd.put(etcd.prefix + name.encode(), value, "0")


async def asked(server: Server, path: str, body: dict[str, str]) -> Any:
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v3/{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


@asynccontextmanager
async def opened(config: EtcdConfig) -> AsyncIterator[Etcd]:
    etcd = Etcd(config)
    try:
        yield etcd
    finally:
        await etcd.close()


async def test_workers_come_change_and_go(server: Server) -> None:
    config = EtcdConfig([server.url])
    async with watched(config) as changes, opened(config) as etcd, kept(config, entry("a")):
        assert await following(changes) == Joined(entry("a"))
        async with kept(config, entry("b")):
            assert await following(changes) == Joined(entry("b"))
        assert await following(changes) == Left("b", "its key in etcd is gone")
        await put(etcd, "a", msgspec.json.encode(entry("a", draining=True)))
        assert await following(changes) == Drained("a", True)
        await put(etcd, "a", msgspec.json.encode(entry("a", 2)))
        assert await following(changes) == Joined(entry("a", 2))


async def test_a_worker_that_dies_is_gone_when_its_lease_ends(server: Server) -> None:
    config = EtcdConfig([server.url])
    async with watched(config) as changes, opened(config) as etcd:
        lease = await etcd.lease(2)
        await etcd.put(etcd.prefix + b"a", msgspec.json.encode(entry("a")), lease)
        assert await following(changes) == Joined(entry("a"))
        assert await etcd.renew(lease)
        assert await following(changes) == Left("a", "its key in etcd is gone")
        assert not await etcd.renew(lease)


async def test_workers_stay_known_while_etcd_is_away(server: Server) -> None:
    config = EtcdConfig([server.url])
    async with watched(config) as changes, kept(config, entry("a"), lease_s=3.0):
        assert await following(changes) == Joined(entry("a"))
        server.stop()
        nothing = asyncio.ensure_future(anext(changes))
        done, _ = await asyncio.wait([nothing], timeout=1.0)
        assert not done
        await asyncio.to_thread(server.start)
        async with kept(config, entry("b")):
            async with asyncio.timeout(WAIT_S):
                assert await nothing == Joined(entry("b"))


async def test_a_lease_that_has_ended_is_made_anew(server: Server) -> None:
    config = EtcdConfig([server.url])
    async with watched(config) as changes, opened(config) as etcd, kept(config, entry("a"), lease_s=1.0):
        assert await following(changes) == Joined(entry("a"))
        (lease,) = (await asked(server, "lease/leases", {}))["leases"]
        await etcd.revoke(lease["ID"])
        assert await following(changes) == Left("a", "its key in etcd is gone")
        assert await following(changes) == Joined(entry("a"))


async def test_what_is_no_entry_is_left_out(server: Server) -> None:
    config = EtcdConfig([server.url])
    async with opened(config) as etcd:
        await put(etcd, "bad", b"{}")
        await put(etcd, "other", msgspec.json.encode(entry("a")))  # under another's name
        await put(etcd, "good", msgspec.json.encode(entry("good")))
        await etcd.put(b"/regauge/elsewhere", msgspec.json.encode(entry("c")), "0")
        async with watched(config, limit=2) as changes:
            assert await following(changes) == Joined(entry("good"))
            for name in ("d", "e", "f"):
                await put(etcd, name, msgspec.json.encode(entry(name)))
            assert await following(changes) == Joined(entry("d"))  # the others are too many
            await etcd.revoke(await etcd.lease(5))
            assert [name async for name in _names(etcd)] == ["bad", "d", "e", "f", "good", "other"]


async def _names(etcd: Etcd) -> AsyncIterator[str]:
    for key in sorted((await etcd.entries())[0]):
        yield key.removeprefix(etcd.prefix).decode()


async def test_a_watch_from_what_is_no_longer_kept_ends(server: Server) -> None:
    async with opened(EtcdConfig([server.url])) as etcd:
        for port in range(1, 9):
            await put(etcd, "a", msgspec.json.encode(entry("a", port)))
        _, revision = await etcd.entries()
        await asked(server, "kv/compaction", {"revision": str(revision)})
        with pytest.raises(ProtocolError, match="etcd has ended the watch"):
            await anext(etcd.changes(2))


async def test_the_member_that_answers_is_asked(server: Server) -> None:
    async with opened(EtcdConfig(["http://127.0.0.1:1", server.url])) as etcd:
        assert await etcd.entries() == ({}, 1)
    async with opened(EtcdConfig(["http://127.0.0.1:1"])) as etcd:
        with pytest.raises(ProtocolError, match=r"etcd: http://127\.0\.0\.1:1: "):
            await etcd.entries()


async def test_a_user_is_asked_for_its_password(server: Server, tmp_path: Path) -> None:
    for path, body in (
        ("user/add", {"name": "root", "password": "pw"}), ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}), ("enable", {}),
    ):  # fmt: skip
        await asked(server, f"auth/{path}", body)
    (tmp_path / "good").write_text("pw\n")
    (tmp_path / "bad").write_text("other\n")
    async with opened(EtcdConfig([server.url], user="root", password_file=str(tmp_path / "good"))) as etcd:
        await put(etcd, "a", msgspec.json.encode(entry("a")))
        etcd._token = "has-run-out"
        assert len((await etcd.entries())[0]) == 1
    for config in (
        EtcdConfig([server.url], user="root", password_file=str(tmp_path / "bad")),
        EtcdConfig([server.url]),
    ):
        async with opened(config) as etcd:
            with pytest.raises(ProtocolError):
                await etcd.entries()


async def test_a_gateway_serves_with_workers_that_etcd_names(server: Server) -> None:
    config = EtcdConfig([server.url])
    tokenizer = Tokenizer(train(), template=TEMPLATE, max_context=512)
    async with open_rig(tokenizer, pools=[EtcdSource(config, 9)]) as rig:
        own = [Entry(msgspec.structs.replace(each.address, token=TOKEN)) for each in (rig.prefill, rig.decode)]
        async with kept(config, *own):
            async with asyncio.timeout(WAIT_S):
                while (await rig.get("/ready"))[0] != 200:
                    pass
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            assert (await rig.post("/v1/chat/completions", chat))[0] == 200
        async with asyncio.timeout(WAIT_S):
            while (await rig.get("/ready"))[1]["workers"]:
                pass
