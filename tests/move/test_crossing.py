"""How a chunk is written is chosen by what the transport and the pair allow."""

from __future__ import annotations

import msgspec
import pytest

from regauge.errors import ConfigError
from regauge.layout.files import decode, encode
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array
from regauge.move.bound import bind, slab_bytes
from regauge.move.crossing import Terms, choose_mode
from regauge.move.memory import Slab
from regauge.plan import compile
from regauge.plan.cost import DEFAULTS, Setting, TransportConstants

LLAMA = load_model("llama-3.1-8b")


def terms(**setting: object) -> Terms:
    return Terms(maps_memory=False, setting=Setting("tcp", **setting))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("a", "b", "mode"),
    [
        ("bf16,page=16", "bf16,page=16", "mapped"),  # pages of one layer, K or V: 32 KiB
        ("bf16,page=64", "bf16,page=16", "mapped"),
        ("bf16,page=24", "bf16,page=16", "mapped"),  # runs of 8 and 16 tokens
        ("bf16,page=64,hnd", "bf16,page=16,nhd", "staged"),  # one head of one token: 256 bytes
        (
            "bf16,page=64,hnd",
            "bf16,page=16,hnd",
            "staged",
        ),  # 16 tokens of one head: 4 KiB are gathered faster than posted
        ("bf16,page=64,kt", "bf16,page=16", "staged"),  # K element by element
        ("bf16,page=65536", "bf16,page=1,kt", "staged"),  # one token: K as it lies
    ],
)
def test_short_pieces_are_staged(a: str, b: str, mode: str) -> None:
    plan = compile(from_short(a, LLAMA, pages=400), from_short(b, LLAMA, pages=400))
    assert choose_mode(plan, (0, 0), terms()).chosen.mode == mode
    shared = Terms(maps_memory=True, setting=Setting("tcp"))
    assert choose_mode(plan, (0, 0), shared).chosen.mode == "fused"


def test_conversions_are_staged_or_fused() -> None:
    plan = compile(from_short("bf16", LLAMA, pages=40), from_short("fp8", LLAMA, pages=40))
    assert choose_mode(plan, (0, 0), terms()).chosen.mode == "staged"
    assert choose_mode(plan, (0, 0), Terms(maps_memory=True, setting=Setting("shm"))).chosen.mode == "fused"
    with pytest.raises(ConfigError, match=r"transfer\.mode mapped: elements change on the way"):
        choose_mode(plan, (0, 0), terms(mode="mapped"))


def test_given_constants_decide() -> None:
    plan = compile(from_short("bf16", LLAMA, pages=40), from_short("bf16,page=64", LLAMA, pages=40))
    dear = TransportConstants(post_s=0.0, piece_s=1.0)
    constants = msgspec.structs.replace(DEFAULTS, transports={"tcp": dear})
    assert (
        choose_mode(plan, (0, 0), Terms(maps_memory=False, setting=Setting("tcp"), constants=constants)).chosen.mode
        == "staged"
    )


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
