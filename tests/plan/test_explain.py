"""What `explain` says agrees with what the planner does."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regauge.errors import Refused
from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Array, Component, Group, Layout, Model, Placement, Shard, State
from regauge.layout.view import bytes_per_token
from regauge.plan import check, compile
from regauge.plan.cost import Setting
from regauge.plan.explain import duration, explain, size
from regauge.plan.wire import WireFormat
from strategies import EIGHT_BIT, FLOATS, layouts, models

LLAMA = load_model("llama-3.1-8b")


def test_a_narrowing_sends_codes_and_scales() -> None:
    found = explain(from_short("bf16", LLAMA), from_short("fp8,scale=token_head,page=64", LLAMA), tokens=100)
    rows = 100 * 2 * 8 * 32
    assert found.source_bytes == rows * 256
    assert found.target_bytes == rows * (128 + 4)
    assert found.target_bytes <= found.wire_bytes < found.target_bytes * 1.01
    assert found.kernel_bytes == pytest.approx(found.source_bytes + 3 * found.target_bytes, rel=0.07)  # without scales
    assert "with stored scales" in found.text()


def test_a_rank_reads_only_its_share() -> None:
    found = explain(from_short("bf16", LLAMA), from_short("bf16", LLAMA, shard=Shard(1, 4)), tokens=16)
    assert found.source_bytes == found.target_bytes == 16 * 2 * 2 * 128 * 2 * 32
    assert "heads 0-7 -> 2-3" in found.text()


def test_a_refused_pair_is_not_explained() -> None:
    with pytest.raises(Refused, match=r"model\.name"):
        explain(from_short("bf16", LLAMA), from_short("bf16", load_model("qwen3-8b")))


def test_the_plan_reads_like_one() -> None:
    setting = Setting("rdma", 50e9, chunk_tokens=2048, slot_bytes=64 << 20)
    found = explain(from_short("bf16,page=64,hnd", LLAMA), from_short("bf16,page=16", LLAMA), tokens=65_536,
                    link_gbps=400, setting=setting)  # fmt: skip
    text = found.text()
    for line in (
        "REMAP  65536 tokens of llama-3.1-8b, 8.00 GiB -> 8.00 GiB, over rdma at 400 Gbit/s: ",
        "(171.8 ms at line rate)",
        "attention, layers 0-31, page 64 -> 16: REMAP, staged, ",
        "  spans    128, median 64.00 MiB, least 64.00 MiB, in 128 writes",
        "  bytes    8.00 GiB cross, 32.00 GiB read and written by kernels",
        "  memory   64.00 MiB of staging on either side",
        "  k        REMAP  bfloat16 8 x 128",
        "           page size 64 -> 16",
        "           131072 boxes, 16777216 runs of 256 B",
        "not possible: rdma does not map the peer's memory",
        "accuracy   exact: every byte arrives as it left",
        "constants  defaults: bench/LOG.md",
    ):
        assert line in text
    assert " *staged" in text
    assert "instead of 33554432 spans" in text


def test_shared_memory_is_written_in_one_pass() -> None:
    found = explain(from_short("bf16", LLAMA), from_short("fp8", LLAMA), tokens=512, setting=Setting("shm"))
    assert found.staging_bytes == found.spans == 0
    assert "spans    none: kernels write the peer's memory, 2 passes" in found.text()
    assert "CONVERT, fused, converted at prefill" in found.text()
    assert "values are rounded to float8_e4m3fn" in found.accuracy[0]


def hybrid() -> Layout:
    """Full attention in one layer of three, a window in one, a recurrent state in one."""
    arrays = {"k": Array(2, 8), "v": Array(2, 8)}
    model = Model("hybrid", 3, [State("attention", "0", arrays), State("window", "1", arrays, window=10),
                                State("recurrent", "2", {"ssm_state": Array(2, 64)})])  # fmt: skip
    order = "layer page token head dim"
    kv = [Component(n, "bfloat16", 2, 8, Placement(order, n)) for n in "kv"]
    near = [Component(n, "bfloat16", 2, 8, Placement(order, f"w{n}")) for n in "kv"]
    state = [Component("ssm_state", "float32", 2, 64, Placement("layer page head dim", "s"))]
    return Layout(
        model, [Group("attention", "0", 4, kv), Group("window", "1", 4, near), Group("recurrent", "2", 1, state)]
    )


def test_each_kind_of_state_moves_what_it_needs() -> None:
    found = explain(hybrid(), hybrid(), tokens=100)
    per = {g.kind: sum(lane.source_bytes for lane in g.lanes) for g in found.groups}
    assert per == {"attention": 100 * 64, "window": 10 * 64, "recurrent": 2 * 64 * 4}
    assert [g.decision.tokens for g in found.groups] == [100, 10, 1]
    assert found.source_bytes == found.target_bytes == sum(per.values())


@given(data=st.data(), tokens=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_any_pair_that_is_carried_can_be_explained(data: st.DataObject, tokens: int) -> None:
    model = data.draw(models())
    a, b = (data.draw(layouts(model, (*FLOATS, *EIGHT_BIT))) for _ in "ab")
    assume(not check(a, b).refusals)
    found = explain(a, b, tokens=tokens, link_gbps=100)
    assert found.target_bytes == int(tokens * bytes_per_token(b))
    assert found.wire_bytes * 8 / 100e9 == found.seconds_on_link
    assert found.text().startswith(found.verdict.path)
    plain = json.loads(json.dumps(asdict(found)))
    assert plain["groups"][0]["decision"]["chosen"]["wire_bytes"] == found.wire_bytes
    assert {w["mode"] for w in plain["groups"][0]["decision"]["ways"]} == {"fused", "mapped", "staged"}


def test_a_staged_wire_is_as_long_as_its_format_says() -> None:
    found = explain(from_short("bf16", LLAMA), from_short("fp8,page=64", LLAMA), tokens=128)
    wire = WireFormat(compile(from_short("bf16", LLAMA), from_short("fp8,page=64", LLAMA)))
    assert found.wire_bytes == wire.layer_bytes((0, 0), 128) * 32


@pytest.mark.parametrize(("seconds", "text"), [(2e-6, "2 us"), (0.0123, "12.3 ms"), (3.456, "3.46 s")])
def test_times_have_a_unit_that_people_read(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [(512, "512 B"), (2048, "2.00 KiB"), (3 << 30, "3.00 GiB")])
def test_sizes_have_a_unit_that_people_read(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
