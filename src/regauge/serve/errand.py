"""One engine's part of a try: a request and its answer, without a task that waits for it where a connection is there already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from regauge.errors import ProtocolError, RegaugeError
from regauge.serve.connection import Call
from regauge.serve.engine_client import EngineClient
from regauge.serve.exchange import Broken, Exchange, TooLong


class Errand:
    """`moved` is told that something may have changed; then one looks. With `whole`, the answer has come when all of it has."""

    def __init__(self, client: EngineClient, call: Call, moved: Callable[[], None], *, whole: bool) -> None:
        self.client = client
        self.exchange: Exchange | None = None
        self.error: BaseException | None = None
        """Why it failed, where its exchange does not know."""
        self._call = call
        self._moved = moved
        self._whole = whole
        self._connecting: asyncio.Task[Exchange] | None = None

    def start(self) -> None:
        """Send the request, or make a connection for it."""
        try:
            exchange = self.client.begin(self._call)
        except RegaugeError as error:
            self.error = error
            return
        if exchange is not None:
            self._hear(exchange)
        else:
            self._connecting = asyncio.create_task(self.client.connect(self._call))
            self._connecting.add_done_callback(self._connected)

    def stop(self) -> None:
        """End it; an answer that is not whole ends with its connection."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self.exchange is not None:
            self.exchange.listener = None
            self.client.shut(self.exchange)

    @property
    def came(self) -> bool:
        """Whether a good answer has come: its first bytes, or all."""
        answer = self.exchange
        if answer is None or answer.status != 200 or self.error is not None:
            return False
        return answer.complete or (answer.has_body and not self._whole)

    @property
    def failed(self) -> bool:
        """Whether no good answer will come, or no end of one."""
        answer = self.exchange
        if self.error is not None or answer is None:
            return self.error is not None
        return answer.error is not None or answer.status not in (0, 200)

    def fault(self) -> BaseException | None:
        """Return why it failed; None: it was answered, and the answer says it."""
        if self.error is not None or self.exchange is None:
            return self.error
        error, client = self.exchange.error, self.client
        if isinstance(error, TooLong):
            return ProtocolError(f"answer of {client.role} worker {client.name}: {error}")
        return client.lost(error) if isinstance(error, Broken) else error

    def _hear(self, exchange: Exchange) -> None:
        exchange.gathers, exchange.listener = self._whole, self._moved
        self.exchange = exchange

    def _connected(self, task: asyncio.Task[Exchange]) -> None:
        self._connecting = None
        if task.cancelled():
            return
        self.error = task.exception()
        if self.error is None:
            self._hear(task.result())
        self._moved()
