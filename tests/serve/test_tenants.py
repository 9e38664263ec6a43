"""The file of tenants, their keys, and what requests are charged."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regauge.errors import ConfigError
from regauge.serve.buckets import Buckets
from regauge.serve.openai import ApiError
from regauge.serve.tenants import DEFAULT, Tenant, Tenants, duration, month_of, new_key

NOVEMBER = 1_796_000_000.0
"""30 November 2026, 00:53 UTC."""


class World:
    """Tenants on clocks of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tenants.toml"
        self.now = 1_000.0
        self.wall = NOVEMBER
        self.keys: dict[str, str] = {}

    def write(self, **tenants: str) -> None:
        lines = []
        for name, more in tenants.items():
            if name not in self.keys:
                self.keys[name] = new_key()[0]
            digest = hashlib.sha256(self.keys[name].encode()).hexdigest()
            lines.append(f'[tenant.{name}]\nkeys = ["sha256:{digest}"]\n{more}\n')
        self.file.write_text("\n".join(lines))

    def open(self, buckets: Buckets | None = None) -> Tenants:
        tenants = Tenants(self.file, buckets, clock=lambda: self.now, wall=lambda: self.wall)
        tenants.reload()
        return tenants

    def ask(self, tenants: Tenants, name: str) -> Tenant:
        return tenants.authenticate([(b"authorization", b"Bearer " + self.keys[name].encode())])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def refused(tenants: Tenants, tenant: Tenant, tokens: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        tenants.take(tenant, tokens)
    assert caught.value.status == 429
    return caught.value


def test_without_a_file_there_is_one_tenant_and_keys_are_not_looked_at() -> None:
    tenants = Tenants.load(None)
    tenant = tenants.authenticate([(b"authorization", b"Basic nonsense")])
    assert (tenants.open, tenant.name, tenant.allows("any")) == (True, DEFAULT, True)
    grant = tenants.take(tenant, 1 << 60)
    assert grant.headers() == []
    tenants.settle(grant, 5)


def test_a_key_is_taken_from_either_header_and_belongs_to_one_tenant(world: World) -> None:
    world.write(acme='models = ["m"]\npriority = 7', other="operator = true")
    tenants = world.open()
    key = world.keys["acme"].encode()
    for headers in (
        [(b"authorization", b"bearer  " + key)],
        [(b"x-api-key", key)],
        [(b"x-api-key", key), (b"authorization", b"Bearer " + key)],
    ):
        tenant = tenants.authenticate([(b"host", b"h"), *headers])
        assert (tenant.name, tenant.priority, tenant.operator) == ("acme", 7, False)
        assert (tenant.allows("m"), tenant.allows("n")) == (True, False)
    assert world.ask(tenants, "other").operator
    assert tenants.names == ["acme", "other"]


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ([], "give an API key"),
        ([(b"authorization", b"Bearer ")], "not known"),
        ([(b"authorization", b"Bearer rg-" + b"A" * 43)], "not known"),
        ([(b"x-api-key", b"A" * 100_000)], "not known"),
        ([(b"authorization", b"Basic YTpi")], "must be 'Bearer KEY'"),
        ([(b"authorization", b"Bearer a"), (b"x-api-key", b"b")], "two API keys"),
        ([(b"authorization", b"Bearer \xff\x00\xfe")], "not known"),
    ],
)
def test_no_key_or_a_wrong_one_is_401_and_tells_nothing_of_others(
    world: World, headers: list[tuple[bytes, bytes]], message: str
) -> None:
    world.write(acme="")
    with pytest.raises(ApiError, match=message) as caught:
        world.open().authenticate(headers)
    assert (caught.value.status, caught.value.error.code) == (401, "invalid_api_key")
    assert "acme" not in str(caught.value)


def test_the_hash_of_a_key_is_not_a_key(world: World) -> None:
    world.write(acme="")
    digest = hashlib.sha256(world.keys["acme"].encode()).hexdigest()
    for text in (digest, f"sha256:{digest}"):
        with pytest.raises(ApiError, match="not known"):
            world.open().authenticate([(b"x-api-key", text.encode())])


def test_disabled_and_expired_keys_say_so(world: World) -> None:
    world.write(off="disabled = true", old="expires = 2026-11-30", good="expires = 2026-12-01")
    tenants = world.open()
    with pytest.raises(ApiError, match="disabled") as caught:
        world.ask(tenants, "off")
    assert caught.value.status == 403
    with pytest.raises(ApiError, match="expired") as caught:
        world.ask(tenants, "old")
    assert caught.value.status == 401
    assert world.ask(tenants, "good").name == "good"
    world.wall += 86_400
    with pytest.raises(ApiError, match="expired"):
        world.ask(tenants, "good")


