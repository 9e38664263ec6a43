"""The units by systemd's own reader, offline: no unit is started."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SERVICES = {
    "regauge-gateway.service": "regauge-gateway.service",
    "regauge-worker@.service": "regauge-worker@prefill.service",
}


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with the units, and something where their programs would be."""
    units = tmp_path / "usr/lib/systemd/system"
    shutil.copytree(UNITS, units)
    for program in (tmp_path / "opt/regauge/bin/regauge", tmp_path / "bin/kill"):
        program.parent.mkdir(parents=True)
        shutil.copy("/bin/true", program)
    for target in ("basic", "sysinit", "shutdown", "network-online", "multi-user"):
        (units / f"{target}.target").write_text("[Unit]\nDescription=stands in\n")
    return tmp_path


@pytest.mark.parametrize(("file", "unit"), SERVICES.items())
def test_systemd_reads_each_unit_without_a_word(file: str, unit: str, root: Path) -> None:
    shutil.copy(UNITS / file, root / "usr/lib/systemd/system" / unit)
    done = call("systemd-analyze", "verify", f"--root={root}", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_complains_of_a_wrong_key(root: Path) -> None:
    unit = root / "usr/lib/systemd/system/regauge-gateway.service"
    unit.write_text(unit.read_text().replace("LimitNOFILE", "LimitNOFILES"))
    assert "LimitNOFILES" in call("systemd-analyze", "verify", f"--root={root}", "--man=no", unit.name).stderr


@pytest.mark.parametrize(("file", "most"), [("regauge-gateway.service", 2.5), ("regauge-worker@.service", 3.0)])
def test_units_are_closed_up(file: str, most: float) -> None:
    done = call("systemd-analyze", "security", "--offline=true", f"--threshold={most * 10:.0f}", str(UNITS / file))
    found = re.search(r"exposure level for \S+: (\d+\.\d)", done.stdout)
    assert found is not None, done.stderr
    assert done.returncode == 0, found[0]


def test_the_account_and_the_folders_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).touch()
    made = call("systemd-sysusers", f"--root={tmp_path}", str(UNITS / "regauge.sysusers"))
    assert made.returncode == 0, made.stderr
    assert re.search(r"^regauge:.*:/var/lib/regauge:\S*nologin$", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    made = call("systemd-tmpfiles", "--create", f"--root={tmp_path}", str(UNITS / "regauge.tmpfiles"))
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "etc/regauge").stat().st_mode & 0o777 == 0o750
