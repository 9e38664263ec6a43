"""Several gateway processes on one port: real processes, before workers of the test's."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.parser import text_string_to_metric_families
from serve_rig import MODEL, TEMPLATE, TOKEN, WAIT_S, Rig, free_port, open_rig, train

from certificates import Authority
from regauge.config import LimitsConfig, PlanesConfig, ServeConfig
from regauge.config_gateway import ClientTlsConfig, GatewayConfig
from regauge.errors import ConfigError
from regauge.observe import SHARED
from regauge.serve import reload, wire
from regauge.serve.buckets import Buckets
from regauge.serve.place import BUCKETS, METRICS, Place, is_open, private_socket, share
from regauge.serve.server import listen, listeners
from regauge.serve.tenants import new_key
from regauge.serve.text import Tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.process]
START_S = 60.0


@dataclass
class Gateways:
    """Processes as the supervisor starts them."""

    folder: Path
    config: ServeConfig
    sockets: list[list[socket.socket]]
    """Of each process: for clients, and the management plane's."""
    running: dict[int, asyncio.subprocess.Process]
    rig: Rig
    """Whose workers they ask."""

    def url(self, number: int) -> str:
        """Where a process answers clients, for all or for itself."""
        return f"http://127.0.0.1:{self.sockets[number][0].getsockname()[1]}"

    async def start(self, number: int) -> None:
        handles = [each.fileno() for each in self.sockets[number]]
        self.running[number] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "regauge.serve.gateway", str(self.folder / "spec.json"), str(number), *map(str, handles),
            pass_fds=handles, env={**os.environ, SHARED: str(self.folder / METRICS)},
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def private(self, number: int, path: str = "/ready") -> tuple[int, str]:
        connector = aiohttp.UnixConnector(str(private_socket(self.folder, number)))
        async with aiohttp.ClientSession(connector=connector) as session, session.get(f"http://g{path}") as answer:
            return answer.status, await answer.text()

    async def ready(self, number: int) -> None:
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    if (await self.private(number))[0] == 200:
                        return

    async def kill(self, number: int) -> None:
        process = self.running.pop(number)
        process.kill()
        await process.wait()
        mark_process_dead(process.pid, str(self.folder / METRICS))

    def hang_up(self) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGHUP)


