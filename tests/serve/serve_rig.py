"""A small tokenizer trained on the spot, workers that speak `wire.py` over loopback, and the gateway before them."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
from aiohttp import web
from hypothesis import settings

from regauge.config import LimitsConfig, Role, ServeConfig
from regauge.config_gateway import GatewayConfig
from regauge.config_meter import MeterConfig
from regauge.config_route import RouteConfig
from regauge.move.protocol import TransferState
from regauge.move.state import LinkState, PoolState, Totals, WorkerState, bounded, shown
from regauge.observe import Metrics
from regauge.route.router import Router
from regauge.serve import wire
from regauge.serve.discovery import Source
from regauge.serve.fleet import Fleet, dialer
from regauge.serve.gateway import build_app
from regauge.serve.metering import Meter
from regauge.serve.pairing import Pairs
from regauge.serve.server import Server, listen
from regauge.serve.tenants import Tenants
from regauge.serve.text import Tokenizer
from regauge.serve.workers import HealthPolicy

TOKEN = "internal-token"
MODEL = "echo-1"
CORPUS = [
    "The track gauge changes at the border, and the wagons go on.",
    "Grüße aus München: überall heißt es umladen. Большое спасибо!",
    "今日は列車が遅れています。 🚂🚃🚃 emoji and 漢字 mix",
    "I heard: stop words, leading spaces, user assistant system.",
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
STEADY = settings(deadline=None, derandomize=True, max_examples=200)
WAIT_S = 10.0
"""Every wait of a test ends after this; only a failing test gets there."""


def train() -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    return core


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
        self.pid = 1
        self.quarantined = 0
        self.load: dict[str, float] = {}
        self.cached = 0
        self.totals = Totals()
        self.transfers: list[TransferState] = []
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
                body=wire.encode(wire.Prefilled(first, len(body.token_ids) - self.cached, self.cached, 0.01, 0.001))
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
        transfer = wire.TransferEvent("CONVERT", "fused", 1000 + len(body.token_ids), 3, 0.002)
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


@dataclass
class Rig:
    """The gateway, its two workers and a client, all over loopback HTTP."""

    prefill: EchoWorker
    decode: EchoWorker
    server: Server
    metrics: Metrics
    base: str
    client: aiohttp.ClientSession
    tokenizer: Tokenizer
    serving: asyncio.Task[None]
    fleet: Fleet
    others: dict[str, EchoWorker]
    """Further workers, by name."""

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Return status, decoded body and headers; `body` may be bytes."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.client.post(self.base + path, data=io.BytesIO(data), headers=named) as answer:
            return answer.status, msgspec.json.decode(await answer.read()), _lower(answer)

    async def get(self, path: str) -> tuple[int, Any, dict[str, str]]:
        async with self.client.get(self.base + path) as answer:
            return answer.status, msgspec.json.decode(await answer.read()), _lower(answer)

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the decoded server-sent events; `[DONE]` as a string."""
        return [event async for event in self.events(path, body)]

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        data = msgspec.json.encode({"stream": True, **body})
        async with self.client.post(self.base + path, data=data) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            async for line in answer.content:
                if line.strip():
                    assert line.startswith(b"data: ")
                    text = line[6:].strip()
                    yield "[DONE]" if text == b"[DONE]" else msgspec.json.decode(text)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that no event tells of; each look comes after a round trip to the gateway."""
        async with asyncio.timeout(WAIT_S):
            while not predicate():
                await self.get("/health")

    def sample(self, name: str, **labels: str) -> float:
        """Return a metric's value, 0 if it has none yet."""
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def metrics_text(self) -> str:
        async with self.client.get(self.base + "/metrics") as answer:
            return await answer.text()


def _lower(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


@asynccontextmanager
async def open_rig(
    tokenizer: Tokenizer,
    *,
    limits: LimitsConfig | None = None,
    policy: HealthPolicy | None = None,
    grace_s: float = 0.0,
    prefill_up: bool = True,
    prefill_at: wire.WorkerAddress | None = None,
    decode_at: wire.WorkerAddress | None = None,
    rules: GatewayConfig | None = None,
    tenants: Tenants | None = None,
    pools: Sequence[Source] | None = None,
    others: Sequence[str] = (),
    route: RouteConfig | None = None,
    meter: MeterConfig | None = None,
    billing: Meter | None = None,
) -> AsyncIterator[Rig]:
    """`prefill_at`, `decode_at`: workers of another kind, in place of the rig's own; `pools`: from them alone the gateway learns of workers.

    `others`: names of more workers, as `decode-1`. `billing` takes the gateway's receipts; the workers make none.
    """
    rails: dict[str, asyncio.Future[None]] = {}
    prefill = EchoWorker("prefill-0", "prefill", tokenizer, rails)
    decode = EchoWorker("decode-0", "decode", tokenizer, rails)
    roles: dict[str, Role] = {name: "prefill" if name.startswith("prefill") else "decode" for name in others}
    more = {name: EchoWorker(name, role, tokenizer, rails) for name, role in roles.items()}
    async with AsyncExitStack() as stack:
        for worker in (prefill, decode, *more.values()):
            stack.push_async_callback(worker.stop)
            await worker.start()
        if not prefill_up:
            await prefill.stop()
        metrics = Metrics.create("test")
        fleet = Fleet(
            [prefill_at or prefill.address, decode_at or decode.address, *(w.address for w in more.values())] if pools is None else [],
            dialer(TOKEN, MODEL), metrics, Router(route),
            pairs=Pairs(given=wire.VerdictInfo("CONVERT")), policy=policy or HealthPolicy(period_s=0.05),
        )  # fmt: skip
        limits = limits or LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=0)
        config = ServeConfig(limits=limits, gateway=rules or GatewayConfig(), meter=meter or MeterConfig())
        app = build_app(
            config, tokenizer, fleet, metrics, model=MODEL, tenants=tenants, meter=billing, pools=pools or ()
        )
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        server = Server(app, grace_s, rules=rules)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        client = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout, connector=connector))
        base = f"http://127.0.0.1:{port}"
        rig = Rig(prefill, decode, server, metrics, base, client, tokenizer, serving, fleet, more)
        try:
            await rig.get("/health")  # the workers have been asked once when this is answered
            yield rig
        finally:
            server.should_exit = True
            await asyncio.wait_for(serving, WAIT_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
