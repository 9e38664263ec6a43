"""Real SGLang servers on the CPU, each a process tree of its own. Run where SGLang is installed: `make test-sglang`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

START_S = 400.0
"""Two cores that do other work, too: a server takes some 30 s of one to start."""
STOP_S = 20.0


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Server:
    """One server, started at once; `ready` waits for it. A context manager: its processes are gone afterwards."""

    def __init__(self, model: Path, log: Path, *args: str, **environment: str) -> None:
        """`args`: for SGLang's server. `environment`: variables in place of the ones here."""
        self.port = free_port()
        self._log = log
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--skip-server-warmup",
            "--max-running-requests", "8", "--max-total-tokens", "4096", "--random-seed", "1", *args,
        ]  # fmt: skip
        variables = {
            **os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "TRITON_INTERPRET": "0", **environment,
        }  # fmt: skip
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, env=variables,
            )  # fmt: skip

    def ready(self) -> None:
        """Wait until it answers. Raises AssertionError with the end of its log."""
        limit = time.monotonic() + START_S
        while self._healthy() != HTTPStatus.OK:
            assert time.monotonic() < limit, self.said()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
                raise AssertionError(self.said())

    def _healthy(self) -> int:
        try:
            return self.ask("GET", "/health", limit_s=5)[0]
        except (OSError, HTTPException):
            return 0

    def ask(self, method: str, path: str, body: object = None, *, limit_s: float = 120) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises OSError or HTTPException where there is none."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=limit_s)
        with contextlib.closing(connection):
            sent = None if body is None else msgspec.json.encode(body)
            connection.request(method, path, sent, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def generate(self, ids: list[int], tokens: int, **more: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer to token ids, greedy."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        status, answer = self.ask("POST", "/generate", {"input_ids": ids, "sampling_params": sampling, **more})
        return status, msgspec.json.decode(answer, type=dict[str, Any])

    def said(self) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-4_000:]

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait(STOP_S)
