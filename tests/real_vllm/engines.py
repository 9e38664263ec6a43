"""vLLM engines as tests use them: started, asked, ended."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
START_S = 240.0
ANSWER_S = 120.0


class Engine:
    """One engine process. Answers come in any order; `wait` takes the one that is asked for."""

    def __init__(self, config: dict[str, Any], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._names = itertools.count()
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "engine_process.py"), json.dumps(config)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, **ENVIRONMENT, **(environment or {})},
                text=True,
            )  # fmt: skip
        self._answers: list[dict[str, Any]] = []
        self._new: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._new.put(json.loads(line))
        self._new.put(None)

    def say(self, **words: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()

    def wait(self, key: str, value: Any = None, *, limit_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the answer that has `key` (with that value, if one is given)."""
        while True:
            for answer in self._answers:
                if key in answer and (value is None or answer[key] == value):
                    self._answers.remove(answer)
                    return answer
            try:
                answer_ = self._new.get(timeout=limit_s)
            except queue.Empty:
                raise TimeoutError(f"no {key} from the engine within {limit_s:g} s:\n{self.tail()}") from None
            if answer_ is None:
                raise RuntimeError(f"the engine has ended:\n{self.tail()}")
            self._answers.append(answer_)

    def ask(
        self, ids: list[int], *, tokens: int = 12, params: dict[str, Any] | None = None, logprobs: int | None = None
    ) -> str:
        """Send a request; return its name. `logprobs`: of how many tokens at each position, -1: of all."""
        name = f"r{next(self._names)}"
        self.say(add=name, ids=ids, max_tokens=tokens, params=params, logprobs=logprobs)
        return name

    def answer(self, name: str) -> dict[str, Any]:
        return self.wait("done", name)

    def answer_alone(self, ids: list[int], *, tokens: int = 12, logprobs: int | None = None) -> dict[str, Any]:
        """The answer without any transfer, nothing cached."""
        self.say(reset=1)
        assert self.wait("reset")["reset"]
        out = self.answer(self.ask(ids, tokens=tokens, logprobs=logprobs))
        self.say(reset=1)
        assert self.wait("reset")["reset"]
        return out

    def alone(self, ids: list[int], *, tokens: int = 12) -> list[int]:
        """The tokens of `answer_alone`."""
        out: list[int] = self.answer_alone(ids, tokens=tokens)["tokens"]
        return out

    def stats(self) -> dict[str, Any]:
        number = next(self._names)
        self.say(stats=number)
        return self.wait("stats", number)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6_000:]

    def quit(self) -> None:
        """Ask it to end; `end` waits for it."""
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.say(quit=1)

    def end(self) -> None:
        if self.process.poll() is None:
            self.quit()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it did not read any more
                    pipe.close()


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)  # a prompt
    return [rng.randrange(3, 500) for _ in range(tokens)]


def settle(condition: Callable[[], bool], *, limit_s: float = 60) -> None:
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "this should have come to rest"
        time.sleep(0.05)


def at_rest(engine: Engine) -> bool:
    """Every block but the null block is free, and no transfer known."""
    stats = engine.stats()
    return bool(stats["free"] == stats["blocks"] - 1 and stats["known"] == 0)


def empty(engine: Engine) -> None:
    engine.say(reset=1)
    engine.wait("reset")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def config(model: Path, *, role: str = "", name: str = "", port: int = 0, key: Path | None = None, policy: str = "recompute",
           transfer: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:  # fmt: skip
    """Arguments of `vllm.LLM`."""
    out: dict[str, Any] = {
        "model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 1_536, "kv_cache_memory_bytes": 64 << 20,
        "seed": 0, "disable_log_stats": True, "skip_tokenizer_init": True, **given,
    }  # fmt: skip
    if role:
        out["kv_transfer_config"] = {
            "kv_connector": "RegaugeConnector",
            "kv_connector_module_path": "regauge.engines.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {
                "name": name, "port": port, "model": "tiny",
                "transfer": {"transport": "tcp", "key_file": str(key), "staging_bytes": 8 << 20, **(transfer or {})},
            },
        }  # fmt: skip
    return out


def nixl_environment() -> dict[str, str]:
    """What vLLM's NixlConnector needs to stay on this machine."""
    return {
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self,sm",
        "UCX_NET_DEVICES": "lo",
    }


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, prefill: Engine, decode: Engine, port: int, *, ranks: tuple[int, int] = (1, 1)) -> None:
        self.prefill, self.decode, self.port, self.ranks = prefill, decode, port, ranks
        self._names = itertools.count()

    def begin(self, ids: list[int], *, tokens: int = 12, logprobs: int | None = None) -> tuple[str, str, str]:
        """Send a request to both, as a gateway does; return the transfer's name and both requests'."""
        transfer = f"t{next(self._names)}"
        to = {f"d.{i}": ["127.0.0.1", self.port + i] for i in range(self.ranks[1])}
        come = [f"p.{i}" for i in range(self.ranks[0])]
        d = self.decode.ask(
            ids, tokens=tokens, params={"regauge": {"transfer": transfer, "from": come}}, logprobs=logprobs
        )
        p = self.prefill.ask(ids, tokens=1, params={"regauge": {"transfer": transfer, "to": to}})
        return transfer, p, d

    def through(self, ids: list[int], *, tokens: int = 12, logprobs: int | None = None) -> dict[str, Any]:
        _, p, d = self.begin(ids, tokens=tokens, logprobs=logprobs)
        self.prefill.answer(p)
        return self.decode.answer(d)


@contextlib.contextmanager
def pair(model: Path, folder: Path, prefill: dict[str, Any], decode: dict[str, Any], *, ranks: tuple[int, int] = (1, 1),
         **common: Any) -> Iterator[Pair]:  # fmt: skip
    """Start both engines side by side, and end them."""
    key, port = folder / "key", free_port()
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    sides = [
        config(model, role="kv_producer", name="p", key=key, **common, **prefill),
        config(model, role="kv_consumer", name="d", port=port, key=key, **common, **decode),
    ]
    engines = []
    try:
        for name, each in zip("pd", sides, strict=True):
            engines.append(Engine(each, folder / f"{name}.log"))
        for engine in engines:
            engine.wait("ready", limit_s=START_S)
        yield Pair(engines[0], engines[1], port, ranks=ranks)
    finally:
        for engine in engines:
            engine.quit()
        for engine in engines:
            engine.end()
