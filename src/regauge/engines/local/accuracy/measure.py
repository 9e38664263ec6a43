"""Measures cases: a pair of layouts each, against two controls that are the same engine without a transfer.

* The *decode control* computes everything on the decode layout: what decode would have answered alone.
* The *prefill control* computes everything on the prefill layout. A decode layout that is bad in itself (int8 without a scale) equals its own
  control; against this one it shows.

A DIRECT or REMAP pair must agree with both in every bit.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from regauge import __version__
from regauge.config import QualityLimits, cache_dir
from regauge.engines.local.accuracy import scales
from regauge.engines.local.accuracy.bench import Bench, Logits
from regauge.engines.local.accuracy.figures import compare, errors, perplexity
from regauge.engines.local.accuracy.texts import Texts, read
from regauge.engines.local.model import LocalModel
from regauge.engines.local.prepare import prepare
from regauge.engines.local.weights import weights_digest
from regauge.errors import ConfigError, Refused
from regauge.layout.presets import load_described, load_layout
from regauge.layout.spec import Layout, Model, Rule
from regauge.move.bound import Memory
from regauge.plan import check
from regauge.plan.gate import shortfalls
from regauge.plan.quality import Record, Result, Text, conversions, identify

Say = Callable[[str], None]
Mistake = Literal["", "bytes of e4m3fn read as e4m3fnuz", "scales taken for 1.0"]

READ_AS_FNUZ: Final = "bytes of e4m3fn read as e4m3fnuz"
UNSCALED: Final = "scales taken for 1.0"
PLAIN: Final = "fp32"
_CONTROLS: Final = 3
"""Controls whose logits are kept: positions x vocabulary x 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Case:
    """A pair of layouts as it is asked for."""

    prefill: str
    decode: str
    calibrate: bool = False
    """Replace constant scales by calibrated ones."""
    rule: Rule | None = None
    """Replaces the rule of all scales."""
    mistake: Mistake = ""
    """What the receiver gets wrong about the source, to see that the figures show it."""


class Row(msgspec.Struct, frozen=True):
    """One case's result."""

    prefill: str
    decode: str
    mistake: str
    path: str
    result: Result
    perplexity_float32: float
    """On a float32 pool without a transfer."""
    shortfalls: list[str]
    """Which of the default limits are not met."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A row and what a record of it is made of."""

    row: Row
    prefill: Layout
    decode: Layout
    text: Text
    folder: Path


@dataclass(frozen=True, slots=True)
class Setting:
    """What cases are measured on."""

    model: str
    text: str | None = None
    prompt: int = 256
    answer: int = 64
    revision: str = ""
    """Of the weights; replaces that of layout files."""
    threads: int = 0
    """Of the model's arithmetic; 0: all cores, since nothing else should run beside it."""


def measure(setting: Setting, cases: Sequence[Case], say: Say) -> list[Measured]:
    """Measure cases on documents of `prompt` + `answer` tokens. Raises ConfigError, LayoutError, EngineError or Refused."""
    if setting.prompt < 2 or setting.answer < 1:
        raise ConfigError("--prompt-tokens is at least 2, --answer-tokens at least 1")
    folder = prepare(setting.model, cache_dir(), say)
    calibrate = any(case.calibrate for case in cases)
    texts = read(folder, setting.text, setting.prompt + setting.answer, calibrate=calibrate)
    engine = LocalModel(folder, setting.threads or os.cpu_count() or 1)
    told = load_described(str(folder))
    base = msgspec.structs.replace(told.model, revision=setting.revision)
    runs = Runs(engine, texts, setting.prompt, load_layout(PLAIN, base))
    text = Text(texts.sha256, len(texts.evaluated), setting.prompt, setting.answer, len(texts.calibration))
    found = []
    with closing(runs):
        for case in cases:
            say(f"measuring {case.prefill} -> {case.decode}" + (f" ({case.mistake})" if case.mistake else ""))
            prefill, decode = layouts(case, base, told.dtype, runs)
            row = runs.row(case, prefill, decode)
            found.append(Measured(row, prefill, decode, text, folder))
            worst = max(row.result.decode_control.kl_mean, row.result.prefill_control.kl_mean)
            say(f"  mean KL {worst:.5f}, {len(row.shortfalls)} limits exceeded")
    return found


