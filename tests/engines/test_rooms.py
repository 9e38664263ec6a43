"""Rooms: who asks for one, who has its request, and what either is told when the other has not come, or is gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.config import TransferConfig
from regauge.engines.sglang import rooms
from regauge.engines.sglang.callers import Callers
from regauge.engines.sglang.rooms import Board, Dropped, Over, Ranks, RoomsDoor, Wanted
from regauge.errors import ProtocolError
from regauge.move import messages as m
from regauge.move.channel import Channel
from regauge.move.outbound import Address

KEY = bytes(range(32))
TO: Mapping[str, Address] = {"d.0": ("127.0.0.1", 9100)}
WAIT_S = 5.0


@dataclass
class Decode:
    """A decode engine, as far as the board knows it."""

    told: list[m.Message] = field(default_factory=list)

    def send(self, message: m.Message) -> None:
        self.told.append(message)


@dataclass
class Prefill:
    """A board and what it has said to its engine."""

    begun: list[int] = field(default_factory=list)
    dropped: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = Board(
            lambda room, _: self.begun.append(room), lambda *why: self.dropped.append(why), wait_s=WAIT_S
        )


@pytest.mark.parametrize("first", ["request", "decode"])
def test_a_room_begins_once_both_are_there_in_either_order(first: str) -> None:
    prefill, decode = Prefill(), Decode()
    if first == "request":
        prefill.board.open(7, 0.0)
    prefill.board.want(decode, Wanted(7, dict(TO)), 1.0)
    if first == "decode":
        assert prefill.begun == []
        prefill.board.open(7, 2.0)
    prefill.board.want(decode, Wanted(7, dict(TO)), 3.0)  # said again, on a new connection
    assert prefill.begun == [7]
    prefill.board.close(7, "", 4.0)
    assert len(prefill.board) == 0
    assert decode.told == []


def test_decode_learns_why_a_room_is_not_sent_whenever_it_asks() -> None:
    prefill, early, late = Prefill(), Decode(), Decode()
    prefill.board.want(early, Wanted(7, dict(TO)), 0.0)
    prefill.board.close(7, "aborted", 1.0)
    prefill.board.close(8, "aborted", 1.0)
    prefill.board.want(late, Wanted(8, dict(TO)), 2.0)
    assert (early.told, late.told) == ([Over(7, "aborted")], [Over(8, "aborted")])
    prefill.board.want(late, Wanted(8, dict(TO)), 3.0)  # the number belongs to another request by now
    assert len(late.told) == 1


def test_a_room_that_decode_gave_up_is_not_computed() -> None:
    prefill, decode = Prefill(), Decode()
    prefill.board.open(7, 0.0)
    prefill.board.want(decode, Wanted(7, dict(TO)), 0.0)
    prefill.board.drop(Decode(), Dropped(7, "not its own"), 0.5)
    assert prefill.dropped == []
    prefill.board.drop(decode, Dropped(7, "gone"), 1.0)
    prefill.board.drop(decode, Dropped(8, "gone"), 1.0)
    prefill.board.open(8, 2.0)
    assert prefill.dropped == [(7, "gone"), (8, "gone")]
    prefill.board.open(9, 2.0)
    prefill.board.drop(decode, Dropped(9, "gone"), 3.0)
    assert prefill.dropped[2:] == [(9, "gone")]


def test_nobody_waits_for_ever() -> None:
    prefill, decode = Prefill(), Decode()
    prefill.board.want(decode, Wanted(7, dict(TO)), 0.0)
    prefill.board.open(8, 1.0)
    prefill.board.sweep(WAIT_S)
    assert (decode.told, prefill.dropped) == ([], [])
    prefill.board.sweep(WAIT_S + 1.5)
    [told] = decode.told
    assert isinstance(told, Over)
    assert "no request" in told.reason
    [(room, reason)] = prefill.dropped
    assert (room, "no decode engine" in reason) == (8, True)
    assert len(prefill.board) == 0


def test_what_a_lost_engine_wanted_waits_for_it_to_say_so_again() -> None:
    prefill, lost, again = Prefill(), Decode(), Decode()
    prefill.board.want(lost, Wanted(7, dict(TO)), 0.0)
    prefill.board.lost(lost)
    prefill.board.open(7, 1.0)
    assert prefill.begun == []
    prefill.board.want(again, Wanted(7, dict(TO)), 2.0)
    assert prefill.begun == [7]


def test_wants_without_a_request_are_bounded() -> None:
    prefill, decode = Prefill(), Decode()
    for room in range(1, rooms.MAX_ROOMS + 2):
        prefill.board.want(decode, Wanted(room, dict(TO)), 0.0)
    [told] = decode.told
    assert isinstance(told, Over)
    assert told.room == rooms.MAX_ROOMS + 1


events = st.tuples(
    st.sampled_from(["open", "want", "want", "close", "fail", "drop", "lost", "sweep"]), st.integers(1, 4)
)


@given(st.lists(events, max_size=40))
def test_whatever_happens_no_room_begins_twice_or_stays(history: list[tuple[str, int]]) -> None:
    prefill, decode, now, open_rooms = Prefill(), Decode(), 0.0, set[int]()
    for what, room in history:
        now += 1.0
        if what == "open" and room not in open_rooms:
            open_rooms.add(room)
            prefill.board.open(room, now)
        elif what in {"close", "fail"} and room in open_rooms:
            open_rooms.discard(room)
            prefill.board.close(room, "" if what == "close" else "why", now)
            prefill.begun = [each for each in prefill.begun if each != room]
        elif what == "want":
            prefill.board.want(decode, Wanted(room, dict(TO)), now)
        elif what == "drop":
            prefill.board.drop(decode, Dropped(room, "why"), now)
        elif what == "lost":
            prefill.board.lost(decode)
        elif what == "sweep":
            prefill.board.sweep(now)
        assert len(set(prefill.begun)) == len(prefill.begun)
        assert set(prefill.begun) <= open_rooms
    for room in sorted(open_rooms):
        prefill.board.close(room, "", now)
    prefill.board.sweep(now + 2 * WAIT_S)
    assert len(prefill.board) == 0


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", m.encode(m.Commit("t"))[4:], m.encode(Over(7, "x" * 5_000))[4:]]
)
def test_what_is_no_message_about_rooms_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="about rooms"):
        rooms.decode(body)


@dataclass
class Engines:
    """Prefill's door and decode's callers, over real connections."""

    prefill: Prefill
    door: RoomsDoor
    at: Address
    callers: Callers
    over: asyncio.Queue[tuple[int, str]]

    @property
    def address(self) -> str:
        return f"{self.at[0]}:{self.at[1]}"

    async def known(self, room: int) -> list[str]:
        names: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self.callers.join(room, self.address, lambda found: names.done() or names.set_result(list(found)))
        return await names

    async def begun(self, *rooms: int) -> None:
        await until(lambda: self.prefill.begun == list(rooms))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds; bounded by `engines`."""
    while not condition():  # noqa: ASYNC110  # nothing tells when
        await asyncio.sleep(0)


