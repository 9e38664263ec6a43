"""A BMC is a stranger: over real TLS, its links take the password nowhere, and its answers end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent))

from redfish_answers import MANAGER, PASSWORD, ROOT, SYSTEM, USER, Bmc, healthy

from regauge.fabric import redfish
from regauge.fabric.bmc import Access
from regauge.fabric.finding import Finding


@pytest.fixture
def bmc(tmp_path: Path) -> Iterator[Bmc]:
    with Bmc(healthy(), tmp_path).running() as made:
        yield made


def ask(bmc: Bmc, *, verify: bool = False) -> list[Finding]:
    return list(redfish.check(bmc.url, Access(USER, PASSWORD, verify=verify)))


def test_a_server_that_is_on_and_well_gives_nothing(bmc: Bmc) -> None:
    assert ask(bmc) == []


def test_whoever_has_another_certificate_is_not_told_the_password(bmc: Bmc) -> None:
    [found] = ask(bmc, verify=True)
    assert "certificate" in found.what.lower()
    assert bmc.asked == []


@pytest.mark.parametrize("scheme", ["https", "http"])
@pytest.mark.parametrize("redirected", [False, True])
def test_the_password_goes_to_no_other_host(bmc: Bmc, tmp_path: Path, scheme: str, redirected: bool) -> None:
    (tmp_path / "other").mkdir()
    with Bmc(healthy(), tmp_path / "other").running() as other:
        link = other.url.replace("https", scheme) + f"{ROOT}Systems"
        if redirected:
            bmc.answers[f"{ROOT}Systems"] = link
        else:
            bmc.answers[ROOT]["Systems"]["@odata.id"] = link
        [found] = ask(bmc)
        assert "points to another host" in found.what
        assert other.asked == []


def test_an_endless_answer_is_cut(bmc: Bmc) -> None:
    bmc.answers[SYSTEM] = json.dumps({"Id": "x" * redfish.MOST_BYTES}).encode()
    [found] = ask(bmc)
    assert "larger than 1048576 bytes" in found.what


def test_a_slow_trickle_is_given_up(bmc: Bmc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redfish, "ALL_S", 0.3)
    bmc.drip_s = 0.02
    [found] = ask(bmc)
    assert "took more than 0.3 s" in found.what


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"7", b"\xff", 503, 404, {"Id": "1"}])
def test_what_is_no_redfish_is_told(bmc: Bmc, answer: Any) -> None:
    bmc.answers[SYSTEM] = answer
    assert ask(bmc) != []


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["On", "OK", SYSTEM]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["@odata.id", "Health", "x"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    st.sampled_from([ROOT, f"{ROOT}Systems", SYSTEM, MANAGER]),
    st.sampled_from(["Id", "Name", "Status", "PowerState", "Members", "Systems", "Links", "Boot", "@odata.id"]),
    _JSON,
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_answer_is_told_and_breaks_nothing(bmc: Bmc, where: str, field: str, value: Any) -> None:
    bmc.answers = healthy()
    bmc.answers[where][field] = value
    assert all(each.what.isprintable() for each in ask(bmc))
