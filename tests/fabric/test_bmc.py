from pathlib import Path
from typing import Any

import pytest

from regauge.errors import ConfigError
from regauge.fabric.bmc import Access, judge, load_access

URL = "https://10.212.0.111"
SYSTEM = {
    "Id": "1",
    "Name": "prefill-0",
    "PowerState": "On",
    "Status": {"State": "Enabled", "Health": "OK", "HealthRollup": "OK"},
}
MANAGER = {"Id": "bmc", "Status": {"State": "Enabled", "Health": "OK"}}
"""As DMTF's Redfish mock-ups have them (DSP2043), less what is not asked."""


def said(system: dict[str, Any], manager: dict[str, Any] = MANAGER) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in judge(URL, [system], [manager])]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"PowerState": "Off"}, [("error", "system prefill-0: is off")]),
        ({"PowerState": "PoweringOff"}, [("error", "system prefill-0: is poweringoff")]),
        ({"PowerState": None}, [("unknown", "system prefill-0: does not tell whether it is on")]),
        ({"Status": {"Health": "OK", "HealthRollup": "Critical"}}, [("error", "system prefill-0: health is Critical")]),
        ({"Status": {"Health": "Warning"}}, [("warning", "system prefill-0: health is Warning")]),
        ({"Status": None}, [("unknown", "system prefill-0: does not tell its health")]),
    ],
)
def test_a_system(changed: dict[str, Any], found: list[tuple[str, str]]) -> None:
    assert said({**SYSTEM, **changed}) == found


def test_a_bmc_that_is_ill() -> None:
    assert said(SYSTEM, {"Id": "bmc", "Status": {"Health": "Warning"}}) == [("warning", "BMC bmc: health is Warning")]


def test_a_bmc_that_knows_no_system() -> None:
    assert [each.what for each in judge(URL, [], [MANAGER])] == ["knows no system"]


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_access_is_read_from_a_private_file(tmp_path: Path) -> None:
    path = written(tmp_path / "bmc.toml", 'user = "u"\npassword = "p"\nverify = false\n')
    assert load_access(path) == Access("u", "p", verify=False)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ('user = "u"', 0o600, "missing required field `password`"),
        ('user = "u"\npassword = ""', 0o600, "length >= 1"),
        ('user = "u"\npassword = "p"\ntoken = "t"', 0o600, "unknown field `token`"),
        ("user", 0o600, "bmc.toml"),
        ('user = "u"\npassword = "p"', 0o644, "others can read"),
    ],
)
def test_what_is_wrong_with_the_file_is_said(tmp_path: Path, text: str, mode: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_access(written(tmp_path / "bmc.toml", text, mode))
