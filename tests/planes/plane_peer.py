"""A process on one host of `net.py`: transports, plain streams and control connections, driven by lines on stdin.

One answer line each; an error is answered as `error TYPE: TEXT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from regauge.config import NixlConfig
from regauge.errors import RegaugeError
from regauge.move import messages as m
from regauge.move.channel import Channel, Door
from regauge.move.memory import Slab
from regauge.move.mooncake import MooncakeTransport
from regauge.move.nixl import NixlTransport
from regauge.move.plane import resolve
from regauge.move.tcp import TcpTransport
from regauge.move.tls import Tls
from regauge.move.transport import Peer, Transport

KEY = b"0123456789abcdef" * 2
SLAB_BYTES = 8 << 20


def tcp(host: str, folder: str) -> Transport:
    path = Path(folder)
    tls = Tls.load(path / "worker.pem", path / "worker.key", path / "authority.pem") if folder else None
    return TcpTransport(key=KEY, name="peer", host=host, lanes=2, tls=tls)


def mooncake(host: str, _folder: str) -> Transport:
    return MooncakeTransport(key=KEY, name="peer", host=host)


def nixl(host: str, _folder: str) -> Transport:
    return NixlTransport(key=KEY, name="peer", host=host, config=NixlConfig(devices=[host]))


TRANSPORTS: dict[str, Callable[[str, str], Transport]] = {"tcp": tcp, "mooncake": mooncake, "nixl": nixl}
"""By name: what makes a transport on a plane, with the TLS files of a folder if one is given. Another transport is added here and
in the parameters of test_planes.py, or of tests/transports/test_their_planes.py."""


class Node:
    """What the lines drive."""

    def __init__(self) -> None:
        self.slab = Slab(SLAB_BYTES, "slab")
        self.transport: Transport | None = None
        self.peer: Peer | None = None
        self.background: threading.Thread | None = None
        self.stop = threading.Event()

    def open(self, kind: str, host: str, folder: str = "") -> str:
        """Make a transport; answer its export."""
        self.transport = TRANSPORTS[kind](host, folder)
        self.transport.register(self.slab)
        return self.transport.export().hex()

    def connect(self, exported: str) -> str:
        assert self.transport is not None
        self.peer = self.transport.connect(bytes.fromhex(exported), 20)
        return "ok"

    def write(self, nbytes: str) -> str:
        """Write so many bytes of the slab into the peer's; answer the seconds it took."""
        assert self.peer is not None
        pieces = np.array([[self.slab.address, self.peer.regions[0].address, int(nbytes)]], dtype=np.int64)
        started = time.perf_counter()
        ticket = self.peer.post(pieces, 20)
        ticket.wait(25)
        ticket.check()
        return f"{time.perf_counter() - started:.6f}"

    def keep_writing(self) -> str:
        """Write again and again until `rest`."""

        def run() -> None:
            while not self.stop.is_set():
                self.write(str(SLAB_BYTES))

        return self._start(run)

    def sink(self, host: str) -> str:
        """Take plain streams and answer every message on them (8 bytes of length, payload) with one byte; answer the port."""
        server = socket.create_server((host, 0), backlog=64)

        def serve(sock: socket.socket) -> None:
            scratch = bytearray(1 << 16)
            with sock:
                while head := sock.recv(8, socket.MSG_WAITALL):
                    left = int.from_bytes(head, "little")
                    while left:
                        left -= sock.recv_into(scratch, min(left, len(scratch)))
                    sock.sendall(b"!")

        def run() -> None:
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        return str(server.getsockname()[1])

    def request(self, here: str, host: str, port: str, nbytes: str) -> str:
        """Send one plain message; answer the seconds until it was taken."""
        with socket.create_connection((host, int(port)), timeout=20, source_address=(here, 0)) as sock:
            started = time.perf_counter()
            sock.sendall(int(nbytes).to_bytes(8, "little") + bytes(int(nbytes)))
            assert sock.recv(1) == b"!"
            return f"{time.perf_counter() - started:.6f}"

    def flood(self, here: str, host: str, port: str, streams: str) -> str:
        """Send plain messages over so many streams until `rest`; answered when all of them run."""
        running = threading.Barrier(int(streams) + 1)

        def one() -> None:
            message = (1 << 19).to_bytes(8, "little") + bytes(1 << 19)
            with socket.create_connection((host, int(port)), timeout=20, source_address=(here, 0)) as sock:
                sock.sendall(message)
                running.wait(20)
                while not self.stop.is_set():
                    sock.recv(1)
                    sock.sendall(message)

        def run() -> None:
            threads = [threading.Thread(target=one) for _ in range(int(streams))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        self._start(run)
        running.wait(20)
        return "ok"

    def rest(self) -> str:
        """End what runs in the background."""
        assert self.background is not None
        self.stop.set()
        self.background.join(20)
        self.stop.clear()
        return "ok"

    def reach(self, here: str, address: str) -> str:
        """Try a plain connection; answer whether it came about."""
        host, port = address.rsplit(":", 1)
        try:
            socket.create_connection((host, int(port)), timeout=0.5, source_address=(here, 0)).close()
        except OSError as error:
            return type(error).__name__
        return "reached"

    def control_server(self, host: str) -> str:
        """Echo control messages; answer the port."""
        started: list[int] = []
        ready = threading.Event()

        async def echo(sock: socket.socket) -> None:
            with contextlib.suppress(RegaugeError):
                channel = await Channel.accept(sock, KEY)
                while True:
                    channel.send(await channel.receive())

        async def run() -> None:
            echoes = set()
            door = Door(lambda sock: echoes.add(asyncio.create_task(echo(sock))), resolve(host))
            started.append(door.address[1])
            ready.set()
            await asyncio.Event().wait()

        threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
        assert ready.wait(10)
        return str(started[0])

    def control(self, plane: str, host: str, port: str, nbytes: str) -> str:
        """Send one control message of so many bytes and wait for its echo."""

        async def run() -> None:
            channel = await Channel.open(host, int(port), KEY, plane=resolve(plane))
            sent = m.Finish("x", 0, 0, bytes(int(nbytes)))
            channel.send(sent)
            assert await channel.receive() == sent
            channel.close()
            await channel.wait_closed()

        asyncio.run(run())
        return "ok"

    def _start(self, run: Callable[[], None]) -> str:
        self.background = threading.Thread(target=run)
        self.background.start()
        return "ok"


def main() -> None:
    node = Node()
    for line in sys.stdin:
        verb, *words = line.split()
        try:
            answer = getattr(node, verb)(*words)
        except (RegaugeError, OSError) as error:
            answer = f"error {type(error).__name__}: {error}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
