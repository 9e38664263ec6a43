"""From text to a signed record and a gate that demands it, as a user types it, on a tiny model of random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from regauge.cli import main
from regauge.engines.local.accuracy.texts import CALIBRATION, DOCUMENTS, read
from regauge.engines.local.weights import weights_digest
from regauge.errors import ConfigError
from regauge.plan import quality

WORDS = [f"word{i}" for i in range(250)]
LIMITS = ("--min-positions", "1", "--min-agreement", "0.5", "--max-kl", "0.5", "--max-perplexity-ratio", "1.5")
SHORT = ("--threads", "1", "--prompt-tokens", "12", "--answer-tokens", "6")


@pytest.fixture(scope="module")
def folder(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tokenizer of whole words."""
    path = tmp_path_factory.mktemp("accuracy") / "tiny"
    shutil.copytree(tiny_path, path)
    vocab = {word: index for index, word in enumerate(["<unk>", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources: one of 5 documents of 18 tokens and a bit, one of 2."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n\n".join(" ".join(rng.choice(WORDS, n)) for n in (5 * 18 + 7, 2 * 18)))
    return path


@pytest.fixture(scope="module")
def measured(folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a key, a signed record and the layouts of bf16 -> fp8_e4m3 per head."""
    out = tmp_path_factory.mktemp("out")
    assert main(["bench", "keygen", "--sign", str(out / "key.pem")]) == 0
    arguments = ["bench", "accuracy", "--model", str(folder), "--from", "bf16", "--to", "fp8_e4m3", "--scale", "per-head",
                 "--text", str(text), *SHORT, "--revision", "r1", "--record", str(out / "record.json"),
                 "--sign", str(out / "key.pem"), "--layouts", str(out)]  # fmt: skip
    assert main(arguments) == 0
    return out


def check(capsys: pytest.CaptureFixture[str], out: Path, *arguments: str) -> tuple[int, str, str]:
    gate = ("--require-quality", str(out / "record.json"), "--trust", str(out / "key.pem.pub"), *LIMITS)
    code = main(["check", *gate, *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_record_says_what_was_measured_on_what(measured: Path, folder: Path, text: Path) -> None:
    signed = quality.decode((measured / "record.json").read_bytes())
    r = signed.record
    assert (r.model.name, r.model.revision, r.model.weights) == ("tiny", "r1", weights_digest(folder))
    assert r.text == quality.Text(r.text.sha256, 4, 12, 6, 3)
    assert r.result.positions == 4 * 6
    assert str(r.conversions[0].decode) == "float8_e4m3fn with a scale per head (constant, rule reciprocal)"
    assert sorted(r.result.errors) == ["k", "v"]
    assert r.date.endswith("Z")
    assert oct((measured / "key.pem").stat().st_mode & 0o777) == "0o600"


def test_check_demands_the_record_of_exactly_this_pair(capsys: pytest.CaptureFixture[str], measured: Path) -> None:
    pair = str(measured / "prefill.toml"), str(measured / "decode.toml")
    code, out, _ = check(capsys, measured, *pair)
    assert (code, out.splitlines()[0]) == (0, "CONVERT")
    code, out, _ = check(capsys, measured, pair[0], pair[0])
    assert (code, out.splitlines()[0]) == (0, "DIRECT")
    code, out, _ = check(capsys, measured, *reversed(pair))
    assert code == 1
    assert out.startswith("REFUSED\n")
    assert "measured was bfloat16 without scale -> float8_e4m3fn with a scale per head" in out
    code, out, _ = check(capsys, measured, *pair, "--max-kl", "1e-9", "--json")
    assert code == 1
    refusals = json.loads(out)["refusals"]
    assert {r["field"] for r in refusals} == {"quality"}
    assert "exceeds 1e-09 (max_kl)" in refusals[0]["remedy"]


def test_unsigned_changed_and_foreign_records_are_refused_and_signing_mends_only_the_first(
    capsys: pytest.CaptureFixture[str], measured: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(measured, out)
    pair = str(out / "prefill.toml"), str(out / "decode.toml")
    path = out / "record.json"
    plain = json.loads(path.read_text())
    path.write_text(json.dumps(plain | {"record": plain["record"] | {"date": "2030-01-01T00:00:00Z"}}))
    assert "has been changed since it was signed" in check(capsys, out, *pair)[1]
    path.write_text(json.dumps({"record": plain["record"]}))
    assert "is not signed" in check(capsys, out, *pair)[1]
    assert main(["bench", "sign", "--record", str(path), "--sign", str(out / "key.pem")]) == 0
    capsys.readouterr()
    assert check(capsys, out, *pair)[0] == 0
    assert main(["bench", "keygen", "--sign", str(out / "other.pem"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [str(out / "other.pem"), str(out / "other.pem.pub")]
    assert main(["bench", "sign", "--record", str(path), "--sign", str(out / "other.pem")]) == 0
    assert "which is not among the trusted" in check(capsys, out, *pair)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "bf16", "fp32", "--require-quality", "none.json"), "--require-quality needs --trust PUBKEY"),
        (("check", "bf16", "fp32", "--trust", "x.pub"), "--trust and limits need --require-quality"),
        (("check", "bf16", "fp32", "--max-kl", "1"), "--trust and limits need --require-quality"),
        (("check", "bf16", "fp32", "--require-quality", "none.json", "--trust", "x"), "none.json: No such file"),
        (("bench", "keygen"), "bench keygen needs --sign KEY"),
        (("bench", "sign", "--record", "r.json"), "bench sign needs --record FILE and --sign KEY"),
        (("bench", "accuracy", "--matrix", "--from", "bf16"), "--matrix chooses the pairs itself"),
        (("bench", "accuracy", "--matrix", "--record", "r.json"), "--record and --layouts are of one pair"),
        (("bench", "accuracy", "--from", "bf16", "--to", "fp32", "--sign", "k"), "--sign needs --record FILE"),
        (
            ("bench", "accuracy", "--from", "bf16", "--to", "fp32", "--rule", "x"),
            "--rule 'x': choose reciprocal, divide",
        ),
        (
            ("bench", "accuracy", "--from", "bf16", "--to", "fp32", "--record", "r", "--sign", "none.pem"),
            "none.pem: No such",
        ),
        (("bench", "accuracy", "--threads", "0"), "--threads 0: give a number from 1 to 1024"),
        (("bench", "accuracy", "--answer-tokens", "0"), "--answer-tokens at least 1"),
    ],
)
def test_misuse_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_layout_of_another_model_is_not_measured(
    capsys: pytest.CaptureFixture[str], folder: Path, text: Path, tmp_path: Path
) -> None:
    assert main(["layout", "bf16", "--model", "qwen3-8b"]) == 0
    (tmp_path / "other.toml").write_text(capsys.readouterr().out)
    arguments = ["bench", "accuracy", "--model", str(folder), "--text", str(text), *SHORT,
                 "--prefill-layout", "bf16", "--decode-layout", str(tmp_path / "other.toml")]  # fmt: skip
    assert main(arguments) == 2
    assert "describes another model than tiny: its geometry differs" in capsys.readouterr().err


def test_rows_are_printed_as_json(capsys: pytest.CaptureFixture[str], folder: Path, text: Path) -> None:
    arguments = ["bench", "accuracy", "--model", str(folder), "--text", str(text), *SHORT, "--json",
                 "--from", "bf16", "--to", "fp32"]  # fmt: skip
    assert main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["path"], row["result"]["positions"]) == ("CONVERT", 7 * 6)
    assert row["result"]["errors"] == {"k": [0.0, 0.0], "v": [0.0, 0.0]}
    assert row["shortfalls"]  # 42 positions are too few


def test_documents_are_windows_and_what_calibrates_is_not_evaluated(folder: Path, text: Path) -> None:
    found = read(folder, str(text), 18, calibrate=True)
    assert (len(found.evaluated), len(found.calibration)) == (4, 3)
    every = found.evaluated + found.calibration
    assert all(len(x) == 18 for x in every)
    sources = text.read_text().split("\n\n\n")
    ids = [AutoTokenizer.from_pretrained(folder).encode(x) for x in sources]
    # First windows first, so that what is evaluated comes from as many sources as there are.
    windows = [ids[i][at : at + 18] for at, i in ((0, 0), (0, 1), (18, 0), (18, 1), (36, 0), (54, 0), (72, 0))]
    assert every == windows
    assert read(folder, str(text), 18, calibrate=False).evaluated == windows
    assert found.sha256 == read(folder, str(text), 5, calibrate=False).sha256
    windows_text = text.with_name("crlf.txt")
    windows_text.write_bytes(text.read_bytes().replace(b"\n", b"\r\n"))
    assert read(folder, str(windows_text), 18, calibrate=True) == found
    many = read(folder, str(text), 4, calibrate=True)
    assert (len(many.evaluated), len(many.calibration)) == (DOCUMENTS, CALIBRATION)


@pytest.mark.parametrize(
    ("content", "tokens", "message"),
    [
        ("word1 word2", 3, "no document has 3 tokens: lower --prompt-tokens"),
        ("word1 word2 word3 word4 word5", 3, "only one document is left, and calibration needs its own"),
    ],
)
def test_a_text_that_is_too_short_is_refused(
    folder: Path, tmp_path: Path, content: str, tokens: int, message: str
) -> None:
    (tmp_path / "t.txt").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read(folder, str(tmp_path / "t.txt"), tokens, calibrate=True)


def test_a_text_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\xff\xff")
    for path, message in (("t.txt", "can't decode byte"), ("none.txt", "No such file")):
        with pytest.raises(ConfigError, match=message):
            read(folder, str(tmp_path / path), 3, calibrate=False)


def test_weights_are_identified_by_name_and_content(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "copy"
    shutil.copytree(folder, other)
    assert weights_digest(other) == weights_digest(folder)
    (other / "model.safetensors").rename(other / "model-1.safetensors")
    assert weights_digest(other) != weights_digest(folder)
