"""The rules of nftables, as text; tests/real_hosts loads them and sends packets."""

from __future__ import annotations

from typing import Any

from bill_cases import bills, changed, made, nics
from hypothesis import given, settings

from regauge.fabric.nftables import nftables, worker_ports
from regauge.fabric.topology import Topology


def rules(topology: Topology, host: str) -> str:
    return nftables(topology)[f"hosts/{host}/nftables/regauge.nft"]


@settings(max_examples=20)
@given(bills())
def test_every_host_that_carries_kv_names_all_of_its_nics_and_its_network(bill: dict[str, Any]) -> None:
    topology = made(bill)
    for server in topology.of_role("prefill", "decode"):
        said = rules(topology, server.name)
        names = ", ".join(f'"{nic.interface}"' for nic in server.on("compute"))
        assert f"iifname {{ {names} }} jump from_compute" in said
        assert f"ip daddr {topology.planes['compute'].network} oifname != {{ {names} }} counter reject" in said
        assert said.count("{") == said.count("}")


def test_only_the_gateway_asks_workers() -> None:
    assert 'iifname "biz0" ip saddr 10.211.0.13 tcp dport 9000-9063 accept' in rules(made(), "p0")


def test_metrics_are_open_on_management_alone_and_only_where_the_gateway_runs() -> None:
    assert 'iifname != { "mgm0" } tcp dport 8001 counter drop' in rules(made(), "d0")
    assert "8001" not in rules(made(), "p0")


def test_a_gateway_without_a_compute_plane_has_rules_without_one() -> None:
    bill = changed("gateway", "front")
    bill["servers"].append({"name": "front", "role": "gateway", "nics": nics(0)})
    said = rules(made(bill), "front")
    assert "from_compute" not in said
    assert "tcp dport { 8000, 8001 } accept" in said


def test_ports_of_workers_end_where_ports_end() -> None:
    assert worker_ports(made(changed("gateway", "d0") | {"serving": {"worker_port": 65_500}})) == (65_500, 65_535)
