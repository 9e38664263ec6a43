"""`regauge plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regauge.cli import main

FITS = ("plan", "--model", "glm-5.2", "--prefill", "mtt-s5000,weights=4.5", "--decode", "h200", "--input-tokens", "12000:60000",
        "--output-tokens", "340", "--rate", "10", "--hit", "0.37", "--ttft", "3", "--tpot", "0.05")  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_plan_is_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, *FITS, "--no-what-if", "--markdown", str(tmp_path / "plan.md"), "--simulate", "300")
    assert code == 0
    assert out.startswith("glm-5.2: ")
    assert "fits   modelled, not measured" in out
    for section in (
        "Servers",
        "What binds",
        "Memory of an instance",
        "Times",
        "Network",
        "Money",
        "Assumed",
        "SIMULATED: 270 requests",
    ):
        assert section in out
    assert (tmp_path / "plan.md").read_text().startswith("# Plan: glm-5.2")


def test_json_has_intervals_and_no_endless_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *FITS, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fits"] is found["modelled"] is True
    low, value, high = found["ttft"]["p90"]
    assert low < value <= 3.0
    assert high is None  # at the pessimistic end the queue grows without end
    assert found["ask"]["prefill"]["weight_bits"] == 4.5
    assert found["prefill"]["binds"] == "TTFT"
    assert len(found["what_if"]) >= 10


def test_servers_that_are_too_few_are_told_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "plan", "--model", "glm-5.2", "--prefill", "mtt-s5000:12,weights=4.5", "--decode", "h200:1", "--input-tokens", "65536",
        "--output-tokens", "440", "--rate", "15", "--hit", "0.9", "--ttft", "3", "--tpot", "0.05", "--no-what-if",
    )  # fmt: skip
    assert code == 1
    assert "does not fit" in out
    assert "decode: memory capacity asks for 4 servers of NVIDIA H200 SXM in instances of 1, 1 are there" in out
    assert "would help: 5 prefill and 2 decode servers, in instances of 1 and 2" in out
    assert "prefill has room" in out


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (("--prefill", "mtt-s5000:1"), 1, "refused: prefill: glm-5.2 does not fit 1 x 8 x MTT S5000: 744 GB of weights at 8 bits"),
        (("--prefill", "mtt-s50"), 2, "prefill.device: no 'mtt-s50' in the catalogue; did you mean 'mtt-s5000'?"),
        (("--rate", "-1"), 2, "rate -1: give requests per second, more than 0"),
        (("--rate", "nan"), 2, "rate nan: give"),
        (("--hit", "1.5"), 2, "hit 1.5: give the cached share"),
        (("--input-tokens", "0"), 2, "--input-tokens 0: tokens 0: give a mean from 1"),
        (("--ttft", "-2"), 2, "slo: TTFT -2 s"),
        (("--share", "2"), 2, "slo.share 2"),
        (("--switch", "128x40g"), 2, "switch: no '128x40g' in the catalogue; did you mean"),
        (("--model", "glm-9"), 2, "glm-9"),
        (("--trace", "no.jsonl"), 2, "give --trace, or --input-tokens and --output-tokens, not both"),
        (("--catalogue", "none.toml"), 2, "none.toml: cannot be read"),
        (("--fit", "65536:95920.5"), 1, "95920.5 tokens/s at 65536 tokens ask for 127% of the peak rate of 8 x MTT S5000"),
        (("--kv", "fp7"), 2, "fp7"),
        (("--price", "glm-5.9"), 2, "--price: no 'glm-5.9' in list prices; did you mean 'glm-5"),
        (("--plot", "x.pdf"), 2, "--plot x.pdf: name a .png or .svg file"),
        (("--markdown", "/nowhere/at/all.md"), 2, "--markdown /nowhere/at/all.md: No such file"),
        (("--simulate", "3"), 2, "--simulate 3: give 100 to"),
        (("--parameters", "10:20"), 2, "--parameters 10:20: give TOTAL:ACTIVE"),
        (("--rate", "1e12"), 1, "requests/s keep"),
        (("--cache-tokens", "5"), 2, "--format and --cache-tokens are of a trace: give --trace FILE"),
        (("--prefill", "gaudi-3"), 2, "prefill.nic: the catalogue does not say which NIC Intel Gaudi 3 has: give nic=NAME in --prefill"),
        (("--prefill", "gaudi-3,nic=400g"), 2, "prefill.nics: the catalogue does not say how many NICs a server of Intel Gaudi 3 has: give nics=N in --prefill"),
        (("--decode", "l20"), 2, "decode.cards: the catalogue does not say how many NVIDIA L20 a server has: give cards=N in --decode"),
        (("--prefill", "mtt-s5000:2,span=3"), 2, "prefill.span 3: an instance cannot span more servers than the 2 given"),
        (("--prefill", "mtt-s5000,weights=4.5,overhead=0.5", "--fit", "65536:95920.5:0.9"), 2, "points: rates fix one constant"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str], change: tuple[str, ...], code: int, message: str
) -> None:
    found, _, err = run(capsys, *FITS, "--no-what-if", *change)
    assert found == code
    assert message in err


def test_what_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "--model", "glm-5.2", "--prefill", "h200")
    assert code == 2
    assert "give --decode, --ttft, --tpot, and a workload" in err
    code, _, err = run(capsys, "plan", *FITS[1:7], "--ttft", "1", "--tpot", "1")
    assert code == 2
    assert "a workload: give --trace FILE" in err


def test_options_that_would_be_passed_over_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "plan", "article", "--model", "glm-5.2", "--rate", "3")
    assert (code, "plan article: takes no --model, --rate" in err) == (2, True)
    code, _, err = run(capsys, "plan", "devices", "--markdown", "x.md")
    assert (code, "plan devices: takes no --markdown" in err) == (2, True)


def test_a_broken_trace_is_refused_by_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'
    path.write_text(f"{good}\n{good[:-9]}\n")
    code, _, err = run(capsys, *FITS[:7], "--trace", str(path), "--ttft", "3", "--tpot", "0.05")
    assert code == 2
    assert "t.jsonl, line 2: " in err


def test_the_catalogue_is_listed_with_its_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "devices")
    assert code == 0
    assert "mtt-s5000" in out
    assert "press on the launch" in out
    code, out, _ = run(capsys, "plan", "devices", "--json")
    assert json.loads(out)["accelerators"]["h200"]["memory_gb"]["value"] == 141


def test_a_catalogue_and_curves_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("tokens,seconds\n1000,0.1\n100000,10.1\n")
    (tmp_path / "d.csv").write_text("tokens,seconds\n1000,0.02\n1000000,0.03\n")
    figure = '{ value = %s, source = "measured", date = "2026-11" }'
    (tmp_path / "mine.toml").write_text(
        f'[accelerators.mine]\nname = "Mine"\nnic = "400g"\nfp8_tflops = {figure % 1}\nmemory_gb = {figure % 141}\n'
        f"memory_gb_per_s = {figure % 1}\ncards = {figure % 8}\nnics = {figure % 8}\nprefill_csv = 'p.csv'\ndecode_csv = 'd.csv'\n"
    )
    code, out, _ = run(
        capsys, "plan", "--model", "glm-5.2", "--prefill", "mine", "--decode", "mine", "--catalogue", str(tmp_path / "mine.toml"),
        "--input-tokens", "10000", "--output-tokens", "100", "--rate", "4", "--ttft", "5", "--tpot", "0.05", "--json", "--no-what-if",
    )  # fmt: skip
    found = json.loads(out)
    assert code == 0
    # Measured: 10,000 tokens take what the line says beyond 0, and the fixed part once.
    busy = {need["what"]: need["exact"] for need in found["prefill"]["needs"]}["compute"]
    assert busy == pytest.approx(4 * (0.1 + 9000 * 10 / 99_000), rel=0.01)
    assert found["tpot"]["p50"][1] == pytest.approx(0.0209, rel=0.02)


def test_the_published_deployment_is_questioned(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "article")
    assert code == 0
    assert "646,427 CNY" in out
    assert "asks for 127% of the peak rate" in out
    assert "12 + 1" in out