def run(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Make a plain test of one that runs in an event loop."""

    @functools.wraps(test)
    def plain() -> None:
        asyncio.run(test())

    return plain


@contextlib.asynccontextmanager
async def engines(*, key: bytes = KEY, announced: bool = True) -> AsyncIterator[Engines]:
    prefill, over = Prefill(), asyncio.Queue[tuple[int, str]]()
    config = TransferConfig(transport="tcp", resume_s=0.5)
    door = RoomsDoor(prefill.board, KEY, config, secrets.token_hex(8))
    at = await door.start("127.0.0.1", 0)
    if announced:
        door.announce({"p.0": at})
    callers = Callers(key, config, "127.0.0.1", lambda *told: over.put_nowait(told), asks=True)
    try:
        async with asyncio.timeout(20):
            yield Engines(prefill, door, at, callers, over)
    finally:
        await callers.close()
        await door.close()


@run
async def test_decode_finds_prefill_and_asks_for_its_room() -> None:
    async with engines() as e:
        assert await e.known(7) == ["p.0"]
        e.callers.want(7, TO)
        e.prefill.board.open(7, 0.0)
        await e.begun(7)
        assert await e.known(8) == ["p.0"]
        e.callers.want(8, TO)
        e.prefill.board.close(7, "the engine broke", 1.0)
        room, reason = await e.over.get()
        assert (room, "the engine broke" in reason) == (7, True)


@run
async def test_ranks_that_are_not_all_known_yet_are_waited_for() -> None:
    async with engines(announced=False) as e:
        task = asyncio.create_task(e.known(7))
        await until(lambda: bool(e.door._waiting))
        assert not task.done()
        e.door.announce({"p.0": e.at})
        assert await task == ["p.0"]


@run
async def test_every_rank_is_asked() -> None:
    async with engines(announced=False) as one, engines(announced=False) as two:
        for each in (one, two):
            each.door.announce({"p.0": one.at, "p.1": two.at})
        assert await one.known(7) == ["p.0", "p.1"]
        one.callers.want(7, TO)
        for each in (one, two):
            each.prefill.board.open(7, 0.0)
            await each.begun(7)


@run
async def test_a_dead_prefill_is_noticed_at_once() -> None:
    async with engines() as e:
        await e.known(7)
        e.callers.want(7, TO)
        await e.door.close()
        room, reason = await e.over.get()
        assert (room, "cannot connect" in reason) == (7, True)
        e.callers.join(8, e.address, lambda _: None)  # nor is one there that was never met
        assert (await e.over.get())[0] == 8


@run
async def test_a_prefill_that_was_started_again_has_none_of_the_rooms() -> None:
    async with engines() as e:
        await e.known(7)
        e.callers.want(7, TO)
        e.door._instance = "another"
        e.door.announce({"p.0": e.at})
        for task in list(e.door._serving):
            task.cancel()  # as its death would
        room, reason = await e.over.get()
        assert (room, "started again" in reason) == (7, True)
        assert await e.known(8) == ["p.0"]


@run
async def test_a_connection_that_broke_is_made_again_and_what_was_wanted_is_said_again() -> None:
    async with engines() as e:
        await e.known(7)
        e.callers.want(7, TO)
        await until(lambda: len(e.prefill.board) > 0)
        for task in list(e.door._serving):
            task.cancel()
        await until(lambda: len(e.prefill.board) == 0)
        await until(lambda: len(e.prefill.board) > 0)
        e.prefill.board.open(7, 0.0)
        await e.begun(7)
        assert e.over.empty()


@run
async def test_decode_that_gives_a_room_up_says_so() -> None:
    async with engines() as e:
        e.prefill.board.open(7, 0.0)
        await e.known(7)
        e.callers.want(7, TO)
        await e.begun(7)
        e.callers.leave(7, "its client left")
        await until(lambda: bool(e.prefill.dropped))
        assert e.prefill.dropped == [(7, "its client left")]


@run
async def test_without_the_key_nobody_learns_anything() -> None:
    async with engines(key=bytes(32)) as e:
        e.callers.join(7, e.address, lambda _: pytest.fail("it was told"))
        room, _ = await e.over.get()
        assert room == 7
        assert len(e.prefill.board) == 0


@run
async def test_what_prefill_must_not_say_ends_its_rooms() -> None:
    async with engines() as e:
        await e.known(7)
        channel: Channel = next(iter(e.callers._prefills.values()))._channels[0]
        e.callers.want(7, TO)
        await until(lambda: len(e.prefill.board) > 0)
        _, asks, _ = e.prefill.board._wanted[7]
        asks.send(Ranks(1, "again", dict(TO)))
        room, reason = await e.over.get()
        assert (room, "Ranks" in reason) == (7, True)
        await channel.wait_closed()
