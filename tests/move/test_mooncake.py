"""What the mooncake transport refuses before Mooncake sees it: Mooncake takes TCP, whatever it was asked for."""

from pathlib import Path

import pytest

from regauge.config import MooncakeConfig
from regauge.errors import ConfigError
from regauge.move.mooncake import MooncakeTransport, check_host, check_protocol


def rdma(tmp_path: Path, **states: str) -> Path:
    for name, state in states.items():
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n", encoding="ascii")
    return tmp_path


def test_rdma_takes_devices_that_are_up(tmp_path: Path) -> None:
    found = rdma(tmp_path, mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    check_protocol(MooncakeConfig(protocol="rdma", devices=["mlx5_0"]), found)
    for devices in (["mlx5_1"], ["mlx5_0", "mlx5_1"], ["mlx5_9"]):
        with pytest.raises(ConfigError, match=rf"'{devices[-1]}' is no RDMA device.*there are: mlx5_0, mlx5_1"):
            check_protocol(MooncakeConfig(protocol="rdma", devices=devices), found)


def test_rdma_without_hardware_or_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are: none.*silently take TCP"):
        check_protocol(MooncakeConfig(protocol="rdma", devices=["mlx5_0"]), tmp_path)
    with pytest.raises(ConfigError, match="name its devices"):
        check_protocol(MooncakeConfig(protocol="rdma"), tmp_path)
    with pytest.raises(ConfigError, match="are for protocol 'rdma'"):
        check_protocol(MooncakeConfig(devices=["mlx5_0"]), tmp_path)
    check_protocol(MooncakeConfig(), tmp_path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1", "", "10.255.0.0/24", "no-such-interface"])  # noqa: S104  # refused
def test_the_host_must_mean_one_ipv4_address_of_this_host(host: str) -> None:
    with pytest.raises(ConfigError):
        check_host(host)
    with pytest.raises(ConfigError):
        MooncakeTransport(key=b"k" * 32, name="x", host=host)


def test_a_plane_is_named_by_address_network_or_interface() -> None:
    assert check_host("127.0.0.1") == check_host("127.0.0.0/8") == check_host("lo") == "127.0.0.1"
