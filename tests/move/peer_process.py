"""A peer in a process of its own: one slab, driven by lines on stdin, one answer line each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contract import make

from regauge.move.library.peer import LibraryPeer
from regauge.move.library.transport import LibraryTransport
from regauge.move.memory import Slab
from regauge.move.transport import Peer, Ticket, Transport


class Child:
    """A peer in a process of its own."""

    def __init__(self, kind: str, key: bytes, nbytes: int) -> None:
        command = [sys.executable, __file__, kind, key.hex(), str(nbytes)]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # the tests' own modules, wherever pytest found them
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **path}
        )

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


def states(pid: int) -> set[str]:
    """The states of a process's threads (proc(5)); none for one that is gone."""
    found = set()
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.add(each.read_text(encoding="ascii").rpartition(") ")[2][0])
    return found - set("ZX")


def freeze(pid: int) -> None:
    """Stop a process, and wait until all of it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: states(pid) == {"T"})


def carriers(transport: Transport, peers: list[Peer]) -> list[int]:
    """The processes in which this side's library runs."""
    assert isinstance(transport, LibraryTransport)
    writing = [peer.carrier.pid for peer in peers if isinstance(peer, LibraryPeer)]
    return writing + [each.pid for each in transport.pool.carriers()]


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
        elif verb == "carriers":
            answer = " ".join(map(str, carriers(transport, peers)))
        elif verb == "connect":
            peers.append(transport.connect(bytes.fromhex(words[0]), 5))
            answer = peers[-1].session
        elif verb == "write":  # the whole slab, words[0] times over, into the largest region of the peer
            region = max(peers[-1].regions, key=lambda each: each.nbytes)
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
    with Slab(nbytes, "theirs") as memory, make(kind, "child", key) as transport:
        transport.register(memory)
        serve(transport, memory)
