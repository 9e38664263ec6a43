"""What the planner says of the published deployment: the rate that its servers bear within limits, and the servers that its rate needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from regauge.sim.answer import answer
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.claims import Claim
from regauge.sim.devices import Catalogue
from regauge.sim.model import Point
from regauge.sim.plan_result import Plan
from regauge.sim.report import Cell, interval, table
from regauge.sim.workload import Lengths, of_lengths

KV = "engine:sglang,dtype=fp8_e4m3"
SLO = Slo(5.0, 0.05)
"""Assumed: 90 % of requests have the first token within 5 s and the others within 50 ms each."""
FOUR_BIT = 4.5
"""Bits of a 4-bit parameter with scales; FP8 weights do not fit a prefill server."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One question and its answer."""

    what: str
    tokens: int
    """Of a prompt."""
    claimed: float
    """Requests per second of all prefill servers at the published rate."""
    plan: Plan


def questions(claim: Claim, catalogue: Catalogue, model: str, hit: float) -> tuple[Planned, ...]:
    """Answer for each published rate: these servers with several decode sides, and the servers that it takes."""
    cached = tuple(replace(p, hit=hit) for p in claim.points)
    name = catalogue.accelerators[claim.decode].name
    prefill = Pool(claim.prefill, claim.prefill_servers, kv=KV, weight_bits=FOUR_BIT, nics=claim.nics)
    decode = Pool(claim.decode, claim.decode_servers, kv=KV, nics=claim.nics)
    spanning = replace(prefill, weight_bits=8.0, span=2)
    sides = (
        (f"{claim.decode_servers} x 8 {name}, FP8 weights", prefill, decode),
        (f"{claim.decode_servers} x 8 {name}, 4-bit weights", prefill, replace(decode, weight_bits=FOUR_BIT)),
        (
            f"{claim.decode_servers + 1} x 8 {name}, FP8 weights",
            prefill,
            replace(decode, servers=claim.decode_servers + 1),
        ),
        (
            f"{claim.decode_servers + 1} x 8 {name}, FP8 weights; prefill in FP8 over 2 servers each",
            spanning,
            replace(decode, servers=claim.decode_servers + 1),
        ),
        (f"as many 8 {name} as it takes, FP8 weights", replace(prefill, servers=0), replace(decode, servers=0)),
    )
    found = []
    for point in claim.points:
        rate = point.tokens_per_s / point.tokens * claim.prefill_servers
        load = of_lengths(Lengths(point.tokens), Lengths(claim.output.value), rate, hit=hit)
        for what, before, after in sides:
            ask = Ask(model, before, after, load, SLO, claim.switch, catalogue, points=cached)
            found.append(Planned(what, point.tokens, rate, answer(ask, changes=False)))
    return tuple(found)


def short(found: Sequence[Planned]) -> str:
    """Return the answer for the first rate in a line: what these servers bear, and what it would take."""
    one = found[0]
    free = next(p for p in found if not p.plan.ask.prefill.servers)
    plan = one.plan
    return (
        f"The planner: {plan.prefill.servers} + {plan.decode.servers} servers bear {interval(plan.most, '.1f')} of the claimed {one.claimed:.1f} requests/s within "
        f"a first token in {plan.ask.slo.ttft_s:g} s and {1e3 * plan.ask.slo.tpot_s:g} ms for each further one, for {plan.ask.slo.share:.0%} of them; "
        f"{free.plan.prefill.servers} + {free.plan.decode.servers} {'would' if free.plan.fits else 'would not'} bear it all."
    )


def section(found: Sequence[Planned], points: Sequence[Point]) -> list[str]:
    """Return the report's lines."""
    rows: list[tuple[Cell, ...]] = []
    for each in found:
        plan = each.plan
        given = bool(plan.ask.prefill.servers)
        most = plan.most.value / each.claimed
        rows.append(
            (f"{each.tokens:,}", each.what, f"{plan.prefill.servers} + {plan.decode.servers}", f"{each.claimed:.2f}",
             interval(plan.most, ".2f"), f"{most:.0%}" if given or not plan.fits else "all of it", plan.prefill.binds, plan.decode.binds)
        )  # fmt: skip
    efficiency = found[0].plan.fit
    head = (
        "prompt", "decode", "servers", "requests/s claimed", "requests/s within the limits", "of the claimed", "prefill is bound by", "decode by",
    )  # fmt: skip
    slo = found[0].plan.ask.slo
    return [
        (
            f"`regauge plan` with the efficiency fitted to both rates ({interval(efficiency.fitted, '.3f') if efficiency else 'none'}), 4-bit weights on "
            f"prefill where nothing else is said, output as above, Poisson arrivals, and limits that the claim does not have: {slo.share:.0%} of the requests have the first token "
            f"within {slo.ttft_s:g} s and each further one within {1e3 * slo.tpot_s:g} ms. Unlike above, a tenth of the memory is kept back, KV must fit 99 % of the "
            "time, the time of a token is modelled, and decode holds pages from before prefill begins to compute."
        ),
        "",
        *table(head, rows),
        "",
        (
            "The published rates are what servers reach when prompts always wait. One constant misses them by "
            + ", ".join(
                f"{r:+.0%} at {p.tokens:,}"
                for p, r in zip(points, efficiency.residuals if efficiency else (), strict=False)
            )
            + "."
        ),
    ]
