"""Quality records: what a conversion does to a model's answers, measured and signed. `regauge.plan.gate` demands them.

A `Record` holds the figures of one conversion of one model. It vouches for exactly what was measured: that model (name, revision,
geometry), and for every layer the same components converted from the same dtype and scale scheme into the same, by the same rules, and with
the same constant scales. Page size, axis order, TP and PP are left out: they move values and do not change them. A rank that
holds a part of the layers and heads is covered by the record of the whole model.

A record counts when a trusted Ed25519 key has signed it: whoever holds the key, a person or a CI job, vouches that the figures were
measured and are good enough. The signature is over `CONTEXT` and the record's canonical JSON (keys sorted, nothing between tokens), so that
a file can be indented and re-ordered, but no value of it changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from regauge import keys
from regauge.errors import ConfigError, LayoutError
from regauge.layout.spec import Component, Group, Kind, Layout, Model, Scale, format_layers, parse_layers, scale_table
from regauge.plan.check import LaneVerdict, Verdict

CONTEXT: Final = b"regauge quality record 1\n"
MAX_BYTES: Final = 4 << 20
"""Most bytes of a record's file: constant scales of 128 layers with 128 heads take 1 MiB."""
MAX_HEADS: Final = 1 << 16
MAX_ENTRIES: Final = 1 << 17
"""Most components of layers that a record covers."""

Row = tuple[float, ...]
"""Constant scales of one layer, one per head; empty where there are none."""
Entry = tuple["Coding", "Coding", Row, Row]
"""How prefill and decode write one component of one layer: codings without constants, and those apart."""
Key = tuple[str, str, int]
"""Kind, component, layer."""


class Coding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How values are written: a dtype, and how scales are made. No scale, or constants of 1: `scale` is None."""

    dtype: str
    scale: Scale | None
    """Stored scales without their place, or constants as one list of the model's heads per layer."""
    stored: bool

    def __str__(self) -> str:
        s = self.scale
        if s is None:
            return f"{self.dtype} without scale"
        more = [f"of {s.block}"] if s.block else []
        more += ["stored" if self.stored else "constant", f"rule {s.rule}", *(["powers of two"] if s.pow2 else [])]
        return f"{self.dtype} with a scale per {s.per} ({', '.join(more)})"


class Conversion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One component's crossing, in the layers where it is converted."""

    kind: Kind
    component: str
    layers: str
    heads: int
    """Of the whole model."""
    prefill: Coding
    decode: Coding


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model was measured."""

    name: str
    revision: str
    identity: str
    """`Model.identity()`: name and geometry, whatever changes what the bytes of its KV mean."""
    weights: str
    """SHA-256, in hex, over the files of configuration and weights that were loaded."""


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What it was measured on."""

    sha256: str
    documents: int
    prompt_tokens: int
    answer_tokens: int
    calibration_documents: int
    """Documents that constant scales were taken from; none of them was evaluated."""


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answers after the crossing against those of one control."""

    agreement: float
    """Share of positions whose most likely token is the same."""
    kl_mean: float
    """Nats: KL(control || crossed), mean over positions."""
    kl_max: float
    perplexity: float
    """The control's own, on the documents' tokens."""


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured."""

    positions: int
    """Answer tokens, of all documents together."""
    perplexity: float
    """After the crossing."""
    decode_control: Figures
    """Against the decode layout without a transfer: what decode would have answered alone."""
    prefill_control: Figures
    """Against the prefill layout without a transfer: catches a decode layout that is bad in itself."""
    errors: dict[str, list[float]]
    """By component: relative error (Frobenius norm) of what decode reads against what prefill holds, one per layer."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one conversion of one model."""

    model: Identity
    conversions: list[Conversion]
    text: Text
    result: Result
    version: str
    """Of regauge, that measured it."""
    date: str
    """When, in UTC, as in 2026-01-31T12:00:00Z."""
    format: Literal[1] = 1


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record as it lies in a file."""

    record: Record
    key: str = ""
    """The signer's raw public key, in hex; empty: not signed."""
    signature: str = ""


def identify(model: Model, weights: str) -> Identity:
    """Return a model's identity."""
    return Identity(model.name, model.revision, model.identity(), weights)


def conversions(prefill: Layout, decode: Layout, verdict: Verdict) -> list[Conversion]:
    """Return what a pair of whole-model layouts converts. Raises ConfigError for a pair of shards: measure the whole model."""
    found = []
    for lane, src, dst in converting(prefill, decode, verdict):
        a, b = src.component(lane.component), dst.component(lane.component)
        heads = decode.model.state(dst.kind, lane.layers[0]).arrays[lane.component].heads
        if lane.heads != tuple(range(heads)):
            raise ConfigError("a quality record is of all heads of a model: give layouts without tp")
        codings = (coding(prefill, src, a, lane), coding(decode, dst, b, lane))
        found.append(Conversion(dst.kind, lane.component, format_layers(lane.layers), heads, *codings))
    return found


