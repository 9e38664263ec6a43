"""What each way of moving a pair of groups costs, from constants that are measured or given. Arithmetic only.

| way | needs | seconds |
|---|---|---|
| fused | memory that both sides map | kernel(source -> target) |
| mapped | nothing converted | expand x pieces + post x writes + piece x pieces + bytes / rate |
| staged | a slot on either side | max(gather + wire, scatter) + min(...) / writes; wire = (post + piece) x writes + bytes / rate |

`expand` is the planner's time for one piece, `post` that of one write whatever its size, `piece` that of each piece in it. One sender gathers and
writes chunk after chunk while the receiver scatters the chunk before: hence the max. A kernel's time is, for every box of equal runs, bytes
read and written over the rate at runs of that length, or over the rate of the conversion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

import msgspec
import numpy as np

from regauge import toml
from regauge.errors import ConfigError
from regauge.layout.dtypes import DTYPES
from regauge.plan.boxes import Side
from regauge.plan.planner import Plan
from regauge.plan.sample import LaneBoxes, Spans, lane_boxes, scattered, spans
from regauge.plan.tiles import Convert, Tiles
from regauge.plan.wire import REGION, WireFormat

Mode = Literal["fused", "mapped", "staged"]
Conversion = Literal["narrow", "widen", "dynamic", "alike"]
Where = Literal["", "prefill", "decode", "both sides"]
_NONE = Spans(0, 0.0, 0, 0, exact=True)


class Rate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast runs of one length are copied."""

    run_bytes: int
    bytes_per_s: float
    """Bytes read plus bytes written, per second."""


class KernelConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast kernels are. All rates count bytes read plus bytes written."""

    copy: tuple[Rate, ...]
    """Gather and scatter, ascending in run length; the shortest stands for elements that change places one by one."""
    narrow: float
    """To fewer bytes, constant scales."""
    widen: float
    dynamic: float
    """To 8 bits with scales computed from the values."""
    alike: float
    """Between types of the same size, and from one scale to another."""
    threads: int = 1
    """Threads that were used."""


class TransportConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a write over one transport costs."""

    post_s: float
    """Seconds of one write, whatever it carries: request, acknowledgement, wake-up."""
    piece_s: float
    """Seconds that each further piece of a write adds."""
    bytes_per_s: float = 0.0
    """Most payload bytes per second; 0: as the link allows."""
    share: float = 1.0
    """Part of a link's rate that payload reaches."""
    maps_memory: bool = False


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the model knows about a machine and its links."""

    source: str
    """Where the numbers come from, for people."""
    expand_s: float
    """Seconds in which the planner makes one piece."""
    kernels: KernelConstants
    transports: dict[str, TransportConstants]


DEFAULTS = Constants(
    source="defaults: bench/LOG.md (calibrate on 2 shared cores, AMD Milan, 1 thread); rdma from published figures",
    expand_s=0.3e-6,
    kernels=KernelConstants(
        copy=(Rate(2, 12e9), Rate(64, 12e9), Rate(256, 16e9), Rate(1024, 18e9), Rate(4096, 18e9), Rate(32768, 20e9)),
        narrow=13e9,
        widen=18e9,
        dynamic=11e9,
        alike=3.3e9,
    ),
    transports={
        "shm": TransportConstants(post_s=100e-6, piece_s=0.3e-6, bytes_per_s=7e9, maps_memory=True),
        "tcp": TransportConstants(post_s=150e-6, piece_s=1.5e-6, bytes_per_s=2e9),
        # Both over tcp (bench/LOG.md); with RDMA the constants are those of `rdma`.
        "mooncake": TransportConstants(post_s=500e-6, piece_s=50e-6, bytes_per_s=0.4e9),
        "nixl": TransportConstants(post_s=400e-6, piece_s=15e-6, bytes_per_s=0.7e9),
        # 3 us a descriptor: (5.48 s - 0.28 s) / 1.71 million (sglang#40500, Mooncake); 82 % of line: 164 of 200 GB/s (Mooncake, July 2026).
        "rdma": TransportConstants(post_s=20e-6, piece_s=3e-6, share=0.82),
    },
)
_UNREACHABLE = "decode's pages are in memory of its engine's own"
MARGIN = 1.1
"""How many times as fast staging must be: it takes memory and kernels on both sides, which others could use."""


@dataclass(frozen=True, slots=True)
class Setting:
    """In what surroundings a pair moves."""

    transport: str
    link_bytes_per_s: float = 0.0
    """Rate of the link in bytes per second; 0: the transport's own."""
    chunk_tokens: int = 256
    """Tokens of one write: those of a prefill step."""
    slot_bytes: int = 4 << 20
    """Bytes of one staging slot."""
    mode: Mode | Literal["auto"] = "auto"
    reachable: bool = True
    """Whether decode's pages lie in memory that its transport exports; else they are written by way of slots."""
    registered: bool = True
    """Whether prefill's pages lie in memory that its transport may read; kernels always can."""
    """The way to take whatever it costs."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of moving a pair of groups."""

    mode: Mode
    refused: str
    """Why it cannot be taken; empty if it can."""
    seconds: float
    parts: dict[str, float]
    """Seconds of each part; parts may overlap."""
    writes: int
    spans: Spans
    """Contiguous copies that the transport makes."""
    wire_bytes: int
    kernel_bytes: int
    """Bytes that kernels read and write, both sides."""
    staging_bytes: int
    """Memory of one slot in use, on either side."""
    convert_at: Where = ""
    """Where elements change."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The way that a pair of groups takes, and the others."""

    pair: tuple[int, int]
    tokens: int
    chosen: Way
    ways: tuple[Way, ...]
    why: str


