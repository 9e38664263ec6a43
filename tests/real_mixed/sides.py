"""The engines on either side, and what they are asked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from served import Side

ROOT: Final = Path(__file__).parents[2]
VLLM, SGLANG = ROOT / ".venv-vllm/bin/python", ROOT / ".venv-sglang/bin/python"
LETTER: Final = 39
_VLLM = ("--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=64M")
_SGLANG = (
    "--device=cpu", "--attention-backend=torch_native", "--dtype=float32", "--max-total-tokens=8192", "--max-running-requests=16",
    "--skip-server-warmup", "--random-seed=1", "--disaggregation-decode-retraction-backup=none",
)  # fmt: skip
PREFILL: Final = {
    "vllm": Side("vllm", args=(*_VLLM, "--block-size=32"), python=str(VLLM)),
    "sglang": Side("sglang", args=(*_SGLANG, "--page-size=16"), python=str(SGLANG)),
    "local": Side("local", "fp32,page=16,nhd"),
}
DECODE: Final = {
    "vllm": Side("vllm", args=(*_VLLM, "--block-size=128"), python=str(VLLM)),
    "sglang": Side("sglang", args=(*_SGLANG, "--page-size=64"), python=str(SGLANG)),
    "local": Side("local", "fp32,page=24,hnd"),
}


def prompt(seed: int, tokens: int) -> list[int]:
    """Return random tokens, the last a whole letter: what begins within a letter has another text than the same tokens alone."""
    rng = random.Random(seed)  # a prompt
    return [*(rng.randrange(3, 500) for _ in range(tokens - 1)), LETTER]
