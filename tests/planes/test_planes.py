"""KV stays on its plane, whatever the others carry. Between two network namespaces: see `net.py`.

Run by `make test-planes`, as root. Times are medians of interleaved rounds, compared with the same run's quiet ones.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from net import PLANES, Net, Node, address

from certificates import Authority

MIB = 1 << 20
NOISE = 32 << 10
"""Bytes of address resolution and acknowledgements that a plane may see meanwhile."""
ROUNDS = 5


@pytest.fixture
def nodes(net: Net) -> Iterator[Callable[[str], Node]]:
    with ExitStack() as stack:
        yield lambda host: stack.enter_context(Node(net, host))


def link(prefill: Node, decode: Node, here: str, there: str, kind: str = "tcp", folder: str = "") -> None:
    exported = decode.ask(f"open {kind} {there} {folder}")
    prefill.ask(f"open {kind} {here} {folder}")
    assert prefill.ask(f"connect {exported}") == "ok"


@pytest.mark.parametrize("kind", ["tcp"])
@pytest.mark.parametrize(
    ("here", "there"),
    [
        ("pcmp", "dcmp"),
        ("10.210.0.1", "10.210.0.2"),
        ("10.210.0.0/24", "10.210.0.0/24"),
        ("10.210.0.0/24%pcmp", "10.210.0.2%dcmp"),
    ],
    ids=["interface", "address", "network", "tied"],
)
def test_kv_stays_on_the_compute_plane(
    net: Net, nodes: Callable[[str], Node], kind: str, here: str, there: str
) -> None:
    prefill, decode = nodes("p"), nodes("d")
    before, back = net.sent("p"), net.sent("d")
    link(prefill, decode, here, there, kind)
    prefill.ask(f"write {8 * MIB}")
    there_bytes, back_bytes = net.since(before, "p"), net.since(back, "d")
    assert 8 * MIB <= there_bytes["cmp"] < 9 * MIB
    for plane in ("biz", "mgm"):
        assert there_bytes[plane] < NOISE
        assert back_bytes[plane] < NOISE


def test_the_counters_see_kv_on_another_plane(net: Net, nodes: Callable[[str], Node]) -> None:
    before = net.sent()
    link(prefill := nodes("p"), nodes("d"), "pbiz", "dbiz")
    prefill.ask(f"write {MIB}")
    found = net.since(before)
    assert found["biz"] >= MIB
    assert found["cmp"] < NOISE


def test_tls_stays_on_its_plane_too(net: Net, nodes: Callable[[str], Node], tmp_path: Path) -> None:
    Authority(tmp_path).issue("worker")
    before = net.sent()
    link(prefill := nodes("p"), nodes("d"), "pcmp", "dcmp", folder=str(tmp_path))
    prefill.ask(f"write {MIB}")
    found = net.since(before)
    assert MIB <= found["cmp"] < 1.2 * MIB
    assert max(found["biz"], found["mgm"]) < NOISE


def test_an_interface_holds_against_a_wrong_route_and_an_address_does_not(
    net: Net, nodes: Callable[[str], Node]
) -> None:
    """Linux answers for any of its addresses on any interface, and routes by the target alone."""
    net.ip("p", "route", "add", "10.210.0.2/32", "via", "10.211.0.2", "dev", "pbiz")
    try:
        for here, there in (("10.210.0.0/24%pcmp", "10.210.0.0/24%dcmp"), ("pcmp", "dcmp")):
            before = net.sent()
            link(prefill := nodes("p"), decode := nodes("d"), here, there)
            prefill.ask(f"write {MIB}")
            bound = net.since(before)
            assert bound["cmp"] >= MIB
            assert bound["biz"] < NOISE
        before = net.sent()
        link(prefill := nodes("p"), nodes("d"), "10.210.0.1", "10.210.0.2")
        prefill.ask(f"write {MIB}")
        assert net.since(before)["biz"] >= MIB
        listening = bytes.fromhex(decode.ask("open tcp dcmp")).decode(errors="replace")
        port = listening.split("10.210.0.2:")[1][:5]
        assert prefill.ask(f"reach 10.210.0.1 10.210.0.2:{port}") != "reached"  # came in through dbiz
    finally:
        net.ip("p", "route", "del", "10.210.0.2/32")
    assert prefill.ask(f"reach 10.210.0.1 10.210.0.2:{port}") == "reached"


def test_both_workers_may_be_on_one_host(net: Net, nodes: Callable[[str], Node]) -> None:
    before = net.sent()
    link(prefill := nodes("p"), nodes("p"), "pcmp", "pcmp")
    prefill.ask(f"write {MIB}")
    assert max(net.since(before).values()) < NOISE


def test_a_peer_of_another_plane_is_refused(nodes: Callable[[str], Node]) -> None:
    prefill, decode = nodes("p"), nodes("d")
    exported = decode.ask("open tcp dbiz")
    prefill.ask("open tcp pcmp")
    answer = prefill.ask(f"connect {exported}")
    assert answer.startswith(
        "error TransportError: the peer's address 10.211.0.2 lies in the network of interface pbiz"
    )


def test_control_connections_have_a_plane_of_their_own(net: Net, nodes: Callable[[str], Node]) -> None:
    prefill, decode = nodes("p"), nodes("d")
    link(prefill, decode, "pcmp", "dcmp")
    port = decode.ask("control_server dbiz")
    before, back = net.sent("p"), net.sent("d")
    assert prefill.ask(f"control pbiz 10.211.0.2 {port} {MIB}") == "ok"
    for found in (net.since(before, "p"), net.since(back, "d")):
        assert MIB <= found["biz"] < 1.2 * MIB
        assert max(found["cmp"], found["mgm"]) < NOISE
    answer = prefill.ask(f"control pcmp 10.211.0.2 {port} 10")
    assert "lies in the network of interface pbiz" in answer


def slowdown(quiet: Callable[[], float], start: Callable[[], object], stop: Callable[[], object]) -> float:
    """Median time while something else runs, over the median without; interleaved."""
    alone, beside = [], []
    for _ in range(ROUNDS):
        alone.append(quiet())
        start()
        beside.append(quiet())
        stop()
    return statistics.median(beside) / statistics.median(alone)


@pytest.mark.parametrize(("plane", "least", "most"), [("cmp", 0.5, 1.5), ("biz", 1.6, 100.0)], ids=["apart", "shared"])
def test_a_saturated_business_plane_slows_kv_only_if_they_share_it(
    nodes: Callable[[str], Node], plane: str, least: float, most: float
) -> None:
    prefill, decode, client, server = nodes("p"), nodes("d"), nodes("p"), nodes("d")
    link(prefill, decode, f"p{plane}", f"d{plane}")
    port = server.ask(f"sink {address('biz', 'd')}")
    nbytes = 8 * MIB if plane == "cmp" else 4 * MIB
    prefill.ask(f"write {nbytes}")
    ratio = slowdown(
        lambda: float(prefill.ask(f"write {nbytes}")),
        lambda: client.ask(f"flood {address('biz', 'p')} {address('biz', 'd')} {port} 8"),
        lambda: client.ask("rest"),
    )
    assert least < ratio < most


@pytest.mark.parametrize(("plane", "least", "most"), [("cmp", 0.5, 1.5), ("biz", 1.6, 100.0)], ids=["apart", "shared"])
def test_saturating_kv_slows_business_only_if_they_share_a_plane(
    nodes: Callable[[str], Node], plane: str, least: float, most: float
) -> None:
    prefill, decode, client, server = nodes("p"), nodes("d"), nodes("p"), nodes("d")
    link(prefill, decode, f"p{plane}", f"d{plane}")
    here, there = address("biz", "p"), address("biz", "d")
    port = server.ask(f"sink {there}")
    ratio = slowdown(
        lambda: float(client.ask(f"request {here} {there} {port} {2 * MIB}")),
        lambda: prefill.ask("keep_writing"),
        lambda: prefill.ask("rest"),
    )
    assert least < ratio < most


def test_the_planes_are_what_they_should_be(net: Net, nodes: Callable[[str], Node]) -> None:
    """Rates are in order, so that the tests above compare what they say."""
    assert set(net.sent()) == set(PLANES)
    seconds = {}
    for plane in PLANES:
        prefill, decode = nodes("p"), nodes("d")
        link(prefill, decode, f"p{plane}", f"d{plane}")
        prefill.ask(f"write {MIB // 2}")
        seconds[plane] = statistics.median(float(prefill.ask(f"write {MIB // 2}")) for _ in range(3))
    assert seconds["cmp"] < seconds["biz"] < seconds["mgm"]
