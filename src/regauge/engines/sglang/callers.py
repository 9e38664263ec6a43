"""Decode's side of `rooms.py`: asks prefill engines for rooms, and notices when one of them is gone.

All of it is for one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from regauge.config import TransferConfig
from regauge.engines.sglang import rooms
from regauge.engines.sglang.rooms import Dropped, Over, Ranks, Wanted
from regauge.errors import DeadlineExceeded, PeerLost, ProtocolError, RegaugeError
from regauge.move import tls
from regauge.move.channel import HELLO_S, Channel
from regauge.move.outbound import Address
from regauge.move.plane import Plane, resolve

log = structlog.get_logger()

PAUSE_S: Final = 0.1
"""Between two attempts to reach a prefill engine whose connection broke."""


@dataclass(eq=False)
class _Joined:
    known: Callable[[Sequence[str]], None]
    to: Mapping[str, Address] | None = None
    """What was wanted, if anything was."""


class Callers:
    """All prefill engines that this decode rank has to do with. `over(room, reason)`: a room will not come.

    `asks`: whether this rank speaks for its engine, as rank 0 does.
    """

    def __init__(
        self, key: bytes, config: TransferConfig, plane: str, over: Callable[[int, str], None], *, asks: bool
    ) -> None:
        self._key, self._config, self._plane = key, config, plane
        self._tls = tls.from_config(config.tls)
        self._over = over
        self._asks = asks
        self._prefills: dict[str, _Prefill] = {}
        self._at: dict[int, _Prefill] = {}

    def join(self, room: int, address: str, known: Callable[[Sequence[str]], None]) -> None:
        """A room's prefill engine is asked at `address`, as `host:port`. `known(names)` is called once its ranks are."""
        prefill = self._prefills.get(address)
        if prefill is None:
            prefill = self._prefills[address] = _Prefill(self, address)
        self._at[room] = prefill
        prefill.join(room, _Joined(known))

    def want(self, room: int, to: Mapping[str, Address]) -> None:
        """Pages for a room, whose prefill engine is known, are there."""
        if (prefill := self._at.get(room)) is not None:
            prefill.want(room, to)

    def leave(self, room: int, reason: str) -> None:
        """The room is over here; `reason`: why it was given up, empty where it has come."""
        if (prefill := self._at.pop(room, None)) is not None:
            prefill.leave(room, reason)

    async def close(self) -> None:
        """End all connections."""
        tasks = [prefill.task for prefill in self._prefills.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def open(self, host: str, port: int) -> tuple[Channel, Ranks]:
        """Connect to one rank's rooms. Raises RegaugeError."""
        plane: Plane = await asyncio.to_thread(resolve, self._plane)
        channel = await Channel.open(host, port, self._key, plane=plane, tls=self._tls, purpose=rooms.PURPOSE)
        try:
            async with asyncio.timeout(HELLO_S):
                greeting = rooms.decode(await channel.frame())
            if not isinstance(greeting, Ranks):
                raise ProtocolError(f"{host}:{port} began with {type(greeting).__name__}, not with its ranks")
            if greeting.version != rooms.VERSION:
                raise ProtocolError(
                    f"{host}:{port} speaks version {greeting.version} of the rooms, not {rooms.VERSION}"
                )
        except TimeoutError as error:
            channel.close()
            raise DeadlineExceeded(f"{host}:{port} did not name its ranks within {HELLO_S:g} s") from error
        except BaseException:  # closed whatever broke, also when cancelled
            channel.close()
            raise
        return channel, greeting

    @property
    def asks(self) -> bool:
        """Whether this rank wants rooms for its engine."""
        return self._asks

    @property
    def resume_s(self) -> float:
        """Most seconds that a broken connection may take to be made again."""
        return self._config.resume_s

    def give_up(self, prefill: _Prefill, over: Sequence[int], reason: str) -> None:
        """A prefill engine cannot be asked: its rooms are over."""
        self._prefills.pop(prefill.address, None)
        for room in over:
            self._at.pop(room, None)
            self._over(room, reason)

    def ended(self, room: int, reason: str) -> None:
        """Prefill has said that a room is over."""
        self._at.pop(room, None)
        self._over(room, reason)


class _Prefill:
    """One prefill engine, by the address that requests give."""

    def __init__(self, callers: Callers, address: str) -> None:
        self.address = address
        self._callers = callers
        self._joined: dict[int, _Joined] = {}
        self._channels: list[Channel] = []
        """Of every rank, once all are up."""
        self._names: list[str] = []
        self._instances: list[str] = []
        self.task = asyncio.create_task(self._run())

    def join(self, room: int, joined: _Joined) -> None:
        self._joined[room] = joined
        if self._channels:
            joined.known(self._names)

    def want(self, room: int, to: Mapping[str, Address]) -> None:
        self._joined[room].to = to
        self._tell(Wanted(room, dict(to)))

    def leave(self, room: int, reason: str) -> None:
        left = self._joined.pop(room, None)
        if left is not None and reason:  # also one that was not wanted yet: prefill shall not wait for it
            self._tell(Dropped(room, reason[:4_000]))

    def _tell(self, message: Wanted | Dropped) -> None:
        if self._callers.asks:
            for channel in self._channels:
                channel.send(message)

    async def _run(self) -> None:
        try:
            while True:
                await self._connect()
                log.info("prefill engine is known", address=self.address, ranks=self._names)
                for room, joined in list(self._joined.items()):
                    if joined.to is None:
                        joined.known(self._names)
                    else:
                        self._tell(Wanted(room, dict(joined.to)))
                await self._listen()
        except RegaugeError as error:
            reason = f"prefill engine at {self.address}: {error}"
            log.warning("a prefill engine is gone", address=self.address, rooms=len(self._joined), error=str(error))
            over, self._joined = list(self._joined), {}
            self._callers.give_up(self, over, reason)
        finally:
            self._close()

    async def _connect(self) -> None:
        """Reach all ranks. At first contact an engine that is not there is an error at once; later only one where nobody listens."""
        limit = time.monotonic() + self._callers.resume_s
        while True:
            try:
                return await self._reach()
            except (PeerLost, DeadlineExceeded) as error:
                gone = isinstance(error.__cause__, ConnectionRefusedError)
                if gone or not self._names or time.monotonic() > limit:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _reach(self) -> None:
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal():
            raise ProtocolError("bootstrap_host and bootstrap_port make no address")
        channels: list[Channel] = []
        instances = []
        try:
            channel, greeting = await self._callers.open(host.strip("[]"), int(port))
            channels.append(channel)
            instances.append(greeting.instance)
            if self._callers.asks:
                for at in list(greeting.ranks.values())[1:]:
                    other, told = await self._callers.open(*at)
                    channels.append(other)
                    instances.append(told.instance)
            if self._names and (instances != self._instances or list(greeting.ranks) != self._names):
                raise ProtocolError("it was started again")
        except BaseException:  # closed whatever broke, also when cancelled
            for each in channels:
                each.close()
            raise
        self._channels, self._names, self._instances = channels, list(greeting.ranks), instances

    async def _listen(self) -> None:
        """Take what the ranks say until a connection ends. Raises ProtocolError for what they must not say."""
        readers = [asyncio.create_task(self._read(channel)) for channel in self._channels]
        try:
            await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            for task in readers:
                task.cancel()
            ends = await asyncio.gather(*readers, return_exceptions=True)
        for end in ends:
            if isinstance(end, ProtocolError):
                raise end

    async def _read(self, channel: Channel) -> None:
        try:
            while True:
                message = rooms.decode(await channel.frame())
                if not isinstance(message, Over):
                    raise ProtocolError(f"it sent {type(message).__name__}, which prefill does not")
                if self._joined.pop(message.room, None) is not None:
                    self._callers.ended(message.room, f"prefill gave it up: {message.reason}")
        except PeerLost:
            return

    def _close(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels = []
