"""A plan with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from regauge.errors import ConfigError, LayoutError, Refused
from regauge.sim.ask import Ask, Pool
from regauge.sim.model import exactly
from regauge.sim.plan_result import Plan, WhatIf
from regauge.sim.sizing import Shape
from regauge.sim.workload import Workload

Answer = Callable[..., Plan]
_HIT_STEP = 0.1
_DEVICES = ("h200", "h20", "b200", "mi300x", "mtt-s5000")
_NICS = ("400g", "200g", "100g")


def what_if(plan: Plan, shape: Shape, answer: Answer) -> Plan:
    """Return the plan with its what-if table, and with what of it would meet a question that is not met."""
    rows = tuple(_row(change, ask, answer) for change, ask in changes(plan.ask, shape))
    helps = tuple(f"{row.change}: {row.prefill} + {row.decode} servers" for row in rows if row.note.startswith("fits"))
    return replace(plan, what_if=rows, remedies=plan.remedies + (helps if plan.problems else ()))


def changes(ask: Ask, shape: Shape) -> Iterator[tuple[str, Ask]]:
    """Yield each change and the question with it."""
    load = ask.workload
    yield "half the rate", replace(ask, workload=replace(load, rate=load.rate / 2.0))
    yield "twice the rate", replace(ask, workload=replace(load, rate=load.rate * 2.0))
    for hit in (load.hit - _HIT_STEP, (1.0 + load.hit) / 2.0 if load.hit + _HIT_STEP >= 1.0 else load.hit + _HIT_STEP):
        if 0.0 <= hit < 1.0:
            yield f"hit rate {hit:.0%}", replace(ask, workload=with_hit(load, hit))
    for name, prefill, decode in _dtypes(ask):
        yield name, replace(ask, prefill=replace(ask.prefill, kv=prefill), decode=replace(ask.decode, kv=decode))
    for side, servers in (("prefill", shape.prefill_servers), ("decode", shape.decode_servers)):
        pool: Pool = getattr(ask, side)
        if servers > max(pool.span, 1):
            yield f"one {side} server less", replace(ask, **{side: replace(pool, servers=servers - 1)})  # type: ignore[arg-type]
        if pool.servers:
            yield f"one {side} server more", replace(ask, **{side: replace(pool, servers=servers + 1)})  # type: ignore[arg-type]
    if ask.decode.weight_bits > 4.5:
        yield "decode weights of 4 bits (4.5 with scales)", replace(ask, decode=replace(ask.decode, weight_bits=4.5))
    now = ask.catalogue.accelerators[ask.decode.device]
    wired = {"nic": ask.decode.nic or now.nic, "nics": ask.decode.nics or int(now.nics.value if now.nics else 0)}
    for key in [d for d in _DEVICES if d != ask.decode.device and d in ask.catalogue.accelerators][:3]:
        card = ask.catalogue.accelerators[key]
        if card.cards is not None:
            yield f"decode on {card.name}", replace(ask, decode=replace(ask.decode, device=key, cards=0, **wired))  # type: ignore[arg-type]
    for nic in [n for n in _NICS if n != (ask.decode.nic or ask.catalogue.accelerators[ask.decode.device].nic)][:2]:
        pools = (replace(ask.prefill, nic=nic), replace(ask.decode, nic=nic))
        yield f"NICs of {nic.upper()}", replace(ask, prefill=pools[0], decode=pools[1])
    if load.hit > 0.0:
        said = "all KV is sent, what decode has too" if ask.delta else "KV that decode has is not sent"
        yield said, replace(ask, delta=not ask.delta)


def with_hit(load: Workload, hit: float) -> Workload:
    """Return a workload with another cached share: lower, every request's cached part shrinks alike; higher, what is computed does."""
    if hit <= load.hit:
        return replace(load, cached=load.cached * (hit / load.hit if load.hit else 0.0))
    return replace(load, cached=load.prompt - (load.prompt - load.cached) * (1.0 - hit) / (1.0 - load.hit))


def _dtypes(ask: Ask) -> Iterator[tuple[str, str, str]]:
    """Other types of KV on either side, for layouts in the short form."""
    p, d = ask.prefill.kv, ask.decode.kv
    if p.startswith("fp8_e4m3") and d.startswith("fp8_e4m3"):
        wide = [kv.replace("fp8_e4m3", "bf16", 1).replace(",scale=token_head", "") for kv in (p, d)]
        yield "KV in BF16 on both sides", wide[0], wide[1]
        yield "KV in BF16 at prefill, FP8 at decode", wide[0], d
    elif p.startswith("bf16") and d.startswith("bf16"):
        yield "KV in FP8 on both sides", p.replace("bf16", "fp8_e4m3", 1), d.replace("bf16", "fp8_e4m3", 1)
        yield "KV in BF16 at prefill, FP8 at decode", p, d.replace("bf16", "fp8_e4m3", 1)
    elif p.startswith("bf16") and d.startswith("fp8_e4m3"):
        yield "KV in BF16 on both sides", p, d.replace("fp8_e4m3", "bf16", 1)
    elif p.startswith("fp8_e4m3") and d.startswith("bf16"):
        yield "KV in FP8 on both sides", p, d.replace("bf16", "fp8_e4m3", 1)


def _row(change: str, ask: Ask, answer: Answer) -> WhatIf:
    try:
        plan = answer(ask, changes=False)
    except (Refused, ConfigError, LayoutError) as error:
        return WhatIf(change, 0, 0, exactly(0.0), exactly(0.0), 0.0, str(error).split(". What would")[0])
    asked = "more than there can be" if plan.enough == (0, 0) else f"{plan.enough[0]} + {plan.enough[1]}"
    note = f"asks for {asked}" if plan.problems else f"fits; {plan.prefill.binds}, {plan.decode.binds} bind"
    return WhatIf(
        change, plan.prefill.servers, plan.decode.servers, plan.ttft.asked, plan.tpot.asked, plan.most.value, note
    )
