"""Every decoder of bytes that come from elsewhere: whatever arrives, it is read or refused with the error it documents.

Seeds are real messages. They are mutated as bytes, and as trees: a node replaced by what no honest side sends, a key added, doubled or
left out. An example may take a second of CPU at most, and bombs of claimed or nested sizes a bounded amount of memory.
"""

from __future__ import annotations

import math
import random
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regauge import config
from regauge.errors import AuthError, ConfigError, LayoutError, PeerLost, ProtocolError, TransportError
from regauge.layout import files
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array
from regauge.move import frames, listener, shm
from regauge.move import messages as m
from regauge.move.auth import Handshake
from regauge.move.channel import decode_layout, encode_layout
from regauge.move.transport import Exported, Region, decode_export
from regauge.plan import check, cost, quality
from regauge.serve import openai, wire
from regauge.serve.openai import ApiError

KEY = bytes(range(32))
MODEL = attention_model("m", 2, Array(2, 16))
LAYOUTS = [from_short(text, MODEL, pages=3) for text in ("bf16,page=16,nhd", "fp8_e4m3,page=32,hnd,scale=token_head")]
CPU_S = 1.0
Json = Any


@dataclass(frozen=True)
class Decoder:
    """One way in."""

    read: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    errors: tuple[type[Exception], ...]
    """What it may raise, and nothing else."""
    form: str
    """"msgpack", "json", "toml" or "raw": how the tree is got at."""


def received(kind: type[msgspec.Struct], limit: int = 4096) -> Callable[[bytes], object]:
    """Read one length-prefixed message from a socket, as the listener does."""

    def read(data: bytes) -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
            theirs.setblocking(False)
            prefix = struct.pack("<I", len(data) & 0xFFFFFFFF)
            try:
                theirs.send(prefix + data)
            except BlockingIOError:
                return None
            theirs.shutdown(socket.SHUT_WR)
            return listener.recv_message(ours, kind, time.monotonic() + 5, limit)

    return read


def frame(data: bytes) -> object:
    """Read a tcp frame's header and table, and judge it against a region."""
    if len(data) < frames.HEADER_BYTES:
        return None
    header = frames.decode_header(data[: frames.HEADER_BYTES])
    raw = np.frombuffer(data[frames.HEADER_BYTES :][: 16 * header.count], np.uint8)
    if len(raw) < 16 * header.count:
        return None
    table = frames.decode_table(header, raw.copy())
    reason = frames.refusal(table, Region("r", 1 << 20, 1 << 16, 1), header.generation)
    inside = all(a >= 1 << 20 and a + n <= (1 << 20) + (1 << 16) for a, n in table.tolist())
    assert (reason == "") == inside
    return reason


def handshake(data: bytes) -> object:
    hand = Handshake(KEY, "acceptor", "p")
    while data and hand.needs:
        part, data = data[: hand.needs], data[hand.needs :]
        hand.receive(part)
    assert not hand.done
    return None


def pair(data: bytes) -> object:
    """A peer's layout, and what is judged of it before anything else is known of the peer."""
    return check(decode_layout(data), LAYOUTS[0])


def packed(*messages: msgspec.Struct) -> tuple[bytes, ...]:
    return tuple(msgspec.msgpack.encode(each) for each in messages)


def controls() -> tuple[bytes, ...]:
    """One message of every kind, its fields filled by their types."""
    found = []
    for kind in m.AnyMessage.__args__:
        fields = {f.name: example(f.type) for f in msgspec.inspect.type_info(kind).fields}
        found.append(msgspec.msgpack.encode(kind(**fields)))
    return tuple(found)


def example(kind: Any) -> Any:
    """A value of a type as `msgspec.inspect` describes it."""
    name = type(kind).__name__
    if name == "StructType":
        return kind.cls(**{f.name: example(f.type) for f in kind.fields})
    if name == "UnionType":
        return example(kind.types[0])
    if name == "LiteralType":
        return kind.values[0]
    if name in ("ListType", "SetType", "VarTupleType"):
        return [example(kind.item_type)] * 2 if name == "ListType" else (example(kind.item_type),) * 2
    if name == "TupleType":
        return tuple(example(each) for each in kind.item_types)
    if name == "DictType":
        return {example(kind.key_type): example(kind.value_type)}
    length = max(getattr(kind, "min_length", None) or 0, 1)
    return {
        "StrType": "x" * length,
        "BytesType": b"x" * length,
        "BoolType": True,
        "FloatType": 1.5,
        "NoneType": None,
    }.get(name, max(getattr(kind, "ge", None) or 0, 1))


EXPORT = Exported("tcp", "127.0.0.1:1", "s" * 32, (Region("a", 1 << 20, 4096, 1), Region("b", 1 << 30, 1, 2)))
HELLO = listener.Hello(listener.VERSION, "data", "s" * 32, "t" * 32, "peer", 1.0, 1)
CHAT = b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"stop":["a"],"seed":3}'
ACK = frames.encode_ack(7, frames.REFUSED, 10, "why") + frames.encode_ack(8, frames.LANDED, 10)
HEAD = frames.encode_head(1, 1, np.array([[0, 1 << 20, 5], [0, (1 << 20) + 9, 7]], dtype=np.int64), 12, 3).tobytes()

