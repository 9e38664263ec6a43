"""The layouts of the conformance suite: what engines really start with, every array of its real size.

Each line is the flags of an engine, or a short form for the embedded one, as `regauge layout` reads them, and some words more:
`tp=N`, `pp=N` and `cp=N` stand for all ranks of that many, and `calibrated` for a checkpoint with a scale per layer for K and
another for V (on gfx94x, as its engines do, twice that). Only the number of layers is cut, to whole periods of the
model's pattern: what a layer's bytes mean does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from regauge.errors import LayoutError
from regauge.layout.engines import PREFIX
from regauge.layout.presets import from_short, load_described, load_layout
from regauge.layout.spec import Component, Group, Layout, Model, Shard, format_layers

_ATTENTION = (
    "engine:vllm,pool=LBHNC",
    "engine:vllm,pool=LBHNC,tp=4",
    "engine:vllm,pool=LBNHC,page=32,tp=2",
    "engine:vllm,pool=LHBNC",
    "engine:vllm,pool=BLHNC,page=64,pp=2",
    "engine:vllm,pool=BLNHC,tp=2,pp=2",
    "engine:vllm,pool=BHLNC,page=48",
    "engine:vllm,pool=B2NHC,tp=8",
    "engine:vllm,pool=LBNHC,tp=8,cp=2,stripe=16",
    "engine:vllm,pool=cpu,page=32,model-dtype=float32",
    "engine:vllm,pool=cpu,tp=2",
    "engine:vllm,pool=LBHNC,page=128,model-dtype=float16",
    "engine:vllm,pool=B2NHC,dtype=fp8,calibrated",
    "engine:vllm,pool=LBHNC,dtype=fp8_e5m2,tp=2",
    "engine:vllm,pool=LBNHC,dtype=fp8,platform=gfx94x,calibrated",
    "engine:vllm,pool=B2NHC,dtype=fp8_per_token_head,tp=2",
    "engine:sglang",
    "engine:sglang,page=64,tp=4",
    "engine:sglang,page=64,platform=musa,dtype=fp8_e4m3,calibrated,tp=2",
    "engine:sglang,pool=hnd,page=32",
    "engine:sglang,pool=vectorized_5d,tp=2",
    "engine:sglang,pool=vectorized_5d,dtype=fp8_e4m3,platform=gfx95x",
    "engine:sglang,pool=vectorized_5d,dtype=fp8_e4m3,platform=gfx94x,calibrated,tp=4",
    "engine:sglang,page=16,dtype=fp8_e5m2,pp=2",
    "engine:sglang,pool=layer_first,page=16",
    "engine:sglang,pool=page_first,tp=2",
    "engine:sglang,pool=page_first_direct,page=64,dtype=fp8_e4m3",
    "engine:sglang,pool=page_head,page=32,tp=4",
    "fp32,page=24",
    "bf16,kt,page=20,page-first",
    "fp16,hnd,fused,page=7",
    "int8,scale=token_head,page=32,tp=2",
    "int8,scale=head,hnd",
    "int8,scale=head,page=20,tp=2,calibrated",
    "fp8_e4m3,scale=block,block=64,rule=divide",
    "fp8_e4m3fnuz,scale=token_head,kt",
    "record:inline16,page=16",
)
_FEW = (
    "engine:vllm,pool=LBHNC,tp=8",
    "engine:vllm,pool=B2NHC,dtype=fp8_per_token_head,page=32",
    "engine:sglang,page=64,tp=4,dtype=fp8_e4m3",
    "engine:sglang,pool=page_first_direct,page=64",
)
_LATENT = (
    "engine:vllm",
    "engine:vllm,pool=BLNHC,page=32,tp=2",
    "engine:vllm,dtype=fp8,calibrated,tp=4",
    "engine:vllm,tp=4,cp=4,stripe=8",
    "engine:vllm,pool=cpu,page=16,model-dtype=float32",
    "engine:sglang,tp=2",
    "engine:sglang,page=64,platform=musa,dtype=fp8_e4m3",
    "engine:sglang,pool=layer_first,page=16",
    "engine:sglang,pool=page_first,page=32",
    "engine:sglang,pool=page_first_direct,page=64,pp=2",
    "engine:sglang,tp=2,cp=2",
    "fp16,fused,page=24",
    "fp8_e4m3fnuz,scale=tensor,page-first",
    "int8,scale=block,block=128,page=40",
)
_SPARSE = (
    "engine:vllm",
    "engine:vllm,dtype=fp8_ds_mla,tp=2",
    "engine:vllm,dtype=fp8,record=raw,page=32",
    "engine:sglang",
    "engine:sglang,dtype=fp8_e4m3,tp=4",
    "engine:sglang,dtype=fp8_e4m3,record=raw,calibrated,pp=2",
    "engine:sglang,platform=gfx95x,page=16,dtype=fp8_e4m3",
    "engine:sglang,pool=layer_first,dtype=fp8_e4m3",
    "engine:sglang,pool=page_first",
    "engine:sglang,pool=page_first_direct,dtype=fp8_e4m3",
    "bf16,page=20",
    "record:fp8_ds_mla,record:dsa_index,page=24,page-first",
    "fp8_e4m3,scale=block,block=32",
)
_WINDOW = (
    "engine:vllm,pool=LBHNC",
    "engine:vllm,pool=LBNHC,page=32,tp=4",
    "engine:vllm,pool=BLNHC,dtype=fp8,calibrated,tp=2",
    "engine:vllm,pool=LBHNC,dtype=fp8_per_token_head",
    "engine:sglang,tp=2",
    "engine:sglang,page=64,tp=8,dtype=fp8_e4m3",
    "engine:sglang,pool=hnd,page=16,pp=2",
    "fp32,kt,page=24",
    "int8,scale=token_head,hnd",
)
_WIDE_WINDOW = ("engine:vllm,pool=LBHNC,tp=4", "engine:sglang,page=64,tp=2,dtype=fp8_e4m3", "fp16,page=24,page-first")
_DELTA = (
    "engine:vllm,pool=LBHNC,ssm-dtype=float32",
    "engine:vllm,pool=LBNHC,ssm-dtype=float32,tp=2",
    "engine:vllm,pool=BLNHC,ssm-dtype=bfloat16,dtype=fp8,tp=4",
    "engine:sglang",
    "engine:sglang,page=64,tp=2,dtype=fp8_e4m3",
    "engine:sglang,pool=hnd,page=16,ssm-dtype=bfloat16,tp=8",
    "engine:sglang,page=32,pp=2",
    "bf16,page=24,state=fp16",
)
_KIMI = (
    "engine:vllm",
    "engine:vllm,tp=4",
    "engine:sglang,page=64,tp=2",
    "engine:sglang,dtype=fp8_e4m3,ssm-dtype=bfloat16",
    "fp16,page=24,page-first",
)

FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qwen3-30b-a3b": _ATTENTION,
        "llama-3.1-8b": _FEW,
        "minimax-m2": _FEW,
        "smollm2-135m-instruct": ("engine:vllm,pool=LBHNC,page=32,tp=3", "engine:sglang,page=16", "fp32,page=16"),
        "deepseek-v3": _LATENT,
        "kimi-k2": _LATENT[:2],
        "glm-5": _SPARSE,
        "glm-5.2": _SPARSE[1:5:2],
        "deepseek-v3.2": _SPARSE[3:5],
        "gpt-oss-20b": _WINDOW,
        "gemma-3-4b": _WIDE_WINDOW,
        "qwen3-next-80b-a3b": _DELTA,
        "kimi-linear-48b-a3b": _KIMI,
    }
)
"""Forms of each model, by the name that ships with the package."""

_LAYERS: Mapping[str, int] = MappingProxyType(
    {"glm-5.2": 7, "gpt-oss-20b": 4, "gemma-3-4b": 6, "qwen3-next-80b-a3b": 4, "kimi-linear-48b-a3b": 4}
)
"""Layers that are left of a model; 2 of others."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One layout of the catalogue, all ranks of it."""

    model: str
    form: str

    @property
    def name(self) -> str:
        """Model and form."""
        return f"{self.model} {self.form.removeprefix(PREFIX)}"


