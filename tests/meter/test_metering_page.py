"""docs/metering.md says what the code does: its price book is one, its fields are the receipt's."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from regauge.cli import main
from regauge.meter.prices import load
from regauge.meter.receipt import Receipt

PAGE = (Path(__file__).parents[2] / "docs" / "metering.md").read_text()


def test_the_price_book_of_the_page_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = dedent(PAGE[PAGE.index("    currency =") : PAGE.index("Of the prices that hold")])
    book = load(text.encode())
    assert [p.name for p in book.price] == ["standard", "acme at night"]
    (tmp_path / "prices.toml").write_text(text)
    assert main(["prices", str(tmp_path / "prices.toml")]) == 0
    assert "acme at night" in capsys.readouterr().out


def test_every_field_of_a_receipt_is_in_the_table() -> None:
    table = PAGE[PAGE.index("| field |") : PAGE.index("It is written as one line")]
    named = {name for row in table.splitlines()[2:] if row for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(Receipt.__struct_fields__)
