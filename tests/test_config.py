"""One TOML file; unknown keys are refused by path."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import pytest

from regauge.config import FlowConfig, ServeConfig, TransferConfig, cache_dir, load
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
        ("port = 0", r"Expected `int` >= 1 - at `\$\.port`"),
        ("[decode]\nmax_batch = 0", r"Expected `int` >= 1 - at `\$\.decode\.max_batch`"),
        ("[transfer]\nlanes = 17", r"Expected `int` <= 16 - at `\$\.transfer\.lanes`"),
        ("[transfer]\nlanes = 0", r"Expected `int` >= 1 - at `\$\.transfer\.lanes`"),
        (
            "[transfer]\nresume_s = -0.1",
            r"transfer\.resume_s: must be at least 0 and at most 86400, not -0\.1; .* for 3\.0",
        ),
        ("[transfer]\nlease_s = 1e6", r"transfer\.lease_s: must be more than 0 and at most 86400, not 1000000\.0"),
        ("[limits]\nrequest_timeout_s = nan", r"limits\.request_timeout_s: .*, not nan; leave it out for 600\.0"),
        ("[quality.limits]\nmax_kl = inf", r"Expected `float` <= .* - at `\$\.quality\.limits\.max_kl`"),
        ("[route]\npolicy = 'best'", r"Invalid enum value 'best' - at `\$\.route\.policy`"),
        ("[route]\nadmit_share = 0.0", r"Expected `float` > 0.* - at `\$\.route\.admit_share`"),
        (
            "[route]\nttft_s = 0.0",
            r"route\.ttft_s: must be more than 0 and at most 86400, not 0\.0; leave it out for None",
        ),
        ("[route]\neject_ratio = 0.5", r"route\.eject_ratio: must be at least 1 and finite, not 0\.5"),
        ("[route]\nstale_s = inf", r"route\.stale_s: .* not inf; leave it out for 10\.0"),
        ("[transfer.flow]\novercommit = 0.5", r"transfer\.flow\.overcommit: must be at least 1 and finite, not 0\.5"),
        ("[transfer.flow]\naged_share = 1.0", r"transfer\.flow\.aged_share: must be between 0 and 1, not 1\.0"),
        (
            "[transfer.flow.shares]\nfree = 0.0",
            r"transfer\.flow\.shares\.free: must be more than 0 and finite, not 0\.0",
        ),
        ("[transfer.flow.shares]\nfree = inf", r"transfer\.flow\.shares\.free: .* not inf; leave it out for weight 1"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "regauge.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


POSITIVE = ("offer_s", "deadline_s", "lease_s")
FLOW_POSITIVE = ("nic_bytes_per_s", "rtt_s", "stall_s", "lease_s", "max_wait_s", "fair_s", "commit_s")


@pytest.mark.parametrize("value", [nan, inf, -1.0])
def test_a_rate_or_time_that_is_no_finite_number_is_named(value: float) -> None:
    for name in (*FLOW_POSITIVE, "overcommit", "urgent_s", "aged_share"):
        with pytest.raises(ConfigError, match=rf"transfer\.flow\.{name}: .*not {value}"):
            FlowConfig(**{name: value})
    for name in (*POSITIVE, "resume_s"):
        with pytest.raises(ConfigError, match=rf"transfer\.{name}: .*not {value}; leave it out for "):
            TransferConfig(**{name: value})


def test_zero_is_taken_where_it_means_something() -> None:
    for name in FLOW_POSITIVE:
        with pytest.raises(ConfigError, match=rf"transfer\.flow\.{name}: must be more than 0"):
            FlowConfig(**{name: 0.0})
    for name in POSITIVE:
        with pytest.raises(ConfigError, match=rf"transfer\.{name}: must be more than 0"):
            TransferConfig(**{name: 0.0})
    flow = FlowConfig(urgent_s=0.0, unscheduled_bytes=0, unscheduled_budget_bytes=0, overcommit=1.0)
    assert TransferConfig(resume_s=0.0, flow=flow).flow is flow
    for name in ("unscheduled_bytes", "unscheduled_budget_bytes"):
        with pytest.raises(ConfigError, match=rf"transfer\.flow\.{name}: must be at least 0 and finite, not -1"):
            FlowConfig(**{name: -1})


def test_where_converted_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("REGAUGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "regauge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "regauge"


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "docs").rglob("*.toml")), ids=lambda path: path.name
)
def test_the_configurations_in_the_docs_can_be_read(path: Path) -> None:
    load(path)
