"""`regauge bench engine`, with the embedded engine, with a running `regauge serve`, and with nonsense."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from regauge.cli import main
from regauge.sim import devices
from regauge.testing.tiny_models import tiny_model

SMALL = ["--prompts", "16,64", "--batches", "1,2", "--contexts", "8,32", "--rounds", "2", "--steps", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tiny-llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from regauge.serve.ports import free_ports

    [port] = free_ports("127.0.0.1")
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "regauge", "serve", "--port", str(port), "--model", str(model)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        end = time.monotonic() + 200
        while b"\nready " not in log.read_bytes():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _catalogue(folder: Path) -> devices.Curves:
    figure = '{ value = 10, source = "test", date = "2026" }'
    lines = ["[accelerators.mine]", 'name = "mine"', f"memory_gb = {figure}", f"memory_gb_per_s = {figure}"]
    lines += ['prefill_csv = "mine-prefill.csv"', 'decode_csv = "mine-decode.csv"']
    (folder / "mine.toml").write_text("\n".join(lines))
    return devices.curves(devices.load([folder / "mine.toml"]).accelerators["mine"])


def test_the_embedded_engines_curves_are_what_the_catalogue_takes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "--model",
        str(model),
        "--layout",
        "fp8_e4m3,page=16,hnd",
        "--threads",
        "1",
        "--out",
        str(tmp_path / "mine"),
    ]
    assert main(["bench", "engine", *given, *SMALL]) == 0
    out, progress = capsys.readouterr()
    assert "resident tokens" in out
    assert "it misses those with context 8" in out
    assert "measured 18 of 18" in progress
    curves = _catalogue(tmp_path)
    assert curves.prefill is not None
    assert curves.decode is not None
    assert [tokens for tokens, _ in curves.prefill.points] == [16, 64]
    assert [tokens for tokens, _ in curves.decode.points] == [
        35,
        70,
    ]  # context 32, the token it begins with, half of the steps


def test_what_part_of_a_peak_that_is(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(model), "--device", "h100", "--active-b", "0.001", "--cards", "2", "--json"]
    assert main(["bench", "engine", *given, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["prefill"]) == 2
    assert len(found["decode"]) == 4
    assert all(len(point["samples"]) == 2 for point in found["prefill"] + found["decode"])
    efficiency = found["efficiency"]
    assert 0 < efficiency["fitted"]["value"] < 1e-3
    assert efficiency["peak"] == pytest.approx(2 * 989e12, rel=0.01)


@pytest.mark.process
def test_a_real_server_is_measured_over_its_api(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--url", f"{url}/v1", "--ids", "10-500", "--out", str(tmp_path / "mine"), "--json"]
    assert main(["bench", "engine", *given, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["tokens"] for point in found["prefill"]] == [16, 64]
    assert all(point["seconds"] > 0 for point in found["prefill"] + found["decode"])
    assert all(point["tokens"] > point["batch"] * point["context"] for point in found["decode"])
    curves = _catalogue(tmp_path)
    assert curves.prefill is not None
    with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:  # noqa: S310  # our own
        assert json.load(answer)["status"] == "ready"  # what was cancelled harmed nobody


@pytest.mark.process
def test_a_model_that_is_not_there_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--url", url, "--model", "llama", *SMALL]) == 2
    assert f"'llama': {url} has tiny-llama" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--prompts", "64,16"], "prompts: give them ascending"),
        (["--prompts=-5,16"], "from 1 to 4,194,304"),
        (["--rounds", "0"], "rounds: give a number from 1"),
        (["--url", "127.0.0.1:80"], "give an address as http://"),
        (["--url", "http://h", "--threads", "2"], "--threads: is the embedded engine's"),
        (["--url", "http://h", "--layout", "x"], "--layout: is the embedded engine's"),
        (["--ids", "1-5"], "--ids: needs --url"),
        (["--url", "http://h", "--ids", "9-5"], "the first token id and the end"),
        (["--url", "http://h", "--answer", "0"], "--answer 0: give a number from 1"),
        (["--url", "http://h", "--key-file", "/nowhere/key"], "--key-file /nowhere/key: cannot be read"),
        (["--threads", "0"], "--threads 0: give a number from 1"),
        (["--out", "/nowhere/curve"], "no folder /nowhere"),
        (["--device", "h1000"], "--device: no 'h1000' in the catalogue; did you mean 'h100'"),
        (["--device", "h100"], "--active-b: the catalogue does not have 'smollm2-135m-instruct'"),
        (["--device", "ascend-910b", "--peak", "fp8", "--active-b", "1"], "--peak fp8: the catalogue has no such rate"),
    ],
)
def test_nonsense_is_refused_before_anything_is_measured(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "engine", *given]) == 2
    assert words in capsys.readouterr().err


def test_numbers_are_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "engine", "--prompts", "a,b"])
    assert "'a,b': give whole numbers with commas" in capsys.readouterr().err


def test_more_than_the_models_context_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--model", str(model), "--prompts", "16,9000"]) == 2
    assert "the model's context is 4096" in capsys.readouterr().err


def test_a_layout_with_too_few_pages_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    capsys.readouterr()
    assert main(["layout", "bf16,page=16,nhd", "--model", str(model), "--pages", "4"]) == 0
    (tmp_path / "small.toml").write_text(capsys.readouterr().out)
    assert main(["bench", "engine", "--model", str(model), "--layout", str(tmp_path / "small.toml"), *SMALL]) == 2
    assert "has 4 pages of 16 tokens" in capsys.readouterr().err
