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
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from regauge.errors import PresetError
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
    config = _text(config)
    for key, what in _UNKNOWN.items():
        if config.get(key):
            raise PresetError(f"{what}: this kind of attention state has no preset; {_IN_A_FILE}", path=f"config.{key}")
    if (config.get("index_kpool") or 1) != 1:
        raise PresetError(f"pooled indexer keys have no preset; {_IN_A_FILE}", path="config.index_kpool")
    num_layers = _integer(config, "num_hidden_layers", MAX_LAYERS)
    kinds = _kinds(config, _layer_types(config, num_layers))
    states: list[State] = []
    for kind in dict.fromkeys(kinds):
        layers = tuple(i for i, k in enumerate(kinds) if k == kind)
        if kind == "latent":
            states += _latent_states(config, layers)
        elif kind == "recurrent":
            states.append(State("recurrent", format_layers(layers), _recurrent_arrays(config)))
        else:
            states += _attention_states(config, kind, layers)
    return Model(name, num_layers, states, revision)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config."""
    part = config.get("text_config")
    return part if isinstance(part, Mapping) else config


def _integer(config: Mapping[str, Any], key: str, most: int = 1 << 24) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise PresetError(f"expected a positive integer, found {value!r}", path=f"config.{key}")
    return value


# -- which layer keeps what --------------------------------------------------------------------------------------------


def _layer_types(config: Mapping[str, Any], n: int) -> list[str]:
    """Return the type of each layer, in the words of `layer_types`."""
    if "layer_types" in config and config["layer_types"] is not None:
        return [str(x) for x in _list(config, "layer_types", n)]
    if config.get("attn_type_list"):
        return [_FULL if x == 1 else _LINEAR for x in _list(config, "attn_type_list", n)]
    if config.get("linear_attn_config"):
        return _kimi_types(config, n)
    if config.get("linear_num_value_heads"):
        interval = _integer(config, "full_attention_interval") if "full_attention_interval" in config else 4
        return [_LINEAR if (i + 1) % interval else _FULL for i in range(n)]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return _window_types(config, n)
    return [_FULL] * n


def _list(config: Mapping[str, Any], key: str, n: int) -> Sequence[Any]:
    value = config[key]
    if not isinstance(value, list) or len(value) != n:
        raise PresetError(f"expected one entry for each of {n} layers", path=f"config.{key}")
    return value


def _kimi_types(config: Mapping[str, Any], n: int) -> list[str]:
    linear = config["linear_attn_config"]
    if not isinstance(linear, Mapping):
        raise PresetError("expected an object", path="config.linear_attn_config")
    types: list[str] = [""] * n
    for key, name in (("full_attn_layers", _FULL), ("kda_layers", _LINEAR)):
        for number in linear.get(key) or ():
            if not isinstance(number, int) or not 1 <= number <= n:
                raise PresetError(f"there is no layer {number!r} of {n}", path=f"config.linear_attn_config.{key}")
            types[number - 1] = name
    if "" in types:
        raise PresetError(f"layer {types.index('') + 1} is in neither full_attn_layers nor kda_layers",
                          path="config.linear_attn_config")  # fmt: skip
    return types


def _window_types(config: Mapping[str, Any], n: int) -> list[str]:
    kind = config.get("model_type")
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if pattern is None and kind == "gemma3_text":
        pattern = 6  # as transformers does for configs that were written before the key was
    if pattern is not None:
        if not isinstance(pattern, int) or pattern < 1:
            raise PresetError(f"expected a positive integer, found {pattern!r}", path="config.sliding_window_pattern")
        return [_WINDOW if (i + 1) % pattern else _FULL for i in range(n)]
    if kind in _WINDOW_EVERY_OTHER:
        return [_FULL if i % 2 else _WINDOW for i in range(n)]
    if config.get("use_sliding_window") and isinstance(config.get("max_window_layers"), int):
        return [_WINDOW if i >= config["max_window_layers"] else _FULL for i in range(n)]
    if kind in _WINDOW_EVERYWHERE:
        return [_WINDOW] * n
    raise PresetError(
        "the config does not say which layers have the window: add layer_types, full_attention or sliding_attention for each "
        f"layer, or {_IN_A_FILE}", path="config.sliding_window")  # fmt: skip


def _kinds(config: Mapping[str, Any], types: Sequence[str]) -> tuple[Kind, ...]:
    latent = bool(config.get("kv_lora_rank"))
    known: dict[str, Kind] = {_FULL: "latent" if latent else "attention", _LINEAR: "recurrent"}
    if latent:
        known |= {"indexed_attention": "latent", "deepseek_sparse_attention": "latent"}
    else:
        known[_WINDOW] = "window"
    for name in types:
        if name not in known:
            raise PresetError(f"layers of {name!r} have no preset here; known are {', '.join(known)}: {_IN_A_FILE}",
                              path="config.layer_types")  # fmt: skip
    return tuple(known[name] for name in types)


# -- what each kind keeps ----------------------------------------------------------------------------------------------


def _attention_states(config: Mapping[str, Any], kind: Kind, layers: tuple[int, ...]) -> list[State]:
    swa = "swa_" if kind == "window" and config.get("swa_head_dim") else ""
    heads = _integer(config, "num_attention_heads")
    head_dim = config.get(f"{swa}head_dim") or _integer(config, "hidden_size") // heads
    kv_heads = config.get(f"{swa}num_key_value_heads") or config.get("num_key_value_heads") or heads
    sizes = {
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": config.get(f"{swa}v_head_dim") or head_dim,
    }
    h, k, v = (_integer(sizes, key) for key in sizes)
    arrays = {"k": Array(h, k), "v": Array(h, v)}
    window = _integer(config, "sliding_window") if kind == "window" else 0
    rope = _rope(config, k, interleaved=bool(config.get("rope_interleave", False)), window=kind == "window")
    unrotated = _unrotated(config)
    parts = [(tuple(x for x in layers if x not in unrotated), rope), (tuple(x for x in layers if x in unrotated), None)]
    return [State(kind, format_layers(ids), arrays, window, r) for ids, r in parts if ids]


def _unrotated(config: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers whose keys are not rotated (SmolLM3)."""
    flags, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval")
    if flags:
        return frozenset(i for i, flag in enumerate(flags) if not flag)
    if interval:
        return frozenset(range(interval - 1, config["num_hidden_layers"], interval))
    return frozenset()


