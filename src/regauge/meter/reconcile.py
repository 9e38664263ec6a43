"""The receipts of one request -> one entry: agreed, or what differs and what lacks. Pure; neither order nor repetition matters.

| status | meaning | charged |
|---|---|---|
| agreed | every side that must speak has, and all say the same | yes |
| missing | a side that must speak has not yet | no |
| differs | two sides, or two receipts of one side, say different things | no |
| void | the request failed, or was cancelled before it had a token | no |

The gateway speaks of every request. It names the workers, and those must speak: prefill unless decode computed the prompt itself, decode
unless it was lost (`resumed`), neither where the gateway says that it cannot (`silent`); the entry says so, too. Of a void request nobody else must.

A side that was lost, as the gateway says, and speaks after all counts if it saw its part to the end, and else is not compared.

What the client did not wait for may differ: where the gateway did not see a request to its end, decode may have generated more than was
delivered. What counts is what was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec

from regauge.meter.receipt import SIDES, Count, Outcome, PathName, Receipt, Side, canonical

Status = Literal["agreed", "missing", "differs", "void"]
Said = int | str | dict[PathName, Count] | None

GRACE_S: Final = 60.0
"""A receipt that comes later than so many seconds after the request's end is late."""
SKEW_S: Final = 60.0
"""A worker's times lie within the gateway's, give or take so many seconds: clocks differ."""

_NAMES: Final = ("tenant", "model", "route", "prefill", "decode", "resumes", "digest")
_COUNTS: Final = ("prompt", "cached", "computed", "transferred", "converted", "generated", "wire_bytes")


class Difference(msgspec.Struct, frozen=True):
    """A field of which not all say the same."""

    field: str
    values: dict[str, Said]
    """By side; the second receipt of a side is `SIDE#2`."""

    def text(self) -> str:
        """Return it as a line for people."""
        return f"{self.field}: " + ", ".join(f"{side} says {value!r}" for side, value in self.values.items())


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one request. Counts are what the first side in the order of SIDES says that knows them."""

    request: str
    status: Status
    tenant: str
    model: str
    route: str
    prefill: str
    decode: str
    outcome: Outcome
    resumes: str
    recovered: bool
    at_us: int
    """The request's arrival; what is charged is charged at that time."""
    ended_us: int
    """The last side's end."""
    prompt: int
    cached: int
    computed: int
    transferred: int
    converted: int
    generated: int
    wire_bytes: dict[PathName, int]
    silent: tuple[Side, ...] = ()
    """Sides that cannot speak, as the gateway says."""
    missing: tuple[Side, ...] = ()
    late: tuple[Side, ...] = ()
    differences: tuple[Difference, ...] = ()

    @property
    def charged(self) -> tuple[int, int, int]:
        """Tokens to be paid for: cached input, uncached input, output. A request that goes on from another, or answers its prompt once more, pays no input."""
        if self.status != "agreed":
            return 0, 0, 0
        cached, uncached = (0, 0) if self.resumes else (self.cached, self.computed)
        return cached, uncached, self.generated


class Arrival(msgspec.Struct, frozen=True):
    """A receipt, and when it came (microseconds since 1970); None: not known."""

    receipt: Receipt
    at_us: int | None = None


def reconcile(arrivals: Iterable[Arrival], *, grace_s: float = GRACE_S, skew_s: float = SKEW_S) -> Entry:
    """Return the entry of one request. Raises ValueError for none, and for receipts of several requests."""
    sides, firsts = _by_side(arrivals)
    receipts = {side: found[0] for side, found in sides.items()}
    first = next(iter(receipts.values()))
    gateway = receipts.get("gateway")
    void = gateway is not None and _void(gateway)
    compared = {side: r for side, r in receipts.items() if not _came_late(side, r, gateway)}
    differences = (*_contradictions(sides), *_differences(compared, void=void, skew_us=int(skew_s * 1e6)))
    missing = _missing(receipts, void=void)
    ended_us = max(r.ended_us for r in receipts.values())
    late = tuple(side for side, at_us in firsts.items() if at_us is not None and at_us > ended_us + int(grace_s * 1e6))
    known: dict[str, Any] = {name: _first(compared, name, "") for name in _NAMES if name != "digest"}
    known |= {name: _first(compared, name, 0) for name in _COUNTS}
    known["wire_bytes"] = known["wire_bytes"] or {}
    return Entry(
        request=first.request,
        status="differs" if differences else "void" if void else "missing" if missing else "agreed",
        outcome=first.outcome, recovered=any(r.recovered for r in receipts.values()),
        at_us=first.began_us, ended_us=ended_us, silent=gateway.silent if gateway is not None else (), missing=missing, late=late, differences=differences, **known,
    )  # fmt: skip


