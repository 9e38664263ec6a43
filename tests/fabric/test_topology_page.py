"""docs/topology.md has every key of the file, and no other; every kind that is rendered."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from regauge.cli_topology import _KINDS
from regauge.fabric import bill
from regauge.fabric.render import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "topology.md").read_text()


def keys(after: str) -> list[str]:
    """First column of the first table after some words."""
    table = re.search(r"\n\|[^\n]*\|\n\|-[^\n]*\n((?:\|[^\n]*\n)+)", PAGE[PAGE.index(after) :])
    assert table is not None
    return [key for row in table[1].splitlines() for key in re.findall(r"`([^`]*)`", row.split("|")[1])]


@pytest.mark.parametrize(("kind", "after"), [
    (bill.PlaneBill, "`[planes.compute]` (KV)"), (bill.RoceBill, "`[planes.compute.roce]`:"), (bill.SwitchBill, "`[switches.NAME]`;"),
    (bill.ServersBill, "`[[servers]]`, groups"), (bill.NicBill, "| `nics` | list of tables"), (bill.ServingBill, "`[serving]`, what runs"),
])  # fmt: skip
def test_every_key_is_in_its_table(kind: type[msgspec.Struct], after: str) -> None:
    assert sorted(keys(after)) == sorted(kind.__struct_fields__)


def test_every_key_of_the_whole_and_of_small_tables_is_named() -> None:
    assert set(keys("## The file")) | {"planes", "switches", "servers", "serving"} == set(bill.Bill.__struct_fields__)
    for small in (bill.CableBill, bill.AcceleratorsBill):
        assert all(f"`{name}`" in PAGE for name in small.__struct_fields__)


def test_every_kind_is_in_the_table_and_in_the_help() -> None:
    assert keys("## What is rendered") == list(KINDS) == _KINDS.split(", ")
