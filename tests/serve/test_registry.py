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
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), entries), st.tuples(st.just("take"), st.sampled_from("abcd")),
        st.tuples(st.just("expire"), st.integers(0, 9)), st.tuples(st.just("replace"), st.lists(entries, max_size=5)),
    ), max_size=30,
)  # fmt: skip


@STEADY
@given(steps)
def test_the_changes_say_what_the_entries_are(steps: list[tuple[str, object]]) -> None:
    registry, seen, now = Registry(3), dict[str, tuple[Entry, bool]](), 0.0
    for what, value in steps:
        match what, value:
            case "put", Entry():
                full = value.name not in registry.entries and len(registry.entries) == 3
                if full:
                    with pytest.raises(ConfigError, match="there are 3 workers already"):
                        registry.put(value, now)
                else:
                    follow(seen, registry.put(value, now))
            case "take", str():
                follow(seen, registry.take(value, "asked"))
            case "expire", int():
                now += value
                ended = {name for name, one in registry.entries.items() if one.lease_s is not None}
                before = set(registry.entries)
                follow(seen, registry.expire(now))
                assert before - set(registry.entries) <= ended
                assert registry.next_end is None or registry.next_end > now
            case "replace", list():
                changes, left_out = registry.replace(value, now, "gone")
                follow(seen, changes)
                wanted = {one.name: one for one in value}
                assert len(registry.entries) + left_out == len(wanted)
                assert all(wanted[name] == one for name, one in registry.entries.items())
        assert len(registry.entries) <= 3
        for name, one in registry.entries.items():
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
        changes = registry.put(what, 0.0) if isinstance(what, Entry) else registry.take(what, "gone")
        told, _ = merge.apply(source, changes)
        follow(seen, told)
        name = what.name if isinstance(what, Entry) else what
        order = first.setdefault(name, [])
        if isinstance(what, Entry):
            order += [] if source in order else [source]
        elif source in order:
            order.remove(source)
        expected = {name: registries[order[0]].entries[name] for name, order in first.items() if order and name != "d"}
        assert seen.keys() == expected.keys()
        for name, one in expected.items():
            assert (seen[name][0].address, seen[name][1]) == (one.address, one.draining)


def test_a_renewed_lease_says_nothing_and_lasts() -> None:
    registry = Registry(9)
    assert registry.put(entry(lease_s=5), 0.0) == [Joined(entry(lease_s=5))]
    assert registry.put(entry(lease_s=5), 4.0) == []
    assert registry.expire(8.9) == []
    assert registry.next_end == 9.0
    assert registry.expire(9.0) == [Left("w", "its lease has ended")]


def test_what_an_earlier_process_says_does_not_take_a_later_one_away() -> None:
    registry = Registry(9)
    registry.put(entry(instance="old"), 0.0)
    assert registry.put(entry(instance="new"), 0.0) == [Joined(entry(instance="new"))]
    assert registry.take("w", "left", "old") == []
    assert registry.take("w", "left", "new") == [Left("w", "left")]


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