def entries() -> list[Entry]:
    """Return the catalogue in order."""
    return [Entry(model, form) for model, forms in FORMS.items() for form in forms]


def build(entry: Entry) -> list[Layout]:
    """Return the layouts of all ranks of an entry, symbolic. Raises LayoutError for a form that is wrong."""
    told = load_described(entry.model)
    model = shortened(told.model, _LAYERS.get(entry.model, 2))
    parts = [part.strip() for part in entry.form.split(",")]
    checkpoint = "calibrated" in parts
    form = ",".join(part for part in parts if part != "calibrated")
    layouts = all_ranks(form, model, told.dtype or "bfloat16", told.state_dtype)
    return [calibrated(layout) if checkpoint else layout for layout in layouts]


def all_ranks(form: str, model: Model, model_dtype: str = "", ssm_dtype: str = "") -> list[Layout]:
    """Return the layouts of all tensor-, context- and pipeline-parallel ranks of a form, as in `engine:vllm,tp=4,pp=2`.

    A short form takes `tp=N` too. Raises LayoutError naming the part that is wrong.
    """
    parts = [part.strip() for part in form.split(",")]
    tp, pp = _count(parts, "tp"), _count(parts, "pp")
    if form.startswith(PREFIX):
        return [
            load_layout(f"{form},rank={rank},pp-rank={stage}", model, model_dtype=model_dtype, ssm_dtype=ssm_dtype)
            for stage in range(pp)
            for rank in range(tp)
        ]
    short = ",".join(part for part in parts if not part.startswith("tp="))
    return [from_short(short, model, shard=Shard(rank, tp)) for rank in range(tp)]


def _count(parts: list[str], key: str) -> int:
    value = next((part.removeprefix(f"{key}=") for part in parts if part.startswith(f"{key}=")), "1")
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise LayoutError(f"{value!r} is no number of ranks from 1 to 1024", path=key)
    return int(value)


def shortened(model: Model, layers: int) -> Model:
    """Return the model with its first layers only; what they keep is as it was."""
    states = []
    for state in model.states:
        kept = tuple(x for x in state.layer_ids if x < layers)
        if kept:
            states.append(msgspec.structs.replace(state, layers=format_layers(kept)))
    return msgspec.structs.replace(model, num_layers=min(layers, model.num_layers), states=states)


def calibrated(layout: Layout) -> Layout:
    """Return the layout with a checkpoint's constant scales instead of 1.0: by layer and array, and by head where it has them."""

    def change(group: Group, index: int) -> Component:
        c = group.components[index]
        if c.scale is None or c.scale.at is not None:
            return c
        unit = 0.0137 * (index + 1) * (2.0 if c.dtype == "float8_e4m3fnuz" else 1.0)
        values: list[float | list[float]] = [unit * (layer + 3) for layer in group.layer_ids]
        if c.scale.per == "head":
            values = [[unit * (layer + 3) * (head + 2) for head in layout.heads(group, c)] for layer in group.layer_ids]
        return msgspec.structs.replace(c, scale=msgspec.structs.replace(c.scale, values=values))

    groups = [
        msgspec.structs.replace(g, components=[change(g, i) for i in range(len(g.components))]) for g in layout.groups
    ]
    return msgspec.structs.replace(layout, groups=groups)
