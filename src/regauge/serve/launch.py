"""What `regauge serve` starts: a command for the gateway and one for each worker, and where each of them is reached.

Specs, settings and keys go by file, in a folder that only the owner can read; vLLM's API key by its environment. Anybody can read a command line.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from regauge.config import EngineConfig, EngineName, Role, ServeConfig, ServedConfig, ServerConfig
from regauge.engines.settings import SGLANG, Settings
from regauge.errors import ConfigError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.observe import SHARED
from regauge.plan import Verdict
from regauge.serve import addresses, signing, wire
from regauge.serve.discovery import secret
from regauge.serve.pairing import UNKNOWN
from regauge.serve.ports import consecutive_ports

GATEWAY: Final = "gateway"
CONNECTOR: Final = "regauge.engines.vllm.connector"
BACKEND: Final = "regauge"
"""As SGLang's transfer backend."""
_SERVERS: Final[Mapping[EngineName, str]] = {
    "vllm": "vllm.entrypoints.openai.api_server",
    "sglang": "sglang.launch_server",
}
_DEFAULTS: Final[Mapping[EngineName, Mapping[str, str]]] = {
    "vllm": {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind both engines to the same cores
    },
    "sglang": {"SGLANG_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"},
}
"""Environment of a server that is started here, where the user's own says nothing else."""
_PORTS: Final = 1 << 16


@dataclass(frozen=True)
class Deployment:
    """What is started: made by `plan_deployment`, before any process runs."""

    config: ServeConfig
    folder: Path
    model: str
    verdict: Verdict | None
    """None: an engine tells its layout once it runs."""
    prefill: Layout | None
    """None: that engine has an API of its own, and tells its layout."""
    decode: Layout | None
    control: str
    """Numeric address at which decode takes control connections."""
    key: str = field(repr=False)
    """Pre-shared key of the transfer plane, in hex."""
    role: Role | None = None
    """Workers of this role alone are started, and no gateway: they register elsewhere. None: a gateway, and workers of both."""
    name: str = ""
    """Of that worker, or what those of several begin with."""

    @property
    def http_host(self) -> str:
        """Numeric address at which the local workers answer gateways."""
        return self.config.discovery.advertise or wire.WORKER_HOST


@dataclass(frozen=True)
class Command:
    """One process."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = field(default=None, repr=False)
    gateway: int | None = None
    """The number of a gateway process."""


def commands(deployment: Deployment, folder: Path, *, log_json: bool = False) -> list[Command]:
    """Write the specs into `folder`, and return what is to be started: decode workers, prefill workers, the gateway; of one role alone, its workers.

    Raises ConfigError for addresses that cannot be had, and for signing keys that cannot be read.
    """
    d, roles = deployment, _roles(deployment)
    needed = [_ports(d.config.engine(role)) for _, role, _ in roles]
    port = _first_port(d, sum(needed))
    signed = [name for name, _, layout in roles if layout is not None]
    plan = _Plan(d, folder, secrets.token_hex(32), _signing(d, folder, signed), log_json)
    wire.write_private(plan.key_file, d.key.encode())
    for (name, role, layout), count in zip(roles, needed, strict=True):
        plan.add(name, role, layout, port)
        port += count
    return plan.started if d.role is not None else [*plan.started, *_gateways(plan, roles)]


def _gateways(plan: _Plan, roles: Sequence[tuple[str, Role, Layout | None]]) -> list[Command]:
    d, folder = plan.deployment, plan.folder
    verdict = (
        wire.VerdictInfo(UNKNOWN)
        if d.verdict is None
        else wire.VerdictInfo(d.verdict.path, "; ".join(d.verdict.reasons))
    )
    gateway = wire.GatewaySpec(
        config=d.config, model_folder=str(d.folder), model_name=d.model, token=plan.token, workers=plan.addresses, verdict=verdict,
        layouts={name: files.encode(layout, format="json") for name, _, layout in roles if layout is not None},
        key=d.key if _needs_key(d.config, plan.addresses) else "", log_json=plan.log_json,
        name=GATEWAY, signing_key=str(plan.signing[GATEWAY]), trust=str(plan.signing[GATEWAY].parent / signing.TRUST),
    )  # fmt: skip
    path, count = _write(folder, GATEWAY, gateway), d.config.gateway.processes
    started = []
    for number in range(count):
        name = GATEWAY if count == 1 else f"{GATEWAY}-{number}"
        shared = None if count == 1 else {**os.environ, SHARED: str(folder / "metrics")}
        started.append(replace(_module("regauge.serve.gateway", name, path), gateway=number, environment=shared))
    return started


def _needs_key(config: ServeConfig, started: Sequence[wire.WorkerAddress]) -> bool:
    """Whether a gateway asks engines' status, or lets workers register: both by tokens made of the transfer plane's key."""
    engines: set[EngineName] = {*(each.engine for each in started), *(each.engine for each in config.workers)}
    return bool(engines - {"local"}) or bool(config.transfer.key_file)


def _roles(d: Deployment) -> list[tuple[str, Role, Layout | None]]:
    """Return every worker's name, role and layout, decode first: prefill workers are told where those are."""
    if d.config.external:
        return []
    if d.role is not None:
        count, layout = d.config.engine(d.role).workers, d.decode if d.role == "decode" else d.prefill
        return [(d.name if count == 1 else f"{d.name}-{i}", d.role, layout) for i in range(count)]
    layouts: tuple[tuple[Role, Layout | None], ...] = (("decode", d.decode), ("prefill", d.prefill))
    return [(f"{role}-{i}", role, layout) for role, layout in layouts for i in range(d.config.engine(role).workers)]


