"""SGLang's pools (0.5.23, read in `srt/mem_cache`). L layers, B pages, P tokens per page, H heads of this rank, D head dim.

Every pool of tokens has a dummy page 0, which counts in `pages` since page tables (slot // P) index the tensor; the pool of
recurrent states has a dummy slot 0.

**Attention and window layers** (`MHATokenToKVPool`; window layers in a pool of their own, `SWAKVPool`, with their own page
table). X = 16 / itemsize.

| pool | tensor | order |
|---|---|---|
| `nhd` (default) | k.{layer}, v.{layer}: (B * P, H, D) | `page token head dim` |
| `hnd` (SGLANG_USE_HND_KVCACHE=1) | k.{layer}, v.{layer}: (B, H, P, D) | `page head token dim` |
| `vectorized_5d` (SGLANG_AITER_KV_CACHE_LAYOUT) | k.{layer}: (B, H, D/X, P, X); v.{layer}: (B, H, P/X, D, X) | k: `page head dim token dim:X`; v: `page head token dim token:X` |
| `layer_first` (host, `--hicache-mem-layout`) | (2, L, B * P, H, D) | `kv layer page token head dim` |
| `page_first` (host) | (2, B * P, L, H, D) | `kv page token layer head dim` |
| `page_first_direct` (host) | (2, B, L, P, H, D) | `kv page layer token head dim` |
| `page_head` (host) | (2, B, H, P, L, D) | `kv page head token layer dim` |

**Latents** (`MLATokenToKVPool`): kv.{layer}: (B * P, 1, rank + rope), on the host (L, B * P, 1, row), (B * P, L, 1, row) or
(B, L, P, 1, row). 8-bit latents of a sparse model (`DSATokenToKVPool`) are `dsa_mla` records of 656 bytes with FlashMLA
(`record=packed`, the default), and plain rows of 576 bytes with TRT-LLM, with TileLang and on ROCm (`record=raw`): one dtype
name for two formats (sgl-project/sglang#37838).

**Indexer keys** (`IndexKeyCache`): index_k.{layer}: (B, P * 132) bytes, a `dsa_index` record; only layers that compute them
have a buffer. On ROCm, pages of more than one token hold tiles of 16 tokens x 16 elements.

**Recurrent states** (`MambaPool`): conv (L, slots, channels, kernel - 1) with channels = q, k, v, but (L, slots, kernel - 1,
channels) for Kimi delta attention; temporal (L, slots, H, value dim, key dim). Bfloat16 and float32 unless told otherwise.

`fp8_e4m3` and `fp8_e5m2` are the platform's own type on ROCm: float8_e4m3fnuz on gfx94x, float8_e4m3fn on gfx95x (the
checkpoint's scales are then doubled; without any they are 1). A scale is applied by dividing in the model's dtype before the
cast (`set_kv_buffer`: rule `divide_source`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from regauge.errors import PresetError
from regauge.layout.dtypes import DTYPES
from regauge.layout.engines.flags import (
    IN_A_FILE,
    Flags,
    constant_scale,
    convolutions,
    is_kimi,
    latent_rows,
    local_heads,
    packed,
    page_size,
    placed,
    unknown,
)
from regauge.layout.records import record_components
from regauge.layout.spec import Component, Group, Layout, Model, Placement, Shard, State, format_layers
from regauge.layout.validate import validate


@dataclass(frozen=True, slots=True)
class _Pool:
    """How a pool lies. `X` in the orders of `lanes` stands for the elements of 16 bytes."""

    k: str
    v: str
    latent: str = ""
    """Axes outside a page of latents and indexer keys; empty: it has none."""
    page: int = 1
    lanes: bool = False

    @property
    def host(self) -> bool:
        """Whether it is HiCache's, in one allocation."""
        return "kv" in self.k.split()


POOLS: Mapping[str, _Pool] = MappingProxyType(
    {
        "nhd": _Pool("page token head dim", "page token head dim", "page"),
        "hnd": _Pool("page head token dim", "page head token dim"),
        "vectorized_5d": _Pool("page head dim token dim:X", "page head token dim token:X", page=64, lanes=True),
        "layer_first": _Pool("kv layer page token head dim", "kv layer page token head dim", "layer page"),
        "page_first": _Pool("kv page token layer head dim", "kv page token layer head dim", "page token layer"),
        "page_first_direct": _Pool("kv page layer token head dim", "kv page layer token head dim", "page layer"),
        "page_head": _Pool("kv page head token layer dim", "kv page head token layer dim"),
    }
)
_SPARSE_PAGE = 64
_TILE = 16


