"""A worker's journal of receipts over deaths, torn lines and generations; and its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regauge.errors import ConfigError
from regauge.meter.receipt import Trust, decode
from regauge.serve import wire
from regauge.serve.receipts import Journal, Notary

KEY = Ed25519PrivateKey.generate()
TAG = wire.MeterTag("acme", decode="d")


def notary(path: Path, limit: int = 1_000) -> Notary:
    return Notary("d", "m", KEY, Journal(path, limit))


def served(n: Notary, *names: str) -> None:
    for name in names:
        account = n.open(name, "decode", 10, TAG)
        account.computed, account.generated = 10, 3
        assert account.close("complete") == account.close("failed") == n.line(name)


def names(n: Notary, since: int = 0, limit: int = 100) -> tuple[list[str], int]:
    found = n.since(since, limit)
    trust = Trust({}, {"d": [KEY.public_key()]})
    return [trust.check(decode(line.encode())).receipt.request for line in found.lines], found.next


def test_receipts_are_there_again_after_a_death(tmp_path: Path) -> None:
    first = notary(tmp_path / "j")
    served(first, "a", "b", "c")  # and it is never closed
    again = notary(tmp_path / "j")
    assert names(again) == (["a", "b", "c"], 3)
    served(again, "d")
    assert names(again, 2) == (["c", "d"], 4)
    assert names(again, 0, 2) == (["a", "b"], 2)
    assert names(again, 4) == ([], 4)
    assert names(again, 9) == ([], 4), "a number of another ledger: begin anew"
    assert oct((tmp_path / "j").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("cut", [1, 20, 400])
def test_a_torn_line_is_cut_off_and_the_others_count(
    tmp_path: Path, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    served(notary(tmp_path / "j"), "a", "b")
    data = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(data[:-cut])
    again = notary(tmp_path / "j")
    assert names(again) == (["a"], 1)
    served(again, "c")
    assert names(notary(tmp_path / "j")) == (["a", "c"], 2)


def test_a_line_that_is_damaged_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served(notary(tmp_path / "j"), "a", "b", "c")
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    for wrong in (b"2 nonsense\n", b"two" + lines[1][1:], b"\n", b"\xff\xfe 1\n"):
        (tmp_path / "j").write_bytes(lines[0] + wrong + lines[2])
        assert names(notary(tmp_path / "j")) == (["a", "c"], 3)


def test_the_journal_is_bounded_by_two_generations(tmp_path: Path) -> None:
    n = notary(tmp_path / "j", limit=3)
    served(n, *(f"r{i}" for i in range(1, 11)))
    kept = [len((tmp_path / name).read_bytes().splitlines()) for name in ("j.1", "j")]
    assert kept == [3, 1]
    again = notary(tmp_path / "j", limit=3)
    assert names(again) == (["r7", "r8", "r9", "r10"], 10)
    served(again, "r11", "r12", "r13")
    assert [len((tmp_path / name).read_bytes().splitlines()) for name in ("j.1", "j")] == [3, 1]
    assert names(notary(tmp_path / "j", limit=3), 11) == (["r12", "r13"], 13)


CODE = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_receipts import Notary, Journal, KEY, served
n = Notary("d", "m", KEY, Journal(Path(sys.argv[1])))
served(n, "a", "b")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_the_gateway_could_have_heard_of_survives_sigkill(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path / "j"), str(Path(__file__).parent)], check=False)
    assert done.returncode == -9
    found = Notary("d", "m", KEY, Journal(tmp_path / "j")).since(0, 9)
    assert [decode(line.encode()).receipt.request for line in found.lines] == ["a", "b"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none/j: No such file or directory; the journal"):
        Journal(tmp_path / "none" / "j")


def test_a_full_disk_does_not_end_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n = notary(tmp_path / "j")
    file = os.open("/dev/full", os.O_WRONLY)
    os.dup2(file, n._journal._file)  # type: ignore[union-attr]  # it has one
    os.close(file)
    served(n, "a")
    assert names(n) == (["a"], 1)


def test_a_receipt_that_cannot_be_is_not_made(capsys: pytest.CaptureFixture[str]) -> None:
    n = Notary("d", "m", KEY)
    account = n.open("r", "decode", 10, TAG)
    account.computed = 11
    assert account.close("complete") == ""
    assert n.count == 0


@pytest.mark.parametrize("name", ["a\nb", "a\x00"])
def test_names_that_could_not_be_signed_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tenant: give printable characters"):
        wire.MeterTag(name)
