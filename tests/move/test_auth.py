import asyncio
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import AuthError, ConfigError, DeadlineExceeded, PeerLost
from regauge.move.auth import HELLO_BYTES, PROOF_BYTES, Handshake, authenticate, authenticate_socket, load_key

KEY = bytes(range(32))
OTHER = bytes(32)


def pair(
    key: bytes = KEY, other: bytes = KEY, purpose: str = "p", their_purpose: str = "p"
) -> tuple[Handshake, Handshake]:
    return Handshake(key, "initiator", purpose), Handshake(other, "acceptor", their_purpose)


def test_two_sides_with_one_key_accept_each_other() -> None:
    left, right = pair()
    hello, answer = left.start(), right.start()
    assert len(hello) == len(answer) == HELLO_BYTES
    assert right.receive(hello) == b""
    proof = left.receive(answer)
    assert len(proof) == PROOF_BYTES
    assert not left.done
    assert not right.done
    assert left.receive(right.receive(proof)) == b""
    assert left.done
    assert right.done
    assert left.needs == right.needs == 0


@pytest.mark.parametrize("sizes", [1, 7, 33])
def test_bytes_may_come_in_any_cut(sizes: int) -> None:
    left, right = pair()
    feed(right, left.start(), sizes)
    proof = feed(left, right.start(), sizes)
    feed(left, feed(right, proof, sizes), sizes)
    assert left.done
    assert right.done


def feed(hand: Handshake, data: bytes, size: int) -> bytes:
    return b"".join(hand.receive(data[at : at + size]) for at in range(0, len(data), size))


@pytest.mark.parametrize(("other", "purpose"), [(OTHER, "p"), (KEY, "another channel")])
def test_another_key_or_purpose_is_refused_and_both_sides_learn_why(other: bytes, purpose: str) -> None:
    left, right = pair(other=other, their_purpose=purpose)
    right.receive(left.start())
    proof = left.receive(right.start())
    with pytest.raises(AuthError, match=r"the keys .* differ"):
        right.receive(proof)
    with pytest.raises(AuthError, match="refused this side's proof"):
        left.receive(right.farewell)
    assert not left.done
    assert not right.done


def test_the_acceptor_proves_nothing_to_a_stranger() -> None:
    _, right = pair()
    stranger = Handshake(OTHER, "initiator", "p")
    sent = right.start() + right.receive(stranger.start())
    with pytest.raises(AuthError):
        right.receive(stranger.receive(right.start()))
    assert len(sent) == HELLO_BYTES
    assert right.farewell[1:] == bytes(PROOF_BYTES - 1)


def test_strangers_are_named() -> None:
    with pytest.raises(AuthError, match="does not speak regauge"):
        pair()[1].receive(b"GET ")
    hello = bytearray(pair()[0].start())
    hello[4] = 9
    with pytest.raises(AuthError, match="speaks version 9, this side 1"):
        pair()[1].receive(bytes(hello))


def test_a_reflected_hello_is_refused() -> None:
    left, _ = pair()
    with pytest.raises(AuthError, match="reflected"):
        left.receive(left.start())
    left, _ = pair()
    forged = bytearray(left.start())
    forged[5] = 2  # claims to be the acceptor, with the initiator's own nonce
    with pytest.raises(AuthError, match="reflected"):
        left.receive(bytes(forged))


def test_a_reflected_proof_is_refused() -> None:
    left, right = pair()
    proof = left.receive(right.start())
    with pytest.raises(AuthError, match="proof is wrong"):
        left.receive(proof)


def test_a_recorded_exchange_opens_nothing() -> None:
    left, right = pair()
    hello = left.start()
    right.receive(hello)
    proof = left.receive(right.start())
    again = Handshake(KEY, "acceptor", "p")
    again.receive(hello)
    with pytest.raises(AuthError, match="proof is wrong"):
        again.receive(proof)


@given(flight=st.integers(0, 3), at=st.integers(0, HELLO_BYTES - 1), flip=st.integers(1, 255))
def test_no_tampered_exchange_is_accepted_by_both(flight: int, at: int, flip: int) -> None:
    left, right = pair()

    def wire(number: int, data: bytes) -> bytes:
        if number != flight or at >= len(data):
            return data
        return data[:at] + bytes((data[at] ^ flip,)) + data[at + 1 :]

    tampered = not (flight >= 2 and at >= PROOF_BYTES)
    try:
        right.receive(wire(0, left.start()))
        proof = left.receive(wire(1, right.start()))
        left.receive(wire(3, right.receive(wire(2, proof))))
    except AuthError:
        assert tampered
    assert (left.done and right.done) == (not tampered)
    if flight <= 2 and tampered:
        assert not left.done


