"""The store's contract in a real PostgreSQL, and what is peculiar to a server."""

from __future__ import annotations

import json

import pytest
from postgres_server import Server
from store_contract import *  # noqa: F403  # the contract's tests

from meter_cases import NOON_US, request, signed
from regauge.cli import main
from regauge.errors import StoreError
from regauge.meter.store import Store
from regauge.meter.writer import Writer


def test_a_server_that_goes_and_comes_back_loses_nothing(url: str, server: Server) -> None:
    writer = Writer(url, batch_s=0.0)
    writer.put(signed(request("r-1")["gateway"]))
    writer.flush()
    server.stop()
    try:
        for receipt in request("r-2").values():
            writer.put(signed(receipt))
        with pytest.raises(StoreError, match=r"3 receipts are not durable: .+"):
            writer.flush(0.2)
    finally:
        server.start()
    writer.flush()
    writer.close()
    store = Store(url, create=False)
    entries = [store.entry("r-1"), store.entry("r-2")]
    assert [e.status for e in entries if e is not None] == ["missing", "agreed"]
    store.close()


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(StoreError) as caught:
        Store("postgresql://me:secret@127.0.0.1:1/db")
    assert str(caught.value).startswith("postgresql://me@127.0.0.1:1/db: ")
    assert "secret" not in str(caught.value)


def test_the_command_line_reads_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(url)
    store.add([(signed(r), NOON_US) for r in request().values()])
    store.close()
    assert main(["usage", "--store", url, "--from", "2026-10-01", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["tenant"], row["prompt"], row["generated"]) == ("acme", 1_000, 50)
