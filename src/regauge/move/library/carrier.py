"""The worker's end of a carrier: start it, ask it, kill it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from regauge.errors import DeadlineExceeded, PeerLost, TransportError
from regauge.move.library import wire
from regauge.move.pieces import Region

LOOK_S = 0.05
"""How often a wait asks its limit again: a post that comes meanwhile may be more urgent."""
KILL_S = 5.0
Limit = float | Callable[[], float]
"""A `time.monotonic()` instant, or what is asked for one again and again while something is waited for; it may raise."""
_ANSWER = msgspec.msgpack.Decoder(wire.Answer)


class Carrier:
    """A process of `regauge.move.library.process`. Thread-safe; kill it at the end, whatever has happened to it."""

    def __init__(self, request: wire.Open, environment: Mapping[str, str]) -> None:
        self._request = request
        self._what = f"the carrier process of {request.library.rpartition('.')[2]}"
        try:
            self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TransportError(f"{self._what} does not start: {error}; raise the limit on open files") from error
        command = [sys.executable, "-m", "regauge.move.library.process", str(theirs.fileno())]
        try:
            # Libraries log to stdout, which may carry a protocol of the worker's own: both go to stderr.
            self._process = subprocess.Popen(  # noqa: S603  # our own module, no input in the command
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(theirs.fileno(),), env=dict(environment)
            )
        except OSError as error:
            self._sock.close()
            raise TransportError(f"{self._what} does not start: {error}") from error
        finally:
            theirs.close()
        self._turn = threading.RLock()
        self._opened = self._over = False
        self._bases: dict[int, tuple[int, int]] = {}

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return not self._over and self._process.poll() is None

    def open(self, limit: Limit) -> None:
        """Start the library, once. Raises TransportError, PeerLost or DeadlineExceeded; it is dead then."""
        with self._turn:
            if not self._opened:
                try:
                    self.ask(self._request, limit)
                except TransportError:
                    self.kill()
                    raise
                self._opened = True

    def lend(self, region: Region, fd: int, limit: Limit) -> int:
        """Map and register a slab, once per generation; returns its address there. Raises as `ask`."""
        with self._turn:
            if region.generation not in self._bases:
                answer = self.ask(wire.Register(region.nbytes), limit, fd)
                self._bases[region.generation] = (answer.value, region.nbytes)
            return self._bases[region.generation][0]

    def base(self, generation: int) -> int | None:
        """Return the address in the carrier of what was lent."""
        return self._bases.get(generation, (None, 0))[0]

    def take_back(self, generation: int, deadline: float) -> None:
        """Withdraw and unmap a slab, to which nobody writes any more. Unknown generations are ignored."""
        with self._turn:
            if (entry := self._bases.pop(generation, None)) is not None and self.alive:
                self.ask(wire.Forget(*entry), deadline)

    def ask(self, request: wire.Request, limit: Limit, fd: int = -1) -> wire.Answer:
        """Send a request and wait for its answer.

        Raises TransportError when the library refuses; PeerLost when it or its process says that something is gone;
        DeadlineExceeded, and whatever `limit` raises. In the latter cases the carrier has been killed, since nobody knows
        what it is at.
        """
        with self._turn:
            try:
                self._send(request, fd)
                answer = self._receive(limit)
            except BaseException:  # whatever broke: its answer may still come, and would be taken for the next one
                self.kill()
                raise
        if not answer.ok:
            raise (PeerLost if answer.lost else TransportError)(answer.reason)
        return answer

    def kill(self, deadline_s: float = KILL_S) -> bool:
        """End the process. True once the kernel says that it is gone: nothing it did goes on. Idempotent."""
        self._over = True
        self._process.send_signal(signal.SIGKILL)  # does nothing to one that has been waited for
        try:
            self._process.wait(max(deadline_s, 0.0))
        except subprocess.TimeoutExpired:
            return False
        with self._turn:  # whoever waits for an answer has seen the end of the stream
            self._sock.close()
        return True

    def _send(self, request: wire.Request, fd: int) -> None:
        data = msgspec.msgpack.encode(request)
        if len(data) > wire.MAX_MESSAGE:
            raise TransportError(f"a request of {len(data)} bytes to {self._what}; at most {wire.MAX_MESSAGE}")
        try:
            if fd >= 0:
                socket.send_fds(self._sock, [data], [fd], socket.MSG_NOSIGNAL)
            else:
                self._sock.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._lost() from error

    def _receive(self, limit: Limit) -> wire.Answer:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            left = (limit() if callable(limit) else limit) - time.monotonic()
            if self._over:
                raise self._lost()
            if poll.poll(1000 * min(max(left, 0.0), LOOK_S)):
                break
            if left <= 0:
                raise DeadlineExceeded(f"{self._what} did not finish in time")
        try:
            data = self._sock.recv(wire.MAX_MESSAGE)
        except OSError as error:
            raise self._lost() from error
        if not data:
            raise self._lost()
        try:
            return _ANSWER.decode(data)
        except msgspec.DecodeError as error:
            raise PeerLost(f"{self._what} gave an answer of {len(data)} bytes that cannot be read: {error}") from error

    def _lost(self) -> PeerLost:
        if self._over:
            return PeerLost(f"{self._what} was ended by this side")
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return PeerLost(f"{self._what} hung up; see its log on stderr")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return PeerLost(f"{self._what} ended with {how}; see its log on stderr")


def environment(
    forced: Mapping[str, str], defaults: Mapping[str, str], refused: tuple[str, ...] = ()
) -> dict[str, str]:
    """Return this process's environment for a carrier: `defaults` where unset, `forced` in any case, none of `refused`."""
    kept = {name: value for name, value in os.environ.items() if name not in refused}
    return {**defaults, **kept, **forced}