@asynccontextmanager
async def gateways(
    tokenizer: Tokenizer, folder: Path, rules: GatewayConfig, planes: PlanesConfig | None = None, *, apart: bool = False
) -> AsyncIterator[Gateways]:
    """`apart`: each on a port of its own, so that a test can ask the one that it means."""
    (folder / "tokenizer.json").write_text(train().to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    (folder / METRICS).mkdir()
    Buckets.create(folder / BUCKETS)
    config = ServeConfig(port=free_port(), gateway=rules, planes=planes or PlanesConfig())
    async with open_rig(tokenizer) as rig:
        workers = [rig.prefill.address, rig.decode.address]
        spec = wire.GatewaySpec(config, str(folder), MODEL, TOKEN, workers, wire.VerdictInfo("DIRECT"))
        wire.write_spec(folder / "spec.json", spec)
        ports = range(rules.processes)
        made = [[listen(config.host, 0) for _ in ports] if apart else listeners(config.host, config.port, len(ports))]
        if planes is not None:
            made.append(listeners(planes.management, planes.management_port, rules.processes))
        found = Gateways(folder, config, [[*each] for each in zip(*made, strict=True)], {}, rig)
        try:
            for number in range(rules.processes):
                await found.start(number)
            await asyncio.gather(*(found.ready(number) for number in range(rules.processes)))
            yield found
        finally:
            for each in itertools.chain(*found.sockets):
                each.close()
            for process in found.running.values():
                process.terminate()
            codes = await asyncio.wait_for(asyncio.gather(*(p.wait() for p in found.running.values())), WAIT_S)
            assert set(codes) <= {-signal.SIGTERM}


def total(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_they_share_port_limits_and_metrics_and_one_that_dies_is_missed_by_nobody(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    key, digest = new_key()
    (tmp_path / "tenants.toml").write_text(f'[tenant.acme]\nkeys = ["{digest}"]\nrequests_per_minute = 1000\n')
    rules = GatewayConfig(tenants=str(tmp_path / "tenants.toml"), processes=2)
    body = {"model": MODEL, "prompt": "a b c", "max_tokens": 2}
    headers = {"x-api-key": key}
    async with gateways(tokenizer, tmp_path, rules) as all_:
        url = f"http://127.0.0.1:{all_.config.port}"

        async def ask() -> int:
            """Ask over a connection of its own."""
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.post(f"{url}/v1/completions", json=body) as answer,
            ):
                return answer.status

        async def counted(number: int, requests: int) -> str:
            """Return a process's metrics, once so many requests are in them: a request is counted when its answer is out."""
            async with asyncio.timeout(WAIT_S):
                while True:
                    _, text = await all_.private(number, "/metrics")
                    if total(text, "regauge_requests_total", route="/v1/completions", status="200") == requests:
                        return text

        assert await asyncio.gather(*(ask() for _ in range(40))) == [200] * 40
        text = await counted(0, 40)
        assert total(text, "regauge_worker_up", role="decode") == 1
        assert total(text, "regauge_completion_tokens_total") == 80
        files = {path.name for path in (tmp_path / METRICS).glob("counter_*.db")}
        assert len(files) == 2, "both processes have answered something"
        for path in (tmp_path / METRICS).glob("counter_*.db"):
            assert b"/v1/completions" in path.read_bytes()

        await all_.kill(0)
        asked = asyncio.gather(*(ask() for _ in range(20)))  # some wait in the queue of the dead one
        await all_.start(0)
        assert await asyncio.wait_for(asked, START_S) == [200] * 20
        text = await counted(1, 60)
        assert total(text, "regauge_requests_in_flight") == 0

        (tmp_path / "tenants.toml").write_text("no toml")
        all_.hang_up()
        assert await asyncio.gather(*(ask() for _ in range(10))) == [200] * 10
        (tmp_path / "tenants.toml").write_text(f'[tenant.acme]\nkeys = ["{new_key()[1]}"]\n')
        all_.hang_up()
        async with asyncio.timeout(WAIT_S):
            while set(await asyncio.gather(*(ask() for _ in range(10)))) != {401}:
                pass


async def test_tls_for_clients_and_certificates_that_change_under_open_connections(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    for authority, name in ((old, "a"), (new, "b")):
        authority.issue(name)
    tls = ClientTlsConfig(str(tmp_path / "a.pem"), str(tmp_path / "a.key"))

    def trusting(authority: Authority) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(authority.path))
        context.check_hostname = False
        return context

    async with gateways(tokenizer, tmp_path, GatewayConfig(tls=tls)) as all_:
        url = f"https://127.0.0.1:{all_.config.port}/health"

        async def works(context: ssl.SSLContext) -> bool:
            async with aiohttp.ClientSession() as session:
                try:
                    async with session.get(url, ssl=context) as answer:
                        return answer.status == 200
                except aiohttp.ClientSSLError:
                    return False

        before = trusting(old)
        async with aiohttp.ClientSession() as session:
            async with session.get(url, ssl=before) as answer:
                assert answer.status == 200
            assert not await works(trusting(new))
            bad = ClientTlsConfig(str(tmp_path / "b.pem"), str(tmp_path / "a.key"))  # they do not belong together
            reload.write(tmp_path, msgspec.structs.replace(all_.config, gateway=GatewayConfig(tls=bad)))
            all_.hang_up()
            assert (await all_.private(0))[0] == 200
            assert await works(trusting(old))
            good = ClientTlsConfig(str(tmp_path / "b.pem"), str(tmp_path / "b.key"))
            reload.write(tmp_path, msgspec.structs.replace(all_.config, gateway=GatewayConfig(tls=good)))
            all_.hang_up()
            async with asyncio.timeout(WAIT_S):
                while not await works(trusting(new)):
                    pass
            assert not await works(trusting(old))
            async with session.get(url, ssl=before) as answer:  # over the connection from before
                assert answer.status == 200


async def test_what_operators_ask_is_answered_by_the_management_plane_alone(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """By every process, without keys, loopback or TLS."""
    authority = Authority(tmp_path)
    authority.issue("a")
    (tmp_path / "tenants.toml").write_text(f'[tenant.acme]\nkeys = ["{new_key()[1]}"]\n')
    tls = ClientTlsConfig(str(tmp_path / "a.pem"), str(tmp_path / "a.key"))
    rules = GatewayConfig(tenants=str(tmp_path / "tenants.toml"), processes=2, tls=tls, max_connections=4)
    planes = PlanesConfig(management="127.0.0.9", management_port=free_port())
    async with gateways(tokenizer, tmp_path, rules, planes) as all_, aiohttp.ClientSession() as session:
        context = ssl.create_default_context(cafile=str(authority.path))
        context.check_hostname = False

        async def ask(path: str, *, management: bool) -> tuple[int, str]:
            host = (
                f"http://127.0.0.9:{planes.management_port}" if management else f"https://127.0.0.1:{all_.config.port}"
            )
            async with session.get(host + path, ssl=context, headers={"connection": "close"}) as answer:
                return answer.status, await answer.text()

        paths = ("/health", "/metrics", "/debug/transfers", "/debug/why/x", "/v1/models", "/v1/usage")
        assert [(await ask(path, management=False))[0] for path in paths] == [200, 404, 404, 404, 401, 401]
        assert [(await ask(path, management=True))[0] for path in paths] == [200, 200, 200, 404, 404, 404]
        assert (
            '"request_not_found"' in (await ask("/debug/why/x", management=True))[1]
        )  # and not that there is no such page
        for _ in range(20):
            assert (await ask("/debug/transfers", management=True))[0] == 200
        _, text = await ask("/metrics", management=True)
        assert total(text, "regauge_requests_total", route="/debug/transfers", status="200") == 21
        crowd = aiohttp.TCPConnector(limit=0, ssl=context, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=crowd) as clients:
            health = f"https://127.0.0.1:{all_.config.port}/health"
            answers = await asyncio.gather(*(clients.get(health) for _ in range(40)))
            assert {each.status for each in answers} == {200, 503}, "there are more than it takes"
            assert (await ask("/metrics", management=True))[0] == 200
        files = [path.read_bytes() for path in (tmp_path / METRICS).glob("counter_*.db")]
        assert len([each for each in files if b"/debug/transfers" in each]) == 2, "both processes have answered"


def test_ports_are_shared_among_ourselves_alone() -> None:
    [one] = listeners("127.0.0.1", free_port(), 1)
    with one, pytest.raises(ConfigError, match="is taken"):
        listeners("127.0.0.1", one.getsockname()[1], 3)
    several = listeners("127.0.0.1", free_port(), 3)
    try:
        port = several[0].getsockname()[1]
        assert {each.getsockname()[1] for each in several} == {port}
        with pytest.raises(ConfigError, match="is taken"):
            listen("127.0.0.1", port)
    finally:
        for each in several:
            each.close()


def test_the_house_is_divided_and_an_open_gateway_is_known() -> None:
    config = ServeConfig(limits=LimitsConfig(max_queue=10), gateway=GatewayConfig(processes=4))
    assert share(config).max_queue == 3
    assert is_open("0.0.0.0", GatewayConfig())  # noqa: S104  # nothing is bound
    assert is_open("::", GatewayConfig())
    assert not is_open("127.0.0.1", GatewayConfig())
    assert not is_open("::1", GatewayConfig())
    assert not is_open("10.0.0.1", GatewayConfig(tenants="t.toml"))
    assert is_open("10.0.0.1", GatewayConfig(tls=ClientTlsConfig("c", "k")))
    assert not is_open("10.0.0.1", GatewayConfig(tls=ClientTlsConfig("c", "k", "a")))


def test_a_socket_that_was_not_passed_on_is_named() -> None:
    with pytest.raises(ConfigError, match="listening socket 9999"):
        Place(handle=9999).listener(ServeConfig())
