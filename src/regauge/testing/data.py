"""What the bytes of a simulated cluster do: posted, landed, brought into place, compared; and who may touch what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from regauge.move import messages as m
from regauge.move.counted import Counted
from regauge.move.protocol import Check, Write
from regauge.testing.network import Flight, Link
from regauge.testing.process import Job, Process, expected
from regauge.testing.shape import CORRUPT, digest
from regauge.testing.violation import Violation

if TYPE_CHECKING:
    from regauge.testing.world import World


def size(link: Link, chunk: Write | Check) -> int:
    """Cells of a chunk."""
    return (chunk.layers[1] - chunk.layers[0]) * (chunk.tokens[1] - chunk.tokens[0]) * len(link.heads)


def post(world: World, link: Link, write: Write) -> None:
    """Begin a write. Raises Violation if it exceeds its credit."""
    link.flights.append(Flight(write))
    key = (link.d, link.p, write.transfer)
    if not world.ledger.take(key, write.epoch, write.seq, size(link, write)):
        raise Violation(f"{write} takes {world.ledger.taken[key]} (epoch, chunks, bytes) of {world.ledger.given[key]}")


def detach(world: World, link: Link) -> None:
    """Prefill's end stops reading its memory: bytes that are in the network already may land for as long as they are let."""
    flights = []
    for flight in link.flights:
        if not flight.landed and not link.fenced:
            if flight.cells is None:
                flight.cells = _read(world, link, flight.write)
            flights.append(flight)
    link.flights = flights


def land(world: World, link: Link, index: int, fault: str) -> None:
    """Put a write's cells into decode's memory; `fault`: all of them right, one `corrupt`, or only the first half (`part`)."""
    flight = link.flights[index]
    w = flight.write
    gone = flight.cells is not None  # nobody will announce it
    cells = flight.cells if flight.cells is not None else _read(world, link, w)
    flight.sent, flight.landed = digest(cells), True
    if gone:
        link.flights.pop(index)
        world.stats["late writes"] += 1
    if fault == "part":
        cells = cells[: len(cells) // 2]
    elif fault == "corrupt":
        middle = len(cells) // 2
        cells = (*cells[:middle], CORRUPT, *cells[middle + 1 :])
        flight.spoilt = True
        link.spoilt.add((w.transfer, w.epoch, w.seq))
    if not fault:
        link.spoilt.discard((w.transfer, w.epoch, w.seq))
    if w.slot is None:
        _store(world, link, w, w.table, cells)
        return
    if any(check.slot == w.slot for check in link.checks):
        raise Violation(f"{w} lands in a staging slot that is being emptied")
    link.slots[w.slot] = cells


def bring(world: World, link: Link, check: Check) -> bool:
    """Bring a chunk into place; say whether it is what was sent. Raises Violation if it is not, and nothing spoilt it."""
    process = world.processes[link.d]
    part = link.parts[check.pair]
    side = process.sides.get(check.transfer)
    if side is None:
        raise Violation(f"{check} is of a transfer that {link.d} has ended")
    table = side.tables[part.group]
    if check.slot is not None:
        cells: Sequence[int] = link.slots[check.slot]
        _store(world, link, check, table, cells)
    else:
        owned(process, check.transfer, table.pages, check)
        layers = part.layers[slice(*check.layers)]
        spots = world.setup.places(table, layers, check.tokens, link.heads)
        cells = [process.memory[page][index] for page, index in spots]
    agrees = digest(cells) == check.digest
    if agrees == ((check.transfer, check.epoch, check.seq) in link.spoilt):
        raise Violation(f"{check} {'agrees, though it was spoilt' if agrees else 'differs, though nothing spoilt it'}")
    world.stats["chunks compared"] += 1
    return agrees


def _read(world: World, link: Link, w: Write) -> tuple[int, ...]:
    process = world.processes[link.p]
    part = link.parts[w.pair]
    side = process.sides.get(w.transfer)
    if side is None:
        raise Violation(f"{w} reads pages of {link.p} that have been given back")
    layers = part.layers[slice(*w.layers)]
    spots = world.setup.places(side.tables[part.group], layers, w.tokens, link.heads)
    cells = tuple(process.memory[page][index] for page, index in spots)
    if list(cells) != expected(world.setup, side.job, layers, w.tokens, link.heads):
        raise Violation(f"{w} reads what was not computed")
    return cells


def _store(world: World, link: Link, chunk: Write | Check, table: m.Table, cells: Sequence[int]) -> None:
    process = world.processes[link.d]
    owned(process, chunk.transfer, table.pages, chunk)
    layers = link.parts[chunk.pair].layers[slice(*chunk.layers)]
    for (page, index), value in zip(world.setup.places(table, layers, chunk.tokens, link.heads), cells, strict=False):
        process.memory[page][index] = value


def owned(process: Process, transfer: str, pages: Sequence[int], what: object) -> None:
    """Raise Violation unless a transfer holds these pages, leased or quarantined."""
    state = process.pool.state(transfer)
    if state not in ("leased", "quarantined") or not set(pages) <= set(process.pool.owned(transfer)):
        raise Violation(f"{what} touches pages of {process.place.name} that are {state or 'not its own any more'}")


def untouched(world: World, process: Process, transfer: str) -> None:
    """Raise Violation if a write still reads a transfer's source pages, or a write or check can touch its decode pages."""
    for link in world.links.values():
        if link.p == process.place.name and link.p_end != "closed":
            busy: list[object] = [
                f for f in link.flights if f.write.transfer == transfer and not f.landed and f.cells is None
            ]
        elif link.d == process.place.name and link.d_end != "closed":
            busy = [c for c in link.checks if c.transfer == transfer]
            if not link.fenced:
                busy += [f for f in link.flights if f.write.transfer == transfer and not f.landed]
        else:
            continue
        if busy:
            raise Violation(f"{process.place.name} gives back pages of {transfer} under {busy[0]}")


def agree(job: Job) -> None:
    """Raise Violation unless both sides count the same bytes and digests, once all ranks have seen the transfer delivered."""
    if len(job.counted) < len(job.prefill) + len(job.decode):
        return
    p, d = (sum((job.counted[rank] for rank in ranks), Counted()) for ranks in (job.prefill, job.decode))
    if p != d or not p.nbytes:
        raise Violation(f"{job.name}: prefill counts {p}, decode counts {d}")


def kind(reason: str) -> str:
    """Reduce a reason to what it is about, for counting."""
    for word, name in (
        ("given up", "given up by a worker"), ("gave the transfer up", "given up by the peer"), ("restarted", "peer restarted"),
        ("no new", "no new link in time"), ("sign of life", "lease over"), ("in time", "deadline"), ("takes no link", "link refused"),
        ("corrupted twice", "corrupted twice"), ("request's time", "deadline"), ("link broke", "links lost in a row"),
    ):  # fmt: skip
        if word in reason:
            return name
    return reason
