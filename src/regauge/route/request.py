"""The life of one client request over its attempts: what to do when a worker fails it. Pure: events in, actions out.

    begin --> Start --failure--> Start | Resume | Wait --again--> ...
      |         `--finished          `--> Stop
      `--> Stop

Attempts are bounded by `route.retries`, waits by the request's time limit and `wait_s`: so every life ends. An attempt has an id of its own: the
request's, then `{id}.1`, `{id}.2`, for receipts and workers. Failed workers are not asked again while there are others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec.structs import replace

from regauge.route.cluster import Cause, Outcome, Refusal, Request, Route
from regauge.route.router import Router

Role = Literal["prefill", "decode"]
StopReason = Literal["refused", "poison", "deadline", "exhausted", "not_resumable", "no_worker"]
ASK_AGAIN_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Start:
    """Do the attempt `request`, from its prompt's first token, where `route` says."""

    request: Request
    route: Route


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on elsewhere: prefill the prompt and the `generated` tokens after it, and decode from there."""

    request: Request
    route: Route
    generated: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody can take it now: call `again` when a worker of that role comes back, not before `earliest`, and at `until` at the latest."""

    earliest: float
    until: float
    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """The request is over; the message is for the client."""

    reason: StopReason
    message: str
    refusal: Refusal | None = None


Action = Start | Resume | Wait | Stop


@dataclass
class Life:
    """One request from its arrival to its end. `router` books and frees for each attempt: tell the life, and not the router.

    `resumable`: whether an answer can go on after its first token (sampling is a function of seed and position, say). `until`: when the
    client's time is over; `wait_s`: most seconds to wait for a lost worker to return.
    """

    request: Request
    router: Router
    resumable: bool = True
    until: float = float("inf")
    wait_s: float = 30.0
    attempts: int = 0
    """Begun so far."""
    kills: int = 0
    """Workers that died with the request in hand."""
    generated: int = 0
    """Tokens that the client has."""
    attempt: Request | None = None
    """The one that is under way."""
    failures: list[str] = field(default_factory=list)
    _excluded: set[str] = field(default_factory=set)
    _waiting: Wait | None = None

    def begin(self, now: float) -> Start | Stop:
        """Start the first attempt, or stop with the refusal."""
        decided = self._route(now, frozenset())
        if isinstance(decided, Refusal):
            return Stop("refused", decided.message, decided)
        assert isinstance(decided, Start)  # noqa: S101  # nothing is generated yet
        return decided

    def prefilled(self, now: float, cached: int, computed: int, seconds: float | None = None) -> None:
        """The attempt's KV has crossed."""
        if self.attempt is not None:
            self.router.prefilled(self.attempt.id, now, cached, computed, seconds)

    def first_token(self, now: float) -> None:
        """The attempt's first token has come."""
        if self.attempt is not None:
            self.router.first_token(self.attempt.id, now)

    def finished(self, now: float, outcome: Outcome = "complete") -> None:
        """The request is over, by its good end, its client or its own fault."""
        if self.attempt is not None:
            self.router.finished(self.attempt.id, now, outcome)
            self.attempt = None

    def failure(self, kind: Cause, worker: str, role: Role, now: float, *, generated: int = 0) -> Action:
        """The attempt has failed at a worker; `generated` counts its tokens that the client has.

        Whoever calls ends the attempt on all its workers first, and has told the router of a worker that it cannot reach.
        """
        if self.attempt is None:
            return Stop("exhausted", "no attempt is under way")
        self.router.failed(self.attempt.id, worker, now, kind)
        self.attempt = None
        self.generated += generated
        self.failures.append(f"{worker}: {kind}")
        self._excluded.add(worker)
        self.kills += kind == "worker_lost"
        return self._told(self._over(now) or self._next(now, role, now + self.wait_s), now)

    def again(self, now: float) -> Action:
        """Try again after a `Wait`; workers that failed it may have it once more, since nobody else is there."""
        waiting = self._waiting
        if waiting is None:
            return Stop("exhausted", "nothing is waited for")
        self._waiting = None
        return self._told(self._over(now) or self._next(now, waiting.role, waiting.until, anybody=True), now)

    def _told(self, action: Action, now: float) -> Action:
        """Have the journal know what no route says."""
        if isinstance(action, Stop):
            what = f"stopped, {action.reason}: {action.message}"
        elif isinstance(action, Wait):
            what = f"waits for a {action.role} worker"
        else:
            return action
        self.router.journal.happened(self.request.root or self.request.id, now, what)
        return action

    def _over(self, now: float) -> Stop | None:
        config, history = self.router.config, "; ".join(self.failures)
        if self.kills >= config.poison_kills:
            return Stop("poison", f"{self.kills} workers died with this request in hand, so it is not tried again")
        if self.generated and not self.resumable:
            return Stop("not_resumable", f"the answer cannot go on elsewhere ({history})")
        if self.attempts > config.retries:
            return Stop("exhausted", f"{self.attempts} attempts failed ({history})")
        if now >= self.until:
            return Stop("deadline", f"the time limit passed ({history})")
        return None

    def _next(self, now: float, role: Role, until: float, *, anybody: bool = False) -> Action:
        decided = self._route(now, frozenset(self._excluded))
        if isinstance(decided, Refusal) and anybody and self._excluded:
            decided = self._route(now, frozenset())
        if not isinstance(decided, Refusal):
            return decided
        until = min(until, self.until)
        if now >= until:
            return Stop("no_worker", f"{decided.message} ({'; '.join(self.failures)})", decided)
        self._waiting = Wait(min(now + ASK_AGAIN_S, until), until, decided.role or role)
        return self._waiting

    def _route(self, now: float, exclude: frozenset[str]) -> Start | Resume | Refusal:
        first, root = self.request, self.request.root or self.request.id
        attempt = first
        if self.attempts:
            attempt = replace(
                first,
                id=f"{root}.{self.attempts}",
                root=root,
                tokens=first.tokens + self.generated,
                max_tokens=max(1, first.max_tokens - self.generated),
                exclude=first.exclude | exclude,
                resume=self.generated > 0,
                admitted=True,
            )
        decided = self.router.route(attempt, now)
        if isinstance(decided, Refusal):
            return decided
        self.attempts += 1
        self.attempt = attempt
        if self.generated:
            return Resume(attempt, decided, self.generated)
        return Start(attempt, decided)
