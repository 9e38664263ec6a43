"""Layouts from what an engineer has at hand: a Hugging Face `config.json` and a short form such as `fp8_e4m3,page=64,hnd`.

Short form, comma-separated, in any order:

| part | meaning | default |
|---|---|---|
| dtype | `bf16`, `fp16`, `fp32`, `fp8_e4m3`, `fp8_e4m3fnuz`, `fp8_e5m2`, `int8` or torch's name | required |
| `page=N` | tokens per page | 16 |
| `nhd` `hnd` `kt` | page is token-head-dim; head-token-dim; as `hnd` with K transposed to head-dim-token | `nhd` |
| `split` `fused` | K and V in two tensors, or in one with a `kv` axis outside the page's own | `split` |
| `layer-first` `page-first` | which of the two is outermost in memory | `layer-first` |
| `scale=none` `scale=tensor` `scale=head` `scale=token_head` | float32 factors of an 8-bit cache | `none` |

An engine's flags are a form of their own, `engine:sglang,pool=hnd,page=64`: see `regauge.layout.engines`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from regauge.errors import LayoutError, PresetError
from regauge.layout.dtypes import ALIASES, DTYPES, canonical
from regauge.layout.engines import PREFIX, attention_arrays, from_engine_form
from regauge.layout.files import decode
from regauge.layout.spec import Array, Component, Group, Layout, Model, Per, Placement, Rope, Scale, Shard, State
from regauge.layout.validate import validate
from regauge.layout.view import check_memory

_PAGE_AXES = {
    "nhd": ("token head dim", "token head dim"),
    "hnd": ("head token dim", "head token dim"),
    "kt": ("head dim token", "head token dim"),
}


def model_from_config(config: Mapping[str, Any], *, name: str, revision: str = "") -> Model:
    """Build the model part from a Hugging Face config. Raises PresetError naming the key that is missing or unsupported."""
    config = config.get("text_config", config)
    for key in ("kv_lora_rank", "linear_num_value_heads", "sliding_window_pattern"):
        if config.get(key):
            raise PresetError(
                "this kind of attention state has no preset; describe the layout in a file", path=f"config.{key}"
            )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        raise PresetError(
            "sliding-window layers have no preset; describe the layout in a file", path="config.sliding_window"
        )
    heads = _integer(config, "num_attention_heads")
    head_dim = config.get("head_dim") or _integer(config, "hidden_size") // heads
    layers = _integer(config, "num_hidden_layers")
    kv = Array(int(config.get("num_key_value_heads") or heads), int(head_dim))
    rope = _rope(config, int(head_dim))
    return attention_model(name, layers, kv, rope=rope, revision=revision)


def attention_model(
    name: str, num_layers: int, k: Array, v: Array | None = None, *, rope: Rope | None = None, revision: str = ""
) -> Model:
    """Return a model all of whose layers attend to all tokens; `v` is as `k` unless given."""
    state = State("attention", f"0-{num_layers - 1}", {"k": k, "v": v or k}, rope=rope)
    return Model(name, num_layers, [state], revision)


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope | None:
    # transformers 5 writes rope_parameters; earlier releases wrote rope_theta and rope_scaling.
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or config.get("rope_theta")
    if theta is None:
        return None
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    scaling = "" if kind == "default" else json.dumps({"rope_type": kind, **parameters}, sort_keys=True)
    return Rope(
        theta=float(theta),
        dim=int(config.get("rotary_dim") or head_dim * partial),
        interleaved=bool(config.get("rope_interleaved", False)),
        scaling=scaling,
    )


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise PresetError(f"expected a positive integer, found {value!r}", path=f"config.{key}")
    return value


def shipped_models() -> list[str]:
    """Return the names of the models whose geometry comes with the package."""
    folder = resources.files("regauge.layout") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_model(source: str) -> Model:
    """Return the model of a Hugging Face folder, a config.json, or a shipped name. Raises PresetError if it is none."""
    config, name = _read_config(source)
    return model_from_config(config, name=name)


def load_model_dtype(source: str) -> str:
    """Return the dtype that a model's config says it computes in, "" where it says none. Raises as `load_model`."""
    config, _ = _read_config(source)
    for part in (config, config.get("text_config") or {}):
        if found := part.get("dtype") or part.get("torch_dtype"):  # transformers 5; earlier
            return str(found)
    return ""


def _read_config(source: str) -> tuple[dict[str, Any], str]:
    """Return a model's config and name."""
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        text, name = path.read_text(), path.resolve().parent.name
    elif source in shipped_models():
        text, name = (resources.files("regauge.layout") / "configs" / f"{source}.json").read_text(), source
    else:
        raise PresetError(
            f"{source!r} is no folder with a config.json and no shipped model; shipped are {', '.join(shipped_models())}",
            path="model")  # fmt: skip
    try:
        config = json.loads(text)
    except ValueError as error:
        raise PresetError(f"{path} is not JSON: {error}", path="model") from error
    if not isinstance(config, dict):
        raise PresetError(f"{path} is not a JSON object", path="model")
    return config, name


