"""Workers of Kubernetes services, against a server that answers as its documentation says; there is no cluster here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from serve_rig import WAIT_S
from standing import listening
from told import following, one_by_one

from regauge.config_discovery import KubernetesConfig
from regauge.serve import wire
from regauge.serve.kubernetes import KubernetesSource
from regauge.serve.registry import Change, Drained, Entry, Joined, Left

PATH = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices"


def endpoint(pod: str, host: str, **conditions: bool | None) -> dict[str, Any]:
    """As in https://kubernetes.io/docs/concepts/services-networking/endpoint-slices/."""
    return {
        "addresses": [host], "conditions": conditions or {"ready": True, "serving": True, "terminating": False},
        "nodeName": "node-1", "zone": "z", "targetRef": {"kind": "Pod", "name": pod, "namespace": "serving", "uid": f"u-{pod}"},
    }  # fmt: skip


def slice_of(name: str, service: str, *endpoints: dict[str, Any], version: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": name, "namespace": "serving", "resourceVersion": str(version),
            "labels": {"kubernetes.io/service-name": service, "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io"},
        },
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}, {"name": "control", "port": 9100, "protocol": "TCP"}],
        **more,
    }  # fmt: skip


class Cluster:
    """The API server: what it lists, and the events of the one watch."""

    def __init__(self, *slices: dict[str, Any]) -> None:
        self.slices = list(slices)
        self.version = 10
        self.events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.status = 200
        self.page = 500
        self.token = "t-1"
        self.lists = 0
        self.watches: list[str] = []

    def tell(self, kind: str, what: dict[str, Any]) -> None:
        self.version += 1
        what = {**what, "metadata": {**what["metadata"], "resourceVersion": str(self.version)}}
        self.events.put_nowait({"type": kind, "object": what})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "kubernetes.io/service-name in (p,d)"
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "status": "Failure", "code": 401}, status=401)
        if self.status != 200:
            return web.json_response({"kind": "Status", "status": "Failure", "code": self.status}, status=self.status)
        return await (self._watch(request) if request.query.get("watch") == "1" else self._list(request))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        self.lists += 1
        start = int(request.query.get("continue") or 0)
        page = self.slices[start : start + self.page]
        more = str(start + self.page) if start + self.page < len(self.slices) else ""
        meta = {"resourceVersion": str(self.version)} | ({"continue": more} if more else {})
        return web.json_response({"kind": "EndpointSliceList", "apiVersion": "v1", "metadata": meta, "items": page})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches.append(request.query["resourceVersion"])
        assert request.query["allowWatchBookmarks"] == "true"
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


@asynccontextmanager
async def watched(
    cluster: Cluster, folder: Path, limit: int = 100, **config: Any
) -> AsyncIterator[AsyncIterator[Change]]:
    """Give the changes, one at a time."""
    await asyncio.to_thread((folder / "token").write_text, cluster.token + "\n")
    async with listening([web.get(PATH, cluster.answer)]) as url:
        rules = KubernetesConfig("serving", "p", "d", url=url, token_file=str(folder / "token"), authority="", **config)
        async with one_by_one(KubernetesSource(rules, limit, secure=False)) as changes:
            yield changes


def entry(name: str, role: Any, host: str, **fields: Any) -> Entry:
    control = (host, 9100) if role == "decode" else None
    shown = f"[{host}]" if ":" in host else host
    address = wire.WorkerAddress(name, role, f"http://{shown}:8000", [wire.RankAddress(name, control)])
    return Entry(address, instance=f"u-{name}", **fields)


@pytest.mark.anyio
async def test_pods_are_workers_while_their_service_names_them(tmp_path: Path) -> None:
    cluster = Cluster(
        slice_of("p-x", "p", endpoint("p-0", "10.1.0.1")), slice_of("d-x", "d", endpoint("d-0", "10.1.0.2"))
    )
    async with watched(cluster, tmp_path) as changes:
        assert await following(changes) == Joined(entry("p-0", "prefill", "10.1.0.1"))
        assert await following(changes) == Joined(entry("d-0", "decode", "10.1.0.2"))
        cluster.tell(
            "ADDED", slice_of("p-y", "p", endpoint("p-1", "10.1.0.3"), endpoint("p-2", "10.1.0.4", ready=False))
        )
        assert await following(changes) == Joined(entry("p-1", "prefill", "10.1.0.3"))
        ending = {"ready": False, "serving": True, "terminating": True}
        cluster.tell("MODIFIED", slice_of("p-y", "p", endpoint("p-1", "10.1.0.3", **ending)))
        assert await following(changes) == Drained("p-1", True)
        cluster.tell("DELETED", slice_of("p-y", "p"))
        assert await following(changes) == Left("p-1", "its service names it no longer")
        cluster.tell(
            "MODIFIED", slice_of("d-x", "d", {"addresses": ["fd00::2"]}, addressType="IPv6")
        )  # no conditions: ready; no pod
        assert await following(changes) == Left("d-0", "its service names it no longer")
        told = await following(changes)
        assert isinstance(told, Joined)
        assert (told.entry.name, told.entry.address.url) == ("fd00--2", "http://[fd00::2]:8000")


