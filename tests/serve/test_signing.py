"""Signing keys of a deployment: made once, trusted, never replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge import keys
from regauge.errors import ConfigError
from regauge.meter.receipt import Receipt, load_trust, sign
from regauge.serve.signing import TRUST, prepare


def word(name: str) -> Receipt:
    return Receipt(
        request="r", side="prefill", by=name, model="m", prefill=name, began_us=1, ended_us=2, outcome="failed", prompt=1,
        cached=0, computed=0, transferred=0, converted=0, wire_bytes={})  # fmt: skip


def test_what_lacks_is_made_and_what_is_there_is_used(tmp_path: Path) -> None:
    first = prepare(tmp_path, ["gw"], ["p-0"])
    data = {name: path.read_bytes() for name, path in first.items()}
    again = prepare(tmp_path, ["gw"], ["p-0", "p-1"])
    assert {name: again[name].read_bytes() for name in data} == data
    assert sorted(again) == ["gw", "p-0", "p-1"]
    trust = load_trust(tmp_path / TRUST)
    for name in ("p-0", "p-1"):
        trust.check(sign(word(name), keys.load_private(again[name])))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pub")) == [
        f"{TRUST}/gateways/gw.pub", f"{TRUST}/workers/p-0.pub", f"{TRUST}/workers/p-1.pub"]  # fmt: skip
    assert all(path.stat().st_mode & 0o077 == 0 for path in again.values())


def test_the_key_before_stays_trusted(tmp_path: Path) -> None:
    old = keys.load_private(prepare(tmp_path, [], ["p-0"])["p-0"])
    (tmp_path / "p-0.key").unlink()
    new = keys.load_private(prepare(tmp_path, [], ["p-0"])["p-0"])
    trust = load_trust(tmp_path / TRUST)
    for key in (old, new):
        trust.check(sign(word("p-0"), key))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path, [], ["p-0"])["p-0"].chmod(0o644)
    with pytest.raises(ConfigError, match="others can read this private key"):
        prepare(tmp_path, [], ["p-0"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"meter\.keys names the folder"):
        prepare(tmp_path / "file", ["gw"], [])
