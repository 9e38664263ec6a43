"""The native kernels against torch's own operations on the same work, for bench/kernels.py --torch.

torch gets every advantage that its operations allow: outputs and temporaries are kept, chunks of 512 tokens stay in the
cache, page tables are in order (gathering random pages would cost it a pass more). Medians of interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernel_cases import BLOCK, DIM, HEADS, LATENT, RECORD, ROPE, Bench, Layout
from regauge.move import kernels
from regauge.move.calibrate import medians
from regauge.plan.tiles import Tiles

TOKENS, CHUNK = 16384, 512
FP8 = torch.float8_e4m3fn
TARGET = 10.0


class Torch:
    """The same work in torch, chunk by chunk into kept tensors."""

    def __init__(self, bench: Bench) -> None:
        self.x = torch.frombuffer(bench.source["bfloat16"], dtype=torch.bfloat16)
        self.codes = torch.frombuffer(bench.source["float8_e4m3fn"], dtype=torch.uint8).view(FP8)
        self.scale = float(bench.scale[0])
        self.wide = torch.empty(CHUNK * HEADS * DIM)
        self.rows = self.wide.view(-1, DIM)
        self.amax, self.magnitude = torch.empty(CHUNK * HEADS, 1), torch.empty(CHUNK * HEADS, DIM)
        self.bf16, self.byte = torch.ones(len(self.x), dtype=torch.bfloat16), torch.ones(len(self.x), dtype=torch.uint8)
        self.record = torch.ones(TOKENS, RECORD, dtype=torch.uint8)

    def chunks(self) -> range:
        """Where the chunks begin, in elements."""
        return range(0, TOKENS * HEADS * DIM, CHUNK * HEADS * DIM)

    def turn(self) -> None:
        """NHD to HND in bfloat16."""
        source = self.x.view(-1, 16, HEADS, DIM).permute(0, 2, 1, 3)
        self.bf16.view(-1, HEADS, 16, DIM).copy_(source)

    def narrow(self, turned: bool = False) -> None:
        """One scale; into HND pages of 16 if `turned`."""
        n = len(self.wide)
        for i in self.chunks():
            torch.mul(self.wide.copy_(self.x[i : i + n]), 1 / self.scale, out=self.wide).clamp_(-448, 448)
            if turned:
                out = self.byte[i : i + n].view(FP8).view(-1, HEADS, 16, DIM)
                out.copy_(self.wide.view(-1, 16, HEADS, DIM).permute(0, 2, 1, 3))
            else:
                self.byte[i : i + n].view(FP8).copy_(self.wide)

    def widen(self) -> None:
        """e4m3fn to bfloat16 with one scale."""
        n = len(self.wide)
        for i in self.chunks():
            self.bf16[i : i + n].copy_(self.wide.copy_(self.codes[i : i + n]).mul_(self.scale))

    def scaled(self, rows: torch.Tensor, most: float) -> torch.Tensor:
        """Float32 rows divided by their own scale; the scales are left in `amax`."""
        amax = self.amax[: len(rows)]
        torch.amax(torch.abs(rows, out=self.magnitude[: len(rows)]), dim=1, keepdim=True, out=amax)
        return rows.mul_(amax.div_(most).clamp_(min=2.0**-126).reciprocal())

    def dynamic(self, whole: bool) -> None:
        """A scale for each (token, head); int8 if `whole`, else e4m3fn."""
        n = len(self.wide)
        for i in self.chunks():
            self.wide.copy_(self.x[i : i + n])
            if whole:
                self.byte[i : i + n].view(torch.int8).copy_(self.scaled(self.rows, 127).round_().view(-1))
            else:
                self.byte[i : i + n].view(FP8).copy_(self.scaled(self.rows, 448).view(-1))

    def pack(self) -> None:
        """MLA tokens to records."""
        plain = self.x[: TOKENS * (LATENT + ROPE)].view(TOKENS, LATENT + ROPE)
        for i in range(0, TOKENS, CHUNK):
            part, out = plain[i : i + CHUNK], self.record[i : i + CHUNK]
            rows = self.wide[: CHUNK * LATENT].view(-1, BLOCK)
            rows.view(CHUNK, LATENT).copy_(part[:, :LATENT])
            out[:, :LATENT].view(FP8).copy_(self.scaled(rows, 448).view(CHUNK, LATENT))
            out[:, LATENT : LATENT + 16].copy_(self.amax[: len(rows)].view(CHUNK, 4).view(torch.uint8))
            out[:, LATENT + 16 :].copy_(part[:, LATENT:].view(torch.uint8))


def compare(threads: int, rounds: int, only: str) -> list[dict[str, object]]:
    bench = Bench(TOKENS)
    torch.set_num_threads(threads)
    peer = Torch(bench)
    n16, h16f, n16f = Layout(2, 16, "nhd"), Layout(1, 16, "hnd"), Layout(1, 16, "nhd")
    narrow = ("bfloat16", "float8_e4m3fn")
    pairs: dict[str, tuple[Sequence[Tiles], Callable[[], None]]] = {
        "NHD -> HND, page 16": (bench.relayout(n16, Layout(2, 16, "hnd")), peer.turn),
        "bf16 -> e4m3fn, per tensor": (bench.flat(*narrow, "dst"), peer.narrow),
        "e4m3fn -> bf16, per tensor": (bench.flat(*narrow[::-1], "src"), peer.widen),
        "NHD -> HND page 16 + bf16 -> e4m3fn, per tensor": (
            bench.relayout(n16, h16f, narrow, "dst"),
            lambda: peer.narrow(True),
        ),
        "NHD page 16 + bf16 -> e4m3fn, dynamic": (
            bench.relayout(n16, n16f, narrow, "dynamic"),
            lambda: peer.dynamic(False),
        ),
        "NHD page 16 + bf16 -> int8, dynamic": (
            bench.relayout(n16, n16f, ("bfloat16", "int8"), "dynamic"),
            lambda: peer.dynamic(True),
        ),
        "MLA 576 bf16 -> 656-byte record": (bench.pack_mla(), peer.pack),
    }
    work: dict[str, Callable[[], object]] = {}
    for name, (tiles, theirs) in pairs.items():
        if only in name:
            work[name] = lambda tiles=tiles: kernels.run(tiles, threads=threads)  # type: ignore[misc]
            work[f"torch {name}"] = theirs
    seconds = medians(work, rounds)
    rows: list[dict[str, object]] = []
    for name in pairs:
        if name in seconds:
            times = seconds[f"torch {name}"] / seconds[name]
            rows.append({"case": name, "ms": 1e3 * seconds[name], "torch ms": 1e3 * seconds[f"torch {name}"],
                         "times faster": times, "target": TARGET, "met": "yes" if times >= TARGET else "NO"})  # fmt: skip
    return rows
