import ipaddress
import socket
from collections.abc import Callable

import pytest

from regauge.errors import ConfigError, TransportError
from regauge.move import plane as module
from regauge.move.plane import LocalAddress, Plane, local_addresses, resolve
from regauge.move.tcp import TcpTransport

KEY = b"0123456789abcdef" * 2


def local(interface: str, text: str, *, usable: bool = True) -> LocalAddress:
    both = ipaddress.ip_interface(text)
    return LocalAddress(interface, both.ip, both.network, usable)


HOST = [
    local("lo", "127.0.0.1/8"),
    local("cmp", "10.210.0.1/16"),
    local("cmp", "fe80::1/64", usable=False),
    local("cmp", "fd00:210::1/64"),
    local("biz", "10.211.0.1/16"),
    local("inner", "10.210.9.1/24"),
    local("p2p", "192.0.2.1/32"),
    local("v6", "fd00:212::1/64"),
]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "local_addresses", lambda: list(HOST))


def test_the_kernel_lists_loopback() -> None:
    found = [each for each in local_addresses() if each.interface == "lo" and each.address.version == 4]
    assert LocalAddress("lo", ipaddress.ip_address("127.0.0.1"), ipaddress.ip_network("127.0.0.0/8"), True) in found


def test_an_interface_that_goes_meanwhile_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(index: int) -> str:
        if not asked:
            asked.append(index)
            raise OSError(6, "No such device or address")
        return name(index)

    asked: list[int] = []
    name, others = socket.if_indextoname, local_addresses()[1:]
    monkeypatch.setattr(socket, "if_indextoname", gone)
    assert local_addresses() == others
    assert asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.210.0.1", Plane("10.210.0.1")),
        ("10.9.9.9", Plane("10.9.9.9")),  # that it is not ours shows when it is bound
        ("cmp", Plane("10.210.0.1", "cmp")),
        ("v6", Plane("fd00:212::1", "v6")),
        ("10.211.0.0/16", Plane("10.211.0.1", network=ipaddress.ip_network("10.211.0.0/16"))),
        ("10.211.7.7/16", Plane("10.211.0.1", network=ipaddress.ip_network("10.211.0.0/16"))),
        ("fd00:210::/32", Plane("fd00:210::1", network=ipaddress.ip_network("fd00:210::/32"))),
        ("localhost", Plane(socket.getaddrinfo("localhost", None)[0][4][0])),
    ],
)
@pytest.mark.usefixtures("host")
def test_a_plane_is_named_by_address_network_interface_or_name(text: str, expected: Plane) -> None:
    assert resolve(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0.0.0.0", "lies on every plane"),  # noqa: S104
        ("::", "lies on every plane"),
        ("172.16.0.0/12", r"no address of this host lies in 172\.16\.0\.0/12; it has 127\.0\.0\.1 \(lo\), 10\.210"),
        ("10.0.0.0/99", "is not a network"),
        ("no-such-thing.invalid", "is no address, network, interface or name of this host"),
        ("a\0b", "is no address"),
        ("", "lies on every plane|is no address|wildcard"),
    ],
)
@pytest.mark.usefixtures("host")
def test_what_names_no_plane_is_refused_with_what_there_is(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(text)


@pytest.mark.parametrize(
    ("plane", "peer", "reason"),
    [
        ("cmp", "10.210.3.4", ""),
        ("cmp", "10.211.3.4", "network of interface biz"),
        ("cmp", "127.0.0.1", "network of interface lo"),
        ("cmp", "10.210.9.7", "network of interface inner"),  # the longest prefix is the way
        ("cmp", "198.51.100.7", ""),  # routed
        ("cmp", "fd00:210::2", "unlike families"),
        ("10.211.0.1", "10.211.3.4", ""),
        ("10.211.0.1", "10.210.3.4", "network of interface cmp"),
        ("10.210.0.0/16", "10.210.9.7", ""),
        ("10.210.0.0/16", "198.51.100.7", "outside this plane's network"),
        ("127.0.0.1", "127.9.9.9", ""),
        ("203.0.113.5", "10.211.3.4", ""),  # an address that is on no interface any more: nothing to compare with
    ],
)
@pytest.mark.usefixtures("host")
def test_a_peer_on_another_plane_is_refused(plane: str, peer: str, reason: str) -> None:
    found = resolve(plane)
    if reason:
        with pytest.raises(TransportError, match=reason):
            found.check(peer)
    else:
        found.check(peer)
    with pytest.raises(TransportError, match="is not an IP address"):
        found.check("name.example")


def test_tcp_stays_on_an_interface() -> None:
    with TcpTransport(key=KEY, name="a", host="lo") as a, TcpTransport(key=KEY, name="b", host="lo") as b:
        assert a.address.startswith("127.0.0.1:")
        with b.connect(a.export(), 10):
            (session,) = a._listener.sessions()
            assert session.sock.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) == b"lo\0"
    with TcpTransport(key=KEY, name="c", host="127.0.0.0/8") as c:
        assert c.address.startswith("127.0.0.1:")


def test_tcp_refuses_what_is_on_another_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    with TcpTransport(key=KEY, name="a") as a, TcpTransport(key=KEY, name="b", host="127.0.0.2") as b:
        monkeypatch.setattr(module, "local_addresses", split_loopback(local_addresses()))
        with pytest.raises(TransportError, match=r"127\.0\.0\.1 lies in the network of interface other"):
            b.connect(a.export(), 10)
        assert a.inbound() == []


def split_loopback(real: list[LocalAddress]) -> Callable[[], list[LocalAddress]]:
    return lambda: [*real, local("lo2", "127.0.0.2/32"), local("other", "127.0.0.1/32")]


def test_without_the_right_to_bind_to_an_interface_the_address_still_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Restricted(socket.socket):
        def setsockopt(self, level: int, option: int, *value: object) -> None:  # type: ignore[override]
            if option == socket.SO_BINDTODEVICE:
                raise PermissionError(1, "Operation not permitted")
            super().setsockopt(level, option, *value)  # type: ignore[call-overload]

    with Restricted() as sock:
        Plane("127.0.0.1", "lo").claim(sock)
        assert sock.getsockname()[0] == "127.0.0.1"
    assert "only the address is bound" in caplog.text


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.210.0.1%cmp", Plane("10.210.0.1", "cmp")),
        ("10.210.0.0/16%cmp", Plane("10.210.0.1", "cmp", ipaddress.ip_network("10.210.0.0/16"))),
        ("10.210.0.0/16%inner", Plane("10.210.9.1", "inner", ipaddress.ip_network("10.210.0.0/16"))),
        ("fe80::1%cmp", Plane("fe80::1", "cmp")),
    ],
)
def test_an_address_or_a_network_on_an_interface(text: str, expected: Plane) -> None:
    assert resolve(text) == expected
    if expected.network is not None:
        with pytest.raises(TransportError, match="lies outside this plane's network"):
            expected.check("10.211.0.9")


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.210.0.0/16%biz", "biz has none there, it has 10.211.0.1"),
        ("10.210.0.1%none", "none has none there, it has no address; this host has 127.0.0.1"),
        ("cmp%cmp", "'cmp' is no address or network"),
        ("0.0.0.0%cmp", "cmp has none there"),
    ],
)
def test_an_interface_that_does_not_have_it_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(text)
