"""What a request to an SGLang server carries for regauge: SGLang passes `bootstrap_host` and `bootstrap_room` on to the backend as they are.

`bootstrap_room` (63 bits) names the transfer. `bootstrap_host` is one of

| to | value |
|---|---|
| either | a host name or address: decode asks prefill for the room at that host's `bootstrap_port`, as SGLang's routers want it |
| prefill | `To`, encoded: the decode ranks, of any engine, that wait for the room |
| decode | `From`, encoded: the prefill ranks, of any engine, that will bring it |

This is the contract, without SGLang; `plugin.py` is what SGLang loads.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Container
from typing import Annotated, Final, TypeVar

import msgspec

from regauge.config import Port
from regauge.errors import ProtocolError
from regauge.move.messages import Name

PREFIX: Final = "regauge."
MAX_ROOM: Final = (1 << 63) - 1
_ROOM: Final = "room-"


class To(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="to"):
    """Every rank of the decode engine, in order, and where it takes control connections."""

    ranks: Annotated[dict[Name, tuple[str, Port]], msgspec.Meta(min_length=1, max_length=4096)]


class From(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="from"):
    """Every rank of the prefill engine, in order."""

    ranks: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=4096)]


Leg = TypeVar("Leg", To, From)


def encode(leg: To | From) -> str:
    """Return a `bootstrap_host`."""
    return PREFIX + base64.urlsafe_b64encode(msgspec.json.encode(leg)).decode().rstrip("=")


def decode(address: str) -> To | From | None:
    """Read `bootstrap_host`, or that with `:bootstrap_port` behind it; None for the address of a host.

    Raises ProtocolError for one that begins like an encoded leg and is none.
    """
    if not address.startswith(PREFIX):
        return None
    text = address.removeprefix(PREFIX).partition(":")[0]
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=To | From)
    except (binascii.Error, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ProtocolError(f"bootstrap_host begins with {PREFIX!r} but is no leg of a transfer: {error}") from error


def new_transfer() -> str:
    """Return a transfer's name that no other has. No room is 0, which SGLang takes for none."""
    return transfer((int.from_bytes(secrets.token_bytes(8)) >> 1) or 1)


def transfer(room: int) -> str:
    """Return the name of a room's transfer."""
    return f"{_ROOM}{room}"


def room(transfer: str) -> int:
    """Return the room of a transfer. Raises ProtocolError for a name that is no room's."""
    number = transfer.removeprefix(_ROOM)
    if number == transfer or not (number.isascii() and number.isdigit()) or int(number) > MAX_ROOM:
        raise ProtocolError(f"transfer {transfer!r} has no bootstrap_room: give it a name like {_ROOM}17")
    return int(number)


def read_leg(number: object, address: str, wanted: type[Leg], taken: Container[int]) -> Leg | None:
    """Read what a request says to an engine that has the rooms `taken`; None: the other side is to be asked for.

    Raises ProtocolError for a `bootstrap_room` that names no transfer (0 means to SGLang that nothing has come yet) or is taken, and for
    a leg that was meant for the other engine.
    """
    if not isinstance(number, int) or not 0 < number <= MAX_ROOM:
        raise ProtocolError(f"bootstrap_room {number!r}: give each request one of its own, from 1 to {MAX_ROOM}")
    if number in taken:
        raise ProtocolError(f"bootstrap_room {number} has a request here already; give each its own")
    leg = decode(address)
    if leg is None or isinstance(leg, wanted):
        return leg
    named, meant = ("decode", "prefill") if isinstance(leg, To) else ("prefill", "decode")
    raise ProtocolError(f"bootstrap_host names ranks of {named}: it was meant for {meant}")
