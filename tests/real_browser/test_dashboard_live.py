"""The live page in a real Chromium, over a real deployment under load. Run by `make test-browser`; pictures go to bench/out/dashboard."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from browser import colours, complaints, picture, rows, text, wait
from deployment import Served
from load import load, scrape, total
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By

LIVE = "document.getElementById('status').textContent === 'live'"
WORKERS = "document.querySelectorAll('#workers tbody tr').length === 3"


def tiles(page: Chrome) -> dict[str, float]:
    found = page.execute_script(
        "return [...document.querySelectorAll('#now dd')].map((each) => [each.dataset.metric, Number(each.dataset.value)])"
    )
    return dict(found)


def look(page: Chrome, after: float) -> None:
    """Wait for figures that are newer than this."""
    wait(page, f"Number(document.getElementById('content').dataset.at) > {after!r}")


def number(text: str) -> float:
    return float(text.replace(",", ""))


def test_under_load_the_page_says_what_the_metrics_say(page: Chrome, served: Served) -> None:
    page.get(f"{served.url}/dashboard")
    wait(page, f"{LIVE} && {WORKERS}")
    begun = time.monotonic()
    flowed = False
    with load(served.url, 4):
        while time.monotonic() - begun < 30:
            before = scrape(served.url)
            look(page, time.time())
            told, after = tiles(page), scrape(served.url)
            for name, value in told.items():
                if name != "regauge_requests_in_flight":  # which may fall
                    assert total(before, name) <= value <= total(after, name), name
            flowed = flowed or re.search(r"CONVERT [\d.]+ [KMG]iB/s", text(page, "flows-sum")) is not None
        for place in ("ttft-sum", "tpot-sum", "itl-sum"):
            low, middle, high = (
                float(n) * (1000 if unit == "s" else 1) for n, unit in re.findall(r"([\d.]+) (ms|s)", text(page, place))
            )
            assert 0 < low <= middle <= high, place
        assert flowed, "KV was on its way"
        assert "compute" in text(page, "topology")
        picture(page, "light")
    look(page, time.time() + 0.7)  # two polls of the workers later nothing moves any more
    equal(page, served)
    assert complaints(page) == []


def equal(page: Chrome, served: Served) -> None:
    """Every figure of the page that a scrape has, too."""
    now = scrape(served.url)
    told = tiles(page)
    assert told == {name: total(now, name) for name in told}
    assert told["regauge_completion_tokens_total"] >= 12
    assert told["regauge_requests_in_flight"] == 0
    shown = {row[0]: row for row in rows(page, "workers")}
    assert set(shown) == {"prefill-0", "prefill-1", "decode-0"}
    for name, (_, role, state, running, waiting, pages, free, *_, quarantined) in shown.items():
        assert (role, state) == (name.partition("-")[0], "up")
        for cell, metric in (
            (running, "running_requests"), (waiting, "queue_depth"), (pages, "pool_pages"), (free, "pool_free_pages"),
            (quarantined, "pool_quarantined_pages"),
        ):  # fmt: skip
            assert number(cell) == total(now, f"regauge_{metric}", worker=name), (name, metric)
    [(path, mode, *_, delivered, _, _)] = rows(page, "paths")
    assert (path, mode, number(delivered)) == (
        "CONVERT",
        "staged",
        total(now, "regauge_transfer_bytes_count", path=path, mode=mode),
    )
    assert {(row[0], row[2], row[3]) for row in rows(page, "planes")} >= {
        ("compute", "lo", "received"),
        ("compute", "lo", "sent"),
    }


def test_the_keyboard_is_enough(page: Chrome, served: Served) -> None:
    page.get(f"{served.url}/dashboard")
    wait(page, f"{WORKERS} && document.querySelector('#requests a')")
    page.switch_to.active_element.send_keys(Keys.TAB)
    assert page.switch_to.active_element.text == "Skip to the figures"
    page.switch_to.active_element.send_keys(Keys.TAB)
    button = page.switch_to.active_element
    before = button.get_attribute("aria-pressed")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-pressed") != before
    seen = list[str]()
    for _ in range(60):
        page.switch_to.active_element.send_keys(Keys.TAB)
        at = page.switch_to.active_element
        assert page.execute_script("return getComputedStyle(arguments[0]).outlineStyle", at) == "solid", "visible focus"
        name = at.get_attribute("aria-label") or at.get_attribute("aria-labelledby") or at.text
        if name.startswith("story-") and not seen.count(name):
            at.send_keys(Keys.ENTER)  # opens, and Escape closes it and gives the focus back
            wait(page, "document.getElementById('line').open")
            assert text(page, "line-title") == name
            page.switch_to.active_element.send_keys(Keys.ESCAPE)
            wait(page, "!document.getElementById('line').open")
            assert page.switch_to.active_element.text == name
        seen.append(name)
        if name == "h-trouble":
            break
    order = [name for name in seen if name.startswith("h-")]
    assert order == ["h-workers", "h-requests", "h-transfers", "h-links", "h-trouble"]


def test_focus_and_selection_stay_while_figures_change(page: Chrome, served: Served) -> None:
    page.get(f"{served.url}/dashboard")
    wait(page, "document.querySelector('#requests a')")
    page.execute_script("document.querySelector('#requests a').focus()")
    link = page.switch_to.active_element
    look(page, time.time())
    assert page.switch_to.active_element == link


def test_a_worker_that_is_down_and_a_gateway_that_is_gone_are_said(page: Chrome, served: Served) -> None:
    down = "[...document.querySelectorAll('#workers .bad')].some((cell) => cell.textContent.startsWith('down'))"
    page.get(f"{served.url}/dashboard")
    wait(page, WORKERS)
    os.kill(served.pid("prefill-0"), signal.SIGSTOP)
    try:
        wait(page, down, 60)
        wait(page, "document.querySelector('#topology .cross')")
        picture(page, "worker-down")
    finally:
        os.kill(served.pid("prefill-0"), signal.SIGCONT)
    wait(page, f"!{down}", 60)
    assert complaints(page) == []
    page.set_network_conditions(offline=True, latency=0, throughput=0)
    wait(page, "document.getElementById('status').classList.contains('bad')")
    assert text(page, "status").startswith("no answer")
    picture(page, "no-answer")
    page.delete_network_conditions()
    wait(page, LIVE)


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_nothing_moves_by_itself(motion: str, page: Chrome, served: Served) -> None:
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": motion}]}
    )
    page.get(f"{served.url}/dashboard")
    wait(page, WORKERS)
    assert page.execute_script("return document.getAnimations().length") == 0


def test_the_button_outlives_a_look_and_follows_the_system(page: Chrome, served: Served) -> None:
    colours(page, dark=True)
    page.get(f"{served.url}/dashboard")
    wait(page, f"{WORKERS} && document.documentElement.classList.contains('dark')")
    page.find_element(By.ID, "theme").click()
    look(page, time.time())
    assert page.execute_script("return document.documentElement.classList.contains('dark')") is False
