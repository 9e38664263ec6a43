"""What went wrong with a request on its workers: which of two errors is the cause, what may go well elsewhere, and what the client is told."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

from regauge.config import Role
from regauge.errors import ProtocolError, RegaugeError
from regauge.route.cluster import Cause, Refusal
from regauge.serve import wire
from regauge.serve.connection import RequestTimeout, WorkerError, WorkerLost
from regauge.serve.openai import RATE_LIMIT, SERVER_ERROR, ApiError

RETRY_AFTER_S: Final = 1
SETTLE_S: Final = 0.5
"""After one leg's end, seconds to wait for the other's: a refusal comes from both, a failed transfer is often the other worker's death."""
UNAVAILABLE: Final = "worker_unavailable"
_SYMPTOMS: Final = frozenset({"transfer_failed", "timeout", "aborted"})
"""What a worker says when its peer is at fault, or may be."""

_PASSING: Final[Mapping[wire.Code, Cause]] = {
    "draining": "draining",
    "queue_full": "queue_full",
    "transfer_failed": "transfer_failed",
    "aborted": "failed",
    "engine_failed": "failed",
}
"""What a worker may say of a request that can go well elsewhere. Whatever else one says, others would say as well."""


class ClientGone(RegaugeError):  # an event more than an error
    """The client closed its connection."""


def api_error(error: RegaugeError) -> ApiError:
    """Return what the client is told of an error that ended its request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, WorkerLost):
        return ApiError(503, str(error), type=SERVER_ERROR, code=UNAVAILABLE)
    if isinstance(error, RequestTimeout):
        return ApiError(504, str(error), type=SERVER_ERROR, code="timeout")
    if isinstance(error, ProtocolError):
        return ApiError(502, str(error), type=SERVER_ERROR, code="bad_gateway")
    if not isinstance(error, WorkerError):
        return ApiError(500, str(error), type=SERVER_ERROR, code="internal_error")
    match error.event.code:
        case "prompt_too_large":
            return ApiError(400, str(error), code="context_length_exceeded")
        case "queue_full":
            return too_many(str(error))
        case "draining" | "aborted":  # nobody but the worker itself can have aborted: the job waits for it
            return ApiError(503, str(error), type=SERVER_ERROR, code=UNAVAILABLE, retry_after_s=RETRY_AFTER_S)
        case "timeout" | "transfer_failed" as code:
            return ApiError(wire.STATUS[code], str(error), type=SERVER_ERROR, code=code)
        case code:
            # The request was checked here: that the worker refuses it is this server's fault.
            return ApiError(500, str(error), type=SERVER_ERROR, code=code)


def too_many(message: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return a 429."""
    return ApiError(429, message, type=RATE_LIMIT, code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: int | None = None) -> ApiError:
    """Return a 503."""
    return ApiError(503, message, type=SERVER_ERROR, code=UNAVAILABLE, retry_after_s=retry_after_s)


def good(leg: asyncio.Task[Any]) -> bool:
    """Whether a leg has come to a good end."""
    return leg.done() and not leg.cancelled() and leg.exception() is None


def errors(legs: Sequence[asyncio.Task[Any]]) -> list[BaseException]:
    """Return what ended the legs that have failed."""
    ended = [leg.exception() for leg in legs if leg.done() and not leg.cancelled()]
    return [error for error in ended if error is not None]


def is_symptom(error: BaseException) -> bool:
    """Whether the other worker may be at fault."""
    return isinstance(error, WorkerError) and error.event.code in _SYMPTOMS


def cause(legs: Sequence[asyncio.Task[Any]]) -> BaseException:
    """Return the error to report: a worker's death, else a worker's own fault, else what there is."""
    return min(errors(legs), key=rank)


def rank(error: BaseException) -> tuple[bool, bool]:
    """Return what orders the errors of two legs: the lowest is the cause."""
    return not isinstance(error, WorkerLost), is_symptom(error)


def blame(error: RegaugeError, prefill: str | None, decode: str) -> tuple[Cause, str, Role] | None:
    """Return what happened at which worker of a pair; None for an error that another pair would not mend.

    A worker whose transfer failed complains of the other one: it is that which died or stands still.
    """
    if isinstance(error, WorkerLost):
        return "worker_lost", error.worker, error.role
    if isinstance(error, RequestTimeout | ProtocolError):
        return ("timeout", decode, "decode") if isinstance(error, RequestTimeout) else None
    if not isinstance(error, WorkerError) or error.event.code not in _PASSING:
        return None
    kind, said_by_decode = _PASSING[error.event.code], error.role == "decode"
    if kind == "transfer_failed" and prefill is not None:
        return (kind, prefill, "prefill") if said_by_decode else (kind, decode, "decode")
    return (kind, decode, "decode") if said_by_decode or prefill is None else (kind, prefill, "prefill")


def refused(refusal: Refusal, fault: str) -> ApiError:
    """Return what a client is told of a request that the router does not place; `fault`: what is wrong with the workers, if anything is."""
    if refusal.reason == "no_worker":
        return unavailable(fault or refusal.message)
    if refusal.reason == "no_room":
        return ApiError(400, refusal.message, code="context_length_exceeded")
    return too_many(refusal.message, refusal.retry_after_s)


def poisoned(message: str) -> ApiError:
    """Return what a client is told of a request that kills workers."""
    return ApiError(500, message, type=SERVER_ERROR, code="request_stopped")
