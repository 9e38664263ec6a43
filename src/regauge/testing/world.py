"""A cluster of prefill and decode ranks over a faulty network, one event at a time, with checks on every byte.

Protocol machines, page pools and messages are the product's; engines, memory, processes and the network are simulated. A world
does what the drivers do (`outbound.py`, `inbound.py`), in any order that an event loop, threads and a network could choose: `choices.events`
lists all that may happen now, `apply` lets one happen. Every cell of a page holds which transfer, layer, token and head it is.

What a faulty network can do beside waiting: break a link (either end notices later, or reads on for a while), land a write any time
until decode has fenced the data connection, land it spoilt, repeat messages of the last connection, kill and restart a process, freeze it.
Within one connection messages keep their order and come once: it is a TCP connection with a counter in every frame.

Raises Violation when: a write, or a check that brings a chunk into place, touches pages that its transfer does not hold; a source page is given
back under a write; a transfer is delivered with a wrong cell, ends twice, outlives its bound, or is delivered on prefill only; a chunk that nobody
spoilt has another digest; the two sides count other bytes, or another sum of digests; credit is exceeded; a page has no owner or two. A ProtocolError is a violation too: all peers are correct.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.protocol import Action, Check, Delivered, Failed, FenceLink, Granted, Released, Relink, Send, Write
from regauge.testing import data
from regauge.testing.network import Ledger, Link
from regauge.testing.process import Job, Process, Side, check_contents, compute, start, work
from regauge.testing.shape import Placed, Setup
from regauge.testing.violation import Violation

Event = tuple[str | int | float, ...]


class World:
    """See the module. Events are tuples of names and numbers, so that they can be chosen, logged and replayed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.places: dict[str, Placed] = {place.name: place for place in (*setup.prefill, *setup.decode)}
        self.pairs = tuple(
            (p.name, d.name) for p in setup.prefill for d in setup.decode if setup.shared(p, d) and setup.parts(p, d)
        )
        self.processes = {name: start(setup, place, 0) for name, place in self.places.items()}
        self.links: dict[int, Link] = {}
        self.jobs: dict[str, Job] = {}
        self.orders: list[tuple[str, str]] = []
        """Ranks that are to give a transfer up, since another rank of their worker has."""
        self.ledger = Ledger()
        self.echoes: dict[tuple[str, str], Link] = {}
        """The last link of each pair that is over."""
        self.made = 0
        self.stats: Counter[str] = Counter()
        self.last: deque[tuple[object, ...]] = deque(maxlen=200)
        """The last events; with what was read, of those that read a message."""

    # ---- driving ----

    def apply(self, event: Event) -> None:
        """Let one event happen. Raises Violation."""
        self.last.append(event)
        try:
            getattr(self, f"on_{event[0]}")(*event[1:])
        except ProtocolError as error:
            raise Violation(f"a correct peer broke the rules: {error}") from error

    def peers(self, job: Job, name: str) -> list[str]:
        """Return the ranks that a rank has a leg with."""
        if name in job.prefill:
            return [d for d in job.decode if (name, d) in self.pairs]
        return [p for p in job.prefill if (p, name) in self.pairs]

    # ---- requests and engines ----

    def add(self, job: Job) -> None:
        """A request comes in: every rank of both workers is to begin it, in any order."""
        job.pending = [*job.prefill, *job.decode]
        self.jobs[job.name] = job
        self.stats["transfers"] += 1

    def on_begin(self, job_name: str, name: str) -> None:
        """A rank leases pages, and offers (prefill) or expects (decode) the transfer."""
        job, process = self.jobs[job_name], self.processes[name]
        job.pending.remove(name)
        tables = process.lease(self.setup, job)
        peers = self.peers(job, name)
        if process.receiver is not None:
            process.sides[job_name] = Side(job, self.now, tables, deque())
            actions = process.receiver.expect(
                job_name, peers, job.tokens, tables, self.now, first=job.first, tenant=f"user {job.number % 2}"
            )
        else:
            assert process.sender is not None  # noqa: S101  # it is one or the other
            process.sides[job_name] = Side(job, self.now, tables, work(process.place, job))
            actions = process.sender.offer(job_name, peers, job.tokens, self.now)
        self.run(name, actions)

    def on_compute(self, name: str, job_name: str) -> None:
        """A prefill rank's engine computes a layer of a chunk, or has computed everything."""
        process = self.processes[name]
        side, sender = process.sides[job_name], process.sender
        assert sender is not None  # noqa: S101  # only prefill ranks compute
        if side.todo:
            layers, tokens = side.todo.popleft()
            compute(self.setup, process, side, layers, tokens)
            self.run(name, sender.ready(job_name, layers, tokens, self.now))
        else:
            side.finished = True
            self.run(name, sender.finish(job_name, b"first"))

    def on_retire(self, name: str, job_name: str) -> None:
        """A decode rank's engine has done with a transfer's pages: they must hold to the last what was delivered."""
        process = self.processes[name]
        check_contents(self.setup, process, process.sides[job_name])
        process.pool.release(job_name)
        self._forget(process, job_name)

    def on_obey(self, index: int) -> None:
        """A rank gives a transfer up, since another rank of its worker has."""
        name, job_name = self.orders.pop(index)
        self.on_cancel(name, job_name)

    def on_cancel(self, name: str, job_name: str) -> None:
        """A rank's worker gives a transfer up."""
        process = self.processes[name]
        if process.sender is not None:
            self.run(name, process.sender.cancel(job_name, f"given up at {name}"))
        elif process.receiver is not None:
            self.run(name, process.receiver.cancel(job_name, f"given up at {name}", self.now))

    # ---- time ----

    def on_pass(self, seconds: float) -> None:
        """Time passes, and every process that runs notices."""
        self.now += seconds
        for name in self.processes:
            self.on_tick(name)

    def on_tick(self, name: str) -> None:
        """A process looks at the clock. Afterwards nothing may be under way that is older than its bound."""
        process = self.processes[name]
        if not process.runs:
            return
        self.run(name, process.machine.tick(self.now))
        for side in process.sides.values():
            if not side.ended and self.now > side.begun + self.setup.times.bound:
                raise Violation(f"{side.job.name} is still under way on {name} after {self.now - side.begun:g} s")

    # ---- links ----

    def on_connect(self, p: str, d: str) -> None:
        """A prefill rank makes a link. Decode ends an earlier one first, and takes the new one once nothing of that can land."""
        first, second = self.processes[p], self.processes[d]
        if (old := second.links.get(p)) is not None:
            self.links[old].broken = True
            return
        self.made += 1
        setup, pp, dd = self.setup, self.places[p], self.places[d]
        terms = setup.terms(pp, dd)
        link = Link(self.made, p, d, first.instance, second.instance, terms.parts, setup.shared(pp, dd),
                    [()] * setup.slots, said_d=deque(maxlen=setup.echoes), said_p=deque(maxlen=setup.echoes))  # fmt: skip
        self.links[link.number] = link
        first.links[d] = second.links[p] = link.number
        link.send(m.Ready("pair", [], [f"data-{link.number}"]), to_decode=True)
        assert first.sender is not None  # noqa: S101  # `pairs` has prefill ranks first
        assert second.receiver is not None  # noqa: S101  # and decode ranks second
        self.run(p, first.sender.link_up(d, terms, f"{d}#{second.instance}", second.receiver.epoch))

    def on_hear(self, number: int, name: str) -> None:
        """An end reads its next message."""
        link = self.links[number]
        process = self.processes[name]
        message = (link.to_d if process.sender is None else link.to_p).popleft()
        self.last.append(("heard", message))
        if process.sender is not None:
            self.run(name, process.sender.on_message(link.d, message, self.now))
            return
        assert process.receiver is not None  # noqa: S101  # it is one or the other
        if isinstance(message, m.Ready):
            link.d_end = "up"
            self.run(name, process.receiver.link_up(link.p, link.parts, f"{link.p}#{link.p_instance}", self.now))
            return
        self.run(name, process.receiver.on_message(link.p, message, self.now))

    def on_break(self, number: int) -> None:
        """The network ends a link; its ends find out later."""
        self.links[number].broken = True

    def on_notice(self, number: int, name: str) -> None:
        """An end finds that the control connection is gone."""
        link, process = self.links[number], self.processes[name]
        if process.sender is not None:
            link.p_end = "closing"
            return
        link.to_d.clear()
        assert process.receiver is not None  # noqa: S101  # it is one or the other
        if link.d_end == "opening":
            link.d_end, link.fenced = "closed", True
            self._unlink(link, process)
            return
        link.d_end = "gone"
        self.run(name, process.receiver.link_lost(link.p, "the link broke", self.now))

    def on_fence(self, number: int) -> None:
        """Decode ends the data connection: what has not landed never will."""
        link = self.links[number]
        link.fenced = True
        link.flights = [flight for flight in link.flights if flight.landed or flight.cells is None]

    def on_close(self, number: int, name: str) -> None:
        """An end has nothing in flight (prefill) or being checked (decode) any more, and says so to its machine."""
        link, process = self.links[number], self.processes[name]
        if process.sender is not None:
            data.detach(self, link)
            link.p_end = "closed"
            link.to_p.clear()
            self._unlink(link, process)
            self.run(name, process.sender.link_lost(link.d, "the link broke", self.now))
            return
        assert process.receiver is not None  # noqa: S101  # it is one or the other
        link.d_end = "closed"
        self._unlink(link, process)
        self.run(name, process.receiver.link_fenced(link.p, self.now))

    def _unlink(self, link: Link, process: Process) -> None:
        del process.links[link.d if process.sender is not None else link.p]
        self._sweep(link)

    def _sweep(self, link: Link) -> None:
        if link.over:
            del self.links[link.number]
            if self.setup.echoes:
                self.echoes[link.p, link.d] = link

    # ---- writes and checks ----

    def on_land(self, number: int, index: int, fault: str) -> None:
        """A write's bytes reach decode's memory, or a part of them, or spoilt."""
        data.land(self, self.links[number], index, fault)

    def on_written(self, number: int, index: int) -> None:
        """Prefill learns that a write has landed."""
        link = self.links[number]
        flight = link.flights.pop(index)
        w = flight.write
        nbytes = data.size(link, w)
        sender = self.processes[link.p].sender
        assert sender is not None  # noqa: S101  # only prefill ranks write
        self.run(link.p, sender.written(w.transfer, link.d, w.epoch, w.seq, nbytes, flight.sent, self.now))

    def on_check(self, number: int, index: int, fault: str) -> None:
        """Decode brings a chunk into place, and compares its digest, or (`error`) fails to."""
        link = self.links[number]
        check = link.checks.pop(index)
        agrees = data.bring(self, link, check)
        receiver = self.processes[link.d].receiver
        assert receiver is not None  # noqa: S101  # only decode ranks check
        self.run(link.d, receiver.checked(check, self.now, agrees=agrees, error=fault and "the kernel failed"))

    # ---- faults ----

    def on_die(self, name: str) -> None:
        """A process is killed, and its memory goes with it. What it wrote and the network holds may still land."""
        process = self.processes[name]
        process.alive = process.frozen = False
        for link in list(self.links.values()):
            if name == link.p and link.p_end != "closed":
                data.detach(self, link)
                link.broken, link.p_end = True, "closed"
            elif name == link.d and link.d_end != "closed":
                link.broken, link.d_end, link.fenced = True, "closed", True
                link.checks.clear()
            self._sweep(link)
        process.links.clear()
        self.orders = [order for order in self.orders if order[0] != name]
        self.ledger.drop(name)
        for job_name in list(process.sides):
            self._forget(process, job_name)

    def on_restart(self, name: str) -> None:
        """A process that was killed comes back as another instance."""
        self.processes[name] = start(self.setup, self.places[name], self.processes[name].instance + 1)

    def on_freeze(self, name: str) -> None:
        """A process stops taking steps."""
        self.processes[name].frozen = True

    def on_thaw(self, name: str) -> None:
        """A frozen process goes on."""
        self.processes[name].frozen = False

    def on_repeat(self, number: int, name: str, index: int, place: int) -> None:
        """A message of the last connection between two processes comes (again) over the present one."""
        link = self.links[number]
        old = self.echoes[link.p, link.d]
        if name == link.d:
            link.to_d.insert(min(max(place, link.d_end == "opening"), len(link.to_d)), old.said_d[index])
        else:
            link.to_p.insert(min(place, len(link.to_p)), old.said_p[index])

    def on_refuse(self, p: str, d: str) -> None:
        """Prefill's driver learns that decode will not take another link."""
        sender = self.processes[p].sender
        assert sender is not None  # noqa: S101  # `pairs` has prefill ranks first
        self.run(p, sender.link_refused(d, f"{d} takes no link"))

    # ---- actions ----

    def run(self, name: str, actions: Iterable[Action]) -> None:
        """Carry out what a machine asks for, as its driver would."""
        process = self.processes[name]
        for action in actions:
            match action:
                case Send(peer, message):
                    self._send(process, peer, message)
                case Write(peer):
                    link = self.links[process.links[peer]]
                    if link.p_end == "up":  # else `link_lost` comes, and ends it
                        data.post(self, link, action)
                case Granted(job_name):
                    process.sides[job_name].granted = True
                case Check(peer):
                    self.links[process.links[peer]].checks.append(action)
                case FenceLink(peer):
                    if (number := process.links.get(peer)) is not None:
                        link = self.links[number]
                        link.broken = True
                        link.fencing |= link.d_end == "gone"
                case Relink():
                    self.stats["links made again"] += 1
                case Delivered() | Failed() | Released():
                    self._end(process, action)
        process.pool.check_integrity()

    def _send(self, process: Process, peer: str, message: m.Message) -> None:
        number = process.links.get(peer)
        if number is None:
            return
        link = self.links[number]
        if process.sender is not None:
            if link.p_end == "up":
                link.send(message, to_decode=True)
        elif link.d_end == "up":
            self.ledger.note(process.place.name, peer, message)
            link.send(message, to_decode=False)

    def _end(self, process: Process, action: Delivered | Failed | Released) -> None:
        name, side = process.place.name, process.sides[action.transfer]
        job = side.job
        if isinstance(action, Released) != bool(side.ended):
            raise Violation(f"{job.name} on {name}: {action} after {side.ended or 'nothing'}")
        if isinstance(action, Delivered):
            side.ended = "delivered"
            job.counted[name] = action.counted
            data.agree(job)
            self.stats[f"delivered on {'prefill' if process.sender else 'decode'}"] += 1
            if process.receiver is not None:
                process.pool.commit(job.name)
                check_contents(self.setup, process, side)
                job.delivered.append(name)
                data.untouched(self, process, job.name)
                return
            if missing := [d for d in self.peers(job, name) if d not in job.delivered]:
                raise Violation(
                    f"{name} believes that {job.name} was delivered to {', '.join(missing)}, which it was not"
                )
        elif isinstance(action, Failed):
            side.ended = action.reason
            self.stats["failed: " + data.kind(action.reason)] += 1
            ranks = job.prefill if process.sender else job.decode
            self.orders += [(r, job.name) for r in ranks if r != name and self._under_way(r, job.name)]
            if action.held:
                process.pool.quarantine(job.name)
                return
        data.untouched(self, process, job.name)
        process.pool.release(job.name)
        self._forget(process, job.name)

    def _under_way(self, name: str, job_name: str) -> bool:
        side = self.processes[name].sides.get(job_name)
        return side is not None and not side.ended

    def _forget(self, process: Process, job_name: str) -> None:
        job = process.sides.pop(job_name).job
        if not job.pending and not any(job_name in self.processes[r].sides for r in (*job.prefill, *job.decode)):
            del self.jobs[job_name]
            self.ledger.drop(job_name)
