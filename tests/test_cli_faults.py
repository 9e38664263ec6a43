"""`regauge bench faults`."""

from __future__ import annotations

import json

import pytest

from regauge import cli
from regauge.move.receiver import Receiver


def test_bench_faults_says_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "faults", "--steps", "3000", "--seed", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] >= 3000
    assert result["violations"] == 0
    assert result["what happened"]["delivered on decode"] > 0
    assert sum(result["faults of each kind"].values()) == result["faults"] > 0


def test_an_exhaustive_search_stops_at_a_number_of_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "faults", "--exhaustive", "--states", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.pop("violations") == 0
    assert len(result) == 17
    assert all((found["states"], found["every state seen"]) == (20, 0) for found in result.values())


def test_bench_faults_ends_with_1_and_the_seed_on_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Receiver, "tick", lambda *_: [])
    monkeypatch.setattr(Receiver, "cancel", lambda *_: [])
    assert cli.main(["bench", "faults", "--steps", "50000", "--seed", "3"]) == 1
    assert "VIOLATION: seed 3, world" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--steps", "0"], "give at least 1"),
        (["--steps", "5", "--exhaustive"], "give one of them"),
        (["--states", "0", "--exhaustive"], "give at least 1"),
        (["--states", "9"], "with --exhaustive"),
    ],
)
def test_bench_faults_names_bad_options(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "faults", *options]) == 2
    assert complaint in capsys.readouterr().err
