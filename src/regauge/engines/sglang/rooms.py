"""Where a decode engine finds the prefill engine that a request names by its bootstrap address, and asks it for the request's room.

SGLang's routers give both engines one room, and decode the address of prefill. Prefill can offer a transfer once it has the request and
knows who waits for it, in whichever order that comes. One authenticated connection for all rooms of two engines' ranks:

| message | from | meaning |
|---|---|---|
| `Ranks` | prefill, first | its ranks, and where each of them is asked; who does not want rooms learns their names here |
| `Wanted` | decode's rank 0, to every rank | offer this room's transfer to these ranks |
| `Dropped` | decode's rank 0 | it has given the room up |
| `Over` | prefill | it will not send this room |

A connection that ends tells of a dead peer at once: see `callers.py`, which is decode's side. This one is prefill's.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Protocol

import msgspec
import structlog

from regauge.config import Port, TransferConfig
from regauge.engines.sglang.room import MAX_ROOM
from regauge.errors import ConfigError, ProtocolError, RegaugeError
from regauge.move import messages as m
from regauge.move import tls
from regauge.move.channel import Channel, Door
from regauge.move.outbound import Address
from regauge.move.plane import resolve

log = structlog.get_logger()

PURPOSE: Final = "regauge-rooms"
VERSION: Final = 1
MAX_ROOMS: Final = 10_000
"""Rooms that are wanted before their request has come, and rooms whose end is remembered."""
MAX_CONNECTIONS: Final = 1_024
REMEMBERED_S: Final = 10.0
"""Seconds for which the end of a room answers who comes too late for it. Later the number may have been given to another request."""
SWEEP_S: Final = 1.0

Room = Annotated[int, msgspec.Meta(ge=0, le=MAX_ROOM)]
Ranked = Annotated[dict[m.Name, tuple[str, Port]], msgspec.Meta(min_length=1, max_length=4096)]


class Ranks(m.Message, frozen=True, tag="ranks"):
    """Who is asked here: this process, and every rank of its engine, in order, with the address of its rooms."""

    version: int
    instance: m.Name
    """Of the rank that speaks: one that was started again is another one."""
    ranks: Ranked


class Wanted(m.Message, frozen=True, tag="wanted"):
    """Decode's ranks, in order, lend their pages to this room's transfer."""

    room: Room
    to: Ranked


class Dropped(m.Message, frozen=True, tag="dropped"):
    """Decode wants it no more."""

    room: Room
    reason: m.Text


class Over(m.Message, frozen=True, tag="over"):
    """Prefill will not send it."""

    room: Room
    reason: m.Text


AnyMessage = Ranks | Wanted | Dropped | Over
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def decode(body: bytes) -> AnyMessage:
    """Read a frame's body. Raises ProtocolError that says which field is wrong."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"message about rooms: {error}") from error


class Asker(Protocol):
    """A decode engine that is told of its rooms."""

    def send(self, message: m.Message) -> None:
        """Tell it."""


