"""The scheduler's half of the connector: what vLLM decides in, commands for the workers out. Pure; knows nothing of vLLM's classes.

A request carries its part of a transfer in `kv_transfer_params["regauge"]`:

| to | keys |
|---|---|
| prefill | `transfer`: its name; `to`: rank -> [host, port] of every rank of the decode engine, in order; `handover`: whether decode needs the first token |
| decode | `transfer`; `from`: names of all ranks of the prefill engine, in order |

**Prefill**: the transfer is offered with the request's first step. Blocks and computed tokens are told step by step. When the request has ended, its blocks stay until
the workers report that nothing reads them. A request that is preempted gives its transfer up: its blocks are going to be others'; what decode lacks it computes.

**Decode**: what no local prefix covers is external and loaded asynchronously, up to the last prompt token (vLLM computes that one again, to have something to
sample from). Where the prefix cache holds every whole block of the prompt, the rest is computed here and nothing is transferred, which prefill is told by a grant of no tokens.
A load that fails is tried once only: vLLM recomputes, or fails the request, as `kv_load_failure_policy` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from regauge.config import Port
from regauge.move.messages import Name

PARAMS = "regauge"
BlockIds = tuple[list[int], ...]
"""Of each KV cache group."""


class SendParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prefill request carries."""

    transfer: Name
    to: Annotated[dict[Name, tuple[str, Port]], msgspec.Meta(min_length=1, max_length=4096)]
    handover: bool = False


class ReceiveParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from"}):
    """What a decode request carries."""

    transfer: Name
    from_: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=4096)]


@dataclass(frozen=True)
class Offer:
    """Prefill: announce a transfer."""

    request: str
    params: SendParams
    tokens: int


@dataclass(frozen=True)
class Blocks:
    """Prefill: the blocks of a request so far."""

    request: str
    blocks: BlockIds


@dataclass(frozen=True)
class Computed:
    """Prefill: tokens [first, end) of the prompt lie in the request's blocks after this step; `cached`: before it, those of a prefix."""

    request: str
    tokens: tuple[int, int]
    cached: bool = False


@dataclass(frozen=True)
class Finish:
    """Prefill: the request has ended; report it as sent once nothing reads its blocks."""

    request: str
    token: int | None
    """The first token; None where there is none, or decode samples it itself."""


@dataclass(frozen=True)
class Expect:
    """Decode: wait for tokens [first, tokens) in these blocks, and report it as received."""

    request: str
    params: ReceiveParams
    tokens: int
    first: int
    blocks: BlockIds
    report: bool = True
    """False: nobody waits, since nothing is missing."""


@dataclass(frozen=True)
class Fail:
    """Decode: report a request as received and failed: nothing can come for it."""

    request: str
    reason: str


@dataclass(frozen=True)
class Drop:
    """Give a request's transfer up. Its blocks are the engine's again when it is reported; `report` False: at once."""

    request: str
    reason: str
    report: bool


Command = Offer | Blocks | Computed | Finish | Expect | Fail | Drop


@dataclass(frozen=True)
class Step:
    """One request in one scheduler step."""

    request: str
    new_blocks: BlockIds | None
    computed: int
    """Tokens computed before the step."""
    scheduled: int


@dataclass
class _Sending:
    params: SendParams
    prompt: int
    blocks: BlockIds = ()
    told: int = 0
    """Prompt tokens before this one were told as computed."""


