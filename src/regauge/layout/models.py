"""From a model's `config.json` to what its layers keep of a request. Facts only: no weights, no network.

Which layers keep what is read from the keys that Hugging Face configs use for it:

| key | says |
|---|---|
| `layer_types` | `full_attention`, `sliding_attention`, `linear_attention`, `indexed_attention` for each layer |
| `sliding_window`, `sliding_window_pattern` | Gemma 3: every n-th layer attends to all tokens, the others to the last `sliding_window` |
| `kv_lora_rank`, `qk_rope_head_dim` | MLA: full attention keeps a latent and a rotated part instead of K and V |
| `index_head_dim`, `indexer_types` / `index_topk_freq`, `index_skip_topk_offset` | sparse attention: which layers keep indexer keys |
| `full_attention_interval`, `linear_*` | gated delta net (Qwen3-Next, Qwen3.5) between every n-th layer of full attention |
| `linear_attn_config` | Kimi delta attention; its layer numbers count from 1 |
| `attn_type_list` | MiniMax-Text-01: 1 is full attention, 0 lightning attention |
| `no_rope_layers` | 0 for layers whose keys are not rotated |

Element order of recurrent arrays, per head: `conv_*` has the `kernel - 1` last inputs of channel 0, then of channel 1, ...;
`ssm_state` is [value dim, key dim] for delta nets and [key dim, value dim] for lightning attention, as the engines compute it.
A config with a key that changes what a layer keeps and is not in this list is refused by that key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from regauge.errors import PresetError
from regauge.layout.config import Config, language_model, read_config
from regauge.layout.spec import MAX_LAYERS, Array, Kind, Model, Rope, State, format_layers

_IN_A_FILE = "describe the layout in a file"
_UNKNOWN: Mapping[str, str] = MappingProxyType(
    {
        "compress_ratios": "compressed attention (DeepSeek V4)",
        "attention_chunk_size": "chunked attention (Llama 4)",
        "hybrid_override_pattern": "Mamba layers (Nemotron-H)",
        "layers_block_type": "Mamba layers",
        "attn_layer_period": "Mamba layers (Jamba)",
        "attn_layer_indices": "Mamba layers",
        "mamba_d_state": "Mamba layers",
        "mamba_state_dim": "Mamba layers",
        "ssm_state_size": "Mamba layers",
        "conv_L_cache": "short convolutions (LFM2)",
        "hybrid_layer_pattern": "window layers of another shape (MiMo)",
        "num_kv_shared_layers": "layers that share their keys (Gemma 3n, 4)",
        "cross_attention_layers": "cross-attention layers",
    }
)
_FULL, _WINDOW, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_DTYPE_KEYS, _STATE_KEYS = ("dtype", "torch_dtype"), ("mamba_ssm_dtype",)  # transformers 5 writes dtype
_WINDOW_EVERYWHERE = ("mistral", "mixtral")
_WINDOW_EVERY_OTHER = ("gpt_oss", "gemma2")


def attention_model(
    name: str, num_layers: int, k: Array, v: Array | None = None, *, rope: Rope | None = None, revision: str = ""
) -> Model:
    """Return a model all of whose layers attend to all tokens; `v` is as `k` unless given."""
    state = State("attention", format_layers(tuple(range(num_layers))), {"k": k, "v": v or k}, rope=rope)
    return Model(name, num_layers, [state], revision)


def model_from_config(config: Mapping[str, Any], *, name: str, revision: str = "") -> Model:
    """Return what a model's layers keep, from its Hugging Face config.

    Raises PresetError naming the key that is missing, wrong, or stands for a state that is not known here.
    """
    read = language_model(config)
    for key, what in _UNKNOWN.items():
        if read.get(key):
            raise read.error(key, f"{what}: this kind of attention state has no preset; {_IN_A_FILE}")
    if read.integer("index_kpool", 1, least=0) > 1:
        raise read.error("index_kpool", f"pooled indexer keys have no preset; {_IN_A_FILE}")
    num_layers = read.integer("num_hidden_layers", most=MAX_LAYERS)
    kinds = _kinds(read, _layer_types(read, num_layers))
    states: list[State] = []
    for kind in dict.fromkeys(kinds):
        layers = tuple(i for i, k in enumerate(kinds) if k == kind)
        if kind == "latent":
            states += _latent_states(read, layers, num_layers)
        elif kind == "recurrent":
            states.append(State("recurrent", format_layers(layers), _recurrent_arrays(read)))
        else:
            states += _attention_states(read, kind, layers, num_layers)
    return Model(name, num_layers, states, revision)


# -- which layer keeps what --------------------------------------------------------------------------------------------


def _layer_types(config: Config, n: int) -> list[str]:
    """Return the type of each layer, in the words of `layer_types`."""
    if config.get("layer_types") is not None:
        return [str(x) for x in config.each("layer_types", n)]
    if config.get("attn_type_list"):
        return [_FULL if x == 1 else _LINEAR for x in config.each("attn_type_list", n)]
    if config.get("linear_attn_config"):
        return _kimi_types(config.mapping("linear_attn_config"), n)
    if config.get("linear_num_value_heads"):
        interval = config.integer("full_attention_interval", 4)
        return [_LINEAR if (i + 1) % interval else _FULL for i in range(n)]
    if config.get("sliding_window") and config.flag("use_sliding_window", default=True):
        return _window_types(config, n)
    return [_FULL] * n


def _kimi_types(linear: Config, n: int) -> list[str]:
    types: list[str] = [""] * n
    for key, name in (("full_attn_layers", _FULL), ("kda_layers", _LINEAR)):
        for number in linear.items(key):
            if not isinstance(number, int) or not 1 <= number <= n:
                raise linear.error(key, f"there is no layer {number!r} of {n}")
            types[number - 1] = name
    if "" in types:
        raise PresetError(
            f"layer {types.index('') + 1} is in neither full_attn_layers nor kda_layers", path=linear.path
        )
    return types


def _window_types(config: Config, n: int) -> list[str]:
    kind = config.get("model_type")
    key = config.first("sliding_window_pattern", "_sliding_window_pattern")
    if key is not None or kind == "gemma3_text":
        # Gemma 3: 6 as transformers does for configs that were written before the key was.
        pattern = config.integer(key or "sliding_window_pattern", 6)
        return [_WINDOW if (i + 1) % pattern else _FULL for i in range(n)]
    if kind in _WINDOW_EVERY_OTHER:
        return [_FULL if i % 2 else _WINDOW for i in range(n)]
    if config.get("use_sliding_window") and config.get("max_window_layers") is not None:
        full = config.integer("max_window_layers", least=0)
        return [_WINDOW if i >= full else _FULL for i in range(n)]
    if kind in _WINDOW_EVERYWHERE:
        return [_WINDOW] * n
    raise config.error("sliding_window", "the config does not say which layers have the window: add layer_types, full_attention or "
                       f"sliding_attention for each layer, or {_IN_A_FILE}")  # fmt: skip


def _kinds(config: Config, types: Sequence[str]) -> tuple[Kind, ...]:
    latent = bool(config.get("kv_lora_rank"))
    known: dict[str, Kind] = {_FULL: "latent" if latent else "attention", _LINEAR: "recurrent"}
    if latent:
        known |= {"indexed_attention": "latent", "deepseek_sparse_attention": "latent"}
    else:
        known[_WINDOW] = "window"
    for name in types:
        if name not in known:
            raise config.error(
                "layer_types",
                f"layers of {name!r} have no preset here; known are {', '.join(known)}: {_IN_A_FILE}",
            )
    return tuple(known[name] for name in types)


# -- what each kind keeps ----------------------------------------------------------------------------------------------


def _attention_states(config: Config, kind: Kind, layers: tuple[int, ...], n: int) -> list[State]:
    heads = config.integer("num_attention_heads")
    h, k = config.integer("num_key_value_heads", heads), _head_dim(config, heads)
    arrays = {"k": Array(h, k), "v": Array(h, config.integer("v_head_dim", k))}
    window = config.integer("sliding_window") if kind == "window" else 0
    rope = _rope(config, k, interleaved=config.flag("rope_interleave", default=False), window=kind == "window")
    unrotated = _unrotated(config, n)
    parts = [(tuple(x for x in layers if x not in unrotated), rope), (tuple(x for x in layers if x in unrotated), None)]
    return [State(kind, format_layers(ids), arrays, window, r) for ids, r in parts if ids]


def _head_dim(config: Config, heads: int) -> int:
    if config.get("head_dim") is not None:
        return config.integer("head_dim")
    return config.integer("hidden_size", least=heads) // heads


def _unrotated(config: Config, n: int) -> frozenset[int]:
    """Return the layers whose keys are not rotated (SmolLM3)."""
    if config.get("no_rope_layers"):
        flags = config.each("no_rope_layers", n)
        if any(flag not in (0, 1) for flag in flags):
            raise config.error("no_rope_layers", "expected 0 or 1 for each layer")
        return frozenset(i for i, flag in enumerate(flags) if not flag)
    if config.get("no_rope_layer_interval"):
        interval = config.integer("no_rope_layer_interval")
        return frozenset(range(interval - 1, n, interval))
    return frozenset()


def _latent_states(config: Config, layers: tuple[int, ...], n: int) -> list[State]:
    rank, rotated = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", 0, least=0)
    arrays = {"latent": Array(1, rank)}
    if rotated:
        arrays["rope"] = Array(1, rotated)
    nope = config.flag("mla_use_nope", default=False) or not rotated
    # DeepSeek's checkpoints pair neighbours; transformers' key for it says so by default too.
    interleaved = config.flag("rope_interleave", default=True)
    rope = None if nope else _rope(config, rotated, interleaved=interleaved)
    states = [State("latent", format_layers(layers), arrays, rope=rope)]
    if config.get("index_head_dim"):
        ids = _indexer_layers(config, layers, n)
        # The indexer's rotated part is its first qk_rope_head_dim elements, in halves unless the config says neighbours.
        neighbours = config.flag("indexer_rope_interleave", default=False)
        turned = None if nope else _rope(config, rotated, interleaved=neighbours)
        keys = {"index_k": Array(1, config.integer("index_head_dim"))}
        states.append(State("indexer", format_layers(ids), keys, rope=turned))
    return states


def _indexer_layers(config: Config, layers: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Return the layers that keep indexer keys; the others reuse the choice of the layer before (GLM-5.2)."""
    key = config.first("indexer_types", "index_topk_pattern")
    if key is not None:
        full = [x in ("full", "F") for x in config.each(key, n)]
    else:
        freq, offset = config.integer("index_topk_freq", 1), config.integer("index_skip_topk_offset", 2, least=0)
        full = [max(i - offset + 1, 0) % freq == 0 for i in range(n)]
    kept = tuple(x for x in layers if full[x])
    if not kept:
        raise config.error(key or "index_topk_freq", "no layer keeps indexer keys")
    return kept


