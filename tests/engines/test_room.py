"""What a request to an SGLang server carries: both legs of a transfer, in `bootstrap_host` and `bootstrap_room`."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.engines.sglang import room
from regauge.errors import ProtocolError

names = st.text(min_size=1, max_size=200)
tos = st.dictionaries(names, st.tuples(st.text(), st.integers(1, 65_535)), min_size=1, max_size=5).map(room.To)
froms = st.lists(names, min_size=1, max_size=5).map(room.From)


@given(tos | froms, st.integers(0, 65_535) | st.none())
def test_a_leg_comes_back_as_it_was_also_with_a_port_behind_it(leg: room.To | room.From, port: int | None) -> None:
    host = room.encode(leg)
    assert ":" not in host
    assert "[" not in host  # SGLang would take it for an IPv6 address
    assert room.decode(host if port is None else f"{host}:{port}") == leg


@pytest.mark.parametrize("host", ["10.0.0.2:8998", "[::1]:8998", "prefill.example:8998", "2.2.2.2"])
def test_the_address_of_a_host_is_no_leg(host: str) -> None:
    assert room.decode(host) is None


@pytest.mark.parametrize("rest", ["", "!", "AAAA", "bnVsbA", "eyJ0eXBlIjoidG8ifQ", "eyJ0eXBlIjoidG8iLCJyYW5rcyI6e319"])
def test_what_begins_like_a_leg_and_is_none_is_refused(rest: str) -> None:
    with pytest.raises(ProtocolError, match="bootstrap_host"):
        room.decode(room.PREFIX + rest)


@given(st.text(max_size=80))
def test_no_text_does_anything_else(rest: str) -> None:
    with contextlib.suppress(ProtocolError):
        assert room.decode(room.PREFIX + rest) is not None


@given(st.integers(0, room.MAX_ROOM))
def test_a_room_names_a_transfer(number: int) -> None:
    assert room.room(room.transfer(number)) == number


@pytest.mark.parametrize("name", ["", "room-", "7", "room--1", "room-" + str(1 << 63), "room-٣"])
def test_other_names_are_no_rooms(name: str) -> None:
    with pytest.raises(ProtocolError, match="bootstrap_room"):
        room.room(name)
