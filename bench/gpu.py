"""The Triton kernels on a GPU: every byte against the reference, then GB/s against a device-to-device copy. Under 3 minutes.

    python bench/gpu.py                    everything, with the accelerator that torch sees
    python bench/gpu.py --part correct     only the comparison
    TRITON_INTERPRET=1 python bench/gpu.py --tokens 64 --cases 5 --rounds 1 --launches 1 --workers 1     a dry run without a GPU

Correctness: all inputs of every dtype to every other, the scale schemes, three orders of axes; processes share the cases,
since compiling takes most of the time. Speed: bytes read and written, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from harness import print_table, write_json
from regauge.move import reference
from regauge.move.triton.digest import Rows, digest
from regauge.move.triton.digest import prepare as prepare_digest
from regauge.move.triton.run import INTERPRETED, accelerator, finish, prepare, run
from regauge.plan.digest import ROW_KEY, Keys, elements_digest
from regauge.plan.tiles import Convert, Int64, Keyed, Tiles

DTYPES = tuple(reference.ITEMSIZE)
EIGHT_BIT = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8")
SCALES = (0.37, -3.3, 1e-42, 1e30, 2.0**-126, 0.0123, np.inf, 0.0)
ORDERS = {"same": (0, 1, 2, 3), "heads first": (0, 2, 1, 3), "dim-major": (0, 2, 3, 1)}
HEADS, DIM = 8, 128
COPY = "device-to-device copy (torch)"


# ---- correctness ----


@dataclass
class Case:
    """Boxes over arrays of this process's memory; `outputs` are those that are written."""

    name: str
    tiles: Tiles
    arrays: list[np.ndarray]
    outputs: list[int]


def addresses(array: np.ndarray, count: int = 1, step: int = 0) -> Int64:
    return array.ctypes.data + np.arange(count, dtype=np.int64) * step


def all_codes(dtype: str) -> np.ndarray:
    size = reference.ITEMSIZE[dtype]
    if size < 4:
        return np.tile(np.arange(256**size, dtype=f"u{size}"), 256 if size == 1 else 1)
    return np.random.default_rng(1).integers(0, 2**32, 65536, dtype=np.uint32)