def layouts(case: Case, base: Model, model_dtype: str, runs: Runs) -> tuple[Layout, Layout]:
    """Return a case's two layouts. Raises LayoutError, and ConfigError for a layout file of another model."""
    out = []
    for name in (case.prefill, case.decode):
        layout = load_layout(name, base, model_dtype=model_dtype)
        if _geometry(layout.model) != _geometry(base):
            raise ConfigError(f"{name}: describes another model than {base.name}: its geometry differs")
        if base.revision:
            layout = msgspec.structs.replace(
                layout, model=msgspec.structs.replace(layout.model, revision=base.revision)
            )
        if case.rule is not None:
            layout = scales.with_rule(layout, case.rule)
        if case.calibrate and scales.has_constants(layout):
            layout = scales.calibrated(layout, runs.peaks())
        out.append(layout)
    return out[0], out[1]


def _geometry(model: Model) -> Model:
    return msgspec.structs.replace(model, name="", revision="")


class Runs:
    """The runs of a model on one text; prefills and controls that several cases share are computed once."""

    def __init__(self, engine: LocalModel, texts: Texts, prompt: int, plain: Layout) -> None:
        self._engine = engine
        self._texts = texts
        self._plain = plain
        self._bench = Bench(engine, texts.evaluated, prompt)
        self._wanted = self._bench.wanted()
        self._controls: OrderedDict[str, tuple[Logits, float]] = OrderedDict()
        self._source: tuple[str, Memory] | None = None
        self._peaks: scales.Peaks | None = None
        self._perplexity_plain: float | None = None

    def row(self, case: Case, prefill: Layout, decode: Layout) -> Row:
        """Measure one case."""
        verdict = check(prefill, decode)
        if verdict.path == "REFUSED":
            raise Refused(tuple(str(r) for r in verdict.refusals))
        source = self._prefilled(prefill)
        target = self._bench.cross(source, decode, _mistaken(case.mistake, prefill))
        with closing(target.slab):
            lost = errors(self._bench, source, target)
            crossed = self._bench.answer(target)
        found = perplexity(crossed, self._wanted)
        decode_control, prefill_control = (
            compare(logits, crossed, value) for logits, value in map(self._control, (decode, prefill))
        )
        result = Result(self._wanted.size, found, decode_control, prefill_control, lost)
        return Row(case.prefill, case.decode, case.mistake, verdict.path, result, self._plain_perplexity(),
                   shortfalls(result, QualityLimits()))  # fmt: skip

    def peaks(self) -> scales.Peaks:
        """Return the largest magnitudes of the calibration documents."""
        if self._peaks is None:
            texts = self._texts.calibration
            self._peaks = scales.peaks(Bench(self._engine, texts, len(texts[0])), self._plain)
        return self._peaks

    def close(self) -> None:
        """Give the memory back."""
        if self._source is not None:
            self._source[1].slab.close()
            self._source = None

    def _prefilled(self, layout: Layout) -> Memory:
        if self._source is None or self._source[0] != layout.digest():
            self.close()
            self._source = (layout.digest(), self._bench.prefill(layout))
        return self._source[1]

    def _control(self, layout: Layout) -> tuple[Logits, float]:
        """Return logits and perplexity of a layout that computes everything itself: nothing crosses."""
        name = layout.digest()
        if name not in self._controls:
            memory = self._bench.prefill(layout)
            with closing(memory.slab):
                logits = self._bench.answer(memory)
            self._controls[name] = (logits, perplexity(logits, self._wanted))
            if len(self._controls) > _CONTROLS:
                self._controls.popitem(last=False)
        self._controls.move_to_end(name)
        return self._controls[name]

    def _plain_perplexity(self) -> float:
        if self._perplexity_plain is None:
            self._perplexity_plain = self._control(self._plain)[1]
        return self._perplexity_plain


def _mistaken(mistake: Mistake, prefill: Layout) -> Layout | None:
    if mistake == READ_AS_FNUZ:
        return scales.with_dtype(prefill, "float8_e4m3fnuz")
    return scales.without_scales(prefill) if mistake == UNSCALED else None


def record(measured: Measured, date: str) -> Record:
    """Return the record of a measurement; `date` is in UTC. Raises ConfigError for what needs none or cannot have one."""
    row = measured.row
    if row.path != "CONVERT" or row.mistake:
        raise ConfigError(
            f"{row.prefill} -> {row.decode} is {row.mistake or row.path}: only what converts needs a record"
        )
    verdict = check(measured.prefill, measured.decode)
    model = identify(measured.decode.model, weights_digest(measured.folder))
    covers = conversions(measured.prefill, measured.decode, verdict)
    return Record(model, covers, measured.text, row.result, __version__, date)