def _signing(d: Deployment, folder: Path, workers: Sequence[str]) -> dict[str, Path]:
    """Make the keys that lack, and the folders of keys and journals. Raises ConfigError."""
    try:
        for name, given in (("keys", d.config.meter.keys), ("state", d.config.meter.state)):
            (Path(given) if given else folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"meter.{name}: {error}") from error
    gateways = [GATEWAY] if d.role is None else []
    return signing.prepare(Path(d.config.meter.keys or folder / "keys"), gateways, workers)


@dataclass
class _Plan:
    """What is started so far, and where it is reached."""

    deployment: Deployment
    folder: Path
    token: str
    signing: Mapping[str, Path]
    log_json: bool
    started: list[Command] = field(default_factory=list)
    addresses: list[wire.WorkerAddress] = field(default_factory=list)
    peers: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Control addresses of the decode workers' ranks."""

    @property
    def key_file(self) -> Path:
        """Of the transfer plane."""
        return self.folder / "key"

    def add(self, name: str, role: Role, layout: Layout | None, port: int) -> None:
        """Plan a worker, with its ports from `port` on. Raises ConfigError."""
        d = self.deployment
        engine = d.config.engine(role)
        if engine.served is not None and engine.served.server is not None:
            address = _elsewhere(role, engine, engine.served.server, secure=d.config.transfer.tls is not None)
        elif engine.served is not None:
            given = _Given(name, role, engine, engine.served, port)
            arguments, secret = _ARGUMENTS[engine.name](d, given, self.token, self.folder, self.key_file)
            address = given.address(d)
            self.started.append(given.command(arguments, secret, d.config.threads(role)))
        else:
            if layout is None:
                raise ConfigError(f"{role}: a local engine has a layout")
            spec = self._local(name, role, layout, port)
            rank = wire.RankAddress(name, (d.control, spec.control_port))
            address = wire.WorkerAddress(name, role, addresses.url_of((d.http_host, port)), [rank])
            self.started.append(_module("regauge.serve.worker_process", name, _write(self.folder, name, spec)))
        if role == "decode":
            self.peers |= address.receivers
        self.addresses.append(address)

    def _local(self, name: str, role: Role, layout: Layout, port: int) -> wire.WorkerSpec:
        """Return the spec of a worker of our own. It has a control port whatever its role is, since that may change."""
        d = self.deployment
        return wire.WorkerSpec(
            config=d.config, name=name, role=role, model_folder=str(d.folder), model_name=d.model,
            layout=files.encode(layout, format="json"), token=self.token, key=d.key, port=port, control_port=port + 1,
            peers=dict(self.peers) if role == "prefill" else {}, log_json=self.log_json,
            signing_key=str(self.signing[name]), state=d.config.meter.state or str(self.folder / "state"),
        )  # fmt: skip


def _module(module: str, name: str, spec: Path) -> Command:
    return Command(name, (sys.executable, "-m", module, str(spec)))


def _write(folder: Path, name: str, value: msgspec.Struct) -> Path:
    path = folder / f"{name}.json"
    wire.write_private(path, msgspec.json.encode(value))
    return path


@dataclass(frozen=True)
class _Given:
    """A server that is started here. From `port` on it has that of its API, of its ranks' control connections, of their status, and of prefill's rooms."""

    name: str
    role: Role
    engine: EngineConfig
    served: ServedConfig
    port: int

    @property
    def control(self) -> int:
        """Of rank 0."""
        return self.port + 1

    @property
    def status(self) -> int:
        """Of rank 0."""
        return self.control + self.served.ranks

    @property
    def rooms(self) -> int:
        """Of SGLang's prefill."""
        return self.status + self.served.ranks

    def settings(self, d: Deployment, key_file: Path) -> Settings:
        """Return what the engine's adapter is told."""
        return Settings(
            name=self.name, model=d.model, transfer=msgspec.structs.replace(d.config.transfer, key_file=str(key_file)),
            port=self.control if self.role == "decode" else 0, status_port=self.status,
        )  # fmt: skip

    def address(self, d: Deployment) -> wire.WorkerAddress:
        """Return where the gateway and the ranks' peers find it."""
        ranks = [
            wire.RankAddress(
                f"{self.name}.{i}",
                (d.control, self.control + i) if self.role == "decode" else None,
                addresses.url_of((d.control, self.status + i), secure=d.config.transfer.tls is not None),
            )
            for i in range(self.served.ranks)
        ]
        url = f"http://{wire.WORKER_HOST}:{self.port}"
        return wire.WorkerAddress(self.name, self.role, url, ranks, self.engine.name)

    def command(self, arguments: Sequence[str], own: Mapping[str, str], threads: int) -> Command:
        """Return how it is started. `own`: variables that the user's environment does not change."""
        python = self.served.python or sys.executable
        start = (sys.executable, "-m", "regauge.serve.tied", python, "-m", _SERVERS[self.engine.name])
        environment = {**_DEFAULTS[self.engine.name], "OMP_NUM_THREADS": str(threads), **os.environ, **own}
        return Command(self.name, (*start, *arguments, *self.served.args), environment)


