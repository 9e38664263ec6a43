"""Answers of the OpenAI API: whole bodies and the chunks of a stream, for both routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from regauge.serve.openai import ApiError
from regauge.serve.text import Tokenizer
from regauge.serve.wire import TokenEvent

DONE: Final = b"data: [DONE]\n\n"
FinishReason = Literal["stop", "length"]


class TopLogprob(msgspec.Struct, frozen=True):
    """A token's text, log-probability and UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The generated token at one place and the likeliest ones there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as chat answers hold them."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities as completions hold them; `text_offset` counts characters of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


Logprobs = ChatLogprobs | CompletionLogprobs | None


class PromptDetails(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens were not computed again."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of all choices together; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Message(msgspec.Struct, frozen=True):
    """A whole chat answer."""

    role: str
    content: str
    refusal: None = None


class MessageDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a chat answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One whole choice of a chat."""

    index: int
    message: Message
    logprobs: Logprobs
    finish_reason: FinishReason


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chat chunk."""

    index: int
    delta: MessageDelta
    logprobs: Logprobs
    finish_reason: FinishReason | None


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a completion, whole or a part."""

    index: int
    text: str
    logprobs: Logprobs
    finish_reason: FinishReason | None


AnyChoice = ChatChoice | ChatChunkChoice | TextChoice


class Body(msgspec.Struct, frozen=True):
    """A whole answer or a chunk; in a stream with usage, `usage` is null in all chunks but the last."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[AnyChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


@dataclass(frozen=True)
class TokenInfo:
    """One token of a choice for the log-probabilities; `offset` is where its text begins, in characters."""

    event: TokenEvent
    offset: int


@dataclass(frozen=True)
class Delta:
    """What one step adds to one choice; the last of a choice has `finish`, and `stopped`: the stop string that ended it, if one did."""

    choice: int
    text: str = ""
    tokens: tuple[TokenInfo, ...] = ()
    finish: FinishReason | None = None
    stopped: str | None = None


@dataclass
class _Gathered:
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    finish: FinishReason = "stop"


@dataclass(frozen=True)
class Writer:
    """Writes the answer to one request. `echo` holds each choice's prompt text, or is empty."""

    id: str
    created: int
    model: str
    fingerprint: str
    chat: bool
    usage_chunk: bool
    logprobs: bool
    tokenizer: Tokenizer
    echo: tuple[str, ...] = ()
    _begun: set[int] = field(default_factory=set)

    def chunks(self, delta: Delta) -> bytes:
        """Return the server-sent events of one step; a choice's first step brings its role or echoed prompt."""
        parts: list[AnyChoice] = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            if self.chat:
                parts.append(ChatChunkChoice(delta.choice, MessageDelta("assistant", ""), None, None))
            elif self.echo:
                parts.append(TextChoice(delta.choice, self.echo[delta.choice], None, None))
        if delta.text or delta.tokens:
            logprobs = self._logprobs(delta.tokens)
            if self.chat:
                parts.append(ChatChunkChoice(delta.choice, MessageDelta(content=delta.text), logprobs, None))
            else:
                parts.append(TextChoice(delta.choice, delta.text, logprobs, None))
        if delta.finish is not None:
            if self.chat:
                parts.append(ChatChunkChoice(delta.choice, MessageDelta(), None, delta.finish))
            else:
                parts.append(TextChoice(delta.choice, "", None, delta.finish))
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        usage = None if self.usage_chunk else UNSET
        return b"".join(_event(self._body(kind, [part], usage)) for part in parts)

    def end(self, usage: Usage) -> bytes:
        """Return the stream's end: the usage chunk if asked for, and the mark."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return (_event(self._body(kind, [], usage)) if self.usage_chunk else b"") + DONE

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        gathered: dict[int, _Gathered] = {}
        for delta in deltas:
            choice = gathered.setdefault(delta.choice, _Gathered())
            choice.texts.append(delta.text)
            choice.tokens.extend(delta.tokens)
            choice.finish = delta.finish or choice.finish
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._whole_choice(index, gathered[index]) for index in sorted(gathered)]
        return msgspec.json.encode(self._body(kind, choices, usage))

    def failed(self, error: ApiError) -> bytes:
        """Return the server-sent event that ends a stream which failed."""
        return failed(error)

    def refusal(self, error: ApiError) -> bytes:
        """Return the body of an error."""
        return error.body()

    def _whole_choice(self, index: int, choice: _Gathered) -> AnyChoice:
        text, logprobs = "".join(choice.texts), self._logprobs(choice.tokens)
        if self.chat:
            return ChatChoice(index, Message("assistant", text), logprobs, choice.finish)
        prompt = self.echo[index] if self.echo else ""
        return TextChoice(index, prompt + text, logprobs, choice.finish)

    def _body(self, kind: str, choices: Sequence[AnyChoice], usage: Usage | UnsetType | None) -> Body:
        return Body(self.id, kind, self.created, self.model, choices, self.fingerprint, usage)

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> Logprobs:
        if not self.logprobs:
            return None
        if not self.chat:
            return CompletionLogprobs(
                tokens=[self._text(item.event.token) for item in tokens],
                token_logprobs=[item.event.logprob or 0.0 for item in tokens],
                top_logprobs=[{self._text(t): p for t, p in item.event.top or ()} for item in tokens],
                text_offset=[item.offset for item in tokens],
            )
        return ChatLogprobs([self._entry(item.event) for item in tokens])

    def _entry(self, event: TokenEvent) -> TokenLogprob:
        top = [TopLogprob(self._text(t), p, list(self.tokenizer.token_bytes(t))) for t, p in event.top or ()]
        return TokenLogprob(
            self._text(event.token), event.logprob or 0.0, list(self.tokenizer.token_bytes(event.token)), top
        )

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode(errors="replace")


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def failed(error: ApiError, request_id: str = "") -> bytes:
    """Return the server-sent event that ends a stream which failed."""
    del request_id  # it is in a header
    return b"data: " + error.body() + b"\n\n"
