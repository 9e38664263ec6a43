"""Compile a launch for a GPU that is not there: what machine code would run, and whether there is any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from regauge.move.triton import hashing, kernels
from regauge.move.triton.run import INTERPRETED
from regauge.move.triton.schedule import WARPS, Schedule


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU: for "cuda" `arch` is its compute capability times ten, for "hip" its name."""

    backend: Literal["cuda", "hip"]
    arch: int | str

    @property
    def binary(self) -> str:
        """The name of what the compiler's last stage makes."""
        return "cubin" if self.backend == "cuda" else "hsaco"


TARGETS: tuple[Target, ...] = (
    Target("cuda", 80),
    Target("cuda", 90),
    Target("cuda", 100),
    Target("hip", "gfx90a"),
    Target("hip", "gfx942"),
    Target("hip", "gfx950"),
)
"""A100, H100, B200; MI250, MI300, MI350."""


def compile_for(x: Schedule, target: Target) -> dict[str, Any]:
    """Return every stage that the compiler made for `target`: "ptx" or "amdgcn" as text, `target.binary` as bytes.

    Raises RuntimeError in Triton's interpreter, which has no compiler.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set: unset it before Python starts, to compile kernels")
    kernel = hashing.digest if x.kernel == "digest" else getattr(kernels, x.kernel)
    counts = ("rows", "columns", "units", "lanes")
    types = {name: "i32" if name in counts else "*i32" if name == "words" else "*i64" for name in kernel.arg_names}
    signature = types | dict.fromkeys(x.constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=x.constants)
    lanes = 32 if target.backend == "cuda" else 64
    compiled = triton.compile(
        source, target=GPUTarget(target.backend, target.arch, lanes), options={"num_warps": WARPS}
    )
    return dict(compiled.asm)