def _latent_states(config: Mapping[str, Any], layers: tuple[int, ...]) -> list[State]:
    rank, rotated = _integer(config, "kv_lora_rank"), config.get("qk_rope_head_dim") or 0
    arrays = {"latent": Array(1, rank)}
    if rotated:
        arrays["rope"] = Array(1, _integer(config, "qk_rope_head_dim"))
    nope = bool(config.get("mla_use_nope")) or not rotated
    # DeepSeek's checkpoints pair neighbours; transformers' key for it says so by default too.
    interleaved = bool(config.get("rope_interleave", True))
    rope = None if nope else _rope(config, rotated, interleaved=interleaved)
    states = [State("latent", format_layers(layers), arrays, rope=rope)]
    if config.get("index_head_dim"):
        ids = _indexer_layers(config, layers)
        # The indexer's rotated part is its first qk_rope_head_dim elements, in halves unless the config says neighbours.
        turned = (
            None if nope else _rope(config, rotated, interleaved=bool(config.get("indexer_rope_interleave", False)))
        )
        keys = {"index_k": Array(1, _integer(config, "index_head_dim"))}
        states.append(State("indexer", format_layers(ids), keys, rope=turned))
    return states


def _indexer_layers(config: Mapping[str, Any], layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return the layers that keep indexer keys; the others reuse the choice of the layer before (GLM-5.2)."""
    n = config["num_hidden_layers"]
    types = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is not None:
        full = [str(x) in ("full", "F") for x in types]
        if len(full) != n:
            raise PresetError(f"expected one entry for each of {n} layers", path="config.indexer_types")
    else:
        freq, offset = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
        if not isinstance(freq, int) or not isinstance(offset, int) or freq < 1:
            raise PresetError(f"{freq!r} and {offset!r} are no schedule", path="config.index_topk_freq")
        full = [max(i - offset + 1, 0) % freq == 0 for i in range(n)]
    kept = tuple(x for x in layers if full[x])
    if not kept:
        raise PresetError("no layer keeps indexer keys", path="config.indexer_types")
    return kept


def _recurrent_arrays(config: Mapping[str, Any]) -> dict[str, Array]:
    if config.get("linear_num_value_heads"):
        keys, values = _integer(config, "linear_num_key_heads"), _integer(config, "linear_num_value_heads")
        key_dim, value_dim = _integer(config, "linear_key_head_dim"), _integer(config, "linear_value_head_dim")
        kernel = _integer(config, "linear_conv_kernel_dim")
    elif isinstance(linear := config.get("linear_attn_config"), Mapping):
        keys = values = _integer(linear, "num_heads")
        key_dim = value_dim = _integer(linear, "head_dim")
        kernel = _integer(linear, "short_conv_kernel_size")
    elif config.get("attn_type_list") or str(config.get("model_type", "")).startswith("minimax"):
        heads = _integer(config, "num_attention_heads")
        head_dim = config.get("head_dim") or _integer(config, "hidden_size") // heads
        return {"ssm_state": Array(heads, head_dim * head_dim)}
    else:
        raise PresetError(f"the shape of its linear attention is not in linear_* or linear_attn_config: {_IN_A_FILE}",
                          path="config.layer_types")  # fmt: skip
    past = kernel - 1
    return {
        "conv_q": Array(keys, key_dim * past),
        "conv_k": Array(keys, key_dim * past),
        "conv_v": Array(values, value_dim * past),
        "ssm_state": Array(values, value_dim * key_dim),
    }


def _rope(config: Mapping[str, Any], head_dim: int, *, interleaved: bool, window: bool = False) -> Rope | None:
    # transformers 5 writes rope_parameters, per type of layer where they differ; earlier releases rope_theta and rope_scaling.
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = config.get("rope_theta")
    if isinstance(own := parameters.get(_WINDOW if window else _FULL), Mapping):
        parameters = dict(own)
    elif window and "rope_local_base_freq" in config:  # Gemma 3: its window layers rotate by another base and unscaled
        parameters, theta = {}, config["rope_local_base_freq"]
    theta = parameters.pop("rope_theta", None) or theta
    if theta is None:
        return None
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    scaling = "" if kind == "default" else json.dumps({"rope_type": kind, **parameters}, sort_keys=True)
    latent = bool(config.get("kv_lora_rank"))  # there head_dim is that of the rotated part, all of it rotated
    dim = head_dim if latent else int(config.get("rotary_dim") or head_dim * partial)
    return Rope(theta=float(theta), dim=dim, interleaved=interleaved, scaling=scaling)


# -- where configs come from -------------------------------------------------------------------------------------------


def shipped_models() -> list[str]:
    """Return the names of the models whose geometry comes with the package (sources: `configs/SOURCES.md`)."""
    folder = resources.files("regauge.layout") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load_model(source: str) -> Model:
    """Return the model of a Hugging Face folder, a config.json, or a shipped name. Raises PresetError if it is none."""
    config, name = _read_config(source)
    return model_from_config(config, name=name)


def load_model_dtype(source: str) -> str:
    """Return the dtype that a model's config says it computes in, "" where it says none. Raises as `load_model`."""
    return _dtype(source, "dtype", "torch_dtype")  # transformers 5; earlier


def load_state_dtype(source: str) -> str:
    """Return the dtype that a model's config wants its recurrent state in, "" where it says none. Raises as `load_model`."""
    return _dtype(source, "mamba_ssm_dtype")


def _dtype(source: str, *keys: str) -> str:
    config, _ = _read_config(source)
    found = (part.get(key) for part in (config, _text(config)) for key in keys)
    return next((str(value) for value in found if value), "")


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
