"""Two ends of a measurement over real sockets on loopback."""

import secrets
import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.fabric.check_peers import judge
from regauge.fabric.expected import Expected, Port
from regauge.fabric.peers import PORT, Between, Listener, _largest, measure, split

KEY = secrets.token_bytes(32)
LO = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(LO, 0, KEY) as made:
        yield made


def test_the_way_to_a_peer_is_measured(listener: Listener) -> None:
    seen = measure(LO, listener.port, KEY, 9_000, seconds=0.1)
    assert (seen.reach, seen.error, seen.path_mtu, seen.source) == ("listening", "", 9_000, LO)
    assert seen.sent_bits is not None
    assert seen.received_bits is not None
    assert min(seen.sent_bits, seen.received_bits) > 1e6
    assert seen.offset_s is not None
    assert seen.uncertainty_s is not None
    assert abs(seen.offset_s) <= seen.uncertainty_s + 1e-6  # one clock on both ends


def test_without_seconds_no_bandwidth_is_measured(listener: Listener) -> None:
    seen = measure(LO, listener.port, KEY, 1_500, seconds=0)
    assert (seen.sent_bits, seen.received_bits, seen.path_mtu) == (None, None, 1_500)


def test_another_key_is_a_stranger(listener: Listener) -> None:
    seen = measure(LO, listener.port, secrets.token_bytes(32), 1_500)
    assert seen.reach == "stranger"
    assert "keys" in seen.error


def test_a_host_without_a_listener_still_says_that_large_packets_arrive() -> None:
    with socket.socket() as closed:
        closed.bind((LO, 0))  # bound, not listening: nobody else gets the port
        seen = measure(LO, closed.getsockname()[1], KEY, 9_000)
    assert (seen.reach, seen.path_mtu, seen.sent_bits) == ("refused", 9_000, None)


def test_probes_without_the_token_are_not_answered(listener: Listener) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        stranger.sendto(bytes(1_000), (LO, listener.port))
        with pytest.raises(TimeoutError):
            stranger.recv(100)


def test_what_is_no_handshake_ends_its_own_connection_only(listener: Listener) -> None:
    with socket.create_connection((LO, listener.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        assert stranger.recv(100)[:4] in (b"RGAU", b"")
    assert measure(LO, listener.port, KEY, 1_500, seconds=0).reach == "listening"


@given(st.integers(576, 65_000), st.integers(576, 65_000))
def test_the_search_finds_the_largest_that_arrives(limit: int, most: int) -> None:
    assert _largest(most, lambda size: size <= limit) == min(limit, most)


@given(st.integers(577, 65_000))
def test_a_way_that_carries_nothing_has_no_mtu(most: int) -> None:
    assert _largest(most, lambda _: False) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("10.0.0.1", ("10.0.0.1", PORT)), ("10.0.0.1:7", ("10.0.0.1", 7)), ("fd00::1", ("fd00::1", PORT)), ("[fd00::1]:7", ("fd00::1", 7))],
)  # fmt: skip
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert split(text) == found


@pytest.mark.parametrize("text", ["", "host", "10.0.0.1:x", "10.0.0.1:70000", "[fd00::1]"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"port|numeric"):
        split(text)


# -- what the figures mean ---------------------------------------------------------------------------------------------

HERE = "10.210.0.11"
OWN = Port("compute", "cmp0", IPv4Address(HERE), IPv4Network("10.210.0.0/24"), mtu=9_000, speed=400_000_000_000)
WELL = {"path_mtu": 9_000, "sent_bits": 20e9, "received_bits": 20e9, "offset_s": 0.001, "uncertainty_s": 0.0001}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"path_mtu": 1_500}, [("path-mtu", "error")]),
        ({"path_mtu": None}, [("path-mtu", "unknown")]),
        ({"sent_bits": 0.4e9}, [("bandwidth", "error")]),
        ({"received_bits": 0.4e9}, [("bandwidth", "error")]),
        ({"offset_s": -0.5}, [("skew", "error")]),
        ({"offset_s": 0.15, "uncertainty_s": 0.145}, [("skew", "unknown")]),
        ({"reach": "silent", "error": "timed out"}, [("reach", "error")]),
        ({"reach": "stranger"}, [("reach", "error")]),
        ({"reach": "refused"}, [("reach", "unknown")]),
        ({"error": "the peer closed the connection", "path_mtu": None}, [("reach", "error")]),
    ],
)
def test_each_figure_that_is_wrong_is_one_finding(changed: dict[str, object], found: list[tuple[str, str]]) -> None:
    seen = Between(**{"peer": "10.210.0.23", "source": HERE, "reach": "listening"} | WELL | changed)  # type: ignore[arg-type]
    judged = list(judge(seen, Expected("here", ports=(OWN,))))
    assert [(each.check, each.severity) for each in judged] == found
    assert all(each.mend and each.why for each in judged)