DECODERS = {
    "control": Decoder(m.decode, controls(), (ProtocolError,), "msgpack"),
    "export": Decoder(
        lambda data: decode_export(data, "tcp"), packed(EXPORT), (ProtocolError, TransportError), "msgpack"
    ),
    "hello": Decoder(received(listener.Hello), packed(HELLO), (ProtocolError, PeerLost), "msgpack"),
    "welcome": Decoder(
        received(listener.Welcome), packed(listener.Welcome(False, "why")), (ProtocolError, PeerLost), "msgpack"
    ),
    "shm table": Decoder(
        received(shm.Table, listener.MAX_MESSAGE),
        packed(shm.Table(EXPORT.regions)),
        (ProtocolError, PeerLost),
        "msgpack",
    ),
    "layout": Decoder(pair, tuple(encode_layout(each) for each in LAYOUTS), (LayoutError,), "json"),
    "layout file": Decoder(
        lambda data: files.decode(data, format="toml"),
        tuple(files.encode(each, format="toml") for each in LAYOUTS),
        (LayoutError,),
        "toml",
    ),
    "costs": Decoder(cost.decode, (cost.encode(cost.DEFAULTS),), (ConfigError,), "toml"),
    "configuration": Decoder(
        config.decode,
        (b'port = 9000\n[decode]\nmax_batch = 4\n[transfer]\ntransport = "tcp"\nlanes = 2\n',),
        (ConfigError,),
        "toml",
    ),
    "quality record": Decoder(quality.decode, (b'{"record":{},"signature":""}',), (ConfigError,), "json"),
    "event": Decoder(
        wire.decode_event,
        (
            wire.encode_line(wire.TokenEvent(1, -0.5, [(1, -0.5)])),
            wire.encode_line(wire.ErrorEvent("timeout", "x", "w")),
        ),
        (ProtocolError,),
        "json",
    ),
    "chat": Decoder(openai.parse_chat, (CHAT,), (ApiError,), "json"),
    "completion": Decoder(openai.parse_completion, (b'{"model":"m","prompt":["a","b"],"n":2}',), (ApiError,), "json"),
    "frame": Decoder(frame, (HEAD,), (ProtocolError,), "raw"),
    "acks": Decoder(lambda data: frames.AckReader().feed(data), (ACK,), (ProtocolError,), "raw"),
    "authentication": Decoder(
        handshake, (Handshake(KEY, "initiator", "p", nonce=bytes(32)).start() + bytes(33),), (AuthError,), "raw"
    ),
}

NEVER_HONEST: tuple[Json, ...] = (
    None, True, 0, -1, 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, -0.0, 1e308, math.inf, math.nan,
    "", "x", "x" * 70_000, "\0", "\U0010ffff", b"", b"\xff" * 300, [], [[]] * 3, {}, {"": 0}, {"type": "hello"}, list(range(3000)),
)  # fmt: skip
UNPACK = {"msgpack": msgspec.msgpack.decode, "json": msgspec.json.decode, "toml": msgspec.toml.decode}


def pack(form: str, tree: Json) -> bytes:
    try:
        return {"msgpack": msgspec.msgpack.encode, "json": msgspec.json.encode, "toml": msgspec.toml.encode}[form](tree)
    except (TypeError, AttributeError, ValueError, OverflowError):  # the format has no such value
        return msgspec.json.encode(str(tree)[:1000])


