"""From a scenario to a cluster: the catalogue's devices become speeds, the layout bytes per token, the memory room for KV.

`docs/planning.md` has the formulas; efficiencies are the scenario's. A worker is one server, whose cards work on each request together.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TypeVar

from regauge.errors import ConfigError
from regauge.layout.presets import load_named
from regauge.sim import devices
from regauge.sim.curves import fit
from regauge.sim.devices import Accelerator, Catalogue
from regauge.sim.engines import DecodeModel, PrefillModel
from regauge.sim.memory import Kept, kept
from regauge.sim.model import Machine, Weights, exactly, machine
from regauge.sim.scenario import DecodePool, Model, Pool, PrefillPool, Scenario
from regauge.sim.work import Work, kv_bytes, model_work

NIC = "400g"
"""Of a device of which the catalogue names none."""
RECORD_TOKENS = 10_000
"""Tokens over which a request's recurrent records, which do not grow, are spread to bytes per token."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Nics:
    """Of one worker."""

    count: int
    bytes_per_s: float
    """Payload that each carries."""

    @property
    def together(self) -> float:
        """Return what all of them carry, bytes per second."""
        return self.count * self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Setup:
    """What a scenario means on its devices."""

    prefill: PrefillModel
    decode: DecodeModel
    bytes_per_token: float
    prefill_nic: Nics
    decode_nic: Nics
    notes: tuple[str, ...]
    """What the reader of the results must know."""


def prepare(scenario: Scenario, block: int) -> Setup:
    """Return the setup of a scenario, prefix caches counting in blocks of so many tokens.

    Raises ConfigError, LayoutError naming the field: an unknown device or model, a figure that the catalogue lacks, weights that do not fit.
    """
    catalogue = devices.load([Path(name) for name in scenario.catalogue])
    layout = load_named(scenario.model.kv, scenario.model.name)
    nbytes = kv_bytes(layout, RECORD_TOKENS) / RECORD_TOKENS
    prefill, decode = scenario.prefill, scenario.decode
    notes: list[str] = []
    return Setup(
        _prefill(prefill, scenario.model, catalogue, block, notes),
        _decode(decode, scenario.model, catalogue, kept(layout, scenario.model.name, 1), nbytes, notes),
        nbytes,
        _nics(prefill, "prefill", catalogue),
        _nics(decode, "decode", catalogue),
        tuple(notes),
    )


def known(table: Mapping[str, T], key: str, where: str) -> T:
    """Return an entry of the catalogue. Raises ConfigError that names the nearest one, or all."""
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, table, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(table))};"
    raise ConfigError(f"{where}: no {key!r} in the catalogue; {hint} catalogue = [FILE] adds your own")