def reconcile_all(arrivals: Iterable[Arrival], *, grace_s: float = GRACE_S, skew_s: float = SKEW_S) -> list[Entry]:
    """Return the entries of many requests, by their ids in order."""
    requests: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        requests.setdefault(arrival.receipt.request, []).append(arrival)
    return [reconcile(requests[name], grace_s=grace_s, skew_s=skew_s) for name in sorted(requests)]


def recover(
    entry: Entry, receipts: Mapping[Side, Receipt], by: str, dumb: Collection[str] = frozenset()
) -> Receipt | None:
    """Return the gateway's receipt, lost with its process, as the workers' receipts have it; None where they do not suffice.

    They must agree, decode's must be there, and they must name the tenant. Prefill's is needed if decode names a prefill worker. It is for the
    gateway `by` to sign. What it says is decode's word: tokens that the client never saw are among them where it went away.

    Where decode did not come to its end, nobody knows what the client got, and the request has failed with its gateway: it is void.
    Likewise if who lacks are workers in `dumb`, which have been asked since and have no receipt of it.
    """
    if _ended_with_gateway(entry, receipts, dumb):
        return Receipt(
            request=entry.request, side="gateway", by=by, tenant=entry.tenant, model=entry.model, route=entry.route,
            prefill=entry.prefill, decode=entry.decode, began_us=min(r.began_us for r in receipts.values()),
            ended_us=max(r.ended_us for r in receipts.values()), outcome="failed", resumes=entry.resumes, recovered=True,
            prompt=entry.prompt, cached=0, computed=0, generated=0,
        )  # fmt: skip
    decode, prefill = receipts.get("decode"), receipts.get("prefill")
    knows = prefill if decode is not None and decode.prefill else decode
    if entry.missing != ("gateway",) or entry.status != "missing" or decode is None or knows is None:
        return None
    if knows.cached is None or not entry.tenant or decode.outcome != "complete":
        return None
    ends = [r for r in (decode, prefill) if r is not None]
    return Receipt(
        request=entry.request, side="gateway", by=by, tenant=entry.tenant, model=entry.model, route=entry.route,
        prefill=decode.prefill, decode=decode.by, began_us=min(r.began_us for r in ends),
        ended_us=max(r.ended_us for r in ends), outcome="complete", resumes=entry.resumes, recovered=True,
        prompt=entry.prompt, cached=knows.cached, computed=knows.computed, generated=decode.generated,
    )  # fmt: skip


def _ended_with_gateway(entry: Entry, receipts: Mapping[Side, Receipt], dumb: Collection[str]) -> bool:
    if "gateway" not in entry.missing or not entry.tenant:
        return False
    named = {"prefill": entry.prefill, "decode": entry.decode}
    others = [side for side in entry.missing if side != "gateway"]
    if others:
        return all(named[side] in dumb for side in others)
    return "decode" in receipts and receipts["decode"].outcome != "complete"


def _came_late(side: Side, receipt: Receipt, gateway: Receipt | None) -> bool:
    return gateway is not None and side in gateway.silent and receipt.outcome != "complete"


def _by_side(arrivals: Iterable[Arrival]) -> tuple[dict[Side, list[Receipt]], dict[Side, int | None]]:
    """Each side's receipts without repetitions, in an order that is theirs alone, and when the side first spoke."""
    found: dict[Side, dict[bytes, Receipt]] = {}
    times: dict[Side, list[int | None]] = {}
    requests = set()
    for arrival in arrivals:
        receipt = arrival.receipt
        requests.add(receipt.request)
        found.setdefault(receipt.side, {})[canonical(receipt)] = receipt
        times.setdefault(receipt.side, []).append(arrival.at_us)
    if len(requests) != 1:
        raise ValueError(f"give receipts of one request, not of {len(requests)}")
    for side, said in found.items():
        if any(not r.recovered for r in said.values()):  # the lost receipt was not lost: it counts
            found[side] = {key: r for key, r in said.items() if not r.recovered}
    sides = {side: [found[side][key] for key in sorted(found[side])] for side in SIDES if side in found}
    firsts = {side: min((t for t in times[side] if t is not None), default=None) for side in sides}
    return sides, firsts


