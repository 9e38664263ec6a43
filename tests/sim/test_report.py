"""Reports of real plans: what is in the plan is in the text, tables are well formed, and what is not there is not invented."""

from __future__ import annotations

from decimal import Decimal
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.sim import report
from regauge.sim.answer import answer
from regauge.sim.ask import Ask, Pool, Slo
from regauge.sim.model import Interval, Point, exactly
from regauge.sim.money import of_plan
from regauge.sim.plan_result import ENDLESS, Plan
from regauge.sim.revenue import listed
from regauge.sim.workload import Lengths, of_lengths

KV = "fp8_e4m3,page=64"


@cache
def plan(servers: int, decode: int, rate: float = 8.0, *, changes: bool = True) -> Plan:
    load = of_lengths(Lengths(8_000), Lengths(300), rate, hit=0.5)
    points = (Point(8_000, 60_000.0),)
    return answer(
        Ask(
            "glm-4.5-air",
            Pool("h20", servers, kv=KV, nic="400g", nics=8),
            Pool("h200", decode, kv=KV),
            load,
            Slo(3.0, 0.05),
            points=points,
        ),
        changes=changes,
    )


def tables(text: str) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [t for t in found if t]


def cells(line: str) -> int:
    return line.replace(r"\|", "").count("|") - 1


def test_a_report_says_what_the_plan_says() -> None:
    found = plan(0, 0)
    text = report.plan(found, of_plan(found, listed()["glm-5.3"]), [("What binds", Path("x/binds.svg"))])
    assert found.fits
    assert f"{found.prefill.servers} prefill and {found.decode.servers} decode servers: meets what is asked" in text
    for need in (*found.prefill.needs, *found.decode.needs):
        assert need.why in text
    for change in found.what_if:
        assert f"| {change.change} |" in text
    for assumed in found.assumed:
        assert assumed.source in text
    assert "## Fit to the given rates" in text
    assert "![What binds](binds.svg)" in text
    assert "per million input tokens" in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n\n")


def test_a_plan_that_does_not_fit_says_so_and_what_would() -> None:
    found = plan(1, 1, 200.0, changes=False)
    text = report.plan(found)
    assert "**does not meet what is asked**" in text
    assert all(f"* {line}" in text for line in (*found.problems, *found.remedies))
    assert "## Money" not in text
    assert "## Pictures" not in text


def test_every_table_has_as_many_cells_in_each_line() -> None:
    found = plan(0, 0)
    text = report.plan(found, of_plan(found, listed()["glm-5.3"]))
    for lines in tables(text):
        assert len({cells(line) for line in lines}) == 1
        assert len(lines) > 2  # no empty ones


def test_figures_carry_source_range_and_currency() -> None:
    text = "\n".join(report.figures(plan(0, 0).ask.catalogue, ["h200"], "glm-4.5-air"))
    assert "1,500,000 (1,400,000 to 2,800,000) CNY" in text
    assert "| GLM-4.5-Air | total_b | 106 |" in text
    assert "| 400G Ethernet or InfiniBand | gbit_per_s | 400 |" in text


@pytest.mark.parametrize(
    ("found", "said"),
    [(exactly(3.0), "3.0"), (Interval(1.0, 2.0, 3.0), "2.0 (1.0 to 3.0)"), (Interval(2.96, 2.97, 2.98), "3.0")],
)
def test_an_interval_is_written_once_if_its_ends_read_alike(found: Interval, said: str) -> None:
    assert report.interval(found, ".1f") == said


def test_endless_times_are_words() -> None:
    assert report.seconds(exactly(ENDLESS), ".1f") == "endless"
    assert report.seconds(Interval(1.0, 2.0, ENDLESS), ".1f") == "2.0 (1.0 to endless)"
    assert report.seconds(Interval(1.0, ENDLESS, ENDLESS), ".1f") == "endless (1.0 to endless)"
    assert report.seconds(exactly(0.5), ".0f", 1e-3) == "500"


@given(st.lists(st.tuples(st.text(max_size=9), st.integers()), min_size=1, max_size=5))
@settings(max_examples=40)
def test_pipes_and_line_feeds_do_not_break_a_table(rows: list[tuple[str, int]]) -> None:
    lines = report.table(("what", "number"), rows)
    assert len(lines) == len(rows) + 2
    assert {cells(line) for line in lines} == {2}
    assert lines[1].endswith("--: |")


def test_thousands_are_rounded_to_the_nearest() -> None:
    assert report.thousands(Decimal("646427.4336")) == "646"
    assert report.thousands(Decimal("1989500.01")) == "1,990"
