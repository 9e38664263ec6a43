"""What the gateway does with receipts: its own, the workers', those that were lost, and those that are nobody's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from serve_rig import MODEL, open_rig

from meter_cases import KEYS, request, signed, trust
from regauge.config_meter import MeterConfig
from regauge.meter.receipt import Receipt, Side, encode
from regauge.meter.store import Store
from regauge.observe import Metrics
from regauge.serve.metering import Meter
from regauge.serve.tenants import Tenants, new_key
from regauge.serve.text import Tokenizer
from regauge.serve.usage import used_this_month


@pytest.fixture
def config(tmp_path: Path) -> MeterConfig:
    return MeterConfig(store=str(tmp_path / "receipts.db"), keys=str(tmp_path), recover_s=0.001)


@pytest.fixture
def meter(config: MeterConfig) -> Iterator[Meter]:
    made = Meter(config, KEYS["gw-0"], trust(), Metrics.create("test"), name="gw-0", model="qwen3-32b")
    yield made
    made.close()


def lines(made: dict[Side, Receipt], *sides: Side) -> list[str]:
    return [encode(signed(made[side])).decode() for side in sides]


def now_us() -> int:
    return time.time_ns() // 1_000


def status(config: MeterConfig, name: str = "r-1") -> str | None:
    store = Store(config.store, create=False)
    try:
        found = store.entry(name)
        return None if found is None else found.status
    finally:
        store.close()


def test_all_sides_words_come_together(meter: Meter, config: MeterConfig) -> None:
    made = request()
    meter.say(made["gateway"])
    meter.heard(lines(made, "prefill", "decode", "decode"))
    meter.close()
    assert status(config) == "agreed"


def test_a_forged_receipt_is_counted_and_nowhere_kept(config: MeterConfig) -> None:
    made, metrics = request(), Metrics.create("test")
    meter = Meter(config, KEYS["gw-0"], trust(), metrics, name="gw-0", model="qwen3-32b")
    true = lines(made, "prefill")[0]
    meter.heard([true.replace('"computed":700', '"computed":701'), "{}", *lines(made, "gateway")])
    meter.close()
    assert metrics.registry.get_sample_value("regauge_receipts_refused_total") == 3
    assert status(config) is None


def test_what_a_killed_gateway_lost_is_made_again_from_the_workers(config: MeterConfig) -> None:
    made, at_us = request(at_us=now_us() - 60_000_000), now_us()
    meter = Meter(config, KEYS["gw-0"], trust(), Metrics.create("test"), name="gw-0", model="qwen3-32b")
    meter.heard(lines(made, "prefill", "decode"))
    meter.flush()
    assert status(config) == "missing"
    meter.look()
    meter.close()
    store = Store(config.store, create=False)
    try:
        entry = store.entry("r-1")
    finally:
        store.close()
    assert entry is not None
    assert (entry.status, entry.recovered, entry.charged) == ("agreed", True, (300, 700, 50))
    assert entry.at_us < at_us


def test_what_does_not_agree_is_shown(config: MeterConfig) -> None:
    metrics = Metrics.create("test")
    meter = Meter(config, KEYS["gw-0"], trust(), metrics, name="gw-0", model="qwen3-32b")
    made = request(at_us=now_us() - 60_000_000)
    meter.say(made["gateway"])
    meter.heard(lines(made | {"decode": replace(made["decode"], generated=49)}, "prefill", "decode"))
    meter.flush()
    meter.look()
    meter.close()
    assert metrics.registry.get_sample_value("regauge_receipts_troubled", {"status": "differs"}) == 1
    assert metrics.registry.get_sample_value("regauge_receipts_troubled", {"status": "missing"}) == 0


def test_a_store_that_stands_still_is_told_before_a_request_is_taken(config: MeterConfig) -> None:
    small = MeterConfig(store=config.store, keys=config.keys, queue=100)
    meter = Meter(small, KEYS["gw-0"], trust(), Metrics.create("test"), name="gw-0", model="qwen3-32b")
    Path(config.store).unlink()
    Path(config.store).mkdir()  # whatever breaks a store
    for number in range(120):
        meter.say(request(f"r-{number}")["gateway"])
    assert "receipts wait to be written" in meter.trouble
    for left in Path(config.store).iterdir():
        left.unlink()
    Path(config.store).rmdir()
    meter.close()
    assert status(config, "r-0") == "missing", "written once it could be"


@pytest.mark.anyio
async def test_tenants_are_told_of_their_own_use_alone(
    tokenizer: Tokenizer, tmp_path: Path, config: MeterConfig
) -> None:
    made = {name: new_key() for name in ("acme", "zeta")}
    text = "\n".join(f'[tenant.{name}]\nkeys = ["{digest}"]' for name, (_, digest) in made.items())
    (tmp_path / "tenants.toml").write_text(text)
    store = Store(config.store)
    for name, tenant in (("mine-0-0", "acme"), ("theirs-0-0", "zeta")):
        receipts = request(name, tenant=tenant, at_us=now_us() - 1_000_000)
        store.add([(signed(each), each.ended_us) for each in receipts.values()])
    store.close()
    assert used_this_month(config.store) == {"acme": 1_050, "zeta": 1_050}
    async with open_rig(tokenizer, tenants=Tenants.load(tmp_path / "tenants.toml"), meter=config) as rig:
        key = {"Authorization": f"Bearer {made['acme'][0]}"}
        async with rig.client.get(f"{rig.base}/v1/usage?by=total", headers=key) as answer:
            [row] = (await answer.json())["data"]
        assert (row["input_tokens"], row["input_cached_tokens"], row["output_tokens"]) == (1_000, 300, 50)
        for name, expected in (("mine", 200), ("theirs", 404), ("theirs-0-0", 404), ("min", 404)):
            async with rig.client.get(f"{rig.base}/v1/usage/{name}", headers=key) as answer:
                assert answer.status == expected, name
                assert "zeta" not in await answer.text()
        for query in ("by=week", "from=yesterday", "whose=zeta", "until=9999-01-01"):
            async with rig.client.get(f"{rig.base}/v1/usage?{query}", headers=key) as answer:
                assert (answer.status, (await answer.json())["error"]["param"]) == (400, query.partition("=")[0])
        assert (await rig.get("/v1/usage"))[0] == 401


@pytest.mark.anyio
async def test_where_nothing_is_metered_usage_says_so(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        status_, body, _ = await rig.get("/v1/usage")
        assert (status_, body["error"]["code"]) == (404, "not_metered")
        assert (await rig.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1}))[0] == 200
