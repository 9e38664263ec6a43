"""What workers tell of their transfers and of their hosts, and what becomes of it in the gateway's metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from serve_rig import Rig, open_rig
from worker_rig import LONG, PLAIN, ask, decode, end, sampling, workers

from regauge.astray import SETTLE_S, WINDOW_S
from regauge.config_planes import PlanesConfig
from regauge.move.plane import own
from regauge.move.state import Totals
from regauge.serve import wire
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
TWO = {"p": ("prefill", PLAIN), "d": ("decode", PLAIN)}


async def test_a_worker_tells_what_its_planes_have_carried_and_of_its_transfers(tmp_path: Path) -> None:
    planes = PlanesConfig(compute="127.0.0.1")
    async with workers(tmp_path, TWO, planes=planes) as both:  # type: ignore[arg-type]
        before = both["d"].health()
        events, said = await ask(both["p"], both["d"], "r", LONG, sampling())
        after, sender = both["d"].health(), both["p"].health()
        transfer = next(event for event in events if isinstance(event, wire.TransferEvent))
        landed = {transfer.path: transfer.wire_bytes}
        assert [(each.plane, each.interface) for each in after.interfaces] == [("compute", "lo")]
        assert after.interfaces[0].received - before.interfaces[0].received >= transfer.wire_bytes
        assert after.host == sender.host != ""
        assert after.clock_s > before.clock_s > 0
        assert (after.off_plane_bytes, sender.off_plane_bytes) == (0, 0), "to this host itself no interface carries it"
        assert (after.transfers.landed, sender.transfers.sent) == (landed, transfer.wire_bytes)
        assert (after.transfers.grants, after.transfers.since(after.transfers)) == (
            1,
            Totals(landed={transfer.path: 0}),
        )
        assert transfer.spans > 0
        assert transfer.stages is not None
        assert sum(msgspec.structs.astuple(transfer.stages)[2:]) == pytest.approx(transfer.seconds)
        waited = end(events).queue_seconds, said.queue_seconds
        assert all(each is not None and 0 <= each < 60 for each in waited)


async def test_kv_to_another_host_that_the_compute_planes_interface_did_not_carry_is_told(tmp_path: Path) -> None:
    """Of a pair whose link is taken for one between hosts, over an interface that stands still."""
    counters = tmp_path / "sys/class/net/lo/statistics"
    counters.mkdir(parents=True)
    for name in ("rx_bytes", "tx_bytes"):
        (counters / name).write_text("5\n")
    async with workers(tmp_path, TWO, planes=PlanesConfig(compute="127.0.0.1")) as both:  # type: ignore[arg-type]
        p, d = both["p"], both["d"]
        await ask(p, d, "first", LONG[:8], sampling())
        for link in (p.prefill.links._links["d"], d.decode.links._links["p"]):
            link.far = True
        assert [p.host_bytes(0.0, tmp_path)[1], d.host_bytes(0.0, tmp_path)[1]] == [0, 0]
        events, _ = await ask(p, d, "r", LONG, sampling())
        sent = next(event.wire_bytes for event in events if isinstance(event, wire.TransferEvent))
        found = [[each.host_bytes(now, tmp_path)[1] for now in (WINDOW_S, WINDOW_S + SETTLE_S)] for each in (p, d)]
        assert found == [[0, sent], [0, 0]], (
            "a receiver knows of no bytes for certain that may have been on their way before"
        )


async def test_a_prompt_that_decode_computes_waits_for_its_turn_as_well(tmp_path: Path) -> None:
    async with workers(tmp_path, TWO) as both:  # type: ignore[arg-type]
        worker = both["d"]
        assert (worker.health().host, worker.health().interfaces) == ("", []), "no plane is declared"
        events = await decode(worker, wire.Generate("r", "t-r", list(LONG), sampling(), []))
        waited = end(events).queue_seconds
        assert waited is not None
        assert 0 <= waited < 60


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("192.0.2.1", False),
        ("fe80::1%lo", False),
        ("?", False),
    ],
)
def test_which_address_is_this_hosts_own(address: str, here: bool) -> None:
    assert own(address) == here


def figures(rig: Rig) -> tuple[float, ...]:
    where = {"host": "h", "plane": "compute", "interface": "roce0"}
    who = {"worker": "decode-0", "role": "decode"}
    return (
        rig.sample("regauge_plane_bytes_total", direction="received", **where),
        rig.sample("regauge_plane_observed_seconds_total", **where),
        rig.sample("regauge_plane_speed_bytes_per_second", **where),
        rig.sample("regauge_off_plane_bytes", **who),
        rig.sample("regauge_kv_landed_bytes_total", path="REMAP", **who),
        rig.sample("regauge_worker_observed_seconds_total", **who),
        rig.sample("regauge_transfer_grants_total", **who),
        rig.sample("regauge_transfer_credit_bytes_total", **who),
    )


def told(clock_s: float, received: int, totals: Totals, off_plane: int = 0) -> dict[str, Any]:
    interface = {"plane": "compute", "interface": "roce0", "received": received, "sent": 0, "bytes_per_s": 50e9}
    return {
        "host": "h",
        "clock_s": clock_s,
        "interfaces": [interface],
        "off_plane_bytes": off_plane,
        "transfers": totals,
    }


async def test_the_gateway_exports_what_a_worker_tells_of_its_host(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        rig.decode.load = told(10.0, 10**12, Totals(grants=1))
        await rig.until(lambda: figures(rig)[2] == 50e9)
        rig.decode.load = told(
            12.0, 10**12 + 500, Totals(grants=3, credit_bytes=70, landed={"REMAP": 400}), off_plane=7
        )
        await rig.until(lambda: figures(rig) == (500, 2.0, 50e9, 7, 400, 2.0, 3, 70))
        rig.decode.load = told(11.0, 10**12 + 100, Totals(grants=3, credit_bytes=70, landed={"REMAP": 400}))
        polls = rig.decode.polls
        await rig.until(lambda: rig.decode.polls > polls + 2)
        assert figures(rig)[:2] == (500, 2.0), "a late word adds nothing"
        assert figures(rig)[4:6] == (400, 2.0)


async def test_totals_that_went_back_take_nothing_away_and_end_no_watch(tokenizer: Tokenizer) -> None:
    """As those of an engine one of whose ranks was restarted: the others' are still in them."""
    async with open_rig(tokenizer) as rig:
        rig.decode.totals = Totals(delivered=5, failed={"lease": 4}, grants=9)
        await rig.until(lambda: figures(rig)[6] == 9)
        rig.decode.totals = Totals(delivered=2, failed={"lease": 1}, grants=3)
        polls = rig.decode.polls
        await rig.until(lambda: rig.decode.polls > polls + 2)
        rig.decode.totals = Totals(delivered=3, failed={"lease": 2}, grants=4)
        await rig.until(lambda: figures(rig)[6] == 10)
        failed = rig.sample("regauge_transfer_failures_total", worker="decode-0", role="decode", reason="lease")
        assert failed == 5
