"""What accuracy is measured with: controls without a transfer, figures by their definition, mistakes that show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest

from regauge.config import QualityLimits
from regauge.engines.local.accuracy import MATRIX, Case, Measured, Row, from_options, record, scales, table
from regauge.engines.local.accuracy.bench import Bench, Logits
from regauge.engines.local.accuracy.figures import compare, errors, log_softmax, perplexity
from regauge.engines.local.accuracy.measure import READ_AS_FNUZ, UNSCALED, Runs
from regauge.engines.local.accuracy.texts import Texts
from regauge.engines.local.model import LocalModel, Segment
from regauge.errors import ConfigError, Refused
from regauge.layout.presets import from_short, load_model
from regauge.layout.spec import Layout, Model, Scale
from regauge.plan import quality
from regauge.plan.gate import shortfalls

from .conftest import PlainStore, prompt

PROMPT, ANSWER = 24, 12
TEXTS = [list(prompt(PROMPT + ANSWER, seed)) for seed in range(4)]
LOOSE = QualityLimits(min_positions=1, min_agreement=0.8, max_perplexity_ratio=1.05)
"""For few positions."""


@pytest.fixture(scope="module")
def model(tiny_path: Path) -> Model:
    return load_model(str(tiny_path))


@pytest.fixture(scope="module")
def bench(tiny: LocalModel) -> Bench:
    return Bench(tiny, TEXTS[:3], PROMPT)


def control(bench: Bench, layout: Layout) -> Logits:
    memory = bench.prefill(layout)
    with closing(memory.slab):
        return bench.answer(memory)


def across(bench: Bench, prefill: Layout, decode: Layout, declared: Layout | None = None) -> Logits:
    source = bench.prefill(prefill)
    with closing(source.slab):
        target = bench.cross(source, decode, declared)
        with closing(target.slab):
            return bench.answer(target)


def test_the_control_is_what_the_model_gives_token_by_token_without_any_pool_of_ours(
    bench: Bench, model: Model, tiny: LocalModel
) -> None:
    """In plain tensors, one token per step: no layout, no plan, no kernel."""
    found = control(bench, from_short("fp32,page=8,hnd", model))
    for index, ids in enumerate(TEXTS[:3]):
        store = PlainStore(tiny, 8)
        pages = np.arange(8)
        tiny.forward(ids[: PROMPT - 1], [Segment("x", pages, 0, PROMPT - 1)], store)
        for step in range(ANSWER):
            at = PROMPT - 1 + step
            logits = tiny.forward(ids[at : at + 1], [Segment("x", pages, at, 1)], store).numpy()
            np.testing.assert_allclose(found[index, step], logits[0], rtol=1e-4, atol=1e-5)
    assert found.shape == (3, ANSWER, tiny.vocab)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("bf16", "bf16"),
        ("bf16,page=64,hnd", "bf16,page=8,fused"),
        ("fp8_e4m3,scale=token_head", "fp8_e4m3,page=7,hnd,scale=token_head"),
    ],
)
def test_a_pair_without_conversion_equals_both_controls_in_every_bit(
    bench: Bench, model: Model, prefill: str, decode: str
) -> None:
    a, b = from_short(prefill, model), from_short(decode, model)
    crossed = across(bench, a, b)
    np.testing.assert_array_equal(crossed, control(bench, a))
    np.testing.assert_array_equal(crossed, control(bench, b))


def test_what_decode_computes_depends_on_what_crossed(bench: Bench, model: Model) -> None:
    """Else a control and a crossing would agree whatever the transfer does."""
    plain, other = from_short("fp32", model), from_short("fp8_e5m2", model)
    assert np.abs(across(bench, plain, other) - control(bench, plain)).max() > 1e-3


def test_figures_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.normal(0, 3, (2, 5, 50)).astype(np.float32) for _ in range(2))
    b[0] = a[0]
    found = compare(a, b, 7.0)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (a, b))
    kl = (p * np.log(p / q)).sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-9)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-9)
    assert found.agreement == (a.argmax(-1) == b.argmax(-1)).mean()
    assert found.perplexity == 7.0
    broken = a.copy()
    broken[1, 2, 3] = np.nan
    assert np.isnan([compare(a, broken, 7.0).kl_mean, compare(a, broken, 7.0).kl_max]).all()
    assert compare(a, a, 7.0) == quality.Figures(1.0, 0.0, 0.0, 7.0)
    wanted = rng.integers(0, 50, (2, 5))
    chance = [q[i, j, wanted[i, j]] for i in range(2) for j in range(5)]
    assert perplexity(b, wanted) == pytest.approx(np.exp(-np.mean(np.log(chance))), rel=1e-9)
    assert perplexity(np.zeros((2, 5, 50), np.float32), wanted) == pytest.approx(50.0)
    big = log_softmax(np.array([[1e4, 0.0]], np.float32))
    np.testing.assert_allclose(big, [[0.0, -1e4]])


@pytest.mark.parametrize(("form", "low", "high"), [("bf16", 1e-4, 4e-3), ("fp8_e4m3", 0.005, 0.0625), ("fp32", 0, 0)])
def test_errors_are_those_of_the_dtype_in_every_layer(
    bench: Bench, model: Model, form: str, low: float, high: float
) -> None:
    source = bench.prefill(from_short("fp32", model))
    with closing(source.slab):
        target = bench.cross(source, from_short(form, model))
        with closing(target.slab):
            found = errors(bench, source, target)
    assert sorted(found) == ["k", "v"]
    for rows in found.values():
        assert len(rows) == model.num_layers
        assert all(low <= x <= high for x in rows)


def test_bytes_of_e4m3fn_read_as_e4m3fnuz_are_half_of_what_they_mean(bench: Bench, model: Model) -> None:
    """Except negative zero, which is that format's NaN."""
    plain = from_short("fp8_e4m3", model)
    source = bench.prefill(plain)
    with closing(source.slab):
        target = bench.cross(source, from_short("fp32", model), scales.with_dtype(plain, "float8_e4m3fnuz"))
        with closing(target.slab):
            for index in range(bench.documents):
                meant, read = bench.values(source, index), bench.values(target, index)
                for name, values in meant.items():
                    zero = np.signbit(values) & (values == 0)
                    assert np.isnan(read[name][zero]).all()
                    np.testing.assert_array_equal(read[name][~zero], values[~zero] / 2)
            for rows in errors(bench, source, target).values():
                assert all(x == pytest.approx(0.5) or np.isnan(x) for x in rows)


