"""The cost model: its arithmetic with given constants, what it chooses, and that its spans are those of the planner."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Component, Group, Layout, Model, Placement, Shard, State
from regauge.plan import Plan, check, compile, instantiate, pieces
from regauge.plan.cost import (
    DEFAULTS,
    Constants,
    KernelConstants,
    Rate,
    Setting,
    TransportConstants,
    Way,
    copy_rate,
    decide,
    decode,
    encode,
    kernel_work,
    wire_seconds,
)
from regauge.plan.sample import lane_boxes, roomy, scattered, spans
from regauge.plan.tiles import Convert, Tiles
from strategies import EIGHT_BIT, FLOATS, layouts, models

LLAMA = load_model("llama-3.1-8b")
ROUND = Constants(
    source="round numbers",
    expand_s=0.0,
    kernels=KernelConstants(copy=(Rate(2, 1e9), Rate(32, 5e9)), narrow=3e9, widen=3e9, dynamic=1e9, alike=2e9),
    transports={
        "wire": TransportConstants(post_s=1.0, piece_s=0.5, bytes_per_s=1e9),
        "link": TransportConstants(post_s=0.0, piece_s=1e-6, share=0.5),
        "here": TransportConstants(post_s=0.0, piece_s=0.0, maps_memory=True),
    },
)  # fmt: skip


def pair_of(a: str, b: str, tokens: int = 4096, model: Model = LLAMA) -> Plan:
    return compile(*(roomy(from_short(x, model), tokens) for x in (a, b)))


def way(ways: tuple[Way, ...], mode: str) -> Way:
    return next(w for w in ways if w.mode == mode)


@pytest.mark.parametrize(("run", "rate"), [(1, 1e9), (2, 1e9), (8, 3e9), (32, 5e9), (1 << 20, 5e9)])
def test_the_rate_of_a_run_lies_between_the_measured_ones(run: int, rate: float) -> None:
    assert copy_rate(ROUND.kernels, run) == rate


@pytest.mark.parametrize(
    ("convert", "dynamic", "rate", "per_element"),
    [
        (("bfloat16", "float8_e4m3fn"), False, 3e9, 3),
        (("float8_e4m3fn", "bfloat16"), False, 3e9, 3),
        (("bfloat16", "int8"), True, 1e9, 3),
        (("float8_e4m3fn", "float8_e5m2"), False, 2e9, 2),
        (("float32", "bfloat16"), False, 3e9, 6),
    ],
)
def test_a_conversion_costs_what_it_reads_and_writes(
    convert: tuple[str, str], dynamic: bool, rate: float, per_element: int
) -> None:
    at = np.zeros(2, np.int64)
    scale = np.zeros(2, np.int64) if dynamic else None
    strides = (0, 0) if dynamic else ()
    change = Convert(*convert, 2, 1, dst_scale=scale, dst_scale_stride=strides, dynamic=dynamic)
    box = Tiles(at, at, (3, 5), (0, 0), (0, 0), 10, change)
    assert kernel_work(ROUND.kernels, [box]) == (2 * 15 * 10 * per_element / rate, 2 * 15 * 10 * per_element)


def test_a_copy_counts_its_bytes_twice() -> None:
    at = np.zeros(2, np.int64)
    assert kernel_work(ROUND.kernels, [Tiles(at, at, (3,), (0,), (0,), 32)]) == (2 * 192 / 5e9, 2 * 192)


@pytest.mark.parametrize(
    ("transport", "link", "seconds"),
    [("wire", 0.0, 2 * 1.0 + 3 * 0.5 + 1.0), ("wire", 5e8, 2 * 1.0 + 3 * 0.5 + 2.0), ("wire", 5e9, 2 * 1.0 + 3 * 0.5 + 1.0),
     ("link", 2e9, 3e-6 + 1.0), ("link", 0.0, 3e-6)],
)  # fmt: skip
def test_the_slower_of_transport_and_link_holds(transport: str, link: float, seconds: float) -> None:
    found = wire_seconds(ROUND.transports[transport], Setting(transport, link), 2, 3, 10**9)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("a", "b", "mode"),
    [
        ("bf16,page=64", "bf16,page=64", "mapped"),
        ("bf16,page=64", "bf16,page=16", "mapped"),
        ("bf16,page=64,hnd", "bf16,page=16,nhd", "staged"),
        ("bf16,page=64,kt", "bf16,page=64", "staged"),
        ("fp8,page=64", "bf16,page=64", "staged"),
    ],
)
def test_long_runs_are_mapped_and_short_ones_staged(a: str, b: str, mode: str) -> None:
    for transport in ("tcp", "rdma"):
        found = decide(pair_of(a, b), (0, 0), DEFAULTS, Setting(transport, 50e9), (0, 4096))
        assert found.chosen.mode == mode
        assert found.chosen in found.ways
    assert decide(pair_of(a, b), (0, 0), DEFAULTS, Setting("shm"), (0, 4096)).chosen.mode == "fused"


def test_the_choice_turns_where_pieces_become_dear() -> None:
    plan = pair_of("bf16,page=64", "bf16,page=16")

    def chosen(piece_s: float) -> str:
        wire = TransportConstants(post_s=1e-4, piece_s=piece_s, bytes_per_s=10e9)
        constants = msgspec.structs.replace(DEFAULTS, transports={"x": wire})
        return decide(plan, (0, 0), constants, Setting("x"), (0, 4096)).chosen.mode

    # A page of 32 KiB is gathered in 3.3 us; staging must be a tenth faster.
    assert chosen(2e-6) == "mapped"
    assert chosen(5e-6) == "staged"


def test_a_staged_transfer_is_gathered_sent_and_scattered_chunk_by_chunk() -> None:
    plan = pair_of("bf16,page=64,hnd", "bf16,page=16", 1024)
    setting = Setting("wire", chunk_tokens=256, slot_bytes=4 << 20)
    found = way(decide(plan, (0, 0), ROUND, setting, (0, 1024)).ways, "staged")
    total = 1024 * 32 * 4096
    assert found.wire_bytes == total
    # A layer of 256 tokens takes 1 MiB: 4 layers in a slot, 8 writes for each of 4 chunks.
    assert (found.writes, found.spans.count, found.staging_bytes) == (32, 32, 4 << 20)
    assert found.spans.median == found.spans.least == 4 << 20
    gather, scatter = found.parts["gather"], found.parts["scatter"]
    assert gather == pytest.approx(2 * total / 5e9)
    assert found.kernel_bytes == 4 * total
    send = gather + found.parts["wire"]
    assert found.parts["wire"] == pytest.approx(32 * 1.5 + total / 1e9)
    assert found.seconds == pytest.approx(send + scatter / 32)


def test_a_slot_that_is_small_takes_fewer_tokens_at_a_time() -> None:
    plan = pair_of("bf16,page=64,hnd", "bf16,page=16", 1024)
    found = way(decide(plan, (0, 0), ROUND, Setting("wire", slot_bytes=300_000), (0, 1024)).ways, "staged")
    assert (found.writes, found.spans.median) == (16 * 32, 64 * 4096)
    tiny = decide(plan, (0, 0), ROUND, Setting("wire", slot_bytes=100), (0, 1024))
    assert way(tiny.ways, "staged").refused == "a slot of 100 bytes does not hold one token of one layer"
    assert tiny.chosen.mode == "mapped"
    with pytest.raises(ConfigError, match=r"elements change on the way; .* Raise transfer\.staging_bytes"):
        decide(pair_of("bf16", "fp8", 64), (0, 0), ROUND, Setting("wire", slot_bytes=100), (0, 64))


@pytest.mark.parametrize(
    ("a", "b", "at"), [("bf16", "fp8", "prefill"), ("fp8", "bf16", "decode"), ("bf16", "fp16", "prefill")]
)
def test_elements_change_where_the_wire_is_cheaper(a: str, b: str, at: str) -> None:
    found = decide(pair_of(a, b, 64), (0, 0), DEFAULTS, Setting("tcp"), (0, 64))
    assert found.chosen.convert_at == at
    assert found.why == "the only way: elements change on the way"


def test_scales_count_where_elements_change() -> None:
    """A head of one element: 5 bytes as int8 with a scale, 2 as bfloat16. The wire carries bfloat16 both ways."""
    model = attention_model("m", 2, Array(4, 1))
    for a, b, at in (("bf16", "int8,scale=token_head", "decode"), ("int8,scale=token_head", "bf16", "prefill")):
        found = decide(pair_of(a, b, 64, model), (0, 0), DEFAULTS, Setting("tcp"), (0, 64)).chosen
        assert (found.convert_at, found.wire_bytes) == (at, 64 * 2 * 4 * 2 * 2)


def test_a_mode_can_be_asked_for_and_refused() -> None:
    plan = pair_of("bf16,page=64", "bf16,page=16", 64)
    asked = decide(plan, (0, 0), DEFAULTS, Setting("tcp", mode="staged"), (0, 64))
    assert (asked.chosen.mode, asked.why) == ("staged", "transfer.mode says staged")
    with pytest.raises(
        ConfigError, match=r"transfer.mode fused: tcp does not map the peer's memory; use auto or mapped or staged"
    ):
        decide(plan, (0, 0), DEFAULTS, Setting("tcp", mode="fused"), (0, 64))
    with pytest.raises(
        ConfigError, match="no constants for transport 'carrier pigeon'; known: mooncake, nixl, rdma, shm, tcp"
    ):
        decide(plan, (0, 0), DEFAULTS, Setting("carrier pigeon"), (0, 64))


def test_the_fragments_of_sglang_40500_are_few_runs() -> None:
    """Kimi Linear's draft, TP1 to TP2: the source's rows are wider than the target's, so that every token is a fragment.

    171,000 tokens x 5 layers x K and V: 1.71 million descriptors, 13.3 thousand where the engine packs. No mapping of addresses can have
    fewer; staged, a span is a chunk's run.
    """
    model, tokens = attention_model("draft", 5, Array(8, 128)), 171_000
    plan = compile(
        roomy(from_short("bf16,page=64", model), tokens),
        roomy(from_short("bf16,page=128", model, shard=Shard(0, 2)), tokens),
    )
    direct = pieces(instantiate(plan, *scattered(plan, (0, 0), (0, tokens)), (0, tokens)))
    assert len(direct) == 1_710_000
    assert set(direct[:, 2].tolist()) == {4 * 128 * 2}
    found = decide(plan, (0, 0), DEFAULTS, Setting("rdma", 50e9), (0, tokens))
    assert found.chosen.mode == "staged"
    assert found.chosen.spans.count == 668 <= 13_300
    assert found.chosen.wire_bytes == direct[:, 2].sum()


def test_stripes_of_context_parallelism_are_counted_by_their_rank() -> None:
    """sglang#35186: 56K tokens of 576 bytes, one of 8 ranks, 24 layers: 168 thousand descriptors."""
    at = [Placement("layer page token dim", "kv", x, {"token": 576, "page": 64 * 576}) for x in (0, 512)]
    parts = [Component(n, "float8_e4m3fn", 1, d, p) for n, d, p in zip(("latent", "rope"), (512, 64), at, strict=True)]
    model = Model("m", 24, [State("latent", "0-23", {"latent": Array(1, 512), "rope": Array(1, 64)})])
    a = Layout(model, [Group("latent", "0-23", 64, parts)])
    b = msgspec.structs.replace(a, shard=Shard(cp_rank=3, cp_size=8))
    plan = compile(roomy(a, 56_000), roomy(b, 56_000))
    found = decide(plan, (0, 0), DEFAULTS, Setting("rdma", 50e9), (0, 56_000))
    mapped = way(found.ways, "mapped")
    assert (mapped.spans.count, mapped.spans.least, mapped.spans.exact) == (168_000, 576, True)
    assert found.chosen.mode == "staged"
    assert found.chosen.spans.count == 219


