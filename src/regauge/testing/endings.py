"""How transfers between real processes end when one is killed, stands still, gives up or loses its link.

`Pair` holds a prefill and a decode process (`link_process`); `endure` lets one of them come to harm in the middle of a transfer, and
`churn` runs many transfers, some of which end badly, to see what is left behind. Both raise `Violation`: a transfer did not end, a page
was written that was somebody else's, or a page is not free again.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from regauge.config import TransferConfig
from regauge.testing.child import Child
from regauge.testing.link_process import Role
from regauge.testing.violation import Violation

Side = Literal["prefill", "decode"]
Harm = Literal["kill", "short stop", "long stop"]
SIDES: tuple[Side, ...] = get_args(Side)
HARMS: tuple[Harm, ...] = get_args(Harm)
SHORT_STOP_S = 0.2
SEED = 7
"""Of prefill's pages."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of both processes. A page is 128 x layers x heads x dim bytes."""

    transfer: TransferConfig
    pages: int
    """Of a transfer."""
    spare: int
    """More pages that decode has."""
    layers: int = 16
    heads: int = 8
    dim: int = 128

    @property
    def tokens(self) -> int:
        """Tokens of a transfer."""
        return 16 * self.pages

    @property
    def bound_s(self) -> float:
        """Seconds after its grant in which a transfer must have ended on a side that runs, whatever the other does."""
        t = self.transfer
        return t.deadline_s + t.lease_s + t.resume_s + 2.0

    @property
    def begun_s(self) -> float:
        """Seconds after it was begun in which a transfer must have been granted, and then have ended."""
        return self.transfer.offer_s + self.bound_s


@dataclass
class Pair:
    """A prefill and a decode process."""

    shape: Shape
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    children: dict[Side, Child] = field(default_factory=dict)
    port: int = 0
    count: int = 0

    async def start(self, side: Side) -> None:
        """Start one of them; decode comes back where it was."""
        s = self.shape
        pages = s.pages + (s.spare if side == "decode" else 0)
        role = Role(side, side[0], self.key, pages, s.layers, s.heads, s.dim, SEED, s.transfer, self.port)
        self.children[side] = await Child.start(role)
        if side == "decode":
            self.port = self.children[side].facts["address"][1]

    def name(self) -> str:
        """Return the name of the next transfer."""
        self.count += 1
        return f"t{self.count}"

    async def begin(self, name: str, *, reach: float = 1.0, **options: Any) -> list[int]:
        """Let both begin a transfer; return prefill's pages. `options`: of `PrefillRank.send`."""
        tokens = self.shape.tokens
        await self.children["decode"].ask("expect", name=name, peers=["p"], tokens=tokens, reach=reach, keep=True)
        peers = {"d": ["127.0.0.1", self.port]}
        pages: list[int] = await self.children["prefill"].ask("send", name=name, peers=peers, tokens=tokens, **options)
        return pages

    async def quiet(self) -> None:
        """Wait until all pages are free and no transfer is known. Raises Violation when that takes too long."""
        limit = time.monotonic() + 30
        for side, child in self.children.items():
            pages = self.shape.pages + (self.shape.spare if side == "decode" else 0)
            while True:
                state = await child.ask("state")
                if state["transfers"] == 0 and state["free"] == pages:
                    break
                if time.monotonic() > limit:
                    raise Violation(f"{side} still has {state} of {pages} pages")
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """End both, also where ending one of them fails."""
        async with AsyncExitStack() as stack:
            for child in self.children.values():
                stack.push_async_callback(child.close)


@asynccontextmanager
async def pair(shape: Shape) -> AsyncIterator[Pair]:
    """Hold two processes."""
    out = Pair(shape)
    try:
        await out.start("decode")
        await out.start("prefill")
        yield out
    finally:
        await out.close()


@dataclass(frozen=True, slots=True)
class Ending:
    """How one transfer ended."""

    delivered: bool
    seconds: float
    """From the harm to the end of the transfer, on the slower of the sides that ran; after a stop from its end, for who stood still."""
    under_way: bool
    """Whether it had not ended when the harm came."""
    reasons: tuple[str, ...]


async def endure(
    pair: Pair,
    victim: Side,
    harm: Harm,
    reach: float,
    *,
    pace_s: float = 0.0,
    after_s: float = 0.0005,
    alone: bool = False,
) -> Ending:
    """Harm one side in the middle of a transfer. Raises Violation: see the module.

    Prefill is struck `after_s` seconds into a write, decode when it has verified a share of `reach`; `pace_s`: see `link_process`.
    A side is its worker and the carriers in which a library runs, if any; `alone`: only the worker is struck, and they go on.
    """
    decode, child = pair.children["decode"], pair.children[victim]
    survivor = pair.children["prefill" if victim == "decode" else "decode"]
    number = signal.SIGKILL if harm == "kill" else signal.SIGSTOP
    name, bound = pair.name(), pair.shape.bound_s
    strike = (1 + int(reach * min(6, pair.shape.layers - 2)), after_s, number, alone) if victim == "prefill" else None
    source = await pair.begin(name, reach=reach if strike is None else 2.0, pace_s=pace_s, strike=strike)
    if strike is None:
        await _within(decode.event("reached", name), pair.shape.begun_s, f"{name} never got under way")
        under_way = not decode.event("ended", name).done()
        child.signal(number, alone=alone)
    else:
        under_way = await child.struck(decode.event("reached", name), pair.shape.begun_s)
        if not under_way:
            child.signal(number, alone=alone)
    ends: list[_End] = [await _harmed(pair, name, survivor, harm)]
    if harm == "kill":
        await child.close()
        await pair.start(victim)
    else:
        resumed = time.monotonic()
        child.signal(signal.SIGCONT, alone=alone)
        ends += [await _end(each, name, resumed, bound) for each in (child, survivor)]
    delivered = decode.process.returncode is None and decode.event("ended", name).result()["delivered"]
    if delivered and (wrong := await decode.ask("take", name=name, source=source, seed=SEED)):
        raise Violation(f"{name} was delivered, and pages {wrong} do not hold what was sent")
    await pair.quiet()
    if wrong := await pair.children["decode"].ask("foreign"):
        raise Violation(f"after {name}: pages {wrong} were somebody else's, and have been written")
    told = tuple(event["reason"] for event, _ in ends if event is not None and not event["delivered"])
    return Ending(delivered, max(seconds for _, seconds in ends), under_way, told)


