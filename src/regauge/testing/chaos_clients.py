"""Clients of a storm: what they ask, drawn from a seed, and what each of them got."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import msgspec

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RETRY_S: Final = 0.5
_TEXT: Final = (
    "the train waits at the border while its wagons are lifted onto other wheels and nobody aboard wakes up before noon"
)


@dataclass(frozen=True)
class Ask:
    """One client: what it sends, and when it goes away (after so many events of a stream, else after so many seconds)."""

    index: int
    path: str
    body: Mapping[str, Any]
    leaves: float | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer comes as a stream."""
        return bool(self.body.get("stream"))

    @property
    def n(self) -> int:
        """Answers."""
        return int(self.body.get("n", 1))


@dataclass
class Got:
    """What a client got; `retries` counts the times that it asked again."""

    ask: Ask
    names: list[str] = field(default_factory=list)
    """Its `X-Request-Id` of each time that it asked."""
    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str = ""
    began: bool = False
    """Whether the answer's text had begun to come."""
    broke: int = 0
    """Times that the connection broke."""
    left: bool = False
    hung: bool = False
    retries: int = 0
    refused: list[str] = field(default_factory=list)
    """Names of those times that it was told 503 and asked again, as SDKs do."""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether it has a whole answer."""
        return self.status == 200 and not self.error and len(self.finishes) == self.ask.n


def draw(seed: int, count: int, model: str, *, longest: int = 96, leaving: float = 0.08) -> list[Ask]:
    """Return `count` clients: streamed or not, greedy or with a seed, short or long prompts of shared beginnings, stop strings, two answers, some leave."""
    rng = random.Random(seed)  # noqa: S311  # a bench
    words = _TEXT.split()
    shared = [" ".join(rng.choices(words, k=rng.choice((24, 60, 110)))) for _ in range(4)]
    return [_draw(rng, index, model, shared, longest, leaving) for index in range(count)]


def _draw(rng: random.Random, index: int, model: str, shared: Sequence[str], longest: int, leaving: float) -> Ask:
    words = _TEXT.split()
    text = f"{rng.choice(shared)} {' '.join(rng.choices(words, k=rng.randint(2, 20)))}"
    if rng.random() < 0.3:
        text = " ".join(rng.choices(words, k=rng.randint(2, 12)))
    body: dict[str, Any] = {"model": model, "max_tokens": rng.randint(4, longest), "ignore_eos": True, "temperature": 0}
    if rng.random() < 0.4:
        body |= {"temperature": 1, "top_p": 0.9, "seed": rng.randrange(1 << 31)}
    if rng.random() < 0.2:
        body["stop"] = rng.choice((["e"], ["th", "qu"], ["a", "o"]))
    if rng.random() < 0.15:
        body["n"] = 2
    leaves = None
    if rng.random() < 0.6:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if rng.random() < leaving:
        leaves = float(rng.randint(1, 12)) if body.get("stream") else rng.uniform(0.05, 1.5)
    if rng.random() < 0.5:
        return Ask(index, COMPLETIONS, {**body, "prompt": text}, leaves)
    return Ask(index, CHAT, {**body, "messages": [{"role": "user", "content": text}]}, leaves)


async def send(url: str, asks: Sequence[Ask], *, at_once: int, limit_s: float, run: str) -> list[Got]:
    """Have all asked, `at_once` at a time; each ends within `limit_s`, or has hung."""
    gate = asyncio.Semaphore(at_once)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(ask: Ask) -> Got:
            async with gate:
                return await _client(session, url, ask, limit_s, run)

        return await asyncio.gather(*map(one, asks))


async def _client(session: aiohttp.ClientSession, url: str, ask: Ask, limit_s: float, run: str) -> Got:
    got, began = Got(ask), time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                got.names.append(f"{run}-{ask.index}-{got.retries}")
                try:
                    await _ask(session, url, ask, got)
                    if got.status != 503:
                        break
                    got.refused.append(got.names[-1])
                except (aiohttp.ClientError, ConnectionError):  # the gateway broke off: there is no answer to judge
                    got.broke += 1
                got.retries += 1
                got.status, got.texts, got.finishes, got.usage = 0, {}, {}, None
                got.error, got.began = "", False
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        got.hung = True
    got.seconds = time.monotonic() - began
    return got


async def _ask(session: aiohttp.ClientSession, url: str, ask: Ask, got: Got) -> None:
    call = session.post(url + ask.path, json=dict(ask.body), headers={"X-Request-Id": got.names[-1]})
    if ask.leaves is not None and not ask.streams:
        try:
            async with asyncio.timeout(ask.leaves), call as answer:
                got.status = answer.status
                _whole(got, msgspec.json.decode(await answer.read()))
        except TimeoutError:
            got.left = True
        return
    async with call as answer:
        got.status = answer.status
        if answer.content_type == "text/event-stream":
            await _stream(answer, ask, got)
        else:
            _whole(got, msgspec.json.decode(await answer.read()))


def _whole(got: Got, reply: Any) -> None:
    if got.status != 200:
        got.error = f"{got.status} {reply['error']['code']}: {reply['error']['message']}"
        return
    got.usage = reply["usage"]
    for choice in reply["choices"]:
        got.texts[choice["index"]] = choice["text"] if "text" in choice else choice["message"]["content"]
        got.finishes[choice["index"]] = choice["finish_reason"]


async def _stream(answer: aiohttp.ClientResponse, ask: Ask, got: Got) -> None:
    events = 0
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            return
        event = msgspec.json.decode(line[6:])
        if "error" in event:
            got.error = f"{event['error']['code']}: {event['error']['message']}"
            return
        got.usage = event.get("usage") or got.usage
        for choice in event["choices"]:
            part = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            got.began = got.began or bool(part)
            got.texts[choice["index"]] = got.texts.get(choice["index"], "") + part
            if choice["finish_reason"]:
                got.finishes[choice["index"]] = choice["finish_reason"]
        events += 1
        if ask.leaves is not None and events >= ask.leaves:
            answer.close()
            got.left = True
            return
    if not got.error:
        raise aiohttp.ClientPayloadError("the stream ended before its end")