def nodes(tree: Json, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree."""
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in nodes(value, (*path, key)))]


def changed(tree: Json, path: tuple[Any, ...], how: str, value: Json) -> Json:
    """The tree with one place replaced, left out, doubled, or joined by a key that nobody knows."""
    if not path:
        return {**tree, "nobody knows": value} if how == "add" and isinstance(tree, dict) else value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    key = path[0]
    if len(path) > 1:
        copy[key] = changed(copy[key], path[1:], how, value)
    elif how == "drop":
        del copy[key]
    elif how == "double" and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif how == "nest":
        copy[key] = [copy[key]]
    elif how == "add" and isinstance(copy, dict):
        copy["nobody knows"] = value
    else:
        copy[key] = value
    return copy


def mangled(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a few of them changed, cut out, doubled, or put elsewhere."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, length = rng.randint(0, len(out)), rng.choice((1, 1, 2, 4, 8, 40))
        match rng.randint(0, 4):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randint(0, 7)
            case 1:
                out[at : at + length] = rng.choice((b"\xff", b"\0", b"\x7f", b"\x80", b"\xc1")) * length
            case 2:
                del out[at : at + length]
            case 3:
                out[at:at] = out[at : at + length * 8]
            case _:
                out[at:at] = rng.randbytes(length)
    return bytes(out)


def feed(decoder: Decoder, data: bytes) -> None:
    """Decode; anything but a value or a documented error fails the test."""
    started = time.process_time()
    said = ""
    try:
        decoder.read(data)
    except decoder.errors as error:
        said = str(error)
    assert len(said) < 20_000 + 4 * len(data)  # an answer to a client may repeat what it sent
    assert time.process_time() - started < CPU_S


@pytest.mark.parametrize("name", DECODERS)
def test_the_seeds_are_read(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds:
        if name in ("quality record", "authentication"):  # no whole ones without an accuracy run, or the key
            with pytest.raises(decoder.errors):
                decoder.read(seed)
        else:
            decoder.read(seed)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(which=st.integers(0, 1 << 30), seed=st.integers(0, 1 << 62))
def test_mangled_bytes_are_read_or_refused(name: str, which: int, seed: int) -> None:
    decoder, rng = DECODERS[name], random.Random(seed)
    data = decoder.seeds[which % len(decoder.seeds)]
    feed(decoder, mangled(data, rng) if rng.random() < 0.9 else rng.randbytes(rng.randint(0, 200)))


@pytest.mark.parametrize("name", [name for name, each in DECODERS.items() if each.form != "raw"])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    which=st.integers(0, 1 << 30),
    where=st.integers(0, 1 << 30),
    how=st.sampled_from(["put", "put", "put", "drop", "double", "nest", "add"]),
    value=st.sampled_from(range(len(NEVER_HONEST))),
)
def test_trees_that_nobody_honest_sends_are_read_or_refused(
    name: str, which: int, where: int, how: str, value: int
) -> None:
    decoder = DECODERS[name]
    tree = UNPACK[decoder.form](decoder.seeds[which % len(decoder.seeds)])
    places = nodes(tree)
    feed(decoder, pack(decoder.form, changed(tree, places[where % len(places)], how, NEVER_HONEST[value])))


def text(value: str) -> bytes:
    return msgspec.msgpack.encode(value)


DEPTH = 1_000_000
BOMBS: dict[str, dict[str, bytes]] = {
    "msgpack": {
        "claimed list": b"\xdd\xff\xff\xff\xff",
        "claimed map": b"\xdf\xff\xff\xff\xff",
        "claimed text": b"\x81\xdb\xff\xff\xff\xff",
        "claimed bytes under a key": b"\x81" + text("type") + b"\xc6\xff\xff\xff\xff",
        "nested lists": b"\x91" * DEPTH,
        "nested maps": (b"\x81" + text("a")) * DEPTH,
        "nested before the tag": b"\x82" + text("zz") + b"\x91" * DEPTH + b"\xc0" + text("type") + text("freed"),
        "nested extension": b"\x82"
        + text("type")
        + text("grant")
        + text("pages")
        + b"\xdc\xff\xff"
        + b"\xc7\xff\x05" * 999,
        "text that is none": b"\x81" + text("type") + b"\xa4\xff\xfe\xfd\xfc",
        "key that is none": b"\x81\xa4\xff\xfe\xfd\xfc\x01",
    },
    "json": {
        "nested lists": b"[" * DEPTH,
        "nested maps": b'{"model":' * DEPTH,
        "nested under a key": b'{"nobody knows":' + b"[" * DEPTH,
        "nested in a message": b'{"type":"token","messages":[{"role":"user","zz":' + b"[" * DEPTH,
        "a long number": b'{"model":' + b"9" * DEPTH + b"}",
        "a long exponent": b'{"port":1e' + b"9" * DEPTH + b"}",
        "text that is none": b'{"model":"\xff\xfe"}',
        "half a surrogate": b'{"model":"\\ud800"}',
    },
    "toml": {
        "nested lists": b"model = " + b"[" * 100_000,
        "nested tables": b"model = " + b"{a=" * 10_000,
        "a long number": b"port = " + b"9" * 100_000,
        "text that is none": b'model = "\xff\xfe"',
        "a date": b"model = 2026-02-30T99:99:99Z",
        "too large": b"# " + b"x" * (4 << 20),
    },
}


@pytest.mark.parametrize(
    ("name", "bomb"), [(name, bomb) for name, each in DECODERS.items() for bomb in BOMBS.get(each.form, {})]
)
def test_bombs_cost_little(name: str, bomb: str) -> None:
    decoder = DECODERS[name]
    data = BOMBS[decoder.form][bomb]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        feed(decoder, data)
        assert tracemalloc.get_traced_memory()[1] - before < 160 * len(data) + (4 << 20)
    finally:
        tracemalloc.stop()


@given(st.binary(min_size=4, max_size=4))
def test_a_control_frame_says_no_length_beyond_its_bound(head: bytes) -> None:
    try:
        assert m.frame_length(head) <= m.MAX_FRAME
    except ProtocolError:
        assert int.from_bytes(head, "little") > m.MAX_FRAME