@given(data=st.binary(max_size=200), cut=st.integers(0, HELLO_BYTES + PROOF_BYTES - 1))
def test_truncated_or_random_bytes_never_open(data: bytes, cut: int) -> None:
    left, right = pair()
    right.receive(left.start())
    good = left.start() + left.receive(right.start())
    hand = Handshake(KEY, "acceptor", "p", nonce=right.start()[8:])
    stream = good[:cut] + data
    try:
        while stream and hand.needs:
            part, stream = stream[: hand.needs], stream[hand.needs :]
            hand.receive(part)
    except AuthError:
        assert not hand.done
        return
    assert not hand.done or (good[:cut] + data).startswith(good)


def test_more_than_it_needs_is_refused() -> None:
    left, right = pair()
    with pytest.raises(AuthError, match="more than the handshake has"):
        right.receive(left.start() + b"x")


def test_short_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 16"):
        Handshake(b"short", "initiator", "p")


def test_keys_come_from_hexadecimal_text(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(KEY.hex() + "\n", encoding="ascii")
    assert load_key(path) == KEY
    path.write_text("abcd", encoding="ascii")
    with pytest.raises(ConfigError, match="2 bytes; at least 16"):
        load_key(path)
    path.write_text("not hex", encoding="ascii")
    with pytest.raises(ConfigError, match="not hexadecimal"):
        load_key(path)
    path.write_bytes(b"\xff\xff")
    with pytest.raises(ConfigError, match="not hexadecimal"):
        load_key(path)
    with pytest.raises(ConfigError, match="missing: No such file or directory; make one with"):
        load_key(tmp_path / "missing")
    path.write_text(KEY.hex(), encoding="ascii")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read this private key"):
        load_key(path)


def accept_in_thread(sock: socket.socket, key: bytes) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            authenticate_socket(sock, key, "acceptor", "p", time.monotonic() + 5)
        except (AuthError, PeerLost, DeadlineExceeded) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_over_sockets() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread, errors = accept_in_thread(theirs, KEY)
        authenticate_socket(ours, KEY, "initiator", "p", time.monotonic() + 5)
        thread.join()
        assert errors == []
        assert ours.gettimeout() is None


def test_over_sockets_with_another_key_both_sides_fail_with_the_reason() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        thread, errors = accept_in_thread(theirs, OTHER)
        with pytest.raises(AuthError, match="refused this side's proof"):
            authenticate_socket(ours, KEY, "initiator", "p", time.monotonic() + 5)
        thread.join()
        assert isinstance(errors[0], AuthError)


def test_a_silent_peer_is_cut_at_the_deadline_and_a_closed_one_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, pytest.raises(DeadlineExceeded):
            authenticate_socket(ours, KEY, "initiator", "p", time.monotonic() + 0.05)
        with pytest.raises(PeerLost):
            authenticate_socket(ours, KEY, "initiator", "p", time.monotonic() + 5)


def test_a_slow_loris_cannot_stretch_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"RGAU\1")
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            authenticate_socket(ours, KEY, "acceptor", "p", started + 0.1)
        assert time.monotonic() - started < 2


def over_streams(client_key: bytes, server_key: bytes, server: bool = True) -> list[BaseException | None]:
    async def main() -> list[BaseException | None]:
        ours, theirs = socket.socketpair()
        left = await asyncio.open_connection(sock=ours)
        right = await asyncio.open_connection(sock=theirs)
        sides = [authenticate(*left, client_key, "initiator", "p", 5 if server else 0.05)]
        if server:
            sides.append(authenticate(*right, server_key, "acceptor", "p", 5))
        try:
            return await asyncio.gather(*sides, return_exceptions=True)
        finally:
            for _, writer in (left, right):
                writer.close()
                await writer.wait_closed()

    return asyncio.run(main())


def test_over_asyncio_streams() -> None:
    assert over_streams(KEY, KEY) == [None, None]
    client, server = over_streams(KEY, OTHER)
    assert isinstance(client, AuthError)
    assert isinstance(server, AuthError)
    (alone,) = over_streams(KEY, KEY, server=False)
    assert isinstance(alone, DeadlineExceeded)
