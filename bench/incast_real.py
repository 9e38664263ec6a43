"""Incast over real sockets: twelve senders into one receiver behind a rate limit, with and without credits. Needs root.

    sudo python bench/incast_real.py [--mbit 50] [--transfers N] [--seed N]

A network namespace holds the receiver; a veth pair leads to it, with `tbf` (rate, 512 KiB of buffer, drops) in front. Every sender has a control and a data connection (TCP, the
kernel's congestion control below). Sizes are those of the conversation mix scaled to a mean of 200 ms on the link; Poisson arrivals. `ideal` is the shortest remaining first at the rate
that one saturating stream reached in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from harness import print_table
from incast_model import Arrival, ideal
from incast_sizes import MIXES
from regauge.config import FlowConfig
from regauge.move.flow import ReceiverFlow
from regauge.move.flow_sender import SenderFlow
from regauge.move.flow_types import CREDIT, UNCONTROLLED, Credit, Demand, FlowAction, NicLimits, Policy, Rank

SENDERS = 12
SLICE = 64 << 10
LINE = struct.Struct("<II")
HOST, INSIDE, PORT = "10.231.77.1", "10.231.77.2", 7411
DELAY_S = 0.03
BUFFER = 512 << 10
"""Bytes in front of the rate limit; what does not fit is dropped."""
MEAN_S = 0.2
"""A transfer alone, on average: long against the pauses of a busy machine."""


def flow_config(rate: float) -> FlowConfig:
    """What fits a slow link: small quanta, and a delay's worth unscheduled."""
    return FlowConfig(
        nic_bytes_per_s=rate, rtt_s=DELAY_S, quantum_bytes=SLICE, unscheduled_bytes=SLICE, unscheduled_budget_bytes=2 * SLICE
    )  # fmt: skip


