"""Two hosts that real programs have configured from the rendered files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from host_lab import Host, lab

from regauge.fabric.bill import load
from regauge.fabric.hostnet import wire
from regauge.fabric.render import render

TOPOLOGY = load("lab-2")
DIALS = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4]), source_address=(sys.argv[3], 0)) as s:
    s.sendall(b'x'); print(s.recv(1).decode())
"""
ECHOES = """
import selectors, socket, sys
chosen = selectors.DefaultSelector()
for port in sys.argv[1:]:
    chosen.register(socket.create_server(("0.0.0.0", int(port))), selectors.EVENT_READ)
print("listening", flush=True)
while True:
    for key, _ in chosen.select():
        taken, _ = key.fileobj.accept()
        taken.settimeout(5)
        with taken: taken.sendall(taken.recv(1))
"""


@pytest.fixture(scope="module", params=["networkd", "netplan"])
def hosts(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Host]]:
    with lab(TOPOLOGY, request.param) as found:
        yield found["lab-prefill"], found["lab-decode"]


def test_every_address_mtu_rule_and_route_is_as_meant(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        rules = {(rule["src"], rule["table"]) for rule in host.ip("rule") if rule["priority"] == 1000}
        expected = wire(TOPOLOGY, host.server)
        assert rules == {(str(each.nic.address), str(each.table)) for each in expected if each.table}
        for each in expected:
            (shown,) = host.ip("addr", "show", "dev", each.nic.interface)
            addresses = [f"{a['local']}/{a['prefixlen']}" for a in shown["addr_info"]]
            assert addresses == [f"{each.nic.address}/{each.nic.network.prefixlen}"]  # and no IPv6
            assert shown["mtu"] == each.mtu
            for route in each.routes:
                table = str(route.table or "main")
                found = [
                    r
                    for r in host.ip("route", "show", "table", table)
                    if r["dst"] == route.to and r.get("metric", 0) == route.metric
                ]
                assert len(found) == 1, (route, host.ip("route", "show", "table", table))
                assert (found[0].get("gateway", ""), found[0].get("prefsrc", "")) == (route.via, route.source)
                assert found[0].get("type", "unicast") == (route.kind if route.kind == "unreachable" else "unicast")
                assert route.kind == "unreachable" or found[0]["dev"] == each.nic.interface
    assert not any("ignoring" in host.log.read_text() for host in hosts)  # networkd's word for what it does not know


@pytest.mark.parametrize(("rail", "to"), [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_rail_sends_jumbo_frames_to_every_rail_through_its_own_nic(
    hosts: tuple[Host, Host], rail: int, to: int
) -> None:
    prefill, decode = hosts
    source, target = prefill.server.on("compute")[rail], decode.server.on("compute")[to]
    before, answered = prefill.sent(), decode.sent()
    prefill.run("ping", "-c", "5", "-i", "0.05", "-W", "2", "-M", "do", "-s", str(TOPOLOGY.planes["compute"].mtu - 28),
                "-I", str(source.address), str(target.address))  # fmt: skip
    by_nic = {name: sent - before[name] for name, sent in prefill.sent().items()}
    back = {name: sent - answered[name] for name, sent in decode.sent().items()}
    assert by_nic[source.interface] >= 5 * 9000
    assert back[target.interface] >= 5 * 9000
    assert all(sent < 9000 for name, sent in by_nic.items() if name != source.interface)
    assert all(sent < 9000 for name, sent in back.items() if name != target.interface)


def test_each_address_is_answered_for_by_its_own_nic(hosts: tuple[Host, Host]) -> None:
    prefill, decode = hosts
    for nic in decode.server.on("compute"):
        prefill.run("ping", "-c", "1", "-W", "2", "-I", str(prefill.server.on("compute")[0].address), str(nic.address))
        (entry,) = prefill.ip("neigh", "show", str(nic.address), "dev", "cmp0")
        assert entry["lladdr"] == decode.link(nic.interface)["address"]


def test_what_management_sends_goes_by_management_and_the_rest_by_business(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        (plain,), (managed,) = (
            host.ip("route", "get", "192.0.2.1"),
            host.ip("route", "get", "192.0.2.1", "from", str(host.server.on("management")[0].address)),
        )
        assert (plain["dev"], managed["dev"]) == ("biz0", "mgm0")


def test_a_host_without_compute_nics_sends_no_kv_after_the_default_route() -> None:
    with lab(TOPOLOGY) as found:
        prefill = found["lab-prefill"]
        for nic in prefill.server.on("compute"):
            prefill.run("ip", "link", "set", nic.interface, "down")
        got = prefill.run("ip", "route", "get", "10.210.0.12", ok=False)
        assert got.returncode != 0
        assert "No route to host" in got.stderr


# -- nftables ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Host, Host]]:
    """Both hosts with the rules; on each, somebody answers on every interface at the ports of a gateway, workers and transports."""
    with lab(TOPOLOGY) as found:
        listeners = []
        for host in found.values():
            (text,) = render(TOPOLOGY, ["nftables"], host.server.name).values()
            path = host.log.parent / "regauge.nft"
            path.write_text(text)
            host.run("nft", "-f", str(path))
            host.run("nft", "-f", str(path))  # again: it replaces itself
            listener = subprocess.Popen(["ip", "netns", "exec", host.space, "python3", "-c", ECHOES, "22", "8000", "8001", "9000", "15001", "40000"],
                                        stdout=subprocess.PIPE, text=True)  # fmt: skip
            listeners.append(listener)
            assert listener.stdout is not None
            assert listener.stdout.readline() == "listening\n"
        try:
            yield found["lab-prefill"], found["lab-decode"]
        finally:
            for listener in listeners:
                listener.kill()
                listener.communicate()


def reaches(host: Host, plane: str, target: Host, port: int) -> bool:
    there, here = (side.server.on(plane)[0].address for side in (target, host))
    return host.python(DIALS, str(there), str(port), str(here), "1.0", ok=False).stdout == "x\n"


@pytest.mark.parametrize(("plane", "port", "open_"), [
    ("compute", 15_001, True),  # Mooncake's handshake
    ("compute", 40_000, True),  # a transport at a port that the kernel gave
    ("compute", 9_000, True),  # control connections
    ("compute", 22, False),
    ("compute", 8_001, False),
    ("business", 8_000, True),  # the gateway
    ("business", 22, True),  # nobody else's business
    ("business", 15_001, False),
    ("business", 40_000, False),
    ("business", 9_000, False),  # a worker, asked by another than the gateway
    ("business", 8_001, False),
    ("management", 8_001, True),  # metrics
    ("management", 40_000, False),
    ("management", 9_000, False),
])  # fmt: skip
def test_ports_are_open_on_their_planes_alone(guarded: tuple[Host, Host], plane: str, port: int, open_: bool) -> None:
    prefill, decode = guarded
    assert reaches(prefill, plane, decode, port) is open_


def test_the_gateway_reaches_workers(guarded: tuple[Host, Host]) -> None:
    prefill, decode = guarded
    assert reaches(decode, "business", prefill, 9_000)


def test_kv_does_not_leave_by_another_plane_whatever_the_routes_say(guarded: tuple[Host, Host]) -> None:
    prefill, decode = guarded
    target = str(decode.server.on("compute")[0].address)
    prefill.run(
        "ip", "route", "add", f"{target}/32", "via", str(decode.server.on("business")[0].address), "dev", "biz0"
    )
    try:
        here = str(prefill.server.on("business")[0].address)
        tried = prefill.python(DIALS, target, "40000", here, "1.0", ok=False)
        assert "Network is unreachable" in tried.stderr  # at once, not after a time-out
    finally:
        prefill.run("ip", "route", "del", f"{target}/32")


def test_an_address_of_compute_is_not_reached_through_business(guarded: tuple[Host, Host]) -> None:
    prefill, decode = guarded
    prefill.run("nft", "flush", "chain", "inet", "regauge", "output")  # a neighbour that has no rules
    target = str(decode.server.on("compute")[0].address)
    prefill.run(
        "ip", "route", "add", f"{target}/32", "via", str(decode.server.on("business")[0].address), "dev", "biz0"
    )
    assert (
        prefill.python(DIALS, target, "40000", str(prefill.server.on("business")[0].address), "1.0", ok=False).stdout
        == ""
    )
    counted = decode.run("nft", "list", "chain", "inet", "regauge", "input").stdout
    (line,) = [each for each in counted.splitlines() if "an address of the compute plane, through another" in each]
    assert "packets 0" not in line
