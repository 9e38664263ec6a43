"""SGLang as scripts/install-sglang installs it serves on the CPU, and computes what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from sglang_servers import Server, Side

from regauge.testing.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(600)
TOKENS = 8


def test_greedy_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_model("tiny-llama")
    prompt = [1, *range(20, 37)]
    with Server(folder, tmp_path / "log", Side()) as server:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        given = torch.tensor([prompt])
        wanted = model.generate(given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        server.ready()
        answer = server.generate(prompt, TOKENS)
    assert (answer.status, answer.ids, answer.error) == (200, wanted.tolist(), "")
