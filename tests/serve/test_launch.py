"""What is started for a deployment, and where it is reached; no process is."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from regauge.config import (
    EngineConfig,
    MeterConfig,
    PlanesConfig,
    ServeConfig,
    ServedConfig,
    ServerConfig,
    TlsConfig,
    TransferConfig,
    decode,
)
from regauge.engines import settings
from regauge.errors import ConfigError
from regauge.keys import load_private, public_pem
from regauge.layout import files
from regauge.layout.presets import from_short, load_model, with_pages
from regauge.layout.spec import Layout
from regauge.serve import wire
from regauge.serve.launch import GATEWAY, Command, Deployment, commands
from regauge.serve.pairing import UNKNOWN
from regauge.serve.ports import consecutive_ports

KEY = "ab" * 32
PREFILL, DECODE = "prefill-0", "decode-0"
VLLM = EngineConfig(vllm=ServedConfig(python="/opt/vllm/bin/python", args=["--block-size=32"], ranks=2), threads=3)

SGLANG = EngineConfig(
    sglang=ServedConfig(python="/opt/sglang/bin/python", args=["--device", "cpu"], ranks=2), threads=3
)


def layout() -> Layout:
    return with_pages(from_short("fp32,page=16,nhd", load_model("smollm2-135m-instruct")), 256)


def planned(tmp_path: Path, **given: Any) -> tuple[list[Command], wire.GatewaySpec]:
    config = ServeConfig(**given)
    deployment = Deployment(
        config, tmp_path / "model", "m", None,
        None if config.prefill.served else layout(), None if config.decode.served else layout(), "127.0.0.1", KEY,
    )  # fmt: skip
    started = commands(deployment, tmp_path)
    assert started[-1].name == GATEWAY
    return started, wire.read_spec(Path(started[-1].arguments[-1]))


def option(command: Command, name: str) -> str:
    return command.arguments[command.arguments.index(name) + 1]


def test_two_vllm_servers_get_what_their_connectors_need(tmp_path: Path) -> None:
    (d, p, _), gateway = planned(tmp_path, prefill=VLLM, decode=VLLM, transfer=TransferConfig(transport="tcp", lanes=2))
    assert (d.name, p.name) == (DECODE, PREFILL)
    for command, role in ((d, "kv_consumer"), (p, "kv_producer")):
        given = json.loads(option(command, "--kv-transfer-config"))
        assert (given["kv_role"], given["kv_load_failure_policy"]) == (role, "recompute")
        read = settings.read(given["kv_connector_extra_config"], "given")
        assert (read.name, read.model, read.transfer.lanes) == (command.name, "m", 2)
        assert read.key().hex() == KEY
        assert command.arguments[:4] == (sys.executable, "-m", "regauge.serve.tied", "/opt/vllm/bin/python")
        assert command.arguments[-1] == "--block-size=32"
        assert option(command, "--tensor-parallel-size") == "2"
        assert command.environment is not None
        assert command.environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "3")
    by_role = {address.role: address for address in gateway.workers}
    decode_settings = settings.read(json.loads(option(d, "--kv-transfer-config"))["kv_connector_extra_config"], "given")
    first, status = decode_settings.port, decode_settings.status_port
    assert by_role["decode"].receivers == {f"{DECODE}.{i}": ("127.0.0.1", first + i) for i in range(2)}
    assert [rank.status for rank in by_role["decode"].ranks] == [f"http://127.0.0.1:{status + i}" for i in range(2)]
    assert by_role["prefill"].senders == [f"{PREFILL}.0", f"{PREFILL}.1"]
    assert by_role["prefill"].receivers == {}
    assert (gateway.verdict.path, gateway.layouts, gateway.key) == (UNKNOWN, {}, KEY)


def test_two_sglang_servers_get_what_their_backends_need(tmp_path: Path) -> None:
    (d, p, _), gateway = planned(
        tmp_path, prefill=SGLANG, decode=SGLANG, transfer=TransferConfig(transport="tcp", lanes=2)
    )
    assert (d.name, p.name) == (DECODE, PREFILL)
    told = {}
    for command, role in ((d, "decode"), (p, "prefill")):
        assert command.arguments[:6] == (
            sys.executable, "-m", "regauge.serve.tied", "/opt/sglang/bin/python", "-m", "sglang.launch_server")  # fmt: skip
        assert command.arguments[-2:] == ("--device", "cpu")
        assert option(command, "--disaggregation-mode") == role
        assert option(command, "--disaggregation-transfer-backend") == "regauge"
        assert option(command, "--tp-size") == "2"
        assert command.environment is not None
        assert command.environment["SGLANG_USE_CPU_ENGINE"] == "1"
        read = told[role] = settings.load(Path(command.environment[settings.SGLANG]))
        assert (read.name, read.model, read.transfer.lanes, read.key().hex()) == (command.name, "m", 2, KEY)
    assert "--disaggregation-bootstrap-port" in p.arguments
    assert told["prefill"].port == 0
    by_role = {address.role: address for address in gateway.workers}
    assert {address.engine for address in gateway.workers} == {"sglang"}
    first, status = told["decode"].port, told["decode"].status_port
    assert by_role["decode"].receivers == {f"{DECODE}.{i}": ("127.0.0.1", first + i) for i in range(2)}
    assert [rank.status for rank in by_role["decode"].ranks] == [f"http://127.0.0.1:{status + i}" for i in range(2)]
    assert by_role["prefill"].senders == [f"{PREFILL}.0", f"{PREFILL}.1"]
    assert (gateway.verdict.path, gateway.layouts, gateway.key) == (UNKNOWN, {}, KEY)


def test_sglangs_api_key_goes_by_file(tmp_path: Path) -> None:
    started, gateway = planned(tmp_path, prefill=SGLANG, decode=VLLM)
    prefill = next(command for command in started if command.name == PREFILL)
    assert gateway.token not in " ".join(prefill.arguments) + repr(prefill)
    given = Path(option(prefill, "--config"))
    assert json.loads(given.read_text()) == {"api-key": gateway.token}, "JSON is YAML"
    assert given.suffix == ".yaml", "SGLang takes no other"
    assert oct(given.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize(("args", "is_cpu"), [(["--device=cpu"], True), (["--device=cuda"], False), ([], False), (["--device"], False)])  # fmt: skip
def test_sglang_is_told_twice_that_it_runs_on_the_cpu(tmp_path: Path, args: list[str], is_cpu: bool) -> None:
    started, _ = planned(tmp_path, prefill=EngineConfig(sglang=ServedConfig(args=args)), decode=VLLM)
    environment = next(command for command in started if command.name == PREFILL).environment
    assert environment is not None
    assert ("SGLANG_USE_CPU_ENGINE" in environment) == (is_cpu or "SGLANG_USE_CPU_ENGINE" in os.environ)


def test_an_sglang_server_that_runs_elsewhere_is_only_routed_to(tmp_path: Path) -> None:
    far = ServerConfig(url="http://10.0.0.2:30000", name="d", control="10.0.0.2:9100")
    started, gateway = planned(tmp_path, prefill=VLLM, decode=EngineConfig(sglang=ServedConfig(server=far)))
    assert [command.name for command in started] == [PREFILL, GATEWAY]
    there = next(address for address in gateway.workers if address.role == "decode")
    assert (there.engine, there.url, there.receivers) == ("sglang", far.url, {"d.0": ("10.0.0.2", 9_100)})


def test_a_worker_is_one_engine() -> None:
    with pytest.raises(ConfigError, match="leave out vllm, or sglang"):
        EngineConfig(vllm=ServedConfig(), sglang=ServedConfig())
    assert [each.name for each in (EngineConfig(), VLLM, SGLANG)] == ["local", "vllm", "sglang"]


def test_many_workers_of_a_role_know_where_the_others_are(tmp_path: Path) -> None:
    config = ServeConfig(prefill=EngineConfig(workers=2), decode=EngineConfig(workers=3))
    deployment = Deployment(config, tmp_path / "model", "m", None, layout(), layout(), "127.0.0.1", KEY)
    *started, _ = commands(deployment, tmp_path)
    names = ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"]
    assert [command.name for command in started] == names
    specs = [msgspec.json.decode(Path(c.arguments[-1]).read_bytes(), type=wire.WorkerSpec) for c in started]
    gateway = wire.read_spec(tmp_path / "gateway.json")
    assert [each.name for each in gateway.workers] == names
    ports = [port for spec in specs for port in (spec.port, spec.control_port)]
    assert len(set(ports)) == 10
    assert all(each.url.endswith(f":{spec.port}") for each, spec in zip(gateway.workers, specs, strict=True))
    where = {spec.name: ("127.0.0.1", spec.control_port) for spec in specs}
    assert [each.receivers for each in gateway.workers] == [{name: where[name]} for name in names], "roles may change"
    for spec in specs:
        assert spec.peers == ({name: where[name] for name in names[:3]} if spec.role == "prefill" else {})
        assert Path(spec.state).is_dir()
        public = load_private(Path(spec.signing_key)).public_key()
        assert public_pem(public) == (Path(gateway.trust) / "workers" / f"{spec.name}.pub").read_bytes()
    assert len({spec.signing_key for spec in specs} | {gateway.signing_key}) == 6
    assert sorted(gateway.layouts) == names


def test_keys_and_journals_are_where_the_configuration_says(tmp_path: Path) -> None:
    meter = MeterConfig(keys=str(tmp_path / "a" / "keys"), state=str(tmp_path / "b"))
    (tmp_path / "run").mkdir()
    started, gateway = planned(tmp_path, prefill=VLLM, meter=meter)
    spec = msgspec.json.decode(Path(started[0].arguments[-1]).read_bytes(), type=wire.WorkerSpec)
    assert spec.signing_key == str(tmp_path / "a/keys/decode-0.key")
    assert (spec.state, gateway.trust) == (meter.state, str(tmp_path / "a/keys/trust"))
    assert not list((tmp_path / "a/keys").glob("prefill*")), "vLLM signs nothing"
    with pytest.raises(ConfigError, match=r"meter.state: .*Not a directory"):
        planned(tmp_path, meter=MeterConfig(state="/dev/null/x"))


def test_nothing_secret_is_on_a_command_line_or_in_a_repr(tmp_path: Path) -> None:
    started, gateway = planned(tmp_path, prefill=VLLM, decode=VLLM)
    for command in started:
        words = " ".join(command.arguments)
        assert KEY not in words
        assert gateway.token not in words
        assert gateway.token not in repr(command)
    assert started[0].environment is not None
    assert started[0].environment["VLLM_API_KEY"] == gateway.token
    assert gateway.token not in repr(gateway)
    assert oct((tmp_path / "key").stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_embedded_engine_beside_vllm(tmp_path: Path, side: str) -> None:
    other = {"prefill": "decode", "decode": "prefill"}[side]
    started, gateway = planned(tmp_path, **{other: VLLM})
    name = {"prefill": PREFILL, "decode": DECODE}[side]
    assert files.decode(gateway.layouts[name], format="json") == layout()
    spec = msgspec.json.decode(
        Path(next(c for c in started if c.name == name).arguments[-1]).read_bytes(), type=wire.WorkerSpec
    )
    address = next(each for each in gateway.workers if each.name == name)
    if side == "decode":
        assert address.receivers == {DECODE: ("127.0.0.1", spec.control_port)}
    else:  # it links to vLLM's ranks before the first request
        assert list(spec.peers) == [f"{DECODE}.0", f"{DECODE}.1"]


def test_a_server_that_runs_elsewhere_is_only_routed_to(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    file = f"""
[decode.vllm]
ranks = 2
server = {{ url = "http://10.0.0.2:8000", name = "d", control = "10.0.0.2:9100", status = "[fd00::2]:9200", token_file = "{tmp_path}/token" }}
[prefill.vllm]
"""
    config = decode(file.encode())
    (p, _), gateway = planned(tmp_path, prefill=config.prefill, decode=config.decode)
    assert p.name == PREFILL
    far = next(address for address in gateway.workers if address.role == "decode")
    assert (far.name, far.url, far.token) == ("d", "http://10.0.0.2:8000", "secret")
    assert far.receivers == {"d.0": ("10.0.0.2", 9_100), "d.1": ("10.0.0.2", 9_101)}
    assert [rank.status for rank in far.ranks] == ["http://[fd00::2]:9200", "http://[fd00::2]:9201"]
    assert "secret" not in repr(far)


def test_what_is_started_elsewhere_is_not_started_here() -> None:
    with pytest.raises(ConfigError, match="leave out python and args"):
        ServedConfig(args=["--block-size=32"], server=ServerConfig(url="http://x", name="d"))


def test_status_is_asked_over_tls_where_links_have_it(tmp_path: Path) -> None:
    tls = TlsConfig(certificate="c", key="k", authority="a")
    _, gateway = planned(tmp_path, prefill=VLLM, decode=VLLM, transfer=TransferConfig(transport="tcp", tls=tls))
    assert {rank.status[:8] for address in gateway.workers for rank in address.ranks} == {"https://"}


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"control": ""}, r"decode.vllm.server.control: give the address"),
        ({"control": "10.0.0.2"}, r"decode.vllm.server.control '10.0.0.2': give HOST:PORT"),
        ({"control": "10.0.0.2:0"}, r"give HOST:PORT"),
        ({"control": "a:1", "token_file": "/none"}, r"decode.vllm.server.token_file '/none'"),
    ],
)
def test_addresses_that_cannot_be_are_named(tmp_path: Path, server: dict[str, str], message: str) -> None:
    far = EngineConfig(vllm=ServedConfig(server=ServerConfig(url="http://x", name="d", **server)))
    with pytest.raises(ConfigError, match=message):
        planned(tmp_path, decode=far)


def test_ports_in_a_row_are_free() -> None:
    first = consecutive_ports(4, "127.0.0.1")
    socks = [socket.create_server(("127.0.0.1", first + i)) for i in range(4)]
    for sock in socks:
        sock.close()


def test_ports_begin_where_they_are_said_to_and_end_with_the_last_one(tmp_path: Path) -> None:
    _, gateway = planned(tmp_path, planes=PlanesConfig(worker_port=21_000))
    assert [(each.name, each.url) for each in gateway.workers] == [
        (DECODE, "http://127.0.0.1:21000"),
        (PREFILL, "http://127.0.0.1:21002"),
    ]
    many = EngineConfig(vllm=ServedConfig(ranks=300))
    with pytest.raises(ConfigError, match=r"planes.worker_port: 604 ports from 65000 on are too many"):
        planned(tmp_path, planes=PlanesConfig(worker_port=65_000), decode=many)