def test_calibrated_scales_are_the_largest_magnitudes_of_their_documents(
    tiny: LocalModel, bench: Bench, model: Model
) -> None:
    calibration = Bench(tiny, TEXTS[3:], PROMPT + ANSWER)
    found = scales.peaks(calibration, from_short("fp32", model))
    memory = calibration.prefill(from_short("fp32,page=4,hnd", model))
    with closing(memory.slab):
        values = calibration.values(memory, 0)
        assert calibration.documents == 1
    for per, axes in (("tensor", (1, 2, 3)), ("head", (1, 3))):
        layout = scales.calibrated(from_short(f"fp8_e4m3,scale={per}", model), found)
        for c in layout.groups[0].components:
            assert c.scale is not None
            want = np.abs(values[c.name]).max(axis=axes, keepdims=True)[:, 0, :, 0] / np.float32(448)
            np.testing.assert_array_equal(
                np.array(c.scale.values, np.float32), np.broadcast_to(want, (model.num_layers, c.heads))
            )
            assert c.scale.per == per
    stored = from_short("fp8_e4m3,scale=token_head", model)
    assert not scales.has_constants(stored)
    assert scales.calibrated(stored, found) == stored


@pytest.fixture(scope="module")
def runs(tiny: LocalModel, model: Model) -> Iterator[Runs]:
    with closing(Runs(tiny, Texts(TEXTS[:3], TEXTS[3:], ""), PROMPT, from_short("fp32", model))) as found:
        yield found


