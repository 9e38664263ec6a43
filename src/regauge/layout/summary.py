"""What a layout takes: bytes per token and page, or per request, of each of its groups."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from regauge.layout.spec import Group, Kind, Layout
from regauge.layout.view import element_bytes, region_sizes


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of one group on this rank, all its layers together."""

    kind: Kind
    layers: str
    page_size: int
    """Tokens per page; 1 if recurrent."""
    bytes_per_token: int
    """Elements and stored scales of a token (recurrent: of a request)."""
    bytes_per_page: int
    """The same of a page."""
    memory_per_page: int
    """Bytes from one page to the next, with padding and what lies between."""

    def text(self) -> str:
        """Return a line for people."""
        padded = f", {self.memory_per_page} with padding" if self.memory_per_page != self.bytes_per_page else ""
        if self.kind == "recurrent":
            return f"recurrent, layers {self.layers}: {self.bytes_per_token} bytes per request{padded}"
        return (
            f"{self.kind}, layers {self.layers}: {self.bytes_per_token} bytes per token, {self.bytes_per_page} bytes per page "
            f"of {self.page_size}{padded}"
        )


def summarize(layout: Layout) -> list[GroupBytes]:
    """Return the bytes of each group."""
    return [_group(layout, group) for group in layout.groups]


def _group(layout: Layout, group: Group) -> GroupBytes:
    token = len(group.layer_ids) * sum(element_bytes(c) for c in group.components)
    memory = _memory(layout, group, 2) - _memory(layout, group, 1)
    return GroupBytes(group.kind, group.layers, group.page_size, token, token * group.page_size, memory)


def _memory(layout: Layout, group: Group, pages: int) -> int:
    alone = msgspec.structs.replace(layout, groups=[msgspec.structs.replace(group, pages=pages)])
    return sum(region_sizes(alone).values())
