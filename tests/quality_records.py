"""Records of a small model for tests: figures that pass, of whatever pair is asked for."""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from regauge.layout.presets import from_short
from regauge.layout.spec import Array, Layout, Model, Scale, State, with_components
from regauge.plan import check
from regauge.plan.quality import Figures, Record, Result, Text, conversions, identify

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
LAYERS, HEADS = 6, 4
GOOD = Figures(agreement=0.97, kl_mean=0.003, kl_max=0.1, perplexity=10.0)
MODEL = Model(
    "small",
    LAYERS,
    [State("attention", f"0-{LAYERS - 1}", {"k": Array(HEADS, 8), "v": Array(HEADS, 8)})],
    revision="abc",
)


def table(factor: float = 1.0) -> list[float | list[float]]:
    """One scale per layer and head, all different."""
    return [[factor * (0.01 + 0.1 * layer + 0.001 * head) for head in range(HEADS)] for layer in range(LAYERS)]


def scaled(layout: Layout, scale: Scale) -> Layout:
    """The layout with that scale on every component."""
    return with_components(layout, lambda c: msgspec.structs.replace(c, scale=scale))


def per_head(form: str = "fp8_e4m3", factor: float = 1.0) -> Layout:
    return scaled(from_short(form, MODEL), Scale("head", values=table(factor)))


def result(**change: object) -> Result:
    plain = {"positions": 512, "perplexity": 10.05, "decode_control": GOOD, "prefill_control": GOOD,
             "errors": {"k": [0.02] * LAYERS, "v": [0.03] * LAYERS}}  # fmt: skip
    return Result(**(plain | change))  # type: ignore[arg-type]


def record_of(prefill: Layout, decode: Layout, measured: Result | None = None) -> Record:
    covers = conversions(prefill, decode, check(prefill, decode))
    text = Text("00" * 32, 8, 64, 64, 4)
    found = measured or result()
    return Record(identify(decode.model, "11" * 32), covers, text, found, "0.1.0", "2026-01-31T12:00:00Z")
