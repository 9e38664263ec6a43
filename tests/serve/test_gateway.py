"""The gateway over loopback HTTP, before two workers that speak the internal API: what a client sees when all is well."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from serve_rig import MODEL, TEMPLATE, TOKEN, WAIT_S, Rig, free_port, open_rig, train

from regauge.config import ServeConfig
from regauge.errors import ConfigError
from regauge.observe_transfers import STAGES
from regauge.serve import wire
from regauge.serve.server import listen
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WORDS = "Grüße 🚂 и 漢字"


def chat(text: str = WORDS, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def text(prompt: Any = WORDS, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 100, **fields}


async def test_a_chat(rig: Rig) -> None:
    status, body, headers = await rig.post(CHAT, chat())
    assert status == 200
    assert re.fullmatch("chatcmpl-[0-9a-f]+", body["id"])
    assert (body["object"], body["model"], body["system_fingerprint"]) == (
        "chat.completion",
        MODEL,
        "regauge-CONVERT",
    )
    assert headers["x-regauge-path"] == "CONVERT"
    [choice] = body["choices"]
    answer = f"I heard: user\n{WORDS}\nassistant\n"
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": answer, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    prompt = len(rig.decode.generates[-1].token_ids)
    generated = len(rig.tokenizer.encode(answer)) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_completion(rig: Rig) -> None:
    _, body, _ = await rig.post(TEXT, text())
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": f"I heard: {WORDS}", "logprobs": None, "finish_reason": "stop"}]


async def test_a_streamed_chat_has_role_deltas_reason_usage_and_end(rig: Rig) -> None:
    events = await rig.stream(CHAT, chat(stream_options={"include_usage": True}))
    *chunks, usage, end = events
    assert end == "[DONE]"
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", chunks[0]["id"])}
    assert chunks[0]["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert all(set(delta) == {"content"} for delta in deltas)
    assert len(deltas) > 5
    whole = (await rig.post(CHAT, chat()))[1]
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_without_include_usage_no_chunk_speaks_of_usage(rig: Rig) -> None:
    events = await rig.stream(CHAT, chat())
    assert events[-1] == "[DONE]"
    assert all("usage" not in event and len(event["choices"]) == 1 for event in events[:-1])


async def test_a_streamed_completion(rig: Rig) -> None:
    *chunks, end = await rig.stream(TEXT, text(echo=True))
    assert end == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"{WORDS}I heard: {WORDS}"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]


async def test_the_answers_length_ends_it(rig: Rig) -> None:
    _, body, _ = await rig.post(CHAT, chat(max_tokens=3))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3
    assert rig.prefill.prefills[-1].sampling.max_tokens == 3


async def test_answers_of_no_given_length(rig: Rig) -> None:
    await rig.post(CHAT, chat())
    assert rig.decode.generates[-1].sampling.max_tokens == 256
    await rig.post(TEXT, {"model": MODEL, "prompt": "x"})
    assert rig.decode.generates[-1].sampling.max_tokens == 16
    ids = [300] * 400
    await rig.post(TEXT, {"model": MODEL, "prompt": ids, "min_tokens": 20})
    assert rig.decode.generates[-1].sampling.max_tokens == 20
    await rig.post(TEXT, {"model": MODEL, "prompt": [300] * 505})
    assert rig.decode.generates[-1].sampling.max_tokens == 7, "cut to what the context of 512 holds"


async def test_sampling_reaches_both_workers_the_same(rig: Rig) -> None:
    asked = {
        "temperature": 0.5,
        "top_k": 3,
        "seed": 9,
        "min_p": 0.25,
        "stop_token_ids": [7],
        "ignore_eos": True,
    }
    await rig.post(TEXT, text(max_tokens=5, **asked))
    prefill, decode = rig.prefill.prefills[-1], rig.decode.generates[-1]
    assert prefill.sampling == decode.sampling
    assert (decode.sampling.temperature, decode.sampling.top_k, decode.sampling.seed) == (0.5, 3, 9)
    assert (prefill.transfer_id, prefill.request_id) == (decode.transfer_id, decode.request_id)
    assert (prefill.decode, decode.prefill) == ({"decode-0": ("127.0.0.1", 1)}, ["prefill-0"])


async def test_several_prompts_and_answers_keep_their_places(rig: Rig) -> None:
    _, body, _ = await rig.post(TEXT, text(["one", "two", "three"], n=2, echo=True))
    texts = [(choice["index"], choice["text"]) for choice in body["choices"]]
    words = ["one", "one", "two", "two", "three", "three"]
    assert texts == [(index, f"{word}I heard: {word}") for index, word in enumerate(words)]
    prompts = sum(len(rig.tokenizer.encode(word)) for word in set(words))
    assert body["usage"]["prompt_tokens"] == prompts, "a prompt counts once"
    assert len({call.transfer_id for call in rig.decode.generates[-6:]}) == 6


async def test_streams_of_several_answers_are_merged(rig: Rig) -> None:
    events = (await rig.stream(CHAT, chat(n=3)))[:-1]
    for index in range(3):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine).endswith(f"{WORDS}\nassistant\n")
        assert [choice["finish_reason"] for choice in mine[-2:]] == [None, "stop"]


async def test_prompts_of_token_ids(rig: Rig) -> None:
    ids = [rig.tokenizer.encode("one"), rig.tokenizer.encode("two")]
    _, body, _ = await rig.post(TEXT, text(ids, echo=True))
    assert [choice["text"] for choice in body["choices"]] == ["oneI heard: one", "twoI heard: two"]


async def test_a_stop_string_ends_the_text_and_the_workers_part(rig: Rig) -> None:
    aborted = drained(rig)
    _, body, _ = await rig.post(TEXT, text("a red train goes", stop=["train", "zebra"]))
    assert body["choices"][0] == {
        "index": 0,
        "text": "I heard: a red ",
        "logprobs": None,
        "finish_reason": "stop",
    }
    request_id = rig.decode.generates[-1].request_id
    assert await asyncio.wait_for(rig.decode.aborts.get(), WAIT_S) == request_id
    assert not aborted
    events = (await rig.stream(TEXT, text("a red train goes", stop="train")))[:-1]
    assert "".join(event["choices"][0]["text"] for event in events) == "I heard: a red "
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_string_does_not_count_before_min_tokens(rig: Rig) -> None:
    _, body, _ = await rig.post(TEXT, text("red red red", stop=["red"], min_tokens=5))
    assert body["choices"][0]["text"].startswith("I heard: r")
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] > 5


def drained(rig: Rig) -> list[str]:
    """Forget the aborts of earlier tests; return what is left, which is nothing."""
    for queue in (rig.decode.aborts, rig.prefill.aborts):
        while not queue.empty():
            queue.get_nowait()
    return []


async def test_log_probabilities_of_a_chat(rig: Rig) -> None:
    _, body, _ = await rig.post(CHAT, chat("é", logprobs=True, top_logprobs=2))
    content = body["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "I"
    assert content[0]["bytes"] == [73]
    assert (content[0]["logprob"], content[0]["top_logprobs"][0]["token"]) == (-0.5, "I")
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.5, -1.5]
    raw = bytes(byte for entry in content[:-1] for byte in entry["bytes"])
    assert raw.decode() == body["choices"][0]["message"]["content"]
    events = await rig.stream(CHAT, chat("é", logprobs=True, top_logprobs=2))
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry for part in parts if part for entry in part["content"]] == content


async def test_log_probabilities_of_a_completion(rig: Rig) -> None:
    _, body, _ = await rig.post(TEXT, text("é", logprobs=1))
    [choice] = body["choices"]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert logprobs["tokens"][:3] == ["I", " heard", ":"]
    assert logprobs["text_offset"][:4] == [0, 1, 7, 8]
    assert logprobs["top_logprobs"][0] == {"I": -0.5}


async def test_models_version_health_and_ready(rig: Rig) -> None:
    _, listed, _ = await rig.get("/v1/models")
    assert [(card["id"], card["object"]) for card in listed["data"]] == [(MODEL, "model")]
    assert (await rig.get(f"/v1/models/{MODEL}"))[1] == listed["data"][0]
    status, body, _ = await rig.get("/v1/models/gpt-9")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert (await rig.get("/health"))[:2] == (200, {"status": "ok"})
    assert (await rig.get("/version"))[1]["verdict"]["path"] == "CONVERT"
    status, ready, _ = await rig.get("/ready")
    assert (status, ready["status"], [worker["up"] for worker in ready["workers"]]) == (
        200,
        "ready",
        [True, True],
    )


async def test_request_ids_and_traceparent_run_through(rig: Rig) -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    _, _, headers = await rig.post(CHAT, chat(max_tokens=1), x_request_id="my.id_1-2", traceparent=trace)
    assert headers["x-request-id"] == "my.id_1-2"
    for worker in (rig.prefill, rig.decode):
        assert (worker.headers[-1]["x-request-id"], worker.headers[-1]["traceparent"]) == ("my.id_1-2", trace)
    assert rig.decode.generates[-1].request_id.startswith("my.id_1-2-")
    for bad in ("has space", "x" * 129, "a/b"):
        status, _, headers = await rig.post(CHAT, b"{", x_request_id=bad, traceparent="junk")
        assert status == 400
        assert re.fullmatch("req-[0-9a-f]{24}", headers["x-request-id"])


async def test_metrics_tell_of_requests_tokens_and_transfers(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        _, body, _ = await rig.post(CHAT, chat())
        await rig.post(CHAT, b"{")
        await rig.get("/no/such/path")
        for route, status, count in ((CHAT, "200", 1), (CHAT, "400", 1), ("other", "404", 1)):
            assert rig.sample("regauge_requests_total", route=route, status=status) == count
        assert rig.sample("regauge_prompt_tokens_total") == body["usage"]["prompt_tokens"]
        assert rig.sample("regauge_completion_tokens_total") == body["usage"]["completion_tokens"]
        labels = {"path": "CONVERT", "mode": "fused"}
        assert rig.sample("regauge_transfer_bytes_sum", **labels) == 1000 + body["usage"]["prompt_tokens"]
        assert rig.sample("regauge_transfer_seconds_count", **labels) == 1
        stages = [rig.sample("regauge_transfer_stage_seconds_sum", path="CONVERT", stage=each) for each in STAGES]
        assert sum(stages[2:]) == pytest.approx(rig.sample("regauge_transfer_seconds_sum", **labels))
        assert stages[0] == pytest.approx(0.001)
        assert rig.sample("regauge_transfer_spans_sum", **labels) == 12
        assert rig.sample("regauge_answers_total", outcome="complete") == 1
        assert rig.sample("regauge_queue_seconds_sum", role="prefill") == pytest.approx(0.003)
        assert rig.sample("regauge_queue_seconds_count", role="decode") == 0, "it does not say"
        assert rig.sample("regauge_time_to_first_token_seconds_count") == 1
        assert rig.sample("regauge_pool_pages", worker="decode-0", role="decode") == 64
        assert 'regauge_worker_up{role="decode",worker="decode-0"} 1.0' in await rig.metrics_text()


async def test_two_hundred_at_once_each_get_their_own_answer(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:

        async def one(number: int) -> str:
            body = text(f"number {number}", stream_options={"include_usage": True})
            if number % 2:
                events = (await rig.stream(TEXT, body))[:-2]
                return "".join(event["choices"][0]["text"] for event in events)
            del body["stream_options"]
            status, answer, _ = await rig.post(TEXT, body)
            assert status == 200, answer
            return str(answer["choices"][0]["text"])

        answers = await asyncio.gather(*(one(number) for number in range(200)))
        assert answers == [f"I heard: number {number}" for number in range(200)]
        assert rig.sample("regauge_requests_in_flight") == 0
        await rig.until(lambda: not rig.decode.running and not rig.prefill.running)
        assert rig.decode.aborts.empty(), "nothing ended otherwise than well"


async def test_a_taken_port_is_said_with_the_remedy() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 is taken.*--port"):
            listen("127.0.0.1", port)
    for host in ("no such host", "a..b", "x" * 300):
        with pytest.raises(ConfigError, match="--host"):
            listen(host, 1)


@pytest.mark.process
def test_the_process_says_what_is_wrong_with_its_spec(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    command = [sys.executable, "-m", "regauge.serve.gateway", str(path)]
    missing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert f"{path}: No such file or directory" in missing.stderr
    addresses = [wire.WorkerAddress(role, role, f"http://127.0.0.1:{free_port()}") for role in ("prefill", "decode")]
    spec = wire.GatewaySpec(ServeConfig(), str(tmp_path), MODEL, TOKEN, addresses, wire.VerdictInfo("DIRECT"))
    wire.write_spec(path, spec)
    assert path.stat().st_mode & 0o777 == 0o600
    assert wire.read_spec(path) == spec
    assert TOKEN not in repr(spec)
    bare = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert bare.returncode == 2
    assert "no tokenizer.json" in bare.stderr
    assert "Traceback" not in bare.stderr


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
async def test_the_process_serves_until_a_signal(
    tokenizer: Tokenizer, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    (tmp_path / "tokenizer.json").write_text(train().to_str(), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    async with open_rig(tokenizer) as rig:
        workers = [rig.prefill.address, rig.decode.address]
        config = ServeConfig(port=free_port())
        spec = wire.GatewaySpec(config, str(tmp_path), MODEL, TOKEN, workers, wire.VerdictInfo("DIRECT"), log_json=True)
        wire.write_spec(tmp_path / "spec.json", spec)
        command = [sys.executable, "-m", "regauge.serve.gateway", str(tmp_path / "spec.json")]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            lines: list[str] = []
            async with asyncio.timeout(60):
                while sum("worker is up" in line for line in lines) < 2:
                    lines.append((await process.stderr.readline()).decode())
                    assert lines[-1], "".join(lines)
            rig.base = f"http://127.0.0.1:{config.port}"
            status, body, _ = await rig.post(CHAT, chat(max_tokens=3))
            assert (status, body["system_fingerprint"]) == (200, "regauge-DIRECT")
            process.send_signal(number)
            rest = (await asyncio.wait_for(process.stderr.read(), WAIT_S)).decode()
            assert await asyncio.wait_for(process.wait(), WAIT_S) == code
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert "Traceback" not in rest
        [line] = [msgspec.json.decode(line) for line in rest.splitlines() if '"event": "request"' in line]
        expected = {
            "route": CHAT,
            "status": 200,
            "path": "DIRECT",
            "completion_tokens": 3,
            "worker": "gateway",
        }
        assert expected.items() <= line.items()
        assert {"request_id", "mode", "wire_bytes", "prompt_tokens", "ttft_s", "tpot_s", "seconds"} <= set(line)
