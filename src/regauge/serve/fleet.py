"""The workers that a gateway serves with: they join, drain, leave and die while requests run, and the router knows of it."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final

from regauge.config import EngineName, Role
from regauge.errors import ConfigError, RegaugeError
from regauge.observe import ERROR, ROLE, WORKER, Metrics, get_logger
from regauge.route import cluster
from regauge.route.router import Router
from regauge.serve import reports, wire
from regauge.serve.client import WorkerClient
from regauge.serve.connection import Connection
from regauge.serve.engine_client import EngineClient
from regauge.serve.pairing import MIXED, REFUSED, UNKNOWN, Pairs
from regauge.serve.sglang import SglangClient
from regauge.serve.vllm import VllmClient
from regauge.serve.workers import HealthPolicy, Worker

_DIALECTS: Final[Mapping[EngineName, type[EngineClient]]] = {"vllm": VllmClient, "sglang": SglangClient}
NEWS_S: Final = 2.0
Dial = Callable[[wire.WorkerAddress], Connection]


def dialer(token: str, model: str, key: bytes = b"", tls: ssl.SSLContext | None = None) -> Dial:
    """Return how a worker is reached: `token` unless it has its own; `key` and `tls` are of the transfer plane, for engines' status."""

    def dial(address: wire.WorkerAddress) -> Connection:
        kind = _DIALECTS.get(address.engine)
        if kind is None:
            return WorkerClient(address, address.token or token)
        return kind(address, address.token or token, model, key, tls)

    return dial


