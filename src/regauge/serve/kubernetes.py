"""Workers of two Kubernetes services, from their EndpointSlices (`discovery.k8s.io/v1`): listed, then watched.

The fields: https://kubernetes.io/docs/reference/kubernetes-api/service-resources/endpoint-slice-v1/; how to list and watch, and that 410 means to
list again: https://kubernetes.io/docs/reference/using-api/api-concepts/. The service account needs `get`, `list` and `watch` on endpointslices.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from regauge.config import Role
from regauge.config_discovery import KubernetesConfig
from regauge.errors import ConfigError, ProtocolError
from regauge.observe import ERROR, WORKER, get_logger
from regauge.serve import addresses
from regauge.serve.discovery import Pauses, failed, secret, tls_context
from regauge.serve.etcd import whole
from regauge.serve.registry import Change, Entry, Registry, check

T = TypeVar("T")
CALL_S: Final = 10.0
WATCH_S: Final = 300
"""Seconds after which the server is asked to end a watch; it is begun anew then."""
MAX_ANSWER: Final = 64 << 20
_LINE: Final = 1 << 22
_SERVICE: Final = "kubernetes.io/service-name"
_GONE: Final = 410


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    continued: str = msgspec.field(name="continue", default="")


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Conditions(msgspec.Struct, frozen=True):
    """Each may be missing: ready then counts as true, serving as ready is, terminating as false."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str]
    conditions: _Conditions | None = None
    target_ref: _Target | None = None


class Slice(msgspec.Struct, frozen=True):
    """An EndpointSlice."""

    metadata: _Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[Slice] = []


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _GoneError(ProtocolError):
    """What the watch would begin from is no longer kept."""


class KubernetesSource:
    """A source of workers."""

    def __init__(self, config: KubernetesConfig, limit: int, *, secure: bool) -> None:
        """`secure`: the transfer plane has TLS. Raises ConfigError."""
        self._config = config
        self._limit = limit
        self._secure = secure
        self._tls = tls_context(config.authority)
        path = f"/apis/discovery.k8s.io/v1/namespaces/{config.namespace}/endpointslices"
        self._url = config.url.rstrip("/") + path
        self._selector = f"{_SERVICE} in ({config.prefill},{config.decode})"

    async def watch(self) -> AsyncIterator[list[Change]]:
        """As `discovery.Source`."""
        registry, pauses = Registry(self._limit), Pauses()
        async with aiohttp.ClientSession(read_bufsize=_LINE, trust_env=False) as session:
            while True:
                try:
                    slices, version = await self._list(session)
                    yield self._replace(registry, slices.values())
                    pauses.reset()
                    while True:
                        async for event, each in self._watch(session, version):
                            pauses.reset()
                            version = each.metadata.resource_version
                            if event == "DELETED":
                                slices.pop(each.metadata.name, None)
                            elif event in ("ADDED", "MODIFIED"):
                                slices[each.metadata.name] = each
                            if event != "BOOKMARK":
                                yield self._replace(registry, slices.values())
                        await pauses.wait()  # a server that ends each watch at once is not asked in a circle
                except _GoneError:
                    continue
                except (ProtocolError, ConfigError, TimeoutError) as error:
                    failed("kubernetes", error)
                    await pauses.wait()

    async def _list(self, session: aiohttp.ClientSession) -> tuple[dict[str, Slice], str]:
        slices: dict[str, Slice] = {}
        asked = {"labelSelector": self._selector, "limit": "500"}
        while True:
            async with self._get(session, asked, aiohttp.ClientTimeout(total=CALL_S)) as answer:
                page = _read(await whole(answer, MAX_ANSWER), _List)
            slices |= {each.metadata.name: each for each in page.items}
            if not page.metadata.continued or len(slices) > self._limit:
                return slices, page.metadata.resource_version
            asked["continue"] = page.metadata.continued

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[tuple[str, Slice]]:
        asked = {
            "labelSelector": self._selector, "watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        async with self._get(session, asked, aiohttp.ClientTimeout(total=WATCH_S + CALL_S)) as answer:
            async for line in answer.content:
                event = _read(line, _Event)
                if event.type == "ERROR":
                    status = _read(bytes(event.object), _Status)
                    kind = _GoneError if status.code == _GONE else ProtocolError
                    raise kind(f"kubernetes: {status.code}, {status.message[:200]}")
                yield event.type, _read(bytes(event.object), Slice)

    @asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, query: dict[str, str], limit: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        # Read each time: Kubernetes renews the token in its file.
        token = await asyncio.to_thread(secret, "discovery.kubernetes.token_file", self._config.token_file)
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        try:
            async with session.get(
                f"{self._url}?{urlencode(query)}", headers=headers, timeout=limit, ssl=self._tls, allow_redirects=False
            ) as answer:
                if answer.status == _GONE:
                    raise _GoneError("kubernetes: 410")
                if answer.status != 200:
                    raise ProtocolError(f"kubernetes: {answer.status}, {(await whole(answer, 4_000))[:200]!r}")
                yield answer
        except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a line that is too long
            raise ProtocolError(f"kubernetes: {str(error) or type(error).__name__}") from error

    def _replace(self, registry: Registry, slices: Iterable[Slice]) -> list[Change]:
        entries: dict[str, Entry] = {}
        for each in slices:
            for entry in self._entries(each):
                # A pod may be in several slices while they change: it is ready where one says so.
                if entry.name not in entries or entries[entry.name].draining:
                    entries[entry.name] = entry
        changes, left_out = registry.replace(entries.values(), "its service names it no longer")
        if left_out:
            get_logger(source="kubernetes").error(
                "there are more workers than discovery.max_workers allows", left_out=left_out
            )
        return changes

    def _entries(self, each: Slice) -> Iterator[Entry]:
        config, service = self._config, (each.metadata.labels or {}).get(_SERVICE)
        if service not in (config.prefill, config.decode):
            return
        role: Role = "prefill" if service == config.prefill else "decode"
        ports = {port.name or "": port.port for port in each.ports or [] if port.port is not None}
        for endpoint in each.endpoints or []:
            entry = self._entry(role, endpoint, ports)
            if entry is not None:
                yield entry

    def _entry(self, role: Role, endpoint: _Endpoint, ports: dict[str, int]) -> Entry | None:
        config, said = self._config, endpoint.conditions or _Conditions()
        ready = said.ready is not False
        serving = ready if said.serving is None else said.serving
        if not (ready or (said.terminating and serving)) or not endpoint.addresses:
            return None
        host, target = endpoint.addresses[0], endpoint.target_ref or _Target()
        name = target.name if target.kind == "Pod" else host.replace(":", "-")
        http, control = ports.get(config.http_port), ports.get(config.control_port)
        status = ports.get(config.status_port)
        try:
            if http is None or (role == "decode" and control is None):
                lacking = config.http_port if http is None else config.control_port
                raise ConfigError(f"its service has no port named {lacking!r}")
            address = addresses.assemble(
                name, role, addresses.url_of((host, http)),
                config.prefill_engine if role == "prefill" else config.decode_engine,
                control=(host, control) if role == "decode" and control is not None else None,
                status=(host, status) if status is not None else None, count=config.ranks, secure=self._secure,
            )  # fmt: skip
            entry = Entry(address, instance=target.uid, draining=not ready)
            check(entry)
        except ConfigError as error:
            get_logger(source="kubernetes", **{WORKER: name}).error("a worker is left out", **{ERROR: str(error)})
            return None
        return entry


def _read(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"kubernetes: {error}: {data[:80]!r}") from error
