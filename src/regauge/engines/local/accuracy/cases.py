"""Which cases are measured, and the table of what they gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from regauge.engines.local.accuracy.measure import READ_AS_FNUZ, UNSCALED, Case, Measured
from regauge.errors import ConfigError
from regauge.layout.dtypes import DTYPES, canonical
from regauge.layout.spec import Rule

DEFAULT: Final = (
    Case("bf16,page=64,hnd", "bf16,page=16,nhd"),
    Case("bf16", "fp8_e4m3,page=64,hnd"),
    Case("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd"),
    Case("bf16", "fp8_e4m3,page=64,hnd,scale=token_head"),
    Case("bf16", "fp8_e5m2"),
)

MATRIX: Final = (
    *(
        Case("bf16", decode, calibrate=True)
        for decode in (
            "bf16,page=64,hnd",
            "fp32",
            "fp16",
            "fp8_e4m3",
            "fp8_e4m3,scale=tensor",
            "fp8_e4m3,scale=head",
            "fp8_e4m3,scale=token_head",
            "fp8_e4m3fnuz",
            "fp8_e5m2",
            "fp8_e5m2,scale=token_head",
            "int8,scale=tensor",
            "int8,scale=head",
            "int8,scale=token_head",
        )
    ),
    Case("fp8_e4m3", "bf16"),
    Case("fp8_e4m3", "bf16", mistake=READ_AS_FNUZ),
    Case("fp8_e4m3,scale=tensor", "bf16", calibrate=True, mistake=UNSCALED),
)
"""The usual targets of bfloat16, the way back, and two mistakes that a hand-shake could make."""


def from_options(
    prefill: Sequence[str] | None,
    decode: Sequence[str] | None,
    dtypes: tuple[str | None, str | None],
    scale: str | None,
    rule: Rule | None = None,
) -> tuple[Case, ...]:
    """Return the cases that options ask for; the default ones without any. Raises ConfigError.

    `prefill` and `decode` are lists of layouts of one length; `dtypes` are those of --from and --to instead, where the scale is that of whichever
    side has 8 bits, calibrated if it is constant.
    """
    source, target = dtypes
    if source is not None or target is not None:
        if source is None or target is None or prefill or decode:
            raise ConfigError("give --from and --to together, or --prefill-layout and --decode-layout")
        constant = scale in ("per-tensor", "per-head")
        return (Case(_form(source, scale), _form(target, scale), calibrate=constant, rule=rule),)
    if scale is not None:
        raise ConfigError("--scale needs --from and --to; in a layout say scale=...")
    if not prefill and not decode:
        if rule is not None:
            raise ConfigError("--rule needs --from and --to, or layouts with scales")
        return DEFAULT
    if len(prefill or ()) != len(decode or ()):
        raise ConfigError("give --decode-layout as many times as --prefill-layout")
    return tuple(Case(a, b, rule=rule) for a, b in zip(prefill or (), decode or (), strict=True))


def _form(dtype: str, scale: str | None) -> str:
    name = canonical(dtype)
    if name is None:
        raise ConfigError(f"{dtype!r} is no dtype; give {', '.join(DTYPES)} or a short name such as bf16, fp8_e4m3")
    if scale in (None, "none") or not DTYPES[name].takes_scales:
        return dtype
    return f"{dtype},scale={str(scale).removeprefix('per-').replace('-', '_')}"


def table(found: Sequence[Measured]) -> str:
    """Return the rows as text: each figure against the decode layout without a transfer, then against the prefill layout."""
    out = [
        "| prefill | decode | path | agreement | mean KL | max KL | perplexity (controls) | error K / V | gate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (m.row for m in found):
        r, pair = row.result, (row.result.decode_control, row.result.prefill_control)
        agreement = " ; ".join(f"{x.agreement:.2%}" for x in pair)
        mean, most = (
            " ; ".join(f"{getattr(x, name):.{n}f}" for x in pair) for name, n in (("kl_mean", 5), ("kl_max", 3))
        )
        controls = " ; ".join(f"{x.perplexity:.3f}" for x in pair)
        lost = " / ".join(f"{np.mean(layers):.4f}" for layers in r.errors.values())
        source = row.prefill + (f" ({row.mistake})" if row.mistake else "")
        gate = "holds" if not row.shortfalls else f"{len(row.shortfalls)} limits exceeded"
        out.append(f"| {source} | {row.decode} | {row.path} | {agreement} | {mean} | {most} "
                   f"| {r.perplexity:.3f} ({controls}) | {lost} | {gate} |")  # fmt: skip
    first = found[0]
    text = first.text
    out.append(
        f"\n{first.row.result.positions} positions of {text.documents} documents; perplexity on a float32 pool "
        f"{first.row.perplexity_float32:.3f}. Pairs of figures: against the decode layout without a transfer ; against the prefill "
        "layout without one. Error: relative, of what decode reads, mean over layers."
    )
    if text.calibration_documents:
        out.append(f"Constant scales: largest magnitude over {text.calibration_documents} other documents.")
    return "\n".join(out)