def decode(data: bytes) -> Constants:
    """Read constants from TOML. Raises ConfigError that names the field."""
    try:
        found = toml.decode(data, Constants)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{error}; `regauge bench calibrate --out FILE` writes such a file") from error
    runs = [r.run_bytes for r in found.kernels.copy]
    if not runs or runs != sorted(set(runs)) or runs[0] < 1:
        raise ConfigError("kernels.copy: give rates ascending in run_bytes")
    k = found.kernels
    rates = (k.narrow, k.widen, k.dynamic, k.alike, *(r.bytes_per_s for r in k.copy))
    if not all(0.0 < x < float("inf") for x in rates):
        raise ConfigError("kernels: rates are finite and positive bytes per second")
    if not 0.0 <= found.expand_s < float("inf"):
        raise ConfigError("expand_s: seconds are finite and not negative")
    for name, t in found.transports.items():
        seconds = (t.post_s, t.piece_s, t.bytes_per_s)
        if not all(0.0 <= x < float("inf") for x in seconds) or not 0.0 < t.share <= 1.0:
            raise ConfigError(
                f"transports.{name}: times and rates are finite and not negative, share is over 0 and at most 1"
            )
    return found


def encode(constants: Constants) -> bytes:
    """Write constants as TOML; `decode` gives them back."""
    return msgspec.toml.encode(msgspec.to_builtins(constants))


def conversion(convert: Convert) -> Conversion:
    """Say which of the measured conversions a box is."""
    src, dst = DTYPES[convert.src_dtype].itemsize, DTYPES[convert.dst_dtype].itemsize
    return "dynamic" if convert.dynamic else "narrow" if dst < src else "widen" if dst > src else "alike"


def copy_rate(kernels: KernelConstants, run_bytes: float) -> float:
    """Return bytes read and written per second for copies of runs of that length: between two points, on the line over log2."""
    points = kernels.copy
    if run_bytes <= points[0].run_bytes:
        return points[0].bytes_per_s
    for a, b in itertools.pairwise(points):
        if run_bytes <= b.run_bytes:
            part = log2(run_bytes / a.run_bytes) / log2(b.run_bytes / a.run_bytes)
            return a.bytes_per_s + (b.bytes_per_s - a.bytes_per_s) * part
    return points[-1].bytes_per_s


def kernel_work(kernels: KernelConstants, tiles: Sequence[Tiles]) -> tuple[float, int]:
    """Return the seconds of one pass over boxes, and the bytes it reads and writes."""
    seconds, total = 0.0, 0
    for box in tiles:
        count = box.pieces * box.run
        if box.convert is None:
            nbytes, rate = 2 * count, copy_rate(kernels, box.run)
        else:
            sizes = (DTYPES[box.convert.src_dtype].itemsize, DTYPES[box.convert.dst_dtype].itemsize)
            nbytes, rate = count * sum(sizes), getattr(kernels, conversion(box.convert))
        seconds += nbytes / rate
        total += nbytes
    return seconds, total


