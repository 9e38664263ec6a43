"""A real Chromium, driven by selenium, and what it complains of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from needed import AXE
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

PICTURES = Path(__file__).parents[2] / "bench" / "out" / "dashboard"


@contextlib.contextmanager
def chromium(width: int = 1280, height: int = 1000) -> Iterator[webdriver.Chrome]:
    options = Options()
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--window-size={width},{height}",
    ):
        options.add_argument(word)
    options.binary_location = "/usr/bin/chromium"
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service("/usr/bin/chromedriver"))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()


def complaints(driver: webdriver.Chrome) -> list[str]:
    """Errors and warnings of the console, refusals by the policy among them."""
    return [each["message"] for each in driver.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]


def axe(driver: webdriver.Chrome) -> list[tuple[str, str, list[Any]]]:
    """Serious and critical findings of axe-core."""
    driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})  # for the checker's own code
    driver.execute_script(AXE.read_text())
    found = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(done, (error) => done({error: String(error)}));"
    )
    assert "error" not in found, found
    assert found["passes"]
    return [(each["id"], each["impact"], [node["html"][:200] for node in each["nodes"]])
            for each in found["violations"] if each["impact"] in ("serious", "critical")]  # fmt: skip


def wait(driver: webdriver.Chrome, what: str, limit_s: float = 30) -> None:
    """Wait until an expression holds."""
    WebDriverWait(driver, limit_s, 0.1).until(lambda page: page.execute_script(f"return {what}"))


def text(driver: webdriver.Chrome, place: str) -> str:
    """What an element with this id shows."""
    found: str = driver.execute_script("return document.getElementById(arguments[0]).textContent", place)
    return found


def rows(driver: webdriver.Chrome, table: str) -> list[list[str]]:
    """The cells of a table, by rows."""
    script = "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map((row) => [...row.cells].map((cell) => cell.textContent))"
    found: list[list[str]] = driver.execute_script(script, table)
    return found


def colours(driver: webdriver.Chrome, *, dark: bool) -> None:
    """What the system prefers."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def size(driver: webdriver.Chrome, width: int, height: int = 1000) -> None:
    """Let the page be so wide; a window cannot be narrower than 500."""
    shown = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shown)


def picture(driver: webdriver.Chrome, name: str, *, whole: bool = True) -> None:
    """Leave a picture for a person to look at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    width, height = (
        driver.execute_script(f"return {each}")
        for each in ("innerWidth", "document.documentElement.scrollHeight" if whole else "innerHeight")
    )
    size(driver, width, min(height, 4000))
    driver.save_screenshot(str(PICTURES / f"{name}.png"))
