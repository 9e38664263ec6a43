"""`regauge serve`: starts the gateway, the prefill workers and the decode workers, watches them, and ends them together.

The processes get their specs by file, in a folder that only the owner can read. A worker that dies is started again, under the same
name and ports, and so is a gateway, on the same listening socket, which is kept here; the others go on. One that dies too often is left out for a while
if another of its kind runs; if none does, everything ends. SIGINT and SIGTERM end
everything in order: gateways first, so that requests can finish, then the workers. SIGHUP has the gateways read their files anew (`reload.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.multiprocess import mark_process_dead

from regauge.config import EngineName, ServeConfig, TransferConfig, cache_dir
from regauge.engines.local.prepare import prepare
from regauge.engines.local.weights import weights_digest
from regauge.errors import ConfigError, EngineError, Refused
from regauge.layout.presets import load_model, load_named, with_pages
from regauge.move.auth import load_key
from regauge.move.plane import resolve
from regauge.plan import check
from regauge.planes import enforced, listening, management
from regauge.serve import reload, wire
from regauge.serve.addresses import url_of
from regauge.serve.buckets import Buckets
from regauge.serve.launch import Command, Deployment, commands
from regauge.serve.place import BUCKETS, METRICS, private_socket
from regauge.serve.ports import free_ports
from regauge.serve.quality_gate import from_config
from regauge.serve.server import listen, listeners

READY_S: Final = 300.0
"""Most seconds from start to a ready endpoint: a large model takes time to load."""
STOP_S: Final = 20.0
RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0
PAUSE_S: Final = 15.0
"""For so long a process that dies too often is left out."""
_NAMES: Final[Mapping[EngineName, str]] = {"vllm": "vLLM", "sglang": "SGLang"}

Say = Callable[[str], None]


@dataclass(eq=False)
class Child:
    """One process of ours."""

    command: Command
    listeners: list[socket.socket] = field(default_factory=list)
    """Of a gateway, for clients and on the management plane: kept here, so that one that is started again goes on with its queue of connections."""
    process: asyncio.subprocess.Process | None = None
    deaths: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What the log calls it."""
        return self.command.name

    @property
    def kind(self) -> str:
        """What others of its kind have in their names before the number."""
        return self.name.rpartition("-")[0]

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start it, in a session of its own: Ctrl-C is for the supervisor."""
        handles = [listener.fileno() for listener in self.listeners]
        more = [str(self.command.gateway), *map(str, handles)] if handles else []
        self.process = await asyncio.create_subprocess_exec(
            *self.command.arguments, *more, env=self.command.environment, start_new_session=True, pass_fds=handles
        )

    async def wait(self) -> int:
        """Wait until it has ended, and end what it has left: a vLLM server that dies leaves its engine, and that keeps its ports.

        Returns its exit code, negative for a signal. Raises EngineError where it was never started.
        """
        if self.process is None:
            raise EngineError(f"{self.name} was not started")
        code = await self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its session is its own
        return code

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after STOP_S."""
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self.wait()
        except TimeoutError:
            self.process.kill()
            await self.wait()


def plan_deployment(config: ServeConfig, say: Say) -> Deployment:
    """Find model, key and control plane, build both layouts, and judge the pair. Raises Refused, LayoutError, EngineError, ConfigError."""
    config = enforced(config)
    listen(config.host, config.port, plane=listening(config.planes.business, config.host)).close()
    control = control_address(config.transfer)
    key_file = config.transfer.key_file
    key = load_key(Path(key_file)).hex() if key_file else secrets.token_hex(32)
    folder = prepare(config.model, cache_dir(), say)
    model = load_model(str(folder))
    prefill, decode = [
        None if engine.served or config.external else with_pages(load_named(text, str(folder)), engine.pool_tokens)
        for text, engine in ((config.prefill_layout, config.prefill), (config.decode_layout, config.decode))
    ]
    if config.external:
        return Deployment(config, folder, model.name, None, None, None, control, key)
    gate = from_config(config.quality)
    if prefill is None or decode is None:
        _check_served(config)
        return Deployment(config, folder, model.name, None, prefill, decode, control, key)
    verdict = check(prefill, decode)
    if gate is not None and verdict.path == "CONVERT":
        # Here the weights are at hand, so that the record must be of exactly these; the workers' links see layouts alone.
        verdict = replace(gate, weights=weights_digest(folder)).check(prefill, decode)
    if verdict.path == "REFUSED":
        raise Refused(tuple(str(r) for r in verdict.refusals))
    return Deployment(config, folder, model.name, verdict, prefill, decode, control, key)


