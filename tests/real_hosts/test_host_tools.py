"""The files of every host of the shipped topologies, read by the programs that they are for. Each has a control: a file that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_lab import call

from regauge.fabric.bill import load, shipped
from regauge.fabric.render import render

HOSTS = [(name, server.name) for name in shipped() for server in load(name).servers]


def written(name: str, host: str, kind: str, folder: Path) -> list[Path]:
    found = []
    for path, text in render(load(name), [kind], host).items():
        target = folder / Path(path).name
        target.write_text(text)
        target.chmod(0o600)
        found.append(target)
    return found


@pytest.mark.parametrize(("name", "host"), HOSTS)
def test_nft_takes_the_rules(name: str, host: str, tmp_path: Path) -> None:
    (rules,) = written(name, host, "nftables", tmp_path)
    call("nft", "--check", "-f", str(rules))
    rules.write_text(rules.read_text().replace("policy accept", "policy perhaps", 1))
    assert call("nft", "--check", "-f", str(rules), ok=False).returncode != 0


@pytest.mark.parametrize(("name", "host"), HOSTS)
def test_netplan_takes_the_file(name: str, host: str, tmp_path: Path) -> None:
    (tmp_path / "etc/netplan").mkdir(parents=True)
    (plan,) = written(name, host, "netplan", tmp_path / "etc/netplan")
    said = call("netplan", "generate", "--root-dir", str(tmp_path))
    assert not said.stderr
    made = {each.name for each in (tmp_path / "run/systemd/network").iterdir()}
    assert {f"10-netplan-{nic.interface}.network" for nic in load(name).server(host).nics} <= made
    plan.write_text(plan.read_text().replace("scope: link", "scope: linc").replace("mtu:", "mtuu:"))
    assert call("netplan", "generate", "--root-dir", str(tmp_path), ok=False).returncode != 0


@pytest.mark.parametrize("host", ["prefill-0", "decode-0"])
def test_udev_takes_the_names(host: str, tmp_path: Path) -> None:
    links = [each for each in written("prefill-12-decode-1", host, "networkd", tmp_path) if each.suffix == ".link"]
    read = """mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/network && cp "$1"/*.link /run/systemd/network
udevadm test-builtin net_setup_link /sys/class/net/lo 2>&1; true"""
    said = call("unshare", "-m", "bash", "-ec", read, "read", str(tmp_path)).stdout
    assert all(f'Parsed configuration file "/run/systemd/network/{each.name}"' in said for each in links)
    assert "Unknown" not in said
    links[0].write_text(links[0].read_text() + "Nmae=cmp9\n")
    assert "Unknown key 'Nmae'" in call("unshare", "-m", "bash", "-ec", read, "read", str(tmp_path)).stdout


@pytest.mark.parametrize(("name", "host"), HOSTS)
def test_the_shell_takes_the_script_and_the_environment(name: str, host: str, tmp_path: Path) -> None:
    files = {each.name: each for each in written(name, host, "qos", tmp_path)}
    call("sh", "-n", str(files["roce.sh"]))
    printed = call("env", "-i", "sh", "-ec", 'set -a; . "$1"; env', "sh", str(files["roce.env"])).stdout
    assert "MC_IB_TC=106" in printed.splitlines()


def test_the_script_names_what_a_nic_without_rdma_cannot_do(tmp_path: Path) -> None:
    script = next(each for each in written("lab-2", "lab-prefill", "qos", tmp_path) if each.suffix == ".sh")
    run = 'ip link set lo up; ip link add cmp0 type veth peer name cmp1; exec sh "$1"'
    said = call("unshare", "-n", "sh", "-ec", run, "sh", str(script), ok=False)
    assert said.returncode == 1
    assert "cmp0: not set: priorities by DSCP" in said.stderr
    assert "cmp1: not set: PFC" in said.stderr
    assert "/sys/class/infiniband/mlx5_1/tc/1/traffic_class: not set" in said.stderr
