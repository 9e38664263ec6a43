"""Speed of the native kernels against the best memcpy of the same bytes, and against torch.

    python bench/kernels.py [--rounds N] [--threads 2] [--json] [--only WORD] [--torch]

GB/s counts bytes read plus bytes written, wall clock, medians of interleaved rounds. `ratio` compares with
a memcpy that moves as many bytes (read + written) on as many threads in the same rounds: the faster of the C library's
and a copy with streaming stores. Buffers are faulted in and reused. "DRAM" = K of 32 layers x 4,096 tokens x 8 heads
x 128 (256 MiB in bf16), or as many tokens of MLA; "cache" = 1/256 of it. All page tables are random. `--torch`: see
kernels_torch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness import arguments, print_table, write_json
from kernel_cases import DIM, HEADS, Bench, Layout
from regauge import _native
from regauge.move import kernels
from regauge.move.calibrate import medians
from regauge.plan.tiles import Tiles

DRAM_TOKENS = 32 * 4096
CACHE_TOKENS = DRAM_TOKENS // 256
ELEMENTS = HEADS * DIM
RELAYOUT, CONVERT, DYNAMIC, MLA, TURNED, RESCALE = 0.9, 0.8, 0.6, 0.7, 0.3, 0.4  # targets

Case = tuple[Sequence[Tiles], float, float]
"""Tiles, bytes read and written per token, target."""


def copies(b: Bench) -> dict[str, Case]:
    n16, n64, h16, h64 = (Layout(2, p, o) for p, o in ((16, "nhd"), (64, "nhd"), (16, "hnd"), (64, "hnd")))
    size = 4 * ELEMENTS
    return {
        "page 16 -> 64, NHD": (b.relayout(n16, n64), size, RELAYOUT),
        "NHD -> HND, page 16": (b.relayout(n16, h16), size, RELAYOUT),
        "NHD -> HND, page 64": (b.relayout(n64, h64), size, RELAYOUT),
        "HND page 64 -> NHD page 16": (b.relayout(h64, n16), size, RELAYOUT),
        "split K, V -> fused": (b.fuse(), size, RELAYOUT),
        "K dim-major in page -> NHD, page 16": (b.relayout(Layout(2, 16, "hdn"), n16), size, 0.5),
    }


def conversions(b: Bench) -> dict[str, Case]:
    n16, n64, h64 = Layout(2, 16, "nhd"), Layout(2, 64, "nhd"), Layout(2, 64, "hnd")
    n16f, h16f, h64f = Layout(1, 16, "nhd"), Layout(1, 16, "hnd"), Layout(1, 64, "hnd")
    narrow, widen, bytes_ = ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16"), 3 * ELEMENTS
    fp8, fnuz, scaled = "float8_e4m3fn", "float8_e4m3fnuz", 3 * ELEMENTS + 4 * HEADS
    return {
        "bf16 -> e4m3fn, per tensor": (b.flat(*narrow, "dst"), bytes_, CONVERT),
        "bf16 -> e4m3fn, divided in bf16": (b.flat(*narrow, "dst", rule="divide_source"), bytes_, CONVERT),
        "e4m3fn -> bf16, per tensor": (b.flat(*widen, "src"), bytes_, CONVERT),
        "int8 -> bf16, per tensor": (b.flat("int8", "bfloat16", "src"), bytes_, CONVERT),
        "fp32 -> bf16": (b.flat("float32", "bfloat16"), 2 * bytes_, CONVERT),
        "NHD -> HND page 16 + bf16 -> e4m3fn, per tensor": (b.relayout(n16, h16f, narrow, "dst"), bytes_, CONVERT),
        "NHD -> HND page 64 + bf16 -> e4m3fn, per tensor": (b.relayout(n64, h64f, narrow, "dst"), bytes_, CONVERT),
        "NHD -> HND page 16 + bf16 -> e4m3fn, per head": (b.relayout(n16, h16f, narrow, "heads"), bytes_, CONVERT),
        "HND page 64 -> NHD page 16 + e4m3fn -> bf16": (b.relayout(h64f, n16, widen, "src"), bytes_, CONVERT),
        "NHD -> HND page 16 + bf16 -> e4m3fn, dynamic": (b.relayout(n16, h16f, narrow, "dynamic"), scaled, DYNAMIC),
        "NHD page 16 + bf16 -> int8, dynamic": (b.relayout(n16, n16f, ("bfloat16", "int8"), "dynamic"), scaled, DYNAMIC),
        "NHD page 16 + bf16 -> e4m3fn, e8m0 scales": (b.relayout(n16, n16f, narrow, "e8m0"), scaled, DYNAMIC),
        "HND page 64 -> NHD page 16 + e4m3fn rescaled": (b.relayout(h64f, n16f, (fp8, fp8), "both"), 2 * ELEMENTS, RESCALE),
        "NHD page 16 + e4m3fn -> e4m3fnuz": (b.relayout(n16f, n16f, (fp8, fnuz), "src"), 2 * ELEMENTS, RESCALE),
        "MLA 576 bf16 -> 656-byte record": (b.pack_mla(), 1152 + 656, MLA),
        "MLA 656-byte record -> 576 bf16": (b.unpack_mla(), 1152 + 656, MLA),
        "K dim-major, page 16 -> NHD + bf16 -> e4m3fn": (b.relayout(Layout(2, 16, "hdn"), n16f, narrow, "dst"), bytes_, TURNED),
        "K dim-major, page 64 -> HND + bf16 -> e4m3fn": (b.relayout(Layout(2, 64, "hdn"), h64f, narrow, "dst"), bytes_, TURNED),
        "HND -> K dim-major, page 64 + e4m3fn -> bf16": (b.relayout(h64f, Layout(2, 64, "hdn"), widen, "src"), bytes_, TURNED),
        "K dim-major, page 64 -> HND + bf16 -> e4m3fn, dynamic": (
            b.relayout(Layout(2, 64, "hdn"), h64f, narrow, "dynamic"), scaled, TURNED),
        "K in lanes of 8, page 16 -> NHD + bf16 -> e4m3fn": (b.relayout(Layout(2, 16, "lanes"), n16f, narrow, "dst"), bytes_, TURNED),
        "HND page 64 -> K in lanes of 16 + bf16 -> e4m3fn": (b.relayout(h64, Layout(1, 64, "lanes"), narrow, "dst"), bytes_, TURNED),
    }  # fmt: skip


def measure(where: str, tokens: int, threads: int, rounds: int, only: str) -> list[dict[str, object]]:
    bench = Bench(tokens)
    repeat = max(1, CACHE_TOKENS * 64 // tokens)
    chosen = {name: case for name, case in {**copies(bench), **conversions(bench)}.items() if only in name}

    def repeated(work: Callable[[], None]) -> Callable[[], None]:
        def again() -> None:
            for _ in range(repeat):
                work()

        return again

    def run(tiles: Sequence[Tiles]) -> Callable[[], None]:
        return lambda: kernels.run(tiles, threads=threads)

    def memcpy(streaming: bool, nbytes: int) -> Callable[[], None]:
        # Half of the bytes: so many are read and written together.
        source, target = bench.source["float32"].ctypes.data, bench.target.ctypes.data
        return lambda: _native.memcpy(target, source, nbytes // 2, threads, streaming)

    work: dict[str, Callable[[], None]] = {}
    sizes = {name: int(tokens * per) for name, (_, per, _) in chosen.items()}
    for nbytes in sorted(set(sizes.values())):
        work[f"libc {nbytes}"] = repeated(memcpy(False, nbytes))
        work[f"stream {nbytes}"] = repeated(memcpy(True, nbytes))
    for name, (tiles, _, _) in chosen.items():
        work[name] = repeated(run(tiles))
    seconds = medians(work, rounds)
    rows: list[dict[str, object]] = []
    for name, (_, _, target) in chosen.items():
        nbytes = sizes[name]
        best = min(seconds[f"libc {nbytes}"], seconds[f"stream {nbytes}"])
        ratio = best / seconds[name]
        rows.append(
            {
                "where": where,
                "case": name,
                "GB/s": nbytes * repeat / seconds[name] / 1e9,
                "memcpy GB/s": nbytes * repeat / best / 1e9,
                "ratio": ratio,
                "target": target,
                "met": "yes" if ratio >= target else "NO",
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__, rounds=9, name="kernels")
    parser.add_argument("--torch", action="store_true", help="also compare with torch's own operations")
    options = parser.parse_args()
    print(f"isa {kernels.isa()}, {options.threads} threads, medians of {options.rounds} rounds")
    rows: list[dict[str, object]] = []
    for where, tokens in (("DRAM", DRAM_TOKENS), ("cache", CACHE_TOKENS)):
        rows += measure(where, tokens, options.threads, options.rounds, options.only)
    print_table(rows)
    compared: list[dict[str, object]] = []
    if options.torch:
        import kernels_torch

        compared = kernels_torch.compare(options.threads, options.rounds, options.only)
        print_table(compared)
    if options.json:
        data = {"threads": options.threads, "rounds": options.rounds, "rows": rows, "torch": compared}
        print(write_json("kernels", data))


if __name__ == "__main__":
    main()
