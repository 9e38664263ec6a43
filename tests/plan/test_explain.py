"""What `explain` says agrees with what the planner does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.errors import Refused
from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Shard
from regauge.layout.view import bytes_per_token
from regauge.plan.explain import explain
from strategies import EIGHT_BIT, FLOATS, layouts, models

LLAMA = load_model("llama-3.1-8b")


def test_a_narrowing_sends_codes_and_scales() -> None:
    found = explain(from_short("bf16", LLAMA), from_short("fp8,scale=token_head,page=64", LLAMA), tokens=100)
    rows = 100 * 2 * 8 * 32
    assert found.source_bytes == rows * 256
    assert found.target_bytes == rows * (128 + 4)
    assert found.target_bytes <= found.wire_bytes < found.target_bytes * 1.01
    assert found.kernel_bytes == found.source_bytes + 2 * found.wire_bytes + found.target_bytes
    assert "with stored scales" in found.text()


def test_a_rank_reads_only_its_share() -> None:
    found = explain(from_short("bf16", LLAMA), from_short("bf16", LLAMA, shard=Shard(1, 4)), tokens=16)
    assert found.source_bytes == found.target_bytes == 16 * 2 * 2 * 128 * 2 * 32
    assert "heads 0-7 -> 2-3" in found.text()


def test_a_refused_pair_is_not_explained() -> None:
    with pytest.raises(Refused, match=r"model\.name"):
        explain(from_short("bf16", LLAMA), from_short("bf16", load_model("qwen3-8b")))


@given(data=st.data(), tokens=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_any_pair_can_be_explained(data: st.DataObject, tokens: int) -> None:
    model = data.draw(models())
    a, b = (data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))) for _ in "ab")
    found = explain(a, b, tokens=tokens, link_gbps=100)
    assert found.target_bytes == int(tokens * bytes_per_token(b))
    assert found.wire_bytes * 8 / 100e9 == found.seconds_on_link
    assert found.text().startswith(found.verdict.path)
