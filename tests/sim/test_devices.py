"""The shipped catalogue, and files laid over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.errors import ConfigError
from regauge.sim.devices import Figure, curves, load, shipped

FIGURE = '{ value = 5, source = "me", date = "2026-11" }'


def test_every_shipped_figure_has_a_source_and_a_date() -> None:
    found = load()
    assert {"mtt-s5000", "h20", "h200", "b200", "mi300x", "ascend-910b", "gaudi-3", "trainium-2"} <= set(
        found.accelerators
    )
    for dev in (*found.accelerators.values(), *found.nics.values(), *found.switches.values()):
        for field in dev.__struct_fields__:
            if isinstance(figure := getattr(dev, field), Figure):
                assert figure.source
                assert figure.date[:2] == "20"
    for dev in found.accelerators.values():
        assert dev.fp8_tflops or dev.bf16_tflops, dev.name


def test_the_article_s_card() -> None:
    card = load().accelerators["mtt-s5000"]
    assert [f.value for f in (card.fp8_tflops, card.memory_gb, card.memory_gb_per_s) if f] == [1000, 80, 1600]


def test_a_figure_is_replaced_whole_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"[accelerators.mtt-s5000]\nfp8_tflops = {FIGURE}\n")
    card = load([path]).accelerators["mtt-s5000"]
    assert card.fp8_tflops == Figure(5.0, "me", "2026-11")  # low and note of the shipped one are gone
    assert card.memory_gb == shipped().accelerators["mtt-s5000"].memory_gb
    assert shipped().accelerators["mtt-s5000"].fp8_tflops != card.fp8_tflops


def test_a_new_device_with_measured_curves(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("tokens,seconds\n1000,1\n2000,2\n")
    (tmp_path / "mine.toml").write_text(
        f'[accelerators.x]\nname = "X"\nmemory_gb = {FIGURE}\nmemory_gb_per_s = {FIGURE}\nprefill_csv = "p.csv"\n'
    )
    found = curves(load([tmp_path / "mine.toml"]).accelerators["x"])
    assert found.prefill is not None
    assert found.prefill(1500) == 1.5
    assert found.decode is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[accelerators.h200]\nspeed = 3\n", "speed"),
        ("[accelerators.h200]\nmemory_gb = 3\n", "memory_gb"),
        ('[accelerators.h200]\nmemory_gb = { value = 3, date = "2026" }\n', "source"),
        ('[accelerators.h200]\nmemory_gb = { value = 3, source = "a", date = "today" }\n', "date"),
        ('[accelerators.h200]\nmemory_gb = { value = -3, source = "a", date = "2026" }\n', "h200.memory_gb: 0 < low"),
        ('[accelerators.h200]\nmemory_gb = { value = 3, low = 4, source = "a", date = "2026" }\n', "0 < low"),
        ('[accelerators.h200]\ncards = { value = 1.5, source = "a", date = "2026" }\n', "whole"),
        ('[nics.400g]\nshare = { value = 1.5, source = "a", date = "2026" }\n', "at most 1"),
        ('[accelerators.new]\nname = "New"\n', "accelerators.new: a new accelerator needs memory_gb, memory_gb_per_s"),
        ('[accelerators.h200]\nnic = "900g"\n', "no NIC '900g'"),
        ("[gpus]\n", "gpus"),
        ("[accelerators\n", "mine.toml"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load([path])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load([tmp_path / "none.toml"])


def test_a_price_has_a_currency_with_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for text, said in (
        ('price = { value = 3, source = "a", date = "2026" }', "h200.price: a price needs its currency"),
        ('memory_gb = { value = 3, currency = "USD", source = "a", date = "2026" }', "only prices have one"),
        ('price = { value = 3, currency = "EUR", source = "a", date = "2026" }', r"no rate of EUR.*currencies\.EUR"),
        ('price = { value = 3, currency = "eur", source = "a", date = "2026" }', "currency"),
    ):
        path.write_text(f"[accelerators.h200]\n{text}\n")
        with pytest.raises(ConfigError, match=said):
            load([path])
    path.write_text(
        '[accelerators.h200]\nprice = { value = 3, currency = "EUR", source = "a", date = "2026" }\n'
        '[currencies.EUR]\nname = "Euro"\nper_usd = { value = 0.9, source = "a", date = "2026" }\n'
    )
    assert load([path]).currencies["EUR"].name == "Euro"
