"""Demands a quality record of every pair that converts: is it signed, does it cover this pair, is it good enough?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from regauge.config import QualityLimits
from regauge.layout.spec import Layout, Model
from regauge.plan.check import Refusal, Verdict, check
from regauge.plan.quality import (
    Entry,
    Identity,
    Record,
    Result,
    Signed,
    coding,
    converting,
    entries,
    split,
    verify,
)

MEASURE: Final = "measure it with `regauge bench accuracy ... --record FILE --sign KEY`"


@dataclass(frozen=True, slots=True)
class Gate:
    """What is demanded of a pair that converts; a pair that does not needs nothing."""

    records: Mapping[str, Signed]
    """By the name that a message calls them by; one that covers the pair and meets the limits is enough."""
    trust: Sequence[Ed25519PublicKey]
    """Keys whose signature counts."""
    limits: QualityLimits = field(default_factory=QualityLimits)
    weights: str = ""
    """Digest of the weights that are served, where it is known: the record must be of these."""

    def check(self, prefill: Layout, decode: Layout, *, whole: bool = True) -> Verdict:
        """Compare two layouts as `regauge.plan.check` does, and refuse a pair that `require` refuses."""
        verdict = check(prefill, decode, whole=whole)
        found = require(self, prefill, decode, verdict)
        return replace(verdict, path="REFUSED", refusals=(*verdict.refusals, *found)) if found else verdict


def require(gate: Gate, prefill: Layout, decode: Layout, verdict: Verdict) -> list[Refusal]:
    """Return why no record allows this pair, with the remedies; nothing if one does, or if the pair does not convert."""
    if verdict.path != "CONVERT":
        return []
    lane, src, dst = next(converting(prefill, decode, verdict))
    ours = coding(prefill, src, src.component(lane.component), lane)
    theirs = coding(decode, dst, dst.component(lane.component), lane)
    reasons = [] if gate.records else [f"This pair converts and no quality record is given: {MEASURE}."]
    for name, signed in gate.records.items():
        found = [*_unproven(signed, gate.trust)] or [*_uncovered(signed.record, prefill, decode, verdict)]
        if not found and gate.weights not in ("", signed.record.model.weights):
            found = [f"is of other weights than those that are served: {MEASURE}"]
        found = found or shortfalls(signed.record.result, gate.limits)
        if not found:
            return []
        reasons += [f"{name}: {reason}." for reason in found]
    return [Refusal("quality", str(ours), str(theirs), reason) for reason in reasons]


def shortfalls(result: Result, limits: QualityLimits) -> list[str]:
    """Return which limits a result does not meet, with the remedy; written so that what is not a number meets none."""
    remedy = "Choose a finer dtype or scale, or set the limit with care"
    found = []
    if result.positions < limits.min_positions:
        found.append(
            f"{result.positions} positions were measured, {limits.min_positions} are demanded (min_positions). "
            "Measure on more text"
        )
    for name, figures in (("decode", result.decode_control), ("prefill", result.prefill_control)):
        against = f"against the {name} layout without a transfer"
        if not figures.kl_mean <= limits.max_kl:
            found.append(f"mean KL {figures.kl_mean:.4g} {against} exceeds {limits.max_kl:g} (max_kl). {remedy}")
        if not figures.agreement >= limits.min_agreement:
            found.append(
                f"agreement {figures.agreement:.2%} {against} is below {limits.min_agreement:.2%} (min_agreement). {remedy}"
            )
        ratio = result.perplexity / figures.perplexity if figures.perplexity > 0 else math.inf
        if not ratio <= limits.max_perplexity_ratio:
            found.append(
                f"perplexity is {ratio:.4g} times that {against}, more than {limits.max_perplexity_ratio:g} "
                f"(max_perplexity_ratio). {remedy}"
            )
    return found


def _unproven(signed: Signed, trust: Sequence[Ed25519PublicKey]) -> Iterator[str]:
    if not signed.signature or not signed.key:
        yield "is not signed: let someone who vouches for it run `regauge bench sign --record FILE --sign KEY`"
        return
    key = next((k for k in trust if k.public_bytes_raw().hex() == signed.key), None)
    if key is None:
        yield f"is signed by key {signed.key[:16]}, which is not among the trusted: add it with --trust if it should be"
        return
    if not verify(signed, key):
        yield "has been changed since it was signed: the signature does not fit; get the original, or measure again"


def _uncovered(record: Record, prefill: Layout, decode: Layout, verdict: Verdict) -> Iterator[str]:
    for side, model in (("prefill", prefill.model), ("decode", decode.model)):
        clash = _other_model(record.model, model)
        if clash:
            yield f"is of another model than the {side} layout's: {clash}. Use that model's record, or {MEASURE}"
            return
    measured = entries(record)
    as_they_are = {
        (prefill.groups[lane.prefill_group].kind, lane.component, layer)
        for lane in verdict.lanes
        if lane.path != "CONVERT"
        for layer in lane.layers
    }
    for kind, component, layer in sorted(measured.keys() & as_they_are):
        yield f"{component} ({kind}) of layer {layer} was converted when it was measured, and is not in this pair: {MEASURE}"
        return
    for lane, src, dst in converting(prefill, decode, verdict):
        codings = (coding(prefill, src, src.component(lane.component), lane),
                   coding(decode, dst, dst.component(lane.component), lane))  # fmt: skip
        for key, entry in split(dst.kind, lane.component, lane.layers, codings):
            clash = _difference(measured.get(key), entry, lane.heads)
            if clash:
                yield f"{lane.component} of layer {key[2]}: {clash}: {MEASURE}"
                return


def _other_model(identity: Identity, model: Model) -> str:
    if identity.name != model.name:
        return f"{identity.name!r}, not {model.name!r}"
    if identity.revision != model.revision:
        return f"revision {identity.revision or 'not given'}, not {model.revision or 'not given'}"
    return "" if identity.identity == model.identity() else "its geometry differs"


def _difference(measured: Entry | None, own: Entry, heads: Sequence[int]) -> str:
    if measured is None:
        return f"{own[0]} -> {own[1]} was not measured"
    if measured[:2] != own[:2]:
        return f"measured was {measured[0]} -> {measured[1]}, the pair does {own[0]} -> {own[1]}"
    for side, have, need in (("prefill", measured[2], own[2]), ("decode", measured[3], own[3])):
        for place, head in enumerate(heads if need else []):
            if head >= len(have) or np.float32(have[head]) != np.float32(need[place]):
                was = f"{have[head]:g}" if head < len(have) else "none"
                return f"the {side} scale of head {head} was {was} when it was measured, and is {need[place]:g}"
    return ""
