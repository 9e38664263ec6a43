"""A peer in a process of its own: one slab, driven by lines on stdin, one answer line each."""

from __future__ import annotations

import hashlib
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from regauge.move.memory import Slab
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Peer, Ticket, Transport


class Child:
    """A peer in a process of its own."""

    def __init__(self, kind: str, key: bytes, nbytes: int) -> None:
        command = [sys.executable, __file__, kind, key.hex(), str(nbytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str, limit_s: float = 40) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(limit_s), f"no answer to {line!r}"
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def wait_until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    limit, pause = time.monotonic() + limit_s, threading.Event()
    while not condition():
        assert time.monotonic() < limit
        pause.wait(0.005)


def make(kind: str, key: bytes, name: str) -> Transport:
    return ShmTransport(key=key, name=name) if kind == "shm" else TcpTransport(key=key, name=name)


def whole(source: Slab, address: int, nbytes: int) -> np.ndarray:
    return np.array([[source.address, address, nbytes]], dtype=np.int64)


def serve(transport: Transport, slab: Slab) -> None:
    peers: list[Peer] = []
    tickets: list[Ticket] = []
    for line in sys.stdin:
        verb, *words = line.split()
        answer: object = "ok"
        if verb == "export":
            answer = transport.export().hex()
        elif verb == "digest":
            answer = hashlib.sha256(slab.array[: int(words[0])].data).hexdigest()
        elif verb == "fill":
            slab.array[:] = int(words[0])
        elif verb == "fence":
            answer = transport.fence_inbound(words[0], float(words[1]))
        elif verb == "sessions":
            answer = len(transport.inbound())
        elif verb == "connect":
            peers.append(transport.connect(bytes.fromhex(words[0]), 5))
            answer = peers[-1].session
        elif verb == "write":  # the whole slab, words[0] times over, into the peer's first region
            region = peers[-1].regions[0]
            pieces = np.repeat(whole(slab, region.address, region.nbytes), int(words[0]), axis=0)
            tickets.append(peers[-1].post(pieces, 60))
        elif verb == "wait":
            tickets[-1].wait(30)
            answer = f"{tickets[-1].state} {tickets[-1].reason}"
        print(answer, flush=True)
    for peer in peers:
        peer.close()


if __name__ == "__main__":
    kind, key, nbytes = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
    with Slab(nbytes, "theirs") as memory, make(kind, key, "child") as transport:
        transport.register(memory)
        serve(transport, memory)