def _prefill(pool: PrefillPool, model: Model, catalogue: Catalogue, block: int, notes: list[str]) -> PrefillModel:
    blocks = max(1, pool.cache_tokens // max(1, block))
    if pool.tokens_per_s is not None:
        return PrefillModel(pool.tokens_per_s, pool.overhead_s, pool.attention_s or 0.0, blocks)
    card = known(catalogue.accelerators, pool.device, "prefill.device")
    total, active = _parameters(model, catalogue)
    cards, work = _cards(pool, card, "prefill"), model_work(model.name, active)
    found = _machine(card, cards, compute=pool.efficiency, memory=1.0)
    if not _holds(card, cards, 0.0, weights := total * model.weight_bits / 8):
        notes.append(
            f"prefill: weights of {weights / 1e9:,.0f} GB exceed the {_memory(card, cards) / 1e9:,.0f} GB of a server of {cards} {card.name}; "
            "its speed is taken as if they fitted. They would with a lower model.weight_bits, or with more prefill.cards"
        )
    per_s = found.rate.value * pool.efficiency
    told = _told(work, found, per_s, pool.overhead_s)
    return PrefillModel(*told, blocks, _seconds(work, found, per_s, pool.overhead_s))


def _told(work: Work, on: Machine, per_s: float, overhead_s: float) -> tuple[float, float, float]:
    """What the router knows: tokens per second, seconds beside them, and seconds per pair of tokens."""
    measured = on.measured.prefill
    if measured is not None:
        line = fit(measured.points, degree=min(2, len(measured.points) - 1)).curve
        tokens, seconds = measured.points[-1]
        return 1.0 / line.linear if line.linear else tokens / seconds, line.fixed, 2.0 * line.square
    # Bounded attention counts as at its bound, for it is that in all but short prompts.
    linear = work.per_token + sum(term.per_pair * term.most for term in work.terms)
    square = sum(term.per_pair for term in work.terms if not term.most)
    return per_s / linear, overhead_s, square / per_s


def _seconds(work: Work, on: Machine, per_s: float, overhead_s: float) -> Callable[[int, int], float]:
    """As `model.prefill_seconds`, its likeliest value alone."""
    measured = on.measured.prefill
    if measured is None:
        return lambda tokens, cached: overhead_s + work.operations(cached, cached + tokens) / per_s
    fixed = measured(0.0)
    return lambda tokens, cached: fixed + max(measured(cached + tokens) - measured(cached), 0.0)


def _decode(
    pool: DecodePool, model: Model, catalogue: Catalogue, held: Kept, nbytes: float, notes: list[str]
) -> DecodeModel:
    if pool.step_s is not None and pool.kv_tokens is not None:
        pages = max(1, pool.kv_tokens // pool.page_tokens)
        return DecodeModel(pool.slots, pages, pool.page_tokens, pool.step_s, pool.step_more_s or 0.0)
    card = known(catalogue.accelerators, pool.device, "decode.device")
    total, active = _parameters(model, catalogue)
    cards = _cards(pool, card, "decode")
    weights = Weights(total * model.weight_bits / 8, active * model.weight_bits / 8)
    pages = max(1, _room(pool, card, cards, weights.total, nbytes, model.weight_bits) // pool.page_tokens)
    if pool.step_s is not None:
        return DecodeModel(pool.slots, pages, pool.page_tokens, pool.step_s, pool.step_more_s or 0.0)
    found = _machine(card, cards, compute=pool.efficiency, memory=pool.memory)
    step = _step(model_work(model.name, active), found, weights, held, pool)
    if not pool.overhead_s and found.measured.decode is None:
        notes.append(
            "decode: a step is what reading and computing take; launches and collectives, which small batches feel most, are not counted "
            "unless decode.overhead_s says so"
        )
    if pages * pool.page_tokens < 200_000:
        notes.append(f"decode: a worker has room for the KV of {pages * pool.page_tokens:,} tokens only")
    return DecodeModel(pool.slots, pages, pool.page_tokens, step_s=step(1, 0.0), curve=step)


def _step(work: Work, on: Machine, weights: Weights, held: Kept, pool: DecodePool) -> Callable[[int, float], float]:
    """As `model.decode_seconds`, its likeliest value alone; of bounded attention as if all requests were equally long."""
    if on.measured.decode is not None:
        measured = on.measured.decode
        return lambda _, resident: measured(resident)
    bandwidth, rate = on.bandwidth.value * pool.memory, on.rate.value * pool.efficiency
    reads = tuple(weights.read(max(1, batch)) / bandwidth for batch in range(pool.slots + 1))
    read_s = sum(nbytes for nbytes, most in held.reads if most == inf) / bandwidth
    bounded = [(nbytes / bandwidth, most) for nbytes, most in held.reads if most < inf]
    fixed_s, each_s = held.fixed / bandwidth, work.per_token / rate
    attend_s = sum(term.per_pair for term in work.terms if not term.most) / rate
    bounded_s = sum(term.per_pair * term.most for term in work.terms) / rate

    def step(batch: int, resident: float) -> float:
        computed = batch * (each_s + bounded_s) + resident * attend_s
        read = reads[min(batch, pool.slots)] + batch * fixed_s + resident * read_s
        for token_s, most in bounded:
            read += token_s * min(resident, batch * most)
        return pool.overhead_s + max(read, computed)

    return step


def _room(pool: DecodePool, card: Accelerator, cards: int, weights: float, nbytes: float, bits: float) -> int:
    """Tokens whose KV a worker has room for."""
    if pool.kv_tokens is not None:
        return pool.kv_tokens
    memory = _memory(card, cards) * (1 - pool.reserve)
    if memory - weights < nbytes * pool.page_tokens:
        raise ConfigError(
            f"decode: weights of {weights / 1e9:,.0f} GB leave no room for KV in {memory / 1e9:,.0f} GB of {cards} {card.name} "
            f"({pool.reserve:.0%} set aside); use decode.cards = {-(-cards * weights * 1.25 // memory):.0f}, a device with more memory, or "
            f"model.weight_bits = {bits * 0.8 * memory / weights:.1f}, which leave a fifth for KV"
        )
    return int((memory - weights) / nbytes)


def _machine(card: Accelerator, cards: int, *, compute: float, memory: float) -> Machine:
    fp8 = card.fp8_tflops is not None
    return machine(card, cards, fp8=fp8, compute=exactly(compute), memory=exactly(memory))


def _parameters(model: Model, catalogue: Catalogue) -> tuple[float, float]:
    """All parameters, and those that a token goes through."""
    if model.total_b is not None and model.active_b is not None:
        total, active = model.total_b, model.active_b
    else:
        size = catalogue.models.get(model.name)
        if size is None or size.total_b is None or size.active_b is None:
            near = difflib.get_close_matches(model.name, catalogue.models, n=1)
            raise ConfigError(
                f"model.name: the catalogue has no parameters of {model.name!r}; give model.total_b and model.active_b (10^9)"
                + (f", or did you mean {near[0]!r}?" if near else "")
            )
        total, active = (given or own.value for given, own in ((model.total_b, size.total_b), (model.active_b, size.active_b)))  # fmt: skip
    if active > total:
        raise ConfigError(f"model.active_b: {active:g} is more than all {total:g}")
    return total * 1e9, active * 1e9


def _cards(pool: Pool, card: Accelerator, where: str) -> int:
    if pool.cards:
        return pool.cards
    if card.cards is None:
        raise ConfigError(
            f"{where}.cards: the catalogue does not say how many {card.name} a server has; give it in a scenario"
        )
    return int(card.cards.value)


def _memory(card: Accelerator, cards: int) -> float:
    assert card.memory_gb is not None  # noqa: S101  # the catalogue has none without
    return card.memory_gb.value * cards * 1e9


def _holds(card: Accelerator, cards: int, reserve: float, nbytes: float) -> bool:
    return nbytes <= _memory(card, cards) * (1 - reserve)


def _nics(pool: Pool, where: str, catalogue: Catalogue) -> Nics:
    card = known(catalogue.accelerators, pool.device, f"{where}.device") if pool.device else None
    count = pool.nics or (int(card.nics.value) if card is not None and card.nics is not None else 1)
    if pool.nic_gb_per_s is not None:
        return Nics(count, pool.nic_gb_per_s * 1e9)
    nic = known(catalogue.nics, pool.nic or (card.nic if card is not None else "") or NIC, f"{where}.nic")
    assert nic.gbit_per_s is not None  # noqa: S101
    share = nic.share.value if nic.share is not None else 1.0
    return Nics(count, nic.gbit_per_s.value / 8 * 1e9 * share)
