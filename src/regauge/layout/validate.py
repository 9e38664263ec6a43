"""Is a layout sound? Names the first field that is not."""

from __future__ import annotations

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES, SCALE_DTYPES
from regauge.layout.spec import (
    MAX_LAYERS,
    Component,
    Group,
    Kind,
    Layout,
    Model,
    Placement,
    Scale,
    Shard,
    State,
    parse_layers,
    parse_order,
    required_axes,
    scale_table,
)


def validate(layout: Layout) -> Layout:
    """Return the layout itself if it is sound. Raises LayoutError that names the first field that is not."""
    _validate_model(layout.model)
    _validate_shard(layout.shard)
    if not layout.groups:
        raise LayoutError("a layout needs at least one group", path="groups")
    regions = [r.name for r in layout.regions]
    if len(set(regions)) != len(regions):
        raise LayoutError(f"two regions have the same name: {regions}", path="regions")
    held: set[tuple[str, str, int]] = set()
    for index, group in enumerate(layout.groups):
        _validate_group(layout, group, f"groups[{index}]")
        for component in group.components:
            own = {(group.kind, component.name, layer) for layer in group.layer_ids}
            if twice := held & own:
                layer = min(x for _, _, x in twice)
                raise LayoutError(f"{component.name} of layer {layer} is in another group too", path=f"groups[{index}]")
            held |= own
    return layout


def _validate_model(model: Model) -> None:
    _positive(model.num_layers, "model.num_layers", MAX_LAYERS)
    if not model.states:
        raise LayoutError("say what its layers keep", path="model.states")
    kept: set[tuple[str, int]] = set()
    for index, state in enumerate(model.states):
        path = f"model.states[{index}]"
        ids = _layers(state.layers, model.num_layers, path)
        if twice := kept & {(state.kind, x) for x in ids}:
            raise LayoutError(f"layer {min(twice)[1]} keeps a {state.kind} state already", path=f"{path}.layers")
        kept |= {(state.kind, x) for x in ids}
        if not state.arrays:
            raise LayoutError("name its arrays, such as k and v", path=f"{path}.arrays")
        for name, array in state.arrays.items():
            _positive(array.heads, f"{path}.arrays.{name}.heads", 1 << 16)
            _positive(array.dim, f"{path}.arrays.{name}.dim", 1 << 24)
        if (state.kind == "window") != (state.window > 0):
            raise LayoutError("a window state, and no other, says how many tokens it attends to", path=f"{path}.window")


def _validate_shard(shard: Shard) -> None:
    for name, size, rank in (
        ("tp", shard.tp_size, shard.tp_rank),
        ("pp", shard.pp_size, shard.pp_rank),
        ("cp", shard.cp_size, shard.cp_rank),
    ):
        if not 0 <= rank < size <= 1 << 16:
            raise LayoutError(f"rank {rank} of {size}", path=f"shard.{name}_rank")
    _positive(shard.cp_stripe, "shard.cp_stripe", 1 << 20)


def _layers(text: str, num_layers: int, path: str) -> tuple[int, ...]:
    ids = parse_layers(text, path=f"{path}.layers")
    if max(ids) >= num_layers:
        raise LayoutError(f"layer {max(ids)} of a model with {num_layers}", path=f"{path}.layers")
    return ids


def _validate_group(layout: Layout, group: Group, path: str) -> None:
    _positive(group.page_size, f"{path}.page_size", 1 << 20)
    if group.kind == "recurrent" and group.page_size != 1:
        raise LayoutError("a recurrent state is one record per request: pages of 1", path=f"{path}.page_size")
    if not 0 <= group.pages <= 1 << 40:
        raise LayoutError(f"{group.pages} pages", path=f"{path}.pages")
    ids = _layers(group.layers, layout.model.num_layers, path)
    names = [c.name for c in group.components]
    if not names or len(set(names)) != len(names):
        raise LayoutError(f"component names must be given and differ: {names}", path=f"{path}.components")
    try:
        state = layout.model.state(group.kind, ids[0])
    except LayoutError as error:
        raise LayoutError(str(error), path=f"{path}.kind") from None
    if others := set(ids) - set(state.layer_ids):
        raise LayoutError(
            f"layer {min(others)} keeps another {group.kind} state than layer {ids[0]}, or none: give it a group of its own",
            path=f"{path}.layers")  # fmt: skip
    for index, component in enumerate(group.components):
        at = f"{path}.components[{index}]"
        if component.dtype not in DTYPES:
            raise LayoutError(f"unknown dtype {component.dtype!r}; known are {', '.join(DTYPES)}", path=f"{at}.dtype")
        _validate_geometry(layout, state, component, at)
        sizes = {"token": group.page_size, "head": component.heads, "dim": component.dim}
        _validate_placement(component.at, f"{at}.at", sizes, group.kind)
        if component.scale is not None:
            _validate_scale(component.scale, group, component, f"{at}.scale")


