"""Who may be asked: the workers by role, without those that are down or left out; and who is slow beside its peers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from regauge.config_route import RouteConfig
from regauge.route.state import Standing

Role = Literal["prefill", "decode"]
SLOW_SHARE: Final = 3
"""One worker in so many of a role may be left out for slowness."""
Able = tuple[list[Standing], list[Standing], list[Standing]]
MOST_MODELS: Final = 100
"""Models whose workers are kept at hand."""


@dataclass(slots=True)
class Peers:
    """The workers of the same roles."""

    standings: list[Standing] = field(default_factory=list)
    least: float = 1.0
    """No ratio of theirs is below it: see `Breaker.ratio`."""


class Roster:
    """All workers, by name; `changed` has to be called for what changes who may be asked."""

    def __init__(self) -> None:
        self.workers: dict[str, Standing] = {}
        self._roles: dict[Role, list[Standing]] = {"prefill": [], "decode": []}
        self._peers: dict[tuple[bool, bool], Peers] = {}
        self._takers: dict[tuple[Role, str], list[Standing]] = {}
        self._all: Able | None = None

    def sort(self) -> None:
        """Workers have come or gone, or changed their roles."""
        self._peers = {}
        for role, standings in self._roles.items():
            standings[:] = [each for each in self.workers.values() if getattr(each.worker, role)]
        for each in self.workers.values():
            peers = self._peers.setdefault((each.worker.prefill, each.worker.decode), Peers())
            peers.standings.append(each)
            peers.least = min(peers.least, each.breaker.ratio)
        self.changed()

    def changed(self) -> None:
        """A worker is up or down, or left out."""
        self._takers.clear()
        self._all = None

    def able(self, now: float, model: str, exclude: frozenset[str]) -> Able:
        """Return who may compute a prompt, who may decode, and who of these can do both."""
        if self._all is not None and not model and not exclude:
            return self._all
        prefills, decodes = self.takers("prefill", now, model, exclude), self.takers("decode", now, model, exclude)
        found = prefills, decodes, [each for each in decodes if each.worker.computes]
        if not model and not exclude and ("prefill", "") in self._takers and ("decode", "") in self._takers:
            self._all = found  # nobody is left out for a while: see `takers`
        return found

    def takers(self, role: Role, now: float, model: str, exclude: frozenset[str]) -> list[Standing]:
        """Return who may be given a request: those in good standing, else those that were left out, rather than nobody."""
        able = self._takers.get((role, model))
        if able is None:
            able = [each for each in self._roles[role] if each.up and (not model or each.worker.model in ("", model))]
            if all(each.breaker.until is None for each in able):
                if len(self._takers) >= MOST_MODELS:
                    self._takers.clear()
                self._takers[role, model] = able
        elif not exclude:
            return able
        if exclude:
            able = [each for each in able if each.name not in exclude]
        return [each for each in able if each.breaker.until is None or each.breaker.takes(now)] or able

    def spare(self, standing: Standing) -> bool:
        """Return whether each role of a worker has another one in good standing."""
        return all(
            any(each is not standing and each.up and each.breaker.until is None for each in standings)
            for standings in self._roles.values()
            if standing in standings
        )

    def slow(self, standing: Standing, config: RouteConfig, now: float) -> None:
        """Leave a worker out if it is slow beside its peers; to be called when its ratio has changed."""
        worker, breaker = standing.worker, standing.breaker
        group = self._peers.get((worker.prefill, worker.decode))
        if group is None:
            return  # the last ones of these roles have left
        group.least = min(group.least, breaker.ratio)
        if not breaker.outlier(group.least, config):
            return  # not even beside the fastest one
        peers = [each.breaker for each in group.standings if each is not standing]
        group.least = min([1.0, breaker.ratio, *(peer.ratio for peer in peers)])
        # One that is only slow is better than others that are overloaded in its place: most of a role stays.
        out = 1 + sum(peer.until is not None for peer in peers)
        if breaker.slow(peers, config) and out * SLOW_SHARE <= len(peers) + 1 and self.spare(standing):
            breaker.eject(f"its requests take {breaker.ratio:.1f} times what is predicted", config, now)
            self.changed()
