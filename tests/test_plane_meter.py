"""Counters of interfaces, and of the RDMA ports behind them."""

from pathlib import Path

import pytest

from regauge.astray import Carried
from regauge.config import MooncakeConfig, NixlConfig, TransferConfig
from regauge.move.transports import uses_rdma
from regauge.plane_meter import InterfaceBytes, carried, counts_rdma, read


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
    found = read(planes, root)
    assert found == [
        InterfaceBytes("compute", "cmp0", 100 + 4_000, 200 + 8_000, 50e9),
        InterfaceBytes("business", "biz0", 7, 8, 0.0),
    ]
    assert carried(found, "compute") == Carried(("cmp0",), sent=8_200, received=4_100)
    assert carried(found, "management") is None


def test_rdma_is_counted_where_each_interface_has_a_port(root: Path) -> None:
    compute, both = {"compute": frozenset({"cmp0"})}, {"compute": frozenset({"cmp0", "biz0"})}
    port = root / "sys/class/net/cmp0/device/infiniband/mlx5_0/ports/1/counters/port_xmit_data"
    assert counts_rdma(compute, "compute", root)
    assert not counts_rdma(both, "compute", root)
    assert not counts_rdma({}, "compute", root)
    port.unlink()
    assert not counts_rdma(compute, "compute", root)


def test_which_transports_may_bypass_the_interfaces_counters() -> None:
    assert not uses_rdma(TransferConfig())
    assert not uses_rdma(TransferConfig(transport="mooncake"))
    assert uses_rdma(TransferConfig(transport="mooncake", mooncake=MooncakeConfig(protocol="rdma", devices=["mlx5_0"])))
    assert not uses_rdma(TransferConfig(transport="nixl", nixl=NixlConfig(transports="tcp,self")))
    assert uses_rdma(TransferConfig(transport="nixl", nixl=NixlConfig(transports="rc")))
