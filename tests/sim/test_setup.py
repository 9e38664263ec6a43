"""From devices to speeds: by hand, and as the planner's model says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.layout.presets import load_named
from regauge.sim import devices
from regauge.sim.memory import kept
from regauge.sim.model import Weights, decode_seconds, exactly, machine, prefill_seconds
from regauge.sim.scenario import DecodePool, Model, PrefillPool, Scenario
from regauge.sim.setup import Nics, prepare
from regauge.sim.work import model_work

GLM = prepare(Scenario(), 512)
TABLES = {PrefillPool: "prefill", DecodePool: "decode", Model: "model"}


def scenario(*tables: PrefillPool | DecodePool | Model) -> Scenario:
    return Scenario(**{TABLES[type(table)]: table for table in tables})


@given(st.integers(0, 200_000), st.integers(1, 100_000))
def test_prefill_takes_what_the_model_says(cached: int, tokens: int) -> None:
    on = machine(devices.shipped().accelerators["mtt-s5000"], 8, fp8=True, compute=exactly(0.3), memory=exactly(1.0))
    own = devices.shipped().models["glm-5.2"].active_b
    assert own is not None
    work = model_work("glm-5.2", own.value * 1e9)
    expected = prefill_seconds(work, cached, cached + tokens, on).value + 0.05
    assert GLM.prefill.seconds(tokens, cached) == pytest.approx(expected, rel=1e-9)


@given(st.integers(1, 256), st.integers(1, 100_000))
def test_decode_takes_what_the_model_says(batch: int, context: int) -> None:
    size = devices.shipped().models["glm-5.2"]
    assert size.total_b is not None
    assert size.active_b is not None
    on = machine(devices.shipped().accelerators["h200"], 8, fp8=True, compute=exactly(0.3), memory=exactly(0.6))
    work, weights = model_work("glm-5.2", size.active_b.value * 1e9), Weights(size.total_b.value * 1e9, size.active_b.value * 1e9)  # fmt: skip
    read = kept(load_named("fp8_e4m3", "glm-5.2"), "glm-5.2", 1).read(np.array([float(context)]))[0] / context
    expected = decode_seconds(work, weights, on, batch=batch, context=context, token_bytes=read).value
    # Bounded attention counts as at its bound in computing, which is what takes longest in batches of short requests.
    assert GLM.decode.step(batch, batch * context) == pytest.approx(expected, rel=0.01)


def test_sparse_attention_reads_the_indexers_keys_and_the_tokens_picked() -> None:
    bandwidth = 8 * 4.8e12 * 0.6
    more = GLM.decode.step(1, 200_000.0) - GLM.decode.step(1, 100_000.0)
    assert more * bandwidth / 100_000 == pytest.approx(21 * 128, rel=1e-6)


def test_the_router_is_told_a_line_and_a_square_that_are_near() -> None:
    model = GLM.prefill
    for tokens, cached in ((4_000, 0), (65_536, 0), (6_554, 58_982), (30_000, 270_000)):
        told = model.overhead_s + tokens / model.tokens_per_s + model.attention_s * tokens * (cached + tokens / 2)
        assert told == pytest.approx(model.seconds(tokens, cached), rel=0.1)


def test_memory_that_the_weights_leave_is_for_kv() -> None:
    total = devices.shipped().models["glm-5.2"].total_b
    assert total is not None
    room = (8 * 141e9 * 0.9 - total.value * 1e9) / GLM.bytes_per_token
    assert GLM.decode.pages * GLM.decode.page_size == pytest.approx(room, rel=1e-4)


def test_nics_carry_their_payload() -> None:
    assert GLM.prefill_nic == Nics(8, 400e9 / 8 * 0.82)
    assert GLM.decode_nic.together == pytest.approx(8 * 41e9)
    own = prepare(scenario(PrefillPool(nics=2, nic="100g"), DecodePool(nics=1, nic_gb_per_s=3.0)), 512)
    assert (own.prefill_nic, own.decode_nic) == (Nics(2, 10.25e9), Nics(1, 3e9))


def test_constants_stand_in_place_of_devices() -> None:
    found = prepare(
        scenario(
            PrefillPool(device="", tokens_per_s=1e4, attention_s=1e-9, overhead_s=0.1, cache_tokens=51_200),
            DecodePool(device="", step_s=0.02, step_more_s=1e-3, kv_tokens=6_400),
        ),
        512,
    )
    assert found.prefill.seconds(1_000, 2_000) == pytest.approx(0.1 + 0.1 + 1e-9 * 1_000 * 2_500)
    assert found.prefill.cache_blocks == 100
    assert found.decode.step(10, 5_000.0) == pytest.approx(0.03)
    assert found.decode.pages == 100
    assert found.notes == ()


def test_measured_curves_stand_in_place_of_the_roofline(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("tokens,seconds\n1,0.2\n1000,1.2\n10000,20\n")
    (tmp_path / "d.csv").write_text("tokens,seconds\n1,0.01\n100000,0.05\n")
    (tmp_path / "mine.toml").write_text('[accelerators.h200]\nprefill_csv = "p.csv"\ndecode_csv = "d.csv"\n')
    given = Scenario(prefill=PrefillPool(device="h200"), catalogue=[str(tmp_path / "mine.toml")])
    found = prepare(given, 512)
    assert found.prefill.seconds(1_000, 0) == pytest.approx(1.2, rel=1e-3)
    assert found.prefill.seconds(9_000, 1_000) == pytest.approx(18.8 + 0.2, rel=1e-3)
    assert found.decode.step(7, 50_000) == pytest.approx(0.03, rel=1e-3)


def test_the_router_is_told_of_a_measured_curve(tmp_path: Path) -> None:
    points = [(n, 0.1 + n / 2_000 + 1e-7 * n * n) for n in (100, 1_000, 5_000, 20_000)]
    (tmp_path / "p.csv").write_text("tokens,seconds\n" + "".join(f"{n},{s}\n" for n, s in points))
    (tmp_path / "mine.toml").write_text('[accelerators.h200]\nprefill_csv = "p.csv"\n')
    found = prepare(Scenario(prefill=PrefillPool(device="h200"), catalogue=[str(tmp_path / "mine.toml")]), 512).prefill
    assert (found.tokens_per_s, found.overhead_s, found.attention_s) == pytest.approx((2_000, 0.1, 2e-7), rel=1e-3)


def test_weights_that_do_not_fit_prefill_are_told() -> None:
    assert "weights of 744 GB exceed the 640 GB of a server of 8 MTT S5000" in GLM.notes[0]
    assert prepare(scenario(Model(weight_bits=4.5)), 512).notes == GLM.notes[1:]


def test_steps_without_their_overhead_are_told() -> None:
    assert "are not counted unless decode.overhead_s says so" in GLM.notes[1]
    assert len(prepare(scenario(DecodePool(overhead_s=0.005)), 512).notes) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (scenario(PrefillPool(device="h20o")), r"prefill\.device: no 'h20o' in the catalogue; did you mean 'h20'"),
        (scenario(DecodePool(device="xyz")), r"decode\.device: no 'xyz' in the catalogue; known: .*h200.*catalogue = \[FILE\] adds your own"),
        (scenario(PrefillPool(nic="401g")), r"prefill\.nic: no '401g' in the catalogue; did you mean '400g'"),
        (scenario(PrefillPool(device="l20")), r"prefill\.cards: the catalogue does not say how many NVIDIA L20"),
        (scenario(Model(name="gemma-3-4b")), r"model\.name: the catalogue has no parameters of 'gemma-3-4b'; give model\.total_b and model\.active_b"),
        (scenario(Model(total_b=10.0, active_b=20.0)), r"model\.active_b: 20 is more than all 10"),
        (scenario(DecodePool(device="h100")), r"decode: weights of 744 GB leave no room for KV in 576 GB of 8 NVIDIA H100 SXM .*use decode\.cards = 13, .*model\.weight_bits = 5\.0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_would(given: Scenario, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        prepare(given, 512)


@pytest.mark.parametrize("remedy", [DecodePool(device="h100", cards=13), DecodePool(device="h200")])
def test_the_remedy_that_is_told_is_one(remedy: DecodePool) -> None:
    assert prepare(scenario(remedy), 512).decode.pages > 1000
    assert prepare(scenario(DecodePool(device="h100"), Model(weight_bits=5.0)), 512).decode.pages > 1000
