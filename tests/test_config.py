"""One TOML file; unknown keys are refused by path."""

from __future__ import annotations

from pathlib import Path

import pytest

from regauge.config import ServeConfig, cache_dir, load
from regauge.errors import ConfigError


def test_a_file_overrides_defaults_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "regauge.toml"
    path.write_text('port = 9000\n[decode]\nmax_batch = 4\n[transfer]\ntransport = "tcp"\n')
    config = load(path)
    assert (config.port, config.decode.max_batch, config.transfer.transport) == (9000, 4, "tcp")
    assert config.prefill == ServeConfig().prefill


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"unknown field `prot`"),
        ("[decode]\nmax_bach = 4", r"unknown field `max_bach` - at `\$\.decode`"),
        ("port = 'x'", r"Expected `int`, got `str` - at `\$\.port`"),
        ("[transfer]\ntransport = 'pigeon'", r"Invalid enum value 'pigeon' - at `\$\.transfer\.transport`"),
        ("port =", "Invalid value"),
        ("[transfer.flow]\novercommit = 0.5", "overcommit at least 1"),
        ("[transfer.flow]\naged_share = 1.0", "aged_share must be between 0 and 1, not 1.0"),
        ("[transfer.flow.shares]\nfree = 0.0", "shares must be more than 0"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "regauge.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


def test_where_converted_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("REGAUGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "regauge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "regauge"
