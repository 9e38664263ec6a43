"""Which API answers a request: each has its own words for the same answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from regauge.serve.answer import Writer
from regauge.serve.anthropic_replies import MessageWriter
from regauge.serve.openai import Ask
from regauge.serve.replies import Writer as OpenAIWriter
from regauge.serve.text import Tokenizer


def writer_for(
    ask: Ask, *, tokenizer: Tokenizer, model: str, fingerprint: str, request_id: str, prompts: Sequence[Sequence[int]]
) -> Writer:
    """Return what writes the answer to a request of these `prompts`, in tokens."""
    if ask.api == "anthropic":
        return MessageWriter(f"msg_{secrets.token_hex(12)}", model, request_id, sum(map(len, prompts)))
    echo = [tokenizer.decode(p) if isinstance(p, list) else p for p in ask.prompts] if ask.echo else []
    return OpenAIWriter(
        id=f"{'chatcmpl' if ask.chat else 'cmpl'}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model,
        fingerprint=fingerprint,
        chat=ask.chat,
        usage_chunk=ask.include_usage,
        logprobs=ask.sampling.logprobs is not None,
        tokenizer=tokenizer,
        echo=tuple(text for text in echo for _ in range(ask.n)),
    )
