"""The kernels compile for GPUs that are not there, into vector loads and stores and the arithmetic that the reference names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ahead
import pytest

ELF = "7f454c46"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every case for every target, compiled in a process without the interpreter and without an old cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("ahead_process.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("triton"))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_every_kernel_becomes_machine_code_for_every_target(compiled: list[dict[str, Any]]) -> None:
    cases = {c["case"] for c in compiled}
    made = {(c["case"], c["backend"], c["arch"]) for c in compiled if c["magic"] == ELF}
    assert made == {(c, t.backend, t.arch) for c in cases for t in ahead.TARGETS}
    assert len(made) == 54


@pytest.mark.parametrize(
    "case", ["copy", "transpose", "narrow", "widen", "divide", "computed", "computed over pages", "digest"]
)
def test_loads_and_stores_move_16_bytes(compiled: list[dict[str, Any]], case: str) -> None:
    for c in compiled:
        if c["case"] == case:
            wide = ("v4.b32", "v2.b64") if c["backend"] == "cuda" else ("dwordx4",)
            for kind in ("ld" if c["backend"] == "cuda" else "load", "st" if c["backend"] == "cuda" else "store"):
                assert any(kind in name and name.endswith(wide) for name in c["access"]), c


def test_nothing_is_flushed_fused_or_approximated(compiled: list[dict[str, Any]]) -> None:
    for c in compiled:
        if c["backend"] == "cuda":
            assert set(c["arithmetic"]) <= {"div.rn.f32"}, c
        elif not any(name.startswith("v_div_fixup") for name in c["arithmetic"]):
            assert not any(name.startswith(("v_fma_f32", "v_fmac_f32")) for name in c["arithmetic"]), c
    divided = {c["case"] for c in compiled if c["arithmetic"].get("div.rn.f32")}
    assert divided == {"divide", "computed", "computed over pages"}
    assert divided == {c["case"] for c in compiled if any(n.startswith("v_div_fixup") for n in c["arithmetic"])}


def test_machine_code_multiplies_and_adds_apart_though_fusion_is_allowed(compiled: list[dict[str, Any]]) -> None:
    (machine,) = (c["machine"] for c in compiled if c["machine"])
    assert set(machine) == {"FMUL", "FADD"}


def test_the_interpreter_cannot_compile() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        ahead.compile_for(None, ahead.TARGETS[0])  # type: ignore[arg-type]
