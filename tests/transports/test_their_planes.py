"""KV that the libraries move over tcp stays on its plane. Between network namespaces, as root: see tests/planes, net.py and lab.py."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from lab import crossed, deploy, lab
from net import Net, Node, missing, network

MIB = 1 << 20
NOISE = 32 << 10
"""Bytes of address resolution and acknowledgements that a plane may see meanwhile."""

TABLES = {"mooncake": 'protocol = "tcp"', "nixl": 'devices = ["cmp0"]'}


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


@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_a_deployment_over_them_keeps_to_its_planes(tmp_path: Path, kind: str) -> None:
    with lab(tmp_path) as made:
        for host in ("p0", "d"):
            file = made.rendered(host, "regauge/worker.toml")
            text = re.sub(r"nics = \[.*?\]\n", "", file.read_text(), flags=re.DOTALL)  # which are for the transport tcp
            text = text.replace('transport = "tcp"', f'transport = "{kind}"').replace('control = "10.210.0.0/16"', "")
            file.write_text(f"{text}\n[transfer.{kind}]\n{TABLES[kind]}\n")
        deploy(made, "p0")
        kv, sent = crossed(made, ["hello " * 250])
        assert kv > MIB
        assert kv <= sent["p0"]["compute"] < 1.05 * kv
        assert sent["d"]["compute"] < 0.05 * kv
        for planes in sent.values():
            assert planes["business"] < 0.05 * kv
            assert planes["management"] < 0.01 * kv
        assert (
            made.run("p0", "ss", "-Hlnt").stdout.count("10.210.0.11%cmp0") == 2
        )  # of sessions and control: bound to the interface
