"""`regauge probe` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from probe_engine import dump
from regauge.cli import main
from regauge.layout import files
from regauge.layout.presets import from_short
from regauge.layout.probe.known import load


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["probe", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.model
def test_local_is_verified_and_a_wrong_declaration_named(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--engine", "local", "--layers", "0,29", "--layout", "bf16,page=4,hnd", "--pages", "4")
    code, out, _ = run(capsys, *small)
    assert code == 0
    assert out.splitlines() == [
        "verified: 8,448 elements compared in 4 rounds",
        "  covered: attention of layers 0,29, 11 tokens in pages 3, 0, 1",
    ]
    code, out, _ = run(capsys, *small, "--declared", "bf16,page=4,nhd")
    assert code == 1
    assert out.startswith("NOT as declared: ")
    assert "k, layer 0, token 0, head 1, dim 0: expected at byte 0x" in out
    code, out, _ = run(capsys, *small, "--declared", "bf16,page=4,nhd", "--json")
    assert (code, json.loads(out)["first"]["array"]) == (1, "k")


def test_a_pattern_is_written_and_the_dump_of_its_pages_searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pattern = tmp_path / "pattern.npz"
    options = ("--dtype", "fp8", "--page-size", "4", "--pages", "6", "--layers", "0-2", "--page-table", "4,2,5")
    code, out, _ = run(capsys, "--write-pattern", str(pattern), *options)
    assert code == 0
    assert "0.k  float32 [3, 11, 3, 64]: layers, tokens, heads, dim" in out
    assert "0.pages  [4, 2, 5]" in out
    known = load(pattern)
    true = from_short("fp8,page=4,hnd,fused", known.layout.model, pages=6)
    for name, data in dump(known, true).items():
        data.tofile(tmp_path / f"{name}.bin")
    for numbers in (("--pattern", str(pattern)), options):  # from the file, or made anew
        code, out, _ = run(capsys, "--dump", str(tmp_path / "kv.bin"), *numbers)
        assert code == 0
        first, rest = out.split("\n", 1)
        assert first == "# explained by float8_e4m3fn,page=4,hnd,fused,layer-first,scale=none"
        found = files.decode(rest.encode(), format="toml")
        assert found.groups[0].components == true.groups[0].components
    np.zeros(5000, np.uint8).tofile(tmp_path / "empty.bin")
    arguments = ("--dump", f"kv={tmp_path / 'empty.bin'}", "--pattern", str(pattern), "--search-dtype", "fp8")
    code, out, _ = run(capsys, *arguments)
    assert (code, out.splitlines()[0]) == (1, "no known packing explains the dump")
    assert "measured: k: no trace in any dtype" in out
    code, out, _ = run(capsys, *arguments, "--json")
    assert (code, json.loads(out)["hits"]) == (1, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of --engine, --write-pattern and --dump"),
        (("--engine", "local", "--dump", "x"), "give one of"),
        (("--write-pattern", "x", "--pages", "0"), "--pages 0"),
        (("--write-pattern", "x", "--page-table", "1,b"), "give page numbers"),
        (("--write-pattern", "x", "--page-table", "1,99"), "usable pages"),
        (("--dump", "x", "--search-dtype", "fp9"), "--search-dtype fp9: choose float32"),
        (("--dump", "none.bin"), "none.bin: cannot be read"),
        (("--dump", "x", "--pattern", "none.npz"), "none.npz: is no pattern file"),
    ],
)
def test_misuse_says_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:  # fmt: skip
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert said in err


def test_a_pattern_for_an_engine_takes_both_dtypes_from_the_models_config(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """vLLM's recurrent states have the config's mamba_ssm_dtype."""
    code, out, _ = run(capsys, "--write-pattern", str(tmp_path / "p.npz"), "--layers", "3", "--tokens", "2",
                       "--layout", "engine:vllm,pool=LBHNC,tp=8", "--model", "qwen3.5-397b-a17b")  # fmt: skip
    assert code == 0
    assert "3.k  float32 [1, 2, 1, 256]" in out
