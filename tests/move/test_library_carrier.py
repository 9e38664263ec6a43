"""Carriers by themselves: asked, killed, frozen, and dead for reasons of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from peer_process import freeze, states, wait_until

from regauge.errors import DeadlineExceeded, PeerLost, TransportError
from regauge.move.library import wire
from regauge.move.library.carrier import Carrier, environment
from regauge.move.library.sockets import listening
from regauge.move.memory import Slab
from regauge.move.pieces import Region

SIZE = 1 << 16
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parent)}


def soon(seconds: float = 20) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(stack: ExitStack, library: str = "careless_library") -> Carrier:
    carrier = Carrier(wire.Open(library, "127.0.0.1", "tcp", ()), environment(ENVIRONMENT, {}))
    stack.callback(carrier.kill)
    return carrier


class Pair:
    """A carrier that writes, one that is written to, and a slab in each."""

    def __init__(self, stack: ExitStack) -> None:
        self.source, self.target = (stack.enter_context(Slab(SIZE, name)) for name in ("source", "target"))
        self.source.array[:] = 7
        self.writer, self.owner = start(stack), start(stack)
        for each in (self.writer, self.owner):
            each.open(soon())
        here = self.writer.lend(Region("source", self.source.address, SIZE, 1), self.source.fd, soon())
        there = self.owner.lend(Region("target", self.target.address, SIZE, 1), self.target.fd, soon())
        about = self.owner.ask(wire.Describe(), soon())
        self.writer.ask(wire.Connect(about.data, about.value), soon())
        self.write = wire.Write(np.array([[here, there, SIZE]], dtype=np.int64).tobytes())


def test_it_writes_what_it_was_lent(stack: ExitStack) -> None:
    pair = Pair(stack)
    pair.writer.ask(pair.write, soon())
    assert (pair.target.array == 7).all()
    assert pair.writer.lend(Region("source", 0, SIZE, 1), -1, soon()) == pair.writer.base(1)
    assert pair.writer.base(2) is None


@pytest.mark.parametrize("fenced", [False, True])
def test_failed_does_not_mean_stopped_but_a_dead_owner_does(stack: ExitStack, *, fenced: bool) -> None:
    pair = Pair(stack)
    freeze(pair.owner.pid)
    with pytest.raises(DeadlineExceeded):
        pair.writer.ask(pair.write, soon(0.3))
    assert not pair.writer.alive
    assert not pair.target.array.any()
    if fenced:
        assert pair.owner.kill()
        assert not pair.target.array.any()
    else:
        os.kill(pair.owner.pid, signal.SIGCONT)
        wait_until(lambda: bool(pair.target.array.any()))  # its writer is dead, and still it lands


def test_the_way_a_carrier_died_is_told(stack: ExitStack) -> None:
    carrier = start(stack)
    carrier.open(soon())
    os.kill(carrier.pid, signal.SIGSEGV)
    with pytest.raises(PeerLost, match="SIGSEGV"):
        carrier.ask(wire.Describe(), soon())
    assert not carrier.alive
    with pytest.raises(PeerLost, match="ended by this side"):
        carrier.ask(wire.Describe(), soon())
    assert carrier.kill()


def test_a_library_that_is_not_there_is_named(stack: ExitStack) -> None:
    carrier = start(stack, "no_such_library")
    with pytest.raises(TransportError, match="No module named 'no_such_library'"):
        carrier.open(soon())
    assert not carrier.alive


def test_requests_before_opening_and_too_large_are_refused(stack: ExitStack) -> None:
    carrier = start(stack)
    with pytest.raises(TransportError, match="not been opened"):
        carrier.ask(wire.Describe(), soon())
    with pytest.raises(TransportError, match="at most"):
        carrier.ask(wire.Write(bytes(wire.MAX_MESSAGE)), soon())


def test_a_carrier_ends_with_its_worker_even_while_it_waits_for_a_peer() -> None:
    """The worker is killed while its carrier is inside the library, whose peer never answers."""
    program = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parent.parent)!r}]
from contextlib import ExitStack
from test_library_carrier import Pair, freeze, soon
with ExitStack() as stack:
    pair = Pair(stack)
    freeze(pair.owner.pid)
    print(pair.writer.pid, pair.owner.pid, flush=True)
    pair.writer.ask(pair.write, soon(60))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        writer, owner = map(int, worker.stdout.readline().split())
        worker.kill()
    wait_until(lambda: not states(writer))
    os.kill(owner, signal.SIGCONT)  # it was stopped by the test, and reads of its worker's end once it goes on
    wait_until(lambda: not states(owner))


def test_environments_are_overridden_defaulted_and_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCED", "DEFAULTED", "REFUSED", "KEPT"):
        monkeypatch.setenv(name, "outer")
    made = environment({"FORCED": "1"}, {"DEFAULTED": "1", "UNSET": "1"}, ("REFUSED",))
    assert {name: made.get(name) for name in ("FORCED", "DEFAULTED", "UNSET", "REFUSED", "KEPT")} == {
        "FORCED": "1", "DEFAULTED": "outer", "UNSET": "1", "REFUSED": None, "KEPT": "outer"
    }  # fmt: skip


def test_listening_sockets_are_found_with_their_addresses() -> None:
    before = set(listening(os.getpid()))
    with (
        socket.create_server(("127.0.0.2", 0)) as four,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
        socket.socket() as bound,
    ):
        bound.bind(("127.0.0.3", 0))
        expected = {("127.0.0.2", four.getsockname()[1]), ("::1", six.getsockname()[1])}
        assert set(listening(os.getpid())) - before == expected


def test_a_library_with_too_much_to_say_is_refused_and_goes_on(stack: ExitStack) -> None:
    carrier = start(stack, "wordy_library")
    carrier.open(soon())
    for _ in range(2):
        with pytest.raises(TransportError, match="register fewer, larger slabs"):
            carrier.ask(wire.Describe(), soon())
    assert carrier.alive
