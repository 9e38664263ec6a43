"""What one side says of one request, in tokens and bytes, and signs.

A request is one answer to one prompt, under an id that all its sides know. Up to three sides say what it used: the gateway, the prefill
worker, the decode worker; `reconcile` compares them. An attempt that is made again elsewhere is a request of its own, under a new id.

A signature (Ed25519) is over `CONTEXT` and the receipt's canonical JSON (keys sorted, nothing between tokens). A receipt counts if a key that
is trusted for the name in `by` has signed it: a worker can vouch for itself, and neither for another worker nor for a gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from regauge import keys
from regauge.errors import ConfigError, ReceiptError

Side = Literal["gateway", "prefill", "decode"]
Outcome = Literal["complete", "cancelled", "resumed", "failed"]
"""Complete: the last token was delivered. Cancelled: by the client, or by the gateway at a stop string. Resumed: decode was lost, another request goes on from here, under `resumes`.
Failed: the client got an error. What a worker says is complete if its own part was."""
PathName = Literal["DIRECT", "REMAP", "CONVERT"]
SIDES: Final[tuple[Side, ...]] = get_args(Side)

CONTEXT: Final = b"regauge receipt 1\n"
MAX_LINE_BYTES: Final = 1 << 16
"""Most bytes of one receipt in a file."""
MAX_COUNT: Final = 1 << 40
"""Most tokens or bytes of one request; the sum of eight million such still fits a database's integer."""
MAX_TIME_US: Final = 1 << 60
MAX_TEXT: Final = 256
"""Most characters of a name."""

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Time = Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME_US)]
"""Microseconds since 1970, UTC."""

_MUST: Final[Mapping[Side, tuple[str, ...]]] = {
    "gateway": ("cached", "computed", "generated"),
    "prefill": ("cached", "computed", "transferred", "converted", "wire_bytes"),
    "decode": ("transferred", "converted", "wire_bytes", "generated"),
}
_COUNTS: Final = ("prompt", "cached", "computed", "transferred", "converted", "generated")
_NAMES: Final = ("request", "by", "tenant", "model", "route", "prefill", "decode", "resumes", "digest")


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One side's word; counts are of tokens. None, and an empty name: this side does not know.

    Raises ReceiptError, on construction too, for what contradicts itself, names the field, and says what must hold.
    """

    request: Text
    side: Side
    by: Text
    """Name of the gateway or worker that says so."""
    tenant: Text = ""
    model: Text
    route: Text = ""
    """How the router chose, as its header says."""
    prefill: Text = ""
    """Name of the prefill worker; empty from the gateway: decode computed the prompt itself."""
    decode: Text = ""
    began_us: Time
    """From this side's clock. The gateway's: the request's arrival, which decides the price."""
    ended_us: Time
    outcome: Outcome
    resumes: Text = ""
    """Request that has paid for the input: this one goes on from it (its prompt, and what it generated, are this one's prompt), or answers the same
    prompt once more. Every side must be told: empty means none."""
    silent: tuple[Literal["prefill", "decode"], ...] = ()
    """From the gateway: sides that cannot speak: prefill that died once it had delivered, engines that make no receipts. What the others say stands alone."""
    recovered: bool = False
    """A gateway's receipt that was lost, made again from the workers'."""
    prompt: Count
    cached: Count | None = None
    """Of the prompt, found in a cache."""
    computed: Count | None = None
    """Of the prompt. `cached + computed = prompt`, or less where the request ended before its prompt was computed."""
    transferred: Count | None = None
    """Whose KV crossed; the others' lay on the decode side already."""
    converted: Count | None = None
    """Of these, on the path CONVERT."""
    generated: Count | None = None
    wire_bytes: dict[PathName, Count] | None = None
    """That crossed, by path; what is 0 is left out."""
    digest: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """Of all KV that crossed, in hex: the sum over its chunks as this side found it (docs/digest.md)."""

    def __post_init__(self) -> None:
        self._check_form()
        if lacking := [name for name in _MUST[self.side] if getattr(self, name) is None]:
            raise ReceiptError(f"{lacking[0]}: {self.side} must say it")
        if self.side == "gateway" and not self.tenant:
            raise ReceiptError("tenant: gateway must say it")
        if self.side != "gateway" and self.by != getattr(self, self.side):
            raise ReceiptError(f"{self.side}: is {getattr(self, self.side)!r}, but {self.by!r} says so of itself")
        if self.silent and (self.side != "gateway" or not all(getattr(self, side) for side in self.silent)):
            raise ReceiptError("silent: only a gateway says it, of workers that it names")
        if not 0 <= self.began_us <= self.ended_us <= MAX_TIME_US:
            raise ReceiptError(f"began_us, ended_us: {self.began_us} and {self.ended_us} are no two times in order")
        self._check_tokens()

    def _check_form(self) -> None:  # msgspec checks what it decodes, and not what is constructed
        for name in _NAMES:
            text = getattr(self, name)
            if len(text) > MAX_TEXT or not text.isprintable():
                raise ReceiptError(f"{name}: give at most {MAX_TEXT} printable characters")
        for name in ("request", "by", "model"):
            if not getattr(self, name):
                raise ReceiptError(f"{name}: must not be empty")
        counts = {name: getattr(self, name) for name in _COUNTS}
        for path, count in (self.wire_bytes or {}).items():
            if not 1 <= count <= MAX_COUNT:
                raise ReceiptError(f"wire_bytes.{path}: {count} is not from 1 to {MAX_COUNT}")
        for name, value in counts.items():
            if value is not None and not 0 <= value <= MAX_COUNT:
                raise ReceiptError(f"{name}: {value} is not from 0 to {MAX_COUNT}")

    def _check_tokens(self) -> None:
        if (self.cached is None) != (self.computed is None):
            raise ReceiptError("cached, computed: say both or neither")
        if self.cached is not None and self.computed is not None:
            known = self.cached + self.computed
            whole = self.outcome in ("complete", "resumed") or bool(self.generated)
            if known > self.prompt or (whole and known != self.prompt):
                raise ReceiptError(
                    f"cached + computed = prompt: {self.cached} + {self.computed} is not {self.prompt}, but {known}"
                )
        if (self.transferred or 0) > self.prompt:
            raise ReceiptError(f"transferred: {self.transferred} is more than the prompt, {self.prompt}")
        if (self.converted or 0) > (self.prompt if self.transferred is None else self.transferred):
            raise ReceiptError(f"converted: {self.converted} is more than what was transferred, {self.transferred}")
        if self.side != "gateway" and self.outcome == "complete" and self.transferred and not self.digest:
            raise ReceiptError(f"digest: {self.side} must say it of what was transferred")


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A receipt and its signature, in hex."""

    receipt: Receipt
    signature: Annotated[str, msgspec.Meta(max_length=128)]


class Verified(Signed, frozen=True, forbid_unknown_fields=True):
    """One whose signature `Trust.check` found good, or which was signed here."""


def canonical(receipt: Receipt) -> bytes:
    """Return the bytes that are signed, without CONTEXT. Equal receipts have equal bytes."""
    return msgspec.json.encode(receipt, order="sorted")


def sign(receipt: Receipt, key: Ed25519PrivateKey) -> Verified:
    """Vouch for a receipt."""
    return Verified(receipt, keys.sign(key, CONTEXT, canonical(receipt)))


def encode(signed: Signed) -> bytes:
    """Write one line, without its end; `decode` gives it back."""
    return msgspec.json.encode(signed, order="sorted")


def decode(data: bytes, name: str = "receipt") -> Signed:
    """Read a receipt. Raises ReceiptError, which begins with `name`, for what is oversize, malformed, or contradicts itself."""
    if len(data) > MAX_LINE_BYTES:
        raise ReceiptError(f"{name}: larger than {MAX_LINE_BYTES} bytes, which is the most that is read")
    try:
        return msgspec.json.decode(data, type=Signed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReceiptError(f"{name}: not a receipt: {error}") from error
    except ReceiptError as error:
        raise ReceiptError(f"{name}: {error}") from error


def read_lines(lines: Iterable[bytes], name: str) -> Iterator[Signed | ReceiptError]:
    """Read JSON lines, empty ones left out; for each that is no receipt its error, which names `name` and the line."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield decode(line, f"{name}:{number}")
            except ReceiptError as error:
                yield error


