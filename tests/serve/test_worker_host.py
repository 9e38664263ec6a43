"""What `regauge worker` starts and refuses; nothing runs. Real ones are in tests/planes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regauge.cli import main
from regauge.config import EngineConfig, PlanesConfig, ServeConfig, ServedConfig, TransferConfig
from regauge.config_discovery import DiscoveryConfig, EtcdConfig
from regauge.errors import ConfigError
from regauge.serve import wire
from regauge.serve.launch import commands
from regauge.serve.worker_host import plan_workers

MODEL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
NEAR = DiscoveryConfig(gateways=["http://localhost:8000"])
FAR = DiscoveryConfig(gateways=["http://192.0.2.9:8000"], advertise="127.0.0.1")
TCP = "tcp"


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "deployment.key"
    path.write_text("ab" * 32)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL | {"rope_theta": 1e4}))
    (folder / "model.safetensors").write_bytes(b"")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return str(folder)


def specs(config: ServeConfig, folder: Path, *given: Any) -> list[wire.WorkerSpec]:
    folder.mkdir(exist_ok=True)
    (folder / "key").unlink(missing_ok=True)
    started = commands(plan_workers(config, *given), folder)
    assert all(each.gateway is None for each in started)
    return [wire.read_worker_spec(folder / f"{each.name}.json") for each in started]


def test_workers_of_one_role_and_no_gateway(model: str, key: str, tmp_path: Path) -> None:
    planes = PlanesConfig("127.0.0.1", "127.0.0.2", worker_port=21_000)
    config = ServeConfig(model=model, transfer=TransferConfig(key_file=key), discovery=NEAR, planes=planes)
    found = specs(config, tmp_path, "decode", "d", print, 2)
    assert [(spec.name, spec.role, spec.port, spec.control_port) for spec in found] == [
        ("d-0", "decode", 21_000, 21_001),
        ("d-1", "decode", 21_002, 21_003),
    ]
    assert {spec.config.discovery.advertise for spec in found} == {"127.0.0.2"}
    assert len({spec.key for spec in found}) == 1
    [one] = specs(config, tmp_path, "prefill", "p", print)
    assert (one.name, one.role, one.peers) == ("p", "prefill", {})
    assert b"float8_e4m3fn" in one.layout
    trusted = sorted(path.name for path in (tmp_path / "keys" / "trust" / "workers").iterdir())
    assert trusted == ["d-0.pub", "d-1.pub", "p.pub"]
    assert not list((tmp_path / "keys" / "trust" / "gateways").iterdir())


@pytest.mark.parametrize("etcd", [False, True])
def test_what_registers_elsewhere_has_an_address_there(model: str, key: str, tmp_path: Path, *, etcd: bool) -> None:
    away = DiscoveryConfig(etcd=EtcdConfig(["http://127.0.0.1:2379"]), advertise="127.0.0.1") if etcd else FAR
    config = ServeConfig(model=model, transfer=TransferConfig(TCP, key_file=key), discovery=away)
    assert specs(config, tmp_path, "prefill", "p", print)[0].config.discovery.advertise == "127.0.0.1"
    silent = msgspec.structs.replace(config, discovery=msgspec.structs.replace(away, advertise=""))
    with pytest.raises(ConfigError, match=r"discovery.advertise: gateways elsewhere do not reach workers on loopback"):
        plan_workers(silent, "prefill", "p", print)
    shared = msgspec.structs.replace(config, transfer=TransferConfig(key_file=key))
    with pytest.raises(
        ConfigError, match=r"transfer.transport: shm stays within a host, and the gateways are elsewhere"
    ):
        plan_workers(shared, "prefill", "p", print)


@pytest.mark.parametrize(
    ("given", "name", "count", "message"),
    [
        ({}, "no spaces", 1, r"--name: must be 1 to 128 letters, digits and \._-, not 'no spaces'"),
        ({}, "p", 0, r"--workers: Expected `int` >= 1"),
        ({}, "p", 257, r"--workers: Expected `int` <= 256"),
        ({"discovery": DiscoveryConfig()}, "p", 1, r"discovery.gateways: name the gateways at which the workers register"),
        ({"transfer": TransferConfig()}, "p", 1, r"transfer.key_file: give the file with the key that all"),
        ({"prefill": EngineConfig(vllm=ServedConfig())}, "p", 1, r"prefill.vllm: such a server does not register"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    model: str, key: str, given: dict[str, Any], name: str, count: int, message: str
) -> None:
    plain = {"model": model, "transfer": TransferConfig(key_file=key), "discovery": NEAR}
    config = ServeConfig(**(plain | given))
    with pytest.raises(ConfigError, match=message):
        plan_workers(config, "prefill", name, print, count)


def test_the_verb_names_workers_after_the_host_and_says_what_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--role", "prefill"]) == 2
    assert "discovery.gateways: name the gateways" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["worker", "--role", "prefil"])
    assert "did you mean 'prefill'?" in capsys.readouterr().err
