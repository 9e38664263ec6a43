"""What the tests of the transport contract share: a rig that makes sides and peers of one kind, and closes them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
from careless import CarelessTransport

from certificates import shared_tls
from regauge.config import TransferConfig
from regauge.move.memory import Slab
from regauge.move.tcp import TcpTransport
from regauge.move.transport import Peer, Region, Ticket, Transport
from regauge.move.transports import open_transport

KEY = b"0123456789abcdef" * 2
MIB = 1 << 20


CONNECTIONS = {"careless": 10, "mooncake": 20, "nixl": 4}
"""How many connections a test of many makes: 200, but fewer where each starts two processes."""


def make(kind: str, name: str, key: bytes = KEY) -> Transport:
    if kind == "tls":
        return TcpTransport(key=key, name=name, lanes=3, tls=shared_tls())
    if kind == "careless":
        return CarelessTransport(key=key, name=name)
    config = msgspec.convert({"transport": kind, "nixl": {"devices": ["lo"]}}, TransferConfig)
    return open_transport(config, key=key, name=name, grants=False)


@dataclass
class Side:
    transport: Transport
    slab: Slab
    region: Region


@dataclass
class Rig:
    """Makes sides and peers, and closes them at the end."""

    kind: str
    stack: ExitStack = field(default_factory=ExitStack)

    def side(self, name: str, nbytes: int = MIB, seed: int | None = None) -> Side:
        slab = self.stack.enter_context(Slab(nbytes, name))
        transport = self.stack.enter_context(make(self.kind, name))
        if seed is not None:
            slab.array[:] = np.random.default_rng(seed).integers(0, 256, slab.nbytes, dtype=np.uint8)
        return Side(transport, slab, transport.register(slab))

    def peer(self, source: Side, target: Side) -> Peer:
        return self.stack.enter_context(source.transport.connect(target.transport.export(), 10))


def piece(source: Side, at: int, target: Side, to: int, length: int) -> list[int]:
    return [source.slab.address + at, target.slab.address + to, length]


def array(*pieces: list[int]) -> npt.NDArray[np.int64]:
    return np.array(pieces, dtype=np.int64).reshape(-1, 3)


def landed(ticket: Ticket) -> bool:
    assert ticket.wait(30)
    ticket.check()
    return ticket.state == "landed" and ticket.bytes_done == ticket.nbytes


def permuted(
    source: Side, target: Side, count: int, size: int, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    order = np.random.default_rng(seed).permutation(count)
    slots = np.arange(count)
    lengths = np.full(count, size)
    pieces = np.column_stack((source.slab.address + slots * size, target.slab.address + order * size, lengths))
    return pieces.astype(np.int64), order


def long_post(peer: Peer, source: Side, target: Side, deadline_s: float = 60) -> Ticket:
    """2 GiB: the same bytes again and again, so that it cannot be over before what the test does next."""
    return peer.post(np.repeat(array(piece(source, 0, target, 0, 32 * MIB)), 64, axis=0), deadline_s)
