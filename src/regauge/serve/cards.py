"""What the gateway's small routes answer: models, health, version."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from regauge.config import Role


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as the OpenAI API describes one; `max_model_len` is its context, in tokens of prompt and answer."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "regauge"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(msgspec.Struct, frozen=True):
    """Answer of `GET /health`."""

    status: Literal["ok"] = "ok"


class WorkerHealth(msgspec.Struct, frozen=True):
    """A worker, and since when it is up or not."""

    name: str
    role: Role
    up: bool
    since: datetime
    reason: str


class Ready(msgspec.Struct, frozen=True):
    """Answer of `GET /ready`; "degraded": some workers are missing, and others do their work."""

    status: Literal["ready", "degraded", "draining", "unavailable"]
    workers: list[WorkerHealth]


class Verdict(msgspec.Struct, frozen=True):
    """The path of the pair of layouts, and why."""

    path: str
    text: str


class Version(msgspec.Struct, frozen=True):
    """Answer of `GET /version`."""

    version: str
    model: str
    verdict: Verdict


class Routed(msgspec.Struct, frozen=True):
    """Answer of `GET /debug/why/{id}`: of each answer to the request's prompts, the decisions of the router and what became of them."""

    requests: list[dict[str, Any]]
    silent: list[str]
    """Gateway processes that do not answer, and why."""
