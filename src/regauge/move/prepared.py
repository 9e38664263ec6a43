"""What a link keeps of its transfers between two chunks: digest keys, and boxes of the tokens that are under way."""

from __future__ import annotations

import contextlib
import hmac
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator

from regauge.plan.digest import Keys
from regauge.plan.template import Template

_KEYS_KEPT = 64
_TEMPLATES_KEPT = 16


class TransferKeys:
    """The digest keys of the transfers of one link, which both ends derive from the shared key and the link's own name."""

    def __init__(self, key: bytes, session: str) -> None:
        self._key = key
        self._session = session
        self._kept: OrderedDict[tuple[str, int], tuple[Keys, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def of(self, transfer: str, epoch: int) -> Iterator[Keys]:
        """Hold the keys of one epoch of a transfer: they serve one thread at a time."""
        with self._lock:
            entry = self._kept.get((transfer, epoch))
            if entry is None:
                text = f"regauge digest {self._session} {epoch} {transfer}".encode()
                entry = (Keys(hmac.digest(self._key, text, "sha256")), threading.Lock())
                self._kept[transfer, epoch] = entry
                while len(self._kept) > _KEYS_KEPT:
                    self._kept.popitem(last=False)
        with entry[1]:
            yield entry[0]


class Templates:
    """The templates that were used last. Thread-safe: who asks for one that is being made waits for it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Template] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Template]) -> Template:
        """Return the template of a key; `make` it if it is not there. Raises what `make` raises."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = make()
                while len(self._kept) > _TEMPLATES_KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
            return found
