"""Real SGLang servers on the CPU, alone or as a pair, and sglang-router before it. Run where SGLang is installed: `make test-sglang`.

Each is a process group of its own, started at once, so that several come up side by side; `ready` waits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from sglang_client import LIMIT_S, Answer, body, call, generate

from regauge.engines.status import token

START_S = 400.0
"""Two cores that do other work, too: a server takes some 30 s of one to start."""
STOP_S = 20.0
STOCK = "mooncake_tcp"
OURS = "regauge"


def free_port() -> int:
    """Return a port of loopback that nobody listens at."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Process:
    """A process group that answers HTTP at `port`. A context manager: it is gone afterwards."""

    READY = "/health"
    """What is asked until it says 200."""

    def __init__(self, port: int, log: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.port = port
        self._log = log
        with log.open("w") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of its first process, and of the group."""
        return self._process.pid

    def ready(self) -> None:
        """Wait until it answers. Raises AssertionError with the end of its log."""
        limit = time.monotonic() + START_S
        while self.health() != HTTPStatus.OK:
            assert time.monotonic() < limit, self.said()
            assert self.ended(0.5) is None, self.said()

    def health(self, limit_s: float = 5.0) -> int:
        """Return the status of `READY`; 0: no answer."""
        try:
            return self.ask("GET", self.READY, limit_s=limit_s)[0]
        except (OSError, HTTPException):
            return 0

    def ended(self, wait_s: float = 0.0) -> int | None:
        """Return its exit status; None: it has not ended within `wait_s`."""
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def ask(self, method: str, path: str, sent: object = None, *, limit_s: float = LIMIT_S) -> tuple[int, bytes]:
        """Return the status and the body of an answer. Raises OSError or HTTPException where there is none."""
        return call(self.port, method, path, sent, limit_s=limit_s)

    def send(self, what: signal.Signals) -> None:
        """Send a signal to the whole group; nothing where it has gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, what)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self.send(signal.SIGKILL)
        self._process.wait(STOP_S)

    def said(self, characters: int = 4_000) -> str:
        """Return the end of its log."""
        return self._log.read_text(errors="replace")[-characters:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        self.ended(STOP_S)
        self.kill()  # and what a first process that has ended left behind


@dataclass(frozen=True)
class Side:
    """What tells one server from another."""

    dtype: str = "float32"
    page: int = 16
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dtype}, pages of {self.page}"


class Server(Process):
    """One SGLang server."""

    def __init__(self, model: Path, log: Path, side: Side, *args: str, **environment: str) -> None:
        """`args`: for SGLang's server, of `environment` what is not as here; those of `side` come last."""
        port = free_port()
        started = (
            [str(Path(__file__).with_name("mooncake_on_cpu.py"))] if STOCK in args else ["-m", "sglang.launch_server"]
        )
        command = [
            sys.executable, *started, "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port),
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--skip-server-warmup",
            "--max-running-requests", "8", "--max-total-tokens", "8192", "--random-seed", "1", "--dtype", side.dtype,
            "--page-size", str(side.page), *args, *side.args,
        ]  # fmt: skip
        variables = {
            "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "TRITON_INTERPRET": "0", **environment, **side.environment,
        }  # fmt: skip
        super().__init__(port, log, command, variables)

    def generate(self, ids: Sequence[int], tokens: int, **more: Any) -> Answer:
        """Return its own answer to token ids, greedy."""
        return generate(self.port, body(ids, tokens, **more))

    def abort(self, rid: str) -> None:
        """Have it give up a request, as a client that leaves would after some seconds."""
        status, said = self.ask("POST", "/abort_request", {"rid": rid})
        assert status == HTTPStatus.OK, said

    def used(self) -> int:
        """Return the tokens of its KV pool that a request or the cache of prefixes holds."""
        status, said = self.ask("GET", "/v1/loads")
        assert status == HTTPStatus.OK, said
        return sum(rank["num_used_tokens"] for rank in msgspec.json.decode(said)["loads"])

    def flush(self) -> bool:
        """Empty its cache of prefixes; False while it has a request."""
        return self.ask("POST", "/flush_cache")[0] == HTTPStatus.OK


def settle(condition: Callable[[], bool], *, limit_s: float = 60) -> None:
    """Wait until it holds. Raises AssertionError."""
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit, "this should have come to rest"
        time.sleep(0.1)


@dataclass(frozen=True)
class Site:
    """What peers have in common."""

    model: Path
    folder: Path
    """For logs and, with our backend, the key and what REGAUGE_SGLANG names."""
    backend: str = STOCK
    transfer: Mapping[str, object] = field(default_factory=dict)
    """Of that file's `[transfer]`, what is not as here."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def settings(self, name: str, port: int, status_port: int) -> Path:
        """Write a server's, and return where."""
        key, file = self.folder / "key", self.folder / f"{name}.toml"
        key.write_text(self.key.hex())
        key.chmod(0o600)
        values = {"transport": "tcp", "key_file": str(key), "staging_bytes": 32 << 20, **self.transfer}
        lines = [f'name = "{name}"', f"port = {port}", f"status_port = {status_port}", 'model = "tiny"', "[transfer]"]
        lines += [f"{name} = {msgspec.json.encode(value).decode()}" for name, value in values.items()]
        file.write_text("\n".join(lines) + "\n")
        return file


