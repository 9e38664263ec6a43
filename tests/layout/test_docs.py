"""The worked example of docs/layouts.md: its layout is sound, and lies where the page says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from regauge.cli import main
from regauge.layout.files import decode
from regauge.layout.records import RECORDS
from regauge.layout.spec import parse_order
from regauge.layout.view import bytes_per_token, check_memory, region_sizes
from tensors import where, where_scales

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose heading starts so."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[2:]]


def test_the_worked_example_lies_where_the_page_says() -> None:
    block = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    layout = check_memory(decode(block[1].encode(), format="toml"))
    group = layout.groups[0]
    found = rows("| array | layer |")
    assert len(found) == 6
    for name, *index, byte in found:
        offsets = where_scales(group, "v") if name == "scale of v" else where(group, name)
        layer, page, token, head, element = map(int, index)
        assert offsets[layer, page, token, head, element] == int(byte)
    takes = re.search(r"A token takes (\d+) bytes on this rank, the pool of 64 pages (\d+)\.", PAGE)
    assert takes is not None
    assert bytes_per_token(layout) == int(takes[1])
    assert region_sizes(layout) == {"pool": int(takes[2])}
    assert list(layout.heads(group, group.components[0])) == [2, 3]


def test_the_orders_on_the_page_are_orders() -> None:
    orders = [order for _, cell in rows("| cache | order |") for order in re.findall(r"`((?:layer|page)[^`]*)`", cell)]
    assert len(orders) == 10
    for order in orders:
        parse_order(order, required=("page",))


def test_the_records_on_the_page_are_the_records() -> None:
    named = {name for cell, *_ in rows("| record | bytes per token |") for name in re.findall(r"`(\w+)`", cell)}
    assert named == set(RECORDS)


@pytest.mark.parametrize("line", re.findall(r"^    (regauge (?:layout|check) .*)$", PAGE, re.MULTILINE))
def test_the_commands_on_the_page_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out