@pytest.mark.anyio
async def test_a_pod_in_two_slices_is_ready_where_one_says_so(tmp_path: Path) -> None:
    ending = endpoint("p-0", "10.1.0.1", ready=False, serving=True, terminating=True)
    cluster = Cluster(slice_of("a", "p", ending), slice_of("b", "p", endpoint("p-0", "10.1.0.1")))
    async with watched(cluster, tmp_path) as changes:
        assert await following(changes) == Joined(entry("p-0", "prefill", "10.1.0.1"))
        cluster.tell("DELETED", slice_of("b", "p"))
        assert await following(changes) == Drained("p-0", True)


@pytest.mark.anyio
async def test_lists_come_in_pages_and_watches_go_on_where_they_ended(tmp_path: Path) -> None:
    cluster = Cluster(*(slice_of(f"s-{n}", "p", endpoint(f"p-{n}", f"10.1.0.{n}")) for n in range(5)))
    cluster.page = 2
    async with watched(cluster, tmp_path) as changes:
        for n in range(5):
            assert await following(changes) == Joined(entry(f"p-{n}", "prefill", f"10.1.0.{n}"))
        assert cluster.lists == 3
        cluster.version = 41
        cluster.tell("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})
        cluster.events.put_nowait(None)  # the server ends the watch, as it does every few minutes
        cluster.tell("DELETED", slice_of("s-0", "p"))
        assert await following(changes) == Left("p-0", "its service names it no longer")
        assert cluster.watches == ["10", "42"]
        assert cluster.lists == 3


@pytest.mark.anyio
async def test_what_a_watch_has_missed_is_listed(tmp_path: Path) -> None:
    cluster = Cluster(slice_of("a", "p", endpoint("p-0", "10.1.0.1")))
    async with watched(cluster, tmp_path) as changes:
        assert await following(changes) == Joined(entry("p-0", "prefill", "10.1.0.1"))
        cluster.slices = [slice_of("b", "p", endpoint("p-1", "10.1.0.2"))]
        gone = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": "Expired",
            "code": 410,
            "message": "too old",
        }
        cluster.events.put_nowait({"type": "ERROR", "object": gone})
        assert await following(changes) == Left("p-0", "its service names it no longer")
        assert await following(changes) == Joined(entry("p-1", "prefill", "10.1.0.2"))


@pytest.mark.anyio
async def test_workers_stay_known_while_nobody_answers(tmp_path: Path) -> None:
    cluster = Cluster(slice_of("a", "p", endpoint("p-0", "10.1.0.1")))
    async with watched(cluster, tmp_path) as changes:
        assert await following(changes) == Joined(entry("p-0", "prefill", "10.1.0.1"))
        cluster.status = 500
        cluster.events.put_nowait(None)
        nothing = asyncio.ensure_future(anext(changes))
        assert not (await asyncio.wait([nothing], timeout=0.5))[0]
        cluster.status, cluster.token = 200, "t-2"  # and the token has been renewed meanwhile
        await asyncio.to_thread((tmp_path / "token").write_text, "t-2")
        cluster.slices.append(slice_of("b", "d", endpoint("d-0", "10.1.0.2")))
        async with asyncio.timeout(WAIT_S):
            cluster.events.put_nowait({"type": "ERROR", "object": {"code": 410}})
            assert await nothing == Joined(entry("d-0", "decode", "10.1.0.2"))


@pytest.mark.anyio
async def test_what_cannot_be_a_worker_is_left_out(tmp_path: Path) -> None:
    http = [{"name": "http", "port": 8000}]
    cluster = Cluster(
        slice_of("a", "d", endpoint("d-0", "10.1.0.1"), ports=http),  # decode without its control port
        slice_of("b", "p", endpoint("p-0", "10.1.0.2"), ports=None), slice_of("c", "p", endpoint("bad name", "10.1.0.3")),
        slice_of("d", "elsewhere", endpoint("x", "10.1.0.4")), slice_of("e", "p", {"addresses": []}),
        slice_of("f", "p", endpoint("p-1", "10.1.0.5"), endpoint("p-2", "10.1.0.6"), ports=http), slice_of("g", "p", endpoints=None),
    )  # fmt: skip
    async with watched(cluster, tmp_path, limit=100) as changes:
        assert await following(changes) == Joined(entry("p-1", "prefill", "10.1.0.5"))
        assert await following(changes) == Joined(entry("p-2", "prefill", "10.1.0.6"))
        cluster.tell("DELETED", slice_of("f", "p"))
        assert await following(changes) == Left("p-1", "its service names it no longer")


@pytest.mark.anyio
async def test_an_engines_ranks_have_ports_in_a_row(tmp_path: Path) -> None:
    ports = [{"name": "api", "port": 1}, {"name": "control", "port": 20}, {"name": "status", "port": 30}]
    cluster = Cluster(slice_of("a", "d", endpoint("d-0", "10.1.0.1"), ports=ports))
    async with watched(cluster, tmp_path, decode_engine="vllm", ranks=2, http_port="api") as changes:
        told = await following(changes)
        assert isinstance(told, Joined)
        ranks = [wire.RankAddress(f"d-0.{i}", ("10.1.0.1", 20 + i), f"http://10.1.0.1:{30 + i}") for i in range(2)]
        assert told.entry.address == wire.WorkerAddress("d-0", "decode", "http://10.1.0.1:1", ranks, "vllm")
