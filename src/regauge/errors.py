"""Every error regauge raises on purpose.

    RegaugeError
    ├── LayoutError            a layout file or short form is wrong: names the field
    │   └── PresetError        a model config cannot be turned into a layout
    ├── Refused                a pair of layouts has no correct path: carries every reason
    ├── PlanError              a plan is asked for something outside its layouts (page table, token range)
    ├── TransportError         bytes could not be moved
    │   ├── AuthError          the peer does not hold the key
    │   ├── BoundsError        a piece lies outside a registered region, or its generation is over
    │   ├── PeerLost           the connection to the peer broke
    │   └── DeadlineExceeded   the time limit passed; bytes may still land until the peer is fenced
    ├── ProtocolError          a control message is malformed or comes out of turn
    ├── TransferFailed         one request's KV did not cross: says why
    ├── PoolExhausted          no free pages
    ├── EngineError            the engine failed on a request
    ├── ReceiptError           a receipt contradicts itself, or is not signed by whom it names
    ├── StoreError             the receipts' store cannot be read or written
    └── ConfigError            a configuration file or option is wrong: names the field and the remedy

An error's text says what happened, where, and what to do.
"""

from __future__ import annotations


class RegaugeError(Exception):
    """Base of all errors that regauge raises on purpose."""


class LayoutError(RegaugeError):
    """A layout is malformed; `path` is the field, as in `groups[0].components[1].dtype`."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class PresetError(LayoutError):
    """A model's config.json lacks or contradicts what a layout needs."""


class Refused(RegaugeError):
    """No correct path exists between two layouts; `reasons` holds one sentence per clash."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class PlanError(RegaugeError):
    """A plan was given a page table, token range or layer that its layouts do not have."""


class TransportError(RegaugeError):
    """Bytes could not be moved."""


class AuthError(TransportError):
    """The peer did not prove that it holds the shared key."""


class BoundsError(TransportError):
    """A piece lies outside the region it names, or names a region or generation that does not exist."""


class PeerLost(TransportError):
    """The connection to the peer broke or could not be made."""


class DeadlineExceeded(TransportError):
    """The time limit passed. Bytes may still land until the peer has been fenced."""


class ProtocolError(RegaugeError):
    """A control message is malformed, too large, or comes out of turn."""


class TransferFailed(RegaugeError):
    """One request's KV cache did not cross; other requests are not affected."""


class PoolExhausted(RegaugeError):
    """The page pool has fewer free pages than were asked for."""


class EngineError(RegaugeError):
    """The engine failed on a request."""


class ReceiptError(RegaugeError):
    """A receipt is malformed, contradicts itself, or is not signed by whom it names."""


class StoreError(RegaugeError):
    """The receipts' store cannot be read or written."""


class ConfigError(RegaugeError):
    """A configuration file or command-line option is wrong."""
