"""What a store must do, whichever database it is in. The fixture `url` names an empty one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from store_process import receipt_time

from meter_cases import DAY_US, HOUR_US, NOON_US, arrivals, request, requests, signed
from regauge.errors import StoreError
from regauge.meter import database
from regauge.meter.receipt import Receipt, Side
from regauge.meter.reconcile import reconcile
from regauge.meter.store import Missing, Store
from regauge.meter.writer import Ledger, Writer

SIDES: tuple[Side, ...] = ("gateway", "prefill", "decode")
_examples = count()


def add(store: Store, *receipts: Receipt, after_us: int = 10_000) -> int:
    return store.add([(signed(r), r.ended_us + after_us) for r in receipts])


@settings(max_examples=15)
@given(
    st.lists(st.builds(tuple, st.tuples(requests(), st.sets(st.sampled_from(SIDES), min_size=1))), max_size=5),
    st.data(),
)
def check_against_reconcile(url: str, drawn: list[tuple[dict[Side, Receipt], set[Side]]], data: st.DataObject) -> None:
    tenant = f"tenant-{next(_examples)}"
    told = [
        replace(made[side], request=f"{tenant}/{n}", tenant=tenant)
        for n, (made, sides) in enumerate(drawn) for side in sorted(sides)
    ]  # fmt: skip
    again = data.draw(
        st.permutations(told + data.draw(st.lists(st.sampled_from(told), max_size=3) if told else st.just([])))
    )
    store = Store(url)
    for at in range(0, len(again), 4):
        add(store, *again[at : at + 4])
    entries = []
    for n in range(len(drawn)):
        name = f"{tenant}/{n}"
        expected = reconcile(arrivals([r for r in told if r.request == name]))
        assert store.entry(name) == expected
        entries.append(expected)
    used = store.usage(0, NOON_US * 2, tenant=tenant)
    assert sum(u.requests for u in used) == len(entries)
    for field in ("prompt", "cached", "computed", "transferred", "converted", "generated"):
        assert sum(getattr(u, field) for u in used) == sum(getattr(e, field) for e in entries)
    assert sum(u.remap_bytes for u in used) == sum(e.wire_bytes.get("REMAP", 0) for e in entries)
    paid = store.charged(tenant, 0, NOON_US * 2)
    assert [sum(x) for x in zip(*(p[3:] for p in paid), strict=True)] == (
        [sum(x) for x in zip(*(e.charged for e in entries if e.status == "agreed"), strict=True)]
    )
    assert sorted(s.receipt.request + s.receipt.side for s in store.receipts(tenant=tenant)) == sorted(
        r.request + r.side for r in told
    )
    assert {(m.request, m.side) for m in store.missing() if m.request.startswith(f"{tenant}/")} == {
        (e.request, side) for e in entries for side in e.missing
    }
    store.close()


def test_the_store_says_what_reconcile_says(url: str) -> None:
    check_against_reconcile(url)


def test_a_receipt_twice_changes_nothing_and_another_is_flagged(url: str) -> None:
    store, made = Store(url), request()
    assert add(store, *made.values()) == 3
    before = store.entry("r-1")
    assert add(store, *made.values(), after_us=DAY_US) == 0
    assert store.entry("r-1") == before
    assert add(store, replace(made["decode"], generated=51)) == 1
    entry = store.entry("r-1")
    assert entry is not None
    assert (entry.status, entry.charged) == ("differs", (0, 0, 0))
    assert [e.request for e in store.troubled(0, NOON_US * 2)] == ["r-1"]
    assert store.charged("acme", 0, NOON_US * 2) == []
    assert (store.uncharged("acme", 0, NOON_US * 2).differs, store.tenants(0, NOON_US * 2)) == (1, ["acme"])
    store.close()


def test_usage_by_hour_and_day(url: str) -> None:
    store = Store(url)
    times = (NOON_US, NOON_US + HOUR_US - 1, NOON_US + HOUR_US, NOON_US + DAY_US)
    for n, at_us in enumerate(times):
        add(store, *request(f"r-{n}", at_us=at_us).values())
    failed = request("r-9")["gateway"]
    add(store, replace(failed, outcome="failed", generated=0))
    hours = store.usage(NOON_US, NOON_US + 2 * DAY_US, bucket="hour")
    assert [(u.at_us, u.requests, u.generated) for u in hours] == [
        (NOON_US, 2, 100), (NOON_US + HOUR_US, 1, 50), (NOON_US + DAY_US, 1, 50)
    ]  # fmt: skip
    days = store.usage(NOON_US, NOON_US + 2 * DAY_US)
    assert [(u.at_us, u.requests) for u in days] == [(NOON_US - 12 * HOUR_US, 3), (NOON_US + 12 * HOUR_US, 1)]
    assert store.usage(NOON_US, NOON_US + DAY_US, model="other") == []
    assert store.usage(NOON_US, NOON_US + DAY_US, tenant="x' OR 'a' = 'a") == []
    assert store.uncharged("acme", 0, NOON_US * 2).void == 1
    store.close()


def test_a_reader_makes_and_changes_nothing(url: str) -> None:
    with pytest.raises(StoreError, match=r"no such file|is no store"):
        Store(url, create=False)
    Store(url).close()
    reader = Store(url, create=False)
    assert reader.entry("r-1") is None
    reader.close()


def test_the_schema_is_brought_up_to_date_and_a_newer_one_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(url)
    add(store, *request().values())
    store.close()
    steps = (*database.MIGRATIONS, ("ALTER TABLE entries ADD COLUMN colour TEXT", "UPDATE entries SET colour = 'red'"))
    with monkeypatch.context() as newer:
        newer.setattr(database, "MIGRATIONS", steps)
        with pytest.raises(StoreError, match="is of schema 1; a gateway of this version brings it up to date"):
            Store(url, create=False)
        raw = database.connect(url)
        assert raw.execute("SELECT request, colour FROM entries") == [("r-1", "red")]
        raw.close()
    with pytest.raises(StoreError, match="of schema 2, made by a newer regauge; this one knows 1"):
        Store(url)


def test_one_writer_at_a_time_so_that_the_last_word_on_a_request_is_of_all_of_it(url: str) -> None:
    """Two that reconcile at once, each without what the other has not committed, would leave an entry that lacks a side."""
    made = request()
    store = Store(url)
    add(store, made["gateway"])
    other = database.connect(url)
    done = threading.Event()

    def write() -> None:
        own = Store(url)
        add(own, made["decode"])
        own.close()
        done.set()

    thread = threading.Thread(target=write)
    with other.transaction():
        other.execute("UPDATE regauge_meter SET version = version")
        thread.start()
        assert not done.wait(0.3)
    thread.join()
    assert done.is_set()
    add(store, made["prefill"])
    entry = store.entry("r-1")
    assert entry is not None
    assert entry.status == "agreed"
    store.close()
    other.close()


def test_an_error_leaves_nothing_of_its_batch(url: str) -> None:
    store = Store(url)
    raw = database.connect(url)
    with pytest.raises(StoreError, match="nowhere"):
        _two(raw, "INSERT INTO regauge_meter VALUES (7)", "INSERT INTO nowhere VALUES (7)")
    assert raw.execute("SELECT version FROM regauge_meter") == [(1,)]
    raw.close()
    add(store, *request().values())  # and the next is as ever
    store.close()


def _two(raw: database.Database, *statements: str) -> None:
    with raw.transaction():
        for statement in statements:
            raw.execute(statement)


@pytest.mark.process
@pytest.mark.parametrize("batch_s", [3_600.0, 0.001])
def test_what_a_killed_gateway_lost_is_made_again_from_the_workers(url: str, batch_s: float) -> None:
    """Nothing that was flushed is lost; and what was not is charged all the same, to the token."""
    durable, more = 30, 100
    with _killed(url, durable, more, batch_s) as said:
        assert said == ["durable\n", "put\n"]
    workers = {side: Ledger() for side in ("prefill", "decode")}
    for n in range(durable + more):
        receipts = request(f"r-{n:04}", at_us=receipt_time(n))
        for side in ("prefill", "decode"):
            workers[side].add(signed(receipts[side]))
    store = Store(url)
    here = sum(store.entry(f"r-{n:04}") is not None for n in range(durable + more))
    assert here >= durable
    assert here == durable if batch_s > 1 else True
    newest = store.newest()
    assert newest["d-0"] >= receipt_time(durable - 1)
    number = 0
    for ledger in workers.values():
        number, got = 0, 1
        while got:
            found, number = ledger.since(number, 64)
            got = len(found)
            store.add([(s, s.receipt.ended_us) for s in found if s.receipt.ended_us >= newest["d-0"] - HOUR_US])
    lost = store.missing(NOON_US, ended_before_us=NOON_US + DAY_US)
    assert set(lost) == {Missing(f"r-{n:04}", "gateway", "") for n in range(here, durable + more)}
    for request_id, _, _ in lost:
        receipt = store.recover(request_id, "gw-0")
        assert receipt is not None
        add(store, receipt)
    assert store.missing() == []
    charged = store.charged("acme", 0, NOON_US * 2)
    count = durable + more
    assert [sum(x) for x in zip(*(c[2:] for c in charged), strict=True)] == [
        count,
        300 * count,
        700 * count,
        50 * count,
    ]
    store.close()


class _killed:  # noqa: N801  # reads as what it does
    """A process that meters, killed once it has said "put"."""

    def __init__(self, url: str, durable: int, more: int, batch_s: float) -> None:
        cases = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, str(Path(__file__).with_name("store_process.py")), url, durable, more, batch_s]
        self._process = subprocess.Popen(
            [str(x) for x in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=cases
        )

    def __enter__(self) -> list[str]:
        assert self._process.stdout is not None
        return [self._process.stdout.readline(), self._process.stdout.readline()]

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_writer_writes_in_batches_and_all_of_it(url: str) -> None:
    writer = Writer(url, batch_limit=7)
    for n in range(20):
        for receipt in request(f"r-{n}").values():
            writer.put(signed(receipt))
    writer.close()
    assert (writer.waiting, writer.error) == (0, "")
    with pytest.raises(StoreError, match="the meter is closed"):
        writer.put(signed(request()["gateway"]))
    store = Store(url, create=False)
    assert store.usage(0, NOON_US * 2)[0].requests == 20
    store.close()
