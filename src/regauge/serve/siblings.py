"""What gateway processes of one port ask one another, so that it does not matter which of them a client's connection went to.

Each keeps its own requests alone. It answers its siblings what it keeps (`own.py`) on its private socket, and asks them on theirs: all at once, for ASK_S
in all, and whoever has not answered by then is left out by name. What comes over a private socket is answered from what is here and never
passed on, so that no question goes round. The sockets lie in the deployment's private folder: whoever can open one is this user, who can read the
internal token there, too, so that a token would keep nobody out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from regauge.serve.cards import Health, Routed
from regauge.serve.recent import Line, Requests, TimeLine

ASK_S: Final = 1.0
"""For all siblings together."""
MAX_ANSWER: Final = 16 << 20
"""Bytes of one sibling's answer."""
MOST_DECISIONS: Final = 64
"""Of one name, over all processes; the newest."""
OWN: Final = "/own"
"""What paths on a private socket begin with, of what its process keeps."""
_NOBODY: Final[Mapping[str, Path]] = MappingProxyType({})

Reply = TypeVar("Reply", bound=msgspec.Struct)


class Kept(msgspec.Struct, frozen=True):
    """A request that a process keeps."""

    line: TimeLine
    arrived: float
    """By the monotonic clock, which is one for all processes of a machine."""

    def time_line(self) -> TimeLine:
        """Return it, as `Story.time_line`."""
        return self.line


class Decision(msgspec.Struct, frozen=True):
    """A routed request, as `Routed` has it; `began` by the monotonic clock."""

    began: float
    record: dict[str, Any]


class Decisions(msgspec.Struct, frozen=True):
    """All of one name."""

    found: list[Decision]


@dataclass(frozen=True)
class Heard(Generic[Reply]):
    """What siblings answered."""

    answers: list[Reply]
    silent: list[str]
    """Who did not, and why."""


class Siblings:
    """The other gateway processes on this one's port, by name, with their private sockets; none where it is alone.

    A connection is made for each question: of a process that was started again the new one answers.
    """

    def __init__(self, sockets: Mapping[str, Path] = _NOBODY) -> None:
        self._sockets = sockets

    async def newest(self, limit: int) -> Heard[Requests]:
        """Ask for their newest requests."""
        return await self._ask(f"{OWN}/requests/{limit}", Requests)

    async def kept(self, name: str) -> Heard[Kept]:
        """Ask for a request."""
        return await self._ask(f"{OWN}/request/{quote(name, safe='')}", Kept)

    async def decisions(self, name: str) -> Heard[Decisions]:
        """Ask how the requests of a name were routed."""
        return await self._ask(f"{OWN}/decisions/{quote(name, safe='')}", Decisions)

    async def silent(self) -> list[str]:
        """Return who does not answer, and why."""
        return (await self._ask("/health", Health)).silent

    async def _ask(self, path: str, kind: type[Reply]) -> Heard[Reply]:
        found = await asyncio.gather(*(_one(name, at, path, kind) for name, at in self._sockets.items()))
        answers = [each for each in found if each is not None and not isinstance(each, str)]
        return Heard(answers, [each for each in found if isinstance(each, str)])


async def _one(name: str, socket: Path, path: str, kind: type[Reply]) -> Reply | str | None:
    """Return a sibling's answer, or why there is none; None: it knows of nothing."""
    body = bytearray()
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(socket)), timeout=aiohttp.ClientTimeout(total=ASK_S), auto_decompress=False
            ) as session,
            session.get(URL(f"http://{name}{path}", encoded=True), allow_redirects=False) as answer,
        ):  # fmt: skip
            if answer.status != 200:
                return None if answer.status == 404 else f"{name} answers {answer.status}"
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MAX_ANSWER:
                    return f"{name} answers more than {MAX_ANSWER} bytes"
        return msgspec.json.decode(body, type=kind)
    except TimeoutError:
        return f"{name} does not answer within {ASK_S:g} s"
    except (OSError, aiohttp.ClientError) as error:
        return f"{name} does not answer: {getattr(error, 'strerror', None) or error}"
    except (msgspec.DecodeError, RecursionError) as error:
        return f"{name} answers what it should not: {error}"


def newest(found: Iterable[Requests], limit: int, silent: list[str]) -> Requests:
    """Return the newest requests of several processes, newest first; of two under one name the newer, as within a process."""
    several, by_name = list(found), dict[str, Line]()
    for line in sorted((line for each in several for line in each.requests[::-1]), key=lambda line: line.unix_s):
        by_name.pop(line.id, None)
        by_name[line.id] = line
    shown = list(by_name.values())[: -limit - 1 : -1]
    kept = sum(len(each.requests) + each.hidden for each in several)
    return Requests(shown, kept - len(shown), silent)


def latest(found: Iterable[Kept]) -> Kept | None:
    """Return the request that came last, of those that have one name."""
    return max(found, key=lambda each: each.arrived, default=None)


def routed(found: Iterable[Decisions], silent: list[str]) -> Routed:
    """Return how all requests of a name were routed, in the order in which they were."""
    records = sorted((each for one in found for each in one.found), key=lambda each: each.began)
    return Routed([each.record for each in records[-MOST_DECISIONS:]], silent)
