"""The transport that a configuration names, and what it says when that cannot be had."""

import importlib.util

import msgspec
import pytest

from regauge.config import TransferConfig
from regauge.errors import ConfigError
from regauge.move.shm import ShmTransport
from regauge.move.tcp import TcpTransport
from regauge.move.transports import open_transport

KEY = b"k" * 32


@pytest.mark.parametrize(("name", "kind"), [("shm", ShmTransport), ("tcp", TcpTransport)])
def test_the_named_transport_is_opened_at_its_host(name: str, kind: type) -> None:
    config = msgspec.convert({"transport": name, "host": "127.0.0.2"}, TransferConfig)
    with open_transport(config, key=KEY, name="x") as made:
        assert type(made) is kind
        assert name == "shm" or made.address.startswith("127.0.0.2:")


@pytest.mark.parametrize("name", ["mooncake", "nixl"])
def test_a_library_that_is_not_installed_is_named_with_its_install_command(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    config = msgspec.convert({"transport": name, "nixl": {"devices": ["lo"]}}, TransferConfig)
    with pytest.raises(ConfigError, match=f"'{name}', which is not installed: pip install"):
        open_transport(config, key=KEY, name="x")


def test_unknown_names_and_fields_are_refused() -> None:
    for bad in ({"transport": "rdma"}, {"mooncake": {"protocol": "shm"}}, {"nixl": {"peers_per_carrier": 0}}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(bad, TransferConfig)
