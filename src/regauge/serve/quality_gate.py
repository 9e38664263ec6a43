"""Reads the quality gate's files: records and the keys that are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from regauge import keys
from regauge.config import QualityConfig, QualityLimits
from regauge.errors import ConfigError
from regauge.plan import Judge, check, quality
from regauge.plan.gate import Gate


def from_config(config: QualityConfig) -> Gate | None:
    """Return the gate that a configuration demands, or None. Raises ConfigError naming the file or field."""
    if not config.require:
        if config.records or config.trust:
            raise ConfigError("quality.records and quality.trust need quality.require = true: else nothing is demanded")
        return None
    if not config.trust:
        raise ConfigError("quality.require needs quality.trust: the files of the public keys whose signature counts")
    return read(config.records, config.trust, config.limits)


def judge(config: QualityConfig) -> Judge:
    """Return what compares the two layouts of a link. Raises ConfigError."""
    gate = from_config(config)
    return check if gate is None else gate.check


def read(records: Sequence[str], trust: Sequence[str], limits: QualityLimits) -> Gate:
    """Return the gate of these files. Raises ConfigError naming the one that is oversize, malformed or unreadable."""
    signed = {name: quality.decode(keys.read_bounded(Path(name), quality.MAX_BYTES), name) for name in records}
    return Gate(signed, [keys.load_public(Path(name)) for name in trust], limits)
