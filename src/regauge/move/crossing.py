"""Carries out what the protocol asks for: writes chunks on the prefill side, scatters them on the decode side.

How a chunk is written depends on what the transport can do and on how the layouts meet:

| mode | when | work |
|---|---|---|
| fused | the peer's memory is mapped (same host) | one kernel pass from the source pages into the target pages |
| mapped | nothing is converted | the transport writes the pieces where they belong; no kernel |
| staged | the decode side offers slots | gather (and narrow) into a slot, send it whole, scatter (and widen) on arrival |

Shared memory is always written in one pass; else the cost model (`regauge.plan.cost`) chooses.

Nothing here knows of requests or time limits except the deadline of one write. Called from worker threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from regauge.errors import ConfigError, Refused
from regauge.layout.spec import Layout, Region
from regauge.layout.view import region_sizes
from regauge.move import kernels
from regauge.move.memory import Slab
from regauge.move.messages import Staging
from regauge.move.protocol import Range, Scatter, Write
from regauge.move.transport import Peer
from regauge.plan import Plan, Side, compile, instantiate, pieces
from regauge.plan.cost import DEFAULTS, Constants, Decision, Mode, Setting, decide
from regauge.plan.tiles import Int64
from regauge.plan.wire import REGION, WireFormat


@dataclass(frozen=True, slots=True)
class Memory:
    """One worker's KV memory: the layout (with bound regions) and the slab that holds all of them."""

    layout: Layout
    slab: Slab

    @property
    def bases(self) -> dict[str, int]:
        """Address of each region in this process."""
        return {r.name: r.base for r in self.layout.regions}


def one_pair(plan: Plan) -> tuple[int, int]:
    """Return the only pair of groups. Raises Refused for layouts with several: their chunks are not carried yet."""
    if len(plan.pairs) != 1:
        raise Refused(
            (f"{len(plan.pairs)} pairs of state groups: transfers carry one; describe the layers as one group",)
        )
    return plan.pairs[0]


SAMPLE_TOKENS = 4096
"""Tokens on which ways are compared: most of a pool's largest page, few enough to plan at once."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the way of writing is chosen by."""

    maps_memory: bool
    """What the transport can do, whatever its constants say."""
    setting: Setting
    constants: Constants = DEFAULTS


def choose_mode(plan: Plan, pair: tuple[int, int], terms: Terms) -> Decision:
    """Compare the ways of writing a pair of groups, and choose one: see the module.

    Raises ConfigError for a transport without constants and for `transfer.mode` where the pair or the transport cannot do it.
    """
    constants, setting = terms.constants, terms.setting
    known = constants.transports.get(setting.transport)
    if known is not None:
        able = msgspec.structs.replace(known, maps_memory=terms.maps_memory)
        constants = msgspec.structs.replace(constants, transports={**constants.transports, setting.transport: able})
    groups = plan.prefill.groups[pair[0]], plan.decode.groups[pair[1]]
    tokens = min(SAMPLE_TOKENS, *(g.pages * g.page_size for g in groups))
    return decide(plan, pair, constants, setting, (0, tokens))