def _validate_geometry(layout: Layout, state: State, component: Component, path: str) -> None:
    _positive(component.heads, f"{path}.heads", 1 << 16)
    array = state.arrays.get(component.name)
    if array is None:
        raise LayoutError(
            f"the model's {state.kind} state has no array {component.name!r}; it has {', '.join(state.arrays)}",
            path=f"{path}.name")  # fmt: skip
    if component.dim != array.dim:
        raise LayoutError(f"{component.dim}, but the model's {component.name} has {array.dim}", path=f"{path}.dim")
    if component.first_head >= 0:
        if component.first_head + component.heads > array.heads:
            raise LayoutError(f"{component.heads} heads from {component.first_head} on, but the model's {component.name} has "
                              f"{array.heads}", path=f"{path}.first_head")  # fmt: skip
        return
    shard = layout.shard
    big, small = max(shard.tp_size, array.heads), min(shard.tp_size, array.heads)
    if big % small:
        raise LayoutError(
            f"{array.heads} heads of {component.name} do not divide over {shard.tp_size} ranks: give each component its first_head",
            path="shard.tp_size")  # fmt: skip
    if component.heads != len(shard.heads(array.heads)):
        raise LayoutError(
            f"{component.heads} heads, but rank {shard.tp_rank} of {shard.tp_size} holds {len(shard.heads(array.heads))} "
            f"of the model's {array.heads}", path=f"{path}.heads")  # fmt: skip


def _validate_placement(at: Placement, path: str, sizes: dict[str, int], kind: Kind) -> None:
    axes = parse_order(at.order, path=f"{path}.order", required=required_axes(kind))
    names = {a for a, _ in axes}
    missing = [a for a, n in sizes.items() if n > 1 and a not in names]
    if missing:
        raise LayoutError(f"{at.order!r} lacks {', '.join(missing)}", path=f"{path}.order")
    if ("layer" in names) == ("{layer}" in at.region):
        raise LayoutError("name the layer either as an axis of the order or as {layer} in the region, not both or neither",
                          path=f"{path}.order")  # fmt: skip
    for axis, inner in axes:
        if inner is not None and axis in sizes and sizes[axis] % inner:
            raise LayoutError(f"{axis} of size {sizes[axis]} cannot be split by {inner}", path=f"{path}.order")
    if not 0 <= at.offset <= 1 << 48:
        raise LayoutError(f"{at.offset} is no offset", path=f"{path}.offset")
    written = {a if n is None else f"{a}:{n}" for a, n in axes}
    for name, stride in at.strides.items():
        if name not in written:
            raise LayoutError(f"{name!r} is no axis of {at.order!r}", path=f"{path}.strides")
        _positive(stride, f"{path}.strides.{name}")


def _validate_scale(scale: Scale, group: Group, component: Component, path: str) -> None:
    if (scale.values is None) == (scale.at is None):
        raise LayoutError("give either the constant values or where they are stored", path=path)
    if scale.dtype not in SCALE_DTYPES:
        raise LayoutError(f"unknown dtype {scale.dtype!r}; known are {', '.join(SCALE_DTYPES)}", path=f"{path}.dtype")
    if (scale.per == "block") != (scale.block > 0) or component.dim % (scale.block or 1):
        raise LayoutError(f"per {scale.per} with blocks of {scale.block}, in a head of {component.dim} elements: blocks have a "
                          "size that divides it, and only they", path=f"{path}.block")  # fmt: skip
    if not 2.0**-126 <= scale.floor <= 2.0**127:
        raise LayoutError(f"{scale.floor} is not between 2^-126 and 2^127", path=f"{path}.floor")
    if scale.at is not None:
        if scale.per not in ("token_head", "block"):
            raise LayoutError("scales stored beside the codes are per token_head or block", path=f"{path}.per")
        if scale.dtype == "float8_e8m0fnu" and not scale.pow2:
            raise LayoutError("float8_e8m0fnu holds powers of two: set pow2", path=f"{path}.pow2")
        blocks = scale.blocks(component.dim)
        _validate_placement(
            scale.at, f"{path}.at", {"token": group.page_size, "head": component.heads, "dim": blocks}, group.kind
        )
        if scale.per == "token_head" and "dim" in scale.at.order:
            raise LayoutError("a scale per token_head has no dim axis", path=f"{path}.at.order")
    elif scale.per in ("token_head", "block"):
        raise LayoutError(
            f"scales per {scale.per} change with every token: say where they are stored", path=f"{path}.at"
        )
    elif scale.dtype != "float32":
        raise LayoutError(f"{scale.dtype} is of stored scales: constant ones are float32", path=f"{path}.dtype")
    else:
        scale_table(scale, len(group.layer_ids), component.heads, path=path)


def _positive(value: int, path: str, most: int = 1 << 40) -> None:
    if value < 1:
        raise LayoutError(f"{value} is not positive", path=path)
    if value > most:
        raise LayoutError(f"{value} exceeds {most}", path=path)
