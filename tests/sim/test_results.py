"""Runs on disk come back as they were; what was not written by us is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_logs import DONE, LATE, NO_ROOM, log, random_log, result

from regauge.errors import ConfigError
from regauge.sim import results
from regauge.sim.log import COLUMNS, Log
from regauge.sim.results import Form, Report, Run, load, read, save, slug, versions, write
from regauge.sim.scenario import Scenario
from regauge.sim.summary import pooled, summarize


def same(one: Log, other: Log) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in COLUMNS]
    return all(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype == float) for a, b in pairs)


@given(seed=st.integers(0, 100), count=st.integers(0, 30), form=st.sampled_from(["csv", "parquet"]))
def test_a_log_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, seed: int, count: int, form: str) -> None:
    path = tmp_path_factory.mktemp("run") / f"log.{form}"
    made = random_log(seed, count)
    write(path, made)
    assert same(load(path), made)


def report() -> Report:
    summary = summarize(result(log(DONE, LATE, NO_ROOM)), 5.0, 0.2)
    runs = [Run("cache+load, credit", seed, summary, {"placed": 2}) for seed in (1, 2)]
    trace = {"name": "t", "requests": 3, "block": 512}
    return Report(Scenario(), runs, [pooled("cache+load, credit", [summary] * 2)], trace, versions(), [])


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_report_and_its_runs_come_back(tmp_path: Path, form: Form) -> None:
    logs = {("cache+load, credit", 1): log(DONE), ("cache+load, credit", 2): log(LATE, NO_ROOM)}
    written = save(tmp_path / "new" / "out", report(), logs, form)
    assert [path.name for path in written] == [*(f"cache-load-credit-seed{i}.{form}" for i in (1, 2)), "run.json"]
    told, tables = read(tmp_path / "new" / "out")
    assert told["note"] == "simulated"
    assert told["scenario"]["prefill"]["device"] == "mtt-s5000"
    assert told["versions"].keys() == {"regauge", "python", "numpy"}
    assert told["runs"][0]["summary"]["outcomes"]["complete"] == 2
    assert tables.keys() == logs.keys()
    assert all(same(tables[key], logs[key]) for key in logs)


def test_numbers_that_are_not_finite_are_null() -> None:
    told = json.loads(results.encode(report()))
    empty = json.loads(
        results.encode(Report(Scenario(), [Run("x", 1, summarize(result(log()), 1.0, 1.0), {})], [], {}, {}, []))
    )
    assert told["pooled"][0]["figures"]["hit"]["seeds"] == 2
    assert empty["runs"][0]["summary"]["ttft"]["mean"] is None


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", "at,prompt\n1,2\n", r"x\.csv:1: not the columns of a run: at, prompt, cached"),
        ("x.csv", ",".join(COLUMNS) + "\n1,2\n", r"x\.csv:2: .*shorter"),
        ("x.csv", ",".join(COLUMNS) + "\n" + "1.0," * 14 + "0\n", r"x\.csv:2: invalid literal"),
        ("x.csv", ",".join(COLUMNS) + "\n1.0,1,1,1,0,0,,,,,,1.0,0.0,1,300\n", r"x\.csv:2: outcome 300 is not from 0 to 255"),
        ("x.parquet", "nonsense", r"x\.parquet: not a table of a run"),
    ],
)  # fmt: skip
def test_a_table_that_is_none_is_refused(tmp_path: Path, name: str, content: str, told: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=told):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "told"),
    [("{", "not written by `regauge sim`"), ("[]", "not written by"), ('{"version": 9, "runs": []}', "form 9, this regauge reads 1"),
     ('{"version": 1, "runs": [{"case": "a", "seed": 1, "table": "../gone.csv"}]}', r"gone\.csv: cannot be read: No such file")],
)  # fmt: skip
def test_a_report_that_is_none_is_refused(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=told):
        read(tmp_path)


def test_folders_and_endings_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file: cannot be written"):
        save(tmp_path / "file", report(), {}, "csv")
    with pytest.raises(ConfigError, match=r"end it in \.parquet or \.csv"):
        write(tmp_path / "log.xlsx", log(DONE))
    with pytest.raises(ConfigError, match=r"name a folder of --out"):
        read(tmp_path / "nowhere")


def test_without_pyarrow_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'regauge\[plan\]', or write CSV"):
        write(tmp_path / "log.parquet", log(DONE))


def test_names_of_files() -> None:
    assert slug("network-aware, peer-fifo") == "network-aware-peer-fifo"
    assert slug("../+") == "run"