def _check_served(config: ServeConfig) -> None:
    """Raise ConfigError for what does not go together with an engine that has an API of its own."""
    if config.quality.require:
        raise ConfigError(
            "quality.require: the layout of vLLM or SGLang is known only once it runs; leave it out, or use the local engine"
        )
    served = (config.prefill.served, config.decode.served)
    if any(each and each.server for each in served) and not config.transfer.key_file:
        raise ConfigError("transfer.key_file: give the file with the key that the servers' adapters have")


def describe(deployment: Deployment) -> str:
    """Return the pair's verdict in a few lines."""
    c, v = deployment.config, deployment.verdict
    if c.external:
        return f"workers  {len(c.workers)} named, and those that are found; see /ready"
    lines = [
        f"prefill  {_NAMES.get(c.prefill.name, c.prefill_layout)}{_times(c.prefill.workers)}",
        f"decode   {_NAMES.get(c.decode.name, c.decode_layout)}{_times(c.decode.workers)}",
    ]
    if v is None:
        return "\n".join([*lines, "path     known when both engines run: see /version"])
    lines.append(f"path     {v.path}: {'; '.join(v.reasons) or 'alike'}")
    return "\n".join(lines + [f"note     {note}" for note in v.notes])


def _times(workers: int) -> str:
    return f", {workers} workers" if workers > 1 else ""


