"""Pictures: written for real plans, the same bytes twice, and refused by name where they cannot be."""

from __future__ import annotations

import builtins
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from regauge.errors import ConfigError
from regauge.sim.answer import answer
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.plan_charts import Marked, loads, revenue_surface, what_if
from regauge.sim.plan_result import Plan
from regauge.sim.workload import Lengths, of_lengths


@cache
def plan() -> Plan:
    load = of_lengths(Lengths(8_000), Lengths(300), 8.0, hit=0.5)
    kv = "fp8_e4m3,page=64"
    return answer(Ask("glm-4.5-air", Pool("h200", kv=kv), Pool("h200", kv=kv), load, Slo(3.0, 0.05)))


@pytest.mark.parametrize("draw", [loads, what_if])
def test_a_plan_s_pictures_are_the_same_bytes_twice(tmp_path: Path, draw: Any) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    draw(one, plan())
    draw(other, plan())
    assert one.read_bytes() == other.read_bytes()
    text = one.read_text()
    assert "Modelled: glm-4.5-air" in text
    wanted = [w.change for w in plan().what_if] if draw is what_if else [n.what for n in plan().decode.needs]
    assert all(word in text for word in wanted)


def test_a_png_of_the_revenue_surface(tmp_path: Path) -> None:
    path = tmp_path / "surface.png"
    revenue_surface(
        path,
        Decimal(1000),
        ratio=0.25,
        stated=5_000.0,
        currency="EUR",
        marked=[Marked("here", 0.5, 4.0)],
        prices={"list": 4.0},
    )
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"plan\.pdf: end it in \.png or \.svg"):
        loads(tmp_path / "plan.pdf", plan())
    with pytest.raises(ConfigError, match="cannot be written"):
        loads(tmp_path / "none" / "plan.svg", plan())
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"need matplotlib: pip install 'regauge\[plan\]'"):
        loads(tmp_path / "plan.svg", plan())
