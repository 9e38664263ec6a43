"""KV that the libraries move stays on its plane. Between two network namespaces, as root: see tests/planes/net.py."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from net import Net, Node, missing, network

MIB = 1 << 20
NOISE = 32 << 10
"""Bytes of address resolution and acknowledgements that a plane may see meanwhile."""


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    if reason := missing():
        pytest.fail(reason)  # never skipped: whoever runs these tests wants to know
    with network() as made:
        yield made


@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_kv_stays_on_the_compute_plane(net: Net, kind: str) -> None:
    with ExitStack() as stack:
        prefill, decode = stack.enter_context(Node(net, "p")), stack.enter_context(Node(net, "d"))
        before, back = net.sent("p"), net.sent("d")
        exported = decode.ask(f"open {kind} dcmp")
        prefill.ask(f"open {kind} pcmp")
        assert prefill.ask(f"connect {exported}") == "ok"
        float(prefill.ask(f"write {8 * MIB}"))
        there, returned = net.since(before, "p"), net.since(back, "d")
        assert 8 * MIB <= there["cmp"] < 9 * MIB
        for plane in ("biz", "mgm"):
            assert there[plane] < NOISE
            assert returned[plane] < NOISE


@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_sides_on_different_planes_are_refused(net: Net, kind: str) -> None:
    with ExitStack() as stack:
        prefill, decode = stack.enter_context(Node(net, "p")), stack.enter_context(Node(net, "d"))
        exported = decode.ask(f"open {kind} dbiz")
        prefill.ask(f"open {kind} pcmp")
        before = net.sent("p")
        assert "another plane" in prefill.ask(f"connect {exported}")
        assert max(net.since(before).values()) < NOISE
