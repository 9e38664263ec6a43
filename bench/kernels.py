"""Speed of the native kernels against the best memcpy of the same bytes.

    python bench/kernels.py [--rounds N] [--threads 2] [--json] [--only WORD]

GB/s counts bytes read plus bytes written, wall clock, medians of interleaved rounds. `ratio` compares with
a memcpy that moves as many bytes (read + written) on as many threads in the same rounds: the faster of the C library's
and a copy with streaming stores. Buffers are faulted in and reused. "DRAM" = K of 32 layers x 4,096 tokens x 8 heads
x 128 (256 MiB in bf16); "cache" = 1/256 of it. All page tables are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness import medians, print_table, write_json
from regauge import _native
from regauge.layout.dtypes import DTYPES
from regauge.move import kernels
from regauge.plan.tiles import Convert, Tiles

HEADS, DIM = 8, 128
DRAM_TOKENS = 32 * 4096
CACHE_TOKENS = DRAM_TOKENS // 256
RELAYOUT, CONVERT = 0.8, 0.7  # targets


@dataclass(frozen=True)
class Layout:
    """One side: element size, page size in tokens, axes of a page ("nhd", "hnd", "hdn": dim-major)."""

    size: int
    page: int
    order: str

    def strides(self) -> tuple[int, int, int]:
        """Byte strides of token, head, dim."""
        n, h, d = self.page, HEADS, DIM
        of = {"nhd": (h * d, d, 1), "hnd": (d, n * d, 1), "hdn": (1, d * n, n)}[self.order]
        return (of[0] * self.size, of[1] * self.size, of[2] * self.size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page * HEADS * DIM * self.size


def aligned(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Copy to an address that is a multiple of 4,096, as pools and staging slabs have."""
    room = np.empty(len(values) + 4096, np.uint8)
    at = -room.ctypes.data % 4096
    room[at : at + len(values)] = values
    return room[at : at + len(values)]