class Board:
    """Which rooms are wanted, which have a request here, and which are over. Pure; times are monotonic seconds.

    `begin(room, to)` is called when both sides of a room are there, `drop(room, reason)` when decode has given up one that has its request.
    """

    def __init__(
        self, begin: Callable[[int, Mapping[str, Address]], None], drop: Callable[[int, str], None], *, wait_s: float
    ) -> None:
        self._begin, self._drop, self._wait_s = begin, drop, wait_s
        self._wanted: OrderedDict[int, tuple[float, Asker, Mapping[str, Address]]] = OrderedDict()
        self._open: OrderedDict[int, float] = OrderedDict()
        self._begun: dict[int, Asker] = {}
        self._over: OrderedDict[int, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._wanted) + len(self._open) + len(self._begun)

    def open(self, room: int, now: float) -> None:
        """The engine has the room's request."""
        if (reason := self._end(room, now)) is not None:
            self._drop(room, reason)
        elif (wanted := self._wanted.pop(room, None)) is not None:
            self._meet(room, wanted[1], wanted[2])
        else:
            self._open[room] = now

    def close(self, room: int, reason: str, now: float) -> None:
        """The engine is done with the room; `reason`: why it will not be sent, empty where it was."""
        self._open.pop(room, None)
        wanted = self._wanted.pop(room, None)
        asks = self._begun.pop(room, None) or (wanted and wanted[1])
        if not reason:
            return
        if asks is not None:
            asks.send(Over(room, reason[:4_000]))
        else:
            self._remember(room, reason, now)

    def want(self, asks: Asker, message: Wanted, now: float) -> None:
        """A decode engine wants a room; it says so again on a new connection."""
        room = message.room
        if room in self._begun:
            self._begun[room] = asks
        elif (reason := self._end(room, now)) is not None:
            asks.send(Over(room, reason[:4_000]))
        elif room in self._open:
            del self._open[room]
            self._meet(room, asks, message.to)
        elif len(self._wanted) >= MAX_ROOMS:
            asks.send(Over(room, f"{MAX_ROOMS} rooms wait for their requests here already"))
        else:
            self._wanted[room] = (now, asks, message.to)

    def drop(self, asks: Asker, message: Dropped, now: float) -> None:
        """A decode engine has given a room up."""
        room = message.room
        if room in self._begun:
            if self._begun[room] is asks:
                self._drop(room, message.reason)
        elif room not in self._wanted or self._wanted[room][1] is asks:
            self._wanted.pop(room, None)
            if self._open.pop(room, None) is not None:
                self._drop(room, message.reason)
            else:
                self._remember(room, message.reason, now)

    def lost(self, asks: Asker) -> None:
        """A connection has ended; who still wants a room says so again on another."""
        for room in [room for room, wanted in self._wanted.items() if wanted[1] is asks]:
            del self._wanted[room]

    def sweep(self, now: float) -> None:
        """Give up what has waited for too long."""
        while self._wanted and (oldest := next(iter(self._wanted.items())))[1][0] + self._wait_s < now:
            room, (_, asks, _) = oldest
            del self._wanted[room]
            asks.send(Over(room, f"no request with this bootstrap_room came to prefill within {self._wait_s:g} s"))
        while self._open and (first := next(iter(self._open.items())))[1] + self._wait_s < now:
            del self._open[first[0]]
            self._drop(first[0], f"no decode engine asked for this bootstrap_room within {self._wait_s:g} s")

    def _meet(self, room: int, asks: Asker, to: Mapping[str, Address]) -> None:
        self._begun[room] = asks
        self._begin(room, to)

    def _remember(self, room: int, reason: str, now: float) -> None:
        self._over.pop(room, None)
        self._over[room] = (now, reason)
        if len(self._over) > MAX_ROOMS:
            self._over.popitem(last=False)

    def _end(self, room: int, now: float) -> str | None:
        """Take how a room has ended, if it has lately."""
        at, reason = self._over.pop(room, (now - REMEMBERED_S, ""))
        return reason if now < at + REMEMBERED_S else None


class RoomsDoor:
    """Answers decode engines for one rank of prefill. All of it is for one event loop."""

    def __init__(self, board: Board, key: bytes, config: TransferConfig, instance: str) -> None:
        self.board = board
        self._key, self._tls, self._instance = key, tls.from_config(config.tls), instance
        self._ranks: Ranks | None = None
        self._waiting: list[Channel] = []
        self._serving: set[asyncio.Task[None]] = set()
        self._door: Door
        self._sweeper: asyncio.Task[None]

    async def start(self, plane: str, port: int) -> Address:
        """Listen, and return where. Raises ConfigError for a plane or a port that cannot be had."""
        try:
            self._door = Door(self._let_in, await asyncio.to_thread(resolve, plane), port)
        except OSError as error:
            raise ConfigError(
                f"--disaggregation-bootstrap-port {port} on {plane}: {error.strerror}; choose another"
            ) from error
        self._sweeper = asyncio.create_task(self._sweep())
        return self._door.address

    def announce(self, ranks: Mapping[str, Address]) -> None:
        """All ranks of the engine are known: tell who has come before, and who will."""
        self._ranks = Ranks(VERSION, self._instance, dict(ranks))
        for channel in self._waiting:
            channel.send(self._ranks)
        self._waiting.clear()

    async def close(self) -> None:
        """End all connections, and listen no more."""
        await self._door.close()
        for task in (self._sweeper, *self._serving):
            task.cancel()
        await asyncio.gather(self._sweeper, *self._serving, return_exceptions=True)

    def _let_in(self, sock: socket.socket) -> None:
        if len(self._serving) >= MAX_CONNECTIONS:
            sock.close()
            return
        task = asyncio.create_task(self._serve(sock))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            channel = await Channel.accept(sock, self._key, tls=self._tls, purpose=PURPOSE)
        except RegaugeError as error:
            log.info("a connection to the rooms was not taken", error=str(error))
            return
        try:
            if self._ranks is None:
                self._waiting.append(channel)
            else:
                channel.send(self._ranks)
            while True:
                message = decode(await channel.frame())
                if isinstance(message, Wanted):
                    self.board.want(channel, message, time.monotonic())
                elif isinstance(message, Dropped):
                    self.board.drop(channel, message, time.monotonic())
                else:
                    raise ProtocolError(f"decode does not send {type(message).__name__}")
        except RegaugeError as error:
            log.info("a decode engine is gone", peer=channel.peer, error=str(error))
        finally:
            self.board.lost(channel)
            channel.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.board.sweep(time.monotonic())
