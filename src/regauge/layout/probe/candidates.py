"""The packings that a page dump is searched for: every engine preset and every short form that a model can have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.engines import PREFIX, engine_names, from_engine_form, pool_names
from regauge.layout.presets import from_short
from regauge.layout.records import RECORDS
from regauge.layout.spec import Component, Layout, Placement
from regauge.layout.validate import validate
from regauge.layout.view import region_sizes

Named = tuple[str, Layout]
_ORDERS = ("nhd", "hnd", "kt")
_SCALES = ("none", "token_head", "block")
_ENGINE_DTYPES = ("auto", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "fp8_per_token_head", "fp8_ds_mla")
_RECORDS = ("", ",record=raw", ",record=packed")


def candidates(like: Layout, dtypes: Sequence[str], *, nbytes: int, pages: int = 0) -> Iterator[Named]:
    """Return known layouts for the model, rank and page size of `like`, by name; those that the model cannot have are left out.

    `dtypes`: of the elements, by torch's names. `nbytes`: of the dump. `pages`: in the pool, on which some orders depend; 0: as
    many as the dump has room for.
    """
    records = max((g.pages for g in like.groups if g.kind == "recurrent"), default=1)
    sizes = dict.fromkeys(g.page_size for g in like.groups if g.kind != "recurrent") or {1: None}
    for page_size, make in itertools.product(sizes, (_short_forms, _packed_records, _engine_pools)):
        for name, layout in make(like, dtypes, page_size):
            yield name, _with_pages(layout, pages or _room(layout, nbytes, records), records)


def _with_pages(layout: Layout, pages: int, records: int) -> Layout:
    groups = [msgspec.structs.replace(g, pages=records if g.kind == "recurrent" else pages) for g in layout.groups]
    return msgspec.structs.replace(layout, groups=groups)


def _room(layout: Layout, nbytes: int, records: int) -> int:
    """Return how many pages of a layout fill so many bytes, beside a number of records of recurrent states."""
    one, two = (sum(region_sizes(_with_pages(layout, n, records)).values()) for n in (1, 2))
    return max(1, min(1 << 20, round((nbytes - one) / max(two - one, 1)) + 1))


def _short_forms(like: Layout, dtypes: Sequence[str], page_size: int) -> Iterator[Named]:
    parts = (dtypes, _ORDERS, ("split", "fused"), ("layer-first", "page-first"), _SCALES)
    for dtype, order, tensors, pool, scale in itertools.product(*parts):
        if scale != "none" and not DTYPES[dtype].takes_scales:
            continue
        text = f"{dtype},page={page_size},{order},{tensors},{pool},scale={scale}"
        try:
            layout = from_short(text, like.model, shard=like.shard, pages=1)
        except LayoutError:
            continue
        yield text, layout
        if order == "hnd" and scale == "none":
            yield from _in_lanes(text, layout, DTYPES[dtype].itemsize)


def _packed_records(like: Layout, dtypes: Sequence[str], page_size: int) -> Iterator[Named]:
    """Each record for the kind of state that it holds, an indexer's with each latent's; the rest in plain rows."""
    kinds = {group.kind for group in like.groups}
    fitting = [name for name, record in RECORDS.items() if kinds & set(record.kinds)]
    indexers = [name for name in fitting if "indexer" in RECORDS[name].kinds]
    for name, dtype, pool in itertools.product(fitting, dtypes, ("layer-first", "page-first")):
        both = [name] if name in indexers else [name, *indexers]
        text = ",".join([dtype, f"page={page_size}", pool, *(f"record:{x}" for x in both)])
        try:
            yield text, from_short(text, like.model, shard=like.shard, pages=1)
        except LayoutError:
            continue


def _in_lanes(text: str, layout: Layout, itemsize: int) -> Iterator[Named]:
    """Elements of 16 bytes side by side: K's along its dim, V's along its dim or its tokens."""
    width = 16 // itemsize
    turned = {"token": "dim", "dim": "token"}
    for v_axis in ("dim", "token"):
        if v_axis == "token" and any(group.page_size % width for group in layout.groups):
            continue
        groups = []
        for group in layout.groups:
            changed: list[Component] = []
            for c in group.components:
                axes = c.at.order.split()
                axis = "dim" if c.name != "v" else v_axis
                if axis == "dim":
                    axes = [turned.get(a, a) for a in axes]
                order = " ".join([*axes, f"{axis}:{width}"])
                changed.append(msgspec.structs.replace(c, at=Placement(order, c.at.region, c.at.offset)))
            groups.append(msgspec.structs.replace(group, components=changed))
        try:
            yield (
                f"{text}, lanes of {width} along k's dim and v's {v_axis}",
                validate(msgspec.structs.replace(layout, groups=groups)),
            )
        except LayoutError:
            continue


def _engine_pools(like: Layout, dtypes: Sequence[str], page_size: int) -> Iterator[Named]:
    wide = [d for d in dtypes if DTYPES[d].itemsize > 1]
    shard = like.shard
    if (shard.pp_size, shard.cp_size) != (1, 1):
        return  # which of an engine's ranks that is, flags say
    for engine in engine_names():
        for pool, flag, record in itertools.product(pool_names(engine), _ENGINE_DTYPES, _RECORDS):
            for model_dtype in wide if flag == "auto" else wide[:1] or ["bfloat16"]:
                shown = f"dtype={flag}{record}" + (f",model-dtype={model_dtype}" if flag == "auto" else "")
                text = f"{PREFIX}{engine},pool={pool},page={page_size},{shown}"
                try:
                    layout = from_engine_form(
                        f"{text},tp={shard.tp_size},rank={shard.tp_rank}", like.model, model_dtype=model_dtype
                    )
                except LayoutError:
                    continue
                if any(c.dtype in dtypes for g in layout.groups for c in g.components):
                    yield text, layout
