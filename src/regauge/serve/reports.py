"""What workers say of themselves, in the router's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

from regauge.blocks import CacheEvent, CacheNews, Cleared, Stored
from regauge.route import cluster
from regauge.serve import wire
from regauge.serve.workers import Worker


def worker(of: Worker) -> cluster.Worker:
    """Return what seldom changes while a worker lives, as far as it is known."""
    client, health = of.client, of.health
    roles = (health.roles if health is not None else []) or [client.role]
    found = cluster.Worker(client.name, prefill="prefill" in roles, decode="decode" in roles, computes=of.computes)
    return replace(found, slots=health.slots) if health is not None and health.slots else found


def load(health: wire.Health, *, events: bool) -> cluster.Load:
    """Return what a worker is busy with; `events`: its prefix cache tells what it holds."""
    told = health.pages > 0
    return cluster.Load(
        queued_tokens=health.queued_tokens if told else None,
        running=health.running + health.waiting if told else None,
        free_pages=health.free_pages if told else None,
        pages=health.pages if told else None,
        page_size=health.page_size or None,
        prefill_tokens_per_s=health.prefill_tokens_per_s or None,
        tpot_s=health.tpot_s or None,
        cache_seq=health.cache_seq if events else None,
    )


def link(prefill: str, decode: str, path: str, bytes_per_token: float, health: wire.Health | None) -> cluster.Link:
    """Return a pair's link; `health` is of its decode worker. A path that is not known yet is tried."""
    nics = health.nics if health is not None else []
    return cluster.Link(
        prefill,
        decode,
        cast("cluster.Path", path if path in get_args(cluster.Path) else "REMAP"),
        bytes_per_token=bytes_per_token,
        bytes_per_s=sum(nic.bytes_per_s for nic in nics),
        backlog_bytes=sum(nic.backlog_bytes for nic in nics),
    )


def cache_events(news: CacheNews) -> Sequence[CacheEvent]:
    """Return what a prefix cache tells as events; one that tells all it holds has a number less for having been cleared."""
    if not news.anew:
        return news.events
    held = [Stored(news.seq, news.held)] if news.seq else []
    return [Cleared(max(news.seq - 1, 0)), *held]
