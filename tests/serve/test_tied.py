"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

SLEEP_S = 60
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "regauge.serve.tied", "sh", "-c", "echo up; exec sleep {SLEEP_S}"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_what_is_tied_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = [parent.stdout.readline().strip() for _ in range(2)]
        assert "up" in words
        begun = time.monotonic()
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.stdout.read() == ""  # ends when nobody can write any more, the child included
        assert time.monotonic() - begun < SLEEP_S / 2


def test_what_cannot_be_run_is_said() -> None:
    for arguments, word in (([], "usage"), (["/none/such"], "/none/such: No such file")):
        found = subprocess.run(
            [sys.executable, "-m", "regauge.serve.tied", *arguments], capture_output=True, text=True, check=False
        )
        assert found.returncode == 2
        assert word in found.stderr
