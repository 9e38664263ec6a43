"""`regauge sim` as a person types it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from regauge import cli_sim
from regauge.cli import main
from regauge.move.flow_types import POLICIES as CONTROLS
from regauge.route.policies import POLICIES as ROUTING
from regauge.sim.results import read

SMALL = ["--prefill", "mtt-s5000:3", "--decode", "h200:1", "--model", "glm-5.2", "--requests", "60", "--rate", "3"]
TRACE = '{"timestamp": %d, "input_length": 6000, "output_length": 40, "hash_ids": [1, 2, %d]}'


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(TRACE % (250 * i, 10 + i) for i in range(80)))
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["sim", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    return told.err


def test_a_trace_and_devices_are_enough(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--trace", trace, "--model", "glm-5.2", "--prefill", "mtt-s5000:12", "--decode", "h200:1"]) == 0
    told = capsys.readouterr()
    assert told.err == ""  # no terminal, no progress
    lines = told.out.splitlines()
    assert lines[0] == "simulated: 12 x mtt-s5000 to 1 x h200, glm-5.2; trace, 80 requests"
    words = {line.split()[0] for line in lines if line}
    assert {"TTFT,", "TPOT,", "goodput", "served", "prefix", "KV", "busy", "busiest", "not"} <= words
    assert "weights of 744 GB exceed" in told.out


def test_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *SMALL, "--seeds", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["note"] == "simulated"
    assert [run["seed"] for run in told["runs"]] == [1, 2, 3]
    assert told["scenario"]["prefill"]["servers"] == 3
    (case,) = told["pooled"]
    assert {"ttft_mean", "ttft_p99", "tpot_mean", "goodput", "hit", "nbytes", "prefill_busy", "decode_nics"} <= set(case["figures"])  # fmt: skip
    figure = case["figures"]["ttft_mean"]
    assert figure["low"] < figure["mean"] < figure["high"]
    assert figure["mean"] == pytest.approx(sum(run["summary"]["ttft"]["mean"] for run in told["runs"]) / 3)


def test_policies_are_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", *SMALL, "--policy", "all", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated: ")
    for policy in ("round-robin", "least-load", "prefix", "cache+load", "network-aware"):
        (row,) = (line for line in out.splitlines() if line.split()[:1] == [policy])
        assert row.count("±") == 7
    assert "mean of 2 seeds, and half of its 95 % interval" in out


def test_what_is_kept_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, line = tmp_path / "out", tmp_path / "line.json"
    assert main(["sim", *SMALL, "--policy", "prefix,least-load", "--out", str(out), "--perfetto", str(line)]) == 0
    told = capsys.readouterr().out
    written = sorted(path.name for path in out.iterdir())
    assert written == ["least-load-seed1.parquet", "prefix-seed1.parquet", "run.json", "time.png", "time.svg", "ttft.png", "ttft.svg"]  # fmt: skip
    assert all(f"wrote {out / name}" in told for name in written)
    report, logs = read(out)
    assert {len(log) for log in logs.values()} == {60}
    assert report["scenario"]["run"]["policies"] == ["prefix", "least-load"]
    assert json.loads(line.read_text())["traceEvents"]
    assert main(["sim", *SMALL, "--out", str(tmp_path / "csv"), "--csv"]) == 0
    assert sorted(path.suffix for path in (tmp_path / "csv").iterdir()) == [".csv", ".json"]


def test_a_window_without_requests_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = tmp_path / "line.json"
    assert main(["sim", *SMALL, "--perfetto", str(line), "--window", "90000:90001"]) == 0
    assert "line.json: not written, no request came in 90000 to 90001 s" in capsys.readouterr().out
    assert not line.exists()


def test_the_names_that_help_tells_are_all() -> None:
    assert set(cli_sim.POLICIES) == set(ROUTING)
    assert tuple(policy.name for policy in CONTROLS) == cli_sim.FLOWS


def test_a_terminal_has_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    assert main(["sim", *SMALL, "--seeds", "2"]) == 0
    told = screen.getvalue()
    assert "network-aware, seed 1" in told
    assert "s simulated" in told
    assert "/120" in told  # requests of both runs


def test_faults_are_read_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.toml").write_text('[[faults]]\nat = 1.0\nwhat = "dead"\nwho = "p0"\n')
    assert main(["sim", *SMALL, "--faults", str(tmp_path / "f.toml"), "--json"]) == 0
    busy = json.loads(capsys.readouterr().out)["runs"][0]["summary"]["busy"]
    assert busy["p0"] < 0.1 * busy["p1"]


def test_nobody_served_is_a_problem_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f.toml").write_text('[[faults]]\nat = 0.0\nwhat = "dead"\nwho = "d0"\n')
    assert main(["sim", *SMALL, "--faults", str(tmp_path / "f.toml")]) == 1
    assert "refused 54" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["artikel"], "artikel: cannot be read: No such file or directory; did you mean 'article'?"),
        (["--prefill", "h20o:2"], "prefill.device: no 'h20o' in the catalogue; did you mean 'h20'?"),
        (["--prefill", "h20:0"], "options: prefill.servers: expected `int` >= 1"),
        (["--prefill", "h20:-1"], "--prefill 'h20:-1': give DEVICE or DEVICE:SERVERS"),
        (["--model", "glm-5.22"], "'glm-5.22' is no folder with a config.json and no shipped model"),
        (["--decode", "h100:1"], "decode: weights of 744 GB leave no room for KV"),
        (["--rate", "-1"], "options: trace.rate: expected `float` > 0.0"),
        (["--scale", "nan"], "options: trace.scale: "),
        (["--ttft", "inf"], "options: slo.ttft_s: expected `float` <= "),
        (["--seeds", "0"], "options: run.seeds: expected `int` >= 1"),
        (["--policy", "pefix"], "--policy 'pefix': no such name; did you mean 'prefix'?"),
        (["--policy", ","], "--policy: give all, or some of round-robin"),
        (["--flow", "none"], "--flow 'none': no such name; known: credit, uncontrolled, peer-fifo, fair-share"),
        (["--flow", "all", "--transfers", "fluid"], "run.flows: flow control is compared at network.transfers = \"flow\""),
        (["--trace", "gone.jsonl"], "gone.jsonl: No such file or directory"),
        (["--window", "3:4"], "--window: is of the time line; give --perfetto FILE, too"),
        (["--perfetto", "x.json", "--window", "4:3"], "--window '4:3': begins at 0 or later"),
        (["--perfetto", "x.json", "--window", "4"], "--window '4': give FROM:TO in seconds"),
        (["--perfetto", "/no/such/x.json"], "--perfetto /no/such/x.json: no such folder"),
        (["--scale", "2"], "options: trace.scale: is of a trace that is read; give trace.file (--trace), too"),
        (["--csv"], "--csv: is the form of the tables; give --out DIR, too"),
        (["--catalogue", "gone.toml"], "gone.toml: cannot be read"),
        (["--faults", "gone.toml"], "gone.toml: No such file"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_before_anything_runs(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in refused(capsys, *words)


def test_without_the_extra_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    monkeypatch.setattr("regauge.cli_sim.find_spec", lambda _: None)
    assert "--out needs pyarrow: pip install 'regauge[plan]', or give --csv" in refused(capsys, "--out", str(tmp_path / "o"))  # fmt: skip
    (tmp_path / "file").write_text("")
    assert "File exists" in refused(capsys, "--out", str(tmp_path / "file"), "--csv")
