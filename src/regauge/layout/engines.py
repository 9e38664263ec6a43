"""Layouts of vLLM's and SGLang's pools for attention (MHA, GQA) models, from the flags an engineer starts them with.

L layers, B pages (vLLM: blocks), P tokens per page, H KV heads of this rank, D head dim, X = 16 / itemsize.

SGLang 0.5.23. Device pools: one K and one V tensor per layer; page 0 is SGLang's dummy page and counts in `pages`, since
page tables (slot // P) index the tensor. Host pools (HiCache, `--hicache-mem-layout`): one allocation, K before V.

| pool | tensor | order |
|---|---|---|
| `nhd` (default) | k.{layer}, v.{layer}: (B * P, H, D) | `page token head dim` |
| `hnd` (SGLANG_USE_HND_KVCACHE=1) | k.{layer}, v.{layer}: (B, H, P, D) | `page head token dim` |
| `vectorized_5d` (SGLANG_AITER_KV_CACHE_LAYOUT) | k.{layer}: (B, H, D/X, P, X); v.{layer}: (B, H, P/X, D, X) | k: `page head dim token dim:X`; v: `page head token dim token:X` |
| `layer_first` (host) | (2, L, B * P, H, D) | `kv layer page token head dim` |
| `page_first` (host) | (2, B * P, L, H, D) | `kv page token layer head dim` |
| `page_first_direct` (host) | (2, B, L, P, H, D) | `kv page layer token head dim` |
| `page_head` (host) | (2, B, H, P, L, D) | `kv page head token layer dim` |

vLLM. The six names are its KVCacheLayout (0.32; vllm-project/vllm#42082): permutations of the logical [L, B, H, N, C],
where C holds a token's K, then its V. All layers lie in one allocation.

| pool | tensor | order |
|---|---|---|
| `LBHNC` (`hnd`) | (L, B, H, P, 2 * D) | `layer page head token kv dim` |
| `LBNHC` (`nhd`) | (L, B, P, H, 2 * D) | `layer page token head kv dim` |
| `LHBNC` | (L, H, B, P, 2 * D) | `layer head page token kv dim` |
| `BLHNC` | (B, L, H, P, 2 * D) | `page layer head token kv dim` |
| `BLNHC` | (B, L, P, H, 2 * D) | `page layer token head kv dim` |
| `BHLNC` | (B, H, L, P, 2 * D) | `page head layer token kv dim` |
| `B2NHC` (Triton attention before that) | per layer (B, 2, P, H, D) | `page kv token head dim` |
| `cpu` (0.32, AVX2, probed) | declared (L, B, H, P, 2 * D); per (block, head) K as [D, P], then V as [P, D] | k: `layer page head kv dim token`; v: `layer page head kv token dim` |

`--kv-cache-dtype`: `auto` is the model's dtype; `fp8` (vLLM), `fp8_e4m3`, `fp8_e5m2` have one constant scale per tensor and
layer outside the cache, 1.0 where the checkpoint has none; `fp8_per_token_head` (vLLM, `B2NHC`; vllm-project/vllm#38378) has
rows of D + 4 bytes whose last 4 are the fp32 scale. What is not here is not guessed: describe it in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from regauge.errors import LayoutError, PresetError
from regauge.layout.dtypes import DTYPES, canonical
from regauge.layout.spec import Component, Group, Layout, Model, Placement, Scale, Shard
from regauge.layout.validate import validate

Engine = Literal["vllm", "sglang"]

PREFIX = "engine:"
"""Starts a layout written as an engine's flags, as in `engine:sglang,pool=hnd,page=64,dtype=fp8_e4m3,tp=8,rank=3`."""

_IN_A_FILE = "describe it in a file"
_KEYS = ("pool", "page", "dtype", "model-dtype", "tp", "rank", "pages")


@dataclass(frozen=True, slots=True)
class _Pool:
    """How a pool lies. `lanes`: `X` in the orders stands for the elements of 16 bytes."""

    k: str
    v: str
    regions: tuple[str, str] = ("kv", "kv")
    page: int = 16
    multiple: int = 1
    """Of which the engine takes page sizes."""
    lanes: bool = False

    @property
    def shared(self) -> bool:
        """K and V are parts of one tensor, so that their head dims are the same."""
        return self.regions[0] == self.regions[1]


def _both(order: str, *, page: int, multiple: int = 1, region: str = "kv") -> _Pool:
    return _Pool(order, order, (region, region), page, multiple)


