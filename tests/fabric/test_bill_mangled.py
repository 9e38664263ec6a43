"""Whatever stands in a bill, it becomes a topology that can be rendered, or is refused with ConfigError; nothing else comes of it."""

from __future__ import annotations

from typing import Any

from bill_cases import made, small
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.fabric.render import render

VALUES = st.one_of(
    st.sampled_from([0, 1, 2, 3, 8, 24, 31, 63, 300, 4_095, 70_000, -1, 1 << 70, 0.5, True, "", "no", "0G", "1G", "25G", "100G", "400G", "12.5G",
                     "d0", "p{n}", "{n}", "compute", "management", "10.210.0.0/16", "10.211.0.9", "0.0.0.0/0", "::/0", "10.210.1.0/30", [], {}]),
    st.text(max_size=8), st.integers(), st.lists(st.sampled_from(["compute", "business", 0, ""]), max_size=3),
)  # fmt: skip


def places(at: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = at.items() if isinstance(at, dict) else enumerate(at) if isinstance(at, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def mangled(draw: st.DrawFn) -> dict[str, Any]:
    """The small bill with one to three values replaced, taken out, or put beside another."""
    bill = small()
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from([place for place in places(bill) if place]))
        at: Any = bill
        for part in parents:
            at = at[part]
        what = draw(st.sampled_from(["set", "drop", "copy", "add"]))
        if what == "drop":
            del at[last]
        elif what == "copy" and isinstance(at, list):
            at.append(at[last])
        elif what == "add" and isinstance(at, dict):
            at[
                draw(
                    st.sampled_from(
                        ["vlan", "rail", "router", "numa", "pci", "speed", "address", "first", "count", "breakout"]
                    )
                )
            ] = draw(VALUES)
        else:
            at[last] = draw(VALUES)
    return bill


@settings(max_examples=400)
@given(mangled())
def test_a_mangled_bill_is_built_or_refused(bill: dict[str, Any]) -> None:
    try:
        topology = made(bill)
    except ConfigError as error:
        refused = str(error)
    else:
        refused = ""
        assert render(topology)
    assert not refused or refused.startswith("bill.toml: ")
