"""Control messages: they read back, and what a peer may send is bounded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ProtocolError
from regauge.move import messages as m

SAMPLES = [
    m.Hello(2, "w", "i", "prefill", b"{}", [b""], m.Staging(1 << 47, 64, 2)),
    m.Ready("ab", ["staged", "mapped"], ["s"]),
    m.Refuse(["no"]),
    m.Offer("t", 5),
    m.Grant("t", 1, [m.Table([3, 4]), m.Table([9], 64)], 2, 2.5, 4096, [[3, 3], [0]]),
    m.Want("t", 1, 4096),
    m.Credit("t", 1, 8192),
    m.Written("t", 1, 2, 0, (0, 3), (4, 9), None, 77, bytes(8)),
    m.Again("t", 1, 2),
    m.Freed(3),
    m.Finish("t", 1, 4, b"x"),
    m.Commit("t"),
    m.Renew("t"),
    m.Abort("t", "why"),
    m.Fence("t"),
    m.Fenced("t"),
]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda x: type(x).__name__)
def test_a_message_reads_back(message: m.Message) -> None:
    frame = m.encode(message)
    assert m.frame_length(frame[:4]) == len(frame) - 4
    assert m.decode(frame[4:]) == message


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(body: bytes) -> None:
    try:
        m.decode(body)
    except ProtocolError:
        return


@given(st.sampled_from(SAMPLES), st.data())
def test_a_changed_byte_is_a_message_or_an_error(message: m.Message, data: st.DataObject) -> None:
    body = bytearray(m.encode(message)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.decode(bytes(body))
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"transfer": ""}, "transfer"),
        ({"transfer": "x" * 201}, "transfer"),
        ({"tokens": -1}, "tokens"),
        ({"more": 1}, "more"),
    ],
)
def test_fields_out_of_bounds_are_named(change: dict[str, object], field: str) -> None:
    plain = {"type": "offer", "transfer": "t", "tokens": 5} | change
    with pytest.raises(ProtocolError, match=field):
        m.decode(msgspec.msgpack.encode(plain))


def test_frames_are_bounded_both_ways() -> None:
    with pytest.raises(ProtocolError, match="exceeds 4194304"):
        m.frame_length((5 << 20).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="Finish message of"):
        m.encode(m.Finish("t", 1, 1, bytes(5 << 20)))
