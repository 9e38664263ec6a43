"""One streamed completion of an OpenAI-compatible server, and when each piece of it came.

Prompts are token ids, so that their length is known; `ignore_eos` and `max_tokens` make the answer's length known, too. vLLM, SGLang and
`regauge serve` take both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from regauge.errors import EngineError

TIMEOUT_S = 600.0
_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came, and when; times are seconds of `time.monotonic`."""

    sent: float
    pieces: tuple[float, ...]
    """When each piece with a token came. A token that is no whole character yet comes with the next, so pieces may be fewer than tokens."""
    ended: float
    prompt: int
    """Tokens, as the server counts them; 0: it did not say."""
    cached: int
    output: int

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first piece."""
        return self.pieces[0] - self.sent


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's completions; `url` without the path, as `http://127.0.0.1:8000`."""

    url: str
    model: str
    key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the HTTP headers of a request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


async def ask(
    session: aiohttp.ClientSession,
    to: Endpoint,
    ids: Sequence[int],
    output: int,
    *,
    piece: Callable[[float], None] | None = None,
) -> Answer:
    """Send one prompt and read its answer of `output` tokens; `piece` is called with the time of each piece.

    Raises EngineError with the server's words, and where the answer breaks off.
    """
    body = {
        "model": to.model, "prompt": list(ids), "max_tokens": output, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = msgspec.json.encode(body)
    headers = {"Content-Type": "application/json", **to.headers}
    sent = time.monotonic()
    try:
        async with session.post(f"{to.url}/v1/completions", data=data, headers=headers) as reply:
            if reply.status != 200:
                raise EngineError(f"{to.url}: {reply.status}: {(await reply.text())[:500]}")
            return await _read(reply, to.url, sent, piece)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise EngineError(f"{to.url}: {error or type(error).__name__}; is a server there?") from error


async def _read(reply: aiohttp.ClientResponse, url: str, sent: float, piece: Callable[[float], None] | None) -> Answer:
    pieces: list[float] = []
    ended, usage = 0.0, _Usage()
    async for line in reply.content:
        if not line.startswith(_DATA) or _DONE in line:
            continue
        now = time.monotonic()
        try:
            chunk = _CHUNK.decode(line[len(_DATA) :])
        except msgspec.DecodeError as error:
            raise EngineError(f"{url}: its stream is no completion: {error}: {line[:200]!r}") from error
        usage = chunk.usage or usage
        if not chunk.choices:
            continue
        ended = now
        if chunk.choices[0].text or chunk.choices[0].finish_reason is None:  # else it only says why the answer ends
            pieces.append(now)
            if piece is not None:
                piece(now)
    if not pieces:
        raise EngineError(f"{url}: the stream ended without a token")
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return Answer(sent, tuple(pieces), ended, usage.prompt_tokens, cached, usage.completion_tokens)


async def models(session: aiohttp.ClientSession, to: Endpoint) -> list[str]:
    """Return the names of the models that a server has. Raises EngineError."""
    try:
        async with session.get(f"{to.url}/v1/models", headers=to.headers) as reply:
            if reply.status != 200:
                raise EngineError(f"{to.url}: {reply.status}: {(await reply.text())[:500]}")
            return [str(each["id"]) for each in (await reply.json())["data"]]
    except (TimeoutError, aiohttp.ClientError, KeyError, TypeError, ValueError) as error:
        told = error if isinstance(error, aiohttp.ClientError) and str(error) else repr(error)
        raise EngineError(f"{to.url}: does not say which models it has ({told}); is its address right?") from error