class Writer:
    """The prefill side of one link: writes chunks into one decode worker's memory."""

    def __init__(
        self, own: Memory, peer_layout: Layout, peer: Peer, staging: Staging | None, *,
        terms: Terms, threads: int, slot: Slab | None,
    ) -> None:  # fmt: skip
        self.plan = compile(own.layout, peer_layout)
        self.pair = one_pair(self.plan)
        self.layers = self.plan.layers_of(self.pair)
        if staging is not None:
            terms = replace(terms, setting=replace(terms.setting, slot_bytes=staging.slot_bytes))
        decision = choose_mode(self.plan, self.pair, terms)
        self.mode: Mode = decision.chosen.mode
        self.why = decision.why
        self._wire = WireFormat(self.plan)
        self._peer = peer
        self._own = own.bases
        self.staging = staging
        self._slot = slot
        self._threads = threads
        self._target: Mapping[str, int] = {r.name: r.base for r in peer_layout.regions}
        self._slabs: tuple[str, ...] = ()
        """Slabs of the peer that are written directly."""
        _check_regions(peer_layout)
        if self.mode == "fused":  # else addresses are the peer's own: what a transport posts to
            self._target, self._slabs = _mapped_bases(peer_layout, peer)
        if self.mode == "staged" and (staging is None or slot is None):
            raise ConfigError("this pair needs staging, and the decode worker offers none: set transfer.staging_bytes")

    def layers_for(self, tokens: int) -> int:
        """Return how many layers of a chunk of so many tokens fit into one slot."""
        if self.mode != "staged" or self.staging is None:
            return 1 << 30
        return self.staging.slot_bytes // self._wire.layer_bytes(self.pair, tokens)

    def write(self, chunk: Write, pages: Int64, deadline_s: float) -> int:
        """Write one chunk; return the bytes that crossed. Raises TransportError: the peer must then be fenced."""
        layers = self.layers[slice(*chunk.layers)]
        src = Side(pages, self._own)
        dst = Side(np.array(chunk.pages, np.int64), self._target, chunk.origin)
        if self.mode == "staged":
            return self._write_staged(chunk, src, layers, deadline_s)
        tiles = instantiate(self.plan, src, dst, chunk.tokens, pair=self.pair, layers=layers)
        if self.mode == "fused":
            with contextlib.ExitStack() as held:
                for slab in self._slabs:
                    held.enter_context(self._peer.writing(slab))
                kernels.run(tiles, threads=self._threads)
            return self._wire.layer_bytes(self.pair, chunk.tokens[1] - chunk.tokens[0]) * len(layers)
        list_ = pieces(tiles)
        self._post(list_, deadline_s)
        return int(list_[:, 2].sum())

    def _write_staged(self, chunk: Write, src: Side, layers: tuple[int, ...], deadline_s: float) -> int:
        assert self.staging is not None and self._slot is not None and chunk.slot is not None  # noqa: PT018, S101  # checked at the start of the link
        count = chunk.tokens[1] - chunk.tokens[0]
        gather, _ = self._wire.halves(self.pair, count)
        size = self._wire.layer_bytes(self.pair, count)
        wire = slot_side(self._slot.address, chunk.layers, size, chunk.tokens)
        kernels.run(instantiate(gather, src, wire, chunk.tokens, layers=layers), threads=self._threads)
        nbytes = size * len(layers)
        remote = self.staging.address + chunk.slot * self.staging.slot_bytes
        self._post(np.array([[self._slot.address, remote, nbytes]], np.int64), deadline_s)
        return nbytes

    def _post(self, list_: Int64, deadline_s: float) -> None:
        ticket = self._peer.post(list_, deadline_s)
        ticket.wait(deadline_s + 5.0)
        ticket.check()


class Scatterer:
    """The decode side of one link: empties staging slots into pages."""

    def __init__(self, peer_layout: Layout, own: Memory, staging: Staging, *, threads: int) -> None:
        plan = compile(peer_layout, own.layout)
        self.pair = one_pair(plan)
        self.layers = plan.layers_of(self.pair)
        self._wire = WireFormat(plan)
        self._own = own.bases
        self._staging = staging
        self._threads = threads

    def scatter(self, chunk: Scatter, pages: Int64, origin: int) -> None:
        """Bring one chunk from its slot into the pages (page table from token `origin`)."""
        count = chunk.tokens[1] - chunk.tokens[0]
        _, scatter = self._wire.halves(self.pair, count)
        size = self._wire.layer_bytes(self.pair, count)
        address = self._staging.address + chunk.slot * self._staging.slot_bytes
        wire = slot_side(address, chunk.layers, size, chunk.tokens)
        target = Side(pages, self._own, origin)
        tiles = instantiate(scatter, wire, target, chunk.tokens, layers=self.layers[slice(*chunk.layers)])
        kernels.run(tiles, threads=self._threads)


def slot_side(address: int, layers: Range, layer_bytes: int, tokens: Range) -> Side:
    """Return where a chunk's layers [first, end) lie in a slot: from its start, so that the region of all layers begins before it."""
    return Side(np.zeros(1, np.int64), {REGION: address - layers[0] * layer_bytes}, origin=tokens[0])


def _check_regions(layout: Layout) -> None:
    """Refuse a peer's layout whose pages do not fit into the regions it names: writes would leave them."""
    have = {r.name: r.nbytes for r in layout.regions}
    for name, need in region_sizes(layout).items():
        if have.get(name, 0) < need:
            raise Refused(
                (f"region {name!r} of the decode layout has {have.get(name, 0)} bytes, its pages take {need}",)
            )


def _mapped_bases(layout: Layout, peer: Peer) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return where the peer's layout regions lie in this process, and the names of the slabs that hold them."""
    bases, slabs = {}, []
    for region in layout.regions:
        slab = next((r for r in peer.regions if r.address <= region.base < r.address + r.nbytes), None)
        if slab is None or region.base + region.nbytes > slab.address + slab.nbytes:
            raise Refused((f"region {region.name!r} of the decode layout lies outside the memory that decode exports",))
        bases[region.name] = peer.map_base(slab.name) + region.base - slab.address
        slabs.append(slab.name)
    return bases, tuple(dict.fromkeys(slabs))


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
