"""A small tokenizer trained on the spot, workers that speak `wire.py` over loopback, and the gateway before them."""

from __future__ import annotations

import asyncio
import io
import socket
import sys
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
from echo_worker import MODEL, SPECIALS, TOKEN, EchoWorker
from hypothesis import settings

from regauge.config import LimitsConfig, Role, ServeConfig
from regauge.config_gateway import GatewayConfig
from regauge.config_meter import MeterConfig
from regauge.config_observe import ObserveConfig
from regauge.config_route import RouteConfig
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
    otlp: str = "",
) -> AsyncIterator[Rig]:
    """`prefill_at`, `decode_at`: workers of another kind, in place of the rig's own; `pools`: from them alone the gateway learns of workers.

    `others`: names of more workers, as `decode-1`. `billing` takes the gateway's receipts; the workers make none.
    `otlp`: base URL of a collector.
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
        config = ServeConfig(
            limits=limits,
            gateway=rules or GatewayConfig(),
            meter=meter or MeterConfig(),
            observe=ObserveConfig(otlp=otlp),
        )
        app = build_app(
            config,
            tokenizer,
            fleet,
            metrics,
            model=MODEL,
            tenants=tenants,
            meter=billing,
            pools=pools or (),
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


async def command(rig: Rig, verb: str, *arguments: str) -> tuple[int | None, str, str]:
    """Run `regauge VERB` against the rig as a user does; return its exit code, and what it printed and complained of."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "regauge", verb, "--url", rig.base, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
