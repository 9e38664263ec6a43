"""A worker that speaks `wire.py` over loopback, and answers what it is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from regauge.config import Role
from regauge.move.events import Event, Trace, Traces
from regauge.move.protocol import Stages, TransferState
from regauge.move.state import LinkState, PoolState, Totals, WorkerState, bounded, shown
from regauge.serve import wire
from regauge.serve.text import Tokenizer

TOKEN = "internal-token"
MODEL = "echo-1"
STAGES = Stages(0.001, 0.0, 0.001, 0.0005, 0.0005)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


class EchoWorker:
    """A worker over real HTTP whose model answers "I heard: " and its prompt.

    Prefill "delivers" by a future per transfer, on which the decode stream waits. Switches, all off at first:
    `refuse` answers before the stream; `break_after` tokens an error event is sent; `die_after` tokens the
    connections are torn (by prefill once alone, if it `recovers`); `hold` is an event to wait for before the first token (or the prefill's answer);
    `linger` is an event to wait for between a prefill's delivery and its answer; `frozen` lets health checks hang; `load` is put over what they tell; `pace` is awaited before each token.
    """

    def __init__(self, name: str, role: Role, tokenizer: Tokenizer, rails: dict[str, asyncio.Future[None]]) -> None:
        self.name = name
        self.role = role
        self.refuse: wire.ErrorEvent | None = None
        self.break_after: tuple[int, wire.ErrorEvent] | None = None
        self.die_after: int | None = None
        self.recovers = False
        self.hold: asyncio.Event | None = None
        self.linger: asyncio.Event | None = None
        self.frozen: asyncio.Event | None = None
        self.pace: Callable[[int], Any] | None = None
        self.status = "ok"
        self.polls = 0
        """Health checks that have come in."""
        self.pid = 1
        self.quarantined = 0
        self.load: dict[str, float] = {}
        self.cached = 0
        self.totals = Totals()
        self.transfers: list[TransferState] = []
        self.events: dict[str, list[Event]] = {}
        """What it tells of transfers, at times of this process."""
        self.skew_s = 0.0
        """Its clock before this process's."""
        self.answer: Callable[[list[int]], str] | None = None
        self.generates: list[wire.Generate] = []
        self.prefills: list[wire.Prefill] = []
        self.headers: list[dict[str, str]] = []
        self.running: set[str] = set()
        self.aborts: asyncio.Queue[str] = asyncio.Queue()
        self.arrivals: asyncio.Queue[str] = asyncio.Queue()
        self._tokenizer = tokenizer
        self._rails = rails
        self._aborted: dict[str, asyncio.Event] = {}
        self._transports: set[asyncio.Transport] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def address(self) -> wire.WorkerAddress:
        rank = wire.RankAddress(self.name, ("127.0.0.1", 1))
        return wire.WorkerAddress(self.name, self.role, f"http://127.0.0.1:{self.port}", [rank])

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(wire.HEALTH_PATH, self._health)
        app.router.add_get(wire.DEBUG_PATH, self._debug)
        app.router.add_get(wire.TRACE_PATH + "/{id}", self._trace)
        app.router.add_post(wire.GENERATE_PATH, self._generate)
        app.router.add_post(wire.PREFILL_PATH, self._prefill)
        app.router.add_delete(wire.REQUESTS_PATH + "/{id}", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1_024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening and tear every connection, as a killed process would."""
        for transport in self._transports:
            transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.transport is not None
        self._transports.add(request.transport)
        if not wire.authorized(request.headers.get("Authorization"), TOKEN):
            return self._error(wire.ErrorEvent("unauthorized", "wrong token", self.name))
        response: web.StreamResponse = await handler(request)
        return response

    def _error(self, event: wire.ErrorEvent) -> web.Response:
        return web.Response(body=wire.encode(event), status=wire.STATUS[event.code])

    async def _health(self, _: web.Request) -> web.Response:
        self.polls += 1
        if self.frozen is not None:
            await self.frozen.wait()
        running = len(self.running)
        body = msgspec.json.encode(
            {
                "status": self.status,
                "role": self.role,
                "name": self.name,
                "pid": self.pid,
                "model": MODEL,
                "free_pages": 64 - running,
                "pages": 64,
                "running": running,
                "waiting": 0,
                "quarantined_pages": self.quarantined,
                "transfers": self.totals,
                **self.load,
            }
        )
        return web.Response(body=body)

    async def _debug(self, request: web.Request) -> web.Response:
        if self.frozen is not None:
            await self.frozen.wait()
        state = WorkerState(
            self.name, self.role, self.pid, asyncio.get_running_loop().time(), self.transfers,
            [LinkState("peer", "up", "CONVERT", ["staged"], 5.0, "5e5510")], [PoolState(64, 16, 64, 0, 0, 0)], [],
            self.totals,
        )  # fmt: skip
        state = bounded(state, shown(request.query.get("limit")))
        return web.Response(body=wire.encode(state))

    async def _trace(self, request: web.Request) -> web.Response:
        if self.frozen is not None:
            await self.frozen.wait()
        events = self.events.get(request.match_info["id"], [])
        moved = [replace(e, begin_s=e.begin_s + self.skew_s, end_s=e.end_s + self.skew_s) for e in events]
        traces = [Trace(request.match_info["id"], self.name, moved)] if moved else []
        return web.Response(body=wire.encode(Traces(time.monotonic() + self.skew_s, traces)))

    async def _prefill(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=wire.Prefill)
        self.prefills.append(body)
        self._arrived(body.request_id, request)
        try:
            if self.refuse is not None:
                return self._error(self.refuse)
            if self.die_after is not None:
                request.transport.abort()
                self.die_after = None if self.recovers else self.die_after
                return self._error(wire.ErrorEvent("engine_failed", "nobody hears this", self.name))
            if self.hold is not None and not await self._unless_aborted(body.request_id, self.hold):
                return self._error(wire.ErrorEvent("aborted", "aborted", self.name))
            self._rail(body.transfer_id).set_result(None)
            if self.linger is not None and not await self._unless_aborted(body.request_id, self.linger):
                return self._error(wire.ErrorEvent("aborted", "aborted", self.name))
            first = self._answer(body.token_ids)[0]
            return web.Response(
                body=wire.encode(
                    wire.Prefilled(
                        first, len(body.token_ids) - self.cached, self.cached, 0.01, 0.001, queue_seconds=0.003
                    )
                )
            )
        finally:
            self.running.discard(body.request_id)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read(), type=wire.Generate)
        self.generates.append(body)
        self._arrived(body.request_id, request)
        try:
            if self.refuse is not None:
                return self._error(self.refuse)
            response = web.StreamResponse(headers={"Content-Type": wire.NDJSON})
            await response.prepare(request)
            await self._stream(request, response, body)
            await response.write_eof()
            return response
        finally:
            self.running.discard(body.request_id)
            self._rails.pop(body.transfer_id, None)

    async def _stream(self, request: web.Request, response: web.StreamResponse, body: wire.Generate) -> None:
        aborted = wire.encode_line(wire.ErrorEvent("aborted", "aborted", self.name))
        delivered = asyncio.Event()
        self._rail(body.transfer_id).add_done_callback(lambda _: delivered.set())
        for gate in (delivered, self.hold):
            if gate is not None and not await self._unless_aborted(body.request_id, gate):
                await response.write(aborted)
                return
        ids = self._answer(body.token_ids)
        sampling = body.sampling
        wanted = [ids[n % len(ids)] for n in range(sampling.max_tokens)] if sampling.ignore_eos else ids
        transfer = wire.TransferEvent("CONVERT", "fused", 1000 + len(body.token_ids), 3, 0.002, spans=12, stages=STAGES)
        await response.write(wire.encode_line(transfer))
        for count, token in enumerate(wanted[len(body.generated) : sampling.max_tokens]):
            if self.pace is not None:
                await self.pace(count)
            if self._aborted[body.request_id].is_set():
                await response.write(aborted)
                return
            if self.break_after is not None and count == self.break_after[0]:
                await response.write(wire.encode_line(self.break_after[1]))
                return
            if count == self.die_after:
                request.transport.abort()
                return
            await response.write(wire.encode_line(self._token(token, sampling.logprobs)))
        count = min(len(wanted), sampling.max_tokens)
        reason = "stop" if not sampling.ignore_eos and count == len(ids) else "length"
        finish = wire.FinishEvent(reason, len(body.token_ids) + len(body.generated), count - len(body.generated))
        await response.write(wire.encode_line(finish))

    def _token(self, token: int, logprobs: int | None) -> wire.TokenEvent:
        if logprobs is None:
            return wire.TokenEvent(token)
        top = [(token, -0.5), (token - 1, -1.5), (token - 2, -2.5)][:logprobs]
        return wire.TokenEvent(token, -0.5, top)

    async def _abort(self, request: web.Request) -> web.Response:
        request_id = request.match_info["id"]
        found = request_id in self.running
        self._aborted.setdefault(request_id, asyncio.Event()).set()
        self.aborts.put_nowait(request_id)
        return web.Response(body=wire.encode(wire.Aborted(found)))

    def _answer(self, prompt: list[int]) -> list[int]:
        text = self.answer(prompt) if self.answer else "I heard: " + self._tokenizer.decode(prompt)
        return [*self._tokenizer.encode(text), SPECIALS.index("<|im_end|>")]

    def _arrived(self, request_id: str, request: web.Request) -> None:
        self.running.add(request_id)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self._aborted.setdefault(request_id, asyncio.Event())
        self.arrivals.put_nowait(request_id)

    def _rail(self, transfer_id: str) -> asyncio.Future[None]:
        return self._rails.setdefault(transfer_id, asyncio.get_running_loop().create_future())

    async def _unless_aborted(self, request_id: str, gate: asyncio.Event) -> bool:
        """Wait for the gate; return False if the request is aborted first."""
        waits = [asyncio.ensure_future(event.wait()) for event in (gate, self._aborted[request_id])]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return gate.is_set()
