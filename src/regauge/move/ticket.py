"""Tickets: what a caller holds of a post in flight."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Literal

from regauge.errors import DeadlineExceeded, TransportError

TicketState = Literal["queued", "sending", "landed", "failed", "fenced"]

_log = logging.getLogger(__name__)


class Ticket:
    """The life of one post: queued, sending, then landed, failed or fenced, for ever. Thread-safe.

    `landed`: every byte is in the peer's memory. `fenced`: it did not land whole, and nothing of it can any more.
    `failed`: `error` says why; bytes may still land until the peer is fenced.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._condition = threading.Condition()
        self._state: TicketState = "queued"
        self._bytes_done = 0
        self._error: TransportError | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []

    @property
    def state(self) -> TicketState:
        """Where it stands now."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether it has ended, in whichever way."""
        return self._state in ("landed", "failed", "fenced")

    @property
    def bytes_done(self) -> int:
        """Bytes known to have landed."""
        return self._bytes_done

    @property
    def error(self) -> TransportError | None:
        """Why it failed or was fenced: BoundsError, PeerLost, DeadlineExceeded or TransportError."""
        return self._error

    @property
    def reason(self) -> str:
        """The error as text; empty while there is none."""
        return "" if self._error is None else str(self._error)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, in whichever way. False when `timeout_s` passed first."""
        with self._condition:
            return self._condition.wait_for(lambda: self.done, timeout_s)

    async def landed(self, limit_s: float) -> None:
        """Wait until it has landed, without a thread. Raises TransportError when it failed, or has not ended in time."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: Ticket) -> None:
            loop.call_soon_threadsafe(ended.set)

        self.add_done_callback(tell)
        try:
            async with asyncio.timeout(limit_s):
                await ended.wait()
        except TimeoutError as error:
            raise DeadlineExceeded(f"a write of {self.nbytes} bytes did not end within {limit_s:g} s") from error
        self.check()

    def check(self) -> None:
        """Raise the error of a ticket that failed or was fenced."""
        if self._error is not None:
            raise self._error

    def add_done_callback(self, fn: Callable[[Ticket], None]) -> None:
        """Call `fn(ticket)` once it has ended: in the thread that ends it, or here and now. It must not block."""
        with self._condition:
            if not self.done:
                self._callbacks.append(fn)
                return
        fn(self)

    def advance(self, nbytes: int) -> None:
        """For back ends: `nbytes` more have landed (0: work has begun)."""
        with self._condition:
            if not self.done:
                self._state = "sending"
                self._bytes_done += nbytes

    def finish(self, state: TicketState, error: TransportError | None = None) -> bool:
        """For back ends: end the ticket. False when it had ended already; the first end stands."""
        with self._condition:
            if self.done:
                return False
            self._state, self._error = state, error
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for fn in callbacks:
            try:
                fn(self)
            except Exception:  # noqa: BLE001  # a caller's mistake must not end the thread that serves every other ticket
                _log.exception("a ticket's callback raised")
        return True

    def end_fenced(self, *, gone: bool, where: str) -> None:
        """For back ends: end a ticket that a fence has cut. `gone`: the receiver has confirmed that nothing can land."""
        if gone:
            self.finish("fenced", TransportError("fenced before all of it had landed"))
        else:
            text = f"cut by a fence that {where} did not confirm; bytes may still land: fence again"
            self.finish("failed", DeadlineExceeded(text))

    def __repr__(self) -> str:
        return f"<Ticket {self._state} {self._bytes_done}/{self.nbytes} {self.reason}>"
