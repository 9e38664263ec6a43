"""Answers of the Anthropic API: whole messages, and the events of a streamed one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from regauge.serve.anthropic import error_body
from regauge.serve.openai import ApiError
from regauge.serve.replies import Delta, FinishReason, Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens of a message. `input_tokens` are those that were computed: in this API a prompt is the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """A part of a message."""

    text: str


class MessageReply(msgspec.Struct, frozen=True, tag="message"):
    """A whole message; in the event that begins a stream, an empty one."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    """The first event."""

    message: MessageReply


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: TextBlock


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """More text of a block."""

    text: str


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    """What a step adds to a block."""

    index: int
    delta: TextDelta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    """A block ends."""

    index: int


class Ending(msgspec.Struct, frozen=True):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """The message's end, and its usage in all."""

    delta: Ending
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The last event."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Nothing; it comes once, as in the API."""


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping


@dataclass
class MessageWriter:
    """Writes the answer to one request, as `answer.Writer`. `prompt_tokens` are told when a stream begins; what of them was cached, at its end."""

    id: str
    model: str
    request_id: str
    prompt_tokens: int
    _begun: bool = field(default=False, init=False)
    _ending: Ending = field(default=Ending("end_turn", None), init=False)

    def chunks(self, delta: Delta) -> bytes:
        """Return the server-sent events of one step."""
        events = b""
        if not self._begun:
            self._begun = True
            usage = MessageUsage(self.prompt_tokens, 0, 0, 0)
            events = (
                _event(MessageStart(self._message([], None, usage)))
                + _event(BlockStart(0, TextBlock("")))
                + _event(Ping())
            )
        if delta.text:
            events += _event(BlockDelta(0, TextDelta(delta.text)))
        if delta.finish is not None:
            self._ending = _ending(delta.finish, delta.stopped)
            events += _event(BlockStop(0))
        return events

    def end(self, usage: Usage) -> bytes:
        """Return the stream's end: why the message ended, its usage, and the last event."""
        return _event(MessageDelta(self._ending, _usage(usage))) + _event(MessageStop())

    def failed(self, error: ApiError) -> bytes:
        """Return the `error` event that ends a stream which failed."""
        return failed(error, self.request_id)

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        texts, ending = [], self._ending
        for delta in deltas:
            texts.append(delta.text)
            if delta.finish is not None:
                ending = _ending(delta.finish, delta.stopped)
        return msgspec.json.encode(self._message([TextBlock("".join(texts))], ending, _usage(usage)))

    def refusal(self, error: ApiError) -> bytes:
        """Return the body of an error."""
        return error_body(error, self.request_id)

    def _message(self, content: list[TextBlock], ending: Ending | None, usage: MessageUsage) -> MessageReply:
        reason, sequence = (None, None) if ending is None else (ending.stop_reason, ending.stop_sequence)
        return MessageReply(self.id, "assistant", self.model, content, reason, sequence, usage)


def failed(error: ApiError, request_id: str = "") -> bytes:
    """Return the `error` event that ends a stream which failed."""
    return b"event: error\ndata: " + error_body(error, request_id) + b"\n\n"


def _ending(finish: FinishReason, stopped: str | None) -> Ending:
    if stopped is not None:
        return Ending("stop_sequence", stopped)
    return Ending("max_tokens" if finish == "length" else "end_turn", None)


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)


def _event(event: Event) -> bytes:
    """Return a server-sent event; its name is the data's tag."""
    name = type(event).__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"
