"""Two hosts and three planes between them, as network namespaces: needs root, `ip` and `tc` (Debian: iproute2).

prefill                     decode
pcmp 10.210.0.1  800 Mbit/s dcmp 10.210.0.2   compute
pbiz 10.211.0.1  200 Mbit/s dbiz 10.211.0.2   business
pmgm 10.212.0.1   50 Mbit/s dmgm 10.212.0.2   management
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PLANES = {"cmp": ("10.210.0", "800mbit"), "biz": ("10.211.0", "200mbit"), "mgm": ("10.212.0", "50mbit")}
PEER = Path(__file__).with_name("plane_peer.py")
HOSTS = {"p": "1", "d": "2"}


def missing() -> str:
    """Why this machine cannot run these tests; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: run `sudo make test-planes`"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} not found: run `apt-get install iproute2`" if absent else ""


@dataclass(frozen=True)
class Net:
    """The namespaces, by host: "p" (prefill) and "d" (decode)."""

    names: dict[str, str]

    def ip(self, host: str, *words: str) -> None:
        call("ip", "-n", self.names[host], *words)

    def sent(self, host: str = "p") -> dict[str, int]:
        """Bytes that a host has sent so far, by plane (/proc/net/dev)."""
        text = call("ip", "netns", "exec", self.names[host], "cat", "/proc/net/dev")
        rows = (line.split(":") for line in text.splitlines() if ":" in line)
        counts = {name.strip(): int(rest.split()[8]) for name, rest in rows}
        return {plane: counts[host + plane] for plane in PLANES}

    def since(self, before: dict[str, int], host: str = "p") -> dict[str, int]:
        """Bytes sent since then, by plane."""
        return {plane: count - before[plane] for plane, count in self.sent(host).items()}


def call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout


def address(plane: str, host: str) -> str:
    return f"{PLANES[plane][0]}.{HOSTS[host]}"


@contextlib.contextmanager
def network() -> Iterator[Net]:
    """Make the namespaces; everything goes with them at the end."""
    net = Net({host: f"regauge-{os.getpid()}-{host}" for host in HOSTS})
    with contextlib.ExitStack() as stack:
        for name in net.names.values():
            call("ip", "netns", "add", name)
            stack.callback(call, "ip", "netns", "del", name)
        for host in HOSTS:
            net.ip(host, "link", "set", "lo", "up")
        for plane, (_, rate) in PLANES.items():
            one, other = net.names["p"], net.names["d"]
            call(*f"ip link add p{plane} netns {one} type veth peer name d{plane} netns {other}".split())
            for host, name in net.names.items():
                net.ip(host, "addr", "add", f"{address(plane, host)}/24", "dev", host + plane)
                net.ip(host, "link", "set", host + plane, "up")
                shape = f"tc -n {name} qdisc add dev {host}{plane} root tbf rate {rate} burst 256kb latency 50ms"
                call(*shape.split())
        yield net


class Node:
    """A process on one of the hosts, driven by lines: see `plane_peer.py`."""

    def __init__(self, net: Net, host: str) -> None:
        command = ["ip", "netns", "exec", net.names[host], sys.executable, str(PEER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line: str, limit_s: float = 30) -> str:
        self.tell(line)
        return self.answer(line, limit_s)

    def answer(self, line: str = "", limit_s: float = 30) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(limit_s), f"no answer to {line!r} within {limit_s} s"
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
