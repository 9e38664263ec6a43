"""`regauge serve` as a user runs it: real processes, the real model, real deaths.

One deployment serves all tests; what one kills, the supervisor starts again.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from deployment import READY_S, Served, alive, launch, ready, until

from certificates import Authority
from regauge.config import BUNDLED_MODEL

pytestmark = [pytest.mark.model, pytest.mark.process, pytest.mark.timeout(600)]


async def pools_are_whole(session: aiohttp.ClientSession, served: Served) -> bool:
    async with session.get(f"{served.url}/metrics") as answer:
        text = await answer.text()
    free = re.findall(r"^regauge_pool_free_pages\{.*\} (\S+)", text, re.MULTILINE)
    total = re.findall(r"^regauge_pool_pages\{.*\} (\S+)", text, re.MULTILINE)
    running = re.findall(r"^regauge_running_requests\{.*\} (\S+)", text, re.MULTILINE)
    return len(total) == 2 and free == total and set(running) == {"0.0"}


@pytest.fixture
async def client(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await until(lambda: ready(session, served), READY_S, "a ready endpoint")
        yield session


def chat(text: str = "Tell me a short story about a train.", **more: object) -> dict[str, object]:
    return {
        "model": BUNDLED_MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


async def stream(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield msgspec.json.decode(line[6:])


@pytest.mark.anyio
async def test_a_chat_prompt_streams_a_sensible_answer_and_the_log_names_the_path(
    served: Served, client: aiohttp.ClientSession
) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    async with client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        request_id = answer.headers["x-request-id"]
        chunks = [chunk async for chunk in stream(answer)]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert len(re.findall(r"\b(the|a|of|and|in|was|to|there|named)\b", text.lower())) >= 4, text
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert chunks[-1]["usage"]["prompt_tokens"] > 10
    assert chunks[0]["system_fingerprint"] == "regauge-CONVERT"
    line = await until(lambda: re.search(f".*request_id={request_id} route=.*", served.text()), 5, "the log line")
    for part in ("path=CONVERT", "mode=fused", "wire_bytes=", "ttft_s=", "tpot_s="):
        assert part in line[0]
    assert "path     CONVERT: dtype float8_e4m3fn -> bfloat16; page size 64 -> 16" in served.text()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": ', 400, None),
        (chat(model="gpt-9"), 404, "model_not_found"),
        (chat(text="word " * 5000), 400, "context_length_exceeded"),
        (chat(max_tokens=0), 400, None),
        (chat(max_tokens=10**9), 400, "context_length_exceeded"),
        (chat(temperature="hot"), 400, None),
    ],
)
async def test_bad_input_gets_the_right_status_and_body(
    served: Served, client: aiohttp.ClientSession, body: bytes | dict[str, object], status: int, code: str | None
) -> None:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    async with client.post(f"{served.url}/v1/chat/completions", data=data) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == code or code is None
    assert error["message"]


@pytest.mark.anyio
async def test_a_stop_string_ends_the_answer_and_keeps_the_figures(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.post(f"{served.url}/v1/chat/completions", json=chat(stop=["the", "a"], max_tokens=60)) as answer:
        choice = (await answer.json())["choices"][0]
        request_id = answer.headers["x-request-id"]
    assert choice["finish_reason"] == "stop"
    assert "the" not in choice["message"]["content"]
    line = await until(lambda: re.search(f".*request_id={request_id} route=.*", served.text()), 5, "the log line")
    assert "mode=fused" in line[0]
    assert "wire_bytes=0" not in line[0]
    await until(lambda: pools_are_whole(client, served), 20, "whole pools")


@pytest.mark.anyio
async def test_two_hundred_requests_at_once_are_all_answered_and_no_page_leaks(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async def one(index: int) -> int:
        body = {
            "model": BUNDLED_MODEL,
            "prompt": f"Number {index} is",
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with client.post(f"{served.url}/v1/completions", json=body) as answer:
            reply = await answer.json()
            assert answer.status == 200, reply
            assert reply["usage"]["completion_tokens"] == 3
            return answer.status

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=240)) as client:
        statuses = await asyncio.gather(*(one(i) for i in range(200)))
        assert statuses == [200] * 200
        await until(lambda: pools_are_whole(client, served), 20, "whole pools")


@pytest.mark.anyio
async def test_a_client_that_goes_away_mid_stream_frees_everything(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for stop_after in (0, 1, 5):
        body = chat(stream=True, max_tokens=800, ignore_eos=True)
        async with client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
            if stop_after:
                seen = 0
                async for _ in stream(answer):
                    seen += 1
                    if seen > stop_after:
                        break
            answer.close()
        await until(lambda: pools_are_whole(client, served), 20, "whole pools")


@pytest.mark.anyio
async def test_transfers_links_and_pools_can_be_looked_at_while_a_prompt_crosses(
    served: Served, client: aiohttp.ClientSession
) -> None:
    asked = await long_prompt(served, client)

    async def crossing() -> Any:
        async with client.get(f"{served.url}/debug/transfers") as answer:
            assert answer.status == 200
            states = [worker["state"] for worker in (await answer.json())["workers"]]
        under_way = all(state["transfers"] and state["transfers"][0]["legs"][0]["progress"] for state in states)
        return states if under_way else None

    prefill, decode = await until(crossing, 30, "a transfer under way")
    assert prefill["transfers"][0]["transfer"] == decode["transfers"][0]["transfer"]
    assert prefill["transfers"][0]["tokens"] > 1500
    assert [link["peer"] for link in (*prefill["links"], *decode["links"])] == ["decode-0", "prefill-0"]
    assert prefill["links"][0]["session"] == decode["links"][0]["session"] == decode["sessions"][0]["session"]
    for state in (prefill, decode):
        [pool] = state["pools"]
        assert pool["leased"] * pool["page_size"] >= state["transfers"][0]["tokens"]
    assert (await asked).status == 200
    await until(lambda: pools_are_whole(client, served), 20, "whole pools")
    async with client.get(f"{served.url}/debug/transfers") as answer:
        after = [worker["state"] for worker in (await answer.json())["workers"]]
    assert [state["transfers"] for state in after] == [[], []]
    assert all(
        new["totals"]["delivered"] > old["totals"]["delivered"]
        for new, old in zip(after, (prefill, decode), strict=True)
    )


@pytest.mark.anyio
async def test_a_prefill_worker_that_dies_is_started_again_and_decode_computes_meanwhile(
    served: Served, client: aiohttp.ClientSession
) -> None:
    asked = await long_prompt(served, client)
    os.kill(served.pid("prefill-0"), signal.SIGKILL)
    reply = await asked
    assert (reply.status, reply.headers["x-regauge-path"]) == (200, "NONE"), await reply.text()
    assert re.search(r"the request goes on elsewhere.*error='prefill worker prefill-0 is lost", served.text())
    await comes_back(served, client, "prefill-0")


@pytest.mark.anyio
async def test_an_answer_whose_decode_worker_dies_goes_on_when_it_is_back(
    served: Served, client: aiohttp.ClientSession
) -> None:
    body = chat(max_tokens=60, temperature=0, ignore_eos=True)
    async with client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
        whole = (await answer.json())["choices"][0]["message"]["content"]
    async with client.post(f"{served.url}/v1/chat/completions", json={**body, "stream": True}) as answer:
        events = stream(answer)
        first = await anext(events)
        os.kill(served.pid("decode-0"), signal.SIGKILL)
        rest = [event async for event in events]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in [first, *rest]) == whole
    assert re.search(r"the request waits for another worker.*error='decode worker decode-0 is lost", served.text())
    await comes_back(served, client, "decode-0")


async def long_prompt(served: Served, client: aiohttp.ClientSession) -> asyncio.Task[aiohttp.ClientResponse]:
    """Ask something whose prefill takes seconds; return when it is being computed."""
    body = chat(text=f"{time.monotonic_ns()} " + "word " * 1500, max_tokens=5)  # nothing of it is cached
    asked = asyncio.create_task(client.post(f"{served.url}/v1/chat/completions", json=body).__aenter__())
    await until(lambda: busy(client, served, "prefill-0"), 20, "a running prefill")
    return asked


async def states_of(served: Served, client: aiohttp.ClientSession) -> dict[str, Any]:
    """What each worker says of its transfers, by role."""
    async with client.get(f"{served.url}/debug/transfers") as answer:
        return {worker["role"]: worker["state"] for worker in (await answer.json())["workers"]}


async def comes_back(served: Served, client: aiohttp.ClientSession, name: str) -> None:
    await until(lambda: f"{name} died of SIGKILL" in served.text(), 10, "the supervisor's word")
    await until(lambda: re.search(f"worker is lost.* worker={name}", served.text()), 15, "the gateway's word")
    await until(lambda: ready(client, served), READY_S, "the worker's return")
    async with client.post(f"{served.url}/v1/chat/completions", json=chat()) as answer:
        assert answer.status == 200, await answer.text()
    await until(lambda: pools_are_whole(client, served), 20, "whole pools")


async def busy(session: aiohttp.ClientSession, served: Served, name: str) -> bool:
    async with session.get(f"{served.url}/metrics") as answer:
        return bool(re.search(rf'^regauge_running_requests\{{.*"{name}".*\}} 1', await answer.text(), re.MULTILINE))


@pytest.mark.anyio
async def test_a_frozen_prefill_worker_costs_a_bounded_time(served: Served, client: aiohttp.ClientSession) -> None:
    pid = served.pid("prefill-0")
    asked = await long_prompt(served, client)
    os.kill(pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        reply = await asked
        assert (reply.status, reply.headers["x-regauge-path"]) == (200, "NONE"), await reply.text()
        states = await states_of(served, client)
        assert states["prefill"] is None, "a process that stands still answers nothing, and holds up nobody"
        assert sum(states["decode"]["totals"]["failed"].values()) >= 1
        assert time.monotonic() - stopped < 60
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: ready(client, served), 60, "the worker's return")
    await until(lambda: pools_are_whole(client, served), 60, "whole pools")
    async with client.post(f"{served.url}/v1/chat/completions", json=chat()) as answer:
        assert answer.status == 200, await answer.text()


def test_a_port_that_is_taken_is_named(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, "-m", "regauge", "serve", "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken by another process; choose another with --port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.anyio
async def test_ctrl_c_ends_every_process_over_tcp_and_other_layouts(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("worker")
    file = tmp_path / "serve.toml"
    file.write_text(
        f"[transfer]\ntransport = 'tcp'\nhost = 'lo'\nlanes = 2\n"
        f"[transfer.tls]\ncertificate = '{certificate}'\nkey = '{key}'\nauthority = '{authority.path}'\n"
    )
    served = launch(
        tmp_path, "--config", str(file), "--prefill-layout", "bf16,page=24,fused", "--decode-layout", "bf16,page=16,kt"
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
        await until(lambda: ready(client, served), READY_S, "a ready endpoint")
        async with client.post(f"{served.url}/v1/chat/completions", json=chat()) as answer:
            assert answer.status == 200
            assert (await answer.json())["system_fingerprint"] == "regauge-REMAP"
        pids = [served.pid(name) for name in ("gateway", "prefill-0", "decode-0")]
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(40) == 0, served.text()
    assert not alive(pids)
    assert "mode=staged" in served.text()
    assert "Traceback" not in served.text()