def test_more_pieces_than_are_worth_counting_are_scaled() -> None:
    plan = pair_of("bf16,page=64,hnd", "bf16,page=16,nhd", 65_536)
    found = way(decide(plan, (0, 0), DEFAULTS, Setting("rdma"), (0, 65_536)).ways, "mapped").spans
    assert not found.exact
    assert (found.count, found.median, found.least) == (65_536 * 32 * 2 * 8, 256.0, 256)
    huge = compile(*(roomy(from_short(x, LLAMA), 65_536) for x in ("bf16,page=65536,kt", "bf16,page=65536")))
    runs = way(decide(huge, (0, 0), DEFAULTS, Setting("rdma"), (0, 65_536)).ways, "mapped").spans
    assert (runs.exact, runs.least, runs.median) == (False, 2, 2.0)


@given(data=st.data(), tokens=st.integers(1, 40), mode=st.sampled_from(["tcp", "shm", "rdma"]))
@settings(max_examples=60, deadline=None)
def test_every_pair_has_a_way_and_its_spans_are_the_planners(data: st.DataObject, tokens: int, mode: str) -> None:
    model = data.draw(models())
    a, b = (roomy(data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))), tokens) for _ in "ab")
    assume(not check(a, b).refusals)
    plan = compile(a, b)
    for pair in plan.pairs:
        found = decide(plan, pair, DEFAULTS, Setting(mode, chunk_tokens=16), (0, tokens))
        assert not found.chosen.refused
        assert found.chosen.seconds > 0
        mapped = way(found.ways, "mapped")
        if not mapped.refused:
            sides = scattered(plan, pair, (0, tokens))
            list_ = pieces(instantiate(plan, *sides, (0, tokens), pair=pair))
            assert mapped.spans == spans(plan, pair, lane_boxes(plan, pair, sides, (0, tokens)), (0, tokens))
            assert (mapped.spans.count, mapped.spans.nbytes) == (len(list_), int(list_[:, 2].sum()))
            assert mapped.spans.least == list_[:, 2].min()


def test_constants_are_written_and_read_back() -> None:
    assert decode(encode(DEFAULTS)) == DEFAULTS
    assert decode(encode(ROUND)) == ROUND


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("dynamic = 1000000000.0", "dynamic = 0.0", "kernels: rates are finite and positive"),
        ("dynamic = 1000000000.0", "dinamic = 1.0", r"Object missing required field `dynamic`.*calibrate|unknown field `dinamic`"),
        ("expand_s = 0.0", "expand_s = -1.0", "expand_s: seconds are finite and not negative"),
        ("run_bytes = 32", "run_bytes = 1", "kernels.copy: give rates ascending in run_bytes"),
        ("share = 0.5", "share = 1.5", "transports.link: .* share is over 0 and at most 1"),
        ("post_s = 1.0", "post_s = -1.0", "transports.wire: times and rates are finite and not negative"),
        ("[kernels]", "[kernels", "regauge bench calibrate --out FILE"),
    ],
)  # fmt: skip
def test_wrong_constants_are_named(old: str, new: str, match: str) -> None:
    text = encode(ROUND).decode()
    assert old in text
    with pytest.raises(ConfigError, match=match):
        decode(text.replace(old, new).encode())
