"""What the nixl transport refuses before NIXL sees it: UCX uses every network that it is not kept from."""

from pathlib import Path

import pytest

from regauge.config import NixlConfig
from regauge.errors import ConfigError
from regauge.move.nixl import NixlTransport, check_devices


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    (tmp_path / "net" / "eth1").mkdir(parents=True)
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    return tmp_path


def test_devices_that_exist_are_taken(sysfs: Path) -> None:
    check_devices(NixlConfig(devices=["eth1"]), sysfs)
    check_devices(NixlConfig(devices=["mlx5_0:1", "eth1"], transports="rc,tcp"), sysfs)


def test_it_does_not_start_without_its_devices(sysfs: Path) -> None:
    with pytest.raises(ConfigError, match="every network of this host"):
        check_devices(NixlConfig(), sysfs)
    with pytest.raises(ConfigError, match="every network of this host"):
        NixlTransport(key=b"k" * 32, name="x")
    for device in ("eth0", "mlx5_1:1", "", ":1", "..", "../net/eth1", "all"):
        with pytest.raises(ConfigError, match="no network device"):
            check_devices(NixlConfig(devices=[device]), sysfs)


@pytest.mark.parametrize("transports", ["tcp,sm", "cma", "tcp,self,posix", "all", "", "^tcp", "rc, shm"])
def test_transports_that_no_fence_ends_are_refused(sysfs: Path, transports: str) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.nixl\.transports has"):
        check_devices(NixlConfig(devices=["eth1"], transports=transports), sysfs)