class Receiver:
    """The decode side: credits out, the time of each transfer's last byte to the sender's control connection."""

    def __init__(self, rate: float, credits_on: bool) -> None:
        self.flow = ReceiverFlow([NicLimits("rx", rate, DELAY_S)], limits=flow_config(rate)) if credits_on else None
        self.control: dict[int, asyncio.StreamWriter] = {}
        self.size: dict[int, int] = {}
        self.landed: dict[int, int] = {}

    def do(self, actions: Sequence[FlowAction]) -> None:
        """Send credits out."""
        for action in actions:
            if isinstance(action, Credit):
                say(self.control[int(action.peer)], {"credit": msgspec.to_builtins(action)})

    def hear(self, sender: int, word: dict[str, object]) -> None:
        """Take a control message."""
        index, now = int(str(word["index"])), time.monotonic()
        if "offer" in word:
            self.size[index] = int(str(word["offer"]))
            demand = Demand(str(index), str(sender), self.size[index], deadline=float(str(word["due"])), unit_bytes=1)
            self.do(self.flow.arrive(demand, now) if self.flow else [])
        elif self.flow:
            self.do(self.flow.backlog(str(index), int(str(word["ready"])), now))

    def land(self, sender: int, index: int, nbytes: int) -> None:
        """Count bytes that have come."""
        total = self.landed[index] = self.landed.get(index, 0) + nbytes
        now = time.monotonic()
        if self.flow:
            self.do(self.flow.landed(str(index), total, now))
        if total == self.size.get(index):
            self.do(self.flow.end(str(index), now) if self.flow else [])
            say(self.control[sender], {"done": index, "at": now})

    async def ticks(self) -> None:
        """Keep the flow control's clock."""
        while self.flow:
            await asyncio.sleep(0.05)
            for name in list(self.flow.transfers):
                self.flow.renew(name, time.monotonic())
            self.do(self.flow.tick(time.monotonic()))

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a control or data connection."""
        kind, sender = (await reader.readline()).split()
        if kind == b"control":
            self.control[int(sender)] = writer
            while line := await reader.readline():
                self.hear(int(sender), msgspec.json.decode(line))
            return
        while True:
            try:
                index, nbytes = LINE.unpack(await reader.readexactly(LINE.size))
            except asyncio.IncompleteReadError:
                return
            await reader.readexactly(nbytes)
            self.land(int(sender), index, nbytes)


async def receive(rate: float, credits_on: bool) -> None:
    receiver = Receiver(rate, credits_on)
    server = await asyncio.start_server(receiver.connection, INSIDE, PORT, limit=4 * SLICE)
    print("up", flush=True)
    async with server, asyncio.TaskGroup() as group:
        group.create_task(receiver.ticks())
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)


def say(writer: asyncio.StreamWriter, word: object) -> None:
    writer.write(msgspec.json.encode(word) + b"\n")


class Sender:
    """One prefill worker."""

    def __init__(self, number: int, policy: Policy) -> None:
        self.number, self.policy = number, policy
        self.flow = SenderFlow([NicLimits("tx", 1e10, DELAY_S)], order=policy.sender_order)
        self.wake = asyncio.Event()
        self.ends: dict[int, float] = {}

    async def open(self) -> None:
        """Connect."""
        self.reader, self.control = await asyncio.open_connection(INSIDE, PORT)
        self.control.write(f"control {self.number}\n".encode())
        self.data = socket.create_connection((INSIDE, PORT))
        # What lies in the kernel's buffer can no longer be overtaken.
        self.data.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * SLICE)
        self.data.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(self.data, f"data {self.number}\n".encode())

    async def hear(self) -> None:
        """Take credits and ends."""
        while line := await self.reader.readline():
            word = msgspec.json.decode(line)
            if "done" in word:
                self.ends[word["done"]] = word["at"]
                self.flow.end(str(word["done"]))
            else:
                self.flow.credit(msgspec.convert(word["credit"], Credit), time.monotonic())
                self.wake.set()

    async def send(self) -> None:
        """Write what flow control says comes next."""
        loop, payload = asyncio.get_running_loop(), bytes(SLICE)
        while True:
            now = time.monotonic()
            turn = self.flow.choose("tx", now, most=SLICE)
            if turn is None:
                wake = self.flow.next_wake("tx", now)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.wake.wait(), None if wake is None else max(wake - now, 0.0005))
                self.wake.clear()
                continue
            self.flow.sent(turn.transfer, turn.nbytes, now)
            head = LINE.pack(int(turn.transfer), turn.nbytes)
            await loop.sock_sendall(self.data, head + payload[: turn.nbytes])

    def offer(self, index: int, a: Arrival) -> None:
        """Announce a transfer."""
        self.flow.offer(str(index), "rx", a.nbytes, "tx")
        say(self.control, {"index": index, "offer": a.nbytes, "due": a.deadline})

    def ready(self, index: int, a: Arrival) -> None:
        """Its bytes are there; without credits they may go at once."""
        self.flow.ready(str(index), a.nbytes)
        if self.policy.windowed:
            say(self.control, {"index": index, "ready": a.nbytes})
        else:
            free = Credit(str(index), "rx", "rx", 0, 1, a.nbytes, 1e9, Rank.NORMAL, a.nbytes, None)
            self.flow.credit(free, time.monotonic())
        self.wake.set()


async def play(policy: Policy, arrived: Sequence[Arrival]) -> dict[str, float]:
    """Run all transfers. Returns seconds from ready to landed."""
    senders = [Sender(n, policy) for n in range(SENDERS)]
    for sender in senders:
        await sender.open()
    tasks = [asyncio.create_task(job) for s in senders for job in (s.hear(), s.send())]
    begin = time.monotonic() + 0.2
    shifted = [dataclasses.replace(a, ready=a.ready + begin, deadline=a.deadline + begin) for a in arrived]
    for index, a in enumerate(shifted):
        senders[a.sender].offer(index, a)
    for index, a in enumerate(shifted):
        await asyncio.sleep(max(a.ready - time.monotonic(), 0.0))
        senders[a.sender].ready(index, a)
    ends: dict[int, float] = {}
    async with asyncio.timeout(120):
        while len(ends) < len(shifted):
            await asyncio.sleep(0.05)
            ends = {i: end for s in senders for i, end in s.ends.items()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for sender in senders:
        sender.data.close()
        sender.control.close()
    return {a.name: ends[i] - a.ready for i, a in enumerate(shifted)}


def command(*words: str) -> None:
    """Run one; raises CalledProcessError."""
    subprocess.run(words, check=True, capture_output=True)


@contextlib.contextmanager
def namespaces(mbit: int) -> Iterator[tuple[str, str]]:
    """Senders' and receiver's, a rate limit between; gone afterwards."""
    names = (f"incast-tx{os.getpid()}", f"incast-rx{os.getpid()}")
    tx, rx = names
    try:
        for name in names:
            command("ip", "netns", "add", name)
        command("ip", "-n", tx, "link", "add", "tx0", "type", "veth", "peer", "name", "rx0", "netns", rx)
        for name, link, address in ((tx, "tx0", HOST), (rx, "rx0", INSIDE)):
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            command("ip", "-n", name, "link", "set", link, "up")
        limit = ("rate", f"{mbit}mbit", "burst", "64k", "limit", f"{BUFFER >> 10}k")
        command("ip", "netns", "exec", tx, "tc", "qdisc", "add", "dev", "tx0", "root", "tbf", *limit)
        # A connection that was idle begins slowly again otherwise: whoever has its turn would never reach the link's rate.
        command("ip", "netns", "exec", tx, "sysctl", "-w", "net.ipv4.tcp_slow_start_after_idle=0")
        yield names
    finally:
        for name in names:
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def run(spaces: tuple[str, str], policy: Policy, rate: float, arrived: Sequence[Arrival]) -> dict[str, float]:
    """One contender: a process for the senders, one for the receiver."""
    tx, rx = (("ip", "netns", "exec", space, sys.executable, __file__) for space in spaces)
    plan = msgspec.json.encode([policy, list(arrived)])
    with subprocess.Popen((*rx, "--receive", str(rate), *(["--credits"] * policy.windowed)), stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as receiver:  # fmt: skip
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        receiver.stdout.readline()
        try:
            out = subprocess.run((*tx, "--send"), input=plan, stdout=subprocess.PIPE, check=True).stdout
        finally:
            receiver.stdin.close()
    return msgspec.json.decode(out, type=dict[str, float])


def draw(transfers: int, rate: float, load: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of scaled sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.array(MIXES[2].draw(transfers, rng), float)
    sizes = np.maximum(sizes * (MEAN_S * rate / sizes.mean()), 1).astype(int)
    times = np.cumsum(rng.exponential(MEAN_S / load, transfers))
    due = times + 0.02 + rng.uniform(2, 8, transfers) * sizes / rate
    return [
        Arrival(f"t{i}", int(rng.integers(SENDERS)), int(sizes[i]), float(times[i]), float(due[i])) for i in range(transfers)
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=50)
    parser.add_argument("--transfers", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--receive", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--credits", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.receive:
        asyncio.run(receive(args.receive, args.credits))
        return
    if args.send:
        policy, arrived = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Policy, list[Arrival]])
        print(msgspec.json.encode(asyncio.run(play(policy, arrived))).decode())
        return
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Run both contenders at three loads."""
    rows: list[dict[str, object]] = []
    with namespaces(args.mbit) as space:
        line = args.mbit * 125_000.0
        probe = [Arrival("t0", 0, int(line * 1.0), 0.0, 1e9)]
        rate = probe[0].nbytes / run(space, UNCONTROLLED, line, probe)["t0"]
        print(f"one stream: {rate / 1e6:.1f} MB/s of {line / 1e6:.1f}")
        for load in (0.5, 0.8, 0.95):
            arrived = draw(args.transfers, rate, load, args.seed)
            best = ideal(arrived, rate, 0.0)
            for policy in (CREDIT, UNCONTROLLED):
                took = run(space, policy, line, arrived)
                ours, reference = (np.array([times[a.name] for a in arrived]) for times in (took, best))
                miss = float(np.mean([a.ready + took[a.name] > a.deadline for a in arrived]))
                p99 = float(np.quantile(ours, 0.99))
                rows.append({
                    "load": load, "control": policy.name if policy.windowed else "none: TCP alone", "P99 ms": p99 * 1e3,
                    "P99 / ideal": p99 / float(np.quantile(reference, 0.99)), "mean / ideal": float(ours.mean() / reference.mean()),
                    "miss": miss,
                })  # fmt: skip
    print_table(rows)


if __name__ == "__main__":
    main()