class Trust:
    """Public keys whose signatures count, by the name of who holds them, gateways and workers apart; a name may have several."""

    def __init__(
        self, gateways: Mapping[str, Iterable[Ed25519PublicKey]], workers: Mapping[str, Iterable[Ed25519PublicKey]]
    ) -> None:
        self._keys = {
            "gateway": {name: tuple(given) for name, given in gateways.items()},
            "worker": {name: tuple(given) for name, given in workers.items()},
        }

    def check(self, signed: Signed) -> Verified:
        """Return the receipt as verified. Raises ReceiptError: nobody is trusted under that name, or the signature is not theirs."""
        receipt = signed.receipt
        kind = "gateway" if receipt.side == "gateway" else "worker"
        known = self._keys[kind].get(receipt.by, ())
        where = f"request {receipt.request}, {receipt.side}"
        if not known:
            raise ReceiptError(f"{where}: no key of a {kind} {receipt.by!r} is trusted; add its public key")
        if not any(keys.verify(key, CONTEXT, canonical(receipt), signed.signature) for key in known):
            raise ReceiptError(f"{where}: not signed by {receipt.by!r}, or changed since")
        return Verified(receipt, signed.signature)


def load_trust(folder: Path) -> Trust:
    """Read `gateways/NAME.pub` and `workers/NAME.pub` (PEM). `NAME@anything.pub` is one more key of NAME, such as the one before.

    Raises ConfigError: neither folder is there, a file cannot be read, or is no Ed25519 key.
    """
    found: list[dict[str, list[Ed25519PublicKey]]] = []
    for kind in ("gateways", "workers"):
        named: dict[str, list[Ed25519PublicKey]] = {}
        for path in sorted((folder / kind).glob("*.pub")):
            named.setdefault(path.stem.partition("@")[0], []).append(keys.load_public(path))
        found.append(named)
    if not any(found):
        raise ConfigError(f"{folder}: holds no public keys; put them at gateways/NAME.pub and workers/NAME.pub")
    return Trust(found[0], found[1])
