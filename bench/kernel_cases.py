"""Layouts, buffers and tiles for bench/kernels.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from regauge.layout.dtypes import DTYPES
from regauge.layout.spec import Rule
from regauge.move.calibrate import aligned
from regauge.plan.tiles import Convert, Tiles

HEADS, DIM = 8, 128
LATENT, ROPE, BLOCK = 512, 64, 128
RECORD = LATENT + 4 * (LATENT // BLOCK) + 2 * ROPE
"""Bytes of a packed MLA token: e4m3fn codes, float32 scales per 128, bfloat16 rope (the fp8_ds_mla record)."""
PLAIN = 2 * (LATENT + ROPE)
"""Bytes of a token in bfloat16."""

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """One side: element size, page size in tokens, axes of a page ("nhd", "hnd", "hdn": dim-major, "lanes": of 16 bytes)."""

    size: int
    page: int
    order: str

    def strides(self) -> tuple[int, int, int]:
        """Byte strides of token, head, dim (lanes: within one lane)."""
        n, h, d = self.page, HEADS, DIM
        of = {"nhd": (h * d, d, 1), "hnd": (d, n * d, 1), "hdn": (1, d * n, n), "lanes": (self.lane, d * n, 1)}
        token, head, dim = of[self.order]
        return (token * self.size, head * self.size, dim * self.size)

    @property
    def lane(self) -> int:
        """Elements of one lane."""
        return 16 // self.size

    def dims(self, count: int) -> tuple[int, ...]:
        """Byte strides of head dim split into (.., count)."""
        return (self.page * 16 * (count // self.lane) if self.order == "lanes" else count * self.strides()[2],)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.page * HEADS * DIM * self.size


class Bench:
    """Buffers that all cases share, and the tiles of the cases."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.rng = rng = np.random.default_rng(7)
        count = tokens * HEADS * DIM
        normal = rng.standard_normal(1 << 20, dtype=np.float32)
        self.source: dict[str, Bytes] = {"float32": aligned(np.resize(normal, count).view(np.uint8))}
        bf16 = (normal.view(np.uint32) >> 16).astype(np.uint16)
        self.source["bfloat16"] = aligned(np.resize(bf16, count).view(np.uint8))
        codes = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x38
        self.source["float8_e4m3fn"] = aligned(np.resize(codes, count))
        self.source["int8"] = self.source["float8_e4m3fn"]  # any bytes will do
        self.target = aligned(np.ones(count * 4, np.uint8))
        self.scale = np.array([0.0123], np.float32)
        self.head_scales = rng.uniform(0.01, 0.02, HEADS).astype(np.float32)
        self.scales = np.ones(tokens * HEADS, np.float32)
        records = np.resize(codes[: RECORD * 1024], (tokens, RECORD)).copy()
        records[:, LATENT : LATENT + 16] = rng.uniform(0.01, 0.02, 4).astype(np.float32).view(np.uint8)
        self.records = aligned(records.reshape(-1))

    def pages(self, page: int) -> Addresses:
        """Return a random page table."""
        return self.rng.permutation(self.tokens // page).astype(np.int64)

    def relayout(
        self, src: Layout, dst: Layout, dtypes: tuple[str, str] | None = None, scale: str = ""
    ) -> Sequence[Tiles]:
        """Tokens of random source pages go to random target pages; one tile per smaller page."""
        small = min(src.page, dst.page)
        count = self.tokens // small

        def addresses(base: int, side: Layout) -> Addresses:
            first = np.arange(count, dtype=np.int64) * small
            at = base + self.pages(side.page)[first // side.page] * side.page_bytes
            return np.ascontiguousarray(at + first % side.page * side.strides()[0])

        a = addresses(self.source[dtypes[0] if dtypes else "bfloat16"].ctypes.data, src)
        b = addresses(self.target.ctypes.data, dst)
        (sn, sh, sd), (dn, dh, dd) = src.strides(), dst.strides()
        if dtypes is not None:
            lanes = max(x.lane for x in (src, dst) if x.order == "lanes") if "lanes" in (src.order, dst.order) else DIM
            split = (DIM // lanes,) if lanes < DIM else ()
            convert = self._convert(dtypes, (sd, dd), scale, count, (small, HEADS, *split))
            ss, ds = (sn, sh, *src.dims(lanes)[: len(split)]), (dn, dh, *dst.dims(lanes)[: len(split)])
            return [Tiles(a, b, (small, HEADS, *split), ss, ds, lanes, convert)]
        if src.order == dst.order == "nhd":
            return [Tiles(a, b, (), (), (), small * HEADS * DIM * src.size)]
        if sd == dd == src.size:
            return [Tiles(a, b, (small, HEADS), (sn, sh), (dn, dh), DIM * src.size)]
        return [Tiles(a, b, (HEADS, small, DIM), (sh, sn, sd), (dh, dn, dd), src.size)]

    def _convert(
        self, dtypes: tuple[str, str], step: tuple[int, int], scale: str, count: int, shape: tuple[int, ...]
    ) -> Convert:
        one = np.full(count, self.scale.ctypes.data, np.int64)
        zero, rest = (0,) * len(shape), (0,) * (len(shape) - 2)
        if scale in ("dynamic", "e8m0"):
            size = 4 if scale == "dynamic" else 1
            rows = self.scales.ctypes.data + np.arange(count, dtype=np.int64) * shape[0] * HEADS * size
            kind = "float32" if scale == "dynamic" else "float8_e8m0fnu"
            return Convert(*dtypes, *step, dst_scale=rows, dst_scale_stride=(HEADS * size, size, *rest), dynamic=True,
                           pow2=scale == "e8m0", dst_scale_dtype=kind)  # fmt: skip
        if scale == "heads":
            heads = np.full(count, self.head_scales.ctypes.data, np.int64)
            return Convert(*dtypes, *step, dst_scale=heads, dst_scale_stride=(0, 4, *rest))
        src = one if scale in ("src", "both") else None
        dst = one if scale in ("dst", "both") else None
        return Convert(*dtypes, *step, src_scale=src, src_scale_stride=zero if src is not None else (),
                       dst_scale=dst, dst_scale_stride=zero if dst is not None else ())  # fmt: skip

    def flat(self, src: str, dst: str, scale: str = "", rule: Rule = "reciprocal") -> Sequence[Tiles]:
        """Convert everything in place order: one long row."""
        at = np.array([self.source[src].ctypes.data], np.int64), np.array([self.target.ctypes.data], np.int64)
        one = np.array([self.scale.ctypes.data], np.int64)
        convert = Convert(
            src,
            dst,
            DTYPES[src].itemsize,
            DTYPES[dst].itemsize,
            rule,
            src_scale=one if scale == "src" else None,
            dst_scale=one if scale == "dst" else None,
        )
        return [Tiles(*at, (), (), (), self.tokens * HEADS * DIM, convert)]

    def fuse(self) -> Sequence[Tiles]:
        """Split K and V planes, page 16 NHD, become [token][K heads, V heads] rows of pages of 16."""
        half = self.tokens // 2
        src, dst = self.source["bfloat16"].ctypes.data, self.target.ctypes.data
        row, count = HEADS * DIM * 2, half // 16
        pages, to = self.rng.permutation(count).astype(np.int64), self.rng.permutation(count).astype(np.int64)
        k = src + pages * 16 * row
        a = np.concatenate([k, k + half * row])
        b = dst + np.concatenate([to * 32 * row, to * 32 * row + row])
        return [Tiles(a, b, (16,), (row,), (2 * row,), row)]

    def _mla(self, source: Bytes, step: int, to: int) -> tuple[Addresses, Addresses]:
        """Addresses of pages of 64 tokens: of `step` bytes a token in the source, `to` bytes a token in the target."""
        a = source.ctypes.data + self.pages(64) * 64 * step
        return a, self.target.ctypes.data + self.pages(64) * 64 * to

    def pack_mla(self) -> Sequence[Tiles]:
        """Pages of 64 tokens, latent and rope in bfloat16, become packed records."""
        a, b = self._mla(self.source["bfloat16"], PLAIN, RECORD)
        convert = Convert(
            "bfloat16", "float8_e4m3fn", 2, 1, dst_scale=b + LATENT, dst_scale_stride=(RECORD, 4), dynamic=True
        )
        latent = Tiles(a, b, (64, LATENT // BLOCK), (PLAIN, 2 * BLOCK), (RECORD, BLOCK), BLOCK, convert)
        return [latent, Tiles(a + 2 * LATENT, b + RECORD - 2 * ROPE, (64,), (PLAIN,), (RECORD,), 2 * ROPE)]

    def unpack_mla(self) -> Sequence[Tiles]:
        """The inverse."""
        a, b = self._mla(self.records, RECORD, PLAIN)
        convert = Convert("float8_e4m3fn", "bfloat16", 1, 2, src_scale=a + LATENT, src_scale_stride=(RECORD, 4))
        latent = Tiles(a, b, (64, LATENT // BLOCK), (RECORD, BLOCK), (PLAIN, 2 * BLOCK), BLOCK, convert)
        return [latent, Tiles(a + RECORD - 2 * ROPE, b + 2 * LATENT, (64,), (RECORD,), (PLAIN,), 2 * ROPE)]
