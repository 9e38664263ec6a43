"""Packed records: how one token's codes, scales and unquantised parts share its bytes. Data, one row per format.

A record is what an engine's cache-write kernel makes of one token of one layer, or of the tokens of one page. Where they
come from, as read on 2026-11-29:

| record | bytes | source |
|---|---|---|
| `fp8_ds_mla` | 656 | vLLM `flashmla_sparse.py` (0.32) for the bytes, `concat_and_cache_ds_mla_kernel` for the rule: max(amax / 448, FLT_MIN), value / scale |
| `dsa_mla` | 656 | SGLang 0.5.23 `dsa_quant_k_cache.py`: the same bytes, value * (1 / scale); an all-zero block there divides by 0, here its scale is 2^-126 |
| `dsa_index` | 132 | vLLM `indexer_k_quant_and_cache_kernel` and SGLang `dsa_index_k_cache.py`, `act_quant` with scale_fmt ue8m0: a page's codes, then its scales; max(amax, 1e-4) / 448, rounded up to a power of two |
| `v4` | 584 | vLLM `flashmla_sparse.py`: a page's codes and bfloat16 parts, then 8 scale bytes a token (7 used); the page is padded to a multiple of 576 |
| `v41` | 528 | the same file: a page's codes, then 16 scale bytes a token; padded to a multiple of 512 |
| `v41_fp4` | 288 | the same: 256 bytes of e2m1 pairs, then 32 e4m3 scales, one per 16 values; moved and not converted. An element here is a pair, so the model's latent is described with 256 |
| `uniform` | 512 | DeepSeek V4 in TensorRT-LLM: codes only, scale 1 |
| `inline4` | D + 4 | vLLM `fp8_per_token_head` (vllm-project/vllm#38378), `triton_reshape_and_cache_flash.py`: the scale right after a (token, head) row's codes; max(amax / 448, 1e-6), value * (1 / scale) |
| `inline16` | D + 16 | the same, rows padded to 16 bytes (flashinfer-ai/flashinfer#3617, #5164) |

`v4` and `v41` are rounded as `dsa_index` is: max(amax, 1e-4) / 448, up to a power of two, stored as its exponent (vLLM
`deepseek_v41/common/ops/cache_utils.py`). A record says nothing about the model: it fits a state whose arrays it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from regauge.errors import PresetError
from regauge.layout.dtypes import DTYPES, SCALE_DTYPES
from regauge.layout.spec import Component, Kind, Placement, Rule, Scale, State

INDEX_FLOOR = 1e-4 / 448


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a record. `dim` 0: as in the model."""

    dtype: str
    dim: int
    offset: int = 0
    """Bytes from the token's first byte to the first element."""
    scale: Scale | None = None
    """How codes are scaled, but not where stored scales lie: that depends on the page."""
    scale_offset: int = 0
    """Bytes from the token's first (of a page with scales apart: the token's first scale) byte to its first scale."""

    def scale_at(self, at: Placement) -> Scale | None:
        """Return the part's scale, stored there if it is stored."""
        if self.scale is None or self.scale.values is not None:
            return self.scale
        return msgspec.structs.replace(self.scale, at=at)


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of one token (of one head of it, where a part's `dim` is the model's)."""

    kinds: tuple[Kind, ...]
    parts: Mapping[str, Part]
    data: int
    """Bytes before the scales that lie apart; with a part of dim 0, bytes besides the codes."""
    scales: int = 0
    """Bytes of scales, after the data of all tokens of a page; 0: they are part of `data`, or there are none."""
    align: int = 1
    """Bytes of which a page takes a multiple."""


def _parts(**parts: Part) -> Mapping[str, Part]:
    return MappingProxyType(parts)


def _mla(rule: Rule) -> Record:
    latent = Part("float8_e4m3fn", 512, scale=Scale("block", block=128, rule=rule), scale_offset=512)
    return Record(("latent",), _parts(latent=latent, rope=Part("bfloat16", 64, 528)), data=656)


def _exponents(block: int) -> Scale:
    return Scale("block", block=block, dtype="float8_e8m0fnu", rule="divide", floor=INDEX_FLOOR, pow2=True)


def _row(padding: int) -> Record:
    part = Part("float8_e4m3fn", 0, scale=Scale("token_head", floor=1e-6))
    return Record(("attention", "window"), _parts(k=part, v=part), data=padding)


_INDEX = Scale("token_head", rule="divide", floor=INDEX_FLOOR, pow2=True)
_PAIRS = Scale("block", block=8, dtype="float8_e4m3fn")
_ONE = Scale("tensor", values=1.0, rule="divide")

RECORDS: Mapping[str, Record] = MappingProxyType(
    {
        "fp8_ds_mla": _mla("divide"),
        "dsa_mla": _mla("reciprocal"),
        "dsa_index": Record(("indexer",), _parts(index_k=Part("float8_e4m3fn", 128, scale=_INDEX)), 128, 4),
        "v4": Record(
            ("latent",),
            _parts(latent=Part("float8_e4m3fn", 448, scale=_exponents(64)), rope=Part("bfloat16", 64, 448)),
            data=576, scales=8, align=576),
        "v41": Record(("latent",), _parts(latent=Part("float8_e4m3fn", 512, scale=_exponents(32))), 512, 16, align=512),
        "v41_fp4": Record(("latent",), _parts(latent=Part("float4_e2m1fn_x2", 256, scale=_PAIRS)), 256, 32, align=512),
        "uniform": Record(("latent",), _parts(latent=Part("float8_e4m3fn", 512, scale=_ONE)), 512),
        "inline4": _row(4),
        "inline16": _row(16),
    }
)  # fmt: skip


def record_components(
    name: str, state: State, *, page_size: int, heads: Mapping[str, int], order: str, region: str
) -> list[Component]:
    """Return the components of a state whose pages consist of a record.

    `heads`: heads of each array on this rank. `order`: axes outside the page's own, such as `layer page`, or `page` where
    `region` has one region per layer. Rows of single heads (`inline4`) lie token by token and each component in a region of
    its own, `region` then having a `{name}`.

    Raises PresetError for an unknown record, and for a state that it does not fit.
    """
    if name not in RECORDS:
        raise PresetError(f"no record {name!r}; choose {', '.join(RECORDS)}", path="record")
    record = RECORDS[name]
    given = {key: part.dim or array.dim for key, array in state.arrays.items() if (part := record.parts.get(key))}
    if state.kind not in record.kinds or given != {key: array.dim for key, array in state.arrays.items()}:
        holds = ", ".join(f"{key} of {part.dim or 'any'} elements" for key, part in record.parts.items())
        keeps = ", ".join(f"{key} of {array.dim}" for key, array in state.arrays.items())
        raise PresetError(f"{name} holds {holds}; the model's {state.kind} state keeps {keeps}", path="record")
    return [
        _component(record, key, dim, heads[key], page_size, order, region.replace("{name}", key))
        for key, dim in given.items()
    ]


def _component(record: Record, key: str, dim: int, heads: int, page_size: int, order: str, region: str) -> Component:
    part = record.parts[key]
    row = record.data + (0 if part.dim else dim * DTYPES[part.dtype].itemsize)
    plain = page_size * row * (1 if part.dim else heads)
    page = -(-(plain + page_size * record.scales) // record.align) * record.align
    last = order.rsplit(maxsplit=1)[-1]
    if part.dim:
        axes, strides = "token dim", {"token": row}
    else:
        axes, strides = "token head dim", {"head": row}
    if page != plain:
        strides[last] = page
    at = Placement(f"{order} {axes}", region, part.offset, strides)
    return Component(key, part.dtype, heads, dim, at, _scale(record, part, dim, row, page_size, order, at))


def _scale(
    record: Record, part: Part, dim: int, row: int, page_size: int, order: str, codes: Placement
) -> Scale | None:
    axes = f"{order} token" if part.dim else f"{order} token head"
    offset = part.scale_offset + (0 if part.dim else dim)
    strides = {key: codes.strides[key] for key in codes.strides if key in order.split()}
    if record.scales:
        offset += page_size * record.data
        strides["token"] = record.scales
    else:
        strides |= {"token": row} if part.dim else {"head": row}
    if part.scale is not None and part.scale.per == "block":
        axes, strides["dim"] = f"{axes} dim", SCALE_DTYPES[part.scale.dtype]
    return part.scale_at(Placement(axes, codes.region, offset, strides))