def build(model: Model, flags: Flags) -> Layout:
    """Return the layout of one rank. Raises PresetError naming the flag, LayoutError for a shard that does not fit."""
    shard = flags.shard()
    name = flags.pool or "nhd"
    if name not in POOLS:
        raise unknown("pool", name, POOLS)
    pool, kinds = POOLS[name], {state.kind for state in model.states}
    if (pool.host or pool.lanes) and kinds & {"window", "recurrent"}:
        raise PresetError(
            f"how {name} lays out window and recurrent states is not known here: {IN_A_FILE}", path="pool"
        )
    if pool.host and len(kinds) < len(model.states):
        raise PresetError(f"layers of one kind that keep unlike states share one tensor in {name}, in which they cannot be told "
                          f"apart: {IN_A_FILE}, or choose nhd or hnd", path="pool")  # fmt: skip
    if not pool.latent and "latent" in kinds:
        raise PresetError(f"latents do not lie in {name}; choose {', '.join(n for n, p in POOLS.items() if p.latent)}",
                          path="pool")  # fmt: skip
    if flags.cp > 1 and kinds != {"latent"}:
        raise PresetError("SGLang shares tokens among ranks for MLA without an indexer only", path="cp")
    if flags.cp > 1 and flags.stripe != 1:
        raise PresetError("SGLang deals tokens out one by one: use stripe 1", path="stripe")
    stage = _stage(model.num_layers, flags)
    rank = _Rank(model, flags, shard, pool, _dtype(flags, pool) if kinds != {"recurrent"} else "")
    groups = [
        rank.group(state, tuple(x for x in state.layer_ids if x in stage))
        for state in model.states
        if any(x in stage for x in state.layer_ids)
    ]
    return validate(Layout(model, groups, shard))


def _stage(layers: int, flags: Flags) -> range:
    """Return the layers of a pipeline stage: the last ones have one more where they do not divide (`get_pp_indices`)."""
    share, more = divmod(layers, flags.pp)
    first = flags.pp_rank * share + max(0, flags.pp_rank - (flags.pp - more))
    if not share:
        raise PresetError(f"{flags.pp} stages for {layers} layers", path="pp")
    return range(first, first + share + (flags.pp_rank >= flags.pp - more))


