"""What a request to an engine with an API says of its transfer: written here and nowhere else, for all routes and both roles.

| engine | fields |
|---|---|
| vLLM | `kv_transfer_params["regauge"]` (`engines/vllm/schedule.py`) |
| SGLang | `bootstrap_host`, `bootstrap_room` (`engines/sglang/room.py`), and the id to abort it by |
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from regauge.config import EngineName, Port
from regauge.engines.sglang import room
from regauge.engines.vllm.schedule import PARAMS

RID_END: Final = "."
"""SGLang aborts every request whose id *begins* with the one that is named: ids end with a mark that is nowhere else in them."""


class Leg(msgspec.Struct, frozen=True):
    """A request's part in a transfer. To prefill: the decode engine's `receivers`; to decode: the prefill engine's `senders`, none of them where it computes the prompt itself."""

    request_id: str
    transfer_id: str
    receivers: Mapping[str, tuple[str, Port]] | None = None
    senders: Sequence[str] = ()
    handover: bool = False
    """Prefill: whether decode needs the first token."""


CACHE_SALT: Final = "cache_salt"
"""What both engines call it that prompts of unlike salts share nothing of the prefix cache."""

Fields = dict[str, Any]
Inject = Callable[[Fields, Leg, str], Fields]
"""Fields of a body, the leg, and what the route calls a request's id (empty: it has no such field) -> fields."""


def vllm(fields: Fields, leg: Leg, id_field: str = "") -> Fields:
    """Return a body for vLLM, which ends a request by its connection and so needs no id."""
    del id_field
    if leg.receivers is not None:
        told = {"transfer": leg.transfer_id, "to": leg.receivers, "handover": leg.handover}
        # `do_remote_decode`: /v1/messages would refuse a thinking budget above the one token that is asked of prefill.
        return {**fields, "kv_transfer_params": {PARAMS: told, "do_remote_decode": True}}
    if leg.senders:
        return {**fields, "kv_transfer_params": {PARAMS: {"transfer": leg.transfer_id, "from": leg.senders}}}
    return dict(fields)


def sglang(fields: Fields, leg: Leg, id_field: str = "rid") -> Fields:
    """Return a body for SGLang, both of whose legs always name a room."""
    side = room.From(list(leg.senders)) if leg.receivers is None else room.To(dict(leg.receivers))
    named = {id_field: leg.request_id + RID_END} if id_field else {}
    return {**fields, **named, "bootstrap_host": room.encode(side), "bootstrap_room": room.room(leg.transfer_id)}


INJECT: Final[Mapping[EngineName, Inject]] = MappingProxyType({"vllm": vllm, "sglang": sglang})
"""The engines with an API of their own."""


def salted(salt: str, own: bytes = b"") -> Fields:
    """Return the salt's field, none for an empty one; `own` is the client's salt, as JSON, which parts its prompts further and from no others'."""
    if not salt:
        return {}
    return {CACHE_SALT: hashlib.blake2b(own, key=salt.encode(), digest_size=16).hexdigest() if own else salt}


def refused(params: object) -> str:
    """Return what a vLLM prefill engine says of a leg that it could not take, in its answer's `kv_transfer_params`; empty: nothing."""
    told = params.get(PARAMS) if isinstance(params, dict) else None
    return str(told["error"]) if isinstance(told, dict) and told.get("error") else ""
