"""KV memory of one worker: a layout whose regions have addresses, in a slab of ours or in memory that an engine has allocated."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from regauge.errors import ConfigError
from regauge.layout.spec import Layout, Region
from regauge.layout.view import region_sizes
from regauge.move.memory import Slab
from regauge.move.transport import Peer


@dataclass(frozen=True)
class Borrowed:
    """KV memory that an engine has allocated: the layout, with bound regions. No transport reaches it: what
    comes is written to slots first."""

    layout: Layout

    @property
    def reachable(self) -> bool:
        """Whether a peer may write the pages themselves."""
        return False

    @property
    def bases(self) -> dict[str, int]:
        """Address of each region in this process."""
        return {r.name: r.base for r in self.layout.regions}


@dataclass(frozen=True)
class Memory(Borrowed):
    """KV memory in a slab that holds all regions of the layout, registered with the transports."""

    slab: Slab

    @property
    def reachable(self) -> bool:
        """It is."""
        return True


def bind(layout: Layout, slab: Slab) -> Layout:
    """Return the layout with its regions laid back to back into a slab. Raises ConfigError if they do not fit."""
    regions, at = [], 0
    for name, size in region_sizes(layout).items():
        regions.append(Region(name, size, slab.address + at))
        at += _page_aligned(size)
    if at > slab.nbytes:
        raise ConfigError(f"the pool needs {at} bytes, its slab has {slab.nbytes}")
    return msgspec.structs.replace(layout, regions=regions)


def slab_bytes(layout: Layout) -> int:
    """Return the size of a slab that `bind` can lay the layout's regions into."""
    return sum(_page_aligned(size) for size in region_sizes(layout).values())


def _page_aligned(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def exports(layout: Layout, peer: Peer) -> bool:
    """Whether a peer's exported regions hold all of its layout's."""
    spans = [(r.address, r.address + r.nbytes) for r in peer.regions]
    return all(any(a <= r.base and r.base + r.nbytes <= b for a, b in spans) for r in layout.regions)