def measured(runs: Runs, model: Model, prefill: str, decode: str, **more: object) -> Row:
    case = Case(prefill, decode, **more)  # type: ignore[arg-type]
    pair = [from_short(x, model) for x in (prefill, decode)]
    if case.calibrate:
        pair = [scales.calibrated(x, runs.peaks()) for x in pair]
    return runs.row(case, *pair)


@pytest.mark.parametrize("decode", ["fp16", "int8,scale=token_head,page=64,hnd"])
def test_right_conversions_meet_the_limits(runs: Runs, model: Model, decode: str) -> None:
    """A model of random weights forgives less than a trained one: for 8-bit floats see below."""
    row = measured(runs, model, "bf16", decode)
    assert row.path == "CONVERT"
    assert shortfalls(row.result, LOOSE) == []
    assert row.result.positions == 3 * ANSWER


@pytest.mark.parametrize(
    ("prefill", "decode", "mistake"),
    [
        ("fp8_e4m3", "bf16", READ_AS_FNUZ),
        ("fp8_e4m3,scale=head", "bf16", UNSCALED),
        ("fp8_e4m3,scale=tensor", "fp8_e4m3", UNSCALED),
        # Right, and bad in itself: rounded to whole numbers it equals its own control.
        ("bf16", "int8", ""),
    ],
)
def test_wrong_conversions_do_not(runs: Runs, model: Model, prefill: str, decode: str, mistake: str) -> None:
    row = measured(runs, model, prefill, decode, calibrate=True, mistake=mistake)
    assert shortfalls(row.result, LOOSE)
    assert [x for x in row.shortfalls if "(min_positions)" not in x]


def test_a_decode_layout_that_is_bad_in_itself_shows_against_the_prefill_control(runs: Runs, model: Model) -> None:
    row = measured(runs, model, "bf16", "int8")
    against = [x for x in shortfalls(row.result, LOOSE) if "against the prefill layout" in x]
    assert against


def test_a_mistake_and_a_pair_without_conversion_get_no_record(runs: Runs, model: Model, tiny_path: Path) -> None:
    text = quality.Text("", 3, PROMPT, ANSWER, 1)
    for prefill, decode, mistake in (("fp8_e4m3", "bf16", READ_AS_FNUZ), ("bf16", "bf16,page=8", "")):
        row = measured(runs, model, prefill, decode, mistake=mistake)
        found = Measured(row, from_short(prefill, model), from_short(decode, model), text, tiny_path)
        with pytest.raises(ConfigError, match="only what converts needs a record"):
            record(found, "2026-01-01T00:00:00Z")


def test_a_refused_pair_is_not_measured(runs: Runs, model: Model) -> None:
    other = from_short("bf16", msgspec.structs.replace(model, name="other"))
    with pytest.raises(Refused, match=r"model\.name"):
        runs.row(Case("a", "b"), from_short("bf16", model), other)


def test_the_table_shows_both_controls_and_whether_the_gate_holds(runs: Runs, model: Model, tiny_path: Path) -> None:
    row = measured(runs, model, "fp8_e4m3", "bf16", mistake=READ_AS_FNUZ)
    layout = from_short("bf16", model)
    shown = table([Measured(row, layout, layout, quality.Text("", 3, PROMPT, ANSWER, 1), tiny_path)])
    assert f"| fp8_e4m3 ({READ_AS_FNUZ}) | bf16 | CONVERT |" in shown
    assert f"{len(row.shortfalls)} limits exceeded |" in shown
    assert f"{3 * ANSWER} positions of 3 documents" in shown
    assert "largest magnitude over 1 other documents" in shown