_End = tuple[dict[str, Any] | None, float]


async def _harmed(pair: Pair, name: str, survivor: Child, harm: Harm) -> _End:
    """Wait for what the other side makes of it, while the victim is gone."""
    since = time.monotonic()
    if harm == "short stop":
        await asyncio.sleep(SHORT_STOP_S)
        return None, 0.0
    return await _end(survivor, name, since, pair.shape.bound_s)


async def _end(child: Child, name: str, since: float, bound_s: float) -> tuple[dict[str, Any], float]:
    event = await _within(child.event("ended", name), bound_s, f"{name} did not end within {bound_s:g} s")
    return event, max(0.0, event["at"] - since)


async def _within(future: asyncio.Future[dict[str, Any]], seconds: float, why: str) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(asyncio.shield(future), seconds)
    except TimeoutError:
        raise Violation(why) from None


CHURN: dict[str, float] = {
    "delivered": 0.75, "prefill gives up": 0.08, "decode gives up": 0.08, "lengths differ": 0.06, "prefill loses its link": 0.015,
    "decode loses its link": 0.015,
}  # fmt: skip
"""Shares of what happens to a transfer of `churn`."""


@dataclass(frozen=True, slots=True)
class Left:
    """What many transfers have left behind."""

    before: dict[Side, dict[str, int]]
    after: dict[Side, dict[str, int]]
    counts: dict[str, int]
    delivered: int

    def more(self) -> list[str]:
        """Say of what there is more than before: descriptors, threads, segments, processes, memory; or fewer free pages."""
        slack = {"fds": 2, "threads": 2, "segments": 0, "processes": 0, "rss_kib": 32 << 10, "free": 0, "transfers": 0}
        return [
            f"{side}: {what} {was} -> {self.after[side][what]}"
            for side, state in self.before.items()
            for what, was in state.items()
            if abs(self.after[side][what] - was) > slack[what]
            and (self.after[side][what] > was or what in ("free", "segments"))
        ]


async def churn(pair: Pair, transfers: int, seed: int, *, at_once: int = 8, pages: int = 4) -> Left:
    """Run many transfers, several at once. Raises Violation if one does not end, or a foreign page is written."""
    draw, counts, delivered = random.Random(seed), dict.fromkeys(CHURN, 0), 0  # noqa: S311  # a choice, not a secret
    await _together(pair, ["delivered"] * at_once, pages)
    await _together(pair, ["prefill loses its link"], pages)
    before = await _linked(pair, pages)
    left = transfers
    while left:
        kinds = draw.choices(list(CHURN), list(CHURN.values()), k=min(at_once, left))
        left -= len(kinds)
        delivered += await _together(pair, kinds, pages)
        for kind in kinds:
            counts[kind] += 1
    after = await _linked(pair, pages)
    if wrong := await pair.children["decode"].ask("foreign"):
        raise Violation(f"pages {wrong} were somebody else's, and have been written")
    return Left(before, after, counts, delivered)


async def _linked(pair: Pair, pages: int) -> dict[Side, dict[str, int]]:
    """Return what both use when nothing is under way and they are linked: a link has threads and memory of its own."""
    await _together(pair, ["delivered"], pages)
    await pair.quiet()
    return {side: await child.ask("state") for side, child in pair.children.items()}


async def _together(pair: Pair, kinds: list[str], pages: int) -> int:
    names = [pair.name() for _ in kinds]
    delivered = await asyncio.gather(*(_one(pair, *item, pages) for item in zip(names, kinds, strict=True)))
    return sum(delivered)


async def _one(pair: Pair, name: str, kind: str, pages: int) -> bool:
    prefill, decode = pair.children["prefill"], pair.children["decode"]
    await decode.ask("expect", name=name, peers=["p"], tokens=16 * pages)
    tokens = 16 * pages - (kind == "lengths differ")
    await prefill.ask("send", name=name, peers={"d": ["127.0.0.1", pair.port]}, tokens=tokens)
    if kind == "prefill gives up":
        await prefill.ask("cancel", name=name, reason="churn")
    elif kind == "decode gives up":
        await decode.ask("cancel", transfer=name, reason="churn")
    elif kind.endswith("loses its link"):
        await (prefill if kind.startswith("prefill") else decode).ask("lose_link")
    ends = [await _end(child, name, 0.0, pair.shape.bound_s + 10) for child in (decode, prefill)]
    for child in (decode, prefill):
        child.forget(name)
    return bool(ends[0][0]["delivered"])
