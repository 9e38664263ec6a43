"""One component has two arrays at most, its elements and its stored scales: either by the same means."""

from __future__ import annotations

import msgspec

from regauge.errors import LayoutError
from regauge.layout.spec import Component, Group, Placement, Scale
from regauge.layout.view import View, component_view, scale_view


def stored_arrays(component: Component) -> tuple[bool, ...]:
    """Return the values of `stored` that a component has: False for its elements, then True if it stores scales."""
    return (False, True) if component.scale is not None and component.scale.at is not None else (False,)


def view_of(group: Group, component: Component, *, stored: bool) -> View:
    """Return where a component's elements, or its stored scales, lie. Raises LayoutError if it stores none."""
    return scale_view(group, component) if stored else component_view(group, component)


def placement(component: Component, *, stored: bool) -> Placement:
    """Return the placement of a component's elements, or of its stored scales. Raises LayoutError if it stores none."""
    at = _scale(component).at if stored else component.at
    if at is None:
        raise LayoutError("has no stored scales", path=f"components.{component.name}.scale")
    return at


def with_placement(component: Component, at: Placement, *, stored: bool) -> Component:
    """Return the component with its elements, or its scales, elsewhere. Raises LayoutError if it has no scale."""
    if stored:
        return msgspec.structs.replace(component, scale=msgspec.structs.replace(_scale(component), at=at))
    return msgspec.structs.replace(component, at=at)


def _scale(component: Component) -> Scale:
    if component.scale is None:
        raise LayoutError("has no scale", path=f"components.{component.name}.scale")
    return component.scale