def _recurrent_arrays(config: Config) -> dict[str, Array]:
    if config.get("linear_num_value_heads"):
        keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
        key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
        kernel = config.integer("linear_conv_kernel_dim", least=2)
    elif config.get("linear_attn_config"):
        linear = config.mapping("linear_attn_config")
        keys = values = linear.integer("num_heads")
        key_dim = value_dim = linear.integer("head_dim")
        kernel = linear.integer("short_conv_kernel_size", least=2)
    elif config.get("attn_type_list") or str(config.get("model_type")).startswith("minimax"):
        heads = config.integer("num_attention_heads")
        return {"ssm_state": Array(heads, _head_dim(config, heads) ** 2)}
    else:
        raise config.error(
            "layer_types", f"the shape of its linear attention is not in linear_* or linear_attn_config: {_IN_A_FILE}"
        )
    past = kernel - 1
    return {
        "conv_q": Array(keys, key_dim * past),
        "conv_k": Array(keys, key_dim * past),
        "conv_v": Array(values, value_dim * past),
        "ssm_state": Array(values, value_dim * key_dim),
    }


def _rope(config: Config, head_dim: int, *, interleaved: bool, window: bool = False) -> Rope | None:
    # transformers 5 writes rope_parameters, per type of layer where they differ; earlier releases rope_theta and rope_scaling.
    key = config.first("rope_parameters", "rope_scaling")
    parameters = config.mapping(key) if key is not None else Config({})
    theta = config.number("rope_theta")
    own = _WINDOW if window else _FULL
    if parameters.get(own) is not None:
        parameters = parameters.mapping(own)
    elif window and config.get("rope_local_base_freq") is not None:
        # Gemma 3: its window layers rotate by another base and unscaled
        parameters, theta = Config({}), config.number("rope_local_base_freq")
    theta = parameters.number("rope_theta") or theta
    if theta is None:
        return None
    partial = parameters.number("partial_rotary_factor", most=1.0) or config.number("partial_rotary_factor", most=1.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    others = parameters.rest(("rope_theta", "partial_rotary_factor", "rope_type", "type"))
    scaling = "" if kind == "default" else json.dumps({"rope_type": kind, **others}, sort_keys=True)
    latent = bool(config.get("kv_lora_rank"))  # there head_dim is that of the rotated part, all of it rotated
    dim = head_dim if latent else config.integer("rotary_dim", int(head_dim * (partial or 1.0)), most=head_dim)
    return Rope(theta=theta, dim=dim, interleaved=interleaved, scaling=scaling)


# -- what a config says of a model -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Described:
    """What a config says."""

    model: Model
    dtype: str
    """That the model computes in; empty: it does not say."""
    state_dtype: str
    """That it wants recurrent states in; empty: it does not say."""


def load_described(source: str) -> Described:
    """Return what the config of a Hugging Face folder, a config.json, or a shipped name says. Raises PresetError if it is none."""
    config, name = read_config(source)
    return Described(model_from_config(config, name=name), _dtype(config, *_DTYPE_KEYS), _dtype(config, *_STATE_KEYS))


def load_model(source: str) -> Model:
    """Return the model alone. Raises as `load_described`."""
    config, name = read_config(source)
    return model_from_config(config, name=name)


def _dtype(config: Mapping[str, Any], *keys: str) -> str:
    found = (part.get(key) for part in (Config(config), language_model(config)) for key in keys)
    return next((str(value) for value in found if value), "")
