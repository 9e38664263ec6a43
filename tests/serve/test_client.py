"""Calls to a worker over loopback HTTP: what they return, and how each way to fail is told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from serve_rig import TOKEN, WAIT_S, EchoWorker

from regauge.config import Role
from regauge.engines.local.sampling import SamplingParams
from regauge.errors import ProtocolError
from regauge.observe import Metrics
from regauge.serve import wire
from regauge.serve.client import WorkerClient
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.text import Tokenizer
from regauge.serve.workers import HealthPolicy, Worker

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(
    tokenizer: Tokenizer, role: Role = "decode", *, name: str = "w", token: str = TOKEN
) -> AsyncIterator[tuple[EchoWorker, WorkerClient]]:
    worker = EchoWorker("w", role, tokenizer, {})
    await worker.start()
    client = WorkerClient(wire.WorkerAddress(name, role, worker.address.url), token)
    try:
        yield worker, client
    finally:
        await client.close()
        await worker.stop()


def soon(seconds: float = WAIT_S) -> float:
    return asyncio.get_running_loop().time() + seconds


def ask(worker: EchoWorker, transfer: str = "t", *, max_tokens: int = 4) -> wire.Generate:
    """A request whose KV cache is there already."""
    worker._rail(transfer).set_result(None)
    return wire.Generate("r", transfer, [5, 6], SamplingParams(max_tokens=max_tokens), ["p"])


async def collect(client: WorkerClient, body: wire.Generate, deadline: float) -> list[wire.Event]:
    async with aclosing(client.generate(body, deadline, {})) as events:
        return [event async for event in events]


async def test_health(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (_, client):
        health = await client.health(WAIT_S)
        assert (health.status, health.role, health.name, health.free_pages) == ("ok", "decode", "w", 64)


async def test_a_stream_yields_its_tokens_and_ends_with_its_finish(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        transfer, *tokens, finish = await collect(client, ask(worker), soon())
        assert isinstance(transfer, wire.TransferEvent)
        assert [type(event) for event in tokens] == [wire.TokenEvent] * 4
        assert isinstance(finish, wire.FinishEvent)
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("length", 2, 4)


async def test_connections_are_used_again(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        for number in range(5):
            await collect(client, ask(worker, f"t{number}"), soon())
            await client.health(WAIT_S)
        assert len(worker._transports) == 1


async def test_prefill_and_abort(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer, "prefill") as (worker, client):
        body = wire.Prefill("r", "t", [5, 6], SamplingParams(max_tokens=4), {"d": ("127.0.0.1", 1)})
        reply = await client.prefill(body, soon(), {"traceparent": "x"})
        assert (reply.computed_tokens, reply.cached_tokens) == (2, 0)
        assert worker.headers[0]["traceparent"] == "x"
        assert not (await client.abort("r")).found
        assert worker.aborts.get_nowait() == "r"


@pytest.mark.parametrize("code", [code for code in wire.STATUS if code != "unauthorized"])
async def test_an_error_before_the_stream(tokenizer: Tokenizer, code: wire.Code) -> None:
    async with connected(tokenizer) as (worker, client):
        worker.refuse = wire.ErrorEvent(code, "because", "w")
        with pytest.raises(WorkerError, match="decode worker w: because") as caught:
            await collect(client, ask(worker), soon())
        assert caught.value.event == worker.refuse


async def test_an_error_in_the_stream(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        worker.break_after = (2, wire.ErrorEvent("engine_failed", "nan", "w"))
        async with aclosing(client.generate(ask(worker), soon(), {})) as events:
            expected = [wire.TransferEvent, wire.TokenEvent, wire.TokenEvent]
            assert [type(await anext(events)) for _ in expected] == expected
            with pytest.raises(WorkerError, match="nan"):
                await anext(events)


async def test_a_torn_stream_is_a_lost_worker(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        worker.die_after = 2
        with pytest.raises(WorkerLost, match="decode worker w is lost") as caught:
            await collect(client, ask(worker), soon())
        assert (caught.value.worker, caught.value.role) == ("w", "decode")


async def test_a_refused_connection_is_a_lost_worker(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        await worker.stop()
        with pytest.raises(WorkerLost):
            await client.health(WAIT_S)
        with pytest.raises(WorkerLost):
            await collect(client, ask(worker), soon())


async def test_a_late_answer_is_a_timeout(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        worker.hold = worker.frozen = asyncio.Event()
        with pytest.raises(RequestTimeout):
            await collect(client, ask(worker), soon(0.05))
        with pytest.raises(RequestTimeout):
            await client.health(0.05)


async def test_giving_a_worker_up_ends_its_calls_at_once_and_new_ones_too(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer) as (worker, client):
        worker.hold = asyncio.Event()
        call = asyncio.create_task(collect(client, ask(worker), soon()))
        await asyncio.wait_for(worker.arrivals.get(), WAIT_S)
        client.give_up("it is frozen")
        with pytest.raises(WorkerLost, match="it is frozen"):
            await asyncio.wait_for(call, 1)
        with pytest.raises(WorkerLost, match="it is frozen"):
            await collect(client, ask(worker, "t2"), soon())
        worker.hold = None
        await client.health(WAIT_S)
        assert await collect(client, ask(worker, "t3"), soon())


async def test_a_wrong_token_is_refused(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer, token="guess") as (_, client):
        with pytest.raises(WorkerError, match="wrong token"):
            await client.health(WAIT_S)


async def test_another_worker_at_the_address_is_found_out(tokenizer: Tokenizer) -> None:
    async with connected(tokenizer, name="other") as (_, client):
        with pytest.raises(WorkerLost, match="decode worker w answers at"):
            await client.health(WAIT_S)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}\n",
        b"HTTP/1.1 500 Oops\r\ncontent-length: 2\r\n\r\nno",
    ],
    ids=["event", "error body"],
)
async def test_what_is_not_the_contract_is_a_protocol_error(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        client = WorkerClient(wire.WorkerAddress("w", "decode", f"http://127.0.0.1:{port}"), TOKEN)
        body = wire.Generate("r", "t", [1], SamplingParams(max_tokens=1), ["p"])
        with pytest.raises(ProtocolError, match="worker"):
            await collect(client, body, soon())
        await client.close()


async def test_health_of_a_worker_is_noted_with_its_reason(tokenizer: Tokenizer) -> None:
    metrics = Metrics.create("test")

    def up() -> float | None:
        return metrics.registry.get_sample_value("regauge_worker_up", {"worker": "w", "role": "decode"})

    async with connected(tokenizer) as (echo, client):
        patient, hasty = HealthPolicy(limit_s=WAIT_S, misses=3), HealthPolicy(limit_s=0.05, misses=3)
        worker = Worker(client, metrics, patient)
        assert (worker.up, worker.reason, up()) == (False, "it was not asked yet", 0)
        await worker.poll()
        assert (worker.up, worker.reason, up()) == (True, "", 1)
        echo.frozen = asyncio.Event()
        worker._policy = hasty  # only what never comes is waited for so shortly
        for expected in (True, True, False):
            await worker.poll()
            assert worker.up is expected
        worker._policy = patient
        assert "3 times in a row" in worker.reason
        assert up() == 0
        echo.frozen.set()
        await worker.poll()
        assert worker.up
        echo.status = "draining"
        await worker.poll()
        assert worker.draining
        await echo.stop()
        await worker.poll()
        assert (worker.up, up()) == (False, 0), "a refused connection needs no second miss"
