"""From SGLang's pools (0.5.23, `srt/mem_cache`) to the layout of a rank, and the probe that verifies it: both on the CPU.

SGLang's own word for what a pool holds is the flag it was started with, and `auto` does not say which dtype that is. Dtype, page
size, heads and layers are read from the pool's tensors and compared with the preset; what the preset declares is then written through the pool's
own `set_kv_buffer` and looked for byte by byte, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from regauge.engines.probe import require, slots, storage_bytes
from regauge.errors import EngineError
from regauge.layout.engines import Flags, engine_layout
from regauge.layout.probe.codes import Bytes, Floats
from regauge.layout.spec import Component, Group, Kind, Layout, Model, Region
from regauge.layout.validate import validate
from regauge.layout.view import region_sizes

PROBED_PAGES = 4
"""Of each pool; page 0, where SGLang writes what nobody reads, is none of them."""
_WIDE = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class _Part:
    """One pool of tokens, with a page table of its own."""

    pool: Any
    layers: tuple[int, ...]
    """Global layer numbers, in the order of its tensors."""

    @property
    def latent(self) -> bool:
        return type(self.pool) is MLATokenToKVPool

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that the preset gives their regions."""
        named = {"kv": self.pool.kv_buffer} if self.latent else {"k": self.pool.k_buffer, "v": self.pool.v_buffer}
        return {
            f"{name}.{layer}": tensor
            for name, own in named.items()
            for layer, tensor in zip(self.layers, own, strict=True)
        }

    @property
    def pages(self) -> int:
        """Whole pages in the tensors, page 0 included."""
        return int(self.pool.size + self.pool.page_size) // int(self.pool.page_size)


def _parts(pool: Any) -> tuple[_Part, ...]:
    """Return the pools that a rank's pool is made of. Raises EngineError for one whose bytes are not known here."""
    own = (pool.full_kv_pool, pool.swa_kv_pool) if type(pool) is SWAKVPool else (pool,)
    for each in own:
        name = type(each).__name__
        if type(each) not in (MHATokenToKVPool, MLATokenToKVPool):
            raise EngineError(f"SGLang keeps its KV in a {name}: how that lies is not known here")
        if torch.device(each.device).type != "cpu":
            raise EngineError(f"SGLang's {name} is on {each.device}: this adapter knows its CPU backend")
        if each.dtype not in _WIDE or each.store_dtype != each.dtype:
            raise EngineError(
                f"SGLang keeps {each.dtype} as {each.store_dtype} in its {name}: only float32, bfloat16 and float16 are read"
            )
    return tuple(_Part(each, tuple(each.model_layer_ids)) for each in own if each.layer_num)


def declared(pool: Any, model: Model, *, tp: int = 1, rank: int = 0, pp: int = 1, pp_rank: int = 0) -> Layout:
    """Return what the preset says of a rank whose pools have the size and type of this one; no addresses. Page 0 counts.

    `pool`: what SGLang's `token_to_kv_pool_allocator.get_kvcache()` returns. Raises as `read`.
    """
    parts = _parts(pool)
    by_layer = {layer: part for part in parts for layer in part.layers}
    first = parts[0].pool
    flags = Flags(
        tp=tp, rank=rank, pp=pp, pp_rank=pp_rank, page_size=first.page_size, platform="cpu",
        model_dtype=str(first.dtype).removeprefix("torch."), pool=getattr(first, "kv_cache_layout", None),
    )  # fmt: skip
    layout = engine_layout("sglang", model, flags)
    known = sorted(layer for group in layout.groups for layer in group.layer_ids)
    if known != sorted(by_layer):
        raise EngineError(f"SGLang's pools hold layers {sorted(by_layer)}, its preset says {known}")
    groups = []
    for group in layout.groups:
        part = by_layer[group.layer_ids[0]]
        if any(by_layer[layer] is not part for layer in group.layer_ids):
            raise EngineError(f"layers {group.layers}, which keep {group.kind} alike, lie in several of SGLang's pools")
        groups.append(msgspec.structs.replace(group, pages=part.pages))
    return validate(msgspec.structs.replace(layout, groups=groups))


def read(pool: Any, model: Model, *, tp: int = 1, rank: int = 0, pp: int = 1, pp_rank: int = 0) -> Layout:
    """Return the layout of a rank, bound to the memory of its pool.

    Raises EngineError for a pool that is not known here or does not hold what the preset says of the model, naming the layer;
    PresetError and LayoutError as `engine_layout`.
    """
    layout = declared(pool, model, tp=tp, rank=rank, pp=pp, pp_rank=pp_rank)
    by_layer = {layer: part for part in _parts(pool) for layer in part.layers}
    return validate(msgspec.structs.replace(layout, regions=_regions(layout, by_layer)))


