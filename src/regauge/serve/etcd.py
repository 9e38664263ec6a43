"""Workers in etcd: entries under a prefix, each with its worker's lease. etcd 3.4 or later, by its JSON gateway (`/v3/...`).

Keys and values are base64, 64-bit numbers are strings (protobuf's JSON): https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from regauge.config_discovery import EtcdConfig
from regauge.errors import ConfigError, ProtocolError
from regauge.observe import ERROR, WORKER, get_logger
from regauge.serve.discovery import Pauses, failed, secret, tls_context
from regauge.serve.registry import Change, Entry, Registry, read

T = TypeVar("T")
_AUTHENTICATE: Final = "/v3/auth/authenticate"
CALL_S: Final = 5.0
WATCH_S: Final = 60.0
"""A watch is begun anew after so long, from all that there is: a connection that has died unseen loses no more than that."""
MAX_ANSWER: Final = 64 << 20
"""Bytes of one answer."""
_LINE: Final = 1 << 21
"""aiohttp's limit for a line is twice its buffer's; a watch's line holds at least one entry."""


class _Value(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""


class _Header(msgspec.Struct, frozen=True):
    revision: str = "0"


class _Range(msgspec.Struct, frozen=True):
    header: _Header
    kvs: list[_Value] = []


class _Event(msgspec.Struct, frozen=True):
    kv: _Value
    type: str = "PUT"


class _Watched(msgspec.Struct, frozen=True):
    events: list[_Event] = []
    canceled: bool = False


class _Line(msgspec.Struct, frozen=True):
    result: _Watched | None = None
    error: Any = None


class _Lease(msgspec.Struct, frozen=True):
    ID: str = "0"
    TTL: str = "0"


class _Kept(msgspec.Struct, frozen=True):
    result: _Lease


class _Token(msgspec.Struct, frozen=True):
    token: str


class _Nothing(msgspec.Struct, frozen=True):
    pass


class Etcd:
    """One cluster. Close it."""

    def __init__(self, config: EtcdConfig) -> None:
        """Raises ConfigError for files that cannot be read."""
        self.prefix = config.prefix.encode()
        self._urls = [url.rstrip("/") for url in config.urls]
        self._user = config.user
        self._password = secret("discovery.etcd.password_file", config.password_file) if config.password_file else ""
        self._token = ""
        self._tls = tls_context(config.authority, config.certificate, config.key)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """End the connections."""
        if self._session is not None:
            await self._session.close()

    async def entries(self) -> tuple[dict[bytes, bytes], int]:
        """Return all values by key, and the revision that they are of. Raises ProtocolError."""
        found = await self._call(
            "/v3/kv/range", {"key": _b64(self.prefix), "range_end": _b64(_after(self.prefix))}, _Range
        )
        return {kv.key: kv.value for kv in found.kvs}, int(found.header.revision)

    async def changes(self, revision: int) -> AsyncIterator[list[tuple[bytes, bytes | None]]]:
        """Yield keys with their new values, None where they are gone, from a revision on. Raises ProtocolError when the watch ends."""
        asked = {"key": _b64(self.prefix), "range_end": _b64(_after(self.prefix)), "start_revision": str(revision)}
        async with self._post("/v3/watch", {"create_request": asked}, aiohttp.ClientTimeout(total=WATCH_S)) as answer:
            async for line in answer.content:
                watched = _read(line, _Line)
                if watched.result is None or watched.result.canceled:
                    raise ProtocolError(f"etcd has ended the watch: {line[:200]!r}")
                if watched.result.events:
                    yield [(e.kv.key, None if e.type == "DELETE" else e.kv.value) for e in watched.result.events]
        raise ProtocolError("etcd has ended the watch")

    async def lease(self, seconds: int) -> str:
        """Return a new lease's name. Raises ProtocolError."""
        return (await self._call("/v3/lease/grant", {"TTL": str(seconds)}, _Lease)).ID

    async def renew(self, lease: str) -> bool:
        """Renew a lease; return whether it was there still. Raises ProtocolError."""
        return int((await self._call("/v3/lease/keepalive", {"ID": lease}, _Kept)).result.TTL) > 0

    async def revoke(self, lease: str) -> None:
        """End a lease, and with it its keys. Raises ProtocolError."""
        await self._call("/v3/lease/revoke", {"ID": lease}, _Nothing)

    async def put(self, key: bytes, value: bytes, lease: str) -> None:
        """Set a key for as long as a lease lasts. Raises ProtocolError."""
        await self._call("/v3/kv/put", {"key": _b64(key), "value": _b64(value), "lease": lease}, _Nothing)

    async def _call(self, path: str, body: dict[str, object], kind: type[T]) -> T:
        try:
            return await self._once(path, body, kind)
        except _UnauthorizedError:
            self._token = ""  # it has run out
            return await self._once(path, body, kind)

    async def _once(self, path: str, body: dict[str, object], kind: type[T]) -> T:
        async with self._post(path, body, aiohttp.ClientTimeout(total=CALL_S)) as answer:
            return _read(await whole(answer, MAX_ANSWER), kind)

    @asynccontextmanager
    async def _post(
        self, path: str, body: dict[str, object], limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask the first member that answers."""
        if self._session is None:
            self._session = aiohttp.ClientSession(read_bufsize=_LINE, trust_env=False)
        if self._user and not self._token and path != _AUTHENTICATE:
            self._token = (
                await self._once(_AUTHENTICATE, {"name": self._user, "password": self._password}, _Token)
            ).token
        headers = {"Authorization": self._token} if self._token else {}
        unreachable: list[str] = []
        for url in self._urls:
            sent = False
            try:
                async with self._session.post(
                    url + path, json=body, headers=headers, timeout=limit, ssl=self._tls, allow_redirects=False
                ) as answer:
                    sent = True
                    if answer.status in (401, 403):
                        raise _UnauthorizedError(f"etcd at {url}: {(await whole(answer, 1_000))[:200]!r}")
                    if answer.status != 200:
                        raise ProtocolError(f"etcd at {url}: {answer.status}, {(await whole(answer, 1_000))[:200]!r}")
                    yield answer
                    return
            except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line that is too long
                if sent and isinstance(error, TimeoutError):
                    raise
                unreachable.append(f"{url}: {str(error) or type(error).__name__}")
                if sent:
                    break
        raise ProtocolError(f"etcd: {'; '.join(unreachable)}")


class EtcdSource:
    """A source of workers."""

    def __init__(self, config: EtcdConfig, limit: int) -> None:
        """Raises ConfigError."""
        self._etcd = Etcd(config)
        self._limit = limit

    async def watch(self) -> AsyncIterator[list[Change]]:
        """As `discovery.Source`."""
        registry, pauses = Registry(self._limit), Pauses()
        try:
            while True:
                try:
                    values, revision = await self._etcd.entries()
                    yield self._replace(registry, values)
                    pauses.reset()
                    async for changes in self._etcd.changes(revision + 1):
                        for key, value in changes:
                            if value is None:
                                values.pop(key, None)
                            else:
                                values[key] = value
                        yield self._replace(registry, values)
                except TimeoutError:
                    continue  # as `WATCH_S` says
                except ProtocolError as error:
                    failed("etcd", error)
                    await pauses.wait()
        finally:
            await self._etcd.close()

    def _replace(self, registry: Registry, values: dict[bytes, bytes]) -> list[Change]:
        entries = [entry for key, value in sorted(values.items()) if (entry := self._entry(key, value)) is not None]
        changes, left_out = registry.replace(entries, "its key in etcd is gone")
        if left_out:
            get_logger(source="etcd").error(
                "there are more workers than discovery.max_workers allows", left_out=left_out
            )
        return changes

    def _entry(self, key: bytes, value: bytes) -> Entry | None:
        name = key.removeprefix(self._etcd.prefix).decode("utf-8", "replace")
        try:
            entry = read(value)
            if entry.name != name:
                raise ConfigError(f"a worker's entry: address.name is {entry.name!r}, but its key says {name[:140]!r}")
        except ConfigError as error:
            get_logger(source="etcd", **{WORKER: name[:140]}).error("a worker is left out", **{ERROR: str(error)})
            return None
        return msgspec.structs.replace(entry, lease_s=None)  # etcd keeps the lease


async def keep_in_etcd(config: EtcdConfig, entry: Entry, lease_s: float) -> None:
    """Keep a worker's entry in etcd until cancelled, and then take it out. Raises ConfigError for files that cannot be read."""
    etcd, pauses, lease = Etcd(config), Pauses(), ""
    try:
        while True:
            try:
                if not lease or not await etcd.renew(lease):
                    lease = await etcd.lease(max(round(lease_s), 1))
                    await etcd.put(etcd.prefix + entry.name.encode(), msgspec.json.encode(entry), lease)
                pauses.reset()
                await asyncio.sleep(lease_s / 3)
            except (ProtocolError, TimeoutError) as error:
                get_logger(source="etcd").warning("not registered", **{ERROR: str(error) or "no answer"})
                await pauses.wait()
    finally:
        if lease:
            with contextlib.suppress(ProtocolError, TimeoutError):
                await etcd.revoke(lease)
        await etcd.close()


class _UnauthorizedError(ProtocolError):
    """The token is no longer good."""


async def whole(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return a body of at most so many bytes. Raises ProtocolError for a longer one."""
    data = bytearray()
    async for chunk in answer.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > most:
            raise ProtocolError(f"{answer.url}: answered with more than {most} bytes")
    return bytes(data)


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"etcd: {error}: {data[:80]!r}") from error


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _after(prefix: bytes) -> bytes:
    """Return the first key after all that begin with a prefix."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"
