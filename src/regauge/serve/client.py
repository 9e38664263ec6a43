"""A worker of our own, asked by the contract of `wire.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Final

import msgspec

from regauge.blocks import CacheNews
from regauge.errors import ProtocolError
from regauge.move.events import Traces
from regauge.move.state import WorkerState
from regauge.serve import wire
from regauge.serve.connection import Connection, WorkerError, WorkerLost
from regauge.serve.exchange import Exchange

ABORT_S: Final = 2.0


class WorkerClient(Connection):
    """One worker of our own."""

    signs = True

    async def _health(self) -> wire.Health:
        async with self.call("GET", wire.HEALTH_PATH, None) as answer:
            health = await self.read(answer, wire.Health)
        if (health.name, health.role) != (self.name, self.role):
            raise WorkerLost(self.name, self.role, f"{health.role} worker {health.name} answers at {self.address.url}")
        return health

    async def generate(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[wire.Event, None]:
        """As `Connection.generate`."""
        async with self.call("POST", wire.GENERATE_PATH, deadline, wire.encode(body), headers) as answer:
            await self.refusal(answer)
            async with aclosing(self.parts(answer, b"\n")) as lines:
                async for line in lines:
                    event = wire.decode_event(line)
                    if isinstance(event, wire.ErrorEvent):
                        raise WorkerError(event, self.role)
                    yield event
                    if isinstance(event, wire.FinishEvent):
                        await self.drain(answer)
                        return
        raise WorkerLost(self.name, self.role, "the stream ended before its finish event")

    async def prefill(self, body: wire.Prefill, deadline: float, headers: Mapping[str, str]) -> wire.Prefilled:
        """As `Connection.prefill`."""
        async with self.call("POST", wire.PREFILL_PATH, deadline, wire.encode(body), headers) as answer:
            return await self.read(answer, wire.Prefilled)

    async def abort(self, request_id: str) -> wire.Aborted:
        """As `Connection.abort`."""
        deadline = asyncio.get_running_loop().time() + ABORT_S
        async with self.call("DELETE", f"{wire.REQUESTS_PATH}/{request_id}", deadline) as answer:
            return await self.read(answer, wire.Aborted)

    async def cache(self, since: int, instance: str, deadline: float) -> CacheNews:
        """Ask what its prefix cache has gained and lost. Raises as `debug`."""
        async with self.call("GET", f"{wire.CACHE_PATH}?since={since}&instance={instance}", deadline) as answer:
            return await self.read(answer, CacheNews)

    async def receipts(self, since: int, deadline: float) -> wire.Receipts:
        """Ask for its receipts after a number. Raises as `debug`."""
        path = f"{wire.RECEIPTS_PATH}?since={since}&limit={wire.MAX_RECEIPTS}"
        async with self.call("GET", path, deadline) as answer:
            return await self.read(answer, wire.Receipts)

    async def debug(self, limit: int, deadline: float | None) -> WorkerState:
        """As `Connection.debug`."""
        async with self.call("GET", f"{wire.DEBUG_PATH}?limit={limit}", deadline) as answer:
            return await self.read(answer, WorkerState)

    async def trace(self, transfer: str, deadline: float) -> list[Traces]:
        """As `Connection.trace`."""
        async with self.call("GET", f"{wire.TRACE_PATH}/{transfer}", deadline) as answer:
            return [await self.read(answer, Traces)]

    async def refusal(self, answer: Exchange) -> None:
        """As `Connection.refusal`."""
        if answer.status == 200:
            return
        body = await self.whole(answer)
        try:
            event = msgspec.json.decode(body, type=wire.ErrorEvent)
        except msgspec.DecodeError as error:
            reason = f"HTTP {answer.status} from {self.role} worker {self.name}: {body[:80]!r}"
            raise ProtocolError(reason) from error
        raise WorkerError(event, self.role)
