"""How a chunk is written is chosen by what the transport and the pair allow."""

from __future__ import annotations

import pytest

from regauge.errors import ConfigError, Refused
from regauge.layout.files import decode, encode
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Group, Layout
from regauge.move.crossing import bind, choose_mode, one_pair, slab_bytes, typical_piece
from regauge.move.memory import Slab
from regauge.plan import compile

LLAMA = load_model("llama-3.1-8b")


@pytest.mark.parametrize(
    ("a", "b", "piece", "mode"),
    [
        ("bf16,page=16", "bf16,page=16", 32768, "mapped"),  # a page of one layer, K or V: 16 x 8 x 128 x 2 bytes
        ("bf16,page=64", "bf16,page=16", 32768, "mapped"),
        ("bf16,page=24", "bf16,page=16", 24576, "mapped"),  # runs of 8 and 16 tokens
        ("bf16,page=64,hnd", "bf16,page=16,nhd", 256, "staged"),  # one head of one token
        ("bf16,page=64,hnd", "bf16,page=16,hnd", 4096, "mapped"),  # 16 tokens of one head
        ("bf16,page=64,kt", "bf16,page=16", 4, "staged"),  # K element by element
        ("bf16,page=65536", "bf16,page=1,kt", 2048, "staged"),  # one token: K as it lies
    ],
)
def test_short_pieces_are_staged(a: str, b: str, piece: float, mode: str) -> None:
    plan = compile(from_short(a, LLAMA, pages=40), from_short(b, LLAMA, pages=40))
    assert typical_piece(plan) == pytest.approx(piece, rel=0.15)
    assert choose_mode(plan, maps_memory=False, piece_bytes=4096) == mode
    assert choose_mode(plan, maps_memory=True, piece_bytes=4096) == "fused"


def test_conversions_are_staged_or_fused() -> None:
    plan = compile(from_short("bf16", LLAMA, pages=40), from_short("fp8", LLAMA, pages=40))
    assert choose_mode(plan, maps_memory=False, piece_bytes=1) == "staged"
    assert choose_mode(plan, maps_memory=True, piece_bytes=1) == "fused"


def test_regions_lie_back_to_back_in_a_slab_that_holds_them() -> None:
    layout = from_short("fp8,scale=token_head,page=4", attention_model("m", 2, Array(2, 8)), pages=5)
    with Slab(slab_bytes(layout)) as slab:
        bound = bind(layout, slab)
        assert [r.name for r in bound.regions] == ["k", "k_scale", "v", "v_scale"]
        ends = [r.base + r.nbytes for r in bound.regions]
        assert all(a <= b.base for a, b in zip(ends, bound.regions[1:], strict=False))
        assert slab.address == bound.regions[0].base
        assert ends[-1] <= slab.address + slab.nbytes
        assert decode(encode(bound, format="json"), format="json") == bound
    with Slab(4096) as small, pytest.raises(ConfigError, match="the pool needs 16384 bytes, its slab has 4096"):
        bind(layout, small)


def test_several_groups_are_not_carried_yet() -> None:
    one = from_short("bf16", attention_model("m", 2, Array(2, 8)), pages=2)
    halves = [Group("attention", layers, 16, one.groups[0].components, 2) for layers in ("0", "1")]
    two = Layout(one.model, halves)
    with pytest.raises(Refused, match="2 pairs of state groups"):
        one_pair(compile(two, one))
