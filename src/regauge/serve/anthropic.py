"""Requests of the Anthropic API: what `POST /v1/messages` and `/v1/messages/count_tokens` accept, and its error body.

As in `openai.py`: fields that are not known are ignored, known ones are checked strictly, and what would change the answer but is not
supported is refused by name. What the API does and this does not: tools, images and documents, thinking, and an assistant's message at
the end, which the model would go on with.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from regauge.engines.local.sampling import SamplingParams
from regauge.serve.openai import (
    ApiError,
    Ask,
    AtLeastOne,
    ContentPart,
    Fraction,
    Messages,
    Natural,
    Share,
    bad,
    check_stops,
    decode_body,
    joined,
    unsupported,
)

MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"
MAX_STOP_SEQUENCES: Final = 16
_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        401: "authentication_error",
        402: "billing_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""The API's name of an error, by HTTP status; of another one: `invalid_request_error` under 500, `api_error` from there."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """The inner object of the API's error body."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """The API's error body, and the data of an `error` event."""

    error: ErrorInfo
    request_id: str | None


class InputMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[ContentPart]


class Thinking(msgspec.Struct, frozen=True):
    """Only `disabled` is supported."""

    type: str


class CountRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`. A null is the same as leaving the field out."""

    model: str
    messages: list[InputMessage]
    system: str | list[ContentPart] | None = None
    tools: list[Any] | None = None
    mcp_servers: list[Any] | None = None
    thinking: Thinking | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: AtLeastOne
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Fraction | None = None
    top_p: Share | None = None
    top_k: Natural | None = None
    metadata: dict[str, Any] | None = None


class TokenCount(msgspec.Struct, frozen=True):
    """Answer of `POST /v1/messages/count_tokens`."""

    input_tokens: int


def speaks(path: str) -> bool:
    """Whether a path is one of this API's."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def error_body(error: ApiError, request_id: str = "") -> bytes:
    """Return `{"type": "error", "error": {...}}` as JSON."""
    usual = "api_error" if error.status >= 500 else "invalid_request_error"
    info = ErrorInfo(_TYPES.get(error.status, usual), error.error.message)
    return msgspec.json.encode(AnthropicError(info, request_id or None))


def parse_messages(body: bytes) -> Ask:
    """Read a request for a message. Raises ApiError (400) that names the field."""
    request = decode_body(body, MessagesRequest)
    given = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(request, name)) is not None}
    return Ask(
        model=request.model,
        chat=True,
        messages=_conversation(request),
        prompts=(),
        n=1,
        stream=bool(request.stream),
        include_usage=True,
        max_tokens=request.max_tokens,
        stops=check_stops(request.stop_sequences, "stop_sequences", MAX_STOP_SEQUENCES),
        echo=False,
        sampling=SamplingParams(max_tokens=request.max_tokens, **given),
        api="anthropic",
    )


def parse_count(body: bytes) -> tuple[str, Messages]:
    """Read a request for a count; return the model's name and the messages. Raises ApiError (400) that names the field."""
    request = decode_body(body, CountRequest)
    return request.model, _conversation(request)


def _conversation(request: CountRequest) -> Messages:
    if not request.messages:
        raise bad("messages", "give at least one message")
    for name in ("tools", "mcp_servers", "output_config", "output_format"):
        if getattr(request, name):
            raise unsupported(name)
    if request.thinking is not None and request.thinking.type != "disabled":
        raise unsupported("thinking", "is not supported; leave it out, or disable it")
    if request.messages[-1].role != "user":
        last = f"messages[{len(request.messages) - 1}].role"
        raise unsupported(last, "is not supported: an answer cannot be begun for the model; end with a user's message")
    system = _text("system", request.system) if request.system else ""
    head = ({"role": "system", "content": system},) if system else ()
    turns = (
        {"role": message.role, "content": _text(f"messages[{index}].content", message.content)}
        for index, message in enumerate(request.messages)
    )
    return (*head, *turns)


def _text(at: str, content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else joined(at, content)
