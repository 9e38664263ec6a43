"""What the digest costs: the same move with and without it, in one pass and in two.

    python bench/digest.py [--rounds N] [--threads 2] [--json] [--only WORD]

Medians of interleaved rounds, and of the ratio within each. `plain` moves; `fused` moves and digests in the same pass; `two passes` moves, then reads the
target back and digests that. `cost` = fused / plain - 1 by the wall clock, `CPU cost` by CPU seconds, which other work on
the machine disturbs less. GB/s counts bytes read plus bytes written by the move. Sizes
and page tables as in bench/kernels.py: "DRAM" = K of 32 layers x 4,096 tokens x 8 heads x 128 in bf16; "cache" = 1/256 of it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from harness import arguments, print_table, write_json
from kernel_cases import DIM, HEADS, Bench, Layout
from kernels import CACHE_TOKENS, DRAM_TOKENS
from regauge.layout.dtypes import DTYPES
from regauge.move import digest, kernels
from regauge.plan.digest import Keys
from regauge.plan.tiles import End, Keyed, Tiles

LIMIT = 0.05
"""Most that the digest may cost, as a share of the move's time."""
KEYS = Keys(bytes(32))


def keyed(tiles: Tiles, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], run: int) -> Tiles:
    """Give every row of a box (tokens, heads, ...dim) its keys; `shape` and `strides` are those of the unmerged box."""
    n = len(tiles.src)
    rows = KEYS.rows("k", 0, range(HEADS), 1)
    tokens = KEYS.tokens(0, n * shape[0])
    row_axes = len(shape) - 2
    keys = Keyed(
        KEYS.words,
        np.full(n, rows.ctypes.data, np.int64),
        (0, 32, *[0] * row_axes),
        tokens.ctypes.data + np.arange(n, dtype=np.int64) * 8 * shape[0],
        (8, 0, *[0] * row_axes),
        row_axes,
        keep=(rows, tokens),
    )
    convert = tiles.convert
    narrows = convert is not None and DTYPES[convert.dst_dtype].itemsize < DTYPES[convert.src_dtype].itemsize
    return dataclasses.replace(
        tiles, shape=shape, src_stride=strides[0], dst_stride=strides[1], run=run,
        src_keys=None if narrows else keys, dst_keys=keys if narrows else None,
    )  # fmt: skip


def box(
    b: Bench, src: Layout, dst: Layout, dtypes: tuple[str, str] | None = None, scale: str = ""
) -> tuple[Tiles, Tiles]:
    """Return a move without and with keys."""
    [plain] = b.relayout(src, dst, dtypes, scale)
    small = min(src.page, dst.page)
    (sn, sh, sd), (dn, dh, dd) = src.strides(), dst.strides()
    if plain.convert is not None or sd == dd == src.size:
        run = DIM if plain.convert is not None else DIM * src.size
        return plain, keyed(plain, (small, HEADS), ((sn, sh), (dn, dh)), run)
    return plain, keyed(plain, (small, HEADS, DIM), ((sn, sh, sd), (dn, dh, dd)), src.size)


def cases(b: Bench) -> dict[str, tuple[tuple[Tiles, Tiles], float]]:
    """Name -> the move without and with keys, bytes read and written per element."""
    n16, n64, h16, h64, t16 = (
        Layout(2, p, o) for p, o in ((16, "nhd"), (64, "nhd"), (16, "hnd"), (64, "hnd"), (16, "hdn"))
    )
    n16b, h64b, h16b = Layout(1, 16, "nhd"), Layout(1, 64, "hnd"), Layout(1, 16, "hnd")
    narrow, widen = ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")
    return {
        "page 16 -> 16, NHD": (box(b, n16, n16), 4),
        "page 16 -> 64, NHD": (box(b, n16, n64), 4),
        "NHD -> HND, page 16": (box(b, n16, h16), 4),
        "HND page 64 -> NHD page 16": (box(b, h64, n16), 4),
        "HND page 64 -> NHD page 16, fp8": (box(b, h64b, n16b), 2),
        "K dim-major in page -> NHD, page 16": (box(b, t16, n16), 4),
        "NHD -> K dim-major in page, page 16": (box(b, n16, t16), 4),
        "NHD -> HND page 16 + bf16 -> e4m3fn, per tensor": (box(b, n16, h16b, narrow, "dst"), 3),
        "NHD -> HND page 16 + bf16 -> e4m3fn, dynamic": (box(b, n16, h16b, narrow, "dynamic"), 3 + 4 / DIM),
        "HND page 64 -> NHD page 16 + e4m3fn -> bf16": (box(b, h64b, n16, widen, "src"), 3),
    }


def times(work: Mapping[str, Callable[[], None]], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall-clock and CPU seconds of every case in every round; cases take turns."""
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    for once in work.values():
        once()
    for _ in range(rounds):
        for name, once in work.items():
            start = time.perf_counter(), time.process_time()
            once()
            wall[name].append(time.perf_counter() - start[0])
            cpu[name].append(time.process_time() - start[1])
    return wall, cpu


def measure(where: str, tokens: int, threads: int, rounds: int, only: str) -> list[dict[str, object]]:
    bench = Bench(tokens)
    repeat = max(1, CACHE_TOKENS * 64 // tokens)
    chosen = {name: case for name, case in cases(bench).items() if only in name}
    work: dict[str, Callable[[], None]] = {}

    def repeated(once: Callable[[], object]) -> Callable[[], None]:
        def again() -> None:
            for _ in range(repeat):
                once()

        return again

    for name, ((plain, with_keys), _) in chosen.items():
        side: End = "src" if with_keys.dst_keys is None and with_keys.convert is not None else "dst"

        def move(plain: Tiles = plain) -> None:
            kernels.run([plain], threads=threads)

        def fused(box: Tiles = with_keys) -> None:
            digest.run([box], threads=threads)

        def twice(plain: Tiles = plain, box: Tiles = with_keys, side: End = side) -> None:
            kernels.run([plain], threads=threads)
            digest.read([box], side, threads=threads)

        work[f"plain {name}"], work[f"fused {name}"], work[f"twice {name}"] = map(repeated, (move, fused, twice))
    wall, cpu = times(work, rounds)
    rows: list[dict[str, object]] = []
    for name, (_, per) in chosen.items():

        def cost(seconds: dict[str, list[float]], kind: str, name: str = name) -> float:
            pairs = zip(seconds[f"{kind} {name}"], seconds[f"plain {name}"], strict=True)
            return statistics.median(a / b for a, b in pairs) - 1

        rows.append(
            {
                "where": where,
                "case": name,
                "plain GB/s": tokens * HEADS * DIM * per * repeat / statistics.median(wall[f"plain {name}"]) / 1e9,
                "cost": cost(wall, "fused"),
                "CPU cost": cost(cpu, "fused"),
                "two passes": cost(wall, "twice"),
                "met": "yes" if cost(cpu, "fused") < LIMIT else "NO",
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__, rounds=11, name="digest")
    options = parser.parse_args()
    print(f"isa {kernels.isa()}, {options.threads} threads, medians of {options.rounds} rounds")
    rows: list[dict[str, object]] = []
    for where, tokens in (("DRAM", DRAM_TOKENS), ("cache", CACHE_TOKENS)):
        rows += measure(where, tokens, options.threads, options.rounds, options.only)
    print_table(rows)
    if options.json:
        print(write_json("digest", {"threads": options.threads, "rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
