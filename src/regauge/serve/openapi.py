"""The gateway's OpenAPI document (3.1), made of the types that its requests are read into and its answers are written from.

Some limits cannot be said in a schema, as the context or two fields that exclude each other: a request that passes the document may still
be answered 400, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, get_args

import msgspec

from regauge import __version__
from regauge.move.state import MAX_SHOWN
from regauge.serve import anthropic, anthropic_replies, cards, openai, recent, replies, tracing, usage
from regauge.serve.debug import Live, Overview

PATH: Final = "/openapi.json"
_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{name}"
_REASONS: Final[Mapping[int, str]] = MappingProxyType(
    {
        400: "The request cannot be served as it is; the error names the field.",
        401: "There is no API key, or one that is not known.",
        403: "The key, or the address, may not ask for this.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        429: "Too many requests, or too many tokens; `Retry-After` says in how many seconds to ask again.",
        500: "A worker failed, or the gateway.",
        501: "The engines that serve this model do not do this.",
        502: "A worker answered what is no answer.",
        503: "No worker is available, or the gateway is shutting down.",
        504: "The time limit passed.",
    }
)
_MODEL: Final = "/v1/models/{id}"
_ASKED: Final = (400, 401, 403, 404, 408, 413, 429, 500, 502, 503, 504)
_READ: Final = (401, 403)


@dataclass(frozen=True)
class Operation:
    """One method of a path. `streams`: what the data of its server-sent events are, if it has any."""

    path: str
    method: str
    summary: str
    answer: type[msgspec.Struct] | None
    body: type[msgspec.Struct] | None = None
    streams: Sequence[type[msgspec.Struct]] = ()
    errors: Sequence[int] = ()
    error: type[msgspec.Struct] = openai.ErrorReply
    statuses: Sequence[tuple[int, str]] = ((200, "The answer."),)
    parameters: Sequence[Mapping[str, Any]] = ()
    free: bool = False
    """Whether it needs no API key, where keys are wanted."""


class ChatChoice(replies.ChatChoice, frozen=True):
    """One answer of a chat."""

    logprobs: replies.ChatLogprobs | None


class CompletionChoice(replies.TextChoice, frozen=True):
    """One answer of a completion."""

    logprobs: replies.CompletionLogprobs | None


class ChatReply(replies.Body, frozen=True):
    """A whole chat answer."""

    choices: list[ChatChoice]


class CompletionReply(replies.Body, frozen=True):
    """A whole completion."""

    choices: list[CompletionChoice]


class ChatChunkChoice(replies.ChatChunkChoice, frozen=True):
    """One answer's part of a chunk."""

    logprobs: replies.ChatLogprobs | None


class ChatChunk(replies.Body, frozen=True):
    """A chunk of a streamed chat."""

    choices: list[ChatChunkChoice]


