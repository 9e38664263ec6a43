"""The store in SQLite, and what is peculiar to a file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from store_contract import *  # noqa: F403  # the contract's tests

from meter_cases import request, signed
from regauge.errors import StoreError
from regauge.meter.database import shown
from regauge.meter.store import Store
from regauge.meter.writer import Ledger, Writer


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "receipts.db")


def test_a_store_that_fails_keeps_what_came_until_it_works_again(url: str, tmp_path: Path) -> None:
    writer = Writer(url, batch_s=0.0, queue_limit=3)
    away = tmp_path / "away.db"
    Path(url).rename(away)
    Path(url).mkdir()
    for receipt in request().values():
        writer.put(signed(receipt))
    with pytest.raises(StoreError, match=r"3 receipts are not durable: .*receipts\.db: unable to open"):
        writer.flush(0.2)
    with pytest.raises(StoreError, match=r"3 receipts wait: .*unable to open"):
        writer.put(signed(request("r-2")["gateway"]))
    Path(url).rmdir()
    away.rename(url)
    writer.flush()
    assert (writer.waiting, writer.error) == (0, "")
    writer.close()


def test_a_writer_that_cannot_write_ends_all_the_same(url: str) -> None:
    writer = Writer(url, batch_s=0.0)
    Path(url).unlink()
    Path(url).mkdir()
    writer.put(signed(request()["gateway"]))
    began = time.monotonic()
    with pytest.raises(StoreError, match="1 receipts are not durable"):
        writer.close(0.1)
    assert time.monotonic() - began < 30
    assert writer.waiting == 1


@pytest.mark.parametrize("content", [b"no database at all, but long enough to be one" * 100, None])
def test_a_file_that_is_no_store_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "x.db"
    path.mkdir() if content is None else path.write_bytes(content)
    for create in (True, False):
        with pytest.raises(StoreError, match=r"x\.db|not a database"):
            Store(str(path), create=create)
    with pytest.raises(StoreError, match=r"x\.db|not a database"):
        Writer(str(path))


def test_a_password_is_not_shown() -> None:
    assert shown("postgresql://me:se@cret@host:5432/db?x=1") == "postgresql://me@host:5432/db?x=1"
    assert shown("postgresql://host/db") == "postgresql://host/db"
    assert shown("a@b/receipts.db") == "a@b/receipts.db"


def test_a_ledger_keeps_the_newest_and_is_asked_by_number() -> None:
    ledger = Ledger(limit=3)
    made = [signed(request(f"r-{n}")["prefill"]) for n in range(5)]
    assert [ledger.add(one) for one in made] == [1, 2, 3, 4, 5]
    assert ledger.since(0) == (made[2:], 5)
    assert ledger.since(3, limit=1) == ([made[3]], 4)
    assert ledger.since(5) == ([], 5)
    assert ledger.get("r-4", "prefill") == made[4]
    assert ledger.get("r-0", "prefill") is None
    assert ledger.add(made[3]) == 6  # again: it is the newest
    assert ledger.since(0) == ([made[2], made[4], made[3]], 6)
