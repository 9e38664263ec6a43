# ruff: noqa: S310  # urls of our own
"""The live page in a real Chromium, over a real deployment under load. Run by `make test-browser`; pictures go to bench/out/dashboard."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import axe, chromium, complaints
from deployment import Served, launch
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "bench" / "out" / "dashboard"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    made = launch(folder, "--set", "transfer.transport=tcp")
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


def ask(url: str, number: int) -> None:
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": f"Story {number}: once upon a time",
        "max_tokens": 12,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["choices"]


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line and line[0] != "#":
            name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
            found[name] = found.get(name, 0.0) + value
    return found


def tiles(page: Chrome) -> dict[str, float]:
    rows = page.find_elements(By.CSS_SELECTOR, "#now dd")
    return {row.get_attribute("data-metric"): float(row.get_attribute("data-value")) for row in rows}


def picture(page: Chrome, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    height = page.execute_script("return document.documentElement.scrollHeight")
    page.set_window_size(page.get_window_size()["width"], min(3_000, height + 140))
    page.save_screenshot(str(PICTURES / f"{name}.png"))


def wait(page: Chrome, what: str, limit_s: float = 30) -> None:
    WebDriverWait(page, limit_s, 0.2).until(lambda p: p.execute_script(f"return {what}"))


def test_under_load_the_page_says_what_the_metrics_say(served: Served) -> None:
    with chromium() as page, concurrent.futures.ThreadPoolExecutor(4) as pool:
        page.get(f"{served.url}/dashboard")
        wait(page, "document.getElementById('status').textContent === 'live'")
        list(pool.map(lambda n: ask(served.url, n), range(24)))
        want = metrics(served.url)
        done = f"Number(document.querySelector('[data-metric=regauge_completion_tokens_total]').dataset.value) === {want['regauge_completion_tokens_total']}"
        wait(page, done)
        told = tiles(page)
        assert told == {name: want.get(name, 0.0) for name in told}
        assert told["regauge_completion_tokens_total"] == 24 * 12
        wait(
            page,
            "document.getElementById('ttft-sum').textContent.includes('ms') || document.getElementById('ttft-sum').textContent.includes(' s')",
        )
        text = page.find_element(By.TAG_NAME, "main").text
        assert "CONVERT" in text
        assert "prefill-0" in text
        assert complaints(page) == []
        picture(page, "light")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_anybody_can_read_it(dark: bool, width: int, served: Served) -> None:
    with chromium(width) as page:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.get(f"{served.url}/dashboard")
        wait(page, "document.querySelectorAll('#workers tbody tr').length === 2")
        assert page.execute_script("return document.documentElement.classList.contains('dark')") is dark
        assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth"), (
            "the page scrolls sideways"
        )
        picture(page, f"{'dark' if dark else 'light'}-{width}")
        assert complaints(page) == []
        assert axe(page) == []


def test_the_keyboard_is_enough(served: Served) -> None:
    with chromium() as page:
        page.get(f"{served.url}/dashboard")
        wait(page, "document.querySelectorAll('#workers tbody tr').length === 2")
        body = page.switch_to.active_element
        body.send_keys(Keys.TAB)
        assert page.switch_to.active_element.text == "Skip to the figures"
        page.switch_to.active_element.send_keys(Keys.TAB)
        button = page.switch_to.active_element
        before = button.get_attribute("aria-pressed")
        button.send_keys(Keys.ENTER)
        assert button.get_attribute("aria-pressed") != before
        outline = page.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"


def test_a_worker_that_is_down_and_a_gateway_that_is_gone_are_said(served: Served) -> None:
    with chromium() as page:
        page.get(f"{served.url}/dashboard")
        wait(page, "document.querySelectorAll('#workers tbody tr').length === 2")
        os.kill(served.pid("prefill-0"), signal.SIGSTOP)
        try:
            wait(
                page,
                "[...document.querySelectorAll('#workers .bad')].some((cell) => cell.textContent.startsWith('down'))",
                60,
            )
            picture(page, "worker-down")
        finally:
            os.kill(served.pid("prefill-0"), signal.SIGCONT)
        wait(
            page,
            "![...document.querySelectorAll('#workers .bad')].some((cell) => cell.textContent.startsWith('down'))",
            60,
        )
        page.set_network_conditions(offline=True, latency=0, throughput=0)
        wait(page, "document.getElementById('status').classList.contains('bad')")
        picture(page, "no-answer")
        page.delete_network_conditions()
        wait(page, "document.getElementById('status').textContent === 'live'")
