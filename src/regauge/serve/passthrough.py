"""A client's own body on a pair of engines with an API of their own: both are vLLM, or both SGLang.

What the client sent goes on as it came, with all that only the engine knows (tools, images, response formats), and the decode engine's
answer comes back as it is. Three things are touched: the fields of the transfer (`inject.py`), the length that is asked of prefill, and
`usage`: it is asked for, so that it can be metered, and the cached tokens in it are prefill's. Decode would count the whole prompt, that
was sent to it.

What one prompt's KV cache cannot serve (several prompts or answers, log-probabilities of the prompt, tools that the engine calls by itself)
has `alone` set: the pair does it without a transfer where decode computes prompts itself, else not at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Raw

from regauge.config import EngineName
from regauge.serve.inject import CACHE_SALT, INJECT, Fields, Leg, salted
from regauge.serve.openai import ApiError, decode_body, unsupported
from regauge.serve.replies import PromptDetails, Usage

_MOST: Final = 1 << 30
_OWNED: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "rid",
    "request_id",
)
"""What a router says to engines: from a client it could reach into another's transfer."""


@dataclass(frozen=True)
class Route:
    """How a route of the engines' APIs differs from the others. `limit` is its field for the answer's length, which replaces the `others`."""

    path: str
    limit: str
    others: tuple[str, ...] = ()
    chunked: bool = False
    """Whether its streams end with a chunk of usage if `stream_options` ask for it."""
    id_field: str = ""
    """What SGLang calls a request's id; empty: the route has no such field."""
    id_prefix: str = ""


CHAT: Final = Route("/v1/chat/completions", "max_completion_tokens", ("max_tokens",), chunked=True, id_field="rid")
COMPLETION: Final = Route("/v1/completions", "max_tokens", chunked=True, id_field="rid")
RESPONSES: Final = Route("/v1/responses", "max_output_tokens", id_field="request_id", id_prefix="resp_")
MESSAGES: Final = Route("/v1/messages", "max_tokens")
ROUTES: Final[Mapping[str, Route]] = MappingProxyType(
    {each.path: each for each in (CHAT, COMPLETION, RESPONSES, MESSAGES)}
)


class Asked(msgspec.Struct, frozen=True):
    """A client's body: its fields as they came, and what of them matters here."""

    route: Route
    model: str
    fields: Mapping[str, Raw]
    stream: bool
    usage: bool
    """Whether a stream is to have the chunk of usage."""
    alone: str
    """Why no other engine's KV cache can serve it; empty: it can."""
    size: int
    """Bytes of the body."""
    most: int | None
    """Tokens of the answer that it is limited to; None: it does not say."""

    def to(self, engine: EngineName, leg: Leg, salt: str = "") -> bytes:
        """Return the body for one of the pair's engines: for prefill if the leg has receivers. `salt`: as `wire.Prefill.salt`."""
        fields: Fields = dict(self.fields)
        fields |= salted(salt, self.salt)
        if leg.receivers is not None:
            fields = self._for_prefill(fields, engine)
        elif self.stream and self.route.chunked:
            fields["stream_options"] = _with_usage(fields.get("stream_options"))
        return msgspec.json.encode(INJECT[engine](fields, leg, self.route.id_field))

    @property
    def salt(self) -> bytes:
        """The client's own salt, as it came; empty: none."""
        own = bytes(self.fields.get(CACHE_SALT, b""))
        return b"" if own == b"null" else own

    def _for_prefill(self, fields: Fields, engine: EngineName) -> Fields:
        """Its answer is for nobody: not a stream, not stored, and from vLLM, which would go on to decode, of one token."""
        fields.pop("stream_options", None)
        fields["stream"] = False
        if self.route is RESPONSES:
            fields["store"] = False
        if engine == "vllm":
            for name in (*self.route.others, "min_tokens"):
                fields.pop(name, None)
            fields[self.route.limit] = 1
        return fields


