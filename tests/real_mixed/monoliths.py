"""What each engine answers alone, without any transfer: greedy, in fp32, with the two likeliest tokens at each place."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from regauge.config import EngineConfig
from regauge.engines.local.kv import PagedKV, allocate
from regauge.engines.local.model import LocalModel
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import Request, Scheduler
from regauge.layout.presets import from_short, load_model, with_pages

START_S: Final = 400.0
STOP_S: Final = 20.0
ANSWER_S: Final = 120.0

Answer = tuple[list[int], list[float]]
"""Tokens, and at each place by how much the likeliest one's logarithm of probability (so, its logit) exceeds the next one's."""


def local(folder: Path, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """The embedded engine, over one pool."""
    config = EngineConfig(pool_tokens=4_096)
    model = LocalModel(folder, threads=2)
    memory = allocate(with_pages(from_short("fp32,page=16,nhd", load_model(str(folder))), config.pool_tokens))
    try:
        store = PagedKV(
            memory, dtype=model.dtype, max_new=config.chunk_tokens + config.max_batch, max_context=config.max_context
        )
        scheduler, answers = Scheduler(model, store, config), []
        greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=2)
        for index, prompt in enumerate(prompts):
            scheduler.add(Request(str(index), tuple(prompt), greedy, np.arange(memory.layout.groups[0].pages)))
            steps = []
            while scheduler.has_work:
                steps += scheduler.step()
            answers.append(
                ([step.token for step in steps], [_margin([value for _, value in step.top or ()]) for step in steps])
            )
        return answers
    finally:
        memory.slab.close()


def vllm(python: Path, folder: Path, prompts: Sequence[list[int]], tokens: int, log: Path) -> list[Answer]:
    """A vLLM server without a connector."""
    port = _free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "m", "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "1500", "--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=64M", "--block-size=32",
    ]  # fmt: skip
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}
    answers = []
    with _running(command, environment, log, port):
        for ids in prompts:
            body = {
                "model": "m", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2,
                "return_token_ids": True, "return_tokens_as_token_ids": True,  # two tokens may have one text
            }  # fmt: skip
            choice = _ask(port, "/v1/completions", body)["choices"][0]
            tops = choice["logprobs"]["top_logprobs"]
            answers.append((choice["token_ids"], [_margin(list(top.values())) for top in tops]))
    return answers


def sglang(python: Path, folder: Path, prompts: Sequence[list[int]], tokens: int, log: Path) -> list[Answer]:
    """An SGLang server without disaggregation."""
    port = _free_port()
    command = [
        str(python), "-m", "sglang.launch_server", "--model-path", str(folder), "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192",
        "--max-running-requests", "8", "--disable-overlap-schedule", "--skip-server-warmup", "--random-seed", "1",
    ]  # fmt: skip
    environment = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
    answers = []
    with _running(command, environment, log, port):
        for ids in prompts:
            sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
            answer = _ask(port, "/generate", body)
            tops = answer["meta_info"]["output_top_logprobs"]
            answers.append((answer["output_ids"], [_margin([value for value, _, _ in top]) for top in tops]))
    return answers


def _margin(values: Sequence[float]) -> float:
    first, second = sorted(values, reverse=True)[:2]
    return first - second


@contextlib.contextmanager
def _running(command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> Iterator[None]:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0", **environment}
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=variables,
        )
    try:
        limit = time.monotonic() + START_S
        while not _healthy(port):
            running = process.poll() is None and time.monotonic() < limit
            assert running, log.read_text(errors="replace")[-4_000:]
            time.sleep(0.2)
        yield
    finally:
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a server has left


def _healthy(port: int) -> bool:
    try:
        return _call(port, "GET", "/health", None, 5.0)[0] == 200
    except (OSError, HTTPException):
        return False


def _ask(port: int, path: str, body: object) -> dict[str, Any]:
    status, answer = _call(port, "POST", path, msgspec.json.encode(body), ANSWER_S)
    assert status == 200, answer[:1_000]
    return msgspec.json.decode(answer, type=dict[str, Any])


def _call(port: int, method: str, path: str, body: bytes | None, limit_s: float) -> tuple[int, bytes]:
    with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=limit_s)) as connection:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
