"""Where workers are learnt of: sources, each of which tells changes for as long as the gateway runs, and what they say together."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from regauge.config_discovery import WorkerConfig
from regauge.errors import ConfigError
from regauge.observe import ERROR, WORKER, get_logger
from regauge.serve import addresses
from regauge.serve.registry import Change, Entry, Joined, Merge, check

RETRY_S: Final = (0.1, 5.0)
"""First and longest pause before a source that does not answer is asked again."""


class Source(Protocol):
    """One source. `watch` goes on for ever: what cannot be reached is logged, asked again, and meanwhile nothing changes."""

    def watch(self) -> AsyncIterator[list[Change]]:
        """Yield what has changed, beginning with all that there is."""


class Static:
    """Workers that the configuration names: `[[workers]]`."""

    def __init__(self, workers: Iterable[WorkerConfig], *, secure: bool) -> None:
        """`secure`: the transfer plane has TLS. Raises ConfigError that names the setting."""
        self.entries = [_entry(i, worker, secure=secure) for i, worker in enumerate(workers)]

    async def watch(self) -> AsyncIterator[list[Change]]:
        """Yield all of them, once."""
        yield [Joined(entry) for entry in self.entries]


class Pauses:
    """How long to wait before the next try: longer each time, from the start again after a success."""

    def __init__(self) -> None:
        self._next = RETRY_S[0]

    async def wait(self) -> None:
        """Wait."""
        pause, self._next = self._next, min(2 * self._next, RETRY_S[1])
        await asyncio.sleep(pause)

    def reset(self) -> None:
        """It has answered."""
        self._next = RETRY_S[0]


async def merged(sources: Sequence[Source], taken: Iterable[str] = ()) -> AsyncIterator[list[Change]]:
    """Yield the changes of several sources as they come; see `registry.Merge`."""
    merge = Merge(taken)
    news: asyncio.Queue[tuple[int, list[Change]]] = asyncio.Queue(maxsize=max(len(sources), 1))

    async def follow(index: int, source: Source) -> None:
        async for changes in source.watch():
            await news.put((index, changes))

    tasks = [asyncio.create_task(follow(index, source)) for index, source in enumerate(sources)]
    for task in tasks:
        task.add_done_callback(_source_ended)
    try:
        while True:
            told, vain = merge.apply(*await news.get())
            for name in vain:
                get_logger(**{WORKER: name}).warning("a worker of this name is known from elsewhere: this one waits")
            if told:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _source_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        get_logger().error("a source of workers broke; what it told last stays", exc_info=error)


def tls_context(authority: str, certificate: str = "", key: str = "") -> ssl.SSLContext | bool:
    """Return how a source's certificate is checked: by an authority's file, else the system's. Raises ConfigError."""
    if not authority and not certificate:
        return True
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate:
            context.load_cert_chain(certificate, key or None)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"discovery: {authority or certificate!r}: {reason}") from error
    return context


def secret(setting: str, file: str) -> str:
    """Read a file's one word. Raises ConfigError that names the setting."""
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting} {file!r}: {error}") from error


def failed(source: str, error: Exception) -> None:
    """Say that a source does not answer."""
    get_logger(source=source).warning(
        "a source of workers does not answer; what it told last stays", **{ERROR: str(error)}
    )


def _entry(index: int, worker: WorkerConfig, *, secure: bool) -> Entry:
    where = f"workers[{index}]"
    if worker.role == "decode" and not worker.control:
        raise ConfigError(
            f"{where}.control: give the address at which its rank 0 takes control connections, as 10.0.0.2:9100"
        )
    layout = ""
    if worker.layout:
        try:
            layout = addresses.layout_json(Path(worker.layout))
        except (OSError, ConfigError) as error:
            raise ConfigError(f"{where}.layout {worker.layout!r}: {error}") from error
    address = addresses.assemble(
        worker.name, worker.role, worker.url, worker.engine,
        control=addresses.host_port(f"{where}.control", worker.control) if worker.role == "decode" else None,
        status=addresses.host_port(f"{where}.status", worker.status) if worker.status else None,
        count=worker.ranks, secure=secure,
    )  # fmt: skip
    if worker.token_file:
        address = msgspec.structs.replace(address, token=secret(f"{where}.token_file", worker.token_file))
    entry = Entry(address, layout=layout)
    check(entry)
    return entry