class Bench:
    """Buffers that all cases share, and the tiles of the cases."""

    def __init__(self, tokens: int, threads: int) -> None:
        self.tokens, self.threads = tokens, threads
        rng = np.random.default_rng(7)
        count = tokens * HEADS * DIM
        self.rng = rng
        normal = rng.standard_normal(1 << 20, dtype=np.float32)
        self.source: dict[str, npt.NDArray[np.uint8]] = {}
        self.source["float32"] = aligned(np.resize(normal, count).view(np.uint8))
        bf16 = (normal.view(np.uint32) >> 16).astype(np.uint16)
        self.source["bfloat16"] = aligned(np.resize(bf16, count).view(np.uint8))
        codes = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x38
        self.source["float8_e4m3fn"] = aligned(np.resize(codes, count))
        self.source["int8"] = self.source["float8_e4m3fn"]  # any bytes will do
        self.target = aligned(np.ones(count * 4, np.uint8))
        self.scale = np.array([0.0123], np.float32)
        self.scales = np.ones(tokens * HEADS, np.float32)

    def relayout(self, src: Layout, dst: Layout, dtypes: tuple[str, str] | None = None, scale: str = "") -> Tiles:
        """Tokens of random source pages go to random target pages; one tile per smaller page."""
        small = min(src.page, dst.page)
        count = self.tokens // small

        def addresses(base: int, side: Layout) -> npt.NDArray[np.int64]:
            pages = self.rng.permutation(self.tokens // side.page).astype(np.int64)
            first = np.arange(count, dtype=np.int64) * small
            at = base + pages[first // side.page] * side.page_bytes + first % side.page * side.strides()[0]
            return np.ascontiguousarray(at)

        dtypes = dtypes or ("bfloat16", "bfloat16")
        a = addresses(self.source[dtypes[0]].ctypes.data, src)
        b = addresses(self.target.ctypes.data, dst)
        (sn, sh, sd), (dn, dh, dd) = src.strides(), dst.strides()
        if dtypes[0] != dtypes[1]:
            convert = self._convert(dtypes, (sd, dd), scale, count, small)
            return Tiles(a, b, (small, HEADS), (sn, sh), (dn, dh), DIM, convert)
        if src.order == dst.order == "nhd":
            return Tiles(a, b, (), (), (), small * HEADS * DIM * src.size)
        if sd == dd == src.size:
            return Tiles(a, b, (small, HEADS), (sn, sh), (dn, dh), DIM * src.size)
        return Tiles(a, b, (HEADS, small, DIM), (sh, sn, sd), (dh, dn, dd), src.size)

    def _convert(self, dtypes: tuple[str, str], step: tuple[int, int], scale: str, count: int, small: int) -> Convert:
        one = np.full(count, self.scale.ctypes.data, np.int64)
        if scale == "dynamic":
            rows = self.scales.ctypes.data + np.arange(count, dtype=np.int64) * small * HEADS * 4
            return Convert(*dtypes, *step, dst_scale=rows, dst_scale_stride=(HEADS * 4, 4), dynamic=True)
        if scale == "src":
            return Convert(*dtypes, *step, src_scale=one, src_scale_stride=(0, 0))
        return Convert(*dtypes, *step, dst_scale=one if scale else None, dst_scale_stride=(0, 0) if scale else ())

    def flat(self, src: str, dst: str, scale: str = "") -> Tiles:
        """Convert everything in place order: one long row."""
        at = np.array([self.source[src].ctypes.data], np.int64), np.array([self.target.ctypes.data], np.int64)
        one = np.array([self.scale.ctypes.data], np.int64)
        convert = Convert(
            src,
            dst,
            DTYPES[src].itemsize,
            DTYPES[dst].itemsize,
            src_scale=one if scale == "src" else None,
            dst_scale=one if scale == "dst" else None,
        )
        return Tiles(*at, (), (), (), self.tokens * HEADS * DIM, convert)

    def fuse(self) -> Tiles:
        """Split K and V planes, page 16 NHD, become [token][K heads, V heads] rows of pages of 16."""
        half = self.tokens // 2
        src, dst = self.source["bfloat16"].ctypes.data, self.target.ctypes.data
        row, count = HEADS * DIM * 2, half // 16
        pages, to = self.rng.permutation(count).astype(np.int64), self.rng.permutation(count).astype(np.int64)
        k = src + pages * 16 * row
        a = np.concatenate([k, k + half * row])
        b = dst + np.concatenate([to * 32 * row, to * 32 * row + row])
        return Tiles(a, b, (16,), (row,), (2 * row,), row)

    def run(self, tiles: Tiles) -> Callable[[], None]:
        """Return the work of one case."""
        return lambda: kernels.run([tiles], threads=self.threads)

    def memcpy(self, streaming: bool, nbytes: int) -> Callable[[], None]:
        """Copy half of `nbytes`: so many bytes are read and written together."""
        source, target = self.source["float32"].ctypes.data, self.target.ctypes.data
        return lambda: _native.memcpy(target, source, nbytes // 2, self.threads, streaming)


def cases(b: Bench) -> dict[str, tuple[Tiles, float, float]]:
    """Name -> tiles, bytes read and written per element, target."""
    n16, n64, h16, h64, t16 = (
        Layout(2, p, o) for p, o in ((16, "nhd"), (64, "nhd"), (16, "hnd"), (64, "hnd"), (16, "hdn"))
    )
    h16f, h64f, n16f = Layout(1, 16, "hnd"), Layout(1, 64, "hnd"), Layout(1, 16, "nhd")
    narrow, widen = ("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")
    return {
        "page 16 -> 64, NHD": (b.relayout(n16, n64), 4, RELAYOUT),
        "NHD -> HND, page 16": (b.relayout(n16, h16), 4, RELAYOUT),
        "NHD -> HND, page 64": (b.relayout(n64, h64), 4, RELAYOUT),
        "HND page 64 -> NHD page 16": (b.relayout(h64, n16), 4, RELAYOUT),
        "split K, V -> fused": (b.fuse(), 4, RELAYOUT),
        "K dim-major in page -> NHD, page 16": (b.relayout(t16, n16), 4, 0.5),
        "bf16 -> e4m3fn, per tensor": (b.flat(*narrow, "dst"), 3, CONVERT),
        "e4m3fn -> bf16, per tensor": (b.flat(*widen, "src"), 3, CONVERT),
        "fp32 -> bf16": (b.flat("float32", "bfloat16"), 6, CONVERT),
        "NHD -> HND page 16 + bf16 -> e4m3fn, per tensor": (b.relayout(n16, h16f, narrow, "dst"), 3, CONVERT),
        "NHD -> HND page 64 + bf16 -> e4m3fn, per tensor": (b.relayout(n64, h64f, narrow, "dst"), 3, CONVERT),
        "NHD -> HND page 16 + bf16 -> e4m3fn, dynamic": (
            b.relayout(n16, h16f, narrow, "dynamic"),
            3 + 4 / DIM,
            CONVERT,
        ),
        "HND page 64 -> NHD page 16 + e4m3fn -> bf16": (b.relayout(h64f, n16, widen, "src"), 3, CONVERT),
        "bf16 -> int8, dynamic per (token, head), NHD page 16": (
            b.relayout(n16, n16f, ("bfloat16", "int8"), "dynamic"),
            3 + 4 / DIM,
            CONVERT,
        ),
        "int8 -> bf16, per tensor": (b.flat("int8", "bfloat16", "src"), 3, CONVERT),
    }


def measure(where: str, tokens: int, threads: int, rounds: int, only: str) -> list[dict[str, object]]:
    bench = Bench(tokens, threads)
    repeat = max(1, CACHE_TOKENS * 64 // tokens)
    chosen = {name: case for name, case in cases(bench).items() if only in name}

    def repeated(work: Callable[[], None]) -> Callable[[], None]:
        def again() -> None:
            for _ in range(repeat):
                work()

        return again

    work: dict[str, Callable[[], None]] = {}
    sizes = {name: int(tokens * HEADS * DIM * per) for name, (_, per, _) in chosen.items()}
    for nbytes in sorted(set(sizes.values())):
        work[f"libc {nbytes}"] = repeated(bench.memcpy(False, nbytes))
        work[f"stream {nbytes}"] = repeated(bench.memcpy(True, nbytes))
    for name, (tiles, _, _) in chosen.items():
        work[name] = repeated(bench.run(tiles))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="also write bench/out/kernels.json")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    options = parser.parse_args()
    print(f"isa {kernels.isa()}, {options.threads} threads, medians of {options.rounds} rounds")
    rows: list[dict[str, object]] = []
    for where, tokens in (("DRAM", DRAM_TOKENS), ("cache", CACHE_TOKENS)):
        rows += measure(where, tokens, options.threads, options.rounds, options.only)
    print_table(rows)
    if options.json:
        print(write_json("kernels", {"threads": options.threads, "rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
