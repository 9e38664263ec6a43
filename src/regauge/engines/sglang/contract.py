"""What of SGLang this adapter stands on: versions that were read and run, and the signatures that it calls, derives from or hooks.

SGLang swallows what goes wrong in a plug-in and serves on without it. So nothing is checked while the plug-in is loaded, but when SGLang asks
for the backend's classes: then an error ends the server, and says why.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from regauge.errors import ConfigError, EngineError

SUPPORTED: Final = ("0.5.23",)

_BASE: Final = "sglang.srt.disaggregation.base.conn."
_PREFILL: Final = "sglang.srt.disaggregation.prefill."
_DECODE: Final = "sglang.srt.disaggregation.decode."
SIGNATURES: Final[Mapping[str, tuple[str, ...]]] = {
    _BASE + "BaseKVManager.__init__": ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend"),
    _BASE + "BaseKVSender.__init__": ("self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank"),
    _BASE + "BaseKVSender.init": ("self", "num_kv_indices", "aux_index"),
    _BASE + "BaseKVSender.send": ("self", "kv_indices", "state_indices", "num_kv_tokens"),
    _BASE + "BaseKVSender.should_send_kv_chunk": ("self", "num_pages", "last_chunk"),
    _BASE + "KVTransferMetric.__init__": ("self", "transfer_latency_s", "alloc_latency_s", "transfer_total_bytes"),
    "sglang.srt.disaggregation.common.conn.KVTransferError.__init__":
        ("self", "bootstrap_room", "failure_reason", "is_from_another_rank"),
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver.__init__": ("self", "mgr", "bootstrap_addr", "bootstrap_room"),
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver.send_metadata": (
        "self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices",
    ),
    _PREFILL + "PrefillBootstrapQueue._init_kv_manager": ("self",),
    _PREFILL + "PrefillBootstrapQueue.create_sender": ("self", "req", "num_kv_heads"),
    _DECODE + "DecodePreallocQueue._init_kv_manager": ("self",),
    _DECODE + "DecodePreallocQueue._create_receiver_and_enqueue": ("self", "req", "is_rebootstrap"),
}  # fmt: skip
"""Parameters by dotted name."""


def check() -> None:
    """Raise ConfigError for an SGLang that is not one of `SUPPORTED`, EngineError for one whose signatures are others."""
    try:
        found = version("sglang")
    except PackageNotFoundError as error:
        raise ConfigError("sglang is not installed") from error
    if found not in SUPPORTED:
        raise ConfigError(f"sglang {found}: this adapter was made for {', '.join(SUPPORTED)}; install one of them")
    for name, wanted in SIGNATURES.items():
        has = parameters(name)
        if has != wanted:
            raise EngineError(f"sglang {found}: {name} takes ({', '.join(has)}), not ({', '.join(wanted)})")


def parameters(name: str) -> tuple[str, ...]:
    """Return the parameters of a method or a function of a class, by `module.Class.method`. Raises EngineError where there is none."""
    module, owner, method = name.rsplit(".", 2)
    try:
        found = getattr(getattr(importlib.import_module(module), owner), method)
    except (ImportError, AttributeError) as error:
        raise EngineError(f"sglang has no {name}: {error}") from error
    return tuple(inspect.signature(found).parameters)
