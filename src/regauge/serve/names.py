"""Which routed requests a client's request became."""

from __future__ import annotations

from collections import OrderedDict


class Names:
    """Which routed requests a client's request became: the newest, at most `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: OrderedDict[str, list[str]] = OrderedDict()

    def add(self, name: str, parts: list[str]) -> None:
        """Note the parts of a request; a name that is used again keeps what it was used for before."""
        self._parts[name] = [*self._parts.pop(name, []), *parts][-64:]
        if len(self._parts) > self._most:
            self._parts.popitem(last=False)

    def of(self, name: str) -> list[str]:
        """Return the parts of a request, or what may be the name of a part itself."""
        return self._parts.get(name, [name])