def sign(record: Record, key: Ed25519PrivateKey) -> Signed:
    """Vouch for a record. Raises ConfigError for figures that are not finite: the conversion broke the model."""
    plain = _canonical(record)
    return Signed(record, key.public_key().public_bytes_raw().hex(), keys.sign(key, CONTEXT, plain))


def verify(signed: Signed, key: Ed25519PublicKey) -> bool:
    """Say whether that key has signed exactly this record."""
    return keys.verify(key, CONTEXT, _canonical(signed.record), signed.signature)


def encode(signed: Signed) -> bytes:
    """Write a record; `decode` gives it back."""
    _canonical(signed.record)
    return msgspec.json.format(msgspec.json.encode(signed), indent=2)


def decode(data: bytes, name: str = "quality record") -> Signed:
    """Read a record. Raises ConfigError, which begins with `name`, for what is oversize, malformed, or does not fit together."""
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES} bytes, which is the most that is read")
    try:
        signed = msgspec.json.decode(data, type=Signed)
        entries(signed.record)
        _canonical(signed.record)
    except (msgspec.DecodeError, UnicodeDecodeError, LayoutError) as error:
        raise ConfigError(f"{name}: not a quality record: {error}") from error
    return signed


def _canonical(record: Record) -> bytes:
    result = record.result
    numbers = [result.perplexity, *(x for row in result.errors.values() for x in row)]
    for figures in (result.decode_control, result.prefill_control):
        numbers += [figures.agreement, figures.kl_mean, figures.kl_max, figures.perplexity]
    if not all(math.isfinite(x) for x in numbers):
        raise ConfigError(
            "the figures are not finite numbers: the conversion broke the model, there is nothing to sign"
        )
    return msgspec.json.encode(record, order="sorted")


# -- what is converted -----------------------------------------------------------------------------------------------


def converting(prefill: Layout, decode: Layout, verdict: Verdict) -> Iterator[tuple[LaneVerdict, Group, Group]]:
    """Yield the lanes that convert, with their groups on either side."""
    for lane in verdict.lanes:
        if lane.path == "CONVERT":
            yield lane, prefill.groups[lane.prefill_group], decode.groups[lane.decode_group]


def coding(layout: Layout, group: Group, component: Component, lane: LaneVerdict) -> Coding:
    """Return how a component is written in the layers and heads of a lane."""
    scale = component.scale
    if scale is not None and scale.at is not None:
        return Coding(component.dtype, msgspec.structs.replace(scale, at=None), stored=True)
    rows = [] if scale is None else scale_table(scale, len(group.layer_ids), component.heads)
    if scale is None or all(x == 1.0 for row in rows for x in row):
        return Coding(component.dtype, None, stored=False)
    first, ids = layout.heads(group, component)[0], group.layer_ids
    values: list[Any] = [[rows[ids.index(layer)][h - first] for h in lane.heads] for layer in lane.layers]
    return Coding(component.dtype, Scale(scale.per, values=values, rule=scale.rule), stored=False)


def entries(record: Record) -> dict[Key, Entry]:
    """Return what a record covers, layer by layer. Raises LayoutError for scales that do not fit the layers and heads."""
    found: dict[Key, Entry] = {}
    for c in record.conversions:
        layers = parse_layers(c.layers)
        if not 1 <= c.heads <= MAX_HEADS:
            raise LayoutError(f"{c.heads} heads", path="record.conversions.heads")
        if len(found) + len(layers) > MAX_ENTRIES:
            raise LayoutError(f"more than {MAX_ENTRIES} layers and components", path="record.conversions")
        for side in (c.prefill, c.decode):
            if side.scale is not None and not side.stored:
                _check_constants(side.scale, len(layers), c.heads)
        for key, entry in split(c.kind, c.component, layers, (c.prefill, c.decode)):
            if key in found:
                raise LayoutError(f"{c.component} of layer {key[2]} is named twice", path="record.conversions")
            found[key] = entry
    return found


def _check_constants(scale: Scale, layers: int, heads: int) -> None:
    # Lists alone, so that a small file cannot ask for a large table.
    if not isinstance(scale.values, list) or not all(isinstance(row, list) for row in scale.values):
        raise LayoutError("give one list of heads per layer", path="record.conversions.scale.values")
    scale_table(scale, layers, heads, path="record.conversions.scale")


def split(
    kind: str, component: str, layers: Sequence[int], codings: tuple[Coding, Coding]
) -> Iterator[tuple[Key, Entry]]:
    """One entry per layer: the two codings without their constant scales, then those of that layer's heads."""
    schemes = tuple(
        c if c.scale is None else msgspec.structs.replace(c, scale=msgspec.structs.replace(c.scale, values=None))
        for c in codings
    )
    for index, layer in enumerate(layers):
        rows = [() if c.scale is None or c.stored else _row(c.scale, index) for c in codings]
        yield (kind, component, layer), (schemes[0], schemes[1], rows[0], rows[1])


def _row(scale: Scale, index: int) -> Row:
    values = scale.values
    row = values[index] if isinstance(values, list) else values
    return tuple(row) if isinstance(row, list) else ()
