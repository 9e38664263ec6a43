"""What fits into the cards of an instance: weights, a reserve, and KV; and how much KV a decode step reads.

A step reads what its attention needs of each token: all of it, a window's last tokens, or of sparse attention (an indexer that picks
`index_topk` tokens) the indexer's keys of all tokens and the latents of those picked. Recurrent records are read whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from regauge.errors import ConfigError, Refused
from regauge.layout.config import language_model, read_config
from regauge.layout.spec import Group, Layout
from regauge.layout.view import element_bytes
from regauge.sim.ask import AUTO_SPAN, MAX_SPAN, Ask, Pool
from regauge.sim.devices import Accelerator
from regauge.sim.workload import Floats

FEWER_BITS = (8.0, 4.5)
"""Bits of a parameter that are offered where a model does not fit; 4.5: codes of 4 bits with their scales."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of a request's cache in an instance, all its cards together."""

    token: float
    """Of each token."""
    fixed: float
    """Of each request: recurrent records."""
    reads: tuple[tuple[float, float], ...]
    """(bytes of a token, tokens at most) that a step reads, for each kind of attention."""

    def bytes(self, tokens: Floats) -> Floats:
        """Return the bytes that requests of so many tokens keep."""
        return self.fixed + self.token * tokens

    def read(self, context: Floats) -> Floats:
        """Return the bytes that a step reads for requests of so many tokens."""
        return self.fixed + sum((b * np.minimum(context, most) for b, most in self.reads), np.zeros_like(context))


def kept(layout: Layout, source: str, copies: int) -> Kept:
    """Return what a layout keeps of a request, in so many copies. `source` names the config with the attention's kind."""
    values, _ = read_config(source)
    topk = language_model(values).get("index_topk")
    token = fixed = 0.0
    reads: list[tuple[float, float]] = []
    windows = {state.layers: state.window for state in layout.model.states if state.kind == "window"}
    for group in layout.groups:
        nbytes = float(copies * len(group.layer_ids) * sum(element_bytes(c) for c in group.components))
        if group.kind == "recurrent":
            fixed += nbytes
            continue
        token += nbytes
        reads.append((nbytes, _most(group, topk, windows)))
    return Kept(token, fixed, tuple(reads))


def _most(group: Group, topk: object, windows: dict[str, int]) -> float:
    if group.kind == "window":
        return float(windows.get(group.layers) or inf)
    return float(topk) if group.kind == "latent" and isinstance(topk, int) else inf


def capacity(card: Accelerator, cards: int, span: int) -> float:
    """Return the bytes of an instance's cards. Raises ConfigError for a card of unknown size."""
    if card.memory_gb is None:
        raise ConfigError(f"{card.name}: no memory_gb in the catalogue; add it in a file of your own")
    return card.memory_gb.value * 1e9 * cards * span


def room(pool: Pool, card: Accelerator, cards: int, span: int, weights: float) -> float:
    """Return the bytes for KV in an instance; negative: the weights do not fit."""
    return capacity(card, cards, span) * (1.0 - pool.reserve) - weights


def least_span(pool: Pool, card: Accelerator, cards: int, weights: float, longest: float) -> int:
    """Return the fewest servers whose cards hold the weights and the KV of one longest request; 0: more than `MAX_SPAN`."""
    return next((k for k in range(1, MAX_SPAN + 1) if room(pool, card, cards, k, weights) >= longest), 0)


def spans(ask: Ask, side: str, pool: Pool, card: Accelerator, cards: int, total_b: float, longest: float) -> range:
    """Return the spans that an instance may have. Raises Refused, saying what would fit, for none."""
    weights = total_b * 1e9 * pool.weight_bits / 8.0
    least = least_span(pool, card, cards, weights, longest)
    most = min(pool.servers or MAX_SPAN, MAX_SPAN)
    if pool.span:
        least_given, most = max(least, pool.span) if least else 0, min(pool.span, most)
        if least and least_given == most:
            return range(most, most + 1)
    elif 0 < least <= most:
        return range(least, max(min(most, AUTO_SPAN), least) + 1)
    had = pool.span or pool.servers or MAX_SPAN
    have, need = capacity(card, cards, had) * (1.0 - pool.reserve), weights + longest
    text = (
        f"{side}: {ask.model} does not fit {had} x {cards} x {card.name}: {weights / 1e9:.0f} GB of weights at "
        f"{pool.weight_bits:g} bits and {longest / 1e9:.1f} GB of KV for the longest request are {need / 1e9:.0f} GB, the cards "
        f"have {have / 1e9:.0f} GB after a reserve of {pool.reserve:.0%}. {_would(ask, pool, cards, had, total_b, longest, least)}"
    )
    raise Refused((text,))


def _would(ask: Ask, pool: Pool, cards: int, span: int, total_b: float, longest: float, least: int) -> str:
    """Say what would fit: more servers for an instance, fewer bits, another card."""
    found = [f"{least} servers for an instance"] if least > span else []
    card = ask.catalogue.accelerators[pool.device]
    for bits in FEWER_BITS:
        if bits < pool.weight_bits and room(pool, card, cards, span, total_b * 1e9 * bits / 8.0) >= longest:
            found.append(f"weights of {bits:g} bits")
            break
    weights = total_b * 1e9 * pool.weight_bits / 8.0
    others = [
        key
        for key, other in sorted(ask.catalogue.accelerators.items())
        if other.memory_gb is not None
        and key != pool.device
        and room(pool, other, int(other.cards.value) if other.cards else cards, span, weights) >= longest
    ]
    if others:
        found.append(f"servers of {', '.join(others)}")
    return f"What would fit: {'; '.join(found)}." if found else "Nothing in the catalogue would fit."
