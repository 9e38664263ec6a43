"""An etcd of our own on loopback, from the system's program."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

START_S = 20.0


class Server:
    """One member with its data in a folder; it can be stopped and started again. Remove it in the end."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.folder = Path(tempfile.mkdtemp(prefix="regauge-etcd-"))
        self._ports = [_free_port(), _free_port()]
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        peer = f"http://127.0.0.1:{self._ports[1]}"
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [
                self._program, "--name", "one", "--data-dir", str(self.folder / "data"), "--unsafe-no-fsync",
                "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        log.close()
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2_000:]
            assert time.monotonic() < end, "etcd does not answer"
            time.sleep(0.05)  # it tells nobody when it is ready

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:  # noqa: S310  # loopback
                return b'"true"' in answer.read()
        except OSError:
            return False

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def remove(self) -> None:
        """Kill it, and delete its data."""
        self.stop()
        shutil.rmtree(self.folder)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
