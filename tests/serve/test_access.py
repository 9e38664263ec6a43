"""Keys before the gateway, over loopback HTTP: who gets in, and what others' answers say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from serve_rig import MODEL, WAIT_S, Rig, open_rig

from regauge.config import LimitsConfig
from regauge.serve.access import Access
from regauge.serve.tenants import Tenants, new_key
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
BODY = {"model": MODEL, "prompt": "a b c", "max_tokens": 2}


@pytest.fixture
async def keys(tmp_path: Path) -> dict[str, str]:
    made = {name: new_key() for name in ("acme", "narrow", "watcher")}
    more = {
        "acme": "requests_per_minute = 2\ntokens_per_minute = 6000",
        "narrow": 'models = ["other"]',
        "watcher": "operator = true",
    }
    text = "\n".join(f'[tenant.{name}]\nkeys = ["{digest}"]\n{more[name]}' for name, (_, digest) in made.items())
    (tmp_path / "tenants.toml").write_text(text)
    return {name: key for name, (key, _) in made.items()}


@pytest.fixture
async def rig(tokenizer: Tokenizer, tmp_path: Path, keys: dict[str, str]) -> AsyncIterator[Rig]:
    tenants = Tenants.load(tmp_path / "tenants.toml")
    limits = LimitsConfig(request_timeout_s=WAIT_S, prefill_wait_s=0)
    async with open_rig(tokenizer, tenants=tenants, limits=limits) as opened:
        yield opened


async def test_without_a_key_nothing_is_read_and_the_dialect_is_kept(rig: Rig, keys: dict[str, str]) -> None:
    status, body, headers = await rig.post("/v1/completions", BODY)
    assert (status, body["error"]["code"], headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    assert headers["x-request-id"]
    status, body, _ = await rig.post("/v1/messages", {})
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    status, body, _ = await rig.post("/v1/completions", BODY, authorization="Bearer rg-wrong")
    assert status == 401
    assert not any(name in str(body) for name in keys)
    for path in ("/health", "/ready"):
        assert (await rig.get(path))[0] == 200


async def test_a_key_lets_in_up_to_its_limits_and_the_headers_say_what_is_left(rig: Rig, keys: dict[str, str]) -> None:
    for left in ("1", "0"):
        status, _, headers = await rig.post("/v1/completions", BODY, x_api_key=keys["acme"])
        assert (status, headers["x-ratelimit-remaining-requests"]) == (200, left)
        assert headers["x-ratelimit-limit-tokens"] == "6000"
    status, body, headers = await rig.post("/v1/completions", BODY, x_api_key=keys["acme"])
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, "rate_limit_exceeded", "30")
    assert (await rig.post("/v1/completions", BODY, x_api_key=keys["watcher"]))[0] == 200


async def test_a_model_that_a_tenant_may_not_use_does_not_exist_for_it(rig: Rig, keys: dict[str, str]) -> None:
    status, body, _ = await rig.post("/v1/completions", BODY, x_api_key=keys["narrow"])
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("who", "status"), [(None, 401), ("acme", 403), ("watcher", 200)])
async def test_metrics_of_all_are_for_operators_where_others_can_ask(
    tmp_path: Path, keys: dict[str, str], who: str | None, status: int
) -> None:
    said: list[int] = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        if message["type"] == "http.response.start":
            said.append(message["status"])

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    access = Access(app, Tenants.load(tmp_path / "tenants.toml"))
    headers = [] if who is None else [(b"x-api-key", keys[who].encode())]
    for client, expected in ((("10.0.0.9", 1), status), (("127.0.0.1", 1), 200)):
        scope = {"type": "http", "path": "/metrics", "headers": headers, "client": client, "state": {"request_id": "r"}}
        await access(scope, receive, send)
        assert said.pop() == expected