_PER_LAYER = ("k.{layer}", "v.{layer}")
_POOLS: Mapping[Engine, Mapping[str, _Pool]] = MappingProxyType(
    {
        "sglang": MappingProxyType(
            {
                "nhd": _Pool("page token head dim", "page token head dim", _PER_LAYER, page=1),
                "hnd": _Pool("page head token dim", "page head token dim", _PER_LAYER, page=1),
                "vectorized_5d": _Pool(
                    "page head dim token dim:X", "page head token dim token:X", _PER_LAYER, page=64, lanes=True
                ),
                "layer_first": _both("kv layer page token head dim", page=1),
                "page_first": _both("kv page token layer head dim", page=1),
                "page_first_direct": _both("kv page layer token head dim", page=1),
                "page_head": _both("kv page head token layer dim", page=1),
            }
        ),
        "vllm": MappingProxyType(
            {
                "LBHNC": _both("layer page head token kv dim", page=16),
                "LBNHC": _both("layer page token head kv dim", page=16),
                "LHBNC": _both("layer head page token kv dim", page=16),
                "BLHNC": _both("page layer head token kv dim", page=16),
                "BLNHC": _both("page layer token head kv dim", page=16),
                "BHLNC": _both("page head layer token kv dim", page=16),
                "B2NHC": _both("page kv token head dim", page=16, multiple=16, region="kv.{layer}"),
                "cpu": _Pool("layer page head kv dim token", "layer page head kv token dim", page=128, multiple=32),
            }
        ),
    }
)
_ALIASES: Mapping[Engine, Mapping[str, str]] = MappingProxyType(
    {"sglang": MappingProxyType({}), "vllm": MappingProxyType({"hnd": "LBHNC", "nhd": "LBNHC"})}
)
_DTYPES: Mapping[Engine, Mapping[str, str]] = MappingProxyType(
    {
        "sglang": MappingProxyType(
            {
                "bf16": "bfloat16",
                "bfloat16": "bfloat16",
                "fp8_e4m3": "float8_e4m3fn",
                "fp8_e5m2": "float8_e5m2",
            }
        ),
        "vllm": MappingProxyType(
            {
                "float16": "float16",
                "bfloat16": "bfloat16",
                "fp8": "float8_e4m3fn",
                "fp8_e4m3": "float8_e4m3fn",
                "fp8_e5m2": "float8_e5m2",
                "fp8_per_token_head": "float8_e4m3fn",
            }
        ),
    }
)


def engine_names() -> tuple[str, ...]:
    """Return the engines that have presets."""
    return get_args(Engine)


def engine_layout(  # noqa: PLR0913 - one argument per flag of the engine
    engine: Engine,
    model: Model,
    *,
    tp: int = 1,
    rank: int = 0,
    page_size: int | None = None,
    kv_cache_dtype: str = "auto",
    model_dtype: str = "",
    pool: str | None = None,
    pages: int = 0,
) -> Layout:
    """Return the layout of one rank's pool.

    `tp`, `rank`: tensor parallelism. `page_size`: tokens; None: the engine's default. `pages`: pages in the tensor; 0: symbolic.
    `model_dtype`: what `auto` stands for. `pool`: a name of the tables above; None: SGLang's `nhd`; vLLM's depends on the
    attention backend, so it must be given. Raises PresetError that names the flag and its choices, LayoutError for
    a shard or size that does not fit.
    """
    if engine not in _POOLS:
        raise _unknown("engine", engine, engine_names())
    name, layout = _pool(engine, pool)
    dtype = _dtype(engine, name, kv_cache_dtype, model_dtype)
    size = _page_size(layout, page_size, dtype)
    arrays = attention_arrays(model)
    (heads, head_dim), (_, value_dim) = arrays["k"], arrays["v"]
    if layout.shared and value_dim != head_dim:
        raise PresetError(f"{name} holds K and V of one head dim in a tensor, the model has {head_dim} and "
                          f"{value_dim}: {_IN_A_FILE}", path="pool")  # fmt: skip
    shard = Shard(rank, tp)
    if tp < 1 or not 0 <= rank < tp:
        raise PresetError(f"there is no rank {rank} of {tp}", path="rank")
    heads = len(shard.heads(heads))
    dims = enumerate((head_dim, value_dim))
    if kv_cache_dtype == "fp8_per_token_head":
        components = [_inline(layout, index, dtype, heads, dim, size) for index, dim in dims]
    else:
        components = [_component(layout, index, dtype, heads, dim) for index, dim in dims]
    group = Group("attention", f"0-{model.num_layers - 1}", size, components, pages)
    return validate(Layout(model=model, groups=[group], shard=shard))


def attention_arrays(model: Model) -> dict[str, tuple[int, int]]:
    """Return heads and head dim of K and V of a model all of whose layers attend to all tokens. Raises PresetError else."""
    state = model.states[0]
    if len(model.states) != 1 or state.kind != "attention" or len(state.layer_ids) != model.num_layers:
        raise PresetError(f"there is no preset for the states that {model.name} keeps: {_IN_A_FILE}", path="model")
    return {name: (a.heads, a.dim) for name, a in state.arrays.items()}


def _pool(engine: Engine, pool: str | None) -> tuple[str, _Pool]:
    pools = _POOLS[engine]
    if pool is None:
        if engine == "vllm":
            raise PresetError("vLLM's pool depends on the attention backend and the connector: give one of "
                              f"{', '.join(pools)}", path="pool")  # fmt: skip
        pool = "nhd"
    name = _ALIASES[engine].get(pool.lower(), pool)
    if name not in pools:
        raise _unknown("pool", pool, (*pools, *_ALIASES[engine]))
    return name, pools[name]


