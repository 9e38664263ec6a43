"""How many servers of each kind a workload needs, and what they do with it."""

from __future__ import annotations

from regauge.sim.plan_result import ENDLESS, Memory, Mix, Need, Network, Offload, Plan, PoolPlan, Times, WhatIf

__all__ = ["ENDLESS", "Memory", "Mix", "Need", "Network", "Offload", "Plan", "PoolPlan", "Times", "WhatIf"]
