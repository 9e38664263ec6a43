"""The lines of `regauge top` that are made of metrics: percentiles as Prometheus has them, rates of one pair of answers, what is not 0."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

from regauge.cli_top_figures import figures, seconds
from regauge.serve.debug import Live, Series

TTFT = "regauge_time_to_first_token_seconds_bucket"
BYTES = {"host": "d", "plane": "compute", "interface": "cmp0"}
WAY = {"path": "CONVERT", "mode": "staged"}


def live(unix_s: float = 100.0, **metrics: list[tuple[dict[str, str], float]]) -> Live:
    found = {name: [Series(labels, value) for labels, value in series] for name, series in metrics.items()}
    return Live("0", "m", "CONVERT", 0, unix_s, [], [], found)


def lines(now: Live, before: Live | None = None) -> list[str]:
    file = io.StringIO()
    Console(width=160, file=file, color_system=None).print(Group(*figures(now, before)))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def buckets(**counts: float) -> list[tuple[dict[str, str], float]]:
    bounds = {"low": "0.1", "high": "1.0", "all": "+Inf"}
    return [({"le": bounds[name]}, count) for name, count in counts.items()]


def test_percentiles_are_of_what_came_between_two_looks() -> None:
    before, now = (
        live(40.0, **{TTFT: buckets(low=90, high=90, all=90)}),
        live(**{TTFT: buckets(low=90, high=100, all=100)}),
    )
    shown = lines(now, before)
    assert shown[0].split() == ["latency", "of", "the", "last", "60", "s", "P50", "P90", "P99"]
    assert shown[1].split() == ["first", "token", "550", "ms", "910", "ms", "991", "ms"]
    assert shown[2].split() == ["per", "output", "token", "-", "-", "-"], "nothing came"
    alone = lines(now)
    assert alone[0].split()[:5] == ["latency", "since", "the", "gateway", "began"]
    assert alone[1].split()[2] == "55.6"


def test_a_counter_that_went_back_gives_no_percentile_and_no_rate() -> None:
    before = live(40.0, **{TTFT: buckets(low=90, high=100, all=100)}, regauge_plane_bytes_total=[({**BYTES, "direction": "sent"}, 9e9)],
                  regauge_plane_observed_seconds_total=[(BYTES, 10.0)])  # fmt: skip
    now = live(**{TTFT: buckets(low=1, high=2, all=2)}, regauge_plane_bytes_total=[({**BYTES, "direction": "sent"}, 1e9)],
               regauge_plane_observed_seconds_total=[(BYTES, 20.0)])  # fmt: skip
    shown = lines(now, before)
    assert shown[1].split()[2:] == ["-", "-", "-"]
    assert any(line.startswith("d  compute  cmp0  sent  -") for line in shown), shown


def test_an_interface_has_its_rate_and_its_part_of_the_line() -> None:
    def at(total: float, clock: float) -> Live:
        return live(
            90.0 + clock,
            regauge_plane_bytes_total=[({**BYTES, "direction": "received"}, total)],
            regauge_plane_observed_seconds_total=[(BYTES, clock)],
            regauge_plane_speed_bytes_per_second=[(BYTES, float(4 << 30))],
        )

    [line] = [each for each in lines(at(6 * 2**30, 12.0), at(2 * 2**30, 10.0)) if "cmp0" in each]
    assert line == "d  compute  cmp0  received  2.0 GiB/s of 4.0 GiB/s = 50.0%  6.0 GiB in all"


def test_a_path_has_its_transfers_and_how_fast_they_land() -> None:
    def at(count: float, clock: float) -> Live:
        worker = {"worker": "decode-0", "role": "decode"}
        return live(
            50.0 + clock,
            regauge_transfer_bytes_count=[(WAY, count)],
            regauge_transfer_bytes_sum=[(WAY, count * 2**20)],
            regauge_transfer_seconds_sum=[(WAY, count * 0.5)],
            regauge_kv_landed_bytes_total=[({**worker, "path": "CONVERT"}, count * 2**20)],
            regauge_worker_observed_seconds_total=[(worker, clock)],
        )

    [line] = [each for each in lines(at(12, 6.0), at(2, 1.0)) if "staged" in each]
    assert (
        line == "CONVERT, staged  2.0 MiB/s  10 transfers of the last 5 s, 10.0 MiB, 500 ms each  12 in all, 12.0 MiB"
    )


def test_what_is_not_0_is_said_and_nothing_steers_the_terminal() -> None:
    shown = lines(live(regauge_off_plane_bytes=[({"worker": "decode-0\x1b[2J"}, 4096.0), ({"worker": "fine"}, 0.0)],
                       regauge_receipts_total=[({}, 7.0)]))  # fmt: skip
    assert "7 receipts handed over" in shown
    assert "4096 bytes of KV off the compute plane: decode-0?[2J" in shown
    assert not any("fine" in line or "\x1b" in line for line in shown)


@pytest.mark.parametrize(("value", "shown"), [(0.0042, "4.2 ms"), (0.42, "420 ms"), (4.2, "4.20 s"), (75.0, "1m15s")])
def test_seconds(value: float, shown: str) -> None:
    assert seconds(value) == shown


VALUE = st.floats(allow_nan=False, allow_infinity=False)
"""JSON has no others."""


@given(st.lists(st.tuples(st.sampled_from(["0.1", "+Inf", "nan", "x", ""]), VALUE), max_size=6), st.booleans())
def test_whatever_a_server_says_is_shown_or_left_out(told: list[tuple[str, float]], again: bool) -> None:
    odd = live(**{TTFT: [({"le": bound}, value) for bound, value in told], "regauge_plane_bytes_total": [(BYTES, 1.0)]})
    assert lines(odd, odd if again else None)