class Fleet:
    """The workers, by name. Belongs to one event loop, and to one router."""

    def __init__(
        self,
        addresses: Iterable[wire.WorkerAddress],
        dial: Dial,
        metrics: Metrics,
        router: Router,
        *,
        pairs: Pairs | None = None,
        policy: HealthPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: seconds, that the router counts in. Raises ConfigError for two workers of one name."""
        self.workers: dict[str, Worker] = {}
        self.pairs = pairs or Pairs()
        self.router = router
        self._dial = dial
        self._metrics = metrics
        self._policy = policy or HealthPolicy()
        self._clock = clock
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._heard: dict[str, tuple[int, str, int]] = {}
        """Of each worker's cache: the latest event, the instance that told it, and its process."""
        self._asked: dict[str, asyncio.Task[None]] = {}
        self._stated: dict[str, cluster.Worker] = {}
        self._running = False
        self._changed = asyncio.Event()
        """Set by whatever happens next to a worker, which puts another one here."""
        for address in addresses:
            if address.name in self.workers:
                raise ConfigError(f"workers: {address.name} is there twice; names are unique")
            self._add(address)

    def now(self) -> float:
        """Return the router's time, in seconds."""
        return self._clock()

    def of(self, role: Role) -> list[Worker]:
        """Return the workers of a role, in the order in which they joined."""
        return [worker for worker in self.workers.values() if worker.client.role == role]

    def ordered(self) -> list[Worker]:
        """Return all workers, prefill before decode, by their names."""
        return sorted(self.workers.values(), key=lambda worker: (worker.client.role != "prefill", worker.client.name))

    def join(self, address: wire.WorkerAddress) -> Worker:
        """Take a worker in; one of that name at another address takes its place."""
        if (known := self.workers.get(address.name)) is not None:
            if known.client.address == address:
                return known
            self.leave(address.name, "another worker has joined under its name")
        worker = self._add(address)
        if self._running:
            self._watch(worker)
        return worker

    def leave(self, name: str, reason: str = "it has left") -> None:
        """Let a worker go: its requests end as with a dead one."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return
        self.router.leave(name, self.now())
        self.pairs.forget(name)
        self._stated.pop(name, None)
        self._heard.pop(name, None)
        self._metrics.worker_down(name, worker.client.role)
        worker.client.give_up(reason)
        if (watch := self._watches.pop(name, None)) is not None:
            watch.cancel()
        self._wake()
        get_logger(**{WORKER: name, ROLE: worker.client.role}).info("worker has left", **{ERROR: reason})

    def drain(self, name: str, *, draining: bool) -> None:
        """Send a worker no new requests from now on, or send it requests again; those under way go on."""
        if (worker := self.workers.get(name)) is not None:
            worker.retired = draining
            self.router.health(name, worker.usable, self.now())
            self._wake()

    async def start(self) -> None:
        """Ask every worker once, then watch them until `close`."""
        await asyncio.gather(*(worker.poll() for worker in self.workers.values()))
        self._running = True
        for worker in self.workers.values():
            self._watch(worker)

    async def close(self) -> None:
        """Stop watching; end what runs on the workers."""
        self._running = False
        watches = [*self._watches.values(), *self._asked.values()]
        self._watches.clear()
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for worker in self.workers.values():
            await worker.client.close()

    async def returned(self, role: Role) -> None:
        """Wait until a worker of a role is usable, as a poll finds it that begins after this call."""
        before = {worker.client.name: worker.begun for worker in self.of(role)}
        for worker in self.of(role):
            worker.doubt()
        while not any(w.usable and w.answered > before.get(w.client.name, 0) for w in self.of(role)):
            await self._changed.wait()

    def fault(self) -> str:
        """Return why no request can be served now; empty: one can."""
        decode, prefill = self.of("decode"), self.of("prefill")
        if any(worker.usable and worker.computes for worker in decode):
            return ""
        for role, workers in (("decode", decode), ("prefill", prefill)):
            if not workers:
                return f"no {role} worker is known: start one, or name it under workers"
            if not any(worker.usable for worker in workers):
                return "; ".join(map(_why, workers))
        verdicts = [self.pairs.verdict(p.client.name, d.client.name) for p in prefill for d in decode]
        if all(verdict.path == REFUSED for verdict in verdicts):
            return f"the pair of engines is refused: {verdicts[0].text}"
        return ""

    @property
    def whole(self) -> bool:
        """Whether all workers are usable."""
        return bool(self.workers) and all(worker.usable for worker in self.workers.values())

    @property
    def api(self) -> EngineName | None:
        """The one kind of engine with an API of its own that all workers are; None: they are not."""
        engines = {worker.client.address.engine for worker in self.workers.values()}
        return next(iter(engines)) if len(engines) == 1 and engines <= set(_DIALECTS) else None

    @property
    def verdict(self) -> wire.VerdictInfo:
        """The path of all pairs, MIXED where they differ, and the sentences."""
        found = [
            self.pairs.verdict(p.client.name, d.client.name) for p in self.of("prefill") for d in self.of("decode")
        ]
        paths = {verdict.path for verdict in found}
        texts = dict.fromkeys(verdict.text for verdict in found if verdict.text)
        path = next(iter(paths)) if len(paths) == 1 else MIXED if paths else UNKNOWN
        return wire.VerdictInfo(path, "; ".join(texts))

    def count(self) -> None:
        """Put the router's totals into the metrics; every poll does, too."""
        router, index = self.router, self.router.index
        self._metrics.routing.count(router.decisions, gaps=index.stale_seen, dropped=index.dropped, blocks=len(index))

    def _add(self, address: wire.WorkerAddress) -> Worker:
        worker = Worker(self._dial(address), self._metrics, self._policy, self._told, self._clock)
        self.workers[address.name] = worker
        now = self.now()
        self._stated[address.name] = reports.worker(worker)
        self.router.join(self._stated[address.name], now)
        self.router.health(address.name, worker.usable, now)
        self._link(worker, now)
        self._wake()
        return worker

    def _watch(self, worker: Worker) -> None:
        watch = asyncio.create_task(self._follow(worker))
        watch.add_done_callback(_watch_ended)
        self._watches[worker.client.name] = watch

    async def _follow(self, worker: Worker) -> None:
        try:
            await worker.watch()
        finally:
            if self._running:  # it has left; `close` closes the others
                await worker.client.close()

    def _told(self, worker: Worker, health: wire.Health | None) -> None:
        """Pass on what a poll has found."""
        name, now = worker.client.name, self.now()
        if self.workers.get(name) is not worker:
            return
        self.router.health(name, worker.usable, now)
        self.count()
        if health is not None:
            self._state(worker, health, now)
            if not self.pairs.knows(name):
                self._beside(f"{name} layout", self._ask(worker))
            self._listen(worker, health)
        self._wake()

    def _listen(self, worker: Worker, health: wire.Health) -> None:
        """Ask a worker of our own what its prefix cache has gained and lost, if there is news."""
        name, client = worker.client.name, worker.client
        known = self._heard.get(name, (0, "", 0))
        if isinstance(client, WorkerClient) and (health.pid, health.cache_seq) != (known[2], known[0]):
            self._beside(f"{name} cache", self._news(worker, client, health.pid, known))

    async def _news(self, worker: Worker, client: WorkerClient, pid: int, known: tuple[int, str, int]) -> None:
        try:
            news = await client.cache(known[0], known[1], asyncio.get_running_loop().time() + NEWS_S)
        except RegaugeError as error:  # the index says that it is stale
            get_logger(**{WORKER: client.name}).debug("no news of the cache", **{ERROR: str(error)})
            return
        if self.workers.get(client.name) is not worker:
            return
        now = self.now()
        for event in reports.cache_events(news):
            self.router.cache_event(client.name, event, now)
        self._heard[client.name] = (news.seq, news.instance, pid)

    def _beside(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside the polls, unless it runs already."""
        if name in self._asked:
            work.close()
            return
        asking = asyncio.create_task(work)
        self._asked[name] = asking
        asking.add_done_callback(lambda _: self._asked.pop(name, None))

    def _state(self, worker: Worker, health: wire.Health, now: float) -> None:
        statement = reports.worker(worker)
        if self._stated.get(worker.client.name) != statement:
            self._stated[worker.client.name] = statement
            self.router.update(statement, now)
        self.router.report(
            worker.client.name, reports.load(health, events=isinstance(worker.client, WorkerClient)), worker.asked
        )
        if worker.client.role == "decode":
            self._link(worker, worker.asked)

    async def _ask(self, worker: Worker) -> None:
        """Ask for the layout, on which the paths of its pairs depend."""
        if await self.pairs.ask(worker):
            self._link(worker, self.now())

    def _link(self, worker: Worker, now: float) -> None:
        """Tell the router how a worker is linked."""
        prefill = [worker] if worker.client.role == "prefill" else self.of("prefill")
        decode = [worker] if worker.client.role == "decode" else self.of("decode")
        for one in prefill:
            for other in decode:
                names = one.client.name, other.client.name
                path, nbytes = self.pairs.verdict(*names).path, self.pairs.wire_bytes(*names)
                ranks = max(len(one.client.address.ranks), len(other.client.address.ranks), 1)
                self.router.link(reports.link(*names, path, (nbytes or 0) * ranks, other.health), now)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _why(worker: Worker) -> str:
    who = f"{worker.client.role} worker {worker.client.name}"
    if worker.up:
        return f"{who} is shutting down"
    return f"{who} is not available since {worker.since.isoformat(timespec='seconds')}: {worker.reason}"


def _watch_ended(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()) is not None:
        get_logger().error("a watch over a worker broke; its state is no longer known", exc_info=error)
