"""docs/metrics.md lists every metric with its type and labels, and no other; dashboard and alarms ask for those alone."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from regauge.observe import Metrics

ROOT = Path(__file__).parent.parent
DASHBOARD, ALARMS = ROOT / "deploy/grafana/regauge.json", ROOT / "deploy/prometheus/alerts.yml"
NAME = re.compile(r"\b(?:regauge|process)_\w+")


def ours(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every metric of ours: its name as it is scraped, type, labels."""
    found = {}
    for each in registry._collector_to_names:
        if isinstance(each, MetricWrapperBase):
            name = each._name + ("_total" if each._type == "counter" else "")
            found[name] = (each._type, tuple(each._labelnames))
    return found


@pytest.fixture(scope="module")
def metrics() -> dict[str, tuple[str, tuple[str, ...]]]:
    return ours(Metrics.create("0").registry)


def test_the_page_lists_what_there_is(metrics: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    rows = re.findall(
        r"^\| `(regauge_\w+)` \| (\w+) \|([^|]*)\| .+ \|$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    listed = {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert listed == metrics
    assert len(rows) == len(listed)


def series(metrics: dict[str, tuple[str, tuple[str, ...]]]) -> set[str]:
    """Names that a scrape has: of a histogram, three."""
    made = {
        f"{name}_{end}"
        for name, (kind, _) in metrics.items()
        if kind == "histogram"
        for end in ("bucket", "sum", "count")
    }
    return made | {name for name, (kind, _) in metrics.items() if kind != "histogram"}


def test_the_dashboard_and_the_alarms_ask_for_what_there_is(metrics: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    for file in (DASHBOARD, ALARMS):
        asked = set(NAME.findall(file.read_text())) - {"process_cpu_seconds_total", "process_resident_memory_bytes"}
        assert asked
        assert asked <= series(metrics), file


def test_every_metric_is_shown_or_watched(metrics: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    text = DASHBOARD.read_text() + ALARMS.read_text()
    assert [name for name in metrics if name not in text] == []


def test_rates_on_the_dashboard_are_of_counters(metrics: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """A rate of a gauge is one that nobody recorded."""
    counters = {name for name in series(metrics) if metrics.get(name, ("counter",))[0] == "counter"}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    for expression in expressions:
        for name in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert name in counters, expression


def test_each_alarm_names_a_heading_of_the_runbook() -> None:
    page = (ROOT / "docs/operate.md").read_text()
    anchors = {
        re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }
    links = re.findall(r"runbook_url: .*docs/operate\.md#([\w-]+)", ALARMS.read_text())
    assert links
    assert set(links) <= anchors
