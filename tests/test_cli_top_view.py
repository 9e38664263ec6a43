"""What `regauge top` draws of a look, or of two."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from regauge.cli_top import plain
from regauge.cli_top_text import duration, size
from regauge.cli_top_view import POOL_BAR, render, share
from regauge.move.flow_types import LinkState as NicState
from regauge.move.protocol import LegState, TransferState
from regauge.move.state import Hidden, LinkState, PoolState, Totals, WorkerState
from regauge.serve.debug import Overview, WorkerView

SINCE = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def leg(peer: str = "p0", *, nbytes: int = 1 << 20, progress: float = 0.25, **fields: object) -> LegState:
    plain_fields = {
        "state": "granted",
        "epoch": 1,
        "in_flight": 2,
        "chunks": 7,
        "resent": 0,
        "credit": None,
        "nic": 0,
        **fields,
    }
    return LegState(peer=peer, wire_bytes=nbytes, progress=progress, **plain_fields)  # type: ignore[arg-type]


def transfer(*legs: LegState, state: str = "granted", reason: str = "") -> TransferState:
    return TransferState("0123456789abcdef", "decode", state, 1531, 12.0, 100.0, reason, list(legs))


def worker(
    *transfers: TransferState, clock_s: float = 10.0, pid: int = 1, pool: PoolState | None = None,
    links: tuple[LinkState, ...] = (), totals: Totals | None = None, hidden: int = 0,
) -> WorkerView:  # fmt: skip
    state = WorkerState(
        "decode-0", "decode", pid, clock_s, list(transfers), list(links), [pool or PoolState(64, 16, 64, 0, 0, 0)], [],
        totals or Totals(), hidden=Hidden(transfers=hidden),
    )  # fmt: skip
    return WorkerView("decode-0", "decode", True, SINCE, "", state)


def overview(*workers: WorkerView) -> Overview:
    return Overview("1.2", "tiny", "CONVERT", 3, SINCE.timestamp(), list(workers), [])


def drawn(
    now: Overview, before: Overview | None = None, *, note: str = "", width: int = 140, colours: bool = False
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colours, color_system="standard" if colours else None)
    console.print(render(now, before, note=note, width=width))
    return out.getvalue()


def row(text: str, word: str) -> str:
    [line] = [line for line in text.splitlines() if word in line]
    return " ".join(line.split())


def test_a_transfer_has_a_row_for_each_leg_and_its_figures() -> None:
    legs = (leg("p0"), leg("p1", nbytes=2048, progress=1.0, in_flight=0, resent=3, credit=4096))
    text = drawn(overview(worker(transfer(*legs))))
    assert row(text, " p0 ") == "01234567 granted 1531 12.0 s p0 ━━━ 25% 1.0 MiB - granted 7+2 0 - 1m40s"
    assert row(text, " p1 ") == f"p1 {'━' * 12} 100% 2.0 KiB - granted 7 3 4.0 KiB 1m40s"
    assert text.splitlines()[0] == "regauge 1.2   tiny   CONVERT   3 requests   03:04:05 UTC"


def test_two_looks_give_rates_of_legs_and_of_the_worker() -> None:
    still = leg("p1", nbytes=500)
    was, then = Totals(landed={"DIRECT": 1 << 20}), Totals(landed={"DIRECT": 2 << 20, "REMAP": 1 << 20})
    before = overview(worker(transfer(leg(nbytes=0), still), clock_s=8.0, totals=was))
    now = overview(worker(transfer(leg(nbytes=2 << 20), still), clock_s=10.0, totals=then))
    text = drawn(now, before)
    assert "1.0 MiB/s" in text.splitlines()[2], "of the worker"
    assert row(text, " p0 ").count("1.0 MiB/s") == 1
    assert row(text, " p1 ").count("0 B/s") == 1


@pytest.mark.parametrize("other", [{"pid": 2}, {"clock_s": 10.0}, {"clock_s": 11.0}])
def test_there_is_no_rate_against_another_process_or_the_same_moment(other: dict[str, float]) -> None:
    before = overview(worker(transfer(leg(nbytes=0)), **{"clock_s": 8.0, **other}))  # type: ignore[arg-type]
    assert "B/s" not in drawn(overview(worker(transfer(leg()))), before)


def test_a_count_that_went_back_makes_no_rate() -> None:
    before = overview(worker(clock_s=8.0, totals=Totals(sent=5 << 20)))
    assert "decode-0 (decode)  -  0 delivered" in drawn(overview(worker()), before).splitlines()[2]


def test_what_went_wrong_is_said() -> None:
    totals = Totals(5, 5 << 20, {"lease": 2, "aborted": 1}, 4, 1)
    failed = transfer(leg(state="fencing"), state="quarantined", reason="no sign of life from p0 for 30 s")
    links = (LinkState("p0", "fencing", "CONVERT", ["staged"], 61.0, "5e5510", None, 1, 4, 1),)
    text = drawn(overview(worker(failed, pool=PoolState(64, 16, 60, 0, 0, 4), links=links, totals=totals, hidden=7)))
    assert "5 delivered, 5.0 MiB, 4 resent, 1 resumed, 3 failed: 1 aborted, 2 lease" in text
    assert "01234567: no sign of life from p0 for 30 s" in text
    assert row(text, "5e5510") == "p0 fencing CONVERT staged 1m01s 1 4 1 - 5e5510"
    assert "▒ 4 quarantined" in text
    assert "and 7 older ones" in text


def test_what_an_engine_has_not_lent_is_not_called_free() -> None:
    text = drawn(overview(worker(pool=PoolState(64, 16, None, 3, 0, 1))))
    assert "▓ 3 leased  ▒ 1 quarantined  ░ 60 not lent" in text
    assert "free" not in text


def test_flow_control_of_a_nic_is_one_line() -> None:
    view = worker()
    assert view.state is not None
    nic = NicState("compute", 2, 1 << 20, 0, 0, 3 << 20, 6 << 20, 4 << 20, float(2 << 30), 25e-6, 0.003)
    text = drawn(overview(msgspec.structs.replace(view, state=msgspec.structs.replace(view.state, nics=[nic]))))
    assert row(text, "nic ") == (
        "nic compute 2.0 GiB/s, round trip 0.03 ms granted 1.0 MiB of 4.0 MiB, queued 3.0 MiB backlog 6.0 MiB = 0.0 s"
    )


def test_workers_that_are_down_or_silent_are_named() -> None:
    silent = WorkerView("prefill-0", "prefill", False, SINCE, "connection refused", None)
    text = drawn(overview(silent))
    assert "prefill-0 (prefill)  no answer, down since 03:04:05 UTC: connection refused" in text
    assert "cannot reach it" in drawn(overview(silent), note="cannot reach it")


def test_gateway_processes_that_do_not_answer_are_named() -> None:
    text = drawn(msgspec.structs.replace(overview(worker()), silent=["gateway-1 does not answer: \x1b[2J"]))
    assert "\ngateway-1 does not answer: ?[2J\n" in text


def test_a_narrow_line_keeps_what_matters() -> None:
    view = overview(worker(transfer(leg()), links=(LinkState("p0", "up", "CONVERT", ["staged"], 1.0, "5e5510"),)))
    text = drawn(view, width=80)
    assert max(map(len, text.splitlines())) <= 80
    for word in ("01234567", "25%", "1.0 MiB", "resent"):
        assert word in text
    assert "credit" not in text
    assert "5e5510" not in text


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    view = overview(worker(transfer(leg(), state="quarantined")))
    assert "\x1b[31mquarantined" in drawn(view, colours=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in drawn(view, colours=True)
    assert "\x1b" not in drawn(view)


def test_names_cannot_steer_the_terminal_or_speak_markup() -> None:
    view = overview(worker(transfer(leg("\x1b[2Jp[red]0\n"), reason="\x07 lost [bold]p0\u202e")))
    text = drawn(view)
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "?[2Jp[red]0?" in text
    assert "? lost [bold]p0?" in text


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6))
def test_a_bar_is_full_and_shows_whatever_is_there(counts: list[int]) -> None:
    cells = share(counts, POOL_BAR)
    assert sum(cells) == POOL_BAR
    if any(counts):
        assert all((cell > 0) == (count > 0) for cell, count in zip(cells, counts, strict=True))
        assert all(
            abs(cell - count * POOL_BAR / sum(counts)) <= len(counts) for cell, count in zip(cells, counts, strict=True)
        )


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 5 << 20, 3 << 40, 5 << 50)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "5.0 MiB", "3.0 TiB", "5120.0 TiB"]  # fmt: skip
    assert [duration(s) for s in (0.04, 59.9, 60, 3599, 3600, 90_000, -61)] == [
        "0.0 s", "59.9 s", "1m00s", "59m59s", "1h00m", "1d01h", "-1m01s"]  # fmt: skip
    assert plain("a\tb\u00e9 \u6f22") == "a?b\u00e9 \u6f22"


@pytest.mark.parametrize("unix_s", [1e300, -1e300, 1e15])
def test_a_clock_that_no_calendar_has_is_shown_as_none(unix_s: float) -> None:
    assert "3 requests   - UTC" in drawn(msgspec.structs.replace(overview(worker()), unix_s=unix_s))
