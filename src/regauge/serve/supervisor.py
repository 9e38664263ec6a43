"""`regauge serve`: starts the gateway, the prefill worker and the decode worker, watches them, and ends them together.

The processes get their specs by file, in a folder that only the owner can read. A worker that dies is started again, under the same
name and ports; after too many deaths everything ends. SIGINT and SIGTERM end everything in order: gateway first, so that
requests can finish, then the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from regauge.config import ServeConfig, TransferConfig, cache_dir
from regauge.engines.local.prepare import prepare
from regauge.engines.local.weights import weights_digest
from regauge.errors import ConfigError, EngineError, Refused
from regauge.layout import files
from regauge.layout.presets import load_model, load_named, with_pages
from regauge.layout.spec import Layout
from regauge.move.auth import load_key
from regauge.move.plane import resolve
from regauge.plan import Verdict, check
from regauge.serve import wire
from regauge.serve.gateway import listen
from regauge.serve.quality_gate import from_config

READY_S: Final = 300.0
"""Most seconds from start to a ready endpoint: a large model takes time to load."""
STOP_S: Final = 20.0
RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0
GATEWAY, PREFILL, DECODE = "gateway", "prefill-0", "decode-0"

Say = Callable[[str], None]


@dataclass(eq=False)
class Child:
    """One process of ours."""

    name: str
    module: str
    spec: Path
    process: asyncio.subprocess.Process | None = None
    deaths: list[float] = field(default_factory=list)

    async def start(self) -> None:
        """Start it, in a session of its own: Ctrl-C is for the supervisor."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module, str(self.spec), start_new_session=True)  # fmt: skip

    async def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL after STOP_S."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@dataclass(frozen=True)
class Deployment:
    """What is started: made by `plan_deployment`, before any process runs."""

    config: ServeConfig
    folder: Path
    model: str
    verdict: Verdict
    prefill: Layout
    decode: Layout
    control: str
    """Numeric address at which decode takes control connections."""
    key: str = field(repr=False)
    """Pre-shared key of the transfer plane, in hex."""


def plan_deployment(config: ServeConfig, say: Say) -> Deployment:
    """Find model, key and control plane, build both layouts, and judge the pair. Raises Refused, LayoutError, EngineError, ConfigError."""
    listen(config.host, config.port).close()
    control = control_address(config.transfer)
    key_file = config.transfer.key_file
    key = load_key(Path(key_file)).hex() if key_file else secrets.token_hex(32)
    folder = prepare(config.model, cache_dir(), say)
    model = load_model(str(folder))
    prefill, decode = [
        with_pages(load_named(text, str(folder)), engine.pool_tokens)
        for text, engine in ((config.prefill_layout, config.prefill), (config.decode_layout, config.decode))
    ]
    gate, verdict = from_config(config.quality), check(prefill, decode)
    if gate is not None and verdict.path == "CONVERT":
        # Here the weights are at hand, so that the record must be of exactly these; the workers' links see layouts alone.
        verdict = replace(gate, weights=weights_digest(folder)).check(prefill, decode)
    if verdict.path == "REFUSED":
        raise Refused(tuple(str(r) for r in verdict.refusals))
    return Deployment(config, folder, model.name, verdict, prefill, decode, control, key)


def describe(deployment: Deployment) -> str:
    """Return the pair's verdict in a few lines."""
    c, v = deployment.config, deployment.verdict
    lines = [
        f"prefill  {c.prefill_layout}",
        f"decode   {c.decode_layout}",
        f"path     {v.path}: {'; '.join(v.reasons) or 'alike'}",
    ]
    return "\n".join(lines + [f"note     {note}" for note in v.notes])