def windowed(pool: Any, layout: Layout) -> frozenset[int]:
    """Return the groups that SGLang keeps in a pool for windows, with page numbers of its own."""
    own = set(pool.swa_kv_pool.model_layer_ids) if type(pool) is SWAKVPool else set()
    return frozenset(i for i, group in enumerate(layout.groups) if own.issuperset(group.layer_ids))


def _regions(layout: Layout, by_layer: Mapping[int, _Part]) -> list[Region]:
    sizes, regions = region_sizes(layout), []
    for group in layout.groups:
        for layer in group.layer_ids:
            part = by_layer[layer]
            for name, shape in _shapes(group, layer, part).items():
                tensor = part.tensors[name]
                if tuple(tensor.shape) != shape or tensor.dtype != part.pool.dtype or not tensor.is_contiguous():
                    raise EngineError(
                        f"SGLang's {name} of layer {layer} has {list(tensor.shape)} of {tensor.dtype}, strides {list(tensor.stride())}; "
                        f"the preset says {list(shape)} of {part.pool.dtype}, contiguous"
                    )
                regions.append(Region(name, sizes[name], tensor.data_ptr()))
    return regions


def _shapes(group: Group, layer: int, part: _Part) -> dict[str, tuple[int, ...]]:
    """Return the shape that the tensors of a layer have if they hold what the preset says, by region."""
    rows = part.pool.size + part.pool.page_size
    regions: dict[str, list[Component]] = {}
    for component in group.components:
        regions.setdefault(component.at.region.replace("{layer}", str(layer)), []).append(component)
    out: dict[str, tuple[int, ...]] = {}
    for name, own in regions.items():
        heads, dim = own[0].heads, sum(component.dim for component in own)
        by_page = not part.latent and part.pool.kv_cache_layout == "hnd"
        out[name] = (part.pages, heads, group.page_size, dim) if by_page else (rows, heads, dim)
    return out


class SglangCache:
    """The first pages of a rank's pools, opened to the probe: see `regauge.engines.probe.Cache`."""

    def __init__(self, layout: Layout, pool: Any) -> None:
        """Raises EngineError for a pool of too few pages to be probed."""
        self._pool = pool
        self._parts = {layer: part for part in _parts(pool) for layer in part.layers}
        pages = 1 + PROBED_PAGES
        for group in layout.groups:
            if group.pages < pages:
                raise EngineError(
                    f"SGLang's pool has {group.pages} pages of {group.page_size} tokens; {pages} are needed to verify how they lie"
                )
        groups = [msgspec.structs.replace(group, pages=pages) for group in layout.groups]
        self._layout = msgspec.structs.replace(layout, groups=groups, regions=[])
        self._sizes = region_sizes(self._layout)

    @property
    def layout(self) -> Layout:
        """What the preset declares, with the pages that are probed."""
        return self._layout

    @property
    def dtype(self) -> str:
        """What the write operation takes: the pool's own dtype."""
        return str(next(iter(self._parts.values())).pool.dtype).removeprefix("torch.")

    @property
    def usable(self) -> Mapping[int, Sequence[int]]:
        """All but page 0."""
        return {index: range(1, 1 + PROBED_PAGES) for index in range(len(self._layout.groups))}

    def fill(self, byte: int) -> None:
        """Set every byte of the probed pages."""
        for region in self.read().values():
            region[:] = byte

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:
        """Write through the pool's `set_kv_buffer`; see `Cache`."""
        del kind  # a layer keeps one
        part = self._parts[layer]
        size = part.pool.page_size  # SGLang's own, whatever the layout says
        at = torch.from_numpy(slots(pages, size, len(next(iter(values.values())))))
        given = {key: torch.from_numpy(np.ascontiguousarray(v)).to(part.pool.dtype) for key, v in values.items()}
        if part.latent:
            k, v = torch.cat([given["latent"], given["rope"]], dim=-1), given["latent"]
        else:
            k, v = given["k"], given["v"]
        where = KVWriteLoc(at, swa_loc=at) if type(self._pool) is SWAKVPool else at
        self._pool.set_kv_buffer(SimpleNamespace(layer_id=layer), where, k, v)

    def read(self) -> Mapping[str, Bytes]:
        """Return the probed pages of every layer, in place."""
        out = {}
        for part in dict.fromkeys(self._parts.values()):
            for name, tensor in part.tensors.items():
                start = tensor.storage_offset() * tensor.element_size()
                out[name] = storage_bytes(tensor)[start : start + self._sizes[name]]
        return out


def verify(layout: Layout, pool: Any) -> None:
    """Check the layout against bytes that SGLang writes, and leave the probed pages zeroed. No request may use the pool yet.

    Raises EngineError saying what lies elsewhere.
    """
    require(SglangCache(layout, pool), "SGLang's pool")