def paged(name: str, src: str, dst: str, order: str, rows: int, **scheme: Any) -> Case:
    """Pages of 16 tokens x 8 heads x 128 of all codes; `rows`: trailing axes of a computed scale."""
    codes = all_codes(src).reshape(-1, 16, HEADS, DIM // 2)
    sizes = (reference.ITEMSIZE[src], reference.ITEMSIZE[dst])
    shape = codes.shape
    permuted = [shape[i] for i in ORDERS[order]]
    inside = np.ones(4, np.int64)
    for place, axis in enumerate(ORDERS[order]):
        inside[axis] = int(np.prod(permuted[place + 1 :]))
    steps = [np.array([int(np.prod(shape[i + 1 :])) for i in range(4)]) * sizes[0], inside * sizes[1]]
    out = np.full(codes.size * sizes[1], 0xA5, np.uint8)
    free = shape[1 : 4 - rows]
    count = int(np.prod(free))
    stored = reference.SCALE_ITEMSIZE[scheme.get("dst_scale_dtype", "float32")]
    strides = [int(np.prod(free[i + 1 :])) * stored for i in range(len(free))]
    scales = np.resize(np.array(SCALES, np.float32), shape[0] * count)
    operands: dict[str, Any] = {}
    for side in ("src_scale", "dst_scale"):
        if scheme.pop(side, False):
            operands[side] = addresses(scales, shape[0], count * stored)
            operands[f"{side}_stride"] = (*strides, *[0] * (2 - len(strides)))
    convert = Convert(
        src,
        dst,
        int(steps[0][3]),
        int(steps[1][3]),
        row_axes=rows - 1 if scheme.get("dynamic") else 0,
        **operands,
        **scheme,
    )
    tiles = Tiles(
        addresses(codes, shape[0], int(steps[0][0])), addresses(out, shape[0], int(steps[1][0])), shape[1:3],
        tuple(int(s) for s in steps[0][1:3]), tuple(int(s) for s in steps[1][1:3]), shape[3], convert,
    )  # fmt: skip
    return Case(
        f"{name}: {src} to {dst}, {order}", tiles, [codes, out, scales], [1, 2] if scheme.get("dynamic") else [1]
    )


def cases() -> Iterator[Case]:
    for src, dst in itertools.product(DTYPES, DTYPES):
        yield paged("no scale", src, dst, "heads first", 1)
    schemes: dict[str, dict[str, Any]] = {
        "reciprocal": {"dst_scale": True},
        "divide": {"dst_scale": True, "rule": "divide"},
        "divide in the source's dtype": {"dst_scale": True, "rule": "divide_source"},
        "computed": {"dst_scale": True, "dynamic": True, "rule": "divide"},
        "computed e8m0": {"dst_scale": True, "dynamic": True, "pow2": True, "dst_scale_dtype": "float8_e8m0fnu"},
    }
    for (name, scheme), src, dst in itertools.product(schemes.items(), ("bfloat16", "float16", "float32"), EIGHT_BIT):
        yield paged(name, src, dst, "same", 1, **scheme)
    for src, dst in itertools.product(("float8_e4m3fn", "float8_e4m3fnuz", "int8"), ("bfloat16", "float16", "float32")):
        yield paged("scaled", src, dst, "same", 1, src_scale=True)
    for order in ("heads first", "dim-major"):
        yield paged("copy by conversion", "bfloat16", "bfloat16", order, 1)
        yield paged("computed over a page", "bfloat16", "float8_e4m3fn", order, 3, dst_scale=True, dynamic=True)


@dataclass
class Moved:
    """Arrays copied to the device, and addresses that follow them."""

    device: torch.device
    there: list[tuple[np.ndarray, torch.Tensor]] = field(default_factory=list)

    def add(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the device."""
        tensor = torch.from_numpy(array.view(np.uint8).reshape(-1).copy()).to(self.device)
        self.there.append((array, tensor))
        return tensor

    def address(self, at: Int64) -> Int64:
        """Return the same addresses on the device. All lie in one array."""
        for array, tensor in self.there:
            if array.ctypes.data <= at.min() < array.ctypes.data + array.nbytes:
                moved: Int64 = at - array.ctypes.data + tensor.data_ptr()
                return moved
        raise AssertionError("an address outside all arrays")

    def tiles(self, t: Tiles) -> Tiles:
        """Return the same boxes on the device."""
        c = t.convert
        if c is not None:
            scales = (None if s is None else self.address(s) for s in (c.src_scale, c.dst_scale))
            c = dataclasses.replace(c, src_scale=next(scales), dst_scale=next(scales))
        return dataclasses.replace(t, src=self.address(t.src), dst=self.address(t.dst), convert=c)


def wrong(case: Case) -> str:
    """Return what differs from the reference; empty if nothing does."""
    moved = Moved(accelerator())
    tensors = [moved.add(a) for a in case.arrays]
    run([moved.tiles(case.tiles)])
    reference.run(case.tiles)
    for i in case.outputs:
        want, got = case.arrays[i].view(np.uint8).reshape(-1), tensors[i].cpu().numpy()
        if not np.array_equal(want, got):
            at = np.flatnonzero(want != got)
            return f"{case.name}: {len(at)} bytes of output {i} differ, the first at {at[0]}: {got[at[0]]} for {want[at[0]]}"
    return ""


def check_share(share: tuple[int, int, int]) -> list[str]:
    worker, workers, most = share
    mine = itertools.islice(cases(), worker, most or None, workers)
    return [wrong(case) for case in mine]


def correct(options: argparse.Namespace) -> int:
    start = time.perf_counter()
    shares = [(i, options.workers, options.cases) for i in range(options.workers)]
    if options.workers == 1:
        found = check_share(shares[0])
    else:
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            found = [line for lines in pool.map(check_share, shares, chunksize=1) for line in lines]
    bad = [line for line in found if line]
    print(
        "\n".join(bad)
        or f"{len(found)} cases equal the reference, byte for byte, in {time.perf_counter() - start:.0f} s"
    )
    return len(bad)


# ---- speed ----


@dataclass
class Pool:
    """K of some pages of 16 tokens x 8 heads x 128 bfloat16, targets large enough for the same, and keys."""

    tokens: int
    device: torch.device

    def __post_init__(self) -> None:
        self.bytes = self.tokens * HEADS * DIM * 2
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.tokens, HEADS, DIM)
        self.source = torch.randn(shape, generator=generator, device=self.device).to(torch.bfloat16)
        self.target = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
        self.scales = torch.ones(self.tokens * HEADS, dtype=torch.float32, device=self.device)
        self.order = np.random.default_rng(2).permutation(self.tokens // 64)

    def pages(self, tensor: torch.Tensor, page_bytes: int, order: np.ndarray | None = None) -> Int64:
        """Return the addresses of pages, in order or in the given one."""
        index = np.arange(self.tokens // 64, dtype=np.int64) if order is None else order
        at: Int64 = tensor.data_ptr() + index * page_bytes
        return at


def speed_boxes(p: Pool) -> dict[str, tuple[Tiles, float]]:
    """Return boxes of 64 tokens each and the bytes they read and write, per byte of the source."""
    src = p.pages(p.source, 64 * HEADS * DIM * 2)
    wide, narrow = (p.pages(p.target, 64 * HEADS * DIM * n, p.order) for n in (2, 1))
    scales = p.pages(p.scales, 64 * HEADS * 4)
    one = np.full(len(src), p.scales.data_ptr(), np.int64)
    shape, nhd = (64, HEADS), (HEADS * DIM * 2, DIM * 2)
    e4m3 = {"src_dtype": "bfloat16", "dst_dtype": "float8_e4m3fn", "src_step": 2, "dst_step": 1}
    back = {"src_dtype": "float8_e4m3fn", "dst_dtype": "bfloat16", "src_step": 1, "dst_step": 2}
    hnd = (DIM, 64 * DIM)
    per_tensor = Convert(**e4m3, dst_scale=one, dst_scale_stride=(0, 0))  # type: ignore[arg-type]
    computed = Convert(**e4m3, dst_scale=scales, dst_scale_stride=(HEADS * 4, 4), dynamic=True)  # type: ignore[arg-type]
    widen = Convert(**back, src_scale=one, src_scale_stride=(0, 0))  # type: ignore[arg-type]
    return {
        "pages in another order": (Tiles(src, wide, (), (), (), 64 * HEADS * DIM * 2), 2.0),
        "tokens first to heads first": (Tiles(src, wide, shape, nhd, (DIM * 2, 64 * DIM * 2), DIM * 2), 2.0),
        "tokens first to dim-major": (
            Tiles(src, wide, (64, HEADS, DIM), (*nhd, 2), (2, 64 * DIM * 2, 64 * 2), 2),
            2.0,
        ),
        "to e4m3, one scale, heads first": (Tiles(src, narrow, shape, nhd, hnd, DIM, per_tensor), 1.5),
        "to e4m3, computed scales": (Tiles(src, narrow, shape, nhd, hnd, DIM, computed), 1.5 + 4 / (2 * DIM)),
        "from e4m3, one scale": (Tiles(narrow, src, shape, hnd, nhd, DIM, widen), 1.5),
    }


def rows_of(p: Pool, pages: int | None = None) -> Rows:
    """Return the rows of the source's first pages, with a target in which heads come first."""
    keys = Keys(bytes(32))
    rows, positions = keys.rows("attention/k/bfloat16", 0, range(HEADS), 1), keys.tokens(0, p.tokens)
    src = p.pages(p.source, 64 * HEADS * DIM * 2)[:pages]
    dst = p.pages(p.target, 64 * HEADS * DIM * 2)[:pages]
    token = positions.ctypes.data + np.arange(len(src), dtype=np.int64) * 64 * 8
    row = np.full(len(src), rows.ctypes.data, np.int64)
    keyed = Keyed(keys.words, row, (0, 8 * ROW_KEY), token, (8, 0), 0, (rows, positions))
    return Rows(src, (64, HEADS), (HEADS * DIM * 2, DIM * 2), DIM * 2, keyed, dst, (DIM * 2, 64 * DIM * 2))


def digest_differs(p: Pool) -> bool:
    """Whether the digest of 64 tokens is not the definition's, or rows are not copied as they are digested."""
    found = digest(rows_of(p, 1))
    elements = p.source[:64].cpu().view(torch.int16).numpy()
    copied = p.target[: elements.nbytes].cpu().numpy().view(np.int16).reshape(HEADS, 64, DIM)
    want = elements_digest(Keys(bytes(32)), "attention/k/bfloat16", elements[np.newaxis], [0], 0, range(HEADS))
    return found != want or not np.array_equal(copied, elements.transpose(1, 0, 2))


def speed_cases(p: Pool) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """Return what to time, and the bytes that it reads and writes per byte of the source."""
    flat = p.source.view(torch.uint8).reshape(-1)
    heads_first = p.target.view(torch.bfloat16).view(-1, HEADS, 64, DIM)
    pages = p.source.view(-1, 64, HEADS, DIM)
    work: dict[str, Callable[[], object]] = {
        COPY: lambda: p.target.copy_(flat),
        "permute + copy_ (torch)": lambda: heads_first.copy_(pages.permute(0, 2, 1, 3)),
    }
    moved = dict.fromkeys(work, 2.0)
    for name, (tiles, bytes_per_byte) in speed_boxes(p).items():
        (launch,) = prepare([tiles], p.device)
        work[name], moved[name] = launch, bytes_per_byte
    rows = rows_of(p)
    work["digest"], moved["digest"] = prepare_digest(dataclasses.replace(rows, dst=None), p.device)[0], 1.0
    work["digest + heads first"], moved["digest + heads first"] = prepare_digest(rows, p.device)[0], 2.0
    return work, moved


def seconds(work: Mapping[str, Callable[[], object]], options: argparse.Namespace, p: Pool) -> dict[str, float]:
    """Return the median seconds of every case in interleaved rounds; several launches make one measurement."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(options.rounds + 1):
        for name, go in work.items():
            finish(p.device)
            start = time.perf_counter()
            for _ in range(options.launches):
                go()
            finish(p.device)
            if turn:  # the first compiles
                times[name].append((time.perf_counter() - start) / options.launches)
    return {name: statistics.median(t) for name, t in times.items()}


def speed(options: argparse.Namespace) -> int:
    pool = Pool(options.tokens, accelerator())
    bad = digest_differs(pool)
    print("the digest differs from its definition" if bad else "the digest, alone and in a copy, is the definition's")
    work, moved = speed_cases(pool)
    times = seconds(work, options, pool)
    rates = {name: moved[name] * pool.bytes / times[name] / 1e9 for name in work}
    rows = [{"kernel": n, "GB/s": r, "of the copy": r / rates[COPY], "ms": times[n] * 1e3} for n, r in rates.items()]
    device = "interpreter" if INTERPRETED else torch.cuda.get_device_name(pool.device)
    print(f"{device}: {pool.bytes >> 20} MiB of K, medians of {options.rounds} rounds of {options.launches} launches")
    print_table(rows)
    if not INTERPRETED:
        write_json("gpu", {"device": device, "bytes": pool.bytes, "rows": rows})
    return int(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", "correct", "speed"], default="all")
    parser.add_argument("--tokens", type=int, default=1 << 19, help="a multiple of 64; 2 KiB of K each")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile and compare")
    parser.add_argument("--cases", type=int, default=0, help="compare only so many cases")
    parser.add_argument("--launches", type=int, default=5, help="of one measurement")
    options = parser.parse_args()
    bad = correct(options) if options.part != "speed" else 0
    if options.part != "correct":
        bad += speed(options)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
