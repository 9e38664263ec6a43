"""Pictures: the same bytes for the same runs, and what they must say is written in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sim_logs import DONE, NO_ROOM, log, random_log

from regauge.errors import ConfigError
from regauge.sim.charts import MOST_LINES, Limits, over_time, ttft_by_case

LIMITS = Limits(1e5, 4e9, 1_000_000)


def words(path: Path) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_same_runs_give_the_same_bytes(tmp_path: Path, ending: str) -> None:
    logs = {"one": random_log(1, 50), "two": random_log(2, 50)}
    for name in ("a", "b"):
        ttft_by_case(tmp_path / f"ttft-{name}.{ending}", logs, subject="test", slo_s=3.0)
        over_time(tmp_path / f"time-{name}.{ending}", logs["one"], subject="test", limits=LIMITS)
    for kind in ("ttft", "time"):
        first, again = ((tmp_path / f"{kind}-{name}.{ending}").read_bytes() for name in ("a", "b"))
        assert first == again
        assert b"<dc:date>" not in first
    ttft_by_case(tmp_path / f"other.{ending}", {"one": random_log(3, 50)}, subject="test")
    assert (tmp_path / f"other.{ending}").read_bytes() != (tmp_path / f"ttft-a.{ending}").read_bytes()


def test_titles_axes_and_cases_are_named(tmp_path: Path) -> None:
    ttft_by_case(tmp_path / "ttft.svg", {"prefix": log(DONE, NO_ROOM)}, subject="12 to 1", slo_s=3.0)
    told = words(tmp_path / "ttft.svg")
    for word in ("Simulated: 12 to 1", "seconds", "part of all requests", "prefix", "SLO 3 s"):
        assert word in told
    over_time(tmp_path / "time.svg", random_log(1, 40), subject="12 to 1", limits=LIMITS)
    told = words(tmp_path / "time.svg")
    for word in (
        "Simulated: 12 to 1",
        "KV into decode, GB/s",
        "KV in decode, GB",
        "simulated time, seconds",
        "all NICs: 4 GB/s",
    ):
        assert word in told


def test_a_long_tail_is_cut_and_owned_up_to(tmp_path: Path) -> None:
    last = (90_000.0, *DONE[1:6], *(90_000.0 + each for each in DONE[6:12]), *DONE[12:])
    rows = [*([DONE] * 50), last]
    over_time(tmp_path / "x.svg", log(*rows), subject="agents", limits=LIMITS)
    assert "until 95% of the requests are over" in words(tmp_path / "x.svg")


def test_cases_that_do_not_fit_are_owned_up_to(tmp_path: Path) -> None:
    ttft_by_case(tmp_path / "x.svg", {f"case {i}": random_log(i, 9) for i in range(MOST_LINES + 3)}, subject="many")
    assert "3 more cases not shown" in words(tmp_path / "x.svg")


def test_runs_in_which_nothing_happened_are_drawn(tmp_path: Path) -> None:
    for name, logged in (("none", log()), ("refused", log(NO_ROOM))):
        ttft_by_case(tmp_path / f"{name}.svg", {"case": logged}, subject="nothing")
        over_time(tmp_path / f"{name}-time.svg", logged, subject="nothing", limits=LIMITS)
        assert "Simulated: nothing" in words(tmp_path / f"{name}-time.svg")


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"x\.pdf: end it in \.png or \.svg"):
        ttft_by_case(tmp_path / "x.pdf", {}, subject="")
    with pytest.raises(ConfigError, match=r"x\.svg: cannot be written: No such file"):
        ttft_by_case(tmp_path / "no" / "x.svg", {}, subject="")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'regauge\[plan\]'"):
        over_time(tmp_path / "x.svg", log(), subject="", limits=LIMITS)
