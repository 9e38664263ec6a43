"""The hosts of a bill of materials as network namespaces, each plane a bridge: needs root, `ip` and `nft`.

What is rendered from the bill is what the namespaces are set up with (addresses, MTUs, routes, sysctl, nftables) and what regauge is started with.
Beside its servers there are `client`, on the business plane, `admin`, on management, and `stranger`, on compute.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from net import call, missing

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
        return f"regauge-{os.getpid()}-lab-{node}"

    def ip(self, node: str, *words: str) -> str:
        return call("ip", "-n", self.namespace(node), *words)

    def inside(self, node: str, *words: str) -> list[str]:
        """Return the command that runs another on a node, which has a host name of its own."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node]
        return ["ip", "netns", "exec", self.namespace(node), *named, *words]

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

    def doctor(self, host: str) -> list[dict[str, str]]:
        """What the doctor finds wrong with a host, by the bill of materials and the host's configuration."""
        bill, config = str(self.folder / BILL.name), str(self.rendered(host, "regauge/worker.toml"))
        done = self.regauge(host, "doctor", "--topology", bill, "--host", host, "--config", config, "--json")
        told: dict[str, Any] = json.loads(done.stdout)
        wrong = [each for each in told["findings"] if each["severity"] != "unknown"]
        assert done.returncode == bool(wrong) == (not told["green"]), done.stderr
        assert {each["check"] for each in told["findings"] if each["severity"] == "unknown"} <= {
            "clock"
        }  # nobody keeps it here
        return wrong

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


SMALL = ["prefill.threads=1", "decode.threads=1", "prefill.pool_tokens=4096", "decode.pool_tokens=4096"]
GATEWAY, METRICS = "http://10.211.0.13:8000", "http://10.212.0.13:8001"
"""On host d, for clients and for whoever runs it."""
MODEL = "smollm2-135m-instruct"


def deploy(lab_: Lab, *prefill: str) -> None:
    """Start the gateway, as two processes, and a worker on d and on each of these hosts, from their rendered files; return when all are up."""
    key = lab_.folder / "key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    gateway = str(lab_.rendered("d", "regauge/gateway.toml"))
    lab_.start("d", "serve", "--config", gateway, "--set", "gateway.processes=2")
    settings = [word for each in SMALL for word in ("--set", each)]
    for host in ("d", *prefill):
        config = str(lab_.rendered(host, "regauge/worker.toml"))
        role = lab_.topology.server(host).role
        lab_.start(host, "worker", "--role", role, "--name", host, "--config", config, *settings)
    for name in ("d", *prefill):  # each, since a gateway is ready with one of each role
        lab_.ask("admin", f"{METRICS}/ready", until=f'"{name}"', limit_s=120)
    status, text = lab_.ask("admin", f"{METRICS}/ready", until='"ready"', limit_s=60)
    assert status == 200, text + "".join(lab_.log(host) for host in ("d", *prefill))
    assert {each["name"] for each in json.loads(text)["workers"] if each["up"]} == {"d", *prefill}


def chat(lab_: Lab, prompt: str) -> str:
    """Ask from the client's place; return the answer's text."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    status, text = lab_.ask("client", f"{GATEWAY}/v1/chat/completions", body, limit_s=60)
    assert status == 200, text
    found: str = json.loads(text)["choices"][0]["message"]["content"]
    return found


def kv_bytes(lab_: Lab) -> float:
    """Bytes of all delivered transfers, as the gateway's metrics have them."""
    return sum(metric(lab_, "regauge_transfer_bytes_sum").values())


def metric(lab_: Lab, name: str) -> dict[str, float]:
    """Values of a metric of the gateway, by their labels as they are written."""
    _, text = lab_.ask("admin", f"{METRICS}/metrics")
    return {labels: float(value) for labels, value in re.findall(rf"^{name}(\{{.*\}}) (\S+)$", text, re.MULTILINE)}


def crossed(lab_: Lab, prompts: Iterable[str]) -> tuple[float, dict[str, dict[str, int]]]:
    """Ask all of these at once; return the bytes of KV that the metrics say, and what each host has sent by plane meanwhile."""
    kv, before = kv_bytes(lab_), lab_.sent()
    with ThreadPoolExecutor() as threads:
        assert all(threads.map(lambda prompt: chat(lab_, prompt), prompts))
    after = lab_.sent()
    kv = kv_bytes(lab_) - kv
    return kv, {h: {plane: after[h][plane] - n for plane, n in planes.items()} for h, planes in before.items()}


def environment() -> dict[str, str]:
    """One thread for each model: the machine has few cores, and three of them run."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def lab(folder: Path, bill: Path = BILL) -> Iterator[Lab]:
    """Make the hosts; everything goes with them at the end."""
    absent = missing() or ", ".join(tool for tool in ("nft", "sysctl", "ss") if shutil.which(tool) is None)
    assert not absent, f"not found: {absent}; run `apt-get install nftables procps iproute2`"
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