def wire_seconds(t: TransportConstants, setting: Setting, writes: int, spans: int, nbytes: int) -> float:
    """Return the seconds of so many writes that carry so many spans and bytes together."""
    limits = [x for x in (t.bytes_per_s, setting.link_bytes_per_s * t.share) if x > 0]
    return writes * t.post_s + spans * t.piece_s + (nbytes / min(limits) if limits else 0.0)


def decide(
    plan: Plan, pair: tuple[int, int], constants: Constants, setting: Setting, tokens: tuple[int, int],
    boxes: list[LaneBoxes] | None = None,
) -> Decision:  # fmt: skip
    """Compare the ways of moving tokens [first, end) of a pair of groups, and choose the cheapest that can be taken.

    Both layouts need pages for them. `boxes` are those of `lane_boxes` between scattered pages, where the caller has them. Memory that both sides map is always written in one pass. Raises ConfigError for a transport
    without constants and for a mode that the pair cannot take.
    """
    if setting.transport not in constants.transports:
        raise ConfigError(
            f"no constants for transport {setting.transport!r}; known: {', '.join(sorted(constants.transports))}"
        )
    estimate = _Estimate(plan, pair, constants, setting, tokens, boxes)
    ways = (estimate.fused(), estimate.mapped(), estimate.staged())
    possible = [w for w in ways if not w.refused]
    if setting.mode != "auto":
        chosen = next(w for w in ways if w.mode == setting.mode)
        if chosen.refused:
            others = " or ".join(["auto", *(w.mode for w in possible)])
            raise ConfigError(f"transfer.mode {setting.mode}: {chosen.refused}; use {others}")
        return Decision(pair, estimate.count, chosen, ways, f"transfer.mode says {setting.mode}")
    if not possible:
        raise ConfigError("; ".join(f"{w.mode}: {w.refused}" for w in ways) + ". Raise transfer.staging_bytes")
    if not ways[0].refused:
        return Decision(pair, estimate.count, ways[0], ways, "both sides map the memory: one pass, nothing is sent")
    chosen = min(possible, key=lambda w: w.seconds * (MARGIN if w.mode == "staged" else 1.0))
    return Decision(pair, estimate.count, chosen, ways, _why(chosen, ways))


def _why(chosen: Way, ways: tuple[Way, ...]) -> str:
    other = next(w for w in ways if w.mode in ("mapped", "staged") and w.mode != chosen.mode)
    if other.refused:
        return f"the only way: {other.refused}"
    factor = other.seconds / chosen.seconds if chosen.seconds else 1.0
    return f"{factor:.3g} times as fast as {other.mode}: {chosen.spans.count} instead of {other.spans.count} spans"


