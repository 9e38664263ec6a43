"""Every default of a running regauge, with its unit. One TOML file overrides them; unknown keys are refused.

Sizes are in tokens or bytes, times in seconds, as the field's name says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from regauge.errors import ConfigError

Role = Literal["prefill", "decode"]
TransportName = Literal["shm", "tcp"]

BUNDLED_MODEL = "smollm2-135m-instruct"


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one worker's local engine runs."""

    pool_tokens: int = 16_384
    """Tokens that the KV pool holds; rounded up to whole pages."""
    max_context: int = 2_048
    """Most tokens of one request, prompt and answer together; capped by the model's own limit."""
    max_batch: int = 32
    """Most requests that decode together."""
    chunk_tokens: int = 256
    """Most prompt tokens computed in one step (chunked prefill)."""
    threads: int = 0
    """CPU threads of the model's arithmetic; 0 means half of the cores, at least one."""


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV crosses."""

    transport: TransportName = "shm"
    host: str = "127.0.0.1"
    """Compute-plane address that data connections bind to."""
    staging_bytes: int = 64 << 20
    """Bytes of the staging slab on each side; bounds the chunks that are in flight."""
    mode: Literal["auto", "fused", "mapped", "staged"] = "auto"
    """How chunks are written; auto: as the cost model says (see `regauge explain`)."""
    costs: str = ""
    """TOML file of the cost model's constants, as `regauge bench calibrate --out FILE` writes it; empty: the defaults."""
    kernel_threads: int = 1
    offer_s: float = 600.0
    """Most seconds that a request waits for the other side: an offer for its grant, a grant for its offer."""
    deadline_s: float = 120.0
    """Most seconds from a transfer's grant to its commit."""
    lease_s: float = 30.0
    """Most seconds that granted pages wait for a sign of life from the writer."""


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway accepts."""

    max_queue: int = 512
    """Requests in the house at once; one more is answered 429."""
    max_body_bytes: int = 4 << 20
    default_max_tokens: int = 256
    """Answer length of a chat request that names none, in tokens."""
    request_timeout_s: float = 600.0
    """Most seconds from a request's arrival to its last token."""


class QualityLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversion may do to a model's answers, each against both controls; docs/numerics.md says why these values."""

    max_kl: float = 0.015
    """Nats, mean over positions."""
    min_agreement: float = 0.91
    """Share of positions with the same most likely token."""
    max_perplexity_ratio: float = 1.02
    """Perplexity after the crossing by the control's."""
    min_positions: int = 256
    """Positions below which the figures are noise."""


class QualityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a pair that converts must have a signed quality record, as `regauge bench accuracy --record` writes it."""

    require: bool = False
    records: list[str] = []
    """Files of records; one that covers the pair and meets the limits is enough."""
    trust: list[str] = []
    """Files of Ed25519 public keys (PEM) whose signature counts."""
    limits: QualityLimits = QualityLimits()


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`regauge serve`: one gateway, one prefill worker, one decode worker."""

    model: str = BUNDLED_MODEL
    """The bundled model's name, a Hugging Face folder, or a hub name."""
    host: str = "127.0.0.1"
    port: int = 8_000
    prefill_layout: str = "fp8_e4m3,page=64,hnd"
    decode_layout: str = "bf16,page=16,nhd"
    prefill: EngineConfig = EngineConfig()
    decode: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    limits: LimitsConfig = LimitsConfig()
    quality: QualityConfig = QualityConfig()


def load(path: Path) -> ServeConfig:
    """Read a TOML file. Raises ConfigError that names the file and the field."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=ServeConfig)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def cache_dir() -> Path:
    """Return the folder for converted models: `$REGAUGE_CACHE`, else `$XDG_CACHE_HOME/regauge`, else `~/.cache/regauge`."""
    if own := os.environ.get("REGAUGE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "regauge"
