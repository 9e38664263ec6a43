"""The command line as a user types it: output, exit codes, what bad input says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from regauge import __version__
from regauge.cli import main
from regauge.layout.files import decode, encode
from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Layout, Shard
from regauge.plan import cost
from regauge.plan.cost import DEFAULTS


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out = capsys.readouterr()
    return code, out.out, out.err


def write(path: Path, layout: Layout) -> str:
    path.write_bytes(encode(layout, format="toml"))
    return str(path)


def test_check_names_the_path_and_its_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "fp8_e4m3,page=64,hnd", "bf16,page=16,nhd")
    assert code == 0
    assert out.splitlines()[:3] == ["CONVERT", "  dtype float8_e4m3fn -> bfloat16", "  page size 64 -> 16"]
    code, out, _ = run(capsys, "check", "bf16", "bf16", "--json")
    assert (code, json.loads(out)["path"]) == (0, "DIRECT")


@pytest.mark.parametrize(
    ("field", "change", "shown"),
    [
        (
            "model.states[attention].arrays.k.dim",
            {"head_dim": 64},
            "prefill has 128, decode has 64. Serve the same model",
        ),
        ("model.num_layers", {"num_hidden_layers": 31}, "prefill has 32, decode has 31. Serve the same model"),
        (
            "model.states[attention].arrays.k.heads",
            {"num_key_value_heads": 4},
            "prefill has 8, decode has 4. Serve the same model",
        ),
        (
            "model.states[attention].rope.theta",
            {"rope_theta": 1e4},
            "prefill has 500000.0, decode has 10000.0. Keys carry the rotation",
        ),
    ],
)
def test_a_pair_that_cannot_work_exits_1_and_names_field_values_and_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str, change: dict[str, object], shown: str
) -> None:
    folder = tmp_path / "llama-3.1-8b"
    folder.mkdir()
    shipped = Path(__file__).parents[1] / "src/regauge/layout/configs/llama-3.1-8b.json"
    (folder / "config.json").write_text(json.dumps(json.loads(shipped.read_text()) | change))
    a = write(tmp_path / "a.toml", from_short("bf16", load_model("llama-3.1-8b")))
    b = write(tmp_path / "b.toml", from_short("bf16", load_model(str(folder))))
    code, out, _ = run(capsys, "check", a, b)
    assert code == 1
    assert out.startswith("REFUSED\n")
    assert f"  {field}: {shown}" in out
    code, out, _ = run(capsys, "check", a, b, "--json")
    assert code == 1
    assert field in [r["field"] for r in json.loads(out)["refusals"]]
    code, _, err = run(capsys, "explain", a, b)
    assert code == 1
    assert f"regauge: refused: {field}: {shown}" in err


def test_explain_says_what_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "explain",
        "bf16,page=64",
        "bf16,page=16",
        "--model",
        "llama-3.1-8b",
        "--tokens",
        "1024",
        "--link",
        "400G",
    )
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    for part in (
        "REMAP  1024 tokens of llama-3.1-8b, 128.00 MiB -> 128.00 MiB, over rdma at 400 Gbit/s: ",
        "page size 64 -> 16",
        "runs of 32.00 KiB",
        "(2.7 ms at line rate)",
    ):
        assert part in out
    code, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert found["wire_bytes"] == 1024 * 2 * 8 * 128 * 2 * 32
    assert found["groups"][0]["lanes"][0]["pieces"] == 32 * 1024 // 16
    assert found["groups"][0]["decision"]["chosen"]["spans"]["count"] == 2 * 32 * 1024 // 16
    assert found["seconds_on_link"] == pytest.approx(found["wire_bytes"] * 8 / 400e9)


def test_explain_draws_takes_constants_and_a_transport(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    costs = msgspec.structs.replace(DEFAULTS, source="a quiet machine")
    (tmp_path / "costs.toml").write_bytes(cost.encode(costs))
    code, out, _ = run(capsys, "explain", "bf16,page=64,hnd", "bf16", "--cost", str(tmp_path / "costs.toml"),
                       "--transport", "shm", "--svg", str(tmp_path / "page.svg"))  # fmt: skip
    assert code == 0
    assert "constants  a quiet machine" in out
    assert "REMAP, fused, " in out
    assert (tmp_path / "page.svg").read_text().startswith("<svg ")


def test_layout_prints_a_file_that_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, "layout", "fp8_e4m3,page=64,hnd,scale=token_head", "--model", "qwen3-8b", "--tp", "4", "--tp-rank", "1"
    )
    assert code == 0
    assert "bytes per token" in out
    layout = decode(out.encode(), format="toml")
    assert list(layout.heads(layout.groups[0], layout.groups[0].components[0])) == [2, 3]
    path = tmp_path / "x.toml"
    path.write_text(out)
    code, out, _ = run(capsys, "layout", str(path), "--json")
    assert (code, json.loads(out)["digest"]) == (0, layout.digest())
    code, out, _ = run(capsys, "layout", "--list")
    assert "qwen3-8b" in out.splitlines()


def test_layout_of_an_engines_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--engine", "sglang", "--tp", "8", "--rank", "3", "--kv-cache-dtype", "fp8_e4m3", "--pool", "hnd")
    code, out, _ = run(capsys, "layout", "--model", "qwen3-8b", *flags, "--page-size", "64")
    assert code == 0
    layout = decode(out.encode(), format="toml")
    assert layout.groups[0].components[0].at.order == "page head token dim"
    assert list(layout.heads(layout.groups[0], layout.groups[0].components[0])) == [3]
    per_token = 2 * 36 * 128
    assert f"# attention, layers 0-35: {per_token} bytes per token, {per_token * 64} bytes per page of 64\n" in out
    form = "engine:sglang,pool=hnd,page=64,dtype=fp8_e4m3,tp=8,rank=3"
    code, out, _ = run(capsys, "layout", form, "--model", "qwen3-8b", "--json")
    assert (code, json.loads(out)["digest"]) == (0, layout.digest())
    code, out, _ = run(capsys, "layout", "--model", "qwen3-8b", "--engine", "vllm", "--pool", "cpu")
    assert code == 0
    assert "bfloat16" in out  # the config says so


def test_layout_says_what_each_group_takes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "glm-5.2", "--engine", "sglang", "--tp", "8", "--kv-cache-dtype", "fp8_e4m3")
    code, out, _ = run(capsys, "layout", *flags)
    assert code == 0
    assert "# latent, layers 0-77: 51168 bytes per token, 3274752 bytes per page of 64\n" in out
    assert "# indexer, layers 0-2,6-74:4: 2772 bytes per token, 177408 bytes per page of 64\n" in out
    assert "# 53940 bytes per token in all\n" in out
    code, out, _ = run(capsys, "layout", *flags, "--json", "--pp", "2", "--pp-rank", "1")
    assert [(g["kind"], g["layers"], g["bytes_per_page"]) for g in json.loads(out)["groups"]] == [
        ("latent", "39-77", 39 * 656 * 64), ("indexer", "42-74:4", 9 * 132 * 64)]  # fmt: skip
    code, out, _ = run(
        capsys, "layout", "--model", "qwen3.5-397b-a17b", "--engine", "vllm", "--pool", "BLHNC", "--tp", "8"
    )
    assert code == 0  # the config says how the engine keeps its states
    assert "# recurrent, layers 0-56:4: 8002560 bytes per request, 8110080 with padding\n" in out
    assert "# attention, layers 3-59:4: 15360 bytes per token, 8110080 bytes per page of 528\n" in out
    code, out, _ = run(
        capsys, "layout", "fp8,scale=block", "--model", "kimi-linear-48b-a3b", "--pages", "4", "--requests", "2"
    )
    assert [g.pages for g in decode(out.encode(), format="toml").groups] == [2, 4]


def test_check_and_explain_take_engines_flags_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ("engine:vllm,pool=LBHNC,page=64,dtype=fp8_e4m3", "engine:sglang")
    code, out, _ = run(capsys, "check", *sides, "--model", "glm-4.5-air")
    assert code == 0
    assert out.splitlines()[:3] == ["CONVERT", "  dtype float8_e4m3fn -> bfloat16", "  page size 64 -> 1"]
    code, out, _ = run(capsys, "explain", sides[0], "bf16,page=16", "--model", "glm-4.5-air", "--json")
    assert code == 0
    assert json.loads(out)["wire_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layout", "--engine", "vllm"), "pool: vLLM's pool depends on the attention backend"),
        (("layout", "--engine", "tgi"), "engine: no preset for 'tgi'; choose vllm, sglang"),
        (("layout", "--engine", "sglang", "--kv-cache-dtype", "fp4"), "dtype: no preset for 'fp4'; choose auto"),
        (("layout", "--engine", "sglang", "bf16"), "give 'bf16' or --engine, not both"),
        (("layout", "bf16", "--pool", "hnd"), "--pool: needs --engine"),
        (("check", "engine:sglang,pool=x", "bf16"), "engine:sglang,pool=x: pool: no preset for 'x'; choose nhd"),
        (("check", "bf17", "bf16"), "cannot read 'bf17'; the parts of a short form are"),
        (("check", "no.toml", "bf16"), "no.toml: cannot be read: No such file or directory"),
        (("check", "bf16", "bf16", "--model", "x"), "no shipped model; shipped are"),
        (("explain", "bf16", "bf16", "--link", "fast"), "--link 'fast': give bits per second"),
        (("explain", "bf16", "bf16", "--link", "9" * 400), "give bits per second"),
        (("explain", "bf16", "bf16", "--tokens", "0"), "--tokens 0: give a number from 1"),
        (("explain", "bf16", "bf16", "--chunk-tokens", "0"), "--chunk-tokens 0: give a number from 1"),
        (
            ("explain", "bf16", "bf16", "--transport", "x"),
            "no constants for transport 'x'; known: mooncake, nixl, rdma, shm, tcp",
        ),
        (("explain", "bf16", "bf16", "--cost", "none.toml"), "none.toml: No such file or directory; `regauge bench"),
        (("explain", "bf16", "bf16", "--svg", "no/where.svg"), "--svg no/where.svg: No such file or directory"),
        (("bench", "calibrate", "--threads", "0"), "--threads 0: give a number from 1"),
        (("layout",), "name a layout, or use --list"),
        (("serve", "--set", "decode.max_bach=8"), "--set decode.max_bach=8: give a field of the configuration"),
        (("serve", "--set", "decode=8"), "--set decode=8: give a field"),
        (("serve", "--set", "decode.max_batch=many"), "Expected `int`, got `str` - at `$.decode.max_batch`"),
        (("serve", "--config", "none.toml"), "none.toml: no such file"),
        (("bench", "accuracy", "--prefill-layout", "bf16"), "as many times as --prefill-layout"),
    ],
)
def test_misuse_exits_2_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 2
    assert message in json.loads(out)["error"][0]


def test_a_layout_file_with_an_unknown_field_or_overlap_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "a.toml"
    text = encode(from_short("bf16", load_model("qwen3-8b"), pages=2), format="toml").decode()
    path.write_text(text.replace("page_size", "pagesize"))
    code, _, err = run(capsys, "check", str(path), "bf16")
    assert code == 2
    assert "a.toml: Object contains unknown field `pagesize` - at `$.groups[0]`" in err
    path.write_text(
        text.replace(
            'order = "layer page token head dim"', 'order = "layer page token head dim"\nstrides = {token = 8}'
        )
    )
    code, _, err = run(capsys, "check", str(path), "bf16")
    assert code == 2
    assert "elements of k overlap in region 'k'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("chekc", "a", "b"), "no such command: 'chekc'; did you mean 'check'?"),
        (("bench", "acuracy"), "no such command: 'acuracy'; did you mean 'accuracy'?"),
        (("bench",), "the following arguments are required: COMMAND"),
        (("serve", "--transport", "tcq"), "argument --transport: invalid choice: 'tcq' (choose from "),
        (("serve", "--transport", "tcq"), "); did you mean 'tcp'?"),
        (("bench", "accuracy", "bf16", "fp32"), "unrecognized arguments: bf16 fp32"),
        (("bench", "conformance", "--layouts", "somewhere"), "unrecognized arguments: --layouts"),
        (("bench", "calibrate", "--record", "r.json"), "unrecognized arguments: --record"),
    ],
)
def test_what_is_no_command_or_option_is_said_so_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_words_may_come_before_between_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("a", "b", "c"), ("--seed", "1", "a", "b", "c"), ("a", "--seed", "1", "b", "--sample", "2", "c")):
        code, _, err = run(capsys, "bench", "conformance", *arguments)
        assert (code, err) == (2, "regauge: error: 3 layouts: give two, or none for the catalogue\n")


def test_help_of_a_bench_job_is_of_its_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    own = {
        "accuracy": "--prompt-tokens",
        "calibrate": "--out",
        "conformance": "--sample",
        "keygen": "--sign",
        "sign": "--record",
    }
    shown = {}
    for name in own:
        with pytest.raises(SystemExit):
            main(["bench", name, "--help"])
        shown[name] = capsys.readouterr().out
    assert {name: option in shown[name] for name, option in own.items()} == dict.fromkeys(own, True)
    assert [name for name, text in shown.items() if "--prompt-tokens" in text] == ["accuracy"]
    assert [name for name, text in shown.items() if "--threads" in text] == ["accuracy", "calibrate"]
    assert not [text for text in shown.values() if "calibrate:" in text or "conformance:" in text]


def test_version_and_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "version") == (0, f"regauge {__version__}\n", "")
    assert json.loads(run(capsys, "version", "--json")[1]) == {"version": __version__}
    code, out, _ = run(capsys, "collect-env", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["kernels"] in ("avx2", "portable")
    assert found["packages"]["numpy"]
    assert "numpy" in run(capsys, "collect-env")[1]


def test_help_answers_at_once() -> None:
    """It loads no heavy module: that is what would cost time."""
    code = "import sys; from regauge.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for verb in ("serve", "check", "explain", "layout", "bench", "version", "collect-env", "exit codes"):
        assert verb in done.stdout
    modules = done.stdout.splitlines()[-1]
    assert not [name for name in ("numpy", "torch", "msgspec", "starlette", "aiohttp") if f"'{name}'" in modules]


def test_output_that_nobody_reads_is_no_error() -> None:
    command = f"{sys.executable} -m regauge layout bf16 | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[model]\n", "")


@pytest.mark.parametrize("arguments", [["layout", "--list"], ["version"]])
def test_short_output_that_nobody_reads_is_no_error(arguments: list[str]) -> None:
    """It is written when the process ends, or would be."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "regauge", *arguments], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_check_pairs_all_ranks_of_both_sides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    four, two = (f"engine:sglang,pool=nhd,page=16,tp={tp}" for tp in (4, 2))
    code, out, _ = run(capsys, "check", four, two, "--model", "qwen3-8b")
    assert code == 0
    assert "  heads 0-1 -> 0-3" in out
    assert "  ranks: 4 prefill, 2 decode; 4 pairs of them carry something" in out
    code, out, _ = run(capsys, "check", four, two, "--model", "qwen3-8b", "--json")
    assert [(r["prefill"], r["decode"], r["heads"]["k"]) for r in json.loads(out)["ranks"]] == [
        (0, 0, [0, 1]), (1, 0, [2, 3]), (2, 1, [4, 5]), (3, 1, [6, 7])]  # fmt: skip
    stages = tmp_path / "stages"
    stages.mkdir()
    for rank in range(2):
        flags = ("--engine", "sglang", "--pp", "2", "--pp-rank", str(rank))
        _, out, _ = run(capsys, "layout", "--model", "qwen3-8b", *flags)
        (stages / f"{rank}.toml").write_text(out)
    code, out, _ = run(capsys, "check", str(stages), "engine:sglang", "--model", "qwen3-8b")
    assert (code, "2 prefill, 1 decode; 2 pairs" in out) == (0, True)
    code, out, _ = run(capsys, "check", str(stages / "0.toml"), "engine:sglang", "--model", "qwen3-8b")
    assert code == 0
    assert "note: ranks are not paired: one of 2 pipeline stages does not tell which layers the others hold" in out
    code, out, _ = run(capsys, "check", str(stages / "0.toml"), str(stages / "1.toml"), "--model", "qwen3-8b")
    assert (code, out.splitlines()[0]) == (1, "NONE")  # nothing of one stage is in the other
    (stages / "1.toml").unlink()
    code, out, _ = run(capsys, "check", str(stages), "engine:sglang", "--model", "qwen3-8b")
    assert "give all ranks" in out
    code, _, err = run(capsys, "check", str(tmp_path), "bf16")
    assert (code, "has no layout file" in err) == (2, True)


def test_check_shows_the_pair_of_ranks_that_asks_most(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for side, forms in (("prefill", ("bf16", "fp16")), ("decode", ("bf16", "bf16"))):
        (tmp_path / side).mkdir()
        for rank, form in enumerate(forms):
            write(tmp_path / side / f"{rank}.toml", from_short(form, load_model("qwen3-8b"), shard=Shard(rank, 2)))
    sides = (str(tmp_path / "prefill"), str(tmp_path / "decode"))
    code, out, _ = run(capsys, "check", *sides)
    assert (code, out.splitlines()[:2]) == (0, ["CONVERT", "  dtype float16 -> bfloat16"])
    code, out, _ = run(capsys, "check", *sides, "--json")
    found = json.loads(out)
    assert (found["path"], {lane["path"] for lane in found["lanes"]}) == ("CONVERT", {"CONVERT"})
    assert [r["path"] for r in found["ranks"]] == ["DIRECT", "CONVERT"]
