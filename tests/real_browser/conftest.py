# ruff: noqa: S310  # urls of our own
"""What these tests need is there, or they fail with the command that brings it: they are never skipped."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from needed import missing

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
if why := missing():
    raise pytest.UsageError(why)

from browser import chromium
from deployment import Served, launch
from selenium.webdriver import Chrome


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two prefill workers and a decode worker, the compute plane declared."""
    settings = ("transfer.transport=tcp", "prefill.workers=2", "planes.compute=127.0.0.1", "transfer.lease_s=5")
    made = launch(tmp_path_factory.mktemp("browser"), *(word for each in settings for word in ("--set", each)))
    for _ in range(600):
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{made.url}/ready", timeout=5) as answer:
            if json.load(answer)["status"] == "ready":
                break
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.process.wait(0.5)
            pytest.fail(made.text())
    yield made
    made.process.send_signal(signal.SIGINT)
    made.process.wait(60)


@pytest.fixture(scope="session")
def _browser() -> Iterator[Chrome]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def page(_browser: Chrome) -> Chrome:
    """The browser at an empty page, with nothing pretended and nothing complained of."""
    _browser.get("about:blank")
    _browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    _browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    _browser.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})
    _browser.get_log("browser")
    return _browser
