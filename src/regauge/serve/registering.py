"""What a local worker says of itself where it registers: at gateways, and in etcd."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from regauge.errors import ConfigError
from regauge.observe import ERROR, get_logger
from regauge.serve import addresses, wire
from regauge.serve.etcd import keep_in_etcd
from regauge.serve.registration import keep_registered
from regauge.serve.registry import Entry


def entry_of(spec: wire.WorkerSpec, control: str) -> Entry:
    """Return a worker's entry; `control` is the host at which it takes control connections."""
    host = spec.config.discovery.advertise or wire.WORKER_HOST
    address = addresses.assemble(
        spec.name, spec.role, addresses.url_of((host, spec.port)), "local",
        control=(control, spec.control_port) if spec.control_port else None,
    )  # fmt: skip
    return Entry(
        wire.WorkerAddress(address.name, address.role, address.url, address.ranks, "local", spec.token),
        instance=secrets.token_hex(8), layout=spec.layout.decode(),
    )  # fmt: skip


@asynccontextmanager
async def registered(spec: wire.WorkerSpec, control: str) -> AsyncIterator[None]:
    """Keep a worker registered wherever its configuration says, while this lasts; a place that cannot be reached is tried again."""
    rules, key = spec.config.discovery, bytes.fromhex(spec.key)
    entry = entry_of(spec, control)
    work = [keep_registered(url, key, entry, rules.lease_s, rules.authority) for url in rules.gateways]
    if rules.etcd is not None:
        work.append(keep_in_etcd(rules.etcd, entry, rules.lease_s))
    tasks = [asyncio.create_task(each) for each in work]
    for task in tasks:
        task.add_done_callback(_ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and isinstance(error := task.exception(), ConfigError):
        get_logger().error("the worker is not registered", **{ERROR: str(error)})
