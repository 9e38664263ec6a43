"""A worker's half of the connector: carries out what the scheduler's half says, over the links of this rank. Knows nothing of vLLM's classes.

All methods are for the worker's main thread and return at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from regauge.config import Role
from regauge.engines.ended import Ended
from regauge.engines.ends import Ends
from regauge.engines.handover import Handover, encode
from regauge.engines.vllm.schedule import BlockIds, Blocks, Command, Computed, Drop, Expect, Fail, Finish, Offer
from regauge.errors import ProtocolError, RegaugeError

log = structlog.get_logger()
MAX_OVER = 10_000
"""Ends that wait to be counted; vLLM asks after every step."""


@dataclass
class _Out:
    transfer: str
    tokens: int
    handover: bool
    told: dict[int, int] = field(default_factory=dict)
    """Per layer: the token before which it was told as computed."""
    done: Ended | None = None
    finished: bool = False
    """Whether decode was told that nothing more comes."""
    report: bool = False
    """Whether the scheduler waits for this request's blocks."""


@dataclass(frozen=True)
class Results:
    """What has ended since the last question, as vLLM wants it."""

    sent: set[str]
    received: set[str]
    failed: set[str]
    """Of those received: their blocks hold nothing that may be used."""


class Rank:
    """The transfers of one rank."""

    def __init__(self, ends: Ends) -> None:
        """Takes the ends over: `close` ends them."""
        self._ends = ends
        self.out, self.into = ends.out, ends.into
        self._layers = sorted({layer for group in ends.layout.groups for layer in group.layer_ids})
        self._sending: dict[str, _Out] = {}
        self._receiving: dict[str, tuple[str, bool]] = {}
        """Request -> transfer, and whether the scheduler waits for it."""
        self._step: list[tuple[str, int]] = []
        """Requests that compute in this step, and the token before which they will have."""
        self._failed: list[tuple[str, str]] = []
        self._over: deque[tuple[Role, Ended]] = deque(maxlen=MAX_OVER)
        self.bytes_in = 0
        """Wire bytes of everything that was received."""
        self.last: Ended | None = None
        """What was received last, for inspection."""
        self.sent: Ended | None = None
        """What was sent last, likewise."""

    def obey(self, commands: Iterable[Command]) -> None:
        """Carry out a step's commands, before the step's forward pass."""
        self._step = []
        for command in commands:
            match command:
                case Offer():
                    self._offer(command)
                case Blocks(request, blocks):
                    sending = self._sending.get(request)
                    if sending is not None and sending.done is None and self.out is not None:
                        self.out.pages(sending.transfer, _tables(blocks))
                case Computed(request, tokens, cached):
                    if cached:
                        for layer in self._layers:
                            self._tell(request, layer, tokens[1])
                    else:
                        self._step.append((request, tokens[1]))
                case Finish(request, token):
                    self._finish(request, token)
                case Expect():
                    self._expect(command)
                case Fail(request, reason):
                    self._failed.append((request, reason))
                case Drop(request, reason, report):
                    self._drop(request, reason, report=report)

    def saved(self, layer: int) -> None:
        """A layer of this step's forward pass has written its state.

        Decode gets a prompt with its last layer, ahead of prefill's sampling and next step, unless it wants prefill's token. Not in
        `saved_all`, which vLLM also calls when the forward pass has broken.
        """
        for request, end in self._step:
            self._tell(request, layer, end)
            sending = self._sending.get(request)
            if sending is None or sending.handover or end < sending.tokens:
                continue
            if all(sending.told.get(each) == end for each in self._layers):
                self._tell_end(sending, b"")

    def saved_all(self) -> None:
        """The step's forward pass is over."""
        for request, end in self._step:
            for layer in self._layers:
                self._tell(request, layer, end)
        self._step = []

    def results(self) -> Results:
        """Say what has ended since the last call."""
        sent = self._sent()
        received = self._received()
        failed = set()
        for request, error in self._failed:
            log.warning("kv not received", request=request, error=error)
            failed.add(request)
        self._failed = []
        return Results(sent, received | failed, failed)

    def _sent(self) -> set[str]:
        by_transfer = {sending.transfer: sending for sending in self._sending.values() if sending.done is None}
        for ended in self.out.ended() if self.out is not None else ():
            self._over.append(("prefill", ended))
            if ended.error:
                log.warning("kv not sent", transfer=ended.transfer, error=ended.error)
            if (sending := by_transfer.get(ended.transfer)) is not None:
                sending.done = self.sent = ended
        over = {request for request, sending in self._sending.items() if sending.done is not None and sending.report}
        for request in over:
            del self._sending[request]
        return over

    def _received(self) -> set[str]:
        by_transfer = {transfer: request for request, (transfer, _) in self._receiving.items()}
        received = set()
        for ended in self.into.ended() if self.into is not None else ():
            self._over.append(("decode", ended))
            request = by_transfer.get(ended.transfer)
            if request is None:
                continue
            _, report = self._receiving.pop(request)
            self.bytes_in += ended.wire_bytes
            self.last = ended
            if ended.error:
                if report:
                    self._failed.append((request, ended.error))
                continue
            log.info(
                "kv received",
                transfer=ended.transfer,
                path=ended.path,
                wire_bytes=ended.wire_bytes,
                seconds=round(ended.seconds, 6),
            )
            if report:
                received.add(request)
        return received

    def over(self) -> list[tuple[Role, Ended]]:
        """Take what has ended, on whichever side of it this rank was, since the last call."""
        out = list(self._over)
        self._over.clear()
        return out

    def close(self) -> None:
        """End the links."""
        self._ends.close()

    def _offer(self, command: Offer) -> None:
        params = command.params
        taken = any(each.transfer == params.transfer and each.done is None for each in self._sending.values())
        sending = self._sending[command.request] = _Out(params.transfer, command.tokens, params.handover)
        if taken:  # its words would be taken for the other request's
            sending.done = Ended(params.transfer, f"transfer {params.transfer!r} is under way already")
            log.warning("kv not sent", transfer=params.transfer, error=sending.done.error)
            return
        sending.done = self._ends.offer(params.transfer, params.to, command.tokens)

    def _tell(self, request: str, layer: int, end: int) -> None:
        sending = self._sending.get(request)
        if sending is None or self.out is None or sending.done is not None:
            return
        first = sending.told.get(layer, 0)
        if first < end:
            sending.told[layer] = end
            self.out.ready(sending.transfer, (layer, layer + 1), (first, end))

    def _finish(self, request: str, token: int | None) -> None:
        sending = self._sending.get(request)
        if sending is None:
            return
        sending.report = True
        self._tell_end(sending, b"" if token is None else encode(Handover(token)))

    def _tell_end(self, sending: _Out, handover: bytes) -> None:
        if self.out is not None and sending.done is None and not sending.finished:
            sending.finished = True
            self.out.finish(sending.transfer, handover)

    def _expect(self, command: Expect) -> None:
        params = command.params
        try:
            if any(transfer == params.transfer for transfer, _ in self._receiving.values()):
                raise ProtocolError(f"transfer {params.transfer!r} is expected already")
            tables = _tables(command.blocks)
            self._ends.expect(params.transfer, params.from_, command.tokens, tables, first=command.first)
        except RegaugeError as error:
            if command.report:
                self._failed.append((command.request, str(error)))
            return
        self._receiving[command.request] = (params.transfer, command.report)

    def _drop(self, request: str, reason: str, *, report: bool) -> None:
        sending = self._sending.get(request)
        if sending is not None:
            sending.report = sending.report or report
            if self.out is not None and sending.done is None:
                self.out.cancel(sending.transfer, reason)
            if not report:
                del self._sending[request]
        receiving = self._receiving.get(request)
        if receiving is not None and self.into is not None:
            self.into.cancel(receiving[0], reason)


def _tables(blocks: BlockIds) -> list[tuple[list[int], int]]:
    return [(list(own), 0) for own in blocks]
