"""Whether everybody can read the page: axe-core in both colours, wide and narrow, with a request open; and how a large deployment is drawn."""

from __future__ import annotations

import json

import pytest
from browser import axe, colours, complaints, picture, rows, size, text, wait
from deployment import Served
from load import ask, fetch
from selenium.webdriver import Chrome

FULL = "document.querySelectorAll('#workers tbody tr').length === 3 && document.querySelector('#requests a') && document.querySelector('#topology svg')"
FITS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module", autouse=True)
def told(served: Served) -> str:
    """A request that has been."""
    ask(served.url, "told", 24)
    return "story-told"


def open_page(page: Chrome, served: Served, *, dark: bool, hash_: str = "") -> None:
    colours(page, dark=dark)
    page.get(f"{served.url}/dashboard{hash_}")
    wait(page, FULL)
    assert page.execute_script("return document.documentElement.classList.contains('dark')") is dark


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_anybody_can_read_it(dark: bool, width: int, page: Chrome, served: Served) -> None:
    size(page, width)
    open_page(page, served, dark=dark)
    assert page.execute_script("return innerWidth") == width, "narrower than a window may be"
    assert page.execute_script(f"return {FITS}"), "the page scrolls sideways"
    picture(page, f"{'dark' if dark else 'light'}-{width}")
    assert complaints(page) == []
    assert axe(page) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_request_is_opened_and_read(dark: bool, width: int, told: str, page: Chrome, served: Served) -> None:
    size(page, width)
    open_page(page, served, dark=dark, hash_=f"#request={told}")
    wait(page, "document.querySelector('#line-drawing svg') && document.getElementById('line-why').textContent")
    where = {row[1] for row in rows(page, "line-steps")}
    steps = {row[2] for row in rows(page, "line-steps")}
    assert where >= {"gateway", "decode-0"}
    assert any(name.startswith("prefill-") for name in where)
    assert steps >= {"attempt", "computes the prompt", "first byte to last", "last byte to commit", "decodes"}
    truth = json.loads(fetch(f"{served.url}/debug/trace/{told}"))
    assert len(rows(page, "line-steps")) == sum(len(tried["spans"]) for tried in truth["tries"])
    assert len(page.execute_script("return [...document.querySelectorAll('#line-drawing .token')]")) == 24
    assert f"{truth['request']['completion_tokens']} tokens" in text(page, "line-drawing")
    assert told in text(page, "line-title")
    assert "by cache+load" in text(page, "line-why") or "first token after" in text(page, "line-why")
    file = page.execute_script("return document.getElementById('line-file').href")
    assert json.loads(fetch(file))["traceEvents"]
    assert page.execute_script(f"return {FITS}")
    picture(page, f"request-{'dark' if dark else 'light'}-{width}", whole=False)
    assert complaints(page) == []
    assert axe(page) == []


def test_a_request_that_nobody_knows_is_said(page: Chrome, served: Served) -> None:
    open_page(page, served, dark=False, hash_="#request=nobody")
    wait(page, "document.getElementById('line-state').textContent.includes('not known')")
    assert [each for each in complaints(page) if "404" not in each] == []


LARGE = """
const done = arguments[0];
import('/dashboard/topology.js').then(({ draw }) => {
  const worker = (role, n) => ({ name: `${role}-server-${String(n).padStart(2, '0')}-rank-${n % 8}`, role, up: n !== 5, reason: 'no answer' });
  const workers = [...Array(96).keys()].map((n) => worker('prefill', n)).concat([...Array(8).keys()].map((n) => worker('decode', n)));
  const ports = new Map(workers.map(({ name }, n) => [name, { load: (n % 11) / 10, rate: 5e9 * (n % 11), of: 'cmp0 sent' }]));
  document.body.replaceChildren(Object.assign(document.createElement('div'), { id: 'large', className: 'drawing' }));
  draw(document.getElementById('large'), { workers, requests: 1234, ports, planes: new Set(['compute', 'business']) });
  done(document.querySelectorAll('#large rect').length);
}, (error) => done(String(error)));
"""


@pytest.mark.parametrize("width", [1280, 400])
def test_a_hundred_workers_are_drawn_within_bounds(width: int, page: Chrome, served: Served) -> None:
    size(page, width)
    open_page(page, served, dark=False)
    assert page.execute_async_script(LARGE) == 24 + 8 + 2
    assert "and 72 more, below" in text(page, "large")
    assert page.execute_script(f"return {FITS}")
    picture(page, f"large-{width}")