class Supervisor:
    """Runs a deployment until a signal, or until it cannot go on."""

    def __init__(self, deployment: Deployment, say: Say, *, log_json: bool = False) -> None:
        self._deployment = deployment
        self._say = say
        self._log_json = log_json
        self._folder = Path(tempfile.mkdtemp(prefix="regauge-"))
        self._stop = asyncio.Event()
        try:
            self.children = self._write_specs()
        except BaseException:  # undone, whatever broke: the folder holds secrets
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _write_specs(self) -> dict[str, Child]:
        d = self._deployment
        token = secrets.token_hex(32)
        ports = free_ports(wire.WORKER_HOST, wire.WORKER_HOST, d.control)
        addresses = {DECODE: (d.control, ports[2])}
        children = {}
        for name, role, layout, port in (
            (DECODE, "decode", d.decode, ports[0]),
            (PREFILL, "prefill", d.prefill, ports[1]),
        ):
            worker = wire.WorkerSpec(
                config=d.config, name=name, role="decode" if role == "decode" else "prefill", model_folder=str(d.folder),
                model_name=d.model, layout=files.encode(layout, format="json"), token=token, key=d.key, port=port,
                control_port=ports[2] if role == "decode" else 0, peers=addresses, log_json=self._log_json)  # fmt: skip
            children[name] = Child(name, "regauge.serve.worker_process", self._write(name, worker))
        gateway = wire.GatewaySpec(
            config=d.config, model_folder=str(d.folder), model_name=d.model, token=token,
            workers=[wire.WorkerAddress(PREFILL, "prefill", f"http://{wire.WORKER_HOST}:{ports[1]}"),
                     wire.WorkerAddress(DECODE, "decode", f"http://{wire.WORKER_HOST}:{ports[0]}")],
            verdict=wire.VerdictInfo(d.verdict.path, "; ".join(d.verdict.reasons)), log_json=self._log_json)  # fmt: skip
        children[GATEWAY] = Child(GATEWAY, "regauge.serve.gateway", self._write(GATEWAY, gateway))
        return children

    def _write(self, name: str, value: msgspec.Struct) -> Path:
        path = self._folder / f"{name}.json"
        wire.write_private(path, msgspec.json.encode(value))
        return path

    async def run(self) -> int:
        """Start everything, say when it is ready, watch. Returns the exit code: 0 after a signal, 1 if something failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        try:
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
            await self.children[GATEWAY].stop()
            await asyncio.gather(*(child.stop() for child in self.children.values()))
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _announce(self) -> None:
        url = base_url(self._deployment.config)
        await wait_ready(url, READY_S)
        model = self._deployment.model
        body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Tell me a short story about a train."}}]}}'
        self._say(
            f"ready    {url}\n\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        )

    async def _watch(self) -> None:
        """Restart workers that die; return when the gateway dies, or a worker too often."""
        waits = {asyncio.create_task(self._wait(child)): child for child in self.children.values()}
        while True:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                child = waits.pop(task)
                code = task.result()
                now = time.monotonic()
                child.deaths = [t for t in child.deaths if t > now - RESTART_WINDOW_S] + [now]
                self._say(f"{child.name} {cause(code)}")
                if child.name == GATEWAY or code == 2 or len(child.deaths) > RESTARTS:
                    return
                self._say(f"{child.name} is started again")
                await child.start()
                waits[asyncio.create_task(self._wait(child))] = child

    @staticmethod
    async def _wait(child: Child) -> int:
        if child.process is None:
            raise EngineError(f"{child.name} was not started")
        return await child.process.wait()


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
    return f"http://{host}:{config.port}"


async def wait_ready(url: str, limit_s: float) -> None:
    """Wait until `/ready` answers 200. Raises EngineError after `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise EngineError(f"{url} was not ready within {limit_s:g} s; see the log above") from None


def control_address(transfer: TransferConfig) -> str:
    """Return the numeric address of the control plane. Raises ConfigError naming the setting, also where it cannot be bound."""
    setting, host = ("transfer.control", transfer.control) if transfer.control else ("transfer.host", transfer.host)
    try:
        address = resolve(host).address
        free_ports(address)
    except ConfigError as error:
        raise ConfigError(f"{setting} {host!r}: {error}") from error
    return address


def free_ports(*hosts: str) -> list[int]:
    """Return a port for each of these numeric addresses that nobody listens on now; ports of one address are unlike.

    Raises ConfigError for an address that cannot be bound.
    """
    ports = []
    with contextlib.ExitStack() as stack:  # all are held until the last is found, so that none is found twice
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            try:
                sock.bind((host, 0))
            except OSError as error:
                raise ConfigError(
                    f"{host} cannot be bound: {error.strerror}; give an address of this machine"
                ) from error
            ports.append(int(sock.getsockname()[1]))
    return ports
