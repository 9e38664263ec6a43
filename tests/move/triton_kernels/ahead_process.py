"""Compile launches for GPUs that are not there, and print what came out as JSON; runs without TRITON_INTERPRET.

Usage: ahead_process.py CACHE, a directory for what the compiler makes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import ahead
import numpy as np
import triton

from regauge.move.triton.digest import Rows, schedule_digest
from regauge.move.triton.schedule import schedule
from regauge.plan.tiles import Convert, Keyed, Tiles

AT = np.arange(1 << 20, (1 << 20) + 64 * 65536, 65536, dtype=np.int64)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
ACCESS = r"(?:ld|st)\.global(?:\.v\d)?\.b\d+|global_(?:load|store)_\w+"
ARITHMETIC = r"\.ftz|fma\.rn|div\.\w+\.f32|v_fma\w*|v_fmac\w*|v_mad\w*|v_div_fixup\w*|v_rcp\w*"


def box(shape: tuple[int, ...], src: tuple[int, ...], dst: tuple[int, ...], run: int, convert: Convert | None) -> Tiles:
    return Tiles(AT, AT + (1 << 30), shape, src, dst, run, convert)


def by_row(src: str, dst: str, sizes: tuple[int, int], **scheme: object) -> Tiles:
    """Pages of 16 tokens x 8 heads x 128, NHD to HND."""
    strides = [tuple(128 * n * s for n in axes) for axes, s in zip(((8, 1), (1, 16)), sizes, strict=True)]
    return box((16, 8), strides[0], strides[1], 128, Convert(src, dst, *sizes, **scheme))  # type: ignore[arg-type]


CASES = {
    "copy": box((16, 8), (2048, 256), (256, 4096), 256, None),
    "transpose": box((8, 16, 128), (4096, 2, 32), (256, 2048, 2), 2, None),
    "any address": box((16, 8), (2049, 257), (256, 4096), 255, None),
    "narrow": by_row("bfloat16", "float8_e4m3fn", (2, 1), src_scale=AT, src_scale_stride=(0, 0)),
    "widen": by_row("float8_e4m3fnuz", "float16", (1, 2), src_scale=AT, src_scale_stride=(32, 4)),
    "divide": by_row("float16", "int8", (2, 1), dst_scale=AT, dst_scale_stride=(0, 0), rule="divide_source"),
    "computed": by_row("bfloat16", "float8_e5m2", (2, 1), dst_scale=AT, dst_scale_stride=(32, 4), dynamic=True),
    "computed over pages": by_row("bfloat16", "float8_e4m3fn", (2, 1), row_axes=2, dst_scale=AT, dst_scale_stride=(0, 0),
                                  dst_scale_dtype="float8_e8m0fnu", pow2=True, dynamic=True),
}  # fmt: skip


KEYS = Keyed(np.zeros(1026, np.uint32), AT, (0, 32), AT, (8, 0))
LAUNCHES = {name: schedule(tiles)[0] for name, tiles in CASES.items()} | {
    "digest": schedule_digest(Rows(AT, (16, 8), (2048, 256), 256, KEYS, AT + (1 << 30), (256, 4096)))
}


def machine_code(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([CUOBJDUMP, "-sass", file.name], check=True, capture_output=True, text=True).stdout


def main() -> None:
    os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the worst that a user's compiler may do
    found = []
    for name, launch in LAUNCHES.items():
        for target in ahead.TARGETS:
            stages = ahead.compile_for(launch, target)
            text = stages["ptx" if target.backend == "cuda" else "amdgcn"]
            code = machine_code(stages["cubin"]) if (name, target.arch) == ("narrow", 90) else ""
            found.append({
                "case": name,
                "backend": target.backend,
                "arch": target.arch,
                "magic": stages[target.binary][:4].hex(),
                "access": Counter(re.findall(ACCESS, text)),
                "arithmetic": Counter(re.findall(ARITHMETIC, text)),
                "machine": Counter(re.findall(r"FFMA|FMUL|FADD", code)),
            })  # fmt: skip
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
