"""Processes of the simulated cluster: one rank each, with its protocol machine, its pool, its memory and its transfers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from regauge.move import messages as m
from regauge.move.counted import Counted
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_types import NicLimits
from regauge.move.pages import PagePool
from regauge.move.protocol import Range
from regauge.move.receiver import Receiver
from regauge.move.sender import Sender
from regauge.testing.shape import Placed, Setup
from regauge.testing.violation import Violation


@dataclass(slots=True)
class Job:
    """One request: every prefill rank computes it, every decode rank wants it."""

    name: str
    number: int
    tokens: int
    first: int
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    chunks: tuple[Range, ...]
    """Tokens that the engine computes at once."""
    pending: list[str] = field(default_factory=list)
    """Ranks that have not begun it."""
    delivered: list[str] = field(default_factory=list)
    """Decode ranks that have committed it."""
    counted: dict[str, Counted] = field(default_factory=dict)
    """What each rank that has seen it delivered says of its bytes."""


@dataclass(slots=True)
class Side:
    """A job in one rank's process."""

    job: Job
    begun: float
    tables: list[m.Table]
    todo: deque[tuple[Range, Range]]
    """Prefill: layers and tokens to compute, in order."""
    granted: bool = False
    finished: bool = False
    ended: str = ""
    """`delivered` or a reason; empty while under way."""


@dataclass(slots=True)
class Process:
    """A rank's process. A restarted one is another instance, with fresh memory."""

    place: Placed
    instance: int
    pool: PagePool
    memory: list[list[int]]
    sender: Sender | None = None
    receiver: Receiver | None = None
    alive: bool = True
    frozen: bool = False
    sides: dict[str, Side] = field(default_factory=dict)
    links: dict[str, int] = field(default_factory=dict)
    """Peer -> number of the link that this end has not done with."""

    @property
    def runs(self) -> bool:
        """Whether it takes steps."""
        return self.alive and not self.frozen

    @property
    def machine(self) -> Sender | Receiver:
        """The protocol machine."""
        machine = self.sender or self.receiver
        assert machine is not None  # noqa: S101  # `start` gives it one
        return machine

    def lease(self, setup: Setup, job: Job) -> list[m.Table]:
        """Take a job's pages: a table for each group. Raises PoolExhausted."""
        first = job.first if self.receiver is not None else 0
        counts, origins = setup.tables(job.tokens, first, all_tokens=self.sender is not None)
        pages = self.pool.lease(job.name, sum(counts))
        tables, at = [], 0
        for count, origin in zip(counts, origins, strict=True):
            tables.append(m.Table(pages[at : at + count], origin))
            at += count
        return tables


def start(setup: Setup, place: Placed, instance: int) -> Process:
    """Start a process for a rank."""
    process, times = Process(place, instance, PagePool(setup.pages, setup.page), setup.blank()), setup.times
    if place in setup.prefill:
        process.sender = Sender(
            offer_s=times.offer, deadline_s=times.deadline, resume_s=times.resume, most_writes=setup.most_writes
        )
    else:
        flow = None
        if setup.flow is not None:
            flow = ReceiverFlow([NicLimits("nic", setup.flow.nic_bytes_per_s, setup.flow.rtt_s)], limits=setup.flow)
        process.receiver = Receiver(
            lease_s=times.lease, offer_s=times.offer, deadline_s=times.deadline, resume_s=times.resume, flow=flow
        )
    return process


def work(place: Placed, job: Job) -> deque[tuple[Range, Range]]:
    """Return what a prefill rank computes for a job: its layers one by one, for each chunk of the prompt."""
    return deque(((layer, layer + 1), chunk) for chunk in job.chunks for layer in sorted(place.layers))


def compute(setup: Setup, process: Process, side: Side, layers: Range, tokens: Range) -> None:
    """Write what a prefill rank's engine computes into its pages."""
    job, memory = side.job, process.memory
    for layer in range(*layers):
        number = next(i for i, group in enumerate(setup.groups) if layer in group.layers)
        held = tokens if setup.groups[number].kind != "recurrent" else setup.groups[number].live(tokens, job.tokens)
        values = expected(setup, job, (layer,), held, process.place.heads)
        spots = setup.places(side.tables[number], (layer,), held, process.place.heads)
        for (page, index), value in zip(spots, values, strict=True):
            memory[page][index] = value


def expected(setup: Setup, job: Job, layers: Sequence[int], tokens: Range, heads: Sequence[int]) -> list[int]:
    """Return what a job's cells must hold: layers outermost, then tokens, then heads."""
    return [
        setup.value(job.number, layer, token, head) for layer in layers for token in range(*tokens) for head in heads
    ]


def check_contents(setup: Setup, process: Process, side: Side) -> None:
    """Raise Violation unless a decode rank's pages hold exactly what was computed."""
    job, heads, memory = side.job, process.place.heads, process.memory
    for group, table in zip(setup.groups, side.tables, strict=True):
        tokens = group.live((job.first, job.tokens), job.tokens)
        wanted = expected(setup, job, group.layers, tokens, heads)
        found = [memory[page][index] for page, index in setup.places(table, group.layers, tokens, heads)]
        if found != wanted:
            bad = sum(a != b for a, b in zip(found, wanted, strict=True))
            raise Violation(
                f"{process.place.name}: {bad} of {len(wanted)} cells of {job.name} ({group.kind}) are wrong"
            )
