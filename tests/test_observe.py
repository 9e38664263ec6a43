"""Metrics that cannot contradict each other, and log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from regauge import observe
from regauge.logs import plain
from regauge.observe import Metrics, get_logger, setup_logging


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_two_sets_of_metrics_in_one_process_know_nothing_of_each_other() -> None:
    one, other = Metrics.create("1"), Metrics.create("2")
    one.answered("/health", 200)
    assert sample(one, "regauge_requests_total", route="/health", status="200") == 1
    assert sample(other, "regauge_requests_total", route="/health", status="200") is None


def test_a_request_is_recorded_in_one_call() -> None:
    metrics = Metrics.create("1")
    tpot = metrics.finished(prompt_tokens=7, completion_tokens=5, ttft_s=0.2, seconds=1.0)
    assert tpot == pytest.approx(0.2)
    assert sample(metrics, "regauge_prompt_tokens_total") == 7
    assert sample(metrics, "regauge_completion_tokens_total") == 5
    assert sample(metrics, "regauge_time_to_first_token_seconds_sum") == 0.2
    assert sample(metrics, "regauge_time_per_output_token_seconds_sum") == pytest.approx(0.2)
    assert sample(metrics, "regauge_request_duration_seconds_sum") == 1.0


@pytest.mark.parametrize(("tokens", "ttft"), [(0, None), (1, 0.5)])
def test_there_is_no_time_per_token_without_a_second_token(tokens: int, ttft: float | None) -> None:
    metrics = Metrics.create("1")
    assert metrics.finished(prompt_tokens=1, completion_tokens=tokens, ttft_s=ttft, seconds=1.0) is None
    assert sample(metrics, "regauge_time_per_output_token_seconds_count") == 0
    assert sample(metrics, "regauge_time_to_first_token_seconds_count") == tokens


def test_a_transfer_is_recorded_in_one_call() -> None:
    metrics = Metrics.create("1")
    stages = {"grant_to_first_byte": 0.004, "first_byte_to_last": 0.006}
    metrics.transfer(path="CONVERT", mode="fused", wire_bytes=4096, seconds=0.01, spans=30, stages=stages)
    labels = {"path": "CONVERT", "mode": "fused"}
    assert sample(metrics, "regauge_transfer_bytes_sum", **labels) == 4096
    assert sample(metrics, "regauge_transfer_seconds_sum", **labels) == 0.01
    assert sample(metrics, "regauge_transfer_spans_sum", **labels) == 30
    assert sample(metrics, "regauge_transfer_stage_seconds_sum", path="CONVERT", stage="first_byte_to_last") == 0.006
    assert sample(metrics, "regauge_transfer_bytes_bucket", le="4096.0", **labels) == 1
    assert sample(metrics, "regauge_transfer_bytes_bucket", le="1024.0", **labels) == 0


def test_what_a_client_sends_makes_no_new_series() -> None:
    metrics = Metrics.create("1")
    for path in ("/secret/1", "/secret/2"):
        metrics.answered(path, 404)
        metrics.transfer(path=path, mode=path, wire_bytes=1, seconds=1)
    assert sample(metrics, "regauge_requests_total", route="other", status="404") == 2
    assert sample(metrics, "regauge_transfer_bytes_count", path="other", mode="other") == 2


def test_what_went_wrong_in_a_worker_adds_up_under_known_reasons() -> None:
    metrics = Metrics.create("1")
    for _ in range(2):
        metrics.worker_counted("d", "decode", {"resent": 3, "resumed": 4, "grants": 1}, {"lease": 2, "made up": 1})
    labels = {"worker": "d", "role": "decode"}
    failures = [sample(metrics, "regauge_transfer_failures_total", reason=r, **labels) for r in ("lease", "other")]
    assert failures == [4, 2]
    assert sample(metrics, "regauge_transfer_resent_chunks_total", **labels) == 6
    assert sample(metrics, "regauge_transfer_resumed_legs_total", **labels) == 8
    assert sample(metrics, "regauge_transfer_grants_total", **labels) == 2
    assert sample(metrics, "regauge_transfer_failures_total", reason="made up", **labels) is None


def test_a_request_that_does_not_say_how_long_it_waited_is_not_counted() -> None:
    metrics = Metrics.create("1")
    metrics.queued("prefill", 0.25)
    metrics.queued("prefill", None)
    assert sample(metrics, "regauge_queue_seconds_count", role="prefill") == 1
    assert sample(metrics, "regauge_queue_seconds_sum", role="prefill") == 0.25


def test_a_lost_worker_has_no_figures() -> None:
    metrics = Metrics.create("1")
    labels = {"worker": "d", "role": "decode"}
    metrics.worker_state("d", "decode", running=2, waiting=3, free_pages=4, pages=5, quarantined_pages=6)
    names = ["worker_up", "running_requests", "queue_depth", "pool_free_pages", "pool_pages", "pool_quarantined_pages"]
    assert [sample(metrics, f"regauge_{name}", **labels) for name in names] == [1, 2, 3, 4, 5, 6]
    metrics.worker_down("d", "decode")
    assert [sample(metrics, f"regauge_{name}", **labels) for name in names] == [0] * 6


def test_every_metric_of_ours_has_the_prefix_and_the_version_is_there() -> None:
    text, kind = Metrics.create("1.2.3").exposition()
    names = {line.split()[2] for line in text.decode().splitlines() if line.startswith("# TYPE")}
    assert {name for name in names if not name.startswith(("regauge_", "process_"))} == set()
    assert b'regauge_build_info{version="1.2.3"} 1.0' in text
    assert kind.startswith("text/plain")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_json_lines_hold_fields_worker_and_the_standard_librarys_records() -> None:
    out = io.StringIO()
    setup_logging("info", True, "decode-0", stream=out)
    log = get_logger(**{observe.REQUEST_ID: "r1"})
    log.info("request", **{observe.PATH: "REMAP"})
    log.debug("not shown")
    logging.getLogger("uvicorn.error").warning("port %d", 80)
    try:
        raise ValueError("inner")
    except ValueError:
        log.exception("failed")
    first, second, third = [json.loads(line) for line in out.getvalue().splitlines()]
    assert first.pop("timestamp").endswith("Z")
    assert first == {
        "event": "request",
        "level": "info",
        "worker": "decode-0",
        "request_id": "r1",
        "path": "REMAP",
    }
    assert (second["event"], second["level"], second["worker"]) == ("port 80", "warning", "decode-0")
    assert "ValueError: inner" in third["exception"]


def test_lines_for_people_have_no_colours_in_a_file() -> None:
    out = io.StringIO()
    setup_logging("INFO", False, "gateway", stream=out)
    get_logger(**{observe.STATUS: 200}).info("request")
    line = out.getvalue()
    assert "request" in line
    assert "status=200" in line
    assert "\x1b" not in line


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="LOUD"):
        setup_logging("loud", False, "w")


VALUES = st.one_of(
    st.text(max_size=12), st.integers(), st.none(), st.floats(), st.lists(st.text(max_size=3), max_size=2)
)
NAMES = st.sampled_from(["status", "path", "exc", "logger", "stack", "error", "worker"])


@given(st.text(max_size=40), st.dictionaries(NAMES, VALUES), st.sampled_from(["timestamp", "level", ""]))
def test_lines_for_people_are_structlogs_own(said: str, fields: dict[str, object], missing: str) -> None:
    fields = {"event": said, "level": "info", "timestamp": "2026-11-30T00:00:00Z", **fields}
    fields.pop(missing, None)
    if "stack" in fields:
        fields["stack"] = "a stack"
    whole = structlog.dev.ConsoleRenderer(colors=False)(None, "info", dict(fields))
    assert plain(None, "info", dict(fields)) == whole