def _vllm(
    d: Deployment, given: _Given, token: str, folder: Path, key_file: Path
) -> tuple[list[str], Mapping[str, str]]:
    del folder
    connector = {
        "kv_connector": "RegaugeConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer" if given.role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": msgspec.to_builtins(given.settings(d, key_file)),
    }
    arguments = [
        "--model", str(d.folder), "--served-model-name", d.model, "--host", wire.WORKER_HOST, "--port", str(given.port),
        "--max-model-len", str(given.engine.max_context), "--tensor-parallel-size", str(given.served.ranks),
        "--enable-prompt-tokens-details", "--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(connector),
    ]  # fmt: skip
    return arguments, {"VLLM_API_KEY": token}


def _sglang(
    d: Deployment, given: _Given, token: str, folder: Path, key_file: Path
) -> tuple[list[str], Mapping[str, str]]:
    """SGLang reads its API key from an option alone, and options from a file."""
    told, options = folder / f"{given.name}.toml", folder / f"{given.name}.yaml"
    wire.write_private(told, msgspec.toml.encode(_valued(msgspec.to_builtins(given.settings(d, key_file)))))
    wire.write_private(options, json.dumps({"api-key": token}).encode())
    arguments = [
        "--config", str(options), "--model-path", str(d.folder), "--served-model-name", d.model,
        "--host", wire.WORKER_HOST, "--port", str(given.port), "--context-length", str(given.engine.max_context),
        "--tp-size", str(given.served.ranks), "--disaggregation-mode", given.role,
        "--disaggregation-transfer-backend", BACKEND, "--disable-overlap-schedule",
        "--incremental-streaming-output", "--log-level", "warning",
    ]  # fmt: skip
    if given.role == "prefill":  # whoever asks it for a room; the gateway's requests name their ranks
        arguments += ["--disaggregation-bootstrap-port", str(given.rooms)]
    own = {SGLANG: str(told)}
    if "cpu" in _values(given.served.args, "--device"):
        own["SGLANG_USE_CPU_ENGINE"] = "1"  # which its own option does not do
    return arguments, own


_ARGUMENTS: Final = {"vllm": _vllm, "sglang": _sglang}


def _valued(value: Any) -> Any:
    """Leave out what is None, which TOML has no word for."""
    if isinstance(value, dict):
        return {name: _valued(each) for name, each in value.items() if each is not None}
    return value


def _values(args: Sequence[str], option: str) -> Iterator[str]:
    """Yield the values that an option is given, as `--option value` or `--option=value`."""
    for i, argument in enumerate(args):
        if argument == option:
            yield from args[i + 1 : i + 2]
        elif argument.startswith(f"{option}="):
            yield argument.removeprefix(f"{option}=")


def _elsewhere(role: Role, engine: EngineConfig, server: ServerConfig, *, secure: bool) -> wire.WorkerAddress:
    where, count = f"{role}.{engine.name}.server", engine.served.ranks if engine.served else 1
    if role == "decode" and not server.control:
        raise ConfigError(
            f"{where}.control: give the address at which its rank 0 takes control connections, as 10.0.0.2:9100"
        )
    address = addresses.assemble(
        server.name, role, server.url, engine.name,
        control=addresses.host_port(f"{where}.control", server.control) if role == "decode" else None,
        status=addresses.host_port(f"{where}.status", server.status) if server.status else None,
        count=count, secure=secure,
    )  # fmt: skip
    token = secret(f"{where}.token_file", server.token_file) if server.token_file else ""
    return msgspec.structs.replace(address, token=token)


def _ports(engine: EngineConfig) -> int:
    """Return how many ports a worker needs: that of its API and of its control connections; see `_Given` for more."""
    if engine.served is None:
        return 2
    return 0 if engine.served.server is not None else 2 * engine.served.ranks + 2


def _first_port(d: Deployment, count: int) -> int:
    """Return the first of the workers' ports. Raises ConfigError."""
    first = d.config.planes.worker_port
    if not first:
        return consecutive_ports(count, *dict.fromkeys((wire.WORKER_HOST, d.http_host)), d.control)
    if first + count > _PORTS:
        raise ConfigError(f"planes.worker_port: {count} ports from {first} on are too many; begin lower")
    return first