class Peer(Server):
    """The prefill or the decode server of a pair."""

    def __init__(self, site: Site, role: str, side: Side, *, name: str = "", model: Path | None = None) -> None:
        """`name`: its own at the site, else its role; `model`: another than the site's."""
        self.site = site
        self.bootstrap, self.control, self.status = free_port(), free_port(), free_port()
        extra = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", site.backend]
        if role == "prefill":
            extra += ["--disaggregation-bootstrap-port", str(self.bootstrap)]
        else:  # the default wants a pinned pool on the host
            extra += ["--disaggregation-decode-retraction-backup", "none"]
        environment = {}
        if site.backend == OURS:
            file = site.settings(name or role, self.control if role == "decode" else 0, self.status)
            environment["REGAUGE_SGLANG"] = str(file)
        super().__init__(model or site.model, site.folder / f"{name or role}.log", side, *extra, **environment)

    def tell(self, path: str = "/status") -> tuple[int, dict[str, Any]]:
        """Return what our backend tells about its transfers."""
        connection = HTTPConnection("127.0.0.1", self.status, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {token(self.site.key)}"})
            answer = connection.getresponse()
            return answer.status, msgspec.json.decode(answer.read(), type=dict[str, Any])

    def at_rest(self) -> bool:
        """No request has a page, and no transfer is known; with our backend."""
        status, told = self.tell()
        assert status == HTTPStatus.OK, told
        states = told["states"]
        held = sum(
            pool[how] for state in states for pool in state["pools"] for how in ("leased", "committed", "quarantined")
        )
        return not (self.used() or held or any(state["transfers"] for state in states))


class Pair:
    """A prefill and a decode server with a backend between them, and what is sent to both."""

    def __init__(self, prefill: Peer, decode: Peer) -> None:
        self.prefill, self.decode = prefill, decode
        self._legs = ThreadPoolExecutor(64)

    def ready(self) -> None:
        """Wait until both answer."""
        self.prefill.ready()
        self.decode.ready()

    def close(self) -> None:
        """No request is sent any more; the servers stay."""
        self._legs.shutdown()

    def bootstrapped(self, **more: Any) -> dict[str, Any]:
        """Return what a router adds to a request, with a room of its own."""
        room = secrets.randbits(62)
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap, "bootstrap_room": room, **more}

    def begin(self, ids: Sequence[int], tokens: int, *, limit_s: float = LIMIT_S, leave: Mapping[str, float] | None = None,
              **more: Any) -> tuple[Future[Answer], Future[Answer]]:  # fmt: skip
        """Send one request to both, as sglang-router does, and return both answers to come.

        `leave`: after how many seconds the client of prefill, of decode or of either leaves. Where the request has a `rid` it is aborted
        then, as a gateway does; else the server has to notice.
        """
        sent = body(ids, tokens, **self.bootstrapped(**more))
        after = leave or {}
        prefill, decode = (
            self._legs.submit(_leg, server, sent, limit_s, after.get(role))
            for role, server in (("prefill", self.prefill), ("decode", self.decode))
        )
        return prefill, decode

    def through(self, ids: Sequence[int], tokens: int, **more: Any) -> tuple[Answer, Answer]:
        """Return prefill's and decode's answer."""
        prefill, decode = self.begin(ids, tokens, **more)
        return prefill.result(), decode.result()

    @contextlib.contextmanager
    def halted(self) -> Iterator[None]:
        """Neither server runs meanwhile: SGLang's schedulers take a core each, also when there is nothing to do."""
        servers = (self.prefill, self.decode)
        for server in servers:
            server.send(signal.SIGSTOP)
        try:
            yield
        finally:
            for server in servers:
                server.send(signal.SIGCONT)

    def at_rest(self) -> bool:
        """Neither side has anything of a request."""
        return self.prefill.at_rest() and self.decode.at_rest()


def _leg(server: Peer, sent: dict[str, Any], limit_s: float, leave_after: float | None) -> Answer:
    answer = generate(server.port, sent, limit_s=limit_s, leave_after=leave_after)
    if leave_after is not None and answer.error and "rid" in sent:
        server.abort(sent["rid"])
    return answer


@contextlib.contextmanager
def pair(site: Site, prefill: Side, decode: Side) -> Iterator[Pair]:
    """Start both servers; they are gone afterwards."""
    with Peer(site, "prefill", prefill) as one, Peer(site, "decode", decode) as two:
        made = Pair(one, two)
        try:
            yield made
        finally:
            for server in (one, two):
                server.send(signal.SIGCONT)
                server.send(signal.SIGTERM)  # both before either is waited for
            made.close()


class Router(Process):
    """sglang-router before a pair that is ready."""

    READY = "/readiness"
    """Once both servers have been asked what they are; /health is 200 before."""

    def __init__(self, both: Pair, log: Path, *args: str) -> None:
        port, metrics = free_port(), free_port()
        urls = [f"http://127.0.0.1:{server.port}" for server in (both.prefill, both.decode)]
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--pd-disaggregation",
            "--prefill", urls[0], str(both.prefill.bootstrap), "--decode", urls[1], "--policy", "round_robin",
            "--prometheus-port", str(metrics), "--prometheus-host", "127.0.0.1", *args,
        ]  # fmt: skip
        super().__init__(port, log, command, {"HF_HUB_OFFLINE": "1"})

    def generate(self, ids: Sequence[int], tokens: int, **more: Any) -> Answer:
        """Return what the router answers to token ids, greedy."""
        return generate(self.port, body(ids, tokens, **more))
