"""What a plan says in words: why a constraint asks for what it does, what is not met, and what would help."""

from __future__ import annotations

from regauge.errors import ConfigError
from regauge.sim.ask import NETWORK_MOST, Ask, Side
from regauge.sim.plan_result import ENDLESS, Network, PoolPlan
from regauge.sim.pools import Facts
from regauge.sim.sizing import Shape, State
from regauge.sim.topology import Ends, FatTree, Rails


def why(facts: Facts, side: Side, what: str) -> str:
    """Say what a constraint is."""
    slo = facts.ask.slo
    texts = {
        ("prefill", "compute"): "rate x mean time of a prefill is below the instances",
        ("prefill", "TTFT"): f"{slo.share:.0%} of the requests have the first token within {seconds(slo.ttft_s)}",
        ("prefill", "memory capacity"): "KV of the prompts that are being computed lies in the cards",
        ("decode", "memory capacity"): "99 % of the time the KV of all requests in work lies in the cards",
    }
    if what == "network":
        return f"KV takes at most {NETWORK_MOST.value:.0%} of the payload rate of the NICs"
    if side == "decode" and what != "memory capacity":
        return (
            f"a token comes within {seconds(slo.tpot_s)} in {slo.share:.0%} of the cases; the step is bound by {what}"
        )
    return texts[side, what]


def problems(ask: Ask, state: State, prefill: PoolPlan, decode: PoolPlan, network: Network) -> tuple[str, ...]:
    """Return what is not met at the constants that servers are counted by."""
    found = []
    for pool in (prefill, decode):
        asked = {need.what: need.servers.high if ask.sure else need.servers.value for need in pool.needs}
        never = [what for what, servers in asked.items() if servers >= ENDLESS]
        found += [f"{pool.side}: no number of servers meets {what}: {_never(state, what)}" for what in never]
        what, most = max(((w, n) for w, n in asked.items() if n < ENDLESS), key=lambda pair: pair[1])
        if most > pool.servers:
            found.append(
                f"{pool.side}: {what} asks for {most:.0f} servers of {pool.name}"
                + (f" in instances of {pool.span}" if most > pool.span else "")
                + f", {pool.servers} are there"
            )
    if network.ports > network.ports_of:
        found.append(f"network: {network.ports} NICs need a port each, {network.switch} has {network.ports_of}")
    port = ask.catalogue.switches[ask.switch].gbit_per_s
    for pool in (prefill, decode):
        line = ask.catalogue.nics[pool.nic].gbit_per_s
        if port and line and line.value > port.value:
            found.append(
                f"network: NICs of {pool.side} are of {line.value:g} Gbit/s, ports of {network.switch} of {port.value:g}: give slower NICs or a faster switch"
            )
    return tuple(found)


def _never(state: State, what: str) -> str:
    slo = state.facts.ask.slo
    if what == "TTFT":
        own = state.own[0]
        return f"with nothing waiting the slowest prompt takes {seconds(float(own.max()))}, {seconds(slo.ttft_s)} are asked for"
    step = state.facts.step(state.shape.decode_span, "low" if state.facts.ask.sure else "value")
    return f"a step of one request takes {seconds(step(1))}, {seconds(slo.tpot_s)} are asked for"


def remedies(ask: Ask, prefill: PoolPlan, decode: PoolPlan, network: Network, free: Shape | None) -> tuple[str, ...]:
    """Return what would help with each problem; `free`: the servers that would be found if none were given."""
    found = []
    for pool in (prefill, decode):
        asked = [n.servers.high if ask.sure else n.servers.value for n in pool.needs]
        lacks = max((x for x in asked if x < ENDLESS), default=0.0) > pool.servers
        if lacks and pool.side == "decode" and pool.binds == "memory capacity":
            found.append("decode: cards with more memory, weights of fewer bits, or instances that span more servers")
        if any(x >= ENDLESS for x in asked):
            found.append(f"{pool.side}: another device, instances that span more servers, or longer times in the SLO")
    if free is not None and (free.prefill_servers, free.decode_servers) != (prefill.servers, decode.servers):
        found.insert(
            0,
            f"{free.prefill_servers} prefill and {free.decode_servers} decode servers, in instances of {free.prefill_span} and {free.decode_span}",
        )
    if network.ports > network.ports_of:
        found.append(f"network: {fabric(prefill, decode, network.ports_of)}")
    return tuple(found)


def fabric(prefill: PoolPlan, decode: PoolPlan, ports: int) -> str:
    """Say which fabric of switches with so many ports joins all NICs at full rate: a switch for each rail, else a fat tree."""
    ends = Ends(prefill.servers, decode.servers, prefill.nics, decode.nics)
    try:
        use = Rails(ends, switch_ports=ports).use()
        return f"{use.switches} such switches, one for each rail, KV crossing from NIC i to NIC i: {use.used} ports of {use.ports}"
    except ConfigError:  # more servers than a switch has ports
        least = next((k for k in range(2, ports + 1, 2) if k**3 // 4 >= ends.nics), 0)
    if not least:
        return f"no three-tier fat tree of such switches has {ends.nics} ports: split the deployment"
    use = FatTree(ends, least, 1.0).use()
    return f"a fat tree of {use.switches} switches of {least} ports or more"


def idle(prefill: PoolPlan, decode: PoolPlan) -> str:
    """Say which pool has room."""
    a, b = prefill.needs[0].exact / prefill.servers, decode.needs[0].exact / decode.servers
    less, more = (prefill, decode) if a < b else (decode, prefill)
    low, high = min(a, b), max(a, b)
    if min(low, 1e6) >= 1.0:
        return "neither pool has room"
    return (
        f"{less.side} has room: {less.binds} asks for {low:.0%} of its {less.servers} server{'s' * (less.servers > 1)}, "
        f"{more.binds} for {'more than all' if high > 1.0 else f'{high:.0%}'} of {more.side}'s {more.servers}"
    )


def seconds(value: float) -> str:
    """Return a time as people read it."""
    if value >= ENDLESS:
        return "without end"
    if value >= 1.0:
        return f"{value:.3g} s" if value < 1000.0 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"
