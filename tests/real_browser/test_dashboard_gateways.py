"""The live page over two gateway processes, one of which stands still."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from browser import complaints, rows, text, wait
from selenium.webdriver import Chrome
from serve_rig import MODEL, TEMPLATE, train
from test_place import gateways

from regauge.config_gateway import GatewayConfig
from regauge.serve.text import Tokenizer

SAID = "gateway-1 does not answer within 1 s"


def status(page: Chrome, wanted: str) -> None:
    wait(page, f"document.getElementById('status').textContent === {wanted!r}")


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_it_shows_all_requests_and_says_who_does_not_answer(page: Chrome, tmp_path: Path) -> None:
    tokenizer = Tokenizer(train(), template=TEMPLATE, max_context=512)
    async with gateways(tokenizer, tmp_path, GatewayConfig(processes=2), apart=True) as all_:
        for number, name in ((0, "one"), (1, "two")):
            body = {"model": MODEL, "prompt": "a b c", "max_tokens": 2}
            async with (
                aiohttp.ClientSession(headers={"X-Request-Id": name}) as session,
                session.post(f"{all_.url(number)}/v1/completions", json=body) as answer,
            ):
                assert answer.status == 200

        def look() -> None:
            page.get(f"{all_.url(0)}/dashboard")
            status(page, "live")
            wait(page, "document.querySelectorAll('#requests tbody tr').length === 2")
            assert [row[0] for row in rows(page, "requests")] == ["two", "one"]
            os.kill(all_.running[1].pid, signal.SIGSTOP)
            try:
                status(page, f"live; {SAID}")
                wait(page, "document.querySelectorAll('#requests tbody tr').length === 1")
                assert f"{SAID}: its requests are not here" in text(page, "requests")
                assert page.execute_script("return document.getElementById('content').className") == ""
            finally:
                os.kill(all_.running[1].pid, signal.SIGCONT)
            status(page, "live")
            assert complaints(page) == []

        await asyncio.to_thread(look)
