"""The drawing, and the one in the documentation."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from bill_cases import bills, changed, made
from hypothesis import given, settings

from regauge.fabric.bill import load, shipped
from regauge.fabric.drawing import MOST, WIDTH, drawing
from regauge.fabric.topology import Topology

SVG = "{http://www.w3.org/2000/svg}"


def drawn(topology: Topology) -> ET.Element:
    return ET.fromstring(drawing(topology)["topology.svg"])  # noqa: S314  # our own


def words(root: ET.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_documentation_has_what_the_code_draws() -> None:
    shown = Path(__file__).parents[2] / "docs" / "topology.svg"
    assert shown.read_text() == drawing(load("prefill-12-decode-1"))["topology.svg"]


@pytest.mark.parametrize("name", shipped())
def test_every_server_plane_and_port_count_is_there(name: str) -> None:
    topology = load(name)
    text = words(drawn(topology))
    assert {server.name for server in topology.servers} <= set(text)
    for plane in topology.planes.values():
        assert any(line.startswith(f"{plane.name}: {plane.switch}, ") for line in text)
    if name == "prefill-12-decode-1":
        assert "compute: roce-400g, 104 of 128 ports of 400G" in text


@settings(max_examples=20)
@given(bills())
def test_boxes_lie_within_the_picture_and_not_on_each_other(bill: dict[str, Any]) -> None:
    boxes = [each for each in drawn(made(bill)).iter(f"{SVG}rect") if each.get("class") == "box"]
    spans = sorted((float(each.get("x", 0)), float(each.get("width", 0))) for each in boxes)
    assert 1 <= len(spans) <= MOST
    assert spans[0][0] >= 0
    assert spans[-1][0] + spans[-1][1] <= WIDTH
    assert all(x + width < after for (x, width), (after, _) in pairwise(spans))


def test_many_servers_are_folded_and_counted() -> None:
    bill = changed("servers.0.count", 40)
    for name, ports in (("fast", 128), ("biz", 48), ("mgm", 96)):
        bill["switches"][name]["ports"] = ports
    text = words(drawn(made(bill)))
    assert "p0" in text
    assert "d0" in text
    assert f"{41 - (MOST - 1)} more" in text


def test_names_are_escaped() -> None:
    root = drawn(made(changed("gateway", "d0") | {"description": "a < b & c"}))
    assert "a < b & c" in words(root)
