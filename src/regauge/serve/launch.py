"""What `regauge serve` starts: a command for the gateway and one for each worker, and where each of them is reached.

Specs and the key go by file, in a folder that only the owner can read; vLLM's API key by its environment, since anybody can read a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from regauge.config import EngineConfig, Role, ServeConfig, ServerConfig
from regauge.errors import ConfigError
from regauge.layout import files
from regauge.layout.spec import Layout
from regauge.plan import Verdict
from regauge.serve import wire
from regauge.serve.pairing import UNKNOWN

GATEWAY, PREFILL, DECODE = "gateway", "prefill-0", "decode-0"
CONNECTOR: Final = "regauge.engines.vllm.connector"
_SERVER: Final = "vllm.entrypoints.openai.api_server"
_DEFAULTS: Final = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind both engines to the same cores
}
"""Environment of a vLLM server that is started here, where the user's own says nothing else."""
_TRIES: Final = 100


@dataclass(frozen=True)
class Deployment:
    """What is started: made by `plan_deployment`, before any process runs."""

    config: ServeConfig
    folder: Path
    model: str
    verdict: Verdict | None
    """None: an engine tells its layout once it runs."""
    prefill: Layout | None
    """None: that engine is vLLM."""
    decode: Layout | None
    control: str
    """Numeric address at which decode takes control connections."""
    key: str = field(repr=False)
    """Pre-shared key of the transfer plane, in hex."""


