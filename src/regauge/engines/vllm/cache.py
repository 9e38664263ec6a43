"""From the tensors that vLLM registers to a layout, and the probe that verifies it: both on the CPU backend.

Shape and byte length do not say how bytes lie (a CPU page is K transposed, then V, whatever the tensor's shape says). What the
preset declares is therefore written through the layer's own cache-write operation and looked for byte by byte before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from regauge.engines.probe import require, slots, storage_bytes
from regauge.errors import EngineError
from regauge.layout.engines import Flags, engine_layout
from regauge.layout.probe.codes import Bytes, Floats
from regauge.layout.spec import Component, Group, Kind, Layout, Model, Region
from regauge.layout.validate import validate
from regauge.layout.view import region_sizes

PROBED_PAGES = 4
"""Of each group; the null block, 0, is none of them."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def layer_number(name: str) -> int:
    """Return the number in a layer's name, as `model.layers.3.self_attn.attn`. Raises EngineError for a name without one."""
    found = _LAYER.search(name)
    if found is None:
        raise EngineError(f"vLLM's layer {name!r} has no number: what it keeps is not known here")
    return int(found[1])


def rank_layout(model: Model, flags: Flags) -> Layout:
    """Return the layout of a rank, every layer in a region of its own: `kv0.3` is layer 3 of group 0. Raises as `engine_layout`."""
    layout = engine_layout("vllm", model, flags)
    groups = [_own_regions(group, index) for index, group in enumerate(layout.groups)]
    return validate(msgspec.structs.replace(layout, groups=groups, regions=[]))


def read(declared: Layout, groups: Sequence[tuple[Sequence[str], int]], tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout bound to the registered tensors.

    `groups`: the layer names and block size of each of vLLM's KV cache groups. Raises EngineError where they are not as declared, naming
    the group or the layer.
    """
    if len(groups) != len(declared.groups):
        raise EngineError(
            f"vLLM has {len(groups)} KV cache groups, its preset {len(declared.groups)}: an unknown kind of model"
        )
    sizes, regions = region_sizes(declared), []
    for index, (group, (names, block_size)) in enumerate(zip(declared.groups, groups, strict=True)):
        layers = {layer_number(name): name for name in names}
        if tuple(sorted(layers)) != tuple(sorted(group.layer_ids)) or block_size != group.page_size:
            raise EngineError(
                f"vLLM's KV cache group {index} has layers {sorted(layers)} in blocks of {block_size}, its preset layers "
                f"{list(group.layer_ids)} in blocks of {group.page_size}"
            )
        for layer, name in layers.items():
            tensor, region = tensors[name], f"kv{index}.{layer}"
            if tensor.device.type != "cpu":
                raise EngineError(f"{name} is on {tensor.device}: this adapter knows vLLM's CPU backend")
            nbytes = tensor.numel() * tensor.element_size()
            if not tensor.is_contiguous() or nbytes != sizes[region]:
                raise EngineError(
                    f"{name}: {list(tensor.shape)} of {tensor.dtype}, strides {list(tensor.stride())}, has {nbytes} bytes; "
                    f"the preset says {sizes[region]}"
                )
            regions.append(Region(region, nbytes, tensor.data_ptr()))
    return validate(msgspec.structs.replace(declared, regions=regions))


Write = Callable[[str, Mapping[str, torch.Tensor], torch.Tensor], None]
"""Write (layer name, values by component [tokens, heads, dim], slots int64[tokens]) through the engine's own operation."""


class VllmCache:
    """The first blocks of one KV cache group's tensors, opened to the probe: see `regauge.engines.probe.Cache`.

    One group at a time, since groups share memory: a block number belongs to one of them.
    """

    def __init__(
        self, layout: Layout, index: int, names: Sequence[str], tensors: Mapping[str, torch.Tensor], write: Write
    ) -> None:
        """`names`: the group's layers. Raises EngineError for a cache of too few blocks to be probed."""
        pages = 1 + PROBED_PAGES
        group = layout.groups[index]
        if group.pages < pages:
            raise EngineError(f"the KV cache has {group.pages} blocks; {pages} are needed to verify how they lie")
        self._layout = msgspec.structs.replace(layout, groups=[msgspec.structs.replace(group, pages=pages)], regions=[])
        self._index = index
        self._names = {layer_number(name): name for name in names}
        self._tensors = {layer: tensors[name] for layer, name in self._names.items()}
        self._sizes = region_sizes(self._layout)
        self._write = write

    @property
    def layout(self) -> Layout:
        """What the preset declares, with the blocks that are probed."""
        return self._layout

    @property
    def dtype(self) -> str:
        """What the write operation takes: the cache's own dtype."""
        return str(next(iter(self._tensors.values())).dtype).removeprefix("torch.")

    @property
    def usable(self) -> Mapping[int, Sequence[int]]:
        """All but the null block."""
        return {0: range(1, 1 + PROBED_PAGES)}

    def fill(self, byte: int) -> None:
        """Set every byte of the probed blocks."""
        for region in self.read().values():
            region[:] = byte

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:
        """Write through the layer's own operation; see `Cache`."""
        del kind  # a layer keeps one
        tensor = self._tensors[layer]
        size = tensor.shape[-2]  # vLLM's own block size, whatever the layout says
        where = torch.from_numpy(slots(pages, size, len(next(iter(values.values())))))
        given = {key: torch.from_numpy(np.ascontiguousarray(v)).to(tensor.dtype) for key, v in values.items()}
        self._write(self._names[layer], given, where)

    def read(self) -> Mapping[str, Bytes]:
        """Return the probed blocks of every layer, in place."""
        out = {}
        for layer, tensor in self._tensors.items():
            name, start = f"kv{self._index}.{layer}", tensor.storage_offset() * tensor.element_size()
            out[name] = storage_bytes(tensor)[start : start + self._sizes[name]]
        return out


def verify(
    layout: Layout, names: Sequence[Sequence[str]], tensors: Mapping[str, torch.Tensor], write: Write
) -> None:  # fmt: skip
    """Check the layout against bytes that the engine writes, and leave the cache zeroed.

    `names`: the layers of each KV cache group. Raises EngineError saying what lies elsewhere.
    """
    for index, own in enumerate(names):
        require(VllmCache(layout, index, own, tensors, write), f"vLLM's KV cache (group {index})")


def _own_regions(group: Group, index: int) -> Group:
    def own(component: Component) -> Component:
        axes = component.at.order.split()
        if axes[0] != "layer":
            raise EngineError(f"a pool in the order {component.at.order!r} has no region of its own for each layer")
        strides = {axis: stride for axis, stride in component.at.strides.items() if axis != "layer"}
        at = msgspec.structs.replace(
            component.at, order=" ".join(axes[1:]), region=f"kv{index}.{{layer}}", strides=strides
        )
        return msgspec.structs.replace(component, at=at)

    return msgspec.structs.replace(group, components=[own(c) for c in group.components])


def write_through(layers: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Write:
    """Return the write operation of vLLM's attention layers: `do_kv_cache_update` of each one's implementation."""

    def write(name: str, values: Mapping[str, torch.Tensor], slots: torch.Tensor) -> None:
        layer, tensor = layers[name], tensors[name]
        if "latent" in values:
            latent, rope = values["latent"][:, 0], values["rope"]
            layer.impl.do_kv_cache_update(latent, rope, tensor, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            layer.impl.do_kv_cache_update(layer, values["k"], values["v"], tensor, slots)

    return write
