"""What a client sees of an SGLang server: greedy answers, whole or streamed, errors, and a connection that is closed early."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

import msgspec

LIMIT_S = 120.0


@dataclass
class Answer:
    """Of one request; times in seconds from when it was sent."""

    status: int = 0
    """Of HTTP; 0: the connection broke, or nothing came in time."""
    ids: list[int] = field(default_factory=list)
    error: str = ""
    """What the body says went wrong, or why there is no answer."""
    first: float = 0.0
    """To the first token of a streamed answer."""
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    """SGLang's `meta_info`."""

    @property
    def good(self) -> bool:
        """Tokens came, and no error with them."""
        return self.status == HTTPStatus.OK and bool(self.ids) and not self.error


def prompt(seed: int, tokens: int, *, vocabulary: int = 500) -> list[int]:
    """Token ids that a model of this vocabulary knows; the same for the same seed."""
    rng = random.Random(seed)
    return [1, *(rng.randrange(3, vocabulary) for _ in range(tokens - 1))]


def body(ids: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """Return what /generate takes, greedy; `more` may say stream, rid, bootstrap_room and the like."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(ids), "sampling_params": sampling, **more}


def call(port: int, method: str, path: str, sent: object = None, *, limit_s: float = LIMIT_S) -> tuple[int, bytes]:
    """Return the status and the body of an answer. Raises OSError or HTTPException where there is none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=limit_s)
    with contextlib.closing(connection):
        data = None if sent is None else msgspec.json.encode(sent)
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


def generate(port: int, sent: dict[str, Any], *, limit_s: float = LIMIT_S, leave_after: float | None = None) -> Answer:
    """Ask for tokens and return what came, whatever it was.

    `limit_s`: the longest silence that is waited for. `leave_after`: close the connection so many seconds after the request, at
    the next thing that comes or where nothing does.
    """
    out, begun = Answer(), time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=limit_s if leave_after is None else leave_after + 1e-3)
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/generate", msgspec.json.encode(sent), {"content-type": "application/json"})
            answer = connection.getresponse()
            out.status = answer.status
            if answer.getheader("content-type", "").startswith("text/event-stream"):
                _stream(answer, out, begun, leave_after)
            else:
                _take(out, answer.read())
        except (OSError, HTTPException) as error:
            out.error = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                out.status = 0
    out.seconds = time.monotonic() - begun
    return out


def _stream(answer: HTTPResponse, out: Answer, begun: float, leave_after: float | None) -> None:
    done = False
    for line in answer:
        data = line.strip().removeprefix(b"data: ")
        if leave_after is not None and time.monotonic() - begun > leave_after:
            out.error = "left"
            return
        if data == b"[DONE]":
            done = True
        elif data:
            _take(out, data)
            out.first = out.first or time.monotonic() - begun
    if not done and not out.error:
        out.error = "the stream broke off"


def _take(out: Answer, data: bytes) -> None:
    """Read one answer, or one event of a stream: tokens so far, or an error."""
    try:
        said = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        out.error = data[:500].decode(errors="replace")
        return
    out.info = said.get("meta_info", {})
    reason = out.info.get("finish_reason") or {}
    if "output_ids" in said:
        out.ids = said["output_ids"]
    if reason.get("type") == "abort":
        out.error = reason.get("message") or "aborted"
    elif "output_ids" not in said:
        inner = said.get("error", said)
        out.error = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