def _dtype(flags: Flags, pool: _Pool) -> str:
    flag = flags.kv_cache_dtype
    if flag == "auto":
        return flags.computes_in()
    if flag in ("bf16", "bfloat16"):
        return "bfloat16"
    if flag not in ("fp8_e4m3", "fp8_e5m2"):
        raise unknown("dtype", flag, ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2"))
    if flags.platform in ("gfx94x", "gfx95x"):
        return "float8_e4m3fnuz" if flags.platform == "gfx94x" else "float8_e4m3fn"
    if pool.lanes:
        raise PresetError(f"{flag} is float8_e4m3fnuz on gfx94x and float8_e4m3fn on gfx95x: say platform=gfx94x or "
                          "platform=gfx95x", path="platform")  # fmt: skip
    if flags.platform == "cpu" and flag == "fp8_e5m2":
        raise PresetError("SGLang has no fp8_e5m2 on CPU: use fp8_e4m3 or auto", path="dtype")
    return "float8_e4m3fn" if flag == "fp8_e4m3" else "float8_e5m2"


@dataclass(frozen=True, slots=True)
class _Rank:
    """Builds the groups of one rank."""

    model: Model
    flags: Flags
    shard: Shard
    pool: _Pool
    dtype: str

    def group(self, state: State, layers: tuple[int, ...]) -> Group:
        """Return the group of a state's layers."""
        if state.kind == "recurrent":
            return Group("recurrent", format_layers(layers), 1, self._recurrent(state), self.flags.requests)
        size = self._page_size()
        make = {"latent": self._latent, "indexer": self._indexer}.get(state.kind, self._attention)
        return Group(state.kind, format_layers(layers), size, make(state, size, len(layers)), self.flags.pages)

    def _page_size(self) -> int:
        sparse = any(state.kind == "indexer" for state in self.model.states)
        if not sparse:
            default = 64 if self.flags.platform == "musa" else self.pool.page
            return page_size(self.flags.page_size, default, 16 // DTYPES[self.dtype].itemsize if self.pool.lanes else 1)
        if self.flags.platform in ("gfx94x", "gfx95x"):
            return page_size(self.flags.page_size, _SPARSE_PAGE, 1 if self.flags.page_size == 1 else _TILE)
        size = page_size(self.flags.page_size, _SPARSE_PAGE, 1)
        if size != _SPARSE_PAGE:
            raise PresetError(f"{size} tokens; sparse attention takes pages of {_SPARSE_PAGE}", path="page")
        return size

    def _attention(self, state: State, size: int, layers: int) -> list[Component]:
        del size, layers
        heads, components = local_heads(state, self.shard), []
        if self.pool.host and len({array.dim for array in state.arrays.values()}) > 1:
            raise PresetError(f"a host pool holds K and V of one head dim in a tensor: {IN_A_FILE}", path="pool")
        for name, order in (("k", self.pool.k), ("v", self.pool.v)):
            order = order.replace("X", str(16 // DTYPES[self.dtype].itemsize))
            at = Placement(order, "kv" if self.pool.host else f"{name}.{{layer}}")
            scale = constant_scale(self.dtype, "divide_source")
            components.append(Component(name, self.dtype, heads[name], state.arrays[name].dim, at, scale))
        return components

    def _latent(self, state: State, size: int, layers: int) -> list[Component]:
        region = "kv" if self.pool.host else "kv.{layer}"
        token_first = self.pool.latent == "page token layer"
        order = "page layer" if token_first else self.pool.latent
        flashmla = self.flags.platform in ("cuda", "musa")
        if packed(self.model, self.flags, self.dtype, default=flashmla):
            heads = local_heads(state, self.shard)
            made = record_components("dsa_mla", state, page_size=size, heads=heads, order=order, region=region)
        else:
            scale = constant_scale(self.dtype, "divide_source")
            made = latent_rows(state, self.dtype, dict.fromkeys(state.arrays, scale), order, region)
        return [_token_first(c, layers) for c in made] if token_first else made

    def _indexer(self, state: State, size: int, layers: int) -> list[Component]:
        del layers
        order = "page layer" if self.pool.latent == "page token layer" else self.pool.latent
        region = "index_k" if self.pool.host else "index_k.{layer}"
        if self.flags.platform == "gfx94x":
            raise PresetError(
                f"on gfx94x its scales are amax / 224, which no rule here is: {IN_A_FILE}", path="platform"
            )
        heads = local_heads(state, self.shard)
        made = record_components("dsa_index", state, page_size=size, heads=heads, order=order, region=region)
        if self.flags.platform != "gfx95x" or size == 1:
            return made
        tiles = Placement(f"{order} token dim token:{_TILE} dim:{_TILE}", region, 0, {})
        last = order.rsplit(maxsplit=1)[-1]
        return [
            msgspec.structs.replace(c, at=msgspec.structs.replace(tiles, strides={last: c.at.strides[last]}))
            for c in made
        ]

    def _recurrent(self, state: State) -> list[Component]:
        if "conv_q" not in state.arrays:
            raise PresetError(f"SGLang 0.5.23 has no pool for this linear attention: {IN_A_FILE}", path="model")
        if self.flags.platform == "cpu":
            raise PresetError(f"on CPU, AMX builds pack these states otherwise: {IN_A_FILE}", path="platform")
        made, _ = convolutions(state, self.shard, "bfloat16", "layer page", "conv", past_first=is_kimi(self.model))
        heads, dtype = local_heads(state, self.shard), self.flags.state_dtype("float32")
        at = Placement("layer page head dim", "temporal")
        return [*made, Component("ssm_state", dtype, heads["ssm_state"], state.arrays["ssm_state"].dim, at)]


def _token_first(component: Component, layers: int) -> Component:
    """Return rows of `page layer token dim` as they lie when all layers of a token are neighbours."""

    def moved(at: Placement) -> Placement:
        row = at.strides["token"]
        strides = {**at.strides, "token": layers * row, "layer": row}
        order = at.order.replace("layer token", "token layer")
        return msgspec.structs.replace(at, order=order, strides=strides)

    return placed(component, moved)