class Supervisor:
    """Runs a deployment until a signal, or until it cannot go on."""

    def __init__(
        self,
        deployment: Deployment,
        say: Say,
        *,
        log_json: bool = False,
        reread: Callable[[], ServeConfig] | None = None,
    ) -> None:
        """`reread` gives the configuration anew; None: as it is, with the files that it names."""
        self._deployment = deployment
        self._reread = reread
        self._say = say
        self._folder = Path(tempfile.mkdtemp(prefix="regauge-"))
        self._stop = asyncio.Event()
        try:
            started = commands(deployment, self._folder, log_json=log_json)
            self.children = {command.name: Child(command) for command in started}
            self.gateways = [child for child in self.children.values() if child.command.gateway is not None]
        except BaseException:  # undone, whatever broke: the folder holds secrets
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    async def run(self) -> int:
        """Start everything, say when it is ready, watch. Returns the exit code: 0 after a signal, 1 if something failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            self._listen()
            for child in self.children.values():
                await child.start()
            watching = asyncio.create_task(self._watch())
            readying = asyncio.create_task(self._announce())
            stopping = asyncio.create_task(self._stop.wait())
            ends: set[asyncio.Task[Any]] = {watching, stopping}
            tasks = (*ends, readying)
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if readying in done:
                    readying.result()
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            if watching in done:
                watching.result()
            return 0 if stopping in done else 1
        finally:
            await self._end()

    async def _end(self) -> None:
        try:
            self._say("stopping")
        finally:  # also where nobody reads any more what is said
            for child in self.gateways:
                for listener in child.listeners:
                    listener.close()  # else who connects now would wait in a queue that nobody serves
            await asyncio.gather(*(child.stop() for child in self.gateways))
            await asyncio.gather(*(child.stop() for child in self.children.values()))
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _announce(self) -> None:
        if self._deployment.role is not None:
            await self._announce_workers()
            return
        url, external = base_url(self._deployment.config), self._deployment.config.external
        waits = [
            wait_ready(private_socket(self._folder, i), READY_S, workers=not external)
            for i in range(len(self.gateways))
        ]
        await asyncio.gather(*waits)
        model = self._deployment.model
        body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Tell me a short story about a train."}}]}}'
        self._say(
            f"ready    {url}\n\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        )

    async def _announce_workers(self) -> None:
        specs = [wire.read_worker_spec(self._folder / f"{name}.json") for name in self.children]
        host = self._deployment.http_host
        urls = [url_of((host, spec.port)) for spec in specs]
        waits = [wait_ready(url, READY_S, workers=False, path=wire.HEALTH_PATH) for url in urls]
        await asyncio.gather(*waits)
        for spec, url in zip(specs, urls, strict=True):
            self._say(f"ready    {spec.name} {url}")
        discovery = self._deployment.config.discovery
        etcd = [] if discovery.etcd is None else discovery.etcd.urls
        self._say(f"registers at {', '.join([*discovery.gateways, *etcd])}")

    def _listen(self) -> None:
        config = self._deployment.config
        if self._deployment.role is not None:
            return
        if config.gateway.processes > 1:
            (self._folder / METRICS).mkdir(mode=0o700)
        Buckets.create(self._folder / BUCKETS)
        planes, count = config.planes, len(self.gateways)
        made = [listeners(config.host, config.port, count, listening(planes.business, config.host))]
        if (plane := management(planes)) is not None:
            made.append(listeners(plane.address, planes.management_port, count, plane, "planes.management_port"))
        for child, own in zip(self.gateways, zip(*made, strict=True), strict=True):
            child.listeners = [*own]

    def _reload(self) -> None:
        """Have the gateways read anew, unless what is to be read is wrong. Workers read nothing anew."""
        if self._deployment.role is not None:
            return
        old = self._deployment.config
        try:
            new = old if self._reread is None else self._reread()
        except ConfigError as error:
            self._say(f"the configuration was not read anew; what was goes on: {error}")
            return
        if waiting := reload.needs_restart(old, new):
            self._say(f"a restart is needed for: {', '.join(waiting)}")
        reload.write(self._folder, new)
        for child in self.gateways:
            if child.process is not None and child.runs:
                child.process.send_signal(signal.SIGHUP)

    async def _watch(self) -> None:
        """Restart what dies; return when the last of its kind dies too often, or one says that its settings are wrong."""
        waits = {asyncio.create_task(child.wait()): child for child in self.children.values()}
        while True:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                child = waits.pop(task)
                code = task.result()
                now = time.monotonic()
                child.deaths = [t for t in child.deaths if t > now - RESTART_WINDOW_S] + [now]
                self._say(f"{child.name} {cause(code)}")
                pause = PAUSE_S if len(child.deaths) > RESTARTS else 0.0
                if code == 2 or (pause and not self._others(child)):
                    return
                if child.command.gateway is not None and child.process is not None and len(self.gateways) > 1:
                    mark_process_dead(child.process.pid, str(self._folder / METRICS))  # type: ignore[no-untyped-call]
                self._say(f"{child.name} is started again" + (f" in {pause:g} s" if pause else ""))
                waits[asyncio.create_task(_again(child, pause))] = child

    def _others(self, child: Child) -> list[Child]:
        """Return those of its kind that run."""
        return [other for other in self.children.values() if other.kind == child.kind and other.runs]


async def _again(child: Child, pause: float) -> int:
    """Start a process that has ended, and wait until it has ended once more."""
    await asyncio.sleep(pause)
    await child.start()
    return await child.wait()


def cause(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(-code).name}"
    return f"died of signal {-code}"


def base_url(config: ServeConfig) -> str:
    """Return where the gateway answers."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.gateway.tls is None else "https"
    return f"{scheme}://{host}:{config.port}"


async def wait_ready(gateway: str | Path, limit_s: float, *, workers: bool = True, path: str = "/ready") -> None:
    """Wait until `/ready` of a gateway, by its URL or private socket, says that all is there, and not only enough to answer.

    Without `workers`, until it answers at all, at `path`. Raises EngineError after `limit_s` seconds.
    """
    unix = aiohttp.UnixConnector(str(gateway)) if isinstance(gateway, Path) else None
    url = gateway if isinstance(gateway, str) else "http://gateway"
    try:
        async with asyncio.timeout(limit_s), aiohttp.ClientSession(connector=unix) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{url}{path}", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                        if not workers or (answer.status == 200 and (await answer.json())["status"] == "ready"):
                            return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise EngineError(f"{gateway} was not ready within {limit_s:g} s; see the log above") from None


def control_address(transfer: TransferConfig) -> str:
    """Return the numeric address of the control plane. Raises ConfigError naming the setting, also where it cannot be bound."""
    setting, host = ("transfer.control", transfer.control) if transfer.control else ("transfer.host", transfer.host)
    try:
        address = resolve(host).address
        free_ports(address)
    except ConfigError as error:
        raise ConfigError(f"{setting} {host!r}: {error}") from error
    return address
