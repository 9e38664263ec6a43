"""What the gateway knows of its pairs' paths: from the start where both layouts are known then, else as soon as the engines tell theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from regauge.errors import RegaugeError
from regauge.layout.spec import Layout
from regauge.layout.view import bytes_per_token
from regauge.observe import ERROR, get_logger
from regauge.plan import check
from regauge.serve import wire
from regauge.serve.workers import Worker

UNKNOWN: Final = "UNKNOWN"
"""Path of a pair whose layouts are not known."""
REFUSED: Final = "REFUSED"
MIXED: Final = "MIXED"
"""What is said of a fleet whose pairs take different paths."""


class Pairs:
    """The verdicts of all pairs of a prefill and a decode worker. Layouts that are equal are judged once."""

    def __init__(self, known: Mapping[str, Layout] | None = None, given: wire.VerdictInfo | None = None) -> None:
        """`given`: the verdict of the pairs among those whose layouts are `known`, where it was found with more than layouts; and of those that are not."""
        self._given = given = given or wire.VerdictInfo(UNKNOWN)
        self._known = dict(known or {})
        self._first = frozenset(self._known) if given.path != UNKNOWN else frozenset[str]()
        self._silent: set[str] = set()
        """Workers that have no way to tell."""
        self._judged: list[tuple[Layout, Layout, wire.VerdictInfo]] = []

    def knows(self, name: str) -> bool:
        """Whether a worker need not be asked (again)."""
        return name in self._known or name in self._silent

    def verdict(self, prefill: str, decode: str) -> wire.VerdictInfo:
        """Return the pair's path, or UNKNOWN."""
        one, other = self._known.get(prefill), self._known.get(decode)
        if one is None or other is None or {prefill, decode} <= self._first:
            return self._given
        for judged in self._judged:
            if judged[0] == one and judged[1] == other:
                return judged[2]
        found = check(one, other)
        reasons = [str(r) for r in found.refusals] or list(found.reasons)
        verdict = wire.VerdictInfo(found.path, "; ".join(reasons))
        self._judged.append((one, other, verdict))
        log = get_logger(prefill=prefill, decode=decode)
        (log.error if found.path == REFUSED else log.info)("the pair is known", path=found.path, reasons=reasons)
        return verdict

    def wire_bytes(self, prefill: str, decode: str) -> int | None:
        """Return the bytes of a token on the wire, of one rank: the narrower side's; None where a layout is not known."""
        one, other = self._known.get(prefill), self._known.get(decode)
        return None if one is None or other is None else min(bytes_per_token(one), bytes_per_token(other))

    def learn(self, name: str, layout: Layout) -> None:
        """Take a worker's layout."""
        self._known[name] = layout

    def forget(self, name: str) -> None:
        """Forget a worker: under its name another may come."""
        self._known.pop(name, None)
        self._first -= {name}
        self._silent.discard(name)

    async def ask(self, worker: Worker) -> bool:
        """Ask a worker for its layout; return whether it has told it now."""
        name = worker.client.name
        try:
            layout = await worker.client.layout()
        except RegaugeError as error:
            get_logger().debug("no layout yet", worker=name, **{ERROR: str(error)})
            return False
        if layout is None:
            self._silent.add(name)
            return False
        self.learn(name, layout)
        return True
