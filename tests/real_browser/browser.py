"""A real Chromium, driven by selenium, and what it complains of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from needed import AXE
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service


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
