"""Each fault that the doctor knows, over a host without one: exactly its finding, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_hosts import (
    DEPLOYMENT,
    NAME,
    ROCE,
    addresses_of,
    expected,
    green,
    set_addresses,
    set_app,
    set_pfc,
    set_route,
)

from regauge.config import ServeConfig, decode
from regauge.fabric.bill import load
from regauge.fabric.check_peers import NAMES
from regauge.fabric.doctor import CHECKS, examine, sorted_findings
from regauge.fabric.doctor import green as is_green
from regauge.fabric.expected import Expected, from_host, from_topology
from regauge.fabric.finding import Finding
from regauge.fabric.host import Record, Recorded

assert ROCE is not None
PEER = DEPLOYMENT.server("decode-0")
CONF, NET, IB = "/proc/sys/net/ipv4/conf", "/sys/class/net", "/sys/class/infiniband"
Patch = Callable[[Record], object]


def set_file(path: str, text: str | None) -> Patch:
    return lambda record: record.files.__setitem__(path, text)


def moved(record: Record) -> None:
    own = addresses_of(record)
    own["cmp4"] += own["cmp3"]
    own["cmp3"] = []
    set_addresses(record, own)


def without_address(record: Record) -> None:
    set_addresses(record, addresses_of(record) | {"cmp2": []})


def gone(record: Record) -> None:
    own = addresses_of(record)
    del own["cmp5"]
    set_addresses(record, own)
    record.files = {path: text for path, text in record.files.items() if "/cmp5/" not in path}


def two_planes(record: Record) -> None:
    own = addresses_of(record)
    own["biz0"].append("10.210.9.9/16")
    set_addresses(record, own)


def by_business(record: Record) -> None:
    set_route(record, str(PEER.on("compute")[0].address), str(DEPLOYMENT.server(NAME).on("compute")[0].address), "biz0")


def no_way(record: Record) -> None:
    set_route(record, str(PEER.on("business")[0].address), str(DEPLOYMENT.server(NAME).on("business")[0].address), None)


def other_rail(record: Record) -> None:
    set_route(record, str(PEER.on("compute")[3].address), str(DEPLOYMENT.server(NAME).on("compute")[3].address), "cmp0")


def gid_moved(record: Record) -> None:
    """The index that is used is RoCE v1; v2 of the address is at 5."""
    base = f"{IB}/mlx5_4/ports/1"
    right = record.files[f"{base}/gids/3"]
    record.files |= {
        f"{base}/gid_attrs/types/3": "IB/RoCE v1",
        f"{base}/gids/5": right,
        f"{base}/gid_attrs/types/5": "RoCE v2",
    }


FAULTS: dict[str, tuple[Patch, str, str, str]] = {
    "wrong MTU": (set_file(f"{NET}/cmp1/mtu", "1500"), "mtu", "cmp1", "ip link set dev cmp1 mtu 9000"),
    "MTU of the business plane": (set_file(f"{NET}/biz0/mtu", "9000"), "mtu", "biz0", "mtu 1500"),
    "an address is missing": (without_address, "address", "cmp2", r"ip address add 10.210.2.11/24 dev cmp2"),
    "an address on another port": (moved, "address", "cmp3", "ip address del 10.210.3.11/24 dev cmp4"),
    "an interface is missing": (gone, "address", "cmp5", "udevadm"),
    "two planes on one port": (two_planes, "overlap", "biz0", "ip address del 10.210.9.9 dev biz0"),
    "a port is set down": (set_file(f"{NET}/cmp6/flags", "0x1002"), "link", "cmp6", "ip link set dev cmp6 up"),
    "no partner": (set_file(f"{NET}/cmp7/operstate", "down"), "link", "cmp7", "ethtool -m cmp7"),
    "slow link": (set_file(f"{NET}/cmp0/speed", "100000"), "speed", "cmp0", "autoneg on"),
    "half duplex": (set_file(f"{NET}/mgm0/duplex", "half"), "speed", "mgm0", "duplex full"),
    "KV's route by the business plane": (by_business, "route", "cmp0", r"ip route replace \S+/32 dev cmp0"),
    "no route": (no_way, "route", "biz0", "ip route add 10.211.0.0/24 dev biz0"),
    "another rail's port": (other_rail, "route", "cmp3", "dev cmp3"),
    "default route by compute": (
        lambda r: r.commands.__setitem__("ip -j route show default", '[{"dst": "default", "dev": "cmp0"}]'), "route", "cmp0", "ip route del default dev cmp0",
    ),
    "any port answers": (set_file(f"{CONF}/cmp2/arp_ignore", "0"), "rails", "cmp2", "arp_ignore=1"),
    "foreign addresses announced": (set_file(f"{CONF}/cmp2/arp_announce", "0"), "rails", "cmp2", "arp_announce=2"),
    "strict reverse path": (set_file(f"{CONF}/cmp4/rp_filter", "1"), "rails", "cmp4", "rp_filter=2"),
    "no RDMA device": (lambda r: (r.folders[IB] or []).remove("mlx5_2"), "rdma-device", "mlx5_2", "modprobe"),
    "RDMA device of another port": (lambda r: r.folders.__setitem__(f"{IB}/mlx5_1/device/net", ["mgm0"]), "rdma-device", "mlx5_1", "rdma link show"),
    "RDMA port down": (set_file(f"{IB}/mlx5_3/ports/1/state", "1: DOWN"), "rdma-port", "mlx5_3", "rdma link show mlx5_3/1"),
    "GID of RoCE v1": (gid_moved, "gid", "mlx5_4", "roce.gid_index = 5"),
    "GID of another address": (set_file(f"{IB}/mlx5_0/ports/1/gids/3", "0000:0000:0000:0000:0000:ffff:0ad3:000b"), "gid", "mlx5_0", "ip address add 10.210.0.11/24"),
    "no flow control": (lambda r: set_pfc(r, "cmp0"), "pfc", "cmp0", f"all:off {ROCE.priority}:on"),
    "flow control for all": (lambda r: set_pfc(r, "cmp1", *range(8)), "pfc", "cmp1", "all:off"),
    "priority not by DSCP": (lambda r: set_app(r, "cmp2"), "trust", "cmp2", f"dscp-prio {ROCE.dscp}:{ROCE.priority}"),
    "congestion is not heeded": (set_file(f"{NET}/cmp3/ecn/roce_rp/enable/{ROCE.priority}", "0"), "ecn", f"{NET}/cmp3/ecn/roce_rp/enable/{ROCE.priority}", "echo 1 >"),
    "traffic class": (set_file(f"{IB}/mlx5_5/tc/1/traffic_class", "Global tclass=0"), "traffic-class", "mlx5_5", "traffic_class"),
    "narrow slot": (set_file(f"{NET}/cmp6/device/current_link_width", "8"), "pcie", "cmp6", "lspci -vv -s 0000:ba:00.0"),
    "slow slot": (set_file(f"{NET}/cmp6/device/current_link_speed", "8.0 GT/s PCIe"), "pcie", "cmp6", "lspci"),
    "NIC at the other socket": (set_file(f"{NET}/cmp0/device/numa_node", "1"), "numa", "cmp0", "node 0"),
    "peer-memory module": (set_file("/proc/modules", "mtgpu 9437184 0 - Live 0x0"), "peer-memory", "/proc/modules", "modprobe mt_peermem"),
    "memlock": (set_file("/proc/self/limits", "Max locked memory         8388608              8388608              bytes"), "memlock", "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"),
    "no large pages": (set_file("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"), "hugepages", "/sys/kernel/mm/transparent_hugepage/enabled", "echo madvise"),
    "clock off": (
        lambda r: r.commands.__setitem__("chronyc -c tracking", "C0A80001,10.212.0.1,3,1796083760.1,2.5,0.1,0.2,-3.1,0.001,0.02,0.0005,0.0001,64.2,Normal"),
        "clock", "clock", "chronyc makestep",
    ),
    "clock on its own": (
        lambda r: r.commands.__setitem__("chronyc -c tracking", "00000000,,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised"), "clock", "clock", "chronyc",
    ),
    "rules not loaded": (lambda r: r.commands.__setitem__("nft -j list tables", '{"nftables": []}'), "firewall", "nftables", "nft -f"),
}  # fmt: skip
"""What is wrong -> a patch over the green host, the check and the place that tell it, and a part of the command that mends it."""
UNKNOWN: dict[str, tuple[Patch, str]] = {
    "no dcb": (lambda r: r.commands.pop("dcb -j pfc show dev cmp0"), "pfc"),
    "dcb prints no JSON": (lambda r: r.commands.__setitem__("dcb -j app show dev cmp0", "dscp-prio 26:3"), "trust"),
    "no ecn in sysfs": (lambda r: r.files.pop(f"{NET}/cmp0/ecn/roce_np/enable/{ROCE.priority}"), "ecn"),
    "no traffic class in sysfs": (lambda r: r.files.pop(f"{IB}/mlx5_0/tc/1/traffic_class"), "traffic-class"),
    "no nft": (lambda r: r.commands.pop("nft -j list tables"), "firewall"),
    "no chrony, no timedatectl": (lambda r: r.commands.pop("chronyc -c tracking"), "clock"),
}


def look(record: Record, wanted: Expected | None = None) -> list[Finding]:
    return examine(Recorded(record), wanted or expected())


def test_nothing_is_wrong_with_the_green_host() -> None:
    assert look(green()) == []


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_told_once_and_nothing_else_is(name: str) -> None:
    patch, check, where, mend = FAULTS[name]
    record = green()
    patch(record)
    [found] = look(record)
    assert (found.check, found.where) == (check, where)
    assert found.severity != "unknown"
    assert re.search(mend, found.mend), found.mend
    assert found.what
    assert found.why
    assert not is_green([found])


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_looked_at_is_said(name: str) -> None:
    patch, check = UNKNOWN[name]
    record = green()
    patch(record)
    [found] = look(record)
    assert (found.check, found.severity) == (check, "unknown")
    assert is_green([found])


def test_every_check_can_find_something() -> None:
    found = {check for _, check, *_ in FAULTS.values()} | {"idle", "devices", "line-rate"}
    assert found == set(CHECKS)


def test_the_page_lists_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs/doctor.md").read_text()
    assert re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE) == [*CHECKS, *NAMES, "bmc"]


# -- the bug reports ---------------------------------------------------------------------------------------------------


def config(text: str) -> ServeConfig:
    return decode(text.encode())


NIXL = '[transfer]\ntransport = "nixl"\n[transfer.flow]\nnic_bytes_per_s = 50e9\n[transfer.nixl]\ntransports = "rc"\ndevices = '
ALL = "[" + ", ".join(f'"{nic.rdma}:1"' for nic in DEPLOYMENT.server(NAME).on("compute")) + "]"


def test_all_compute_nics_named_is_green() -> None:
    assert look(green(), expected(config=config(NIXL + ALL))) == []


@pytest.mark.parametrize("number", ["Mooncake#429", "vllm#43799"])
def test_nics_that_stay_idle(number: str) -> None:
    """Four of eight NICs carried nothing, and nobody was told."""
    [found] = look(green(), expected(config=config(NIXL + '["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]')))
    assert (found.check, found.what) == ("idle", "4 of 8 compute NICs are not used: cmp4, cmp5, cmp6, cmp7")
    assert number in found.why


def test_a_library_that_takes_every_interface() -> None:
    """NIXL without devices sends half of its bytes over another plane."""
    [found] = look(green(), expected(config=config(NIXL + "[]")))
    assert (found.check, found.where) == ("devices", "transfer.nixl.devices")
    assert ALL in found.mend


def test_a_device_of_another_plane() -> None:
    [found] = look(green(), expected(config=config(NIXL + ALL.replace('"mlx5_0:1"', '"mlx5_0:1", "biz0"'))))
    assert (found.check, found.what) == ("devices", "'biz0' is not of the compute plane")


def test_a_wrong_gid_sglang_30737() -> None:
    record = green()
    gid_moved(record)
    [found] = look(record)
    assert found.severity == "error"
    assert "sglang#30737" in found.why


def test_a_nic_across_the_socket_sglang_39584() -> None:
    record = green()
    record.files[f"{NET}/cmp4/device/numa_node"] = "0"
    [found] = look(record)
    assert "sglang#39584" in found.why


def test_speeds_above_the_line_rate_sglang_31877() -> None:
    """Flow control that believes in 50 GB/s on a port of 100 Gbit/s predicts, and shows, more than the line."""
    record = green()
    for nic in DEPLOYMENT.server(NAME).on("compute"):
        record.files[f"{NET}/{nic.interface}/speed"] = "100000"
    found = {each.check: each for each in look(record, expected(config=config(NIXL + ALL)))}
    assert set(found) == {"speed", "line-rate"}
    assert "sglang#31877" in found["line-rate"].why
    assert found["line-rate"].mend == "transfer.flow.nic_bytes_per_s = 1.25e+10"


def test_tcp_names_its_nics_too() -> None:
    text = '[transfer]\ntransport = "tcp"\nhost = "cmp0"\n'
    [found] = look(green(), expected(config=config(text)))
    assert (found.check, found.where) == ("idle", "transfer.nics")
    nics = ", ".join(f'"{nic.interface}"' for nic in DEPLOYMENT.server(NAME).on("compute"))
    assert look(green(), expected(config=config(f"{text}nics = [{nics}]"))) == []


# -- without a topology ------------------------------------------------------------------------------------------------


def test_a_configuration_alone_says_which_planes_there_are() -> None:
    planes = '[planes]\ncompute = "cmp0"\nbusiness = "10.211.0.0/24"\nmanagement = "mgm0"\n'
    record = green()
    wanted = from_host(Recorded(record), config(planes))
    assert {(port.plane, port.interface) for port in wanted.ports} == {
        ("compute", "cmp0"),
        ("business", "biz0"),
        ("management", "mgm0"),
    }
    assert look(record, wanted) == []


def test_a_plane_that_the_host_has_not_is_told() -> None:
    wanted = from_host(Recorded(green()), config('[planes]\ncompute = "ens9"\n'))
    [found] = look(green(), wanted)
    assert (found.check, found.where) == ("address", "planes.compute")


def test_planes_that_overlap_by_their_networks() -> None:
    planes = '[planes]\ncompute = "cmp0"\nbusiness = "biz0"\n'
    record = green()
    set_addresses(record, addresses_of(record) | {"biz0": ["10.210.0.77/16"]})
    found = look(record, from_host(Recorded(record), config(planes)))
    assert {each.check for each in found} == {"overlap"}


def test_findings_of_one_plane() -> None:
    record = green()
    for interface in ("cmp1", "biz0"):
        record.files[f"{NET}/{interface}/mtu"] = "1400"
    assert [each.where for each in examine(Recorded(record), expected(), ["business"])] == ["biz0"]
    assert [each.where for each in sorted_findings(look(record))] == ["cmp1", "biz0"]


def test_a_tcp_lab_is_not_asked_for_rdma() -> None:
    lab = from_topology(load("lab-2"), "lab-prefill")
    assert not lab.rdma


@pytest.mark.parametrize("check", CHECKS)
def test_a_host_that_says_nothing_breaks_no_check(check: str) -> None:
    """But one: without addresses there is nothing to look at, and that is said."""
    record = Record(commands={"ip -j address show": "[]"})
    findings: list[Any] = list(CHECKS[check](Recorded(record), expected()))
    assert all(isinstance(each, Finding) for each in findings)


@pytest.mark.parametrize(
    "said", ['[{"ifname": "cmp0", "addr_info": [{"family": "inet"}, 7]}, {}]', '[{"addr_info": {}}]', "[null]"]
)
def test_rubbish_from_ip_breaks_no_check(said: str) -> None:
    record = green()
    record.commands["ip -j address show"] = said
    assert {each.check for each in look(record)} == {"address"}