def _dtype(engine: Engine, pool: str, flag: str, model_dtype: str) -> str:
    model = canonical(model_dtype)
    if flag == "auto" and not model_dtype:
        raise PresetError("auto stands for the model's dtype, which its config does not say: give it, such as bfloat16",
                          path="model-dtype")  # fmt: skip
    if flag == "auto" or pool == "cpu":
        if model is None or DTYPES[model].itemsize == 1:
            raise PresetError(f"{model_dtype!r} is no dtype to compute in; auto stands for the model's: float32, bfloat16 "
                              "or float16", path="model-dtype")  # fmt: skip
        if flag != "auto" and _DTYPES[engine].get(flag) != model:
            # Measured with 0.32 on AVX2: 8-bit types are refused, other 16-bit types accepted and written wrong.
            raise PresetError(
                f"vLLM's CPU cache has the model's dtype, {model}, and not {flag}: use auto", path="dtype"
            )
        return model
    if pool == "vectorized_5d" and flag not in ("bf16", "bfloat16"):
        if flag == "float8_e4m3fn":
            return flag
        raise PresetError(f"{flag} is float8_e4m3fnuz with doubled scales on gfx94x and float8_e4m3fn on gfx95x: for the "
                          f"latter write float8_e4m3fn, for the former {_IN_A_FILE}; else use auto or bfloat16",
                          path="dtype")  # fmt: skip
    if flag not in _DTYPES[engine]:
        raise _unknown("dtype", flag, ("auto", *_DTYPES[engine]))
    if flag == "fp8_per_token_head" and pool != "B2NHC":
        raise PresetError(f"where {pool} keeps the scales of {flag} differs between revisions: {_IN_A_FILE}, or use "
                          "pool B2NHC", path="dtype")  # fmt: skip
    return _DTYPES[engine][flag]


def _page_size(pool: _Pool, given: int | None, dtype: str) -> int:
    size = pool.page if given is None else given
    multiple = 16 // DTYPES[dtype].itemsize if pool.lanes else pool.multiple
    if size < 1 or size % multiple:
        raise PresetError(f"{size} tokens; this pool takes multiples of {multiple}", path="page")
    return size


def _component(pool: _Pool, index: int, dtype: str, heads: int, dim: int) -> Component:
    order = (pool.k, pool.v)[index].replace("X", str(16 // DTYPES[dtype].itemsize))
    # Both engines divide by the scale (SGLang's set_kv_buffer, vLLM's reshape_and_cache).
    scale = Scale(per="tensor", values=1.0, rule="divide") if DTYPES[dtype].itemsize == 1 else None
    return Component("kv"[index], dtype, heads, dim, Placement(order, pool.regions[index]), scale)


def _inline(pool: _Pool, index: int, dtype: str, heads: int, dim: int, page: int) -> Component:
    """A component whose rows end in their scale. The scale has no kv axis: its offset says which half it belongs to."""
    row = dim + 4
    half = page * heads * row
    strides = {"head": row, "token": heads * row, "page": 2 * half}
    region = pool.regions[index]
    at = Placement("page token head", region, offset=index * half + dim, strides=strides)
    codes = Placement((pool.k, pool.v)[index], region, strides={"head": row})
    return Component("kv"[index], dtype, heads, dim, codes, Scale(per="token_head", at=at, rule="reciprocal"))


def from_engine_form(text: str, model: Model, *, model_dtype: str = "") -> Layout:
    """Return the layout that `engine:NAME,key=value,...` says. Raises PresetError or LayoutError naming the part."""
    name, *parts = text.removeprefix(PREFIX).split(",")
    given: dict[str, str] = {}
    for part in parts:
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals or key not in _KEYS:
            known = ", ".join(f"{k}=..." for k in _KEYS)
            raise PresetError(f"cannot read {part.strip()!r}; after the engine come {known}", path=text)
        if key in given:
            raise PresetError(f"{key} is given twice", path=text)
        given[key] = value
    if name not in _POOLS:
        raise _unknown("engine", name, engine_names())
    try:
        return engine_layout(
            "vllm" if name == "vllm" else "sglang", model,
            tp=_number(given, "tp", 1), rank=_number(given, "rank", 0),
            page_size=_number(given, "page", 0) if "page" in given else None,
            kv_cache_dtype=given.get("dtype", "auto"), model_dtype=given.get("model-dtype", model_dtype),
            pool=given.get("pool"), pages=_number(given, "pages", 0))  # fmt: skip
    except LayoutError as error:
        raise PresetError(str(error), path=text) from error


def _number(given: Mapping[str, str], key: str, default: int) -> int:
    value = given.get(key, str(default))
    if not value.isdecimal() or len(value) > 12:
        raise PresetError(f"{value!r} is no number", path=key)
    return int(value)


def _unknown(flag: str, value: str, choices: tuple[str, ...]) -> PresetError:
    return PresetError(f"no preset for {value!r}; choose {', '.join(choices)}, or {_IN_A_FILE}", path=flag)
