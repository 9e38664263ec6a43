"""vLLM's pools (0.32, read in `v1/kv_cache_interface.py`, `v1/core/kv_cache_utils.py` and the attention backends).

L layers, B blocks (pages), P tokens per block, H heads of this rank, D head dim, C what a block holds per head and token.
The six names are vLLM's KVCacheLayout (vllm-project/vllm#42082): physical orders of the logical [L, B, H, N, C]. All layers
lie in one allocation.

**Attention and window layers**: C is a token's K, then its V.

| pool | tensor | order |
|---|---|---|
| `LBHNC` (`hnd`) | (L, B, H, P, 2 * D) | `layer page head token kv dim` |
| `LBNHC` (`nhd`) | (L, B, P, H, 2 * D) | `layer page token head kv dim` |
| `LHBNC` | (L, H, B, P, 2 * D) | `layer head page token kv dim` |
| `BLHNC` | (B, L, H, P, 2 * D) | `page layer head token kv dim` |
| `BLNHC` | (B, L, P, H, 2 * D) | `page layer token head kv dim` |
| `BHLNC` | (B, H, L, P, 2 * D) | `page head layer token kv dim` |
| `B2NHC` (Triton attention before that) | per layer (B, 2, P, H, D) | `page kv token head dim` |
| `cpu` (AVX2, probed) | declared (L, B, H, P, 2 * D); per (block, head) K as [D, P], then V as [P, D] | k: `layer page head kv dim token`; v: `layer page head kv token dim` |

**Latents**: C is rank + rope elements; `fp8_ds_mla` is a record of 656 bytes, which FlashMLA's sparse backend also makes of
`fp8`, while others keep plain rows (`record=packed` or `record=raw`, no default). **Indexer keys**: C is 132 bytes, a block a
`dsa_index` record; latents and indexer keys share block numbers, each in a region of its own.

**Several kinds of layers** (window, recurrent): layers that keep alike are dealt into groups of equal size, the i-th of n
groups taking layers i, i + n, ... (of all pipeline stages together); a block number belongs to one group at a time, and all groups lie over one allocation.
Here each group has a region, `kv0`, `kv1`, ..., all of which start at the same address. A block has the same bytes in every
group: P is raised until a block of attention holds a recurrent state, which is padded to it (`_align_hybrid_block_size`;
multiples of 16, of 128 beside MLA; the log says the size where a backend needs another).

**Recurrent states**: per block the convolutions' inputs as (kernel - 1, channels), channels = q, k, v, in the model's dtype
(VLLM_SSM_CONV_STATE_LAYOUT unset), then (H, value dim, key dim).

`--kv-cache-dtype`: `fp8`, `fp8_e4m3`, `fp8_e5m2` have one constant scale per tensor and layer outside the cache, 1.0 where
the checkpoint has none, applied by division (`reshape_and_cache_flash`). `fp8_per_token_head` keeps a scale after each row of
K and of V (`_pth_key_value_caches`). On gfx94x, fp8 is float8_e4m3fnuz.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
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
from regauge.layout.records import RECORDS, record_components
from regauge.layout.spec import Component, Group, Kind, Layout, Model, Placement, Shard, State, format_layers
from regauge.layout.validate import validate


@dataclass(frozen=True, slots=True)
class _Pool:
    """How a pool lies."""

    k: str
    v: str
    latent: str = "layer page"
    """Axes outside a page of one head; empty: no latents lie in it."""
    region: str = "kv"
    page: int = 16
    multiple: int = 1
    compact: bool = True
    """Whether a page of a layer is one block, as layers of several kinds need it."""


def _pool(order: str, *, compact: bool = True) -> _Pool:
    return _Pool(order, order, "layer page" if order.startswith("layer") else "page layer", compact=compact)


POOLS: Mapping[str, _Pool] = MappingProxyType(
    {
        "LBHNC": _pool("layer page head token kv dim"),
        "LBNHC": _pool("layer page token head kv dim"),
        "LHBNC": _pool("layer head page token kv dim", compact=False),
        "BLHNC": _pool("page layer head token kv dim"),
        "BLNHC": _pool("page layer token head kv dim"),
        "BHLNC": _pool("page head layer token kv dim", compact=False),
        "B2NHC": _Pool(
            "page kv token head dim", "page kv token head dim", "", "kv.{layer}", multiple=16, compact=False
        ),
        "cpu": _Pool("layer page head kv dim token", "layer page head kv token dim", page=128, multiple=32),
    }
)
_ALIASES: Mapping[str, str] = MappingProxyType({"hnd": "LBHNC", "nhd": "LBNHC"})
_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "fp8_ds_mla")
_MLA_PAGE, _CPU_MLA_PAGE = 64, 16


def build(model: Model, flags: Flags) -> Layout:
    """Return the layout of one rank. Raises PresetError naming the flag, LayoutError for a shard that does not fit."""
    shard = flags.shard()
    name = _name(model, flags)
    pool, kinds = POOLS[name], {state.kind for state in model.states}
    _check_kinds(model, flags, name, kinds)
    stage = _stage(model.num_layers, flags)
    rank = _Rank(model, flags, shard, name, pool, _dtype(flags, name, kinds))
    if len(model.states) == 1 or kinds == {"latent", "indexer"}:
        kept = [(state, tuple(x for x in state.layer_ids if x in stage)) for state in model.states]
        groups = [rank.group(state, layers) for state, layers in kept if layers]
    else:
        groups = rank.hybrid(stage)
    return validate(Layout(model, groups, shard))


def _name(model: Model, flags: Flags) -> str:
    if flags.pool is None:
        if any(state.kind == "latent" for state in model.states):
            return "LBNHC"
        raise PresetError("vLLM's pool depends on the attention backend and the connector: give one of "
                          f"{', '.join(POOLS)}", path="pool")  # fmt: skip
    name = _ALIASES.get(flags.pool.lower(), flags.pool)
    if name not in POOLS:
        raise unknown("pool", flags.pool, (*POOLS, *_ALIASES))
    return name


def _check_kinds(model: Model, flags: Flags, name: str, kinds: set[Kind]) -> None:
    if "latent" in kinds and not POOLS[name].latent:
        raise PresetError(f"latents do not lie in {name}; choose {', '.join(n for n, p in POOLS.items() if p.latent)}",
                          path="pool")  # fmt: skip
    if kinds & {"window", "recurrent"} and not POOLS[name].compact:
        compact = ", ".join(n for n, p in POOLS.items() if p.compact)
        raise PresetError(f"layers of several kinds do not lie in {name}; choose {compact}", path="pool")
    if len(kinds) < len(model.states):
        raise PresetError(f"layers of one kind that keep unlike states share a pool in which they cannot be told apart: {IN_A_FILE}",
                          path="model")  # fmt: skip
    if "recurrent" in kinds and name == "cpu":
        raise PresetError(f"how the CPU packs recurrent states is not known here: {IN_A_FILE}", path="pool")
    if "indexer" in kinds and (name == "cpu" or not POOLS[name].latent.startswith("layer")):
        raise PresetError(f"how {name} packs latents and indexer keys side by side depends on the backends: {IN_A_FILE}, or "
                          "choose LBNHC", path="pool")  # fmt: skip
    if flags.cp > 1 and kinds & {"window", "recurrent"}:
        raise PresetError("vLLM shares tokens among ranks for full attention only", path="cp")
    for state in model.states if flags.cp > 1 else ():
        for array_name, array in state.arrays.items():
            if flags.tp % (array.heads * flags.cp):
                raise PresetError(f"{flags.tp} ranks hold {flags.tp / array.heads:g} copies of each head of {array_name}: {flags.cp} of "
                                  "them cannot share its tokens", path="cp")  # fmt: skip


def _stage(layers: int, flags: Flags) -> range:
    """Return the layers of a pipeline stage: of those that remain, the stages before the last have one each (`get_pp_indices`)."""
    share, more = divmod(layers, flags.pp)
    if not share:
        raise PresetError(f"{flags.pp} stages for {layers} layers", path="pp")
    sizes = [share + (flags.pp - 1 - more <= i < flags.pp - 1) for i in range(flags.pp)]
    first = sum(sizes[: flags.pp_rank])
    return range(first, first + sizes[flags.pp_rank])


def _dtype(flags: Flags, pool: str, kinds: Iterable[str]) -> str:
    flag = flags.kv_cache_dtype
    if flag not in _DTYPES:
        raise unknown("dtype", flag, _DTYPES)
    if flag == "auto":
        return flags.computes_in()
    if pool == "cpu" and flag != flags.computes_in():
        # Measured with 0.32 on AVX2: 8-bit types are refused, other 16-bit types accepted and written wrong.
        raise PresetError(
            f"vLLM's CPU cache has the model's dtype, {flags.computes_in()}, and not {flag}: use auto", path="dtype"
        )
    if flag == "fp8_ds_mla" and "indexer" not in kinds:
        raise PresetError("fp8_ds_mla is for models with an indexer", path="dtype")
    if flag == "fp8_per_token_head" and ("latent" in kinds or flags.platform == "gfx94x"):
        what = "latents keep such scales" if "latent" in kinds else "gfx94x computes them, amax / 224,"
        raise PresetError(f"where {what} is not known here: {IN_A_FILE}", path="dtype")
    if flags.platform in ("gfx94x", "gfx95x") and flag == "fp8_e5m2":
        raise PresetError(f"what fp8_e5m2 is on ROCm is not known here: {IN_A_FILE}, or use fp8", path="dtype")
    if flag.startswith("fp8"):
        return (
            "float8_e5m2"
            if flag == "fp8_e5m2"
            else "float8_e4m3fnuz"
            if flags.platform == "gfx94x"
            else "float8_e4m3fn"
        )
    return flag


@dataclass(frozen=True, slots=True)
class _Rank:
    """Builds the groups of one rank."""

    model: Model
    flags: Flags
    shard: Shard
    name: str
    pool: _Pool
    dtype: str

    def group(self, state: State, layers: tuple[int, ...]) -> Group:
        """Return the one group of a state that all layers of the rank keep."""
        if state.kind == "recurrent":
            raise PresetError(f"a model without attention has no preset: {IN_A_FILE}", path="model")
        size = self._page_size(state)
        return Group(
            state.kind, format_layers(layers), size, self._components(state, size, self.pool.region), self.flags.pages
        )

    def _page_size(self, state: State) -> int:
        if state.kind in ("attention", "window"):
            return page_size(self.flags.page_size, self.pool.page, self.pool.multiple)
        return page_size(self.flags.page_size, _CPU_MLA_PAGE if self.name == "cpu" else _MLA_PAGE, 1)

    def _components(self, state: State, size: int, region: str) -> list[Component]:
        if state.kind in ("latent", "indexer"):
            return self._rows(state, size, region)
        arrays = state.arrays
        if arrays["k"].dim != arrays["v"].dim:
            raise PresetError(f"{self.name} holds K and V of one head dim in a tensor, the model has {arrays['k'].dim} and "
                              f"{arrays['v'].dim}: {IN_A_FILE}", path="pool")  # fmt: skip
        heads = local_heads(state, self.shard)
        if self.flags.kv_cache_dtype == "fp8_per_token_head":
            return [self._inline(index, heads["k"], arrays["k"].dim, size, region) for index in range(2)]
        scale = constant_scale(self.dtype, "divide")
        return [
            Component(name, self.dtype, heads[name], arrays[name].dim, Placement(order, region), scale)
            for name, order in (("k", self.pool.k), ("v", self.pool.v))
        ]

    def _rows(self, state: State, size: int, region: str) -> list[Component]:
        heads, order = local_heads(state, self.shard), self.pool.latent
        if state.kind == "indexer":
            if self.flags.platform in ("gfx94x", "gfx95x"):
                raise PresetError(f"on ROCm its keys are shuffled: {IN_A_FILE}", path="platform")
            return record_components("dsa_index", state, page_size=size, heads=heads, order=order, region="index_k")
        named = self.flags.kv_cache_dtype == "fp8_ds_mla"
        sparse = any(other.kind == "indexer" for other in self.model.states)
        if sparse and DTYPES[self.dtype].itemsize == 1 and not named and not self.flags.record:
            raise PresetError("fp8 is fp8_ds_mla with FlashMLA's sparse backend and plain rows with others: use fp8_ds_mla, or say "
                              "record=packed or record=raw", path="record")  # fmt: skip
        if packed(self.model, self.flags, self.dtype, default=named):
            return record_components("fp8_ds_mla", state, page_size=size, heads=heads, order=order, region=region)
        scales = dict.fromkeys(state.arrays, constant_scale(self.dtype, "divide"))
        return latent_rows(state, self.dtype, scales, order, region)

    def _inline(self, index: int, heads: int, dim: int, page: int, region: str) -> Component:
        """A component whose rows end in their scale: it has no kv axis, its offset says which half it belongs to."""
        record, order = RECORDS["inline4"], (self.pool.k, self.pool.v)[index]
        row = dim + record.data
        axes = [axis for axis in order.split() if axis not in ("kv", "dim")]
        if self.name == "B2NHC":
            half, codes = page * heads * row, {"head": row}
            strides = {"head": row, "token": heads * row, "page": 2 * half}
        else:
            half, codes = row, {"kv": row}
            strides = {axes[-1]: 2 * row}
        at = Placement(" ".join(axes), region, index * half + dim, strides)
        name = "kv"[index]
        scale = record.parts[name].scale_at(at)
        return Component(name, self.dtype, heads, dim, Placement(order, region, strides=codes), scale)

    # -- layers of several kinds ---------------------------------------------------------------------------------------

    def hybrid(self, stage: range) -> list[Group]:
        """Return the groups into which layers of several kinds are dealt, each with a region of its own.

        They are dealt over all pipeline stages together; a stage has those of its layers that are its own.
        """
        states = sorted(self.model.states, key=lambda state: state.layer_ids)
        recurrent = [state for state in states if state.kind == "recurrent"]
        size, page = self._hybrid_page([state for state in states if state.kind != "recurrent"], recurrent)
        counts = [len(state.layer_ids) for state in states]
        share = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        dealt = [
            (state, state.layer_ids[i::n])
            for state in states
            for n in (ceil(len(state.layer_ids) / share),)
            for i in range(n)
        ]
        ours = [tuple(x for x in layers if x in stage) for _, layers in dealt]
        groups: list[Group] = []
        for number, ((state, _), layers) in enumerate(zip(dealt, ours, strict=True)):
            if not layers:
                continue
            region = f"kv{number}"
            if state.kind == "recurrent":
                made, one, pages = self._recurrent(state, region), 1, self.flags.requests
            else:
                made, one, pages = self._components(state, size, region), size, self.flags.pages
            made = [_padded(c, self.pool.latent, page, max(map(len, ours))) for c in made]
            groups.append(Group(state.kind, format_layers(layers), one, made, pages))
        return groups

    def _hybrid_page(self, paged: list[State], recurrent: list[State]) -> tuple[int, int]:
        """Return the tokens and the bytes of a block, which are the same in every group."""
        tokens = {self._token_bytes(state) for state in paged}
        if len(tokens) != 1:
            raise PresetError(
                f"layers that keep {', '.join(map(str, sorted(tokens)))} bytes of a token: {IN_A_FILE}", path="model"
            )
        one = tokens.pop()
        need = max((self._record_bytes(state) for state in recurrent), default=0)
        kimi = is_kimi(self.model)
        step = (128 if kimi else 16) if recurrent else (_MLA_PAGE if kimi else self.pool.page)
        fits = step * max(1, ceil(need / (step * one)))
        size = page_size(self.flags.page_size, fits, self.pool.multiple)
        if size * one < need:
            raise PresetError(f"a block of {size} tokens has {size * one} bytes, and a recurrent state takes {need}: use {fits}, "
                              "or what vLLM's log says", path="page")  # fmt: skip
        return size, size * one

    def _token_bytes(self, state: State) -> int:
        heads, item = local_heads(state, self.shard), DTYPES[self.dtype].itemsize
        scales = 4 if self.flags.kv_cache_dtype == "fp8_per_token_head" else 0
        return sum(heads[name] * (array.dim * item + scales) for name, array in state.arrays.items())

    def _record_bytes(self, state: State) -> int:
        heads, dtypes = local_heads(state, self.shard), self._state_dtypes(state)
        return sum(heads[name] * array.dim * DTYPES[dtypes[name]].itemsize for name, array in state.arrays.items())

    def _state_dtypes(self, state: State) -> dict[str, str]:
        if "conv_q" not in state.arrays:
            raise PresetError(f"vLLM 0.32 has no pool for this linear attention: {IN_A_FILE}", path="model")
        if state.arrays["conv_q"].heads % self.shard.tp_size:
            raise PresetError(
                f"{state.arrays['conv_q'].heads} key heads do not divide over {self.shard.tp_size} ranks", path="tp"
            )
        if not self.flags.ssm_dtype and not is_kimi(self.model):
            raise PresetError("vLLM keeps it in the config's mamba_ssm_dtype, or else in the model's dtype: say which, such as "
                              "ssm-dtype=float32", path="ssm-dtype")  # fmt: skip
        return {**dict.fromkeys(state.arrays, self.flags.computes_in()), "ssm_state": self.flags.state_dtype("float32")}

    def _recurrent(self, state: State, region: str) -> list[Component]:
        dtypes, order = self._state_dtypes(state), self.pool.latent
        made, nbytes = convolutions(state, self.shard, dtypes["conv_q"], order, region, past_first=True)
        at = Placement(f"{order} head dim", region, nbytes)
        heads, dim = local_heads(state, self.shard)["ssm_state"], state.arrays["ssm_state"].dim
        return [*made, Component("ssm_state", dtypes["ssm_state"], heads, dim, at)]


def _padded(component: Component, outer: str, page: int, layers: int) -> Component:
    """Return a component whose pages take `page` bytes, and blocks of all layers as many as the largest group's."""
    ours = {"page": page} if outer == "layer page" else {"layer": page, "page": layers * page}

    return placed(component, lambda at: msgspec.structs.replace(at, strides={**at.strides, **ours}))
