"""What the gateway's clients of engines with an API of their own share: streams of server-sent events, and how their ranks' transfers stand.

The dialects: `vllm.py`, `sglang.py`. What became of a transfer such an engine cannot say in its answers: regauge's adapter in it does,
beside that API (`engines/status.py`).
"""

from __future__ import annotations

import abc
import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import reduce
from operator import add
from typing import Final, Literal, get_args

import msgspec

from regauge.engines import status
from regauge.errors import ProtocolError, RegaugeError
from regauge.layout.spec import Layout
from regauge.move.events import Traces
from regauge.move.state import WorkerState
from regauge.observe import ERROR, WORKER, get_logger
from regauge.plan.cost import Mode
from regauge.serve import wire
from regauge.serve.connection import Connection, Reply, WorkerError, WorkerLost
from regauge.serve.exchange import Exchange

STATUS_S: Final = 2.0
"""Most seconds for the status of a rank."""
FinishReason = Literal["stop", "length"]
ENDS: Final[Mapping[str, FinishReason]] = {"stop": "stop", "length": "length"}
"""Good ends, in these engines' words."""
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class EngineClient(Connection):
    """One server of such an engine, with regauge's adapter in it."""

    def __init__(
        self, address: wire.WorkerAddress, token: str, model: str, key: bytes = b"", tls: ssl.SSLContext | None = None
    ) -> None:
        """`key`: of the transfer plane, and `tls` of its links: what the ranks' status wants to see."""
        super().__init__(address, token)
        self._model = model
        self._shown = {"Authorization": wire.bearer(status.token(key))}
        self._tls = tls

    async def _health(self) -> wire.Health:
        # The ranks first: of an engine that dies they are gone at once, while its server may stand for seconds, and not answer.
        state = await self.debug(1, None) if self._told else None
        models = await self._serves()
        if self._model not in models:
            served = ", ".join(models) or "nothing"
            reason = f"it serves {served}, not {self._model}: start it with --served-model-name {self._model}"
            raise WorkerLost(self.name, self.role, reason)
        if state is None:
            return wire.Health("ok", self.role, self.name, 0, self._model)
        pages = sum(pool.quarantined for pool in state.pools)
        return wire.Health(
            "ok", self.role, self.name, state.pid, self._model, quarantined_pages=pages, transfers=state.totals,
            clock_s=state.clock_s,
        )  # fmt: skip

    @abc.abstractmethod
    async def _serves(self) -> Sequence[str]:
        """Return the names of its models, if it is ready. Raises WorkerError, WorkerLost."""

    async def generate(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AsyncGenerator[wire.Event, None]:
        """As `Connection.generate`."""
        count, telling = 0, None
        try:
            async with self._stream(body, deadline, headers) as answer:
                await self.refusal(answer)
                async with aclosing(self.parts(answer, b"\n\n")) as parts:
                    async for part in parts:
                        data = _data(part)
                        tokens, reason = ([], None) if data is None else self._take(data, count, body.sampling.logprobs)
                        for token in tokens:
                            if not count and body.prefill and self._told:  # beside the stream: it has ended by now
                                telling = asyncio.create_task(self.arrival(body.transfer_id))
                            count += 1
                            yield token
                        if reason is not None:
                            if telling is not None and (arrival := await telling) is not None:
                                yield arrival
                            yield wire.FinishEvent(reason, len(body.token_ids), count)
                            await self.drain(answer)
                            return
        finally:
            if telling is not None:
                telling.cancel()
        raise WorkerLost(self.name, self.role, "the stream ended before its finish reason")

    @abc.abstractmethod
    def _stream(
        self, body: wire.Generate, deadline: float, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Exchange]:
        """Ask for a streamed answer."""

    @abc.abstractmethod
    def _take(
        self, data: bytes, count: int, alternatives: int | None
    ) -> tuple[list[wire.TokenEvent], FinishReason | None]:
        """Read one event of a stream of which `count` tokens are known. Raises WorkerError, ProtocolError."""

    async def debug(self, limit: int, deadline: float | None) -> WorkerState:
        """As `Connection.debug`, of all ranks together."""
        self._need_told()
        path = f"{status.STATUS_PATH}?limit={limit}"
        told = await asyncio.gather(*(self._status(rank, path, status.Status, deadline) for rank in self._told))
        states = [state for each in told for state in each.states if state.role == self.role]
        if not states:
            raise ProtocolError(
                f"{self.role} worker {self.name} tells of no {self.role} rank; see what it was started as"
            )
        return _together(self.name, states)

    async def trace(self, transfer: str, deadline: float) -> list[Traces]:
        """As `Connection.trace`."""
        self._need_told()
        path = f"{status.TRACE_PATH}{transfer}"
        return await asyncio.gather(*(self._status(rank, path, Traces, deadline) for rank in self._told))

    def _need_told(self) -> None:
        if not self._told:
            message = "this server was given no status_port: nothing tells how its transfers stand"
            raise WorkerError(wire.ErrorEvent("bad_request", message, self.name), self.role)

    async def layout(self) -> Layout | None:
        """As `Connection.layout`, of rank 0: check takes it for all of them."""
        if not self._told:
            return None
        deadline = asyncio.get_running_loop().time() + STATUS_S
        told = await self._status(self._told[0], f"{status.STATUS_PATH}?limit=1", status.Status, deadline)
        return told.read_layout()

    @property
    def tells(self) -> bool:
        """Whether somebody can say how its transfers stand."""
        return bool(self._told)

    @property
    def _told(self) -> list[str]:
        return [rank.status for rank in self.address.ranks if rank.status]

    async def _status(self, rank: str, path: str, kind: type[Reply], deadline: float | None) -> Reply:
        async with self.call("GET", rank + path, deadline, headers=self._shown, secure=self._tls) as answer:
            return await self.read(answer, kind)

    async def arrival(self, transfer: str) -> wire.TransferEvent | None:
        """Ask what became of a transfer; None: it is not known. A failed one the engine has made up for: it is logged."""
        if not self._told:
            return None
        deadline = asyncio.get_running_loop().time() + STATUS_S
        path = f"{status.TRANSFERS_PATH}{transfer}"
        try:
            ends = await asyncio.gather(
                *(self._status(rank, path, status.TransferEnd, deadline) for rank in self._told)
            )
        except RegaugeError as error:
            get_logger(**{WORKER: self.name}).warning("the end of a transfer is not known", **{ERROR: str(error)})
            return None
        if failed := [end.error for end in ends if end.error]:
            get_logger(**{WORKER: self.name}).warning(
                "decode computed a prompt whose KV did not come", **{ERROR: failed[0]}
            )
            return None
        mode = next((m for m in get_args(Mode) for end in ends if m == end.mode), None)
        if mode is None:
            return None
        wire_bytes, last = sum(end.wire_bytes for end in ends), max(ends, key=lambda end: end.seconds)
        spans = sum(end.spans for end in ends)
        return wire.TransferEvent(ends[0].path, mode, wire_bytes, 0, last.seconds, spans=spans, stages=last.stages)

    def _decoded(self, data: bytes, kind: type[Reply]) -> Reply:
        """Read one event of a stream. Raises ProtocolError that quotes its beginning."""
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(f"event of {self.role} worker {self.name}: {error}: {data[:80]!r}") from error

    def _failure(self, code: wire.Code, message: str) -> WorkerError:
        return WorkerError(wire.ErrorEvent(code, message, self.name), self.role)


def signed(seed: int | None) -> int | None:
    """Return a seed as these engines take it: 64 bits with a sign."""
    if seed is None:
        return None
    seed %= 1 << 64
    return seed - (1 << 64) if seed >> 63 else seed


def _data(part: bytes) -> bytes | None:
    """Return what a server-sent event says; None for a comment that keeps the connection open, and for the mark of the end."""
    data = part.strip()
    if not data.startswith(_DATA):
        return None
    data = data.removeprefix(_DATA).strip()
    return None if data == _DONE else data


def _together(name: str, ranks: Sequence[WorkerState]) -> WorkerState:
    first = ranks[0]
    return msgspec.structs.replace(
        first, name=name,
        transfers=[x for rank in ranks for x in rank.transfers], links=[x for rank in ranks for x in rank.links],
        pools=[x for rank in ranks for x in rank.pools], sessions=[x for rank in ranks for x in rank.sessions],
        nics=[x for rank in ranks for x in rank.nics],
        totals=reduce(add, (rank.totals for rank in ranks)),
    )  # fmt: skip
