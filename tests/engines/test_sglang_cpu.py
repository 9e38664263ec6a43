"""What SGLang's missing modules are answered with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from regauge.engines.sglang.cpu import STOOD_IN_FOR, Finder


def run(code: str) -> str:
    """Run it in a process of its own: what is imported once stays."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_imported_of_them_is_there_and_cannot_be_called() -> None:
    told = run(
        "from regauge.engines.sglang import cpu\n"
        "cpu.install(); cpu.install()\n"
        "import sys\n"
        "assert sum(isinstance(f, cpu.Finder) for f in sys.meta_path) == 1\n"
        "from sgl_kernel import rmsnorm\n"
        "from sgl_kernel.flash_attn import flash_attn_varlen_func\n"
        "import torchvision.transforms.functional\n"
        "from torchvision.transforms import InterpolationMode\n"
        "assert InterpolationMode.BICUBIC\n"
        "for each in (rmsnorm, flash_attn_varlen_func):\n"
        "    try:\n"
        "        each(1)\n"
        "    except NotImplementedError as error:\n"
        "        print(error)\n"
    )
    assert told.count("this model needs a machine that has SGLang's kernels") == 2


def test_it_costs_no_process_time_to_start() -> None:
    """It runs in every process of that environment, pip's too."""
    heavy = run(
        "from regauge.engines.sglang import cpu\nimport sys\nprint([m for m in ('numpy', 'torch', 'msgspec') if m in sys.modules])"
    )
    assert heavy == "[]"


@pytest.mark.parametrize("name", STOOD_IN_FOR)
def test_what_is_installed_comes_first(name: str) -> None:
    """It is asked last, so it may answer whenever it is asked; for nothing else."""
    assert Finder().find_spec(name) is not None
    assert Finder().find_spec(f"{name}.sub") is not None
    assert Finder().find_spec(f"{name}_npu") is None
