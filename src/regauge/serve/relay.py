"""One client request: its choices placed by the router, tried, tried again elsewhere, and merged into one stream of deltas.

Each choice (one answer to one prompt) is a request of its own to router, workers and meter. What becomes of a try that failed is for
`route.request.Life` to say, and nothing here decides on it: before the first token the choice begins again elsewhere, after it another
worker goes on from the prompt and what there is of the answer, and the client sees neither.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from regauge.blocks import hash_blocks
from regauge.engines.local.sampling import GREEDY_TEMPERATURE
from regauge.engines.sglang import room
from regauge.errors import ProtocolError, ReceiptError, RegaugeError
from regauge.meter.receipt import Outcome
from regauge.observe import Metrics
from regauge.route.cluster import Request
from regauge.route.request import Action, Life, Resume, Start, Stop
from regauge.serve import wire, words
from regauge.serve.attempt import Attempt, Spawn, Task
from regauge.serve.choice import Choice, ChoiceText
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.failures import ClientGone, blame, refused
from regauge.serve.fleet import Fleet
from regauge.serve.lives import settled
from regauge.serve.metering import Meter
from regauge.serve.names import Names
from regauge.serve.openai import ApiError
from regauge.serve.recent import Recent, Story, Tried
from regauge.serve.replies import Delta, PromptDetails, Usage
from regauge.serve.tally import Tally
from regauge.serve.text import Tokenizer
from regauge.serve.told import transferred
from regauge.serve.tracecontext import onward

ALONE: Final = "NONE"
"""Path of a prompt that decode computed itself."""


@dataclass(frozen=True)
class Service:
    """What all requests of a gateway share."""

    fleet: Fleet
    tokenizer: Tokenizer
    metrics: Metrics
    meter: Meter | None
    """None: nothing is metered."""
    names: Names
    model: str
    spawn: Spawn
    limit_s: float
    """Most seconds of a request."""
    wait_s: float
    """Most seconds that a request which has lost its workers waits for others to come."""
    recent: Recent = field(default_factory=Recent)


class Job:
    """The choices of one client request, merged into one stream of deltas; `close` it, whatever happened."""

    def __init__(
        self,
        choices: Sequence[Choice],
        service: Service,
        *,
        tenant: str,
        priority: int = 0,
        salt: str = "",
        headers: Mapping[str, str],
    ) -> None:
        """`salt`: whose prompts alone may share this one's prefix in caches; empty: everybody's without one."""
        self.choices = choices
        self.story = Story()
        self.tally = Tally(self.story.arrived)
        self.tenant = tenant
        self.priority = priority
        self.salt = salt
        self.headers = headers
        self.deadline = asyncio.get_running_loop().time() + service.limit_s
        self._service = service
        self._queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complete = False
        self.story.prompt_tokens = self.usage().prompt_tokens
        self.gone = False
        """The client went away."""

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Start the choices and yield their deltas, as many as there are at a time. Raises what ended a choice."""
        for run in self._place():
            task = asyncio.create_task(run.run())
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        still_open = len(self.choices)
        while still_open:
            items = [await self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get_nowait())
            batch = [item for item in items if isinstance(item, Delta)]
            still_open -= sum(delta.finish is not None for delta in batch)
            if batch:
                yield batch
            for item in items:
                if isinstance(item, BaseException):
                    raise item
        self._complete = True

    @property
    def size(self) -> int:
        """Requests to the workers."""
        return len(self.choices)

    def told(self) -> dict[str, str]:
        """Return the headers that say where the request went, once it has been placed."""
        tally = self.tally
        named = {"x-regauge-path": tally.path, "x-regauge-route": tally.route.header if tally.route else None}
        return {name: value for name, value in named.items() if value}

    def put(self, delta: Delta) -> None:
        """Take what a choice adds."""
        self._queue.put_nowait(delta)

    def fail(self, error: RegaugeError) -> None:
        """End the job from outside: `deltas` raises the error."""
        self.gone = isinstance(error, ClientGone)
        self._queue.put_nowait(error)

    async def close(self) -> None:
        """Wait until nothing of the job runs any more; unless all is well it is cancelled, and its workers told."""
        if not self._complete:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def usage(self) -> Usage:
        """Return the tokens so far; a prompt counts once."""
        prompts = {choice.prompt: len(choice.token_ids) for choice in self.choices}
        prompt, completion = sum(prompts.values()), self.tally.completion_tokens
        cached = PromptDetails(sum(self.tally.cached_tokens.values()))
        return Usage(prompt, completion, prompt + completion, cached)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._queue.put_nowait(error)

    def _place(self) -> list[_Run]:
        """Place all choices, or none. Raises ApiError for what is not taken: nobody has begun then."""
        placed: list[_Run] = []
        try:
            for choice in self.choices:
                run = _Run(choice, self, self._service)
                run.place()
                placed.append(run)
        except ApiError:
            for run in placed:
                run.withdraw()
            raise
        return placed


