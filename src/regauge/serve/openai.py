"""Requests of the OpenAI API: what `/v1/chat/completions` and `/v1/completions` accept, and its error body.

Fields that this module does not know are ignored, as clients send what newer servers understand. Known fields are
checked strictly; a field that would change the answer but is not supported is refused, never dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from regauge.engines.local.sampling import MAX_LOGPROBS, SamplingParams
from regauge.errors import RegaugeError

COMPLETION_MAX_TOKENS: Final = 16
"""The API's own default for `/v1/completions`."""
MAX_N: Final = 8
MAX_STOPS: Final = 4
MAX_STOP_CHARS: Final = 1_024
"""Longest stop string, in characters: it bounds the text that is held back."""
_SEEDS: Final = 1 << 64

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
RATE_LIMIT: Final = "rate_limit_error"


class ErrorBody(msgspec.Struct, frozen=True):
    """The inner object of the API's error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """The API's error body."""

    error: ErrorBody


class ApiError(RegaugeError):
    """An answer other than 200: HTTP status and the fields of the API's error body.

    `param` names the request's field at fault. `retry_after_s` becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,  # noqa: A002  # the API's name
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = ErrorBody(message, type, param, code)
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """Return `{"error": {...}}` as JSON."""
        return msgspec.json.encode(ErrorReply(self.error))

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that belong to the error."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def bad(param: str, message: str) -> ApiError:
    """Return a 400 that names the field at fault."""
    return ApiError(400, f"'{param}': {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str = "is not supported; leave it out") -> ApiError:
    """Return a 400 for a field that the API knows and this server does not do."""
    return ApiError(400, f"'{param}' {message}", param=param, code="unsupported_parameter")


Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(gt=0, le=1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Only `text` is supported."""

    type: str


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both routes share. A null is the same as leaving the field out."""

    model: str
    max_tokens: AtLeastOne | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Any] | None = None
    top_k: Natural | None = None
    min_p: Fraction | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    stop_token_ids: list[Natural] | None = None


class ChatRequest(_Common, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: AtLeastOne | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Natural | None = None


Request = TypeVar("Request")
Messages = tuple[Mapping[str, str], ...]
Prompt = str | list[int]


@dataclass(frozen=True)
class Ask:
    """What a checked request asks for, the same for all routes; `api` is how it is answered.

    A chat has `messages` and no `prompts`; a completion the other way round. `logprobs` is the number of
    alternatives to report, None for no log-probabilities. `sampling` lacks the final `max_tokens` and seed.
    """

    model: str
    chat: bool
    messages: Messages
    prompts: tuple[Prompt, ...]
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    stops: tuple[str, ...]
    echo: bool
    sampling: SamplingParams
    api: Literal["openai", "anthropic"] = "openai"

    def sampling_for(self, max_tokens: int, choice: int) -> SamplingParams:
        """Return the parameters of the `choice`-th answer to a prompt: with a seed, each has a stream of its own."""
        seed = self.sampling.seed
        return msgspec.structs.replace(
            self.sampling,
            max_tokens=max_tokens,
            min_tokens=min(self.sampling.min_tokens, max_tokens),
            seed=None if seed is None else (seed + choice) % _SEEDS,
        )


def parse_chat(body: bytes) -> Ask:
    """Read a chat request. Raises ApiError (400) that names the field."""
    request = decode_body(body, ChatRequest)
    if not request.messages:
        raise bad("messages", "give at least one message")
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("response_format", "other than text is not supported")
    for name in ("tools", "functions"):
        if getattr(request, name):
            raise unsupported(name)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs", "needs logprobs to be true")
    messages = tuple(_message(index, message) for index, message in enumerate(request.messages))
    return _ask(
        request,
        messages=messages,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def parse_completion(body: bytes) -> Ask:
    """Read a completion request. Raises ApiError (400) that names the field."""
    request = decode_body(body, CompletionRequest)
    if request.suffix:
        raise unsupported("suffix")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise unsupported("best_of", "above n is not supported")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "together with logprobs is not supported: the prompt's are not computed")
    return _ask(
        request,
        prompts=_prompts(request.prompt),
        max_tokens=request.max_tokens,
        logprobs=request.logprobs,
        echo=bool(request.echo),
    )


def _ask(
    request: ChatRequest | CompletionRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    messages: Messages = (),
    prompts: tuple[Prompt, ...] = (),
    echo: bool = False,
) -> Ask:
    if request.logit_bias:
        raise unsupported("logit_bias")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options", "is allowed only with stream")
    if max_tokens is not None and (request.min_tokens or 0) > max_tokens:
        raise bad("min_tokens", f"{request.min_tokens} is more than max_tokens, {max_tokens}")
    options = request.stream_options
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "presence_penalty",
            "frequency_penalty",
        )
        if (value := getattr(request, name)) is not None
    }
    return Ask(
        model=request.model,
        chat=isinstance(request, ChatRequest),
        messages=messages,
        prompts=prompts,
        n=request.n or 1,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        max_tokens=max_tokens,
        stops=check_stops(request.stop),
        echo=echo,
        sampling=SamplingParams(
            max_tokens=max(max_tokens or 1, request.min_tokens or 0, 1),
            min_tokens=request.min_tokens or 0,
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logprobs=logprobs,
            **given,
        ),
    )


def _message(index: int, message: ChatMessage) -> Mapping[str, str]:
    at = f"messages[{index}].content"
    # Chat templates know no "developer": it is the newer name of the same role.
    role = "system" if message.role == "developer" else message.role
    if message.content is None:
        if role != "assistant":
            raise bad(at, f"is missing in a {message.role} message")
        return {"role": role, "content": ""}
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    return {"role": role, "content": joined(at, message.content)}


def joined(at: str, parts: Sequence[ContentPart]) -> str:
    """Return the text of a content's parts; `at` is where they stand. Raises ApiError (400) for one that is no text."""
    texts = []
    for place, part in enumerate(parts):
        if part.type != "text":
            raise unsupported(f"{at}[{place}].type", f"{part.type[:80]!r} is not supported; send text")
        if part.text is None:
            raise bad(f"{at}[{place}].text", "is missing")
        texts.append(part.text)
    return "".join(texts)


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise bad("prompt", "is an empty list")
    if ints := [item for item in prompt if isinstance(item, int)]:
        if len(ints) != len(prompt):
            raise bad("prompt", "mixes token ids with other items")
        return (ints,)
    items = tuple(item for item in prompt if not isinstance(item, int))
    if len({type(item) for item in items}) > 1:
        raise bad("prompt", "mixes strings with lists of token ids")
    for index, item in enumerate(items):
        if isinstance(item, list) and not item:
            raise bad(f"prompt[{index}]", "is an empty list")
    return items


def check_stops(stop: str | list[str] | None, param: str = "stop", limit: int = MAX_STOPS) -> tuple[str, ...]:
    """Return stop strings as they are used. Raises ApiError (400)."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limit:
        raise bad(param, f"has {len(stops)} strings; give at most {limit}")
    if not all(stops):
        raise bad(param, "holds an empty string")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise bad(param, f"is longer than {MAX_STOP_CHARS} characters")
    return stops


_AT = re.compile(r" - at `\$\.?(.*?)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `([^`]+)`")


def decode_body(body: bytes, kind: type[Request]) -> Request:
    """Read a request's body. Raises ApiError (400) that names the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _validation(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _validation(text: str) -> ApiError:
    """Turn msgspec's `Expected X, got Y - at $.path` into the API's error for that field."""
    found = _AT.search(text)
    path = found.group(1) if found else ""
    if missing := _MISSING.search(text):
        param = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return ApiError(400, f"'{param}' is missing", param=param, code="missing_required_parameter")
    reason = _AT.sub("", text).replace("`", "")
    if not path:
        return ApiError(400, f"the body: {reason}", code="invalid_type")
    return ApiError(400, f"'{path}': {reason}", param=path, code="invalid_value")