@dataclass
class Schedule:
    """The transfers of one vLLM engine, on its scheduler's side."""

    block_size: int
    sends: bool
    receives: bool
    _sending: dict[str, _Sending] = field(default_factory=dict)
    _receiving: dict[str, ReceiveParams | str] = field(default_factory=dict)
    """Requests whose KV has not been asked for; or why it cannot be."""
    _refused: dict[str, str] = field(default_factory=dict)
    """Prefill requests whose parameters are wrong: their answer says so."""
    _loading: set[str] = field(default_factory=set)
    _commands: list[Command] = field(default_factory=list)

    def arrived(self, request: str, params: Mapping[str, Any] | None, prompt: int) -> None:
        """A request is there. Parameters that are wrong, or for the other role, are this request's error and nobody else's."""
        given = (params or {}).get(PARAMS)
        if given is None:
            return
        prefill = isinstance(given, Mapping) and "to" in given
        try:
            if prefill and self.sends:
                self._sending[request] = _Sending(msgspec.convert(given, SendParams), prompt)
                return
            if not prefill and self.receives:
                self._receiving[request] = msgspec.convert(given, ReceiveParams)
                return
            why = f"asks this engine to {'prefill' if prefill else 'decode'}, which its kv_role does not"
        except msgspec.ValidationError as error:
            why = str(error)
        text = f"kv_transfer_params.{PARAMS}: {why}"
        if prefill:
            self._refused[request] = text
        else:
            self._receiving[request] = text

    def external(self, request: str, prompt: int, computed: int) -> int:
        """Return how many prompt tokens beyond `computed` come from outside; 0: none, or not any more."""
        if request not in self._receiving or self._whole(prompt, computed):
            return 0
        return prompt - computed

    def allocated(self, request: str, prompt: int, blocks: BlockIds, external: int) -> None:
        """vLLM has allocated a request's blocks, `external` of its prompt tokens to be loaded into them."""
        params = self._receiving.pop(request, None)
        if params is None:
            return
        if isinstance(params, str):
            if external:
                self._loading.add(request)
                self._commands.append(Fail(request, params))
        elif external:
            self._loading.add(request)
            self._commands.append(Expect(request, params, prompt, prompt - external, blocks))
        else:
            self._commands.append(Expect(request, params, prompt, prompt, blocks, report=False))

    def step(self, new: Iterable[Step], more: Iterable[Step], preempted: Iterable[str]) -> list[Command]:
        """Take a scheduler step, and return the commands for the workers, in order."""
        for request in preempted:
            if self._sending.pop(request, None) is not None:
                self._commands.append(Drop(request, "the request was preempted on the prefill side", report=False))
        for step in new:
            sending = self._sending.get(step.request)
            if sending is None:
                continue
            sending.blocks = step.new_blocks or ()
            self._commands.append(Offer(step.request, sending.params, sending.prompt))
            self._advance(sending, step, fresh=True)
        for step in more:
            sending = self._sending.get(step.request)
            if sending is None:
                continue
            if step.new_blocks is not None:
                sending.blocks = tuple([*a, *b] for a, b in zip(sending.blocks, step.new_blocks, strict=True))
            self._advance(sending, step, fresh=step.new_blocks is not None)
        commands, self._commands = self._commands, []
        return commands

    def finished(self, request: str, *, normal: bool, token: int | None) -> bool:
        """A request has ended. Return whether its blocks must be kept until the workers report it."""
        if self._receiving.pop(request, None) is not None:
            return False
        if request in self._loading:  # vLLM keeps the blocks by itself until the load is reported
            self._loading.discard(request)
            self._commands.append(Drop(request, "the request was aborted", report=True))
            return False
        sending = self._sending.pop(request, None)
        if sending is None or not sending.blocks:
            return False
        if normal and sending.told == sending.prompt:
            self._commands.append(Finish(request, token if sending.params.handover else None))
        else:
            self._commands.append(Drop(request, "the request was aborted", report=True))
        return True

    def refused(self, request: str) -> str:
        """Return why a prefill request that has ended was not sent, and forget it; empty: it was, or was not asked to."""
        return self._refused.pop(request, "")

    def loaded(self, requests: Iterable[str]) -> None:
        """The workers have reported these as received, loaded or failed."""
        self._loading.difference_update(requests)

    @property
    def waiting(self) -> bool:
        """Whether there are commands that the next step takes along."""
        return bool(self._commands)

    def _advance(self, sending: _Sending, step: Step, *, fresh: bool) -> None:
        if fresh:
            self._commands.append(Blocks(step.request, sending.blocks))
        cached = min(step.computed, sending.prompt)
        if cached > sending.told:
            self._commands.append(Computed(step.request, (sending.told, cached), cached=True))
            sending.told = cached
        end = min(step.computed + step.scheduled, sending.prompt)
        if end > sending.told:
            self._commands.append(Computed(step.request, (sending.told, end)))
            sending.told = end

    def _whole(self, prompt: int, computed: int) -> bool:
        """Whether the local prefix holds all the whole blocks that it ever does: vLLM leaves out the one with the last token."""
        return computed > 0 and computed >= (prompt - 1) // self.block_size * self.block_size