class _Run:
    """One choice, from its first placement to its last token."""

    def __init__(self, choice: Choice, job: Job, service: Service) -> None:
        self._choice = choice
        self._job = job
        self._service = service
        self._text = ChoiceText(choice, service.tokenizer)
        self._seed = choice.sampling.seed
        self._complete = False
        fleet = service.fleet
        blocks = hash_blocks(choice.token_ids, fleet.router.config.block_tokens, job.salt.encode())
        request = Request(
            choice.request_id, job.tenant, service.model, len(choice.token_ids), blocks, choice.sampling.max_tokens, job.priority
        )  # fmt: skip
        self._life = Life(request, fleet.router, until=job.deadline, wait_s=service.wait_s)
        first = next(each.request_id for each in job.choices if each.prompt == choice.prompt)
        self._resumes = "" if first == choice.request_id else first
        """What has paid for the input: the attempt that this one goes on from, or the first answer to the same prompt."""
        self._placed: Start | None = None
        self._token_at = 0.0
        """When the latest token came."""
        self._tried: Tried
        """What is kept of the latest attempt."""

    def place(self) -> None:
        """Find a place for the first attempt. Raises ApiError where there is none."""
        step = self._life.begin(self._now())
        if isinstance(step, Stop):
            assert step.refusal is not None  # noqa: S101  # nothing else stops what has not begun
            raise refused(step.refusal, self._service.fleet.fault())
        self._placed = step

    def withdraw(self) -> None:
        """Give the place back: nothing will begin."""
        self._life.finished(self._now(), "cancelled")

    async def run(self) -> None:
        """Try until the answer is complete. Raises what ended it."""
        try:
            await self._run()
        finally:
            outcome = "complete" if self._complete else "cancelled" if self._job.gone else "failed"
            self._service.metrics.ended(outcome)

    async def _run(self) -> None:
        step: Action | None = self._placed
        while isinstance(step, Start | Resume):
            attempt = self._attempt(step)
            try:
                await self._try(attempt)
                return
            except asyncio.CancelledError:
                self._end(attempt, "cancelled")
                raise
            except (WorkerLost, WorkerError, RequestTimeout, ProtocolError) as error:
                step = await self._after(attempt, error)

    def _attempt(self, step: Start | Resume) -> Attempt:
        fleet, route, choice = self._service.fleet, step.route, self._choice
        tally = self._job.tally
        tally.attempts += 1
        if tally.route is None or choice.index == 0:
            tally.route = route
            tally.path = fleet.pairs.verdict(route.prefill, route.decode).path if route.prefill else ALONE
        if route.prefill is None:
            self._service.metrics.bypassed.inc()
        task = Task(
            step.request.id, room.new_transfer(), choice.token_ids, list(self._text.tokens),
            msgspec.structs.replace(choice.sampling, seed=self._seed),
            wire.MeterTag(self._job.tenant, route.prefill or "", route.decode, route.header, self._resumes)
            if self._service.meter is not None else None, self._job.salt,
        )  # fmt: skip
        path = fleet.pairs.verdict(route.prefill, route.decode).path if route.prefill else ALONE
        self._tried = self._job.story.attempt(task.request_id, route.prefill, route.decode, path, task.transfer_id)
        prefill = None if route.prefill is None else fleet.workers[route.prefill]
        headers = onward(self._job.headers, self._tried.context)
        return Attempt(task, prefill, fleet.workers[route.decode], self._job.deadline, headers, self._service.spawn)

    async def _try(self, attempt: Attempt) -> None:
        """Run an attempt to the answer's end."""
        await attempt.run(partial(self._take, attempt), partial(self._prefilled, attempt))
        if not self._complete and attempt.finish is not None:
            self._finish(self._text.end(attempt.finish.reason))
        self._arrived(attempt)
        self._life.finished(self._now(), "complete")
        self._end(attempt, "complete" if attempt.finish is not None else "cancelled")

    def _take(self, attempt: Attempt, event: wire.TokenEvent) -> bool:
        text, tally = self._text, self._job.tally
        if attempt.delivered == 1:
            self._life.first_token(self._now())
            self._seed = self._seed if event.seed is None else event.seed
        now = time.monotonic()
        if not text.count:
            text.ttft_s = now - tally.arrived
        elif attempt.delivered > 1:
            self._service.metrics.itl.observe(now - self._token_at)
        self._token_at = now
        self._tried.token(now, attempt.arrival)
        if attempt.delivered == 1:
            self._cached(attempt)
        delta = text.push(event)
        tally.completion_tokens += 1
        if delta is not None and delta.finish is None:
            self._job.put(delta)
        elif delta is not None:
            self._finish(delta)
            return False
        return True

    def _cached(self, attempt: Attempt) -> None:
        """Note what the client is told to have been cached: what is charged, of the attempt that gave the first token."""
        if attempt.cached is not None and not self._resumes:
            self._job.tally.cached_tokens[self._choice.prompt] = attempt.cached

    def _prefilled(self, attempt: Attempt, reply: wire.Prefilled) -> None:
        self._cached(attempt)
        self._tried.prefilled = time.monotonic(), reply
        self._life.prefilled(self._now(), reply.cached_tokens, reply.computed_tokens)
        self._service.metrics.transfers.exposed.observe(reply.transfer_seconds)
        self._service.metrics.queued("prefill", reply.queue_seconds)

    def _arrived(self, attempt: Attempt) -> None:
        event, tally = attempt.arrival, self._job.tally
        if event is not None:
            tally.mode = event.mode
            tally.wire_bytes += event.wire_bytes
            transferred(self._service.metrics, event)
        if attempt.finish is not None:
            self._service.metrics.queued("decode", attempt.finish.queue_seconds)

    async def _after(
        self, attempt: Attempt, error: WorkerLost | WorkerError | RequestTimeout | ProtocolError
    ) -> Action:
        """Say what is next after a failed attempt. Raises the error where nothing is."""
        fleet, life, now = self._service.fleet, self._life, self._now()
        self._arrived(attempt)
        self._tried.error = str(error)
        blamed = blame(error, attempt.prefill.client.name if attempt.prefill else None, attempt.decode.client.name)
        if blamed is None:
            life.finished(now, "failed")
            self._end(attempt, "failed")
            raise error
        kind, worker, role = blamed
        if isinstance(error, WorkerLost):
            fleet.router.health(worker, False, now)
        life.resumable = self._resumable(attempt)
        step = life.failure(kind, worker, role, now, generated=attempt.delivered)
        if self._done(attempt):
            life.finished(now)
            attempt.lost.add("decode")
            self._end(attempt, "complete")
            return Stop("exhausted", "the answer is complete")
        try:
            found = await settled(step, life, fleet, kind, error)
        except RegaugeError:
            self._end(attempt, "failed")
            raise
        except asyncio.CancelledError:  # the client went away meanwhile, with what had been delivered
            life.finished(self._now(), "cancelled")
            self._end(attempt, "resumed" if attempt.delivered else "failed")
            raise
        self._end(attempt, "resumed" if attempt.delivered else "failed")
        if attempt.delivered:
            self._resumes = attempt.task.request_id
        (self._service.metrics.resumed if self._text.count else self._service.metrics.retried).inc()
        return found

    def _done(self, attempt: Attempt) -> bool:
        """Whether the worker was lost with nothing left to do: the end was on its way. Then the answer ends here."""
        text, sampling = self._text, self._choice.sampling
        if attempt.delivered and text.count >= sampling.max_tokens:
            self._finish(text.end("length"))
        return self._complete

    def _resumable(self, attempt: Attempt) -> bool:
        """Whether another worker's tokens would follow as this one's would have: a stream of random numbers that is known, or none."""
        sampling, greedy = self._choice.sampling, self._choice.sampling.temperature < GREEDY_TEMPERATURE
        if attempt.decode.client.address.engine == "local":
            return greedy or self._seed is not None
        return not (sampling.presence_penalty or sampling.frequency_penalty)

    def _finish(self, delta: Delta) -> None:
        text, tally, choice = self._text, self._job.tally, self._choice
        self._complete = True
        tpot = self._service.metrics.finished(
            prompt_tokens=len(choice.token_ids),
            completion_tokens=text.count,
            ttft_s=text.ttft_s,
            seconds=time.monotonic() - tally.arrived,
        )
        if tpot is not None:
            tally.tpots_s.append(tpot)
        if text.ttft_s is not None:
            tally.ttft_s = min(text.ttft_s, tally.ttft_s or text.ttft_s)
        self._job.put(delta)

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        """Leave the attempt's receipts."""
        self._tried.end(time.monotonic(), outcome, attempt.finish)
        if outcome == "cancelled" and not self._complete:
            self._life.finished(self._now(), "cancelled")
        meter, tag = self._service.meter, attempt.task.meter
        if meter is not None and tag is not None:
            self._service.spawn(_account(meter, attempt, tag, outcome))

    def _now(self) -> float:
        return self._service.fleet.now()


async def _account(meter: Meter, attempt: Attempt, tag: wire.MeterTag, outcome: Outcome) -> None:
    """Leave an attempt's receipts, once the workers that were told to drop it have given theirs, or are known to have none."""
    meter.heard(words.said(attempt))
    meter.heard(await asyncio.gather(*attempt.drops))
    try:
        meter.say(words.receipt(attempt, tag, outcome, by=meter.name, model=meter.model))
    except ReceiptError as error:
        meter.refused(error, attempt.task.request_id)
