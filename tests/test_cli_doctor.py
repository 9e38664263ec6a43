"""`regauge doctor` as typed."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "fabric"))

from doctor_hosts import NAME, green

from regauge.cli import main
from regauge.fabric.check_peers import NAMES
from regauge.fabric.host import Record, save
from regauge.fabric.peers import Listener


@pytest.fixture
def record(tmp_path: Path) -> tuple[Record, Path]:
    return green(), tmp_path / "host.json"


def doctor(record: Record, path: Path, *more: str) -> int:
    save(path, record)
    return main(["doctor", "--replay", str(path), "--topology", "prefill-12-decode-1", "--host", NAME, *more])


def test_a_green_host(record: tuple[Record, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(*record) == 0
    assert capsys.readouterr().out == "24 checks: nothing is wrong\n"


def test_a_fault_is_told_with_what_mends_it(record: tuple[Record, Path], capsys: pytest.CaptureFixture[str]) -> None:
    record[0].files["/sys/class/net/cmp1/mtu"] = "1500"
    assert doctor(*record) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "compute: 1 error\n\n  error  mtu  cmp1: MTU 1500, and the plane has 9000\n      why   Larger packets"
    )
    assert "      mend  ip link set dev cmp1 mtu 9000\n" in said
    assert said.endswith("24 checks: 1 error\n")


def test_what_a_host_says_steers_no_terminal(record: tuple[Record, Path], capsys: pytest.CaptureFixture[str]) -> None:
    record[0].files["/sys/class/infiniband/mlx5_0/ports/1/state"] = "1: DOWN\x1b[2J\r"
    assert doctor(*record) == 1
    said = capsys.readouterr().out
    assert "port 1 is 1: DOWN?[2J?" in said
    assert "\x1b" not in said


def test_json_of_a_fault_and_of_a_plane_without_one(
    record: tuple[Record, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    record[0].files["/sys/class/net/cmp1/mtu"] = "1500"
    assert doctor(*record, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["green"]
    [found] = told["findings"]
    assert (found["check"], found["severity"], found["plane"], found["where"]) == ("mtu", "error", "compute", "cmp1")
    assert doctor(*record, "--json", "--plane", "business") == 0
    assert json.loads(capsys.readouterr().out) == {"green": True, "findings": []}


def test_what_cannot_be_seen_is_said_and_makes_nothing_red(
    record: tuple[Record, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    del record[0].commands["nft -j list tables"]
    assert doctor(*record) == 0
    assert capsys.readouterr().out.endswith("24 checks: 1 unknown; nothing is known to be wrong\n")


def test_a_record_of_a_record_is_the_same(record: tuple[Record, Path], tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    assert doctor(*record, "--record", str(again)) == 0
    assert main(["doctor", "--replay", str(again), "--topology", "prefill-12-decode-1", "--host", NAME]) == 0


def test_this_machine_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    assert "findings" in json.loads(capsys.readouterr().out)


def test_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 24


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--topology", "lab-2", "--host", "lab-prefil"], "did you mean 'lab-prefill'"),
        (["--host", "x"], "give --topology too"),
        (["--replay", "/nowhere"], "No such file"),
        (["--config", "/nowhere"], "no such file"),
    ],
)
def test_misuse_is_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_way_to_a_peer_that_listens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("11" * 32)
    (tmp_path / "key").chmod(0o600)
    with Listener("127.0.0.1", 0, bytes.fromhex("11" * 32)) as there:
        words = [
            "doctor",
            "--json",
            "--peer",
            f"127.0.0.1:{there.port}",
            "--key",
            str(tmp_path / "key"),
            "--seconds",
            "0",
        ]
        assert main(words) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert not [each for each in told["findings"] if each["check"] in NAMES]


def test_a_peer_with_another_key_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("22" * 32)
    (tmp_path / "key").chmod(0o600)
    with Listener("127.0.0.1", 0, bytes.fromhex("11" * 32)) as there:
        assert main(["doctor", "--peer", f"127.0.0.1:{there.port}", "--key", str(tmp_path / "key")]) == 1
    assert "is no peer of this deployment" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peer", "all"], "needs --topology"),
        (["--peer", "host"], "numeric address"),
        (["--peer", "127.0.0.1", "--seconds", "11"], "give 0 to 10"),
        (["--listen", "127.0.0.1"], "needs --key FILE"),
        (["--bmc", "/nowhere"], "needs --topology"),
    ],
)
def test_misuse_of_peers_and_bmcs_is_told(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
