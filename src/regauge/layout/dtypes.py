"""Element types of a KV cache, named as torch writes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `max` is the largest finite value. `saturates` says what a conversion to it does with larger values and with
    infinities: become `max` (True), or follow IEEE rounding (False). `whole`: it holds whole numbers only. `max` of
    int8 is that of codes which conversions write; -128 is read as -128.
    """

    name: str
    itemsize: int
    max: float
    saturates: bool
    whole: bool = False
    opaque: bool = False
    """Kernels move it and do not convert it."""

    @property
    def takes_scales(self) -> bool:
        """Whether scales that are computed from the values (largest magnitude / `max`) are defined for it."""
        return self.itemsize == 1 and not self.opaque


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("float32", 4, 3.4028234663852886e38, False),
        DType("bfloat16", 2, 3.3895313892515355e38, False),
        DType("float16", 2, 65504.0, True),
        DType("float8_e4m3fn", 1, 448.0, True),
        DType("float8_e4m3fnuz", 1, 240.0, True),
        DType("float8_e5m2", 1, 57344.0, True),
        DType("int8", 1, 127.0, True, whole=True),
        DType("float4_e2m1fn_x2", 1, 6.0, True, opaque=True),
    )
}
"""Every type that a layout may have; kernels convert between any two that are not opaque. An element of float4_e2m1fn_x2 is
a byte with two values.

Largest values and rounding: OCP 8-bit floating point specification (e4m3, e5m2); Noune et al., 8-bit Numerical Formats
for Deep Neural Networks (e4m3fnuz); IEEE 754 for the other floats.
"""

SCALE_DTYPES: dict[str, int] = {"float32": 4, "float8_e8m0fnu": 1, "float8_e4m3fn": 1}
"""Types of stored scales, with their bytes. Scales in float8_e4m3fn are moved and not converted."""

ALIASES: dict[str, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
}
"""Names that engines' `--kv-cache-dtype` flags use."""


def canonical(name: str) -> str | None:
    """Return the torch name of a dtype given by that name or an alias; None if it is neither."""
    name = name.removeprefix("torch.")
    return name if name in DTYPES else ALIASES.get(name)
