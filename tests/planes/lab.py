"""The hosts of a bill of materials as network namespaces, each plane a bridge: needs root, `ip` and `nft`.

What is rendered from the bill is what the namespaces are set up with (addresses, MTUs, routes, sysctl, nftables) and what regauge is started with.
Beside its servers there are `client`, on the business plane, `admin`, on management, and `stranger`, on compute.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from net import call

from regauge.fabric.bill import load
from regauge.fabric.render import render
from regauge.fabric.topology import Nic, Topology

BILL = Path(__file__).with_name("lab-3.toml")
HTTP = Path(__file__).with_name("lab_http.py")
GUESTS = {"client": "business", "admin": "management", "stranger": "compute"}
GUEST = 200
"""Last number of the guests' addresses."""


@dataclass
class Lab:
    """Its namespaces, and what runs in them."""

    topology: Topology
    folder: Path
    """Of the rendered files, and logs."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def namespace(self, node: str) -> str:
        return f"regauge-{os.getpid()}-{node}"

    def ip(self, node: str, *words: str) -> str:
        return call("ip", "-n", self.namespace(node), *words)

    def inside(self, node: str, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(node), *words]

    def run(self, node: str, *words: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.inside(node, *words), capture_output=True, text=True, timeout=limit_s, check=False, env=environment()
        )

    def start(self, node: str, *words: str) -> subprocess.Popen[bytes]:
        """Start regauge on a host; what it says is in `log`."""
        return self.spawn(*self.inside(node, sys.executable, "-m", "regauge", *words), log=node)

    def spawn(self, *command: str, log: str = "others") -> subprocess.Popen[bytes]:
        """Start something that ends with the lab."""
        with (self.folder / f"{log}.log").open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment())
        self.processes.append(process)
        return process

    def regauge(self, node: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(node, sys.executable, "-m", "regauge", *words)

    def rendered(self, host: str, name: str) -> Path:
        return self.folder / "hosts" / host / name

    def ask(self, node: str, url: str, body: Any = None, *, until: str = "", limit_s: float = 20) -> tuple[int, str]:
        """Return status and body of a request from a node, or 0 and the error's name. `until`: ask again until the body has this."""
        words = [str(limit_s), until, url, *([] if body is None else [json.dumps(body)])]
        done = self.run(node, sys.executable, str(HTTP), *words, limit_s=limit_s + 10)
        status, _, text = done.stdout.partition("\n")
        assert status, done.stderr
        return int(status), text

    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes that each host has sent so far, by plane."""
        found = {}
        for server in self.topology.servers:
            links = json.loads(self.ip(server.name, "-s", "-j", "link"))
            counts = {link["ifname"]: int(link["stats64"]["tx"]["bytes"]) for link in links}
            found[server.name] = {
                plane: sum(counts[nic.interface] for nic in server.on(plane)) for plane in self.topology.planes
            }
        return found

    def log(self, node: str) -> str:
        return (self.folder / f"{node}.log").read_text()


def environment() -> dict[str, str]:
    """One thread for each model: the machine has few cores, and three of them run."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def lab(folder: Path, bill: Path = BILL) -> Iterator[Lab]:
    """Make the hosts; everything goes with them at the end."""
    text = bill.read_text() + f'key_file = "{folder}/key"\n'  # its last table is `serving`
    (folder / bill.name).write_text(text)
    made = Lab(load(folder / bill.name), folder)
    for path, rendered in render(made.topology).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(rendered)
    with contextlib.ExitStack() as stack:
        for node in ["switches", *(server.name for server in made.topology.servers), *GUESTS]:
            call("ip", "netns", "add", made.namespace(node))
            stack.callback(call, "ip", "netns", "del", made.namespace(node))
            made.ip(node, "link", "set", "lo", "up")
        stack.callback(_end, made)
        for plane in made.topology.planes.values():
            made.ip("switches", "link", "add", plane.name, "type", "bridge")
            made.ip("switches", "link", "set", plane.name, "mtu", str(plane.mtu), "up")
        for server in made.topology.servers:
            for nic in server.nics:
                cable(made, server.name, nic.interface, nic.plane)
                set_up(made, server.name, nic)
            _sysctl(made, server.name)
        for node, plane in GUESTS.items():
            cable(made, node, "eth0", plane)
            network = made.topology.planes[plane].network
            made.ip(node, "address", "add", f"{network[GUEST]}/{network.prefixlen}", "dev", "eth0")
        yield made


def cable(lab_: Lab, node: str, interface: str, plane: str) -> None:
    """Put a port of a plane's switch and an interface on both ends of a cable."""
    port, mtu = f"{node}-{interface}", str(lab_.topology.planes[plane].mtu)
    switches = lab_.namespace("switches")
    call(*f"ip link add {interface} netns {lab_.namespace(node)} type veth peer name {port} netns {switches}".split())
    lab_.ip("switches", "link", "set", port, "mtu", mtu, "master", plane, "up")
    lab_.ip(node, "link", "set", interface, "mtu", mtu, "up")


def set_up(lab_: Lab, host: str, nic: Nic) -> None:
    """Do for an interface what its rendered file would have systemd-networkd do."""
    sections = _sections(lab_.rendered(host, f"networkd/10-{nic.interface}.network"))
    done: list[list[str]] = []
    for name, keys in sections:
        if name == "Link":
            lab_.ip(host, "link", "set", nic.interface, "mtu", keys.get("MTUBytes", "1500"))
        elif name == "Network" and "Address" in keys:
            lab_.ip(host, "address", "add", keys["Address"], "dev", nic.interface)
        elif name == "Route":
            where = [] if "Type" in keys else ["dev", nic.interface]
            done.append(["route", "replace", *filter(None, [keys.pop("Type", "")]), *_words(keys), *where])
        elif name == "RoutingPolicyRule":
            done.append(["rule", "add", "from", keys["From"], "table", keys["Table"], "priority", keys["Priority"]])
    for words in done:
        lab_.ip(host, *words)


def _words(keys: dict[str, str]) -> list[str]:
    names = {
        "Destination": "",
        "Scope": "scope",
        "PreferredSource": "src",
        "Table": "table",
        "Gateway": "via",
        "Metric": "metric",
    }
    assert keys.keys() <= names.keys(), keys
    return [word for key, name in names.items() if key in keys for word in (name, keys[key]) if word]


def _sections(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Read a file of systemd, whose sections come again under one name."""
    found: list[tuple[str, dict[str, str]]] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            found.append((line.strip("[]"), {}))
        elif "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[-1][1][key] = value
    return found


def _sysctl(lab_: Lab, host: str) -> None:
    for path in sorted(lab_.rendered(host, "sysctl").iterdir()):
        done = lab_.run(host, "sysctl", "-q", "-p", str(path))
        assert done.returncode == 0, done.stderr


def _end(lab_: Lab) -> None:
    for process in lab_.processes:
        process.terminate()
    for process in lab_.processes:
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
