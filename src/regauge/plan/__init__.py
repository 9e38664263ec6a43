"""Two layouts in, a plan out: DIRECT, REMAP or CONVERT, or a refusal with its reasons. No I/O."""

from regauge.plan.boxes import Side, instantiate, pieces
from regauge.plan.check import Judge, Refusal, Verdict, check
from regauge.plan.planner import Plan, compile
from regauge.plan.tiles import Convert, Tiles

__all__ = [
    "Convert",
    "Judge",
    "Plan",
    "Refusal",
    "Side",
    "Tiles",
    "Verdict",
    "check",
    "compile",
    "instantiate",
    "pieces",
]
