"""Counters of interfaces, and the bound of KV that took another way."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.plane_meter import InterfaceBytes, OffPlane, carried, read


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, received, sent, speed in (("cmp0", 100, 200, "400000"), ("biz0", 7, 8, "-1")):
        base = tmp_path / "sys/class/net" / name
        (base / "statistics").mkdir(parents=True)
        (base / "statistics/rx_bytes").write_text(f"{received}\n")
        (base / "statistics/tx_bytes").write_text(f"{sent}\n")
        (base / "speed").write_text(f"{speed}\n")
    port = tmp_path / "sys/class/net/cmp0/device/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_rcv_data").write_text("1000\n")
    (port / "port_xmit_data").write_text("2000\n")
    return tmp_path


def test_rdma_counts_in_words_and_beside_the_interface(root: Path) -> None:
    planes = {"compute": frozenset({"cmp0"}), "business": frozenset({"biz0"}), "management": frozenset({"gone"})}
    found = read(planes, root)  # type: ignore[arg-type]  # a dict of literals
    assert found == [
        InterfaceBytes("compute", "cmp0", 100 + 4_000, 200 + 8_000, 50e9),
        InterfaceBytes("business", "biz0", 7, 8, 0.0),
    ]
    assert carried(found, "compute") == (4_100, 8_200)
    assert carried(found, "management") == (0, 0)


steps = st.lists(
    st.tuples(*[st.integers(0, 1 << 40)] * 4, st.integers(0, 1 << 20)), min_size=1, max_size=20
)  # KV in and out on the plane, KV in and out beside it, headers


@given(steps, st.integers(0, 1 << 50))
def test_the_bound_is_never_above_what_went_another_way(given_steps: list[tuple[int, ...]], counters: int) -> None:
    meter = OffPlane()
    assert meter.bytes(counters, counters, 0, 0) == 0
    received = sent = counters
    kv_in = kv_out = off_in = off_out = 0
    for in_, out, other_in, other_out, headers in given_steps:
        received, sent = received + in_ + headers, sent + out + headers
        kv_in, kv_out = kv_in + in_ + other_in, kv_out + out + other_out
        off_in, off_out = off_in + other_in, off_out + other_out
        assert meter.bytes(received, sent, kv_in, kv_out) <= max(off_in, off_out)


@given(st.integers(1, 1 << 40))
def test_kv_that_all_went_another_way_is_seen_whole(size: int) -> None:
    meter = OffPlane()
    meter.bytes(10, 10, 0, 0)
    assert meter.bytes(10, 10, 0, size) == size


def test_after_a_counter_went_back_nothing_is_said() -> None:
    meter = OffPlane()
    meter.bytes(1_000, 1_000, 0, 0)
    assert meter.bytes(5, 1_000, 500, 0) == 0
    assert meter.bytes(5, 1_000, 10_000, 0) == 0
