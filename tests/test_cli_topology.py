"""`regauge topology`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regauge.cli import main


def test_list_names_what_is_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["lab-2", "prefill-12-decode-1"]
    assert main(["topology", "list", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"lab-2", "prefill-12-decode-1"}


def test_show_counts_ports_bandwidth_and_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "show", "prefill-12-decode-1"]) == 0
    said = capsys.readouterr().out
    assert "104 of 128 ports of 400G, 24 free" in said
    assert "prefill-0 to prefill-11 (12): prefill, 8 x MTT S5000" in said
    assert "10.210.0.11 to 10.210.0.22" in said
    assert main(["topology", "show", "prefill-12-decode-1", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["switches"]["roce-400g"]["used"] == 104
    assert plain["bandwidth"] == {"prefill": 96 * 400 * 10**9, "decode": 8 * 400 * 10**9}
    assert plain["servers"]["decode-0"]["nics"][3]["address"] == "10.210.3.23/24"


def test_render_writes_one_host_s_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        main(
            [
                "topology",
                "render",
                "lab-2",
                "--out",
                str(out),
                "--host",
                "lab-decode",
                "--only",
                "networkd",
                "--only",
                "qos",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == f"{out}: 6 files of lab-2\n"
    assert (out / "hosts/lab-decode/networkd/10-cmp0.network").is_file()
    assert (out / "hosts/lab-decode/qos/roce.sh").stat().st_mode & 0o111
    assert not (out / "hosts/lab-prefill").exists()


def test_render_says_in_json_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "render", "lab-2", "--out", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert sorted(said["files"]) == sorted(
        str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*") if each.is_file()
    )


@pytest.mark.parametrize(("words", "message"), [
    (["show", "lab-3"], "no topology 'lab-3': name a .toml file or a shipped one; did you mean 'lab-2'?"),
    (["render", "lab-2", "--out", "o", "--only", "netpla"], "no kind 'netpla' of file"),
])  # fmt: skip
def test_misuse_is_code_2_with_the_remedy(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["topology", "render", "lab-2", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err
