"""What the digest costs: the same move with and without it, on the boxes that the planner makes.

    python bench/digest.py [--rounds N] [--threads 2] [--json] [--only WORD]

Medians of interleaved rounds, and of the ratio within each. `plain` moves; `cost` = the same with the digest / plain - 1 by
the wall clock, `CPU cost` by CPU seconds, which other work on the machine disturbs less. A copy is digested in the pass that
moves it; `two passes` moves, then reads the target back and digests that. A conversion is digested as a transfer does it: one
end, that of the wire, which the two halves of a transfer compare: the codes written where they are narrower, else those read; with
them stored scales. `both ends` digests codes before and after.
GB/s counts bytes read plus bytes written by the move. "DRAM" = K and V of 16 layers x 4,096 tokens x 8 heads x 128 (256 MiB
in bf16), "cache" = 1 layer x 256 tokens of it; all page tables are random. The last line is what the keys of
tokens take once per transfer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import msgspec
import numpy as np

from harness import arguments, print_table, write_json
from kernel_cases import DIM, HEADS, Bytes
from regauge.layout.presets import attention_model, from_short
from regauge.layout.spec import Array, Component, Layout, Model, with_components
from regauge.layout.view import region_sizes
from regauge.move import digest, kernels
from regauge.move.calibrate import aligned, medians
from regauge.move.conformance.catalogue import calibrated
from regauge.plan import Side, compile, instantiate
from regauge.plan.digest import Keys
from regauge.plan.tiles import End, Tiles

LIMIT = 0.05
"""Most that the digest may cost, as a share of the move's time."""
KEYS = Keys(bytes(32))
KEYED_TOKENS = 65_536
SIZES = {"DRAM": (16, 4096), "cache": (1, 256)}
"""Layers and tokens."""
CASES = {
    "page 16 -> 16, NHD": ("bf16,page=16", "bf16,page=16"),
    "page 16 -> 64, NHD": ("bf16,page=16", "bf16,page=64"),
    "NHD -> HND, page 16": ("bf16,page=16", "bf16,page=16,hnd"),
    "HND page 64 -> NHD page 16": ("bf16,page=64,hnd", "bf16,page=16"),
    "HND page 64 -> NHD page 16, fp8": ("fp8_e4m3,page=64,hnd", "fp8_e4m3,page=16"),
    "dim-major in page -> NHD, page 16": ("bf16,page=16,kt", "bf16,page=16"),
    "NHD -> dim-major in page, page 16": ("bf16,page=16", "bf16,page=16,kt"),
    "NHD -> HND page 16 + bf16 -> e4m3fn, per tensor": ("bf16,page=16", "fp8_e4m3,page=16,hnd,scale=tensor"),
    "NHD -> HND page 16 + bf16 -> e4m3fn, dynamic": ("bf16,page=16", "fp8_e4m3,page=16,hnd,scale=token_head"),
    "HND page 64 -> NHD page 16 + e4m3fn -> bf16": ("fp8_e4m3,page=64,hnd,scale=tensor", "bf16,page=16"),
}
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Move:
    """A move without and with keys, and the bytes that it reads and writes."""

    plain: Sequence[Tiles]
    keyed: Sequence[Tiles]
    nbytes: int
    of: End
    """The end that is on the wire."""

    @property
    def converts(self) -> bool:
        """Whether codes change on the way."""
        return any(t.convert is not None for t in self.plain)


