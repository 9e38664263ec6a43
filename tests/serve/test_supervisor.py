"""What is decided before any process starts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from quality_records import record_of
from regauge import keys
from regauge.config import EngineConfig, QualityConfig, ServeConfig, TransferConfig
from regauge.engines.local.weights import weights_digest
from regauge.errors import ConfigError, LayoutError, Refused
from regauge.layout.files import encode
from regauge.layout.presets import from_short, load_model
from regauge.plan import quality
from regauge.serve import wire
from regauge.serve.launch import Command
from regauge.serve.ports import consecutive_ports, free_ports
from regauge.serve.supervisor import Child, Supervisor, base_url, cause, describe, plan_deployment

CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
}


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    return ServeConfig(model=str(folder), port=free_ports("127.0.0.1")[0], decode=EngineConfig(pool_tokens=100))


def test_a_deployment_is_planned_with_its_verdict(config: ServeConfig) -> None:
    found = plan_deployment(config, print)
    assert found.model == "tiny"
    assert found.verdict.path == "CONVERT"
    assert (found.prefill.groups[0].pages, found.decode.groups[0].pages) == (16_384 // 64, 7)
    assert describe(found).splitlines()[0] == "prefill  fp8_e4m3,page=64,hnd"
    assert "path     CONVERT: dtype float8_e4m3fn -> bfloat16" in describe(found)


def test_a_pair_that_is_refused_or_unreadable_starts_nothing(config: ServeConfig, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_bytes(encode(from_short("bf16", load_model("qwen3-8b")), format="toml"))
    with pytest.raises(Refused, match=r"model.name: prefill has tiny, decode has qwen3-8b"):
        plan_deployment(msgspec.structs.replace(config, decode_layout=str(other)), print)
    with pytest.raises(LayoutError, match="cannot read 'bf17'"):
        plan_deployment(msgspec.structs.replace(config, decode_layout="bf17"), print)


def test_a_pair_that_converts_starts_only_with_a_record_of_these_weights(config: ServeConfig, tmp_path: Path) -> None:
    def demanding(*records: str) -> ServeConfig:
        gate = QualityConfig(True, [str(tmp_path / x) for x in records], [str(tmp_path / "key.pem.pub")])
        return msgspec.structs.replace(config, quality=gate)

    keys.generate(tmp_path / "key.pem")
    with pytest.raises(
        Refused, match=r"quality: prefill has float8_e4m3fn without scale, .* no quality record is given"
    ):
        plan_deployment(demanding(), print)
    pair = [from_short(x, load_model(config.model)) for x in (config.prefill_layout, config.decode_layout)]
    record = record_of(pair[0], pair[1])
    for name, weights in (("other.json", "22" * 32), ("own.json", weights_digest(Path(config.model)))):
        own = msgspec.structs.replace(record, model=msgspec.structs.replace(record.model, weights=weights))
        (tmp_path / name).write_bytes(quality.encode(quality.sign(own, keys.load_private(tmp_path / "key.pem"))))
    with pytest.raises(Refused, match=r"other\.json: is of other weights than those that are served"):
        plan_deployment(demanding("other.json"), print)
    assert plan_deployment(demanding("own.json"), print).verdict.path == "CONVERT"
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        plan_deployment(demanding("none.json"), print)
    (Path(config.model) / "more.safetensors").mkdir()  # weights that cannot be read
    with pytest.raises(IsADirectoryError):
        plan_deployment(demanding("own.json"), print)
    direct = msgspec.structs.replace(demanding(), prefill_layout="bf16")
    assert plan_deployment(direct, print).verdict.path == "DIRECT"  # they are not looked at


def test_a_port_or_host_that_cannot_be_had_is_named(config: ServeConfig) -> None:
    with (
        socket.create_server(("127.0.0.1", config.port)),
        pytest.raises(ConfigError, match=f"port {config.port} on 127.0.0.1"),
    ):
        plan_deployment(config, print)


@pytest.mark.parametrize("setting", ["host", "control"])
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("203.0.113.7", r"203\.0\.113\.7 cannot be bound: .*; give an address of this machine"),
        ("no such", "it has 127"),
    ],
)
def test_a_control_plane_that_cannot_be_had_is_named_by_its_setting(
    config: ServeConfig, setting: str, address: str, why: str
) -> None:
    transfer = TransferConfig(**{setting: address})
    with pytest.raises(ConfigError, match=rf"transfer\.{setting} '{address}': .*{why}"):
        plan_deployment(msgspec.structs.replace(config, transfer=transfer), print)


def test_workers_get_the_key_of_the_file_and_the_address_of_the_control_plane(
    config: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("ab" * 32)
    transfer = TransferConfig(host="127.0.0.2", control="lo", key_file=str(key))
    deployment = plan_deployment(msgspec.structs.replace(config, transfer=transfer), print)
    own, other = (read_specs(Supervisor(each, print)) for each in (deployment, plan_deployment(config, print)))
    assert {spec.key for spec in own} == {"ab" * 32}
    assert {spec.peers["decode-0"][0] for spec in own if spec.role == "prefill"} == {"127.0.0.1"}
    assert len({spec.key for spec in other}) == 1
    assert "ab" * 32 not in {spec.key for spec in other}
    assert "ab" * 32 not in repr(deployment)
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read this private key"):
        plan_deployment(msgspec.structs.replace(config, transfer=transfer), print)


def test_nothing_is_left_behind_where_a_deployment_cannot_be_written(
    config: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    deployment = dataclasses.replace(plan_deployment(config, print), control="203.0.113.7")  # it was there a moment ago
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 cannot be bound"):
        Supervisor(deployment, print)
    assert list((tmp_path / "own").iterdir()) == []


def test_workers_answer_on_loopback_wherever_the_control_plane_is(
    config: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ports that are taken on loopback, and free on the control plane, are none for the workers' HTTP."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asked: list[tuple[int | str, ...]] = []

    def listening(count: int, *hosts: str) -> int:
        asked.append((count, *hosts))
        return consecutive_ports(count, *hosts)

    deployment = plan_deployment(msgspec.structs.replace(config, transfer=TransferConfig(host="127.0.0.2")), print)
    monkeypatch.setattr("regauge.serve.launch.consecutive_ports", listening)
    specs = {spec.role: spec for spec in read_specs(Supervisor(deployment, print))}
    assert asked == [(4, "127.0.0.1", "127.0.0.2")]
    assert specs["prefill"].peers == {"decode-0": ("127.0.0.2", specs["decode"].control_port)}
    assert len({specs["prefill"].port, specs["decode"].port}) == 2


@pytest.mark.anyio
async def test_everything_is_ended_though_nobody_reads_what_is_said(
    config: ServeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))

    def closed(text: str) -> None:
        raise BrokenPipeError(text)

    supervisor = Supervisor(plan_deployment(config, print), closed)
    for child in supervisor.children.values():
        child.command = Command(
            child.name, (sys.executable, "-m", "timeit", "--none")
        )  # ends at once: it has no such option
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(supervisor.run(), 60)
    assert all(
        child.process is not None and child.process.returncode is not None for child in supervisor.children.values()
    )
    assert list((tmp_path / "own").iterdir()) == []


@pytest.mark.anyio
async def test_a_worker_that_dies_again_and_again_is_left_out_while_another_runs(config: ServeConfig) -> None:
    config = msgspec.structs.replace(config, prefill=EngineConfig(workers=2))
    said: asyncio.Queue[str] = asyncio.Queue()
    supervisor = Supervisor(plan_deployment(config, print), said.put_nowait)
    stays, dies = (sys.executable, "-c", "import time; time.sleep(600)"), ("/bin/sh", "-c", "exit 1")
    for child in supervisor.children.values():
        child.command = Command(child.name, dies if child.name == "prefill-0" else stays, gateway=child.command.gateway)
    pids = {}
    for child in supervisor.children.values():
        await child.start()
        pids[child.name] = child.process and child.process.pid
    watching = asyncio.create_task(supervisor._watch())
    try:
        told = ""
        async with asyncio.timeout(60):
            while "again in" not in (told := await said.get()):
                assert told in ("prefill-0 ended with exit code 1", "prefill-0 is started again")
        assert told == "prefill-0 is started again in 15 s"
        assert not watching.done()
        others = {name: child.process for name, child in supervisor.children.items() if name != "prefill-0"}
        assert {name: p and p.pid for name, p in others.items()} == {n: p for n, p in pids.items() if n != "prefill-0"}
        last = supervisor.children["prefill-1"]
        last.deaths = [time.monotonic()] * 5
        assert last.process is not None
        last.process.kill()
        await asyncio.wait_for(watching, 60)
        assert said.get_nowait() == "prefill-1 died of SIGKILL"
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await supervisor._end()


FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, lambda *_: None); print('up', flush=True); time.sleep(60)"])
time.sleep(60)
"""


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["stop", "death"])
async def test_what_a_process_leaves_behind_is_ended(how: str) -> None:
    """As vLLM's engine is by a server that dies while it starts. Its output ends when the last of them has."""
    out, into = os.pipe()
    child = Child(Command("x", ()))
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FAMILY, stdout=into, start_new_session=True)
    child.process = process
    os.close(into)
    with os.fdopen(out, "rb") as reader:
        assert await asyncio.to_thread(reader.readline) == b"up\n"
        if how == "stop":
            await asyncio.wait_for(child.stop(), 30)
        else:
            process.kill()
            assert await asyncio.wait_for(child.wait(), 30) == -signal.SIGKILL
        assert await asyncio.wait_for(asyncio.to_thread(reader.read), 30) == b""


def read_specs(supervisor: Supervisor) -> list[wire.WorkerSpec]:
    files = [Path(child.command.arguments[-1]) for name, child in supervisor.children.items() if name != "gateway"]
    return [msgspec.json.decode(file.read_bytes(), type=wire.WorkerSpec) for file in files]


def test_ends_are_told_in_words() -> None:
    assert cause(-signal.SIGKILL) == "died of SIGKILL"
    assert cause(-250) == "died of signal 250"
    assert cause(3) == "ended with exit code 3"


def test_urls() -> None:
    assert base_url(ServeConfig()) == "http://127.0.0.1:8000"
    assert base_url(ServeConfig(host="::1", port=1)) == "http://[::1]:1"
    assert len(set(free_ports(*["127.0.0.1"] * 5))) == 5
