"""The vocabulary: what the bytes of a KV cache mean on one rank, as data.

A `Layout` says for every element (state group, layer, token, KV head, dim) where it lies and how it is written:

* `model` is what both sides must agree on: which layers keep which kind of `State`, and its shape on all ranks together;
* a `Group` is the layers of this rank that share a kind of state and a page size;
* a `Component` (`k`, `v`, `latent`, ...) is one array of elements: its dtype, its shape per token, its axes from outermost
  to innermost, the region it lives in, and its `Scale`;
* a `Shard` is which heads and tokens this rank holds; which layers, the groups say;
* a `Region` is a piece of registered memory.

| kind | layers that | components, heads x dim per token |
|---|---|---|
| `attention` | attend to all tokens (MHA, GQA) | `k` and `v`: KV heads x head dim |
| `window` | attend to the last `window` tokens, the token itself among them | as `attention` |
| `latent` | share one compressed vector among all heads (MLA) | `latent`: 1 x rank; `rope`: 1 x rotated dim |
| `indexer` | pick the tokens to attend to (sparse attention) | `index_k`: 1 x dim |
| `recurrent` | keep a state of fixed size per request (linear attention, SSM) | `ssm_state`, `conv_q`, ...: heads x dim per request |

A recurrent group has pages of one record, and a record stands for all tokens of its request up to an exact length.

Axis order is written as in einops: `"layer page kv token head dim"`. `kv` is the axis along which the components of a
group lie that share a tensor. `dim:8` is the inner part, of size 8, of a split axis, so that `"page head dim token dim:8"`
is a page whose head dim lies in vector lanes. Strides follow from the order, innermost first, unless `strides` gives one,
in bytes (padding, packed records: the 656-byte FP8 MLA token is `latent` at offset 0, its scales at 512 and `rope` at 528,
each with a token stride of 656). A region named `k.{layer}` is one region per layer; the order then has no `layer`.
A layout whose groups have no `pages` is symbolic: enough to check and explain, not to move.

Structs are frozen, and unknown fields are refused with their path.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Literal

import msgspec

from regauge.errors import LayoutError

Kind = Literal["attention", "latent", "indexer", "window", "recurrent"]
Per = Literal["tensor", "head", "token_head", "block"]
Rule = Literal["reciprocal", "divide", "divide_source"]

AXES = ("layer", "page", "kv", "token", "head", "dim")
SPLITTABLE = ("token", "head", "dim")
MAX_LAYERS = 100_000
MAX_SCALES = 1 << 20
"""Most constant scales of a component: a peer's layout must not cost arbitrary memory."""


class Rope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rotary embedding that keys carry: it is baked into their bytes, so both sides must use the same."""

    theta: float
    dim: int
    """Leading elements of each head that are rotated."""
    interleaved: bool = False
    """Pairs are (0,1), (2,3), ... instead of (0, dim/2), (1, dim/2+1), ..."""
    scaling: str = ""
    """Canonical JSON of the config's rope scaling; empty: none."""


