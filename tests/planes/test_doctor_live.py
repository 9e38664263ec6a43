"""The doctor on real hosts of namespaces: green as they are rendered, and for each fault the finding that names it. As root: `lab.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, lab


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        for server in made.topology.servers:
            done = made.run(server.name, "nft", "-f", str(made.rendered(server.name, "nftables/regauge.nft")))
            assert done.returncode == 0, done.stderr
        yield made


def test_hosts_as_they_are_rendered_are_green(host: Lab) -> None:
    assert [host.doctor(server.name) for server in host.topology.servers] == [[], [], []]


@pytest.mark.parametrize(
    ("fault", "check", "where", "what"),
    [
        ("ip link set cmp0 mtu 1500", "mtu", "cmp0", "MTU 1500, and the plane has 9000"),
        ("ip link set biz0 mtu 1400", "mtu", "biz0", "MTU 1400, and the plane has 1500"),
        ("ip route add 10.210.0.13 via 10.211.0.13 dev biz0 table 100", "route", "cmp0", "what goes to d (10.210.0.13) leaves by biz0 (business)"),
        ("ip route add 10.210.1.13 dev cmp0 table 101", "route", "cmp1", "what goes to d (10.210.1.13) leaves by cmp0 (compute)"),
        ("ip route add 10.211.0.13 via 10.210.0.13 dev cmp0", "route", "biz0", "what goes to d (10.211.0.13) leaves by cmp0 (compute)"),
        ("ip route add default via 10.210.0.13", "route", "cmp0", "the default route leaves by the compute plane"),
        ("ip link set mgm0 down", "link", "mgm0", "the interface is set down"),
        ("ip address del 10.210.0.11/24 dev cmp0", "address", "cmp0", "cmp0 does not have 10.210.0.11"),
        ("ip address add 10.210.0.77/24 dev biz0", "overlap", "biz0", "it has addresses of several planes: 10.211.0.11 (business), 10.210.0.77 (compute)"),
        ("sysctl -w net.ipv4.conf.cmp1.arp_ignore=0", "rails", "cmp1", "net.ipv4.conf.cmp1.arp_ignore is 0"),
        ("sysctl -w net.ipv4.conf.cmp0.arp_announce=0", "rails", "cmp0", "net.ipv4.conf.cmp0.arp_announce is 0"),
        ("ip rule del from 10.210.1.11", "rails", "cmp1", "net.ipv4.conf.cmp1.rp_filter is 1"),
    ],
)  # fmt: skip
def test_a_fault_is_told_and_its_command_mends_it(host: Lab, fault: str, check: str, where: str, what: str) -> None:
    assert host.run("p0", *fault.split()).returncode == 0
    found = host.doctor("p0")
    assert [(each["check"], each["where"], each["what"]) for each in found] == [(check, where, what)]
    done = host.run("p0", "sh", "-c", found[0]["mend"])
    assert done.returncode == 0, done.stderr
    assert host.doctor("p0") == []


@pytest.mark.parametrize(
    ("node", "fault", "check", "where", "what"),
    [
        ("switches", "ip link set p0-cmp1 down", "link", "cmp1", "the port has no partner"),
        ("p0", "ip link del mgm0", "address", "mgm0", "there is no interface mgm0"),
        ("p0", "nft delete table inet regauge", "firewall", "nftables", "there is no table regauge"),
    ],
)
def test_what_a_person_mends_is_told_too(host: Lab, node: str, fault: str, check: str, where: str, what: str) -> None:
    assert host.run(node, *fault.split()).returncode == 0
    [found] = host.doctor("p0")
    assert (found["check"], found["where"]) == (check, where)
    assert found["what"].startswith(what)  # the kernel's word for a lost carrier comes a little later


@pytest.mark.parametrize(
    ("old", "new", "check", "where", "what"),
    [
        ('"cmp1",', "", "idle", "transfer.nics", "1 of 2 compute NICs are not used: cmp1"),
        ('transport = "tcp"', 'transport = "nixl"', "devices", "transfer.nixl.devices", "no device is named"),
    ],
)
def test_a_fault_of_the_configuration_is_told(host: Lab, old: str, new: str, check: str, where: str, what: str) -> None:
    config = host.rendered("p0", "regauge/worker.toml")
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    assert (check, where, what) in [(each["check"], each["where"], each["what"]) for each in host.doctor("p0")]
