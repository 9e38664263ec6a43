"""The vocabulary: what the bytes of a KV cache mean on one rank, as data.

A `Layout` says for every element (state group, layer, token, KV head, dim) where it lies and how it is written:

* `model` is what both sides must agree on;
* a `Group` is the layers that share a kind of state and a page size;
* a `Component` (`k`, `v`, ...) is one array of elements: its dtype, its shape per token, its axes from outermost to
  innermost, the region it lives in, and its `Scale`;
* a `Region` is a piece of registered memory.

Axis order is written as in einops: `"layer page kv token head dim"`. `kv` is the axis along which the components of a
group lie that share a tensor. `dim:8` is the inner part, of size 8, of a split axis, so that `"page head dim token dim:8"`
is a page whose head dim lies in vector lanes. Strides follow from the order, innermost first, unless `strides` gives one,
in bytes (padding, packed records). A region named `k.{layer}` is one region per layer; the order then has no `layer`.
A layout whose groups have no `pages` is symbolic: enough to check and explain, not to move.

Structs are frozen, and unknown fields are refused with their path.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any, Literal

import msgspec

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES

Kind = Literal["attention", "latent", "indexer", "window", "recurrent"]
Per = Literal["tensor", "head", "token_head"]
Rule = Literal["reciprocal", "divide"]

AXES = ("layer", "page", "kv", "token", "head", "dim")
SPLITTABLE = ("token", "head", "dim")


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rotary embedding that keys carry: it is baked into their bytes, so both sides must use the same."""

    theta: float
    dim: int
    """Leading elements of each head that are rotated."""
    interleaved: bool = False
    """Pairs are (0,1), (2,3), ... instead of (0, dim/2), (1, dim/2+1), ..."""
    scaling: str = ""
    """Canonical JSON of the config's rope scaling; empty: none."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What both sides of a pair must mean alike."""

    name: str
    num_layers: int
    kv_heads: int
    """KV heads of the whole model, all ranks together."""
    head_dim: int
    """Elements per head of K."""
    v_head_dim: int = 0
    """Elements per head of V; 0: as K."""
    rope: Rope | None = None
    revision: str = ""
    """Commit or digest of the weights; compared when both sides give one."""

    @property
    def value_dim(self) -> int:
        """Elements per head of V."""
        return self.v_head_dim or self.head_dim


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where an array lies."""

    order: str
    region: str = "kv"
    offset: int = 0
    """Bytes from the start of the region to the array's first element."""
    strides: dict[str, int] = {}
    """Bytes from one index of an axis to the next, where they do not follow from the order."""


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The float32 factor between codes and values: value = code * scale.

    Either constant (`values`: one number, one per layer, or one list of heads per layer) or written beside the codes for
    each (token, head) (`at`: where; axes layer, page, token, head). `rule` is how codes are made, since it changes
    bits: "reciprocal" is code = round(value * (1 / scale)), "divide" is code = round(value / scale), both in float32.
    """

    per: Per
    values: float | list[float | list[float]] | None = None
    at: Placement | None = None
    rule: Rule = "reciprocal"


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One array of elements of a group."""

    name: str
    dtype: str
    heads: int
    """KV heads on this rank."""
    dim: int
    """Elements per head."""
    at: Placement
    scale: Scale | None = None


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layers that share a kind of state and a page size."""

    kind: Kind
    layers: str
    """Global layer numbers on this rank: `"0-29"`, `"0,4,8"`, `"3-63:4"` (every fourth)."""
    page_size: int
    """Tokens per page."""
    components: list[Component]
    pages: int = 0
    """Pages in the pool; 0: symbolic."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global layer numbers, in the order in which they lie in memory."""
        return parse_layers(self.layers)


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which part of the model this rank holds."""

    tp_rank: int = 0
    tp_size: int = 1

    def heads(self, kv_heads: int) -> range:
        """Return the global KV heads of this rank: a contiguous share, or one replicated head when TP exceeds the heads."""
        if self.tp_size <= kv_heads:
            share = kv_heads // self.tp_size
            return range(self.tp_rank * share, (self.tp_rank + 1) * share)
        head = self.tp_rank * kv_heads // self.tp_size
        return range(head, head + 1)


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A piece of registered memory."""

    name: str
    nbytes: int
    base: int = 0
    """Address of its first byte in its owner's address space; 0: not bound."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything needed to find and understand every element of a KV cache on one rank."""

    model: Model
    groups: list[Group]
    shard: Shard = Shard()
    regions: list[Region] = []

    @property
    def heads(self) -> range:
        """Global KV heads that this rank holds."""
        return self.shard.heads(self.model.kv_heads)

    def digest(self) -> str:
        """Return a SHA-256, in hex, of everything that changes where or how bytes lie; addresses are left out."""
        regions = [msgspec.structs.replace(r, base=0) for r in self.regions]
        plain = msgspec.to_builtins(msgspec.structs.replace(self, regions=regions))
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse `"0-29"`, `"0,4,8"`, `"3-63:4"`. Raises LayoutError for anything else, and for a layer named twice."""
    ids: list[int] = []
    for part in text.replace(" ", "").split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        try:
            start, end, by = int(first), int(last or first), int(step or 1)
        except ValueError:
            raise LayoutError(f"{text!r} is not a list of layers such as '0-29' or '0,4,8'", path="layers") from None
        if start < 0 or end < start or by < 1 or end > 100_000:
            raise LayoutError(f"{part!r} is not an ascending range of layers", path="layers")
        ids.extend(range(start, end + 1, by))
    if len(set(ids)) != len(ids):
        raise LayoutError(f"{text!r} names a layer twice", path="layers")
    return tuple(ids)


def format_layers(ids: tuple[int, ...]) -> str:
    """Write layer numbers as `parse_layers` reads them: one range where the step is constant, else a list."""
    if len(ids) > 1 and len(steps := {b - a for a, b in itertools.pairwise(ids)}) == 1 and (step := steps.pop()) > 0:
        return f"{ids[0]}-{ids[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ids))


def parse_order(order: str, *, path: str = "order") -> tuple[tuple[str, int | None], ...]:
    """Parse an axis order into (axis, inner size) pairs, outermost first.

    The inner size is None for a whole or outer axis, and n for `axis:n`. Raises LayoutError for an unknown axis, one that is named
    twice, or a split part whose outer part does not come before it.
    """
    axes: list[tuple[str, int | None]] = []
    for token in order.split():
        name, colon, size = token.partition(":")
        if name not in AXES:
            raise LayoutError(f"unknown axis {name!r}; the axes are {', '.join(AXES)}", path=path)
        if colon and (name not in SPLITTABLE or not size.isdigit() or int(size) < 1):
            raise LayoutError(f"{token!r}: only {', '.join(SPLITTABLE)} can be split, as in 'dim:8'", path=path)
        inner = int(size) if colon else None
        outer_seen = any(a == name and n is None for a, n in axes)
        if any(a == name and (n is None) == (inner is None) for a, n in axes) or (inner is not None and not outer_seen):
            raise LayoutError(f"axis {token!r} is named twice, or its outer part is missing before it", path=path)
        axes.append((name, inner))
    names = {a for a, _ in axes}
    if "page" not in names or "token" not in names:
        raise LayoutError(f"{order!r} lacks the page or the token axis", path=path)
    return tuple(axes)


def validate(layout: Layout) -> Layout:
    """Return the layout itself if it is sound. Raises LayoutError that names the first field that is not."""
    model = layout.model
    for name in ("num_layers", "kv_heads", "head_dim"):
        _positive(getattr(model, name), f"model.{name}", 1 << 20)
    shard = layout.shard
    if not 0 <= shard.tp_rank < shard.tp_size:
        raise LayoutError(f"rank {shard.tp_rank} of {shard.tp_size}", path="shard.tp_rank")
    big, small = max(shard.tp_size, model.kv_heads), min(shard.tp_size, model.kv_heads)
    if big % small:
        raise LayoutError(f"{model.kv_heads} KV heads do not divide over {shard.tp_size} ranks", path="shard.tp_size")
    if not layout.groups:
        raise LayoutError("a layout needs at least one group", path="groups")
    regions = [r.name for r in layout.regions]
    if len(set(regions)) != len(regions):
        raise LayoutError(f"two regions have the same name: {regions}", path="regions")
    for index, group in enumerate(layout.groups):
        _validate_group(layout, group, f"groups[{index}]")
    return layout


def _validate_group(layout: Layout, group: Group, path: str) -> None:
    _positive(group.page_size, f"{path}.page_size", 1 << 20)
    if not 0 <= group.pages <= 1 << 40:
        raise LayoutError(f"{group.pages} pages", path=f"{path}.pages")
    try:
        last = max(group.layer_ids)
    except LayoutError as error:
        raise LayoutError(str(error), path=path) from None
    if last >= layout.model.num_layers:
        raise LayoutError(f"layer {last} of a model with {layout.model.num_layers}", path=f"{path}.layers")
    names = [c.name for c in group.components]
    if not names or len(set(names)) != len(names):
        raise LayoutError(f"component names must be given and differ: {names}", path=f"{path}.components")
    for index, component in enumerate(group.components):
        at = f"{path}.components[{index}]"
        if component.dtype not in DTYPES:
            raise LayoutError(f"unknown dtype {component.dtype!r}; known are {', '.join(DTYPES)}", path=f"{at}.dtype")
        _positive(component.heads, f"{at}.heads", 1 << 16)
        _positive(component.dim, f"{at}.dim", 1 << 16)
        if group.kind == "attention":
            _validate_geometry(layout, component, at)
        _validate_placement(component.at, f"{at}.at", {"head": component.heads, "dim": component.dim})
        if component.scale is not None:
            _validate_scale(component.scale, group, component, f"{at}.scale")


def _validate_geometry(layout: Layout, component: Component, path: str) -> None:
    if component.heads != len(layout.heads):
        raise LayoutError(
            f"{component.heads} heads, but rank {layout.shard.tp_rank} of {layout.shard.tp_size} holds {len(layout.heads)} "
            f"of the model's {layout.model.kv_heads} KV heads", path=f"{path}.heads")  # fmt: skip
    expected = {"k": layout.model.head_dim, "v": layout.model.value_dim}.get(component.name, component.dim)
    if component.dim != expected:
        raise LayoutError(f"{component.dim}, but the model's head dim is {expected}", path=f"{path}.dim")


def _validate_placement(at: Placement, path: str, sizes: dict[str, int]) -> None:
    axes = parse_order(at.order, path=f"{path}.order")
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
    if scale.at is not None:
        if scale.per != "token_head":
            raise LayoutError("scales stored beside the codes are per token_head", path=f"{path}.per")
        _validate_placement(scale.at, f"{path}.at", {"head": component.heads})
        if "dim" in scale.at.order:
            raise LayoutError("a scale has no dim axis", path=f"{path}.at.order")
    elif scale.per == "token_head":
        raise LayoutError("scales per token_head change with every token: say where they are stored", path=f"{path}.at")
    else:
        scale_table(scale, len(group.layer_ids), component.heads, path=path)


def scale_table(scale: Scale, layers: int, heads: int, *, path: str = "scale") -> list[list[float]]:
    """Return constant scales as one row of `heads` numbers per layer. Raises LayoutError where they do not fit."""
    values = scale.values
    if not isinstance(values, list):
        values = [float(values if values is not None else 1.0)] * layers
    if len(values) != layers:
        raise LayoutError(f"{len(values)} values for {layers} layers", path=f"{path}.values")
    rows = [list(v) if isinstance(v, list) else [v] * heads for v in values]
    for row in rows:
        if len(row) != heads or (scale.per == "tensor" and len(set(row)) != 1):
            raise LayoutError(f"{len(row)} values for {heads} heads, per {scale.per}", path=f"{path}.values")
        if not all(0.0 < x < float("inf") for x in row):
            raise LayoutError("scales are finite and positive", path=f"{path}.values")
    return rows


def _positive(value: int, path: str, most: int = 1 << 40) -> None:
    if value < 1:
        raise LayoutError(f"{value} is not positive", path=path)
    if value > most:
        raise LayoutError(f"{value} exceeds {most}", path=path)


def decode(data: bytes, *, format: Literal["toml", "json"]) -> Layout:  # noqa: A002
    """Read a layout. Raises LayoutError with the path of the field that is unknown, missing or wrong."""
    try:
        layout = msgspec.toml.decode(data, type=Layout) if format == "toml" else msgspec.json.decode(data, type=Layout)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LayoutError(str(error)) from error
    return validate(layout)


def encode(layout: Layout, *, format: Literal["toml", "json"]) -> bytes:  # noqa: A002
    """Write a layout; `decode` gives it back."""
    plain: Any = msgspec.to_builtins(layout)
    return msgspec.toml.encode(plain) if format == "toml" else msgspec.json.format(msgspec.json.encode(plain), indent=2)