class Array(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Shape of one array of a state, all ranks together: per layer and token, or per layer and request if recurrent."""

    heads: int
    """Heads over which tensor parallelism splits it; one head is replicated on every rank."""
    dim: int
    """Elements per head."""


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What some layers keep of every request."""

    kind: Kind
    layers: str
    """Layer numbers, written as in `Group.layers`."""
    arrays: dict[str, Array]
    window: int = 0
    """Tokens that a `window` layer attends to, the token itself among them; 0 for other kinds."""
    rope: Rope | None = None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layer numbers, as written."""
        return parse_layers(self.layers)


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What both sides of a pair must mean alike."""

    name: str
    num_layers: int
    states: list[State]
    revision: str = ""
    """Commit or digest of the weights; compared when both sides give one."""

    def state(self, kind: Kind, layer: int) -> State:
        """Return the state of a kind that a layer keeps. Raises LayoutError if it keeps none."""
        for state in self.states:
            if state.kind == kind and layer in state.layer_ids:
                return state
        raise LayoutError(f"layer {layer} of {self.name} keeps no {kind} state", path="model.states")

    def identity(self) -> str:
        """Return a SHA-256, in hex, of everything that changes what the bytes mean; the revision is left out."""
        return _digest(msgspec.structs.replace(self, revision=""))


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where an array lies."""

    order: str
    region: str = "kv"
    offset: int = 0
    """Bytes from the start of the region to the array's first element."""
    strides: dict[str, int] = {}
    """Bytes from one index of an axis to the next, where they do not follow from the order."""


class Scale(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The factor between codes and values: value = code * scale.

    Either constant (`values`: one number, one per layer, or one list of heads per layer) or written beside the codes for
    each (token, head), or for each `block` of elements of it (`at`: where; axes layer, page, token, head, and `dim` to
    number the blocks).

    How codes and stored scales are made is part of the format, since it changes bits. In float32:

    * `rule` "reciprocal": code = round(value * (1 / scale)); "divide": round(value / scale); "divide_source": as "divide",
      but the quotient is first rounded to the dtype that the value came in (bfloat16, float16);
    * a stored scale is max(amax / MAX, `floor`), amax being the largest magnitude that it covers and MAX the dtype's
      largest value; with `pow2`, the smallest power of two that is not less.
    """

    per: Per
    values: float | list[float | list[float]] | None = None
    at: Placement | None = None
    block: int = 0
    """Elements that share a scale, for `per = "block"`."""
    dtype: str = "float32"
    """Of stored scales: float32; float8_e8m0fnu, whose code c means 2^(c - 127); or float8_e4m3fn."""
    rule: Rule = "reciprocal"
    floor: float = 2.0**-126
    pow2: bool = False

    def blocks(self, dim: int) -> int:
        """Return how many scales `dim` elements of one head and token have."""
        return dim // self.block if self.per == "block" else 1


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One array of elements of a group."""

    name: str
    dtype: str
    heads: int
    """Heads on this rank."""
    dim: int
    """Elements per head."""
    at: Placement
    scale: Scale | None = None
    first_head: int = -1
    """Global number of the first head; -1: the shard's contiguous share."""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Layers of this rank that share a kind of state and a page size."""

    kind: Kind
    layers: str
    """Global layer numbers on this rank: `"0-29"`, `"0,4,8"`, `"3-63:4"` (every fourth)."""
    page_size: int
    """Tokens per page; 1 if recurrent."""
    components: list[Component]
    pages: int = 0
    """Pages in the pool; 0: symbolic."""

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global layer numbers, in the order in which they lie in memory."""
        return parse_layers(self.layers)

    def component(self, name: str) -> Component:
        """Return the component of that name. Raises LayoutError if there is none."""
        for component in self.components:
            if component.name == name:
                return component
        raise LayoutError(f"no component {name!r}", path="components")


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which part of the model, and which tokens, this rank holds.

    Tensor parallelism splits heads. Pipeline parallelism splits layers: the groups name those of this rank. Context
    parallelism deals tokens out in stripes: this rank holds token t if (t // cp_stripe) % cp_size == cp_rank, and packs
    its tokens, in order, into its pages.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    cp_stripe: int = 1
    """Tokens per stripe."""

    def heads(self, heads: int) -> range:
        """Return this rank's share of an array's heads: a contiguous part, or one replicated head when TP exceeds them."""
        if self.tp_size <= heads:
            share = heads // self.tp_size
            return range(self.tp_rank * share, (self.tp_rank + 1) * share)
        head = self.tp_rank * heads // self.tp_size
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

    def digest(self) -> str:
        """Return a SHA-256, in hex, of everything that changes where or how bytes lie; addresses are left out."""
        return _digest(
            msgspec.structs.replace(self, regions=[msgspec.structs.replace(r, base=0) for r in self.regions])
        )

    def heads(self, group: Group, component: Component) -> range:
        """Return the global numbers of the heads of a component on this rank."""
        if component.first_head >= 0:
            return range(component.first_head, component.first_head + component.heads)
        state = self.model.state(group.kind, group.layer_ids[0])
        return self.shard.heads(state.arrays[component.name].heads)


def with_components(layout: Layout, change: Callable[[Component], Component]) -> Layout:
    """Return the layout with every component replaced by what `change` makes of it."""
    groups = [msgspec.structs.replace(g, components=[change(c) for c in g.components]) for g in layout.groups]
    return msgspec.structs.replace(layout, groups=groups)


def _digest(struct: msgspec.Struct) -> str:
    return hashlib.sha256(json.dumps(_plain(struct), sort_keys=True).encode()).hexdigest()


def _plain(value: object) -> object:
    """Return a struct with all its fields: `to_builtins` leaves out a default, but not always one that was written out."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, list) else value


def parse_layers(text: str, *, path: str = "layers") -> tuple[int, ...]:
    """Parse `"0-29"`, `"0,4,8"`, `"3-63:4"`. Raises LayoutError for anything else, and for a layer named twice."""
    ids: list[int] = []
    for part in text.replace(" ", "").split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        try:
            start, end, by = int(first), int(last or first), int(step or 1)
        except ValueError:
            raise LayoutError(f"{text!r} is not a list of layers such as '0-29' or '0,4,8'", path=path) from None
        if start < 0 or end < start or by < 1 or end > MAX_LAYERS:
            raise LayoutError(f"{part!r} is not an ascending range of layers", path=path)
        ids.extend(range(start, end + 1, by))
        if len(ids) > MAX_LAYERS + 1:
            break  # one is named twice: a short text must not ask for a long list
    if len(set(ids)) != len(ids):
        raise LayoutError(f"{text!r} names a layer twice", path=path)
    return tuple(ids)


def format_layers(ids: tuple[int, ...]) -> str:
    """Write layer numbers as `parse_layers` reads them: ranges of constant step, such as `0-2,4-6,7-79:8`."""
    parts, i = [], 0
    while i < len(ids):
        step = ids[i + 1] - ids[i] if i + 1 < len(ids) else 0
        last = i + 1 if step > 0 else i
        while last + 1 < len(ids) and step > 0 and ids[last + 1] - ids[last] == step:
            last += 1
        if step != 1 and last - i < 2:
            last = i
        span = f"{ids[i]}-{ids[last]}" if last > i else str(ids[i])
        parts.append(f"{span}:{step}" if last > i and step > 1 else span)
        i = last + 1
    return ",".join(parts)


def parse_order(
    order: str, *, path: str = "order", required: tuple[str, ...] = ("page", "token")
) -> tuple[tuple[str, int | None], ...]:
    """Parse an axis order into (axis, inner size) pairs, outermost first.

    The inner size is None for a whole or outer axis, and n for `axis:n`. Raises LayoutError for an unknown axis, one that is named
    twice, or a split part whose outer part does not come before it, and an order without a `required` axis.
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
    for axis in required:
        if axis not in names:
            raise LayoutError(f"{order!r} lacks the {axis} axis", path=path)
    return tuple(axes)


def required_axes(kind: Kind) -> tuple[str, ...]:
    """Return the axes that an order of a group of that kind must have."""
    return ("page",) if kind == "recurrent" else ("page", "token")


def scale_table(scale: Scale, layers: int, heads: int, *, path: str = "scale") -> list[list[float]]:
    """Return constant scales as one row of `heads` numbers per layer. Raises LayoutError where they do not fit."""
    values = scale.values
    if layers * heads > MAX_SCALES:
        raise LayoutError(
            f"{layers} layers of {heads} heads; at most {MAX_SCALES} constant scales", path=f"{path}.values"
        )
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
