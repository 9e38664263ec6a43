"""Workers that register at the gateway over HTTP: `POST /internal/workers` with an entry, again and again as a heartbeat, and
`DELETE /internal/workers/NAME?instance=I` to leave.

Who asks shows that it holds the transfer plane's key: `Authorization: Regauge time=MS, mac=HEX`, an HMAC-SHA256 over the time, the method, the path and
the body, under a key made from that one. The time, in milliseconds since 1970, may be off by `SKEW_S`. What is overheard can be repeated within that
time, and no more: it renews the entry that it was, or makes a worker leave until its next heartbeat. Entries hold the worker's bearer token: give
the gateway TLS where the network is not trusted.

Gateway processes on one port share a folder of entries, and see there what another of them was told, also after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Container
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from regauge.errors import ConfigError
from regauge.observe import ERROR, WORKER, get_logger
from regauge.serve.discovery import Pauses, tls_context
from regauge.serve.openai import ApiError
from regauge.serve.registry import MAX_ENTRY, Change, Entry, Registry, read

PATH: Final = "/internal/workers"
SKEW_S: Final = 60.0
PERIOD_S: Final = 0.5
"""How often a process looks for what another one was told."""
CALL_S: Final = 5.0
_AUTHORIZATION: Final = re.compile(r"Regauge time=([0-9]{1,16}), mac=([0-9a-f]{64})")


def sign(key: bytes, method: str, path: str, body: bytes, now: float) -> str:
    """Return the Authorization header of a call; `now` in seconds since 1970, `path` without the query."""
    at = str(round(now * 1_000))
    return f"Regauge time={at}, mac={_mac(key, at, method, path, body)}"


def signed(header: str | None, key: bytes, method: str, path: str, body: bytes, now: float) -> bool:
    """Whether a call's Authorization header shows the key, not more than SKEW_S ago."""
    found = _AUTHORIZATION.fullmatch(header or "")
    if found is None or abs(now - int(found[1]) / 1_000) > SKEW_S:
        return False
    return hmac.compare_digest(found[2], _mac(key, found[1], method, path, body))


def _mac(key: bytes, at: str, method: str, path: str, body: bytes) -> str:
    own = hmac.digest(key, b"regauge registration", "sha256")
    return hmac.digest(own, f"{at}\n{method}\n{path}\n".encode() + body, "sha256").hex()


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    entry: Entry
    ends_at: float
    """Seconds since 1970."""


