"""Which known packing explains a dump of pages in which known numbers were written?

Every candidate's pages are looked for (`locate`); those that are found whole, for all components, layers and pages, are hits.
A hit is a layout in terms of the dump: its regions are the dump's files, and distances between pages and layers are as
measured. Where no candidate fits, distances are measured element by element (`measure`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from regauge.errors import LayoutError
from regauge.layout.probe.codes import Bytes, encode
from regauge.layout.probe.known import Known
from regauge.layout.probe.locate import Finder, Fit, fit, placed
from regauge.layout.probe.measure import measure
from regauge.layout.probe.placing import placement, stored_arrays, view_of, with_placement
from regauge.layout.probe.snapshot import Memory
from regauge.layout.spec import Component, Group, Layout, Placement
from regauge.layout.validate import validate
from regauge.layout.view import Int64, View

MAX_PARTIAL = 5


@dataclass(frozen=True, slots=True)
class Hit:
    """A layout that explains the dump."""

    names: tuple[str, ...]
    """Of the candidates that say so."""
    layout: Layout
    exact: bool
    """Distances between pages and layers are as named; if not, pages alone are, and the layout has what was measured."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Partial:
    """A candidate that explains a part."""

    name: str
    found: tuple[str, ...]
    """Arrays that lie so."""
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a dump tells: hits, or what is known without one."""

    hits: tuple[Hit, ...]
    partial: tuple[Partial, ...]
    measured: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """The answer for one array of one candidate."""

    fit: Fit | None
    found: int
    of: int


class Search:
    """One dump and what was written. Raises LayoutError for a dump that is too large."""

    def __init__(self, known: Known, regions: Mapping[str, Bytes]) -> None:
        self._known = known
        self._finder = Finder(Memory.of([regions], 1))
        self._places: dict[tuple[object, ...], _Place] = {}
        self._codes: dict[tuple[object, ...], Bytes] = {}

    def run(self, candidates: Iterable[tuple[str, Layout]], dtypes: Sequence[str]) -> Report:
        """Try all candidates; measure where none fits. `dtypes` are those to measure."""
        hits: dict[tuple[object, ...], Hit] = {}
        partial: list[Partial] = []
        parts: dict[tuple[int, str], tuple[str, Group, Component]] = {}
        for name, layout in candidates:
            found, missing = self._try(name, layout, parts)
            if found and not missing:
                self._add(hits, name, layout)
            elif found:
                partial.append(Partial(name, tuple(found), tuple(missing)))
        if not hits:
            self._compose(hits, parts)
        measured: list[str] = []
        if not hits:
            measured, even = measure(self._known, self._finder, dtypes)
            if even is not None and not self._try("measured", even, parts)[1]:
                self._add(hits, "none of the known packings: as measured", even)
        partial.sort(key=lambda p: (len(p.missing), -len(p.found)))
        best = [h for h in hits.values() if h.exact] or list(hits.values())
        return Report(tuple(best), tuple(partial[:MAX_PARTIAL]) if not best else (), tuple(measured))

    def _group(self, group: Group) -> int | None:
        """Return which of the written groups a candidate's group is."""
        for index, own in enumerate(self._known.layout.groups):
            same = own.kind == group.kind and own.layer_ids == group.layer_ids and own.page_size == group.page_size
            if same and self._known.layers[index]:
                values = self._known.values[index]
                shapes = {c.name: (c.heads, c.dim) for c in group.components}
                return index if shapes == {n: v.shape[2:] for n, v in values.items()} else None
        return None

    def _try(
        self, name: str, layout: Layout, parts: dict[tuple[int, str], tuple[str, Group, Component]]
    ) -> tuple[list[str], list[str]]:
        """Return the arrays that lie as the candidate says, and those that do not."""
        found: list[str] = []
        missing: list[str] = []
        for group in layout.groups:
            index = self._group(group)
            if index is None:
                continue
            for c in group.components:
                places = [self._place(index, group, c, stored=s) for s in stored_arrays(c)]
                if all(p.fit is not None for p in places):
                    found.append(c.name)
                    parts.setdefault((index, c.name), (name, group, c))
                else:
                    share = "" if not places[0].found else f" ({places[0].found} of {places[0].of} pages)"
                    missing.append(c.name + share)
        written = [name for values in self._known.values for name in values]
        if found and len(found) + len(missing) < len(written):
            missing.append("other groups")
        return found, missing

    def _place(self, index: int, group: Group, component: Component, *, stored: bool) -> _Place:
        scale = component.scale
        view = view_of(group, component, stored=stored)
        rule = None if scale is None else msgspec.structs.replace(scale, at=None)
        kind = (index, component.name, component.dtype, stored, msgspec.json.encode(rule))
        key = (*kind, group.page_size, view.token.tobytes(), view.head.tobytes(), view.dim.tobytes())
        if key not in self._places:
            if kind not in self._codes:
                self._codes[kind] = self._expected(index, component, stored=stored)
            self._places[key] = self._look(index, self._codes[kind], view, group.page_size)
        return self._places[key]

    def _look(self, index: int, codes: Bytes, view: View, size: int) -> _Place:
        known = self._known
        table: Int64 = known.tables[index]
        starts, found = self._finder.pages(codes, view, size, table)
        if found < starts.size:
            return _Place(None, found, starts.size)
        layers = known.layers[index]
        ids = known.layout.groups[index].layer_ids
        where = fit(starts, view, layers, [ids.index(x) for x in layers], table, self._finder.memory)
        return _Place(where, found, starts.size)

    def _expected(self, index: int, component: Component, *, stored: bool) -> Bytes:
        if not stored:
            return self._known.codes(index, component)
        scales, scale = self._known.scales(index, component), component.scale
        assert scales is not None and scale is not None  # noqa: S101, PT018  # asked for components that store them
        return encode(scales, scale.dtype)

    def _add(self, hits: dict[tuple[object, ...], Hit], name: str, layout: Layout) -> None:
        """Note a layout that explains everything: in its own words if they are exact, with measured distances if not."""
        exact = self._exact(layout)
        groups, notes = [], []
        for group in layout.groups:
            index = self._group(group)
            if index is None:
                continue
            components = []
            for c in group.components:
                new = c
                for stored in stored_arrays(c):
                    where = self._fit(index, group, c, stored=stored)
                    if where.offset < 0:
                        notes.append(
                            f"the dump of {where.region} begins {-where.offset} bytes after page 0 of {c.name}"
                        )
                    put = _renamed if exact else placed
                    new = with_placement(new, put(group, c, where, stored=stored), stored=stored)
                components.append(new)
            pages = group.pages if exact else 0
            groups.append(msgspec.structs.replace(group, components=components, pages=pages))
        explained = validate(msgspec.structs.replace(layout, groups=groups, regions=[]))
        key = (exact, *self._key(explained))
        old = hits.get(key)
        if old is not None:
            hits[key] = replace(old, names=(*old.names, name))
        else:
            hits[key] = Hit((name,), explained, exact, tuple(dict.fromkeys(notes)))

    def _key(self, layout: Layout) -> tuple[object, ...]:
        """Equal for layouts that mean the same bytes."""
        out: list[object] = []
        for group in layout.groups:
            alone = len(self._known.layers[self._group(group) or 0]) == 1
            for c in group.components:
                for stored in stored_arrays(c):
                    v = view_of(group, c, stored=stored)
                    inner = (v.token.tobytes(), v.head.tobytes(), v.dim.tobytes())
                    out.append((c.name, c.dtype, v.region, v.offset, v.page_stride, alone or v.layer_stride, inner))
        return tuple(out)

    def _fit(self, index: int, group: Group, component: Component, *, stored: bool) -> Fit:
        where = self._place(index, group, component, stored=stored).fit
        assert where is not None  # noqa: S101  # asked for what was found
        return where

    def _exact(self, layout: Layout) -> bool:
        """Whether regions, and distances between pages, layers and arrays of a region, are the candidate's own too."""
        regions: dict[str, tuple[str, int]] = {}
        for group in layout.groups:
            index = self._group(group)
            if index is None:
                continue
            for c in group.components:
                for stored in stored_arrays(c):
                    view = view_of(group, c, stored=stored)
                    where = self._fit(index, group, c, stored=stored)
                    shift = where.offset - view.offset
                    if (
                        where.page_stride != view.page_stride
                        or shift < 0
                        or (where.layer_stride is not None and where.layer_stride != view.layer_stride)
                    ):
                        return False
                    if ("{layer}" in where.region) != ("{layer}" in view.region):
                        return False
                    if regions.setdefault(view.region, (where.region, shift)) != (where.region, shift):
                        return False
        return len({region for region, _ in regions.values()}) == len(regions)

    def _compose(
        self, hits: dict[tuple[object, ...], Hit], parts: dict[tuple[int, str], tuple[str, Group, Component]]
    ) -> None:
        """Explain each component by whichever candidate it fits, as where K is of one packing and V of another."""
        known = self._known
        groups, names = [], []
        for index, group in enumerate(known.layout.groups):
            if not known.layers[index]:
                continue
            components = []
            for c in group.components:
                if (index, c.name) not in parts:
                    return
                name, other, found = parts[index, c.name]
                new = found
                for stored in stored_arrays(found):
                    where = self._fit(index, other, found, stored=stored)
                    new = with_placement(new, placed(other, found, where, stored=stored), stored=stored)
                components.append(new)
                names.append(f"{c.name} as {name}")
            groups.append(msgspec.structs.replace(group, components=components))
        if groups:
            self._add(hits, "; ".join(names), msgspec.structs.replace(known.layout, groups=groups))


def _renamed(group: Group, component: Component, where: Fit, *, stored: bool) -> Placement:
    """Return the placement in the dump's region."""
    view = view_of(group, component, stored=stored)
    at = placement(component, stored=stored)
    return msgspec.structs.replace(at, region=where.region, offset=at.offset + where.offset - view.offset)


def regions_of(dumps: Sequence[tuple[str, Bytes]]) -> dict[str, Bytes]:
    """Return dumps by region name. Raises LayoutError if two have one name."""
    out: dict[str, Bytes] = {}
    for name, data in dumps:
        if name in out:
            raise LayoutError(f"two dumps are named {name!r}: give NAME=FILE", path="dump")
        out[name] = data
    return out
