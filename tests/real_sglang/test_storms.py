"""Clients that leave at any moment, and servers that are killed: no wrong text, and nothing left behind."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from sglang_client import Answer, prompt
from sglang_servers import OURS, Pair, Peer, Server, Side, Site, pair, settle

from regauge.testing.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(1_200)  # the first test waits for the servers
PROMPTS = [prompt(100 + n, 40 + 60 * n) for n in range(12)]
LONG = [prompt(200 + n, 2_000) for n in range(3)]
TOKENS = 24
REQUESTS = 200
AT_ONCE = 8
SOON_S = 1.0
# Chunks of 64 tokens: a transfer has many, and there is time to leave between them. SGLang looks every 4 s whether a client is still there.
NOTICED = {"SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}
PREFILL = Side(args=("--chunked-prefill-size", "64"), environment=NOTICED)
DECODE = Side(page=64, environment=NOTICED)


@dataclass
class Storm:
    """A pair whose servers are replaced by tests, and what one server alone answers."""

    site: Site
    both: Pair
    stack: ExitStack
    wanted: list[list[int]]
    wanted_long: list[list[int]]

    def replace(self, role: str) -> None:
        """Start the server of a role again, after its death."""
        side = PREFILL if role == "prefill" else DECODE
        peer = self.stack.enter_context(Peer(self.site, role, side))
        peer.ready()
        setattr(self.both, role, peer)

    def check(self) -> None:
        """Everything is whole: every prompt is answered right, and then nobody has anything of it."""
        for ids, wanted in zip(PROMPTS, self.wanted, strict=True):
            prefill, decode = self.both.through(ids, TOKENS)
            assert (decode.ids, decode.error, prefill.good) == (wanted, "", True)
        settle(self.both.at_rest)
        assert [server.ended() for server in (self.both.prefill, self.both.decode)] == [None, None]


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    model, folder = tiny_model("tiny-llama"), tmp_path_factory.mktemp("storm")
    with Server(model, folder / "alone.log", Side()) as one:
        one.ready()
        wanted = [[one.generate(ids, TOKENS).ids for ids in prompts] for prompts in (PROMPTS, LONG)]
    with ExitStack() as stack:
        site = Site(model, folder, OURS)
        both = stack.enter_context(pair(site, PREFILL, DECODE))
        both.ready()
        yield Storm(site, both, stack, *wanted)


def test_clients_leave_at_random_points(storm: Storm) -> None:
    rng, both = random.Random(6), storm.both
    counts = {"stayed": 0, "left": 0, "told": 0}
    for begin in range(0, REQUESTS, AT_ONCE):
        flight = []
        for number in range(begin, min(begin + AT_ONCE, REQUESTS)):
            n, leaves = rng.randrange(len(PROMPTS)), rng.choice(["nobody", "prefill", "decode", "both"])
            after = {side: rng.uniform(0.0, 0.5) for side in ("prefill", "decode") if leaves in (side, "both")}
            named: dict[str, Any] = {"rid": f"storm-{number}"} if rng.random() < 0.5 else {}
            legs = both.begin(PROMPTS[n], TOKENS, stream=rng.random() < 0.5, leave=after, **named)
            flight.append((n, after, legs))
        for n, after, (prefill, decode) in flight:
            judge(storm.wanted[n], prefill.result(), decode.result(), after, counts)
    print(f"\n{REQUESTS} requests: {counts}")
    assert min(counts.values()) > REQUESTS // 20
    settle(both.at_rest)
    storm.check()


def judge(
    wanted: Sequence[int], prefill: Answer, decode: Answer, after: dict[str, float], counts: dict[str, int]
) -> None:
    """Whoever stays is answered right, or told that the other one has gone; nobody sees a wrong token."""
    assert decode.ids == list(wanted[: len(decode.ids)]), (wanted, decode)
    assert prefill.ids == list(wanted[: len(prefill.ids)]), (wanted, prefill)
    if not after:
        counts["stayed"] += 1
        assert decode.ids == wanted, decode
        assert (decode.error, prefill.error) == ("", "")
    elif "decode" in after:
        counts["left"] += 1
    else:  # prefill's client has gone: in time for an error, or too late for it
        counts["told"] += 1
        assert (decode.ids == wanted and not decode.error) or (decode.error and decode.status in (200, 500)), decode


def begin_long(storm: Storm) -> list[tuple[Future[Answer], Future[Answer]]]:
    """Send prompts whose computation takes a while, and wait until they are under way."""
    storm.both.prefill.flush()
    begun = [storm.both.begin(ids, TOKENS, stream=n % 2 == 1) for n, ids in enumerate(LONG)]
    settle(lambda: storm.both.decode.used() >= len(LONG[0]))
    return begun


def test_prefill_is_killed_while_it_sends(storm: Storm) -> None:
    begun = begin_long(storm)
    killed = time.monotonic()
    storm.both.prefill.kill()
    answers = [decode.result() for _, decode in begun]
    took = time.monotonic() - killed
    print(f"\ndecode's clients were told within {took:.2f} s: {[answer.error[-100:] for answer in answers]}")
    for answer, wanted in zip(answers, storm.wanted_long, strict=True):
        assert answer.ids == wanted[: len(answer.ids)]
        assert answer.error or answer.ids == wanted
    assert any(answer.error for answer in answers), "the kill came too late to be seen"
    assert took < SOON_S
    settle(storm.both.decode.at_rest)
    assert storm.both.decode.ended() is None
    storm.replace("prefill")
    storm.check()


def test_decode_is_killed_while_it_receives(storm: Storm) -> None:
    begun = begin_long(storm)
    killed = time.monotonic()
    storm.both.decode.kill()
    answers = [prefill.result() for prefill, _ in begun]
    took = time.monotonic() - killed
    print(f"\nprefill's clients were told within {took:.2f} s: {[answer.error[-100:] for answer in answers]}")
    assert any(answer.error for answer in answers), "the kill came too late to be seen"
    settle(storm.both.prefill.at_rest)
    assert storm.both.prefill.ended() is None
    storm.replace("decode")
    storm.check()