class _Estimate:
    """The three ways of one pair of groups."""

    def __init__(
        self, plan: Plan, pair: tuple[int, int], constants: Constants, setting: Setting, tokens: tuple[int, int],
        boxes: list[LaneBoxes] | None,
    ) -> None:  # fmt: skip
        self.plan, self.pair, self.tokens, self.count = plan, pair, tokens, tokens[1] - tokens[0]
        self.constants, self.setting = constants, setting
        self.transport = constants.transports[setting.transport]
        self.converts = any(lane.converts for lane in plan.lanes if lane.pair == pair)
        self.wire = WireFormat(plan)
        self.sides = scattered(plan, pair, tokens)
        self.boxes = boxes or lane_boxes(plan, pair, self.sides, tokens)
        self.chunks = ceil(self.count / setting.chunk_tokens)
        self.wire_bytes = self.wire.layer_bytes(pair, self.count) * len(plan.layers_of(pair))

    def fused(self) -> Way:
        """One kernel pass into memory that both sides map."""
        seconds, nbytes = self._kernel(self.boxes)
        refused = "" if self.transport.maps_memory else f"{self.setting.transport} does not map the peer's memory"
        if not self.setting.reachable:
            refused = _UNREACHABLE
        at: Where = "prefill" if self.converts else ""
        return Way("fused", refused, seconds, {"kernel": seconds}, self.chunks, _NONE, self.wire_bytes, nbytes, 0, at)

    def mapped(self) -> Way:
        """The transport writes pieces where they belong."""
        if self.converts:
            return Way("mapped", "elements change on the way", 0.0, {}, 0, _NONE, 0, 0, 0)
        if not (self.setting.reachable and self.setting.registered):
            why = "prefill's pages are in memory of its engine's own" if self.setting.reachable else _UNREACHABLE
            return Way("mapped", why, 0.0, {}, 0, _NONE, 0, 0, 0)
        found = spans(self.plan, self.pair, self.boxes, self.tokens)
        parts = {
            "plan": found.count * self.constants.expand_s,
            "wire": wire_seconds(self.transport, self.setting, self.chunks, found.count, found.nbytes),
        }
        return Way("mapped", "", sum(parts.values()), parts, self.chunks, found, found.nbytes, 0, 0)

    def staged(self) -> Way:
        """Gather, one run on the wire, scatter."""
        chunk = self._chunk()
        if not chunk:
            why = f"a slot of {self.setting.slot_bytes} bytes does not hold one token of one layer"
            return Way("staged", why, 0.0, {}, 0, _NONE, self.wire_bytes, 0, 0)
        sent, most = self._runs(chunk)
        (gather, a), (scatter, b) = (self._kernel(half) for half in self._halves())
        wire = wire_seconds(self.transport, self.setting, sent.count, sent.count, sent.nbytes)
        send = gather + wire
        seconds = max(send, scatter) + min(send, scatter) / sent.count
        parts = {"gather": gather, "wire": wire, "scatter": scatter}
        return Way("staged", "", seconds, parts, sent.count, sent, sent.nbytes, a + b, most, self._side())

    def _chunk(self) -> int:
        """Tokens of a write: those of a chunk, halved until one layer of them fits into a slot, as the sender does; 0: never."""
        count = min(self.setting.chunk_tokens, self.count)
        while self.wire.layer_bytes(self.pair, count) > self.setting.slot_bytes:
            if count == 1:
                return 0
            count = -(-count // 2)
        return count

    def _runs(self, chunk: int) -> tuple[Spans, int]:
        """The runs on the wire, and the longest: every chunk's layers, as many together as fit into a slot.

        A chunk is sent whole also where stripes leave it empty: that is what the sender does.
        """
        layers = len(self.plan.layers_of(self.pair))
        full, rest = divmod(self.count, chunk)
        runs: list[int] = []
        for tokens, times in ((chunk, full), (rest, 1)):
            if tokens:
                layer = self.wire.layer_bytes(self.pair, tokens)
                fit = min(self.setting.slot_bytes // layer, layers)
                together = [fit] * (layers // fit) + [layers % fit] * (layers % fit > 0)
                runs += [n * layer for n in together] * times
        return Spans(len(runs), float(np.median(runs)), min(runs), sum(runs), exact=True), max(runs)

    def _side(self) -> Where:
        """Where elements change: where the wire is cheaper for it, by array."""
        sides: set[Where] = set()
        for lane in self.plan.lanes:
            if lane.pair == self.pair and lane.converts:
                a, b = (g.component(lane.name) for g in (lane.src_group, lane.dst_group))
                sides.add("prefill" if self.wire.narrows(a, b) else "decode")
        return sides.pop() if len(sides) == 1 else "both sides" if sides else ""

    def _halves(self) -> tuple[list[LaneBoxes], list[LaneBoxes]]:
        gather, scatter = self.wire.halves(self.pair, self.count)
        slot = Side(np.zeros(1, np.int64), {REGION: 0}, self.tokens[0])
        return (
            lane_boxes(gather, (0, 0), (self.sides[0], slot), self.tokens),
            lane_boxes(scatter, (0, 0), (slot, self.sides[1]), self.tokens),
        )

    def _kernel(self, boxes: Sequence[LaneBoxes]) -> tuple[float, int]:
        seconds, total = 0.0, 0
        for lane in boxes:
            s, nbytes = kernel_work(self.constants.kernels, lane.tiles)
            seconds, total = seconds + s * lane.layers, total + nbytes * lane.layers
        return seconds, total
