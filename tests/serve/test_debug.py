"""`/debug/transfers` of gateway and workers, and the metrics that the workers' totals become."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from serve_rig import Rig, open_rig

from regauge.errors import ProtocolError
from regauge.move.protocol import LegState, TransferState
from regauge.move.state import MAX_SHOWN, SHOWN, Hidden, LinkState, SessionState, Totals, WorkerState, bounded, shown
from regauge.serve.debug import Overview, is_loopback
from regauge.serve.server import Server
from regauge.serve.text import Tokenizer

PATH = "/debug/transfers"


def transfer(name: str, age_s: float = 1.0, *, legs: int = 1, reason: str = "") -> TransferState:
    return TransferState(name, "decode", "granted", 100, age_s, 9.0, reason,
                         [LegState(f"p{i}", "granted", 1, 1, 4, 0, 1000, None, 0, 0.5) for i in range(legs)])  # fmt: skip


async def look(rig: Rig, query: str = "") -> Overview:
    status, body, _ = await rig.get(PATH + query)
    assert status == 200, body
    return msgspec.convert(body, Overview)


@pytest.mark.anyio
async def test_the_gateway_shows_all_workers(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.transfers = [transfer("old", 8.0), transfer("new", 2.0)]
        rig.decode.totals = Totals(5, 5000, {"lease": 1}, 2, 3)
        seen = await look(rig)
        assert (seen.model, seen.path, seen.requests) == ("echo-1", "CONVERT", 0)
        assert abs(seen.unix_s - time.time()) < 60
        assert [(w.name, w.role, w.up, w.reason) for w in seen.workers] == [
            ("prefill-0", "prefill", True, ""), ("decode-0", "decode", True, "")]  # fmt: skip
        prefill, decode = (w.state for w in seen.workers)
        assert prefill is not None
        assert decode is not None
        assert prefill.transfers == []
        assert decode.transfers == [transfer("new", 2.0), transfer("old", 8.0)], "newest first"
        assert decode.totals == rig.decode.totals
        assert decode.links == [LinkState("peer", "up", "CONVERT", ["staged"], 5.0, "5e5510")]
        assert (decode.pools[0].pages, decode.pools[0].free) == (64, 64)
        again = (await look(rig, "?limit=1")).workers[1].state
        assert again is not None
        assert ([t.transfer for t in again.transfers], again.hidden) == (["new"], Hidden(transfers=1))
        assert again.clock_s > decode.clock_s


@pytest.mark.anyio
async def test_a_worker_that_does_not_answer_hides_nobody_else(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.frozen = asyncio.Event()
        seen = await look(rig)
        assert [w.state is None for w in seen.workers] == [False, True]
        assert "decode-0" in seen.workers[1].reason
        rig.decode.frozen.set()
        await rig.decode.stop()
        seen = await look(rig)
        assert [w.state is None for w in seen.workers] == [False, True]
        assert seen.workers[1].reason


@pytest.mark.anyio
async def test_only_this_machine_may_look(rig: Rig) -> None:
    async with rig.client.get(rig.base + PATH, headers={"X-Forwarded-For": "10.1.2.3"}) as answer:
        assert answer.status == 403
        assert "loopback" in (await answer.json())["error"]["message"]
    assert rig.sample("regauge_requests_total", route=PATH, status="403") >= 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("proxy", "client", "status"),
    [
        *((own, "10.1.2.3", 403) for own in ("127.0.0.1", "::1", "::ffff:127.0.0.1")),
        ("::1", "127.0.0.1", 200),
        ("10.1.2.3", "127.0.0.1", 403),  # a stranger's word for where it is
    ],
)
async def test_what_a_proxy_on_this_machine_passes_on_is_its_clients(
    rig: Rig, proxy: str, client: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if proxy == "10.1.2.3":
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn's own, which is not asked
    config = Server(rig.server.config.app).config
    config.load()
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"x-forwarded-for", client.encode())], "client": (proxy, 1), "server": ("x", 1), "state": {},
    }  # fmt: skip
    await config.loaded_app(scope, receive, send)
    assert sent[0]["status"] == status


@pytest.mark.anyio
@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "", "²", "1e3", "9" * 400])
async def test_a_limit_is_a_small_number(rig: Rig, limit: str) -> None:
    status, body, _ = await rig.get(f"{PATH}?limit={limit}")
    assert (status, body["error"]["param"]) == (400, "limit")
    assert "from 1 to 1000" in body["error"]["message"]


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False),
     ("::ffff:10.0.0.1", False), ("fe80::1", False), ("localhost", False), ("", False)],
)  # fmt: skip
def test_whose_address_is_loopback(host: str, own: bool) -> None:
    assert is_loopback(host) is own


def test_limits() -> None:
    assert (shown(None), shown("1"), shown(str(MAX_SHOWN))) == (SHOWN, 1, MAX_SHOWN)
    with pytest.raises(ProtocolError):
        shown("01001")


def test_an_answer_is_bounded_and_says_what_it_leaves_out() -> None:
    many = [transfer(f"t{age}", float(age), legs=100, reason="x" * 9_000) for age in (3, 1, 2)]
    links = [LinkState(f"p{age}", "up", up_s=age) for age in (3.0, 1.0, 2.0)]
    sessions = [SessionState("p", name, 1) for name in "abc"]
    whole = WorkerState("d", "decode", 1, 1.0, many, links, [], sessions, Totals())
    state = bounded(whole, 2)
    assert state.hidden == Hidden(1, 1, 1)
    assert [t.transfer for t in state.transfers] == ["t1", "t2"]
    assert {(len(t.legs), len(t.reason)) for t in state.transfers} == {(64, 500)}
    assert [link.peer for link in state.links] == ["p1.0", "p2.0"]
    assert [x.session for x in state.sessions] == ["b", "c"]
    assert bounded(whole, 3).hidden == Hidden()


@pytest.mark.anyio
async def test_totals_become_counters_and_a_restarted_worker_counts_on(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        who = {"worker": "decode-0", "role": "decode"}

        def figures() -> list[float]:
            failed = [
                rig.sample("regauge_transfer_failures_total", reason=reason, **who) for reason in ("lease", "other")
            ]
            names = ("transfer_resent_chunks_total", "transfer_resumed_legs_total", "pool_quarantined_pages")
            return [*failed, *(rig.sample(f"regauge_{name}", **who) for name in names)]

        rig.decode.quarantined = 7
        rig.decode.totals = Totals(9, 9, {"lease": 2}, 3, 4)
        await rig.until(lambda: figures() == [2, 0, 3, 4, 7])
        rig.decode.totals = Totals(9, 9, {"lease": 3, "made-up": 1}, 5, 4)
        await rig.until(lambda: figures() == [3, 1, 5, 4, 7])
        rig.decode.pid, rig.decode.totals = 2, Totals(0, 0, {"lease": 1}, 1, 0)
        rig.decode.quarantined = 0
        await rig.until(lambda: figures() == [4, 1, 6, 4, 0])