_EVENT_TYPES: Final = (
    anthropic_replies.MessageStart, anthropic_replies.BlockStart, anthropic_replies.BlockDelta, anthropic_replies.BlockStop,
    anthropic_replies.MessageDelta, anthropic_replies.MessageStop, anthropic_replies.Ping, anthropic.AnthropicError,
)  # fmt: skip
_LIMIT: Final = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_SHOWN}}
_PERIOD: Final = (
    {
        "name": "from",
        "in": "query",
        "schema": {"type": "string"},
        "description": "First day, like 2026-10-01, or a time.",
    },
    {
        "name": "until",
        "in": "query",
        "schema": {"type": "string"},
        "description": "First day that does not count any more.",
    },
    {"name": "model", "in": "query", "schema": {"type": "string"}},
    {"name": "by", "in": "query", "schema": {"enum": list(get_args(usage.By))}},
)
OPERATIONS: Final = (
    Operation(
        "/v1/chat/completions", "post", "Answer a conversation", ChatReply, openai.ChatRequest,
        (ChatChunk, openai.ErrorReply), _ASKED,
    ),
    Operation(
        "/v1/completions", "post", "Continue text", CompletionReply, openai.CompletionRequest,
        (CompletionReply, openai.ErrorReply), _ASKED,
    ),
    Operation(
        anthropic.MESSAGES, "post", "Answer a conversation, in Anthropic's API", anthropic_replies.MessageReply,
        anthropic.MessagesRequest, _EVENT_TYPES, _ASKED, anthropic.AnthropicError,
    ),
    Operation(
        anthropic.COUNT, "post", "Count a conversation's tokens, in Anthropic's API", anthropic.TokenCount,
        anthropic.CountRequest, (), _ASKED, anthropic.AnthropicError,
    ),
    Operation("/v1/models", "get", "List the models", cards.ModelList, errors=_READ),
    Operation(_MODEL, "get", "Describe a model", cards.ModelCard, errors=(*_READ, 404)),
    Operation(
        usage.PATH, "get", "What this key's tenant used", usage.UsageList, errors=(400, *_READ, 404, 503),
        parameters=_PERIOD,
    ),
    Operation(
        f"{usage.PATH}/{{id}}", "get", "What one request of this key's tenant used", usage.RequestUsageList,
        errors=(*_READ, 404, 503), parameters=({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},),
    ),
    Operation("/health", "get", "Whether the gateway lives", cards.Health, free=True),
    Operation(
        "/ready", "get", "Whether requests can be served", cards.Ready, free=True,
        statuses=((200, "They can."), (503, "They cannot; the body names what is missing.")),
    ),
    Operation("/version", "get", "What serves", cards.Version, free=True),
    Operation("/metrics", "get", "Metrics, for Prometheus", None, errors=_READ),
    Operation(
        "/debug/transfers", "get", "How transfers, links and pools stand; on loopback alone", Overview, free=True,
        errors=(400, 403), parameters=(_LIMIT,),
    ),
    Operation(
        "/debug/live", "get", "The metrics, and how all workers stand, in one answer; on loopback alone", Live, free=True,
        errors=(400, 403), parameters=(_LIMIT,),
    ),
    Operation(
        "/debug/requests", "get", "The newest requests; on loopback alone", recent.Requests, free=True,
        errors=(400, 403), parameters=(_LIMIT,),
    ),
    Operation(
        "/debug/trace/{id}", "get", "When each step of a request was; on loopback alone", tracing.Traced, free=True,
        errors=(400, 403, 404), parameters=(
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},
            {"name": "format", "in": "query", "schema": {"enum": ["json", "perfetto"]}},
        ),
    ),
    Operation(
        "/debug/why/{id}", "get", "Why a request went where it went; on loopback alone", cards.Routed, free=True,
        errors=(403, 404), parameters=({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}},),
    ),
)  # fmt: skip
_CONVERSATION: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "messages": {"minItems": 1}, "tools": {"maxItems": 0}, "mcp_servers": {"maxItems": 0},
        "output_config": {"maxProperties": 0}, "output_format": {"maxProperties": 0},
    }
)  # fmt: skip
_TIGHTER: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "ContentPart": {"type": {"const": "text"}, "text": {"type": "string"}},
        "ResponseFormat": {"type": {"const": "text"}},
        "CompletionRequest": {"suffix": {"maxLength": 0}, "logit_bias": {"maxProperties": 0}},
        "Thinking": {"type": {"const": "disabled"}},
        "ChatRequest": {
            "messages": {"minItems": 1},
            "tools": {"maxItems": 0},
            "functions": {"maxItems": 0},
            "logit_bias": {"maxProperties": 0},
        },
        "CountRequest": _CONVERSATION,
        "MessagesRequest": _CONVERSATION,
    }
)
"""What is checked after a request's types are."""
_CONTENT: Final = (
    {"properties": {"role": {"const": "assistant"}}},
    {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
)
"""A message has content, unless it is the assistant's."""


def document(model: str, *, keys: bool = False, operations: Sequence[Operation] = OPERATIONS) -> bytes:
    """Return the document of a gateway that serves `model`, and wants API keys or does not, as JSON."""
    types = [
        *(op.answer for op in operations),
        *(op.body for op in operations),
        *(op.error for op in operations),
        *(each for op in operations for each in op.streams),
    ]
    wanted = list(dict.fromkeys(each for each in types if each is not None))
    refs, schemas = msgspec.json.schema_components(wanted, ref_template=_REF)
    named = dict(zip(wanted, refs, strict=True))
    for name, fields in _TIGHTER.items():
        for field, more in fields.items():
            schemas[name]["properties"][field] |= more
    schemas["ChatMessage"]["anyOf"] = _CONTENT
    for name, schema in schemas.items():
        if name.endswith("Request") and "model" in schema.get("properties", {}):
            schema["properties"]["model"] |= {"enum": [model]}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _operation(each, named, keys=keys)
    paths[_MODEL]["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"enum": [model]}}]
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "regauge", "version": __version__, "description": "Prefill as a service, over unlike accelerators."},
        "paths": paths,
        "components": {"schemas": schemas},
    }  # fmt: skip
    if keys:
        made["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return msgspec.json.format(msgspec.json.encode(made), indent=1)


def _operation(each: Operation, named: Mapping[type[Any], Mapping[str, Any]], *, keys: bool) -> dict[str, Any]:
    content = {"text/plain": {"schema": {"type": "string"}}} if each.answer is None else _content(named[each.answer])
    if each.streams:
        content = {**content, _EVENTS: {"schema": _event([named[kind] for kind in each.streams])}}
    responses = {str(status): _response(text, content) for status, text in each.statuses}
    for status in each.errors:
        responses[str(status)] = _response(_REASONS[status], _content(named[each.error]))
        if status == 429:
            responses["429"]["headers"]["Retry-After"] = {"schema": {"type": "string"}, "description": "Seconds."}
    made: dict[str, Any] = {
        "operationId": f"{each.method}_{_identifier(each.path)}",
        "summary": each.summary,
        "responses": responses,
    }
    if each.body is not None:
        made["requestBody"] = {"required": True, "content": _content(named[each.body])}
    if each.parameters:
        made["parameters"] = list(each.parameters)
    if keys:
        made["security"] = [] if each.free else [{"bearer": []}, {"key": []}]
    return made


def _identifier(path: str) -> str:
    """Return a path as an identifier."""
    return "_".join(part.strip("{}") for part in path.split("/") if part).replace(".", "_")


def _event(kinds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the schema of a server-sent event, whose data is JSON of one of these kinds, or the mark of a stream's end."""
    data = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": list(kinds)}}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": {"anyOf": [{"const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _content(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {_JSON: {"schema": dict(schema)}}


def _response(text: str, content: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"X-Request-Id": {"schema": {"type": "string"}, "description": "The client's own, or a new one."}}
    return {"description": text, "headers": headers, "content": dict(content)}