def side(form: str, model: Model, tokens: int) -> Layout:
    """Return a layout with pages for the tokens; V is dim-major if K is, so that everything that moves is turned."""
    layout = calibrated(from_short(form, model))
    if "kt" in form.split(","):
        order = layout.groups[0].components[0].at.order

        def turned(c: Component) -> Component:
            return msgspec.structs.replace(c, at=msgspec.structs.replace(c.at, order=order))

        layout = with_components(layout, turned)
    [group] = layout.groups
    return msgspec.structs.replace(layout, groups=[msgspec.structs.replace(group, pages=tokens // group.page_size)])


class Memory:
    """Pools that all moves share: normally distributed values of each dtype to read, and one to write."""

    def __init__(self, layers: int, tokens: int) -> None:
        self._rng = np.random.default_rng(7)
        values, count = self._rng.standard_normal(1 << 20, dtype=np.float32), 2 * layers * tokens * HEADS * DIM
        self._pools: dict[str, Bytes] = {
            "bfloat16": aligned(np.resize(values.astype(ml_dtypes.bfloat16).view(np.uint8), 2 * count)),
            "float8_e4m3fn": aligned(np.resize(values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), count)),
            "target": aligned(np.zeros(2 * count, np.uint8)),
        }

    def side(self, layout: Layout, pool: str) -> Side:
        """Return where tokens lie in a pool of that layout: in random pages."""
        memory, bases, end = self._pools[pool], {}, 0
        for name, size in region_sizes(layout).items():
            bases[name] = memory.ctypes.data + end
            end += -(-size // 4096) * 4096
        assert end <= len(memory)  # kernels trust addresses
        return Side(self._rng.permutation(layout.groups[0].pages).astype(np.int64), bases)


def moves(memory: Memory, layers: int, tokens: int, only: str) -> dict[str, Move]:
    """Return the moves whose name contains `only`, planned."""
    model = attention_model("bench", layers, Array(HEADS, DIM))
    found: dict[str, Move] = {}
    for name, forms in CASES.items():
        if only in name:
            prefill, decode = (side(form, model, tokens) for form in forms)
            sides = memory.side(prefill, prefill.groups[0].components[0].dtype), memory.side(decode, "target")
            plan = compile(prefill, decode)
            plain, keyed = (instantiate(plan, *sides, (0, tokens), keys=keys) for keys in (None, KEYS))
            sizes = [sum(region_sizes(x).values()) for x in (prefill, decode)]
            found[name] = Move(plain, keyed, sum(sizes), "dst" if sizes[1] < sizes[0] else "src")
    return found


def times(work: Mapping[str, Callable[[], None]], rounds: int) -> tuple[Times, Times]:
    """Return wall-clock and CPU seconds of every case in every round; cases take turns."""
    wall: Times = {name: [] for name in work}
    cpu: Times = {name: [] for name in work}
    for once in work.values():
        once()
    for _ in range(rounds):
        for name, once in work.items():
            start = time.perf_counter(), time.process_time()
            once()
            wall[name].append(time.perf_counter() - start[0])
            cpu[name].append(time.process_time() - start[1])
    return wall, cpu


def works(name: str, move: Move, threads: int, repeat: int) -> dict[str, Callable[[], None]]:
    """Return what is timed of a move."""

    def plain() -> None:
        for _ in range(repeat):
            kernels.run(move.plain, threads=threads)

    def digested() -> None:
        for _ in range(repeat):
            digest.run(move.keyed, of=move.of, threads=threads)

    def both() -> None:
        for _ in range(repeat):
            digest.run(move.keyed, threads=threads)

    def twice() -> None:
        for _ in range(repeat):
            kernels.run(move.plain, threads=threads)
            digest.read(move.keyed, "dst", threads=threads)

    found = {f"plain {name}": plain, f"digested {name}": digested}
    return found | ({f"both {name}": both} if move.converts else {f"twice {name}": twice})


def cost(seconds: Times, kind: str, name: str) -> float:
    """Return the median over rounds of what `kind` takes beyond the plain move, as a share of that."""
    pairs = zip(seconds[f"{kind} {name}"], seconds[f"plain {name}"], strict=True)
    return statistics.median(a / b for a, b in pairs) - 1


def measure(where: str, threads: int, rounds: int, only: str) -> list[dict[str, object]]:
    layers, tokens = SIZES[where]
    memory = Memory(layers, tokens)
    chosen = moves(memory, layers, tokens, only)
    repeat = 1 if where == "DRAM" else 64
    work: dict[str, Callable[[], None]] = {}
    for name, move in chosen.items():
        work |= works(name, move, threads, repeat)
    wall, cpu = times(work, rounds)
    return [
        {
            "where": where,
            "case": name,
            "plain GB/s": move.nbytes * repeat / statistics.median(wall[f"plain {name}"]) / 1e9,
            "cost": cost(wall, "digested", name),
            "CPU cost": cost(cpu, "digested", name),
            "two passes": "-" if move.converts else f"{cost(wall, 'twice', name):.2f}",
            "both ends": f"{cost(wall, 'both', name):.2f}" if move.converts else "-",
            "met": "yes" if cost(cpu, "digested", name) < LIMIT else "NO",
        }
        for name, move in chosen.items()
    ]


def main() -> None:
    parser = arguments(__doc__, rounds=11, name="digest")
    options = parser.parse_args()
    print(f"isa {kernels.isa()}, {options.threads} threads, medians of {options.rounds} rounds")
    rows = [row for where in SIZES for row in measure(where, options.threads, options.rounds, options.only)]
    print_table(rows)
    keys = medians({"keys": lambda: Keys(bytes(32)).tokens(0, KEYED_TOKENS)}, options.rounds)["keys"]
    print(f"keys of {KEYED_TOKENS:,} tokens: {keys * 1e3:.1f} ms")
    if options.json:
        found = {"threads": options.threads, "rounds": options.rounds, "rows": rows, "keys_s": keys}
        print(write_json("digest", found))


if __name__ == "__main__":
    main()