def from_short(text: str, model: Model, *, shard: Shard | None = None, pages: int = 0) -> Layout:
    """Build a layout of all of the model's layers from a short form. Raises LayoutError naming the part that is wrong."""
    shard = shard or Shard()
    o = _parse(text)
    scale = _scale(o["scale"])
    if scale is not None and not DTYPES[o["dtype"]].takes_scales:
        raise LayoutError(f"{o['dtype']} needs no scale", path="scale")
    arrays = attention_arrays(model)
    components = []
    for index, (name, (total, dim)) in enumerate(arrays.items()):
        page = _PAGE_AXES[o["order"]][index]
        outer = "layer page" if o["pool"] == "layer-first" else "page layer"
        fused = o["tensors"] == "fused"
        region = "kv" if fused else name
        at = Placement(order=f"{outer} kv {page}" if fused else f"{outer} {page}", region=region)
        if scale is not None and scale.per == "token_head":
            inner = "token head" if o["order"] == "nhd" else "head token"
            stored = Placement(order=f"{outer} {inner}", region=f"{name}_scale")
            scale = Scale(per="token_head", at=stored, rule=scale.rule)
        heads = len(shard.heads(total))
        components.append(Component(name=name, dtype=o["dtype"], heads=heads, dim=dim, at=at, scale=scale))
    if o["tensors"] == "fused" and arrays["k"] != arrays["v"]:
        raise LayoutError("K and V of different head dim cannot share one tensor", path="fused")
    group = Group(
        kind="attention",
        layers=f"0-{model.num_layers - 1}",
        page_size=int(o["page"]),
        components=components,
        pages=pages,
    )
    return validate(Layout(model=model, groups=[group], shard=shard))


def with_pages(layout: Layout, tokens: int) -> Layout:
    """Return the layout with enough pages for so many tokens in every group that does not say how many it has."""
    groups = [g if g.pages else msgspec.structs.replace(g, pages=-(-tokens // g.page_size)) for g in layout.groups]
    return msgspec.structs.replace(layout, groups=groups)


def load_layout(text: str, model: Model | None, *, model_dtype: str = "") -> Layout:
    """Return the layout in a file (`.toml` or `.json`), or of a short form or an engine's flags for `model`.

    `model_dtype` is what an engine's `--kv-cache-dtype auto` stands for.

    Raises LayoutError that names the file or part, also for a file whose elements overlap, and for a short form without a model.
    """
    path = Path(text)
    if path.suffix in (".toml", ".json"):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LayoutError(f"cannot be read: {error.strerror}", path=text) from error
        try:
            return check_memory(decode(data, format="toml" if path.suffix == ".toml" else "json"))
        except LayoutError as error:
            raise LayoutError(str(error), path=text) from error
    if model is None:
        raise LayoutError("is a short form, which needs a model: add --model", path=text)
    if text.startswith(PREFIX):
        return from_engine_form(text, model, model_dtype=model_dtype)
    return from_short(text, model)


def _parse(text: str) -> dict[str, str]:
    parts = {"page": "16", "order": "nhd", "tensors": "split", "pool": "layer-first", "scale": "none"}
    choices = {**dict.fromkeys(_PAGE_AXES, "order"), "split": "tensors", "fused": "tensors",
               "layer-first": "pool", "page-first": "pool"}  # fmt: skip
    seen: set[str] = set()
    for raw in text.split(","):
        part = raw.strip().lower()
        key, equals, value = part.partition("=")
        if dtype := canonical(part):
            key, value = "dtype", dtype
        elif part in choices:
            key, value = choices[part], part
        elif not equals or key not in ("page", "scale"):
            known = ", ".join((*ALIASES, *choices, "page=N", "scale=none|tensor|head|token_head"))
            raise LayoutError(f"cannot read {part!r}; the parts of a short form are {known}", path=text)
        if key in seen:
            raise LayoutError(f"{key} is given twice", path=text)
        seen.add(key)
        parts[key] = value
    if "dtype" not in parts:
        raise LayoutError("a short form names a dtype, such as bf16 or fp8_e4m3", path=text)
    if not parts["page"].isdigit() or not 1 <= int(parts["page"]) <= 65_536:
        raise LayoutError(f"page={parts['page']} is not a number of tokens", path=text)
    return parts


def _scale(text: str) -> Scale | None:
    pers: dict[str, Per | None] = {
        "none": None,
        "tensor": "tensor",
        "head": "head",
        "token_head": "token_head",
        "token-head": "token_head",
    }
    if text not in pers:
        raise LayoutError(f"scale={text}: choose none, tensor, head or token_head", path="scale")
    per = pers[text]
    if per is None:
        return None
    # `at` of token_head scales is filled in by the caller, who knows the component.
    return Scale(per=per, values=None if per == "token_head" else 1.0)
