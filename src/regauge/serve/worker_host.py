"""`regauge worker`: a host that runs workers of one role and no gateway. They register at gateways elsewhere."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from regauge.config import Role, ServeConfig, cache_dir
from regauge.engines.local.prepare import prepare
from regauge.errors import ConfigError
from regauge.layout.presets import load_model, load_named, with_pages
from regauge.move.auth import load_key
from regauge.move.rtnetlink import local_addresses
from regauge.planes import enforced
from regauge.serve.launch import Deployment
from regauge.serve.registry import check_name
from regauge.serve.supervisor import control_address


def plan_workers(
    config: ServeConfig, role: Role, name: str, say: Callable[[str], None], workers: int | None = None
) -> Deployment:
    """Return what is started: `workers` of a role (None: as the configuration says), named `name`, or NAME-0 and so on where there are several.

    Raises ConfigError, LayoutError, EngineError.
    """
    check_name("--name", name)
    config = _sized(enforced(config), role, workers)
    _check(config, role)
    control = control_address(config.transfer)
    key = load_key(Path(config.transfer.key_file)).hex()
    folder = prepare(config.model, cache_dir(), say)
    text = config.prefill_layout if role == "prefill" else config.decode_layout
    layout = with_pages(load_named(text, str(folder)), config.engine(role).pool_tokens)
    prefill, decode = (layout, None) if role == "prefill" else (None, layout)
    model = load_model(str(folder)).name
    return Deployment(config, folder, model, None, prefill, decode, control, key, role, name)


def _sized(config: ServeConfig, role: Role, workers: int | None) -> ServeConfig:
    """Return the configuration with so many workers, which have this host's cores for themselves."""
    engine = config.engine(role)
    count = engine.workers if workers is None else workers
    threads = engine.threads or max((os.cpu_count() or 2) // max(count, 1), 1)
    try:
        sized = msgspec.convert({**msgspec.to_builtins(engine), "workers": count, "threads": threads}, type(engine))
    except msgspec.ValidationError as error:
        raise ConfigError(f"--workers: {error}") from error
    return msgspec.structs.replace(config, **{role: sized})


def _check(config: ServeConfig, role: Role) -> None:
    """Raise ConfigError for what a host of workers alone cannot do."""
    engine, discovery, transfer = config.engine(role), config.discovery, config.transfer
    if engine.served is not None:
        raise ConfigError(
            f"{role}.{engine.name}: such a server does not register; start it by itself, and name it in [[workers]] of the gateway"
        )
    if not discovery.gateways and discovery.etcd is None:
        raise ConfigError(
            "discovery.gateways: name the gateways at which the workers register, as http://10.0.0.1:8000, or give discovery.etcd"
        )
    if not transfer.key_file:
        raise ConfigError("transfer.key_file: give the file with the key that all workers and gateways have")
    away = discovery.etcd is not None or any(not _is_here(url) for url in discovery.gateways)
    if away and not discovery.advertise:
        raise ConfigError(
            "discovery.advertise: gateways elsewhere do not reach workers on loopback; give this host's address, or planes.business"
        )
    if away and transfer.transport == "shm":
        raise ConfigError(
            "transfer.transport: shm stays within a host, and the gateways are elsewhere; take tcp, mooncake or nixl"
        )


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or any(each.address == address for each in local_addresses())
