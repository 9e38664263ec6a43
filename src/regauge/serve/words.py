"""The gateway's word on an attempt: its receipt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

from regauge.meter.receipt import Outcome, Receipt
from regauge.serve import wire
from regauge.serve.attempt import Attempt
from regauge.serve.passage import Passage


def receipt(attempt: Attempt, tag: wire.MeterTag, outcome: Outcome, *, by: str, model: str) -> Receipt:
    """Return what the gateway says of an attempt. Raises ReceiptError for what contradicts itself."""
    task = attempt.task
    prompt = len(task.token_ids) + len(task.generated)
    cached, computed = _prompt(attempt, prompt)
    silent = tuple(_silent(attempt, outcome)) if outcome != "failed" else ()
    began_us = int(attempt.began * 1e6)
    return Receipt(
        request=task.request_id, side="gateway", by=by, tenant=tag.tenant, model=model, route=tag.route, prefill=tag.prefill,
        decode=tag.decode, began_us=began_us, ended_us=max(int((attempt.ended or time.time()) * 1e6), began_us), outcome=outcome,
        resumes=tag.resumes, silent=silent, prompt=prompt, cached=cached, computed=computed, generated=attempt.delivered,
    )  # fmt: skip


def said(attempt: Attempt) -> Iterator[str]:
    """Yield the receipts that came with the workers' answers."""
    if attempt.prefilled is not None:
        yield attempt.prefilled.receipt
    if attempt.finish is not None:
        yield attempt.finish.receipt


def _silent(attempt: Attempt, outcome: Outcome) -> Iterator[Literal["prefill", "decode"]]:
    """Yield who cannot speak: workers that make no receipts, prefill that was lost once it had delivered, decode as its end was on its way."""
    if attempt.prefill is not None and (attempt.prefilled is None or not attempt.prefill.client.signs):
        yield "prefill"
    lost = "decode" in attempt.lost and attempt.finish is None and outcome != "resumed"
    if lost or not attempt.decode.client.signs:
        yield "decode"


def _prompt(attempt: Attempt, prompt: int) -> tuple[int, int]:
    """Return how many of the prompt's tokens were cached, and computed, as far as the workers have told: prefill, or decode of it."""
    if attempt.prefilled is not None:
        return attempt.prefilled.cached_tokens, attempt.prefilled.computed_tokens
    if attempt.cached is None:
        return (0, prompt) if attempt.delivered else (0, 0)
    return attempt.cached, prompt - attempt.cached


def of_passage(passage: Passage, tag: wire.MeterTag, outcome: Outcome, *, by: str, model: str) -> Receipt:
    """Return what the gateway says of a request whose body went on as it came; its engines say nothing. Raises ReceiptError."""
    usage = passage.used if outcome != "failed" else None
    prompt = usage.prompt_tokens if usage is not None else 0
    cached = min(usage.prompt_tokens_details.cached_tokens, prompt) if usage is not None else 0
    silent: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode") if tag.prefill else ("decode",)
    began_us = int(passage.began * 1e6)
    return Receipt(
        request=passage.request_id, side="gateway", by=by, tenant=tag.tenant, model=model, route=tag.route, prefill=tag.prefill,
        decode=tag.decode, began_us=began_us, ended_us=max(int((passage.ended or time.time()) * 1e6), began_us), outcome=outcome,
        silent=silent if outcome != "failed" else (), prompt=prompt, cached=cached, computed=prompt - cached,
        generated=usage.completion_tokens if usage is not None else 0,
    )  # fmt: skip
