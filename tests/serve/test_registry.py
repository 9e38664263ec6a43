"""Which workers there are, by one source and by several: what the changes say is always what the entries are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import STEADY

from regauge.errors import ConfigError
from regauge.serve import wire
from regauge.serve.registry import Change, Drained, Entry, Joined, Left, Merge, Registry, read


def entry(name: str = "w", port: int = 1, **fields: object) -> Entry:
    rank = wire.RankAddress(name)
    return Entry(wire.WorkerAddress(name, "prefill", f"http://10.0.0.1:{port}", [rank]), **fields)  # type: ignore[arg-type]


def follow(seen: dict[str, tuple[Entry, bool]], changes: list[Change]) -> None:
    """Do what a fleet does."""
    for change in changes:
        match change:
            case Joined(each):
                seen[each.name] = (each, False)
            case Drained(name, draining):
                assert seen[name][1] != draining
                seen[name] = (seen[name][0], draining)
            case Left(name, _):
                del seen[name]


entries = st.builds(
    entry, st.sampled_from("abcd"), st.integers(1, 2), instance=st.sampled_from(["", "1"]), draining=st.booleans(),
    lease_s=st.sampled_from([None, 1.0, 5.0]),
)  # fmt: skip


@STEADY
@given(st.lists(st.lists(entries, max_size=5), max_size=20))
def test_the_changes_say_what_the_entries_are(looks: list[list[Entry]]) -> None:
    registry, seen = Registry(3), dict[str, tuple[Entry, bool]]()
    for look in looks:
        changes, left_out = registry.replace(look, "gone")
        follow(seen, changes)
        wanted = {one.name: one for one in look}
        assert len(registry.entries) == min(len(wanted), 3)
        assert len(registry.entries) + left_out == len(wanted)
        for name, one in registry.entries.items():
            assert one == wanted[name]
            shown, draining = seen[name]
            assert (shown.address, shown.instance, draining) == (one.address, one.instance, one.draining)
        assert seen.keys() == registry.entries.keys()


@STEADY
@given(st.lists(st.tuples(st.integers(0, 2), st.one_of(entries, st.sampled_from("abcd"))), max_size=40))
def test_a_name_belongs_to_one_source_at_a_time(steps: list[tuple[int, Entry | str]]) -> None:
    merge, registries = Merge(taken=["d"]), [Registry(9) for _ in range(3)]
    seen: dict[str, tuple[Entry, bool]] = {}
    first: dict[str, list[int]] = {}
    for source, what in steps:
        registry = registries[source]
        name = what.name if isinstance(what, Entry) else what
        others = [one for one in registry.entries.values() if one.name != name]
        changes, _ = registry.replace([*others, what] if isinstance(what, Entry) else others, "gone")
        told, _ = merge.apply(source, changes)
        follow(seen, told)
        order = first.setdefault(name, [])
        if isinstance(what, Entry):
            order += [] if source in order else [source]
        elif source in order:
            order.remove(source)
        expected = {name: registries[order[0]].entries[name] for name, order in first.items() if order and name != "d"}
        assert seen.keys() == expected.keys()
        for name, one in expected.items():
            assert (seen[name][0].address, seen[name][1]) == (one.address, one.draining)


def test_an_entry_that_is_told_again_says_nothing_and_another_process_joins() -> None:
    registry = Registry(9)
    old, new = entry(instance="old"), entry(instance="new")
    assert registry.replace([old], "left") == ([Joined(old)], 0)
    assert registry.replace([old], "left") == ([], 0)
    assert registry.replace([new], "left") == ([Joined(new)], 0)
    assert registry.replace([], "left") == ([Left("w", "left")], 0)


GOOD = {
    "address": {
        "name": "w",
        "role": "decode",
        "url": "http://10.0.0.2:8000",
        "ranks": [{"name": "w", "control": ["10.0.0.2", 9]}],
    }
}


def test_an_entry_is_read() -> None:
    found = read(msgspec.json.encode(GOOD))
    assert found.address.receivers == {"w": ("10.0.0.2", 9)}
    assert "secret" not in repr(Entry(wire.WorkerAddress("w", "prefill", "http://a:1", token="secret")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, r"address\.name: must be 1 to 128 letters"),
        ({"name": "a\r\nX-Evil: 1"}, r"address\.name: must be 1 to 128 letters"),
        ({"name": "../key"}, r"address\.name: must be 1 to 128 letters"),
        ({"url": "ftp://a"}, r"address\.url: give one like"),
        ({"url": "http://user:pw@a"}, r"address\.url: give one like"),
        ({"url": "http://a:99999"}, r"address\.url: give one like"),
        ({"url": "http://a:80/?x=1"}, r"address\.url: give one like"),
        ({"url": "http://a b"}, r"address\.url: give one like"),
        ({"role": "both"}, r"Invalid enum value 'both'"),
        ({"ranks": []}, r"address\.ranks: name at least one"),
        ({"ranks": [{"name": "w"}]}, r"ranks\.control: every rank of a decode worker has one"),
        ({"ranks": [{"name": "w", "control": ["", 9]}]}, r"ranks\.control: '' is no host"),
        ({"ranks": [{"name": "w", "control": ["h", 0]}]}, r"int` >= 1"),
        ({"ranks": [{"name": "w", "control": ["h", 9], "status": "x"}]}, r"ranks\.status: give one like"),
        ({"ranks": 2 * [{"name": "w", "control": ["h", 9]}]}, r"each under its own name"),
        ({"token": "a b"}, r"address\.token: must be at most 4096 printable"),
        ({"colour": "red"}, r"unknown field `colour`"),
    ],
)
def test_an_entry_with_which_nobody_is_reached_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(msgspec.json.encode({"address": GOOD["address"] | change}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "a worker's entry"), (b" " * 300_000, "has 300000 bytes; at most 262144 are read"), (b"{}", "missing required field `address`"),
        (msgspec.json.encode({**GOOD, "lease_s": 0.1}), "lease_s"), (msgspec.json.encode({**GOOD, "lease_s": 1e9}), "lease_s"),
    ],
)  # fmt: skip
def test_what_is_no_entry_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(data)