def test_what_was_not_used_comes_back_and_the_headers_say_what_is_left(world: World) -> None:
    world.write(acme="tokens_per_minute = 600\nrequests_per_minute = 6")
    tenants = world.open()
    acme = world.ask(tenants, "acme")
    grant = tenants.take(acme, 500)
    assert dict(grant.headers()) == {
        b"x-ratelimit-limit-requests": b"6",
        b"x-ratelimit-remaining-requests": b"5",
        b"x-ratelimit-reset-requests": b"10s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"100",
        b"x-ratelimit-reset-tokens": b"50s",
    }
    error = refused(tenants, acme, 200)
    assert (error.retry_after_s, error.error.code, error.error.type) == (10, "rate_limit_exceeded", "rate_limit_error")
    assert "600 tokens a minute" in str(error)
    tenants.settle(grant, 50)
    tenants.settle(grant, 0)  # a second time changes nothing
    assert tenants.take(acme, 500).left.tokens == 50
    world.now += 5
    assert tenants.take(acme, 0).left.tokens == 100


def test_each_limit_is_told_by_its_name(world: World) -> None:
    world.write(
        requests="requests_per_minute = 2", big="tokens_per_minute = 600\nburst_s = 6", many="max_concurrent = 1",
        month="tokens_per_month = 1000",
    )  # fmt: skip
    tenants = world.open()
    for name, fits, setting, retry in (("requests", 2, "requests_per_minute", 30), ("many", 1, "max_concurrent", 1)):
        who = world.ask(tenants, name)
        for _ in range(fits):
            tenants.take(who, 1)
        error = refused(tenants, who, 1)
        assert setting in str(error)
        assert error.headers() == {"Retry-After": str(retry)}
    error = refused(tenants, world.ask(tenants, "big"), 61)
    assert ("at most 60 at once" in str(error), error.retry_after_s) == (True, None)
    error = refused(tenants, world.ask(tenants, "month"), 1_001)
    assert error.error.code == "insufficient_quota"
    december = 86_400 - NOVEMBER % 86_400
    assert error.retry_after_s == december
    tenants.count_month({"month": 990, "gone": 5})
    refused(tenants, world.ask(tenants, "month"), 11)
    world.wall += december
    assert tenants.take(world.ask(tenants, "month"), 1_000).month == month_of(NOVEMBER) + 1


def test_a_new_file_counts_at_once_and_a_bad_one_changes_nothing(world: World) -> None:
    world.write(acme="max_concurrent = 1")
    tenants = world.open()
    old = world.ask(tenants, "acme")
    grant = tenants.take(old, 10)
    world.write(acme="max_concurrent = 2", new="")
    tenants.reload()
    assert world.ask(tenants, "new").name == "new"
    second = tenants.take(world.ask(tenants, "acme"), 10)
    refused(tenants, world.ask(tenants, "acme"), 10)
    world.file.write_text("[tenant.acme]\nkeys = 3\n")
    with pytest.raises(ConfigError, match="keys"):
        tenants.reload()
    assert world.ask(tenants, "new").name == "new"
    for each in (grant, second):
        tenants.settle(each, 0)
    world.write(new="")
    tenants.reload()
    with pytest.raises(ApiError, match="not known"):
        world.ask(tenants, "acme")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", "tenant"),
        ('[tenant.a]\nkeys = ["secret"]', r"keys\[0\]|keys.*pattern"),
        ("[tenant.a]\nkeys = []\nspeed = 3", "speed"),
        ("[tenant.a]\nkeys = []\ntokens_per_minute = 0", "tokens_per_minute"),
        ("[tenant.a]\nkeys = []\nburst_s = 0", "burst_s"),
        ('[tenant."a/../b"]\nkeys = []', "pattern|matching"),
        (f'[tenant.a]\nkeys = ["sha256:{"0" * 64}"]\n[tenant.b]\nkeys = ["sha256:{"0" * 64}"]', r"tenant\.b\.keys: .* is a's, too"),
        ("not toml", "tenants.toml"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_its_field(world: World, text: str, where: str) -> None:
    world.file.write_text(text)
    with pytest.raises(ConfigError, match=where):
        Tenants.load(world.file)


def test_a_file_that_is_not_there_is_named_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tenants '.*none\.toml': No such file"):
        Tenants.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (1.5, "1.5s"), (59.9996, "1m0s"), (360, "6m0s"), (86_400, "1440m0s")],
)
def test_durations_are_written_as_the_api_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_new_key_is_shown_once_and_its_hash_fits_the_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "regauge", "keys", "new", "acme.eu"]
    made = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=True)
    key = made.stdout.strip()
    assert (len(key), key[:3]) == (46, "rg-")
    lines = made.stderr.strip().splitlines()[-2:]
    (tmp_path / "tenants.toml").write_text("\n".join(lines))
    assert Tenants.load(tmp_path / "tenants.toml").authenticate([(b"x-api-key", key.encode())]).name == "acme.eu"
    other = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert other["key"] != key
    assert other["hash"] == "sha256:" + hashlib.sha256(other["key"].encode()).hexdigest()
    bad = subprocess.run([*command[:-1], "../x"], capture_output=True, text=True, check=False)
    assert (bad.returncode, "tenant '../x'" in bad.stderr) == (2, True)