def _void(gateway: Receipt) -> bool:
    return gateway.outcome == "failed" or (gateway.outcome == "cancelled" and not gateway.generated)


def _missing(receipts: Mapping[Side, Receipt], *, void: bool) -> tuple[Side, ...]:
    if void:
        return ()
    gateway = receipts.get("gateway")
    must: set[Side] = {"gateway", "prefill", "decode"}
    if gateway is not None:
        must -= {"prefill"} if not gateway.prefill else set()
        must -= set(gateway.silent)
        must -= {"decode"} if gateway.outcome == "resumed" else set()
    elif "decode" in receipts and not receipts["decode"].prefill:
        must -= {"prefill"}
    return tuple(side for side in SIDES if side in must and side not in receipts)


def _first(receipts: Mapping[Side, Receipt], name: str, default: Any) -> Any:
    return next((said for r in receipts.values() if (said := getattr(r, name)) not in (None, "")), default)


def _contradictions(sides: Mapping[Side, list[Receipt]]) -> Iterator[Difference]:
    """What a side says otherwise in another receipt."""
    for side, receipts in sides.items():
        for number, other in enumerate(receipts[1:], start=2):
            for field in Receipt.__struct_fields__:
                ours, theirs = getattr(receipts[0], field), getattr(other, field)
                if ours != theirs:
                    yield Difference(f"{side}.{field}", {side: ours, f"{side}#{number}": theirs})


def _differences(receipts: Mapping[Side, Receipt], *, void: bool, skew_us: int) -> Iterator[Difference]:
    gateway = receipts.get("gateway")
    for name in _NAMES + _COUNTS:
        if void and name in _COUNTS[1:]:
            continue  # an end in the midst of it finds each side elsewhere
        unknown = (
            (None,) if name == "resumes" else (None, "")
        )  # no name is an answer there: it decides on the input's price
        said: dict[str, Said] = {side: v for side, r in receipts.items() if (v := getattr(r, name)) not in unknown}
        if name == "generated" and _cut(receipts):
            continue
        if name == "prefill" and gateway is not None and not gateway.prefill and said:
            said = {"gateway": "", **said}  # it says that there was none
        values = list(said.values())
        if values.count(values[0] if values else None) != len(values):
            yield Difference(name, said)
    if gateway is not None:
        yield from _against(gateway, receipts, void=void)
        yield from _times(gateway, receipts, skew_us=skew_us)


def _cut(receipts: Mapping[Side, Receipt]) -> bool:
    """Say whether decode generated more than a gateway delivered that did not see the end."""
    gateway, decode = receipts.get("gateway"), receipts.get("decode")
    if gateway is None or decode is None or gateway.outcome == "complete":
        return False
    return (decode.generated or 0) > (gateway.generated or 0)


def _cut_at_the_end(gateway: Receipt) -> bool:
    """Say whether a gateway ended a request, perhaps just as decode did: then what was delivered is charged all the same."""
    return gateway.outcome == "cancelled" and bool(gateway.generated)


def _against(gateway: Receipt, receipts: Mapping[Side, Receipt], *, void: bool) -> Iterator[Difference]:
    """Ends that do not go together: only what came about can have been delivered, and what is whole was."""
    prefill, decode = receipts.get("prefill"), receipts.get("decode")
    apart: dict[str, Said]
    if gateway.outcome == "complete":
        apart = {side: r.outcome for side, r in receipts.items() if r.outcome != "complete"}
    elif decode is not None and decode.outcome == "complete" and not _cut(receipts) and not _cut_at_the_end(gateway):
        apart = {"decode": decode.outcome}
    elif prefill is not None and prefill.outcome != "complete" and not void:
        apart = {"prefill": prefill.outcome}
    else:
        return
    if apart:
        yield Difference("outcome", {"gateway": gateway.outcome, **apart})


def _times(gateway: Receipt, receipts: Mapping[Side, Receipt], *, skew_us: int) -> Iterator[Difference]:
    for side, r in receipts.items():
        if r.began_us < gateway.began_us - skew_us:
            yield Difference("began_us", {"gateway": gateway.began_us, side: r.began_us})
        if r.ended_us > gateway.ended_us + skew_us and gateway.outcome == "complete":
            yield Difference("ended_us", {"gateway": gateway.ended_us, side: r.ended_us})
