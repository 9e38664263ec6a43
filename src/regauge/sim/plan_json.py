"""A plan as JSON: intervals as [low, value, high], what grows without end as null, the question with its constants."""

from __future__ import annotations

from dataclasses import asdict, fields
from decimal import Decimal
from math import isinf
from typing import Any

from regauge.sim.model import Interval
from regauge.sim.money import Money
from regauge.sim.plan_result import ENDLESS, Plan
from regauge.sim.plan_run import Simulated
from regauge.sim.revenue import Listed

_ANSWER = ("mix", "prefill", "decode", "network", "ttft", "tpot", "goodput", "most", "ratio", "offload", "enough", "problems", "remedies", "idle",
           "assumed", "fit", "what_if")  # fmt: skip


def plain(plan: Plan, money: Money | None = None, run: Simulated | None = None) -> dict[str, Any]:
    """Return the plan, and perhaps a month's money and a simulated run, in types that JSON has."""
    ask = plan.ask
    asked = {
        "model": ask.model,
        "prefill": _plain(ask.prefill),
        "decode": _plain(ask.decode),
        "slo": asdict(ask.slo),
        "switch": ask.switch,
        "sure": ask.sure,
        "delta": ask.delta,
        "chunk_tokens": ask.chunk_tokens,
        "points": _plain(ask.points),
    }
    found: dict[str, Any] = {"modelled": True, "fits": plan.fits, "ask": asked}
    found |= {name: _plain(getattr(plan, name)) for name in _ANSWER}
    for name in ("prefill", "decode"):
        pool = getattr(plan, name)
        found[name] |= {"binds": pool.binds, "margin": pool.margin}
    if money is not None:
        found["money"] = _plain(money)
    if run is not None:
        found["simulated"] = _plain(run)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return [_plain(value.low), _plain(value.value), _plain(value.high)]
    if isinstance(value, float):
        return None if isinf(value) or value == ENDLESS else value
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Listed):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if hasattr(value, "__dataclass_fields__"):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return value
