"""Prometheus' own tools on what we ship and on what we say: rules, their tests, a real scrape, every expression of the dashboard.

Run by `make test-promtool`.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from deployment import READY_S, Served, launch, ready
from deployment import until as settled
from scraped import Prometheus, get, load, until

pytestmark = pytest.mark.timeout(600)
DEPLOY = Path(__file__).parents[2] / "deploy"
REQUESTS = 8
SILENT = {"Failures", "Clients' faults", "Spans lost", "Compute plane, load of each interface"}
"""Panels without data where nothing fails, and of loopback, which has no line rate."""
RARE = {"sum by (status) (regauge_receipts_troubled)"}
"""Of a deployment that meters."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ("transfer.transport=tcp", "planes.compute=127.0.0.1")
    found = launch(tmp_path_factory.mktemp("served"), *(word for each in settings for word in ("--set", each)))

    async def wait() -> None:
        async with aiohttp.ClientSession() as session:
            await settled(lambda: ready(session, found), READY_S, "a ready endpoint")

    try:
        asyncio.run(wait())
        yield found
    finally:
        found.process.send_signal(signal.SIGTERM)
        found.process.wait(60)


@pytest.fixture(scope="module")
def scraped(served: Served, prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen the deployment before, during and after some requests."""
    found = Prometheus.start(prometheus, tmp_path_factory.mktemp("prometheus"), served.url.removeprefix("http://"))
    try:
        until(lambda: found.query("regauge_worker_up"), "a scrape")
        load(served, REQUESTS)
        until(lambda: found.value('regauge_answers_total{outcome="complete"}') == REQUESTS, "a scrape of all answers")
        seen = found.value("count_over_time(up[1h])")
        until(lambda: found.value("count_over_time(up[1h])") > seen, "another scrape")
        yield found
    finally:
        found.stop()


def run(*command: str, data: bytes = b"") -> str:
    done = subprocess.run(command, input=data, capture_output=True, timeout=120, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def test_the_rules_are_rules_and_ring_for_what_they_are_for(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "check", "rules", str(DEPLOY / "prometheus/alerts.yml"))
    assert "SUCCESS" in run(promtool, "test", "rules", str(DEPLOY / "prometheus/alerts_test.yml"))


def test_a_real_scrape_is_as_prometheus_wants_metrics(promtool: str, served: Served, scraped: Prometheus) -> None:
    assert run(promtool, "check", "metrics", data=get(f"{served.url}/metrics")) == ""


def expressions() -> list[tuple[str, str]]:
    panels = json.loads((DEPLOY / "grafana/regauge.json").read_text())["panels"]
    return [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_an_expression_of_the_dashboard_has_data_where_there_must_be_some(
    scraped: Prometheus, title: str, expression: str
) -> None:
    found = scraped.query(expression.replace("$__rate_interval", "5m"))
    assert found or title in SILENT or expression in RARE
    if "histogram_quantile" in expression or "regauge_transfer_stage" in expression:
        assert all(math.isfinite(float(each["value"][1])) for each in found)


def test_every_alarm_is_evaluated_and_none_rings_where_all_is_well(scraped: Prometheus) -> None:
    rules = until(
        lambda: (found := scraped.rules()) and all(rule["health"] == "ok" for rule in found) and found, "evaluation"
    )
    assert len(rules) >= 13
    assert {rule["name"]: rule["state"] for rule in rules if rule["state"] == "firing"} == {}


def test_what_prometheus_has_is_what_the_gateway_says(served: Served, scraped: Prometheus) -> None:
    """Bytes that landed are those of the transfers that were delivered, and their stages are their seconds."""
    landed = scraped.value("sum(regauge_kv_landed_bytes_total)")
    assert landed == scraped.value("sum(regauge_transfer_bytes_sum)") > 0
    stages = (
        'sum(regauge_transfer_stage_seconds_sum{stage=~"grant_to_first_byte|first_byte_to_last|last_byte_to_commit"})'
    )
    assert scraped.value(stages) == pytest.approx(scraped.value("sum(regauge_transfer_seconds_sum)"))
    assert scraped.value("sum(regauge_transfer_grants_total)") == REQUESTS
    carried = 'regauge_plane_bytes_total{plane="compute", direction="received"}'
    assert scraped.value(f"sum({carried})") >= landed
    assert scraped.value("sum(regauge_off_plane_bytes)") == 0
