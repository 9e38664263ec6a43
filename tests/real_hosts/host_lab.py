"""The hosts of a topology as network namespaces, one more as all of its switches, and the real programs that read the rendered files.

Each interface of a host is a veth whose other end is in the bridge of its plane. Root, and what scripts/install-hosts brings.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regauge.fabric.render import render
from regauge.fabric.topology import Server, Topology

SYSTEMD = Path("/usr/lib/systemd")
BRIDGES = {"compute": "cmp", "business": "biz", "management": "mgm"}
START = """
mount -t tmpfs tmpfs /run && mount -o remount,ro /sys  # read-only: networkd waits for no udev
mkdir -p /run/systemd/network /run/systemd/netif/links /run/systemd/netif/leases /run/systemd/netif/lldp
chown -R systemd-network:systemd-network /run/systemd/netif
cp "$1"/* /run/systemd/network
exec /usr/lib/systemd/systemd-networkd
"""


_LABS = itertools.count()


def missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run `sudo make test-hosts`"
    absent = [tool for tool in ("ip", "ping", "nft", "netplan", "udevadm") if shutil.which(tool) is None]
    absent += [] if (SYSTEMD / "systemd-networkd").exists() else ["systemd-networkd"]
    return f"{' and '.join(absent)} not found: run scripts/install-hosts" if absent else ""


def call(*words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 or not ok, f"{' '.join(words)}: {done.stderr.strip()} {done.stdout.strip()}"
    return done


@dataclass(frozen=True)
class Host:
    """A host's namespace, in which its networkd runs."""

    server: Server
    space: str
    networkd: subprocess.Popen[str]
    log: Path

    def run(self, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        return call("ip", "netns", "exec", self.space, *words, ok=ok)

    def python(self, code: str, *words: str, ok: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", code, *words, ok=ok)

    def ip(self, *words: str) -> Any:
        text = self.run("ip", "-j", *words).stdout
        return json.loads(text) if text.strip() else []

    def link(self, interface: str) -> Any:
        (found,) = self.ip("-s", "link", "show", "dev", interface)
        return found

    def sent(self) -> dict[str, int]:
        """Bytes that each interface has sent."""
        return {nic.interface: self.link(nic.interface)["stats64"]["tx"]["bytes"] for nic in self.server.nics}

    def online(self) -> None:
        """Wait until networkd has configured every interface."""
        names = [word for nic in self.server.nics for word in ("-i", nic.interface)]
        call("nsenter", "-t", str(self.networkd.pid), "-m", "-n", str(SYSTEMD / "systemd-networkd-wait-online"),
             "--timeout=30", *names)  # fmt: skip


def network_files(topology: Topology, kind: str, server: Server, folder: Path) -> Path:
    """Write the files that networkd reads: ours, or those that netplan makes of ours."""
    for path, text in render(topology, [kind], server.name).items():
        target = folder / "etc" / "/".join(path.split("/")[2:])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o600)
    if kind == "networkd":
        for each in (folder / "etc/networkd").iterdir():
            each.chmod(0o644)
        return folder / "etc/networkd"
    call("netplan", "generate", "--root-dir", str(folder))
    return folder / "run/systemd/network"


@contextlib.contextmanager
def lab(topology: Topology, kind: str = "networkd") -> Iterator[dict[str, Host]]:
    """Make the namespaces, and start every host with the files of a kind; everything goes with them at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab_name = f"regauge-{os.getpid()}-{next(_LABS)}"
        switch = f"{lab_name}-switch"
        _space(stack, switch)
        for plane in topology.planes.values():
            bridge = BRIDGES[plane.name]
            call("ip", "-n", switch, "link", "add", bridge, "mtu", str(plane.mtu), "type", "bridge")
            call("ip", "-n", switch, "link", "set", bridge, "up")
            if plane.router:
                call("ip", "-n", switch, "addr", "add", f"{plane.router}/{plane.network.prefixlen}", "dev", bridge)
        hosts = {}
        for number, server in enumerate(topology.servers):
            files = network_files(topology, kind, server, folder / server.name)
            hosts[server.name] = _host(stack, topology, server, (lab_name, number), files)
        for host in hosts.values():
            host.online()
        yield hosts


def _space(stack: contextlib.ExitStack, name: str) -> None:
    call("ip", "netns", "add", name)
    stack.callback(call, "ip", "netns", "del", name)
    call("ip", "-n", name, "link", "set", "lo", "up")


def _host(stack: contextlib.ExitStack, topology: Topology, server: Server, place: tuple[str, int], files: Path) -> Host:  # fmt: skip
    lab_name, number = place
    space, switch = f"{lab_name}-{number}", f"{lab_name}-switch"
    _space(stack, space)
    for nic in server.nics:
        other, mtu = f"h{number}{nic.interface}", str(topology.planes[nic.plane].mtu)
        call("ip", "-n", switch, "link", "add", other, "mtu", mtu, "type", "veth",
             "peer", "name", nic.interface, "netns", space)  # fmt: skip
        call("ip", "-n", switch, "link", "set", other, "master", BRIDGES[nic.plane], "up")
    log = files.parent / "networkd.log"
    out = stack.enter_context(log.open("w"))
    networkd = subprocess.Popen(["ip", "netns", "exec", space, "unshare", "-m", "bash", "-ec", START, "start", str(files)],
                                stdout=out, stderr=out, text=True)  # fmt: skip
    stack.callback(networkd.wait)
    stack.callback(networkd.kill)
    host = Host(server, space, networkd, log)
    settings = files.parent / "70-regauge.conf"
    (text,) = render(topology, ["sysctl"], server.name).values()
    settings.write_text(text)
    host.run(str(SYSTEMD / "systemd-sysctl"), str(settings))
    return host
