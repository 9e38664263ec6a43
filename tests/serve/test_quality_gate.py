"""The gate's files, as a configuration names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quality_records import KEY, MODEL, per_head, record_of
from regauge import keys
from regauge.config import QualityConfig, QualityLimits, load
from regauge.errors import ConfigError
from regauge.layout.presets import from_short
from regauge.plan import check, quality
from regauge.serve import quality_gate

PAIR = from_short("bf16", MODEL), per_head()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "key.pub").write_bytes(keys.public_pem(KEY.public_key()))
    (tmp_path / "r.json").write_bytes(quality.encode(quality.sign(record_of(*PAIR), KEY)))
    return tmp_path


def test_without_a_demand_links_judge_as_check_does() -> None:
    assert quality_gate.judge(QualityConfig()) is check
    assert quality_gate.from_config(QualityConfig()) is None


@pytest.mark.parametrize("given", [{"records": ["r.json"]}, {"trust": ["key.pub"]}])
def test_files_without_a_demand_are_refused(given: dict[str, list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"quality\.records and quality\.trust need quality\.require = true"):
        quality_gate.judge(QualityConfig(**given))  # type: ignore[arg-type]


def test_a_file_demands_records_and_sets_limits(files: Path) -> None:
    (files / "c.toml").write_text(
        f"[quality]\nrequire = true\nrecords = ['{files}/r.json']\ntrust = ['{files}/key.pub']\n"
        "[quality.limits]\nmax_kl = 0.01\n"
    )
    config = load(files / "c.toml").quality
    assert config.limits == QualityLimits(max_kl=0.01)
    judge = quality_gate.judge(config)
    assert judge(*PAIR).path == "CONVERT"
    assert judge(PAIR[0], from_short("fp8_e5m2", MODEL)).path == "REFUSED"


def test_a_demand_without_a_trusted_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"quality\.require needs quality\.trust"):
        quality_gate.judge(QualityConfig(require=True))


def test_the_file_that_is_wrong_is_named(files: Path) -> None:
    (files / "big.json").write_bytes(b" " * (quality.MAX_BYTES + 1))
    (files / "bad.json").write_text("{}")
    for name, message in (
        ("big.json", "larger than"),
        ("bad.json", "missing required field"),
        ("no.json", "No such file"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            quality_gate.read([str(files / name)], [str(files / "key.pub")], QualityLimits())
        assert str(error.value).startswith(str(files / name))
    with pytest.raises(ConfigError, match=r"r\.json: no public key in PEM"):
        quality_gate.read([], [str(files / "r.json")], QualityLimits())
