"""What may happen next in a simulated cluster, without faults."""

from __future__ import annotations

from regauge.testing.network import Link
from regauge.testing.process import Job, Process
from regauge.testing.world import Event, World


def events(world: World) -> list[Event]:
    """List what may happen now, without faults."""
    found: list[Event] = []
    for link in world.links.values():
        found += _link_events(world, link)
    found += [("obey", i) for i in range(len(world.orders)) if world.processes[world.orders[i][0]].runs]
    for p, d in world.pairs:
        if world.processes[p].runs and world.processes[d].runs and d not in world.processes[p].links:
            found.append(("connect", p, d))
    for job in world.jobs.values():
        found += [("begin", job.name, name) for name in job.pending if _can_begin(world, job, name)]
    for name, process in world.processes.items():
        if process.runs:
            found += _engine_events(world, name, process)
    return found


def _link_events(world: World, link: Link) -> list[Event]:
    p, d, n = world.processes[link.p], world.processes[link.d], link.number
    found: list[Event] = []
    if link.d_end != "closed" and d.runs:
        if link.d_end != "gone":
            found += [("hear", n, link.d)] if link.to_d else []
            found += [("notice", n, link.d)] if link.broken else []
        elif not link.fenced:
            found += [("fence", n)] if link.fencing else []
        elif not link.checks:
            found.append(("close", n, link.d))
        found += [("check", n, i, "") for i in range(len(link.checks))]
    if link.p_end != "closed" and p.runs:
        if link.p_end == "up":
            found += [("hear", n, link.p)] if link.to_p else []
            found += [("notice", n, link.p)] if link.broken else []
        else:
            found.append(("close", n, link.p))
        found += [("written", n, i) for i, flight in enumerate(link.flights) if flight.landed]
    if not link.fenced:
        found += [
            ("land", n, i, "")
            for i, flight in enumerate(link.flights)
            if not flight.landed and (flight.cells is not None or p.runs)
        ]
    return found


def _engine_events(world: World, name: str, process: Process) -> list[Event]:
    if process.receiver is not None:
        return [("retire", name, s.job.name) for s in process.sides.values() if s.ended == "delivered"]
    return [
        ("compute", name, s.job.name)
        for s in process.sides.values()
        if s.granted and not (s.finished or s.ended) and _all_granted(world, s.job)
    ]


def _all_granted(world: World, job: Job) -> bool:
    sides = [world.processes[name].sides.get(job.name) for name in job.prefill]
    return all(side is not None and side.granted for side in sides)


def _can_begin(world: World, job: Job, name: str) -> bool:
    process = world.processes[name]
    counts, _ = world.setup.tables(
        job.tokens, job.first if process.receiver else 0, all_tokens=process.sender is not None
    )
    if not process.runs or sum(counts) > process.pool.free:
        return False
    if process.receiver is not None:
        return True
    ends = [world.links[process.links[d]].p_end if d in process.links else "" for d in world.peers(job, name)]
    return all(end == "up" for end in ends)