def read(route: Route, body: bytes) -> Asked:
    """Read a client's body. Raises ApiError (400) for one that is no request, or says what is not the client's to say."""
    fields = decode_body(body, dict[str, Raw])
    try:
        return _asked(route, fields, len(body))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _asked(route: Route, fields: dict[str, Raw], size: int) -> Asked:
    for name in _OWNED:
        if _given(fields, name) is not None:
            raise unsupported(name, "is for the gateway to say; leave it out")
        fields.pop(name, None)
    if isinstance(extra := _given(fields, "vllm_xargs"), dict) and any(name in extra for name in _OWNED):
        raise unsupported("vllm_xargs", "holds fields that are for the gateway to say; leave them out")
    model = _given(fields, "model")
    if not isinstance(model, str):
        raise ApiError(400, "'model' is missing", param="model", code="missing_required_parameter")
    if route is RESPONSES:
        for name in ("background", "previous_response_id", "conversation"):
            if _given(fields, name):
                raise unsupported(name, "is not supported: no answer is kept; send the whole conversation")
    options = _given(fields, "stream_options")
    limits = [_given(fields, name) for name in (route.limit, *route.others)]
    return Asked(
        route=route,
        model=model,
        fields=fields,
        stream=_given(fields, "stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        alone=_alone(route, fields),
        size=size,
        most=next((most for most in limits if isinstance(most, int) and 0 < most <= _MOST), None),
    )


def _alone(route: Route, fields: Mapping[str, Raw]) -> str:
    """Return why what is asked for needs more than one prompt's KV cache."""
    if route is RESPONSES:
        tools = _given(fields, "tools")
        kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        own = [kind for kind in kinds if kind not in ("function", "custom")]
        return f"tools of type {own[0]!r} make several prompts of one" if own else ""
    if route is MESSAGES:
        return ""
    for name in ("n", "best_of"):
        if isinstance(count := _given(fields, name), int) and count > 1:
            return f"'{name}' above 1 makes several answers of one prompt"
    for name in ("use_beam_search", "prompt_embeds"):
        if _given(fields, name):
            return f"'{name}' makes several requests of one"
    if _given(fields, "prompt_logprobs") is not None or (_given(fields, "echo") and _given(fields, "logprobs")):
        return "log-probabilities of the prompt are known only where it is computed"
    if route is COMPLETION:
        prompt = _given(fields, "prompt")
        if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
            return f"there are {len(prompt)} prompts"
        if _given(fields, route.limit) == 0:
            return "no token is asked for"
    return ""


def _given(fields: Mapping[str, Raw], name: str) -> Any:
    """Return a field's value, None for one that is left out or null."""
    return msgspec.json.decode(fields[name]) if name in fields else None


def _with_usage(options: Raw | None) -> Any:
    """Return `stream_options` that ask for usage; what is no object is for the engine to refuse."""
    given = {} if options is None else msgspec.json.decode(options)
    if given is None:
        given = {}
    return {**given, "include_usage": True} if isinstance(given, dict) else options


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Counts(msgspec.Struct, frozen=True):
    """An object of usage, of any route: whatever of it is there."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None

    def usage(self, route: Route) -> Usage:
        """Return it as one kind: prompt tokens in all, those of them that were cached, and completion tokens."""
        cached, prompt = 0, self.prompt_tokens or self.input_tokens or 0
        if route is MESSAGES:
            cached = self.cache_read_input_tokens or 0
            prompt = (self.input_tokens or 0) + cached + (self.cache_creation_input_tokens or 0)
        elif (details := self.prompt_tokens_details or self.input_tokens_details) is not None:
            cached = details.cached_tokens or 0
        completion = self.completion_tokens or self.output_tokens or 0
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached))


_PLACES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {CHAT.path: (), COMPLETION.path: (), RESPONSES.path: ("response",), MESSAGES.path: ("message",)}
)
"""Objects that may hold `usage`, besides the outermost."""


class Meter:
    """Reads the usage of one answer, and writes prefill's cached tokens into it."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._seen: dict[str, Any] = {}

    @property
    def usage(self) -> Usage | None:
        """What has been told so far; None: nothing."""
        return msgspec.convert(self._seen, Counts).usage(self._asked.route) if self._seen else None

    def body(self, data: bytes, cached: int | None) -> bytes:
        """Take an object of JSON; return it with `cached` in its usage, unless that is None. What is no such object stays as it is."""
        try:
            return msgspec.json.encode(self._object(msgspec.json.decode(data, type=dict[str, Raw]), cached))
        except (msgspec.DecodeError, RecursionError):
            return data

    def event(self, event: bytes, cached: int | None) -> bytes:
        """Take a server-sent event with usage in it; return it so, or nothing if the client did not ask for it."""
        head, mark, data = event.partition(b"data:")
        try:
            fields: Fields = msgspec.json.decode(data, type=dict[str, Raw])
            fields = self._object(fields, cached)
        except (msgspec.DecodeError, RecursionError):
            return event
        if self._asked.route.chunked and not self._asked.usage:
            if _given(fields, "choices") == []:
                return b""
            fields.pop("usage", None)
        return head + mark + b" " + msgspec.json.encode(fields) + b"\n\n"

    def _object(self, fields: Fields, cached: int | None) -> Fields:
        for place in _PLACES[self._asked.route.path]:
            if place in fields:
                inner = msgspec.json.decode(fields[place], type=dict[str, Raw])
                fields[place] = self._object(inner, cached)
        if (counts := _given(fields, "usage")) is not None:
            told = msgspec.convert(counts, Counts)
            self._seen |= {name: value for name, value in counts.items() if value is not None}
            if cached is not None:
                fields["usage"] = self._corrected(counts, told, cached)
                self._seen |= {name: value for name, value in fields["usage"].items() if value is not None}
        return fields

    def _corrected(self, counts: dict[str, Any], told: Counts, cached: int) -> dict[str, Any]:
        """Prompt tokens that were cached are those that prefill had."""
        if self._asked.route is MESSAGES:
            if told.input_tokens is None:
                return counts
            whole = told.usage(MESSAGES).prompt_tokens
            cached = min(cached, whole)
            return {
                **counts,
                "input_tokens": whole - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
            }
        name = "input_tokens_details" if self._asked.route is RESPONSES else "prompt_tokens_details"
        details = counts.get(name) or {}
        cached = min(cached, told.usage(self._asked.route).prompt_tokens)
        return {**counts, name: {**details, "cached_tokens": cached}}


_USAGE: Final = re.compile(rb'"usage"\s*:\s*\{')
"""Not within a string: there its quotes would be escaped."""
_END: Final = b"\n\n"


class Cutter:
    """Cuts a stream into pieces at its events' ends, and finds those events that hold usage, without reading the others."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> int:
        """Bytes of an event whose end has not come."""
        return len(self._rest)

    def push(self, chunk: bytes) -> list[tuple[bytes, bool]]:
        """Take more; return pieces that are whole, each with whether it is one event with usage."""
        data = self._rest + chunk
        end = data.rfind(_END) + len(_END)
        if end < len(_END):
            self._rest = data
            return []
        whole, self._rest = data[:end], data[end:]
        if _USAGE.search(whole) is None:
            return [(whole, False)]
        return [(event + _END, _USAGE.search(event) is not None) for event in whole.split(_END)[:-1]]

    def flush(self) -> bytes:
        """Return what has no end."""
        rest, self._rest = self._rest, b""
        return rest
