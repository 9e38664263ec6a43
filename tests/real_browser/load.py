# ruff: noqa: S310  # urls of our own
"""Clients that ask until they are told to stop, and what a scrape says meanwhile."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fetch(url: str, body: dict[str, Any] | None = None, **headers: str) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(url, data, {"content-type": "application/json", **named})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def ask(url: str, name: str, tokens: int = 12) -> None:
    """One chat request of 60 to 80 prompt tokens, streamed."""
    words = f"Story {name}: " + "the wagons stand at the border, where the gauge changes; " * 4
    body = {
        "model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": words}], "max_tokens": tokens, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    assert b"[DONE]" in fetch(f"{url}/v1/chat/completions", body, X_Request_Id=f"story-{name}")


@contextmanager
def load(url: str, clients: int) -> Iterator[None]:
    """So many clients, each with one request at a time. Raises what one of them met."""
    end, numbers, met = threading.Event(), count(), list[BaseException]()

    def run() -> None:
        try:
            while not end.is_set():
                ask(url, str(next(numbers)))
        except BaseException as error:  # noqa: BLE001  # raised below
            met.append(error)

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert not met, met


def scrape(url: str) -> Scrape:
    """Every line of /metrics."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(fetch(f"{url}/metrics").decode())
        for sample in family.samples
    }


def total(found: Scrape, name: str, **labels: str) -> float:
    """The sum over what has these labels."""
    return sum(value for (line, has), value in found.items() if line == name and labels.items() <= has)
