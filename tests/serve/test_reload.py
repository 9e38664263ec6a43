"""Configurations that are read anew: all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from regauge.config import LimitsConfig, ServeConfig
from regauge.config_gateway import ClientTlsConfig, GatewayConfig
from regauge.errors import ConfigError
from regauge.serve.reload import FILE, Reloader, needs_restart, read, write


def test_all_parts_take_a_new_configuration_or_none_does() -> None:
    taken: list[str] = []

    def part(name: str, *, wrong: bool = False) -> Callable[[ServeConfig], Callable[[], None]]:
        def look(config: ServeConfig) -> Callable[[], None]:
            if wrong:
                raise ConfigError(f"{name}: is wrong")
            return lambda: taken.append(f"{name} {config.port}")

        return look

    new = ServeConfig(port=5)
    assert not Reloader({"a": part("a"), "b": part("b", wrong=True)}).reload(lambda: new)
    assert taken == []
    assert Reloader({"a": part("a"), "b": part("b")}).reload(lambda: new)
    assert taken == ["a 5", "b 5"]

    def unreadable() -> ServeConfig:
        raise ConfigError("no such file")

    assert not Reloader({"a": part("a")}).reload(unreadable)
    assert len(taken) == 2


def test_what_was_left_is_read_and_else_the_default(tmp_path: Path) -> None:
    default = ServeConfig(port=1)
    assert read(tmp_path, default) is default
    for port in (2, 3):
        write(tmp_path, ServeConfig(port=port))
        assert read(tmp_path, default).port == port
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(tmp_path, default)


def test_what_needs_a_restart_is_named() -> None:
    tls = ClientTlsConfig("a.pem", "a.key")
    old = ServeConfig(gateway=GatewayConfig(tls=tls))
    free = ServeConfig(
        limits=LimitsConfig(max_queue=3), gateway=GatewayConfig(tls=ClientTlsConfig("b.pem", "b.key"), tenants="t.toml")
    )
    assert needs_restart(old, free) == []
    bound = ServeConfig(port=9, model="x", gateway=GatewayConfig(processes=3))
    assert needs_restart(old, bound) == ["model", "port", "gateway.processes", "gateway.tls"]
    trusting = GatewayConfig(tls=msgspec.structs.replace(tls, authority="ca.pem"))
    assert needs_restart(old, ServeConfig(gateway=trusting)) == ["gateway.tls.authority"]