def test_what_is_measured_follows_from_the_options() -> None:
    (case,) = from_options(None, None, ("bf16", "fp8_e4m3"), "per-token-head")
    assert (case.prefill, case.decode, case.calibrate) == ("bf16", "fp8_e4m3,scale=token_head", False)
    (case,) = from_options(None, None, ("int8", "fp8_e4m3"), "per-head", "divide")
    assert (case.prefill, case.decode, case.calibrate) == ("int8,scale=head", "fp8_e4m3,scale=head", True)
    assert case.rule == "divide"
    assert [c.decode for c in from_options(["bf16"], ["fp8_e5m2"], (None, None), None)] == ["fp8_e5m2"]
    assert len({(c.prefill, c.decode, c.mistake) for c in MATRIX}) == len(MATRIX)
    assert {READ_AS_FNUZ, UNSCALED} <= {c.mistake for c in MATRIX}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, None, ("bf16", None), None), "give --from and --to together"),
        ((["bf16"], ["bf16"], ("bf16", "fp32"), None), "give --from and --to together, or --prefill-layout"),
        ((["bf16"], None, (None, None), None), "as many times as --prefill-layout"),
        ((None, None, (None, None), "per-head"), "--scale needs --from and --to"),
        ((None, None, ("bf17", "fp32"), None), "'bf17' is no dtype; give float32"),
        ((None, None, (None, None), None, "divide"), "--rule needs --from and --to"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_options(*arguments)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_the_rule_is_that_of_every_scale(model: Model) -> None:
    layout = scales.with_rule(from_short("fp8_e4m3,scale=token_head", model), "divide")
    assert [c.scale.rule for c in layout.groups[0].components if c.scale] == ["divide", "divide"]
    assert scales.with_rule(from_short("bf16", model), "divide") == from_short("bf16", model)
    unscaled = scales.without_scales(from_short("fp8_e4m3,scale=head", model))
    assert [c.scale for c in unscaled.groups[0].components] == [None, None]


def test_constant_scales_are_floored_where_a_head_is_zero(model: Model) -> None:
    shape = (model.num_layers, 2)
    layout = scales.calibrated(from_short("int8,scale=head", model), dict.fromkeys("kv", np.zeros(shape, np.float32)))
    (scale, _) = (c.scale for c in layout.groups[0].components)
    assert isinstance(scale, Scale)
    assert scale.values == np.full(shape, 2.0**-126).tolist()
    assert float(ml_dtypes.bfloat16(2.0**-126)) == 2.0**-126


@pytest.mark.model
def test_on_a_trained_model_the_gate_passes_e4m3_and_catches_both_mistakes(
    bundled: LocalModel, bundled_path: Path
) -> None:
    from regauge.engines.local.accuracy.texts import read

    texts = read(bundled_path, None, 32 + 16, calibrate=True)
    few = Texts(texts.evaluated[:3], texts.calibration[:1], texts.sha256)
    model = load_model(str(bundled_path))
    with closing(Runs(bundled, few, 32, from_short("fp32", model))) as runs:
        good = measured(runs, model, "bf16", "fp8_e4m3,scale=head", calibrate=True).result
        assert shortfalls(good, LOOSE) == []
        for prefill, mistake in (("fp8_e4m3", READ_AS_FNUZ), ("fp8_e4m3,scale=tensor", UNSCALED)):
            bad = measured(runs, model, prefill, "bf16", calibrate=True, mistake=mistake).result
            assert len(shortfalls(bad, LOOSE)) == 6  # every limit, against both controls
            assert (
                not bad.decode_control.kl_mean <= 20 * good.decode_control.kl_mean
            )  # NaN where a negative zero was read


@pytest.mark.model
def test_a_record_of_the_bundled_model_covers_layouts_made_from_its_shipped_geometry(bundled_path: Path) -> None:
    assert load_model(str(bundled_path)).identity() == load_model("smollm2-135m-instruct").identity()
