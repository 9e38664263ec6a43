"""Carries out what the protocol asks for: writes chunks on the prefill side, scatters them on the decode side.

How a chunk is written depends on what the transport can do and on how the layouts meet:

| mode | when | work |
|---|---|---|
| fused | the peer's memory is mapped (same host) | one kernel pass from the source pages into the target pages |
| mapped | nothing is converted | the transport writes the pieces where they belong; no kernel |
| staged | the decode side offers slots | gather (and narrow) into a slot, send it whole, scatter (and widen) on arrival |

Shared memory is always written in one pass; else the cost model (`regauge.plan.cost`) chooses.

Every chunk is digested where it is read and where it has arrived: of the wire's elements if it is staged, else of the target's.

Nothing here knows of requests or time limits except the deadline of one write. Called from worker threads.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np

from regauge.errors import ConfigError, ProtocolError, Refused
from regauge.layout.spec import Layout
from regauge.layout.view import region_sizes
from regauge.move import digest
from regauge.move.bound import Borrowed
from regauge.move.grants import STAGING_GRANT, grant_id
from regauge.move.memory import Slab
from regauge.move.messages import Staging
from regauge.move.outleg import LinkTerms
from regauge.move.prepared import Templates, TransferKeys
from regauge.move.protocol import Check, Part, Range, Write
from regauge.move.transport import Peer, Ticket
from regauge.plan import Plan, Side, pieces
from regauge.plan.cost import DEFAULTS, Constants, Decision, Mode, Setting, decide
from regauge.plan.planner import live
from regauge.plan.template import SLOT, Template
from regauge.plan.tiles import Int64, Tiles
from regauge.plan.wire import REGION, WireFormat

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


@dataclass(frozen=True, slots=True, eq=False)
class PageTable:
    """The pages of one state group that hold tokens `origin`, `origin` + 1, ... of a transfer: see `plan.boxes.Side`."""

    pages: Int64
    origin: int = 0


ONLY_PAIR = (0, 0)
"""Of the plans to and from the wire: each carries one pair of groups."""


class Crossing:
    """What both ends of a link know: the plan, its parts, the format of staging slots, and the digest keys."""

    def __init__(self, plan: Plan, keys: TransferKeys, *, threads: int) -> None:
        self.plan = plan
        self.pairs = plan.pairs
        self.wire = WireFormat(plan)
        self.keys = keys
        self.templates = Templates()
        self.threads = threads
        self.parts = tuple(
            Part(
                pair[1],
                plan.layers_of(pair),
                partial(live, plan.decode.groups[pair[1]], plan.decode),
                self._token_bytes(pair),
            )
            for pair in plan.pairs
        )

    def _token_bytes(self, pair: tuple[int, int]) -> int:
        tokens = 1 if self.plan.decode.groups[pair[1]].kind == "recurrent" else 64  # 64: no padding is left to count
        return -(-self.wire.layer_bytes(pair, tokens) // tokens)

    def layer_bytes(self, pair: int, tokens: int) -> int:
        """Return the bytes of one layer of a chunk of so many tokens on the wire, padding included."""
        return self.wire.layer_bytes(self.pairs[pair], tokens)

    def keyed(
        self, chunk: Write | Check, plan: Plan, prefill: Side, decode: Side, pair: tuple[int, int]
    ) -> Template:  # fmt: skip
        """Return the boxes of a chunk's tokens, all layers, with the transfer's digest keys: one end asks for one plan each."""

        def make() -> Template:
            with self.keys.of(chunk.transfer, chunk.epoch) as keys:
                return Template(plan, prefill, decode, chunk.tokens, pair=pair, keys=keys)

        return self.templates.get((chunk.transfer, chunk.epoch, chunk.pair, chunk.tokens, "keyed"), make)


@dataclass(frozen=True, slots=True, eq=False)
class Posted:
    """A chunk on its way. Without a ticket it has arrived."""

    nbytes: int
    """Bytes that cross."""
    digest: bytes
    ticket: Ticket | None = None
    slot: int | None = None
    """Local address of the slot that it is sent from, which `Writer.ended` frees."""


DEPTH = 4
"""Writes in flight where the transport carries them: one is gathered, one is sent, and the word of two is on its way back."""


class Writer:
    """The prefill side of one link: writes chunks into one decode worker's memory. Thread-safe."""

    def __init__(
        self, crossing: Crossing, own: Borrowed, peers: Sequence[Peer], staging: Staging | None, *, terms: Terms, slot: Slab | None
    ) -> None:  # fmt: skip
        """Raises Refused for a peer's regions that do not hold its pages, ConfigError where staging is needed and there is none.

        `peers`: a connection to each of the peer's NICs. `slot` holds as many staging slots as chunks are gathered at once.
        """
        self.crossing = crossing
        plan = crossing.plan
        if staging is not None:
            terms = replace(terms, setting=replace(terms.setting, slot_bytes=staging.slot_bytes))
        decisions = [choose_mode(plan, pair, terms) for pair in crossing.pairs]
        self.modes: tuple[Mode, ...] = tuple(each.chosen.mode for each in decisions)
        self.why = "; ".join(dict.fromkeys(each.why for each in decisions))
        self._peers = tuple(peers)
        self._own = own.bases
        self.staging = staging
        self._target: Mapping[str, int] = {r.name: r.base for r in plan.decode.regions}
        self._mapped: Mapping[str, int] = {}
        self._slabs: tuple[str, ...] = ()
        """Slabs of the peer that are written directly."""
        _check_regions(plan.decode)
        if "fused" in self.modes:  # else addresses are the peer's own: what a transport posts to
            self._mapped, self._slabs = _mapped_bases(plan.decode, self._peers[0])
        if "staged" in self.modes and (staging is None or slot is None):
            raise ConfigError("this pair needs staging, and the decode worker offers none: set transfer.staging_bytes")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        if slot is not None and staging is not None:
            for at in range(slot.nbytes // staging.slot_bytes):
                self._free.put(slot.address + at * staging.slot_bytes)

    def terms(self) -> LinkTerms:
        """Return what the protocol has to know of this link."""
        staged = frozenset(i for i, mode in enumerate(self.modes) if mode == "staged")
        return LinkTerms(
            self.crossing.parts, self.crossing.layer_bytes, staged,
            slots=self.staging.slots if staged and self.staging is not None else 0,
            slot_bytes=self.staging.slot_bytes if self.staging is not None else 0,
            depth=self.depth,
        )  # fmt: skip

    @property
    def depth(self) -> int:
        """Writes in flight at once: one kernel at a time where it writes the peer's pages, else gather while the wire is busy."""
        return 2 if set(self.modes) <= {"fused"} else DEPTH

    def most_bytes(self, chunk: Write) -> int:
        """Return the most bytes that a chunk takes on the wire."""
        count, layers = (end - first for first, end in (chunk.tokens, chunk.layers))
        return self.crossing.layer_bytes(chunk.pair, count) * layers

    def start(self, chunk: Write, tables: Sequence[PageTable], deadline_s: float) -> Posted:
        """Gather and digest one chunk, and post it; call `ended` when its ticket has ended.

        `tables`: this side's pages, one table for each of its groups. Raises TransportError: the peer must then be fenced.
        """
        pair = self.crossing.pairs[chunk.pair]
        own = tables[pair[0]]
        src = Side(own.pages, self._own, own.origin)
        mode = self.modes[chunk.pair]
        if mode == "staged":
            return self._post_staged(chunk, src, deadline_s)
        bases = self._mapped if mode == "fused" else self._target
        dst = Side(np.array(chunk.table.pages, np.int64), bases, chunk.table.origin)
        tiles = self.crossing.keyed(chunk, self.crossing.plan, src, dst, pair).of(chunk.layers)
        if mode == "mapped":
            return self._post_mapped(chunk, src, dst, tiles, deadline_s)
        with contextlib.ExitStack() as held:
            for slab in self._slabs:
                held.enter_context(self._peers[0].writing(slab))
            sums = digest.run(tiles, of="dst", threads=self.crossing.threads)
        count, layers = (end - first for first, end in (chunk.tokens, chunk.layers))
        return Posted(self.crossing.layer_bytes(chunk.pair, count) * layers, _encode(sums.dst))

    def _post_mapped(
        self, chunk: Write, src: Side, dst: Side, tiles: list[Tiles], deadline_s: float
    ) -> Posted:  # fmt: skip
        pair, plan = self.crossing.pairs[chunk.pair], self.crossing.plan
        # Boxes with keys end where a row does, and would make more pieces to join.
        plain = self.crossing.templates.get(
            (chunk.transfer, chunk.epoch, chunk.pair, chunk.tokens, "plain"),
            lambda: Template(plan, src, dst, chunk.tokens, pair=pair),
        )
        digest_ = digest.read(tiles, "src", threads=self.crossing.threads)
        list_ = pieces(plain.of(chunk.layers))
        ticket = self._peers[chunk.nic].post(list_, deadline_s, grant_id(chunk.transfer, chunk.epoch))
        return Posted(ticket.nbytes, _encode(digest_), ticket)

    def _post_staged(self, chunk: Write, src: Side, deadline_s: float) -> Posted:
        assert self.staging is not None and chunk.slot is not None  # noqa: PT018, S101  # checked at the start of the link
        count = chunk.tokens[1] - chunk.tokens[0]
        gather, _ = self.crossing.wire.halves(self.crossing.pairs[chunk.pair], count)
        size = self.crossing.layer_bytes(chunk.pair, count)
        template = self.crossing.keyed(chunk, gather, src, _any_slot(chunk.tokens), ONLY_PAIR)
        slot = self._free.get()  # as many as writes in flight: never waits
        try:
            tiles = template.of(chunk.layers, slot - chunk.layers[0] * size)
            sums = digest.run(tiles, of="dst", threads=self.crossing.threads)
            nbytes = size * (chunk.layers[1] - chunk.layers[0])
            remote = self.staging.address + chunk.slot * self.staging.slot_bytes
            ticket = self._peers[chunk.nic].post(
                np.array([[slot, remote, nbytes]], np.int64), deadline_s, STAGING_GRANT
            )
        except BaseException:  # whatever broke, the slot is free again
            self._free.put(slot)
            raise
        return Posted(nbytes, _encode(sums.dst), ticket, slot)

    def ended(self, posted: Posted) -> None:
        """Use the slot of a chunk again: its ticket has ended."""
        if posted.slot is not None:
            self._free.put(posted.slot)


class Checker:
    """The decode side of one link: empties staging slots into pages, and compares what is there with what was sent. Thread-safe."""

    def __init__(self, crossing: Crossing, own: Borrowed, staging: Staging) -> None:
        self.crossing = crossing
        self._own = own.bases
        self._foreign = {r.name: r.base for r in crossing.plan.prefill.regions}
        self._staging = staging

    def lent(self, modes: Sequence[Mode], tables: Sequence[PageTable], tokens: Range) -> Int64:
        """Return where the peer writes tokens [first, end) directly, int64[N, 2] (address, length): what it needs a grant for."""
        parts = [np.empty((0, 2), np.int64)]
        for pair, mode, part in zip(self.crossing.pairs, modes, self.crossing.parts, strict=True):
            if mode != "mapped":
                continue
            own, span = tables[pair[1]], part.live(tokens, tokens[1])
            target = Side(own.pages, self._own, own.origin)
            source = self._nowhere(pair, span)
            template = Template(self.crossing.plan, source, target, span, pair=pair)
            layers = range(len(part.layers))  # one by one: what `pieces` expands at once is bounded
            parts += [pieces(template.of((layer, layer + 1)))[:, 1:] for layer in layers]
        return np.concatenate(parts)

    @property
    def slot_bytes(self) -> int:
        """Of a staging slot."""
        return self._staging.slot_bytes

    def check(self, chunk: Check, tables: Sequence[PageTable]) -> tuple[bool, int]:
        """Bring one chunk from its slot into the pages, or find it there; say whether it is what was sent, and in how many boxes it lies.

        `tables`: this side's pages, one table for each of its groups.
        """
        pair = self.crossing.pairs[chunk.pair]
        own = tables[pair[1]]
        target = Side(own.pages, self._own, own.origin)
        if chunk.slot is None:
            source = self._nowhere(pair, chunk.tokens)
            tiles = self.crossing.keyed(chunk, self.crossing.plan, source, target, pair).of(chunk.layers)
        else:
            tiles = self._scatter(chunk, target)
        if chunk.slot is None:
            found = digest.read(tiles, "dst", threads=self.crossing.threads)
        else:
            found = digest.run(tiles, of="src", threads=self.crossing.threads).src
        return hmac.compare_digest(_encode(found), chunk.digest), sum(len(each.src) for each in tiles)

    def _scatter(self, chunk: Check, target: Side) -> list[Tiles]:
        assert chunk.slot is not None  # noqa: S101  # the caller asked
        first, end = chunk.layers
        count = chunk.tokens[1] - chunk.tokens[0]
        size = self.crossing.layer_bytes(chunk.pair, count)
        if chunk.slot >= self._staging.slots or size * (end - first) > self._staging.slot_bytes:
            raise ProtocolError(f"a chunk of {size * (end - first)} bytes in staging slot {chunk.slot}: no such slot")
        _, scatter = self.crossing.wire.halves(self.crossing.pairs[chunk.pair], count)
        address = self._staging.address + chunk.slot * self._staging.slot_bytes
        template = self.crossing.keyed(chunk, scatter, _any_slot(chunk.tokens), target, ONLY_PAIR)
        return template.of(chunk.layers, address - first * size)

    def _nowhere(self, pair: tuple[int, int], tokens: Range) -> Side:
        """Return a source whose addresses are never read: only where elements lie at the target matters."""
        group = self.crossing.plan.prefill.groups[pair[0]]
        pages = -(-(tokens[1] - tokens[0]) // group.page_size) + 1
        return Side(np.arange(pages, dtype=np.int64) % group.pages, self._foreign, tokens[0])


def _encode(sum_: int) -> bytes:
    return sum_.to_bytes(8, "little")


def _any_slot(tokens: Range) -> Side:
    """Return where all layers of a chunk lie in a slot that a template is moved to."""
    return Side(np.zeros(1, np.int64), {REGION: SLOT}, origin=tokens[0])


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