class Shelf:
    """A folder of entries, one file for each, that gateway processes share. Raises OSError as its calls do."""

    def __init__(self, folder: Path, limit: int, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970."""
        self._folder = folder
        self._limit = limit
        self._clock = clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, entry: Entry, lease_s: float) -> None:
        """Keep an entry for `lease_s` seconds. Raises ConfigError where there are too many."""
        path = self._folder / f"{entry.name}.json"
        if not path.exists() and len(self.entries()) >= self._limit:
            raise ConfigError(f"there are {self._limit} workers already, as many as discovery.max_workers allows")
        fresh = self._folder / f".{entry.name}.{secrets.token_hex(4)}"
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(_Kept(entry, self._clock() + lease_s)))
        fresh.replace(path)

    def take(self, name: str, instance: str) -> bool:
        """Drop an entry, if it is of this instance; return whether it was there."""
        path = self._folder / f"{name}.json"
        kept = _kept(path)
        if kept is None or kept.entry.instance != instance:
            return False
        path.unlink(missing_ok=True)
        return True

    def entries(self) -> list[Entry]:
        """Return the entries whose lease has not ended; drop the others."""
        entries = []
        for path in sorted(self._folder.glob("[!.]*.json")):
            kept = _kept(path)
            if kept is not None and kept.ends_at > self._clock():
                entries.append(msgspec.structs.replace(kept.entry, lease_s=None))
            else:
                path.unlink(missing_ok=True)
        return entries


def _kept(path: Path) -> _Kept | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class Desk:
    """Where workers register: the endpoints, and the source of what they have said."""

    def __init__(
        self, shelf: Shelf, key: bytes, lease_s: float, limit: int, taken: Container[str] = ()
    ) -> None:  # fmt: skip
        """`lease_s`: of entries that name none. Names that are `taken` are refused."""
        self._shelf = shelf
        self._key = key
        self._lease_s = lease_s
        self._limit = limit
        self._taken = taken
        self._news = asyncio.Event()

    def routes(self) -> list[Route]:
        """Return the endpoints."""
        return [
            Route(PATH, self._register, methods=["POST"]),
            Route(PATH + "/{name}", self._leave, methods=["DELETE"]),
        ]

    async def watch(self) -> AsyncIterator[list[Change]]:
        """As `discovery.Source`."""
        registry, first = Registry(self._limit), True
        while True:
            self._news.clear()
            try:
                entries = await asyncio.to_thread(self._shelf.entries)
                changes, _ = registry.replace(entries, "it has left, or its lease has ended")
                if changes or first:
                    yield changes
                first = False
            except OSError as error:
                get_logger().error("the folder of registered workers cannot be read", **{ERROR: str(error)})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_S):
                    await self._news.wait()

    async def _register(self, request: Request) -> Response:
        body = await self._body(request)
        try:
            entry = read(body)
        except ConfigError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        if entry.name in self._taken:
            raise ApiError(
                409, f"the gateway has a worker {entry.name!r} of its own; choose another name", code="name_taken"
            )
        lease_s = entry.lease_s or self._lease_s
        try:
            await asyncio.to_thread(self._shelf.put, entry, lease_s)
        except ConfigError as error:
            raise ApiError(429, str(error), code="too_many_workers") from error
        self._news.set()
        return Response(msgspec.json.encode({"name": entry.name, "lease_s": lease_s}), media_type="application/json")

    async def _leave(self, request: Request) -> Response:
        await self._body(request)
        name, instance = request.path_params["name"], request.query_params.get("instance", "")
        found = "/" not in name and await asyncio.to_thread(self._shelf.take, name, instance)
        self._news.set()
        return Response(msgspec.json.encode({"found": found}), media_type="application/json")

    async def _body(self, request: Request) -> bytes:
        """Return the body of a call that shows the key. Raises ApiError."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_ENTRY:
                raise ApiError(413, f"a worker's entry has at most {MAX_ENTRY} bytes", code="body_too_large")
        header, path = request.headers.get("authorization"), request.url.path
        if not signed(header, self._key, request.method, path, bytes(body), time.time()):
            raise ApiError(
                401,
                "sign the call with the transfer plane's key, and look at the clocks: docs/pools.md",
                code="unauthorized",
            )
        return bytes(body)


async def keep_registered(url: str, key: bytes, entry: Entry, lease_s: float, authority: str = "") -> None:
    """Keep a worker registered at a gateway until cancelled, and then leave. `authority`: PEM file for a gateway with TLS.

    Raises ConfigError for a file that cannot be read.
    """
    url, pauses, tls = url.rstrip("/"), Pauses(), tls_context(authority)
    body = msgspec.json.encode(msgspec.structs.replace(entry, lease_s=lease_s))
    log = get_logger(gateway=url, **{WORKER: entry.name})

    async def call(session: aiohttp.ClientSession, method: str, path: str, query: str, data: bytes) -> str:
        headers = {"Authorization": sign(key, method, path, data, time.time())}
        try:
            async with session.request(
                method, url + path + query, data=data, headers=headers, ssl=tls, allow_redirects=False
            ) as answer:
                said = (await answer.content.read(1_000)).decode("utf-8", "replace")
                return "" if answer.status == 200 else f"{answer.status}, {said}"
        except (aiohttp.ClientError, OSError) as error:
            return str(error) or type(error).__name__

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_S), trust_env=False) as session:
        try:
            while True:
                if wrong := await call(session, "POST", PATH, "", body):
                    log.warning("not registered", **{ERROR: wrong})
                    await pauses.wait()
                else:
                    pauses.reset()
                    await asyncio.sleep(lease_s / 3)
        finally:
            await call(session, "DELETE", f"{PATH}/{entry.name}", f"?instance={entry.instance}", b"")
