"""What SGLang loads in every process (entry point group `sglang.srt.plugins`): the transfer backend `regauge`. Nothing of SGLang is changed for other backends.

`python -m sglang.launch_server ... --disaggregation-mode prefill --disaggregation-transfer-backend regauge`, with REGAUGE_SGLANG naming a
TOML file of `engines.settings.Settings`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.disaggregation import utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from regauge.engines.sglang import contract

BACKEND: Final = "regauge"
_DISAGGREGATION: Final = "sglang.srt.disaggregation."


def activate() -> None:
    """Offer the backend. SGLang calls it once in each process, before it reads its command line."""
    if BACKEND in utils.TransferBackend._value2member_map_:
        return
    add_disagg_transfer_backend_choices([BACKEND])
    # SGLang builds the enumeration from its option and has no other way to add to it.
    member = object.__new__(utils.TransferBackend)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    utils.TransferBackend._value2member_map_[BACKEND] = member
    utils.TransferBackend._member_map_[BACKEND.upper()] = member
    utils.TransferBackend._member_names_.append(BACKEND.upper())
    for target, hook in (
        ("utils.get_kv_class", classes),
        ("prefill.PrefillBootstrapQueue._init_kv_manager", bound),
        ("decode.DecodePreallocQueue._init_kv_manager", bound),
        ("prefill.PrefillBootstrapQueue.create_sender", with_sender),
        ("decode.DecodePreallocQueue._create_receiver_and_enqueue", with_receiver),
    ):
        HookRegistry.register(_DISAGGREGATION + target, hook, HookType.AROUND)


def classes(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Return the backend's class of a kind. Raises ConfigError or EngineError for an SGLang that it was not made for."""
    if getattr(transfer_backend, "value", None) != BACKEND or class_type == utils.KVClassType.KVARGS:
        return original(transfer_backend, class_type)
    contract.check()
    # Only now: it derives from what has just been checked, and other backends need none of it.
    conn = importlib.import_module("regauge.engines.sglang.conn")
    return {
        utils.KVClassType.MANAGER: conn.Manager,
        utils.KVClassType.SENDER: conn.Sender,
        utils.KVClassType.RECEIVER: conn.Receiver,
        utils.KVClassType.BOOTSTRAP_SERVER: conn.Bootstrap,
    }[class_type]


def bound(original: Callable[..., Any], queue: Any) -> Any:
    """Give the manager what its arguments do not: the pools, the rows of first tokens, the model."""
    manager = original(queue)
    if hasattr(manager, "bind_regauge"):
        manager.bind_regauge(queue)
    return manager


def with_sender(original: Callable[..., bool], queue: Any, req: Any, *given: Any, **named: Any) -> bool:
    """Tell a new sender the length of its prompt, which SGLang does not."""
    made = original(queue, req, *given, **named)
    if made and hasattr(req.disagg_kv_sender, "begin_regauge"):
        req.disagg_kv_sender.begin_regauge(req)
    return made


def with_receiver(original: Callable[..., Any], queue: Any, req: Any, *given: Any, **named: Any) -> Any:
    """Likewise, a new receiver."""
    made = original(queue, req, *given, **named)
    if hasattr(made.kv_receiver, "begin_regauge"):
        made.kv_receiver.begin_regauge(len(req.origin_input_ids))
    return made
