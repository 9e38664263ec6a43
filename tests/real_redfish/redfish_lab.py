"""A BMC as sushy-tools emulates one, with the fake driver."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
SUSHY_EMULATOR_LISTEN_IP = "127.0.0.1"
SUSHY_EMULATOR_FAKE_DRIVER = True
SUSHY_EMULATOR_AUTH_FILE = {auth!r}
SUSHY_EMULATOR_STATE_DIR = {state!r}
SUSHY_EMULATOR_FAKE_SYSTEMS = [{{"uuid": "da69abcc-dae0-4913-9a7b-d344043097c0", "name": "prefill-0", "power_state": {power!r}, "nics": []}}]
"""
PASSWORD = "s3cret"
LOGIN = "admin:$2b$04$zWUqcVT9hkUInsS3wMLtz.qxRsy6ndCsE2Yy4Nw8D6AZOfSig4.am\n"
"""As htpasswd writes it: bcrypt of the password."""


class Emulator:
    """A BMC whose server has a power state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, power: str) -> None:
        auth, config = self.folder / "auth", self.folder / "emulator.conf"
        auth.write_text(LOGIN)
        config.write_text(CONFIG.format(auth=str(auth), state=str(self.folder), power=power))
        words = [sys.executable, "-m", "sushy_tools.emulator.main", "--config", str(config), "--fake", "-i", "127.0.0.1", "-p", str(self.port)]  # fmt: skip
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ})
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", self.port), 0.1).close()
            except OSError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                self._wait()
            else:
                return
        pytest.fail((self.folder / "log").read_text())

    def _wait(self) -> None:
        assert self.process is not None
        try:
            self.process.wait(0.1)  # until it listens, or ends
        except subprocess.TimeoutExpired:
            return

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(20)
