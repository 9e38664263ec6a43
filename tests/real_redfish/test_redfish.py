"""The doctor against sushy-tools' emulator of a BMC (fake driver). Run by `make test-redfish`."""

from redfish_lab import PASSWORD, Emulator

from regauge.fabric.bmc import Access
from regauge.fabric.redfish import check

ACCESS = Access("admin", PASSWORD)


def said(emulator: Emulator, access: Access = ACCESS) -> list[tuple[str, str]]:
    return [(each.severity, each.what) for each in check(emulator.url, access)]


def test_a_bmc_whose_server_is_on_and_well(emulator: Emulator) -> None:
    emulator.start("On")
    assert not [what for severity, what in said(emulator) if severity != "unknown"]


def test_a_server_that_is_off_is_told(emulator: Emulator) -> None:
    emulator.start("Off")
    assert ("error", "system prefill-0: is off") in said(emulator)


def test_another_password_is_told(emulator: Emulator) -> None:
    emulator.start("On")
    assert said(emulator, Access("admin", "wrong")) == [("error", "refuses user and password")]


def test_a_bmc_that_is_not_there_is_told(emulator: Emulator) -> None:
    [(severity, what)] = said(emulator)
    assert severity == "error"
    assert what.startswith("does not answer by Redfish")
