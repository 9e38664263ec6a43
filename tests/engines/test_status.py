"""What a rank tells about its transfers, over real HTTP: while they run, afterwards, and to whom."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ends_rig import KEY, MODEL, Ends, ended, open_ends, soon

import regauge
from certificates import Authority
from regauge.config import TlsConfig
from regauge.engines import status_door
from regauge.engines.ended import Ended
from regauge.engines.status import Status, TransferEnd, token
from regauge.engines.status_door import StatusDoor
from regauge.errors import ConfigError
from regauge.move.events import Traces
from regauge.serve import wire
from regauge.serve.vllm import VllmClient

TOKEN = token(KEY)
Address = tuple[str, int]


def ask(address: Address, path: str, *, auth: str | None = f"Bearer {TOKEN}", method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*address, timeout=40)
    with contextlib.closing(connection):
        connection.request(method, path, headers={} if auth is None else {"Authorization": auth})
        answer = connection.getresponse()
        assert answer.headers.get_content_type() == "application/json"
        return answer.status, msgspec.json.decode(answer.read())


def look(address: Address, query: str = "") -> Status:
    code, body = ask(address, "/status" + query)
    assert code == 200, body
    return msgspec.json.decode(msgspec.json.encode(body), type=Status)


def end_of(address: Address, name: str, wait_s: float = 20.0) -> TransferEnd:
    code, body = ask(address, f"/transfers/{name}?wait_s={wait_s}")
    assert code == 200, body
    return msgspec.convert(body, TransferEnd)


@dataclass
class Doors:
    ends: Ends
    prefill: StatusDoor
    decode: StatusDoor


@contextlib.contextmanager
def open_doors(**more: Any) -> Iterator[Doors]:
    with open_ends("tcp", **more) as ends, contextlib.ExitStack() as stack:
        doors = [
            StatusDoor([end], memory.layout, KEY, ends.config, engine="vllm", port=0)
            for end, memory in ((ends.out, ends.source), (ends.into, ends.target))
        ]
        for door in doors:
            stack.callback(door.close)
        yield Doors(ends, *doors)


@pytest.fixture
def doors() -> Iterator[Doors]:
    with open_doors() as made:
        yield made


def test_a_transfer_is_shown_while_it_runs_and_its_end_afterwards(doors: Doors) -> None:
    ends = doors.ends
    ends.begin("x", 200)
    ends.out.ready("x", (0, 1), (0, 200))

    def progress() -> bool:
        [state] = look(doors.decode.address).states
        return any(leg.progress > 0 for t in state.transfers for leg in t.legs)

    soon(ends.into, progress)
    decode, prefill = look(doors.decode.address), look(doors.prefill.address)
    assert (decode.name, decode.engine, decode.version) == ("d.0", "vllm", regauge.__version__)
    [into], [out] = decode.states, prefill.states
    assert (into.role, out.role) == ("decode", "prefill")
    assert [t.transfer for t in into.transfers] == [t.transfer for t in out.transfers] == ["x"]
    assert [(link.peer, link.path) for link in into.links] == [("p.0", "REMAP")]
    assert [(link.peer, link.path) for link in out.links] == [("d.0", "REMAP")]
    assert [(p.pages, p.page_size, p.free, p.leased) for p in into.pools] == [(24, 16, None, 13)]
    assert [s.peer for s in into.sessions] == ["p.0"]
    assert [nic.transfers for nic in into.nics] == [1]
    assert ask(doors.decode.address, "/transfers/x")[0] == 404, "it has not ended"

    ends.complete("x", 200, first=1)
    there, here = end_of(doors.decode.address, "x"), end_of(doors.prefill.address, "x")
    assert there.wire_bytes == 200 * 3 * 2 * 2 * 16 * 2
    assert there.seconds > 0
    mode = into.links[0].modes[0]
    told = there.stages, there.spans
    assert there == TransferEnd("x", "decode", "", "", "REMAP", mode, there.wire_bytes, there.seconds, *told)
    assert there.stages is not None
    assert sum(msgspec.structs.astuple(there.stages)[2:]) == pytest.approx(there.seconds)
    assert there.spans > 0
    assert here == TransferEnd("x", "prefill", "", "", "REMAP", mode, there.wire_bytes, here.seconds)
    for address in (doors.decode.address, doors.prefill.address):
        [state] = look(address).states
        assert state.transfers == []
        totals = state.totals
        assert (totals.delivered, totals.wire_bytes) == (1, there.wire_bytes)
        assert (totals.landed or {"REMAP": totals.sent}) == {"REMAP": there.wire_bytes}
    assert ended(ends.into).transfer == ended(ends.out).transfer == "x"  # the engine is told as well


def test_what_happened_to_a_transfer_is_told_by_each_end(doors: Doors) -> None:
    doors.ends.begin("a/b c", 200)
    doors.ends.complete("a/b c", 200)
    nbytes = end_of(doors.decode.address, "a%2Fb%20c").wire_bytes
    for address, name, chunk, layers in (
        (doors.prefill.address, "p.0", "gather", 3),
        (doors.decode.address, "d.0", "written", 0),
    ):
        code, body = ask(address, "/trace/a%2Fb%20c")
        assert code == 200
        told = msgspec.convert(body, Traces)
        assert 0 <= time.monotonic() - told.clock_s < 20
        [trace] = told.traces
        assert (trace.worker, trace.transfer, trace.more) == (name, "a/b c", 0)
        names = [event.name for event in trace.events]
        assert {"offer", "grant", "commit", "delivered"} <= set(names)
        assert sum(event.nbytes or 0 for event in trace.events if event.name == chunk) == nbytes
        computed = {layer for e in trace.events if e.name == "computed" and e.layers for layer in range(*e.layers)}
        assert computed == set(range(layers)), "as the engine says that they are there"
    code, body = ask(doors.decode.address, "/trace/nobody")
    assert (code, body["traces"]) == (200, [])


def test_the_gateways_client_asks_every_rank(doors: Doors) -> None:
    doors.ends.begin("x", 200)
    doors.ends.complete("x", 200)
    end_of(doors.decode.address, "x")
    ranks = [
        wire.RankAddress(name, ("127.0.0.1", 1), f"http://{door.address[0]}:{door.address[1]}")
        for name, door in (("d.0", doors.decode), ("p.0", doors.prefill))
    ]
    address = wire.WorkerAddress("w", "decode", "http://127.0.0.1:1", ranks, engine="vllm")

    async def asked() -> list[Traces]:
        client = VllmClient(address, "", "m", KEY)
        try:
            return await client.trace("x", asyncio.get_running_loop().time() + 20)
        finally:
            await client.close()

    assert [[trace.worker for trace in each.traces] for each in asyncio.run(asked())] == [["d.0"], ["p.0"]]


def test_an_end_is_waited_for_also_before_its_transfer_is_known(doors: Doors) -> None:
    found: list[TransferEnd] = []
    asking = [
        threading.Thread(target=lambda at=address: found.append(end_of(at, "a%2Fb%20c")))
        for address in (doors.decode.address, doors.prefill.address)
    ]
    for thread in asking:
        thread.start()
    doors.ends.begin("a/b c")
    doors.ends.complete("a/b c")
    for thread in asking:
        thread.join(30)
    assert [(end.transfer, end.error) for end in found] == [("a/b c", "")] * 2
    assert {end.role for end in found} == {"decode", "prefill"}


def test_why_a_pair_is_refused_is_told_on_both_sides() -> None:
    other = msgspec.structs.replace(MODEL, states=[msgspec.structs.replace(s, rope=None) for s in MODEL.states])
    with open_doors(decode_model=other) as doors:
        doors.ends.begin("x")
        for address in (doors.prefill.address, doors.decode.address):
            end = end_of(address, "x")
            assert "rope" in end.error
            assert (end.reason, end.path, end.mode, end.wire_bytes) == ("refused", "", "", 0)
            assert look(address).states[0].totals.failed == {"refused": 1}


def test_layouts_are_read_back_equal_and_without_addresses(doors: Doors) -> None:
    for door, memory in ((doors.prefill, doors.ends.source), (doors.decode, doors.ends.target)):
        told = look(door.address)
        assert told.read_layout() == msgspec.structs.replace(memory.layout, regions=[])
        assert str(memory.slab.address) not in bytes(told.layout).decode()


@pytest.mark.parametrize(
    "auth", [None, "", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}0", f"Basic {TOKEN}", "Bearer é"]
)
def test_only_who_holds_the_key_may_ask(doors: Doors, auth: str | None) -> None:
    for path in ("/status", "/transfers/x", "/trace/x", "/other"):
        code, body = ask(doors.decode.address, path, auth=auth)
        assert (code, body) == (401, {"error": "wrong or missing bearer token"})


@pytest.mark.parametrize(
    ("path", "code", "error"),
    [
        ("/transfers/x", 404, "no end of a transfer 'x' is known"),
        ("/transfers/x?wait_s=0.01", 404, "no end of a transfer 'x' is known"),
        ("/transfers/" + "y" * 300, 404, "no end of a transfer '" + "y" * 200 + "' is known"),
        ("/transfers/x?wait_s=30.5", 400, "wait_s must be a number of seconds from 0 to 30"),
        ("/transfers/x?wait_s=-1", 400, "wait_s must be"),
        ("/transfers/x?wait_s=nan", 400, "wait_s must be"),
        ("/transfers/x?wait_s=soon", 400, "wait_s must be"),
        ("/status?limit=0", 400, "limit must be a whole number from 1 to 1000"),
        ("/", 404, "there is /status, /transfers/NAME and /trace/NAME"),
    ],
)
def test_what_cannot_be_answered_is_said(doors: Doors, path: str, code: int, error: str) -> None:
    found, body = ask(doors.decode.address, path)
    assert found == code
    assert error in body["error"]


def test_only_questions_are_taken(doors: Doors) -> None:
    assert ask(doors.decode.address, "/status", method="POST") == (405, {"error": "POST: only GET is known here"})


def test_one_door_answers_for_both_roles_of_a_rank() -> None:
    with open_ends("tcp") as ends:
        door = StatusDoor([ends.out, ends.into], ends.source.layout, KEY, ends.config, engine="vllm", port=0)
        ends.begin("x")
        ends.into.note(Ended("in", "no"))
        ends.out.note(Ended("out", "no"))
        assert [state.role for state in look(door.address).states] == ["prefill", "decode"]
        assert end_of(door.address, "in") == TransferEnd("in", "decode", "no")
        assert end_of(door.address, "out") == TransferEnd("out", "prefill", "no")
        assert ask(door.address, "/transfers/x")[0] == 404
        ends.complete("x")
        assert end_of(door.address, "x").error == ""
        door.close()


def test_a_closed_door_frees_its_port_and_ends_who_waits(doors: Doors) -> None:
    address = doors.decode.address
    with pytest.raises(
        ConfigError, match=f"status_port {address[1]} on 127.0.0.1: Address already in use; choose another"
    ):
        StatusDoor([doors.ends.into], doors.ends.target.layout, KEY, doors.ends.config, engine="vllm", port=address[1])
    waiting = http.client.HTTPConnection(*address, timeout=20)
    with contextlib.closing(waiting):
        waiting.request("GET", "/transfers/x?wait_s=30", headers={"Authorization": f"Bearer {TOKEN}"})
        soon(doors.ends.into, lambda: doors.decode._server.requests_count > 0)
        doors.decode.close()
        with pytest.raises((http.client.HTTPException, OSError)):
            waiting.getresponse()
    again = StatusDoor(
        [doors.ends.into], doors.ends.target.layout, KEY, doors.ends.config, engine="vllm", port=address[1]
    )
    assert look(again.address).name == "d.0"
    again.close()
    again.close()  # as often as one likes
    doors.decode.close()


def test_who_shows_no_token_is_cut(monkeypatch: pytest.MonkeyPatch, doors: Doors) -> None:
    address = doors.decode.address
    known = http.client.HTTPConnection(*address, timeout=20)
    with contextlib.closing(known):
        known.request("GET", "/status", headers={"Authorization": f"Bearer {TOKEN}"})
        assert known.getresponse().read()
        assert not doors.decode._strangers, "nothing cuts it any more"
        monkeypatch.setattr(status_door, "GREET_S", 0.1)
        with socket.create_connection(address, timeout=20) as stranger:
            stranger.sendall(b"GET /status HTTP/1.1\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch, doors: Doors) -> None:
    monkeypatch.setattr(status_door, "MAX_CONNECTIONS", 2)
    address = doors.decode.address
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(socket.create_connection(address, timeout=20))
        soon(doors.ends.into, lambda: len(doors.decode._server.connections) == 2)
        third = stack.enter_context(socket.create_connection(address, timeout=20))
        assert third.recv(1) == b""
    soon(doors.ends.into, lambda: not doors.decode._server.connections)
    assert look(address).name == "d.0"


def test_with_tls_a_certificate_is_wanted_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("d")
    config = TlsConfig(str(certificate), str(key), str(authority.path))
    mine = authority.tls("gateway").client
    (tmp_path / "other").mkdir()
    strange = Authority(tmp_path / "other").tls("x").client
    with open_doors(tls=config) as doors:
        for context, fine in ((mine, True), (strange, False)):
            connection = http.client.HTTPSConnection(*doors.decode.address, timeout=20, context=context)
            with (
                contextlib.closing(connection),
                contextlib.nullcontext()
                if fine
                else pytest.raises(OSError, match=r"alert|closed|reset|EOF|certificate"),
            ):
                connection.request("GET", "/status", headers={"Authorization": f"Bearer {TOKEN}"})
                assert connection.getresponse().status == 200


def test_the_token_is_of_the_key_alone() -> None:
    assert TOKEN == "c334daa9de220fa79e8133ccac37346cf389c25930e7e33a933ef89d5b267e93"
    assert token(KEY[:-1] + b"\0") != TOKEN