@dataclass(frozen=True)
class Command:
    """One process."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] | None = field(default=None, repr=False)


def commands(deployment: Deployment, folder: Path, *, log_json: bool = False) -> list[Command]:
    """Write the specs into `folder`, and return what is to be started, the gateway last. Raises ConfigError for addresses that cannot be had."""
    d, token = deployment, secrets.token_hex(32)
    key_file = folder / "key"
    wire.write_private(key_file, d.key.encode())
    started: list[Command] = []
    addresses = []
    peers: dict[str, tuple[str, int]] = {}
    roles: tuple[tuple[str, Role, Layout | None], ...] = ((DECODE, "decode", d.decode), (PREFILL, "prefill", d.prefill))
    *ports, control = free_ports(wire.WORKER_HOST, wire.WORKER_HOST, d.control)
    for (name, role, layout), port in zip(roles, ports, strict=True):
        engine = d.config.engine(role)
        if engine.vllm is not None and engine.vllm.server is not None:
            address = _elsewhere(role, engine.vllm.server, engine.vllm.ranks, secure=d.config.transfer.tls is not None)
        elif engine.vllm is not None:
            address, command = _vllm(d, name, role, engine, token, key_file, port)
            started.append(command)
        else:
            if layout is None:
                raise ConfigError(f"{role}: a local engine has a layout")
            address, spec = _local(d, name, role, layout, token, (port, control), peers, log_json=log_json)
            started.append(_module("regauge.serve.worker_process", name, _write(folder, name, spec)))
        if role == "decode":
            peers = address.receivers
        addresses.append(address)
    verdict = (
        wire.VerdictInfo(UNKNOWN)
        if d.verdict is None
        else wire.VerdictInfo(d.verdict.path, "; ".join(d.verdict.reasons))
    )
    gateway = wire.GatewaySpec(
        config=d.config, model_folder=str(d.folder), model_name=d.model, token=token, workers=addresses, verdict=verdict,
        layouts={name: files.encode(layout, format="json") for name, _, layout in roles if layout is not None},
        key=d.key if any(each.engine == "vllm" for each in addresses) else "", log_json=log_json,
    )  # fmt: skip
    started.append(_module("regauge.serve.gateway", GATEWAY, _write(folder, GATEWAY, gateway)))
    return started


def _module(module: str, name: str, spec: Path) -> Command:
    return Command(name, (sys.executable, "-m", module, str(spec)))


def _write(folder: Path, name: str, value: msgspec.Struct) -> Path:
    path = folder / f"{name}.json"
    wire.write_private(path, msgspec.json.encode(value))
    return path


def _local(
    d: Deployment, name: str, role: Role, layout: Layout, token: str, ports: tuple[int, int], peers: dict[str, tuple[str, int]], *, log_json: bool
) -> tuple[wire.WorkerAddress, wire.WorkerSpec]:  # fmt: skip
    port, control = ports
    spec = wire.WorkerSpec(
        config=d.config, name=name, role=role, model_folder=str(d.folder), model_name=d.model,
        layout=files.encode(layout, format="json"), token=token, key=d.key, port=port,
        control_port=control if role == "decode" else 0, peers=peers, log_json=log_json)  # fmt: skip
    rank = wire.RankAddress(name, (d.control, control) if role == "decode" else None)
    return wire.WorkerAddress(name, role, f"http://{wire.WORKER_HOST}:{port}", [rank]), spec


def _vllm(
    d: Deployment, name: str, role: Role, engine: EngineConfig, token: str, key_file: Path, port: int
) -> tuple[wire.WorkerAddress, Command]:
    given = engine.vllm
    if given is None:
        raise ConfigError(f"{role}: this engine is not vLLM")
    # Ranks listen at consecutive ports: those of the control connections, then those of the status.
    base = consecutive_ports(d.control, 2 * given.ranks)
    transfer = msgspec.structs.replace(d.config.transfer, key_file=str(key_file))
    connector = {
        "kv_connector": "RegaugeConnector",
        "kv_connector_module_path": CONNECTOR,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "name": name,
            "model": d.model,
            "port": base if role == "decode" else 0,
            "status_port": base + given.ranks,
            "transfer": msgspec.to_builtins(transfer),
        },
    }
    python = given.python or sys.executable
    arguments = [
        sys.executable, "-m", "regauge.serve.tied", python, "-m", _SERVER, "--model", str(d.folder), "--served-model-name", d.model,
        "--host", wire.WORKER_HOST, "--port", str(port), "--max-model-len", str(engine.max_context),
        "--tensor-parallel-size", str(given.ranks), "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log", "--kv-transfer-config", json.dumps(connector), *given.args,
    ]  # fmt: skip
    threads = engine.threads or max((os.cpu_count() or 2) // 2, 1)
    environment = {**_DEFAULTS, "OMP_NUM_THREADS": str(threads), **os.environ, "VLLM_API_KEY": token}
    ranks = [
        wire.RankAddress(
            f"{name}.{i}",
            (d.control, base + i) if role == "decode" else None,
            _url(d.control, base + given.ranks + i, secure=d.config.transfer.tls is not None),
        )
        for i in range(given.ranks)
    ]
    url = f"http://{wire.WORKER_HOST}:{port}"
    return wire.WorkerAddress(name, role, url, ranks, "vllm"), Command(name, tuple(arguments), environment)


def _elsewhere(role: Role, server: ServerConfig, count: int, *, secure: bool) -> wire.WorkerAddress:
    if role == "decode" and not server.control:
        raise ConfigError(
            "decode.vllm.server.control: give the address at which its rank 0 takes control connections, as 10.0.0.2:9100"
        )
    control = _host_port(f"{role}.vllm.server.control", server.control) if role == "decode" else None
    status = _host_port(f"{role}.vllm.server.status", server.status) if server.status else None
    ranks = [
        wire.RankAddress(
            f"{server.name}.{i}", (control[0], control[1] + i) if control else None,
            _url(status[0], status[1] + i, secure=secure) if status else "",
        )
        for i in range(count)
    ]  # fmt: skip
    token = ""
    if server.token_file:
        try:
            token = Path(server.token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{role}.vllm.server.token_file {server.token_file!r}: {error}") from error
    return wire.WorkerAddress(server.name, role, server.url, ranks, "vllm", token)


def _host_port(setting: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ConfigError(f"{setting} {text!r}: give HOST:PORT")
    return host.strip("[]"), int(port)


def _url(host: str, port: int, *, secure: bool = False) -> str:
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def free_ports(*hosts: str) -> list[int]:
    """Return a port for each of these numeric addresses that nobody listens on now; ports of one address are unlike.

    Raises ConfigError for an address that cannot be bound.
    """
    ports = []
    with contextlib.ExitStack() as stack:  # all are held until the last is found, so that none is found twice
        for host in hosts:
            sock = stack.enter_context(_socket(host))
            try:
                sock.bind((host, 0))
            except OSError as error:
                raise ConfigError(
                    f"{host} cannot be bound: {error.strerror}; give an address of this machine"
                ) from error
            ports.append(int(sock.getsockname()[1]))
    return ports


def consecutive_ports(host: str, count: int) -> int:
    """Return the first of `count` ports in a row that nobody listens on now. Raises ConfigError if none are found."""
    for _ in range(_TRIES):
        first = random.randrange(20_000, 32_000 - count)  # noqa: S311  # below those that the system gives
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(_socket(host)).bind((host, port))
            return first
    raise ConfigError(f"{host}: no {count} free ports in a row were found")


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
