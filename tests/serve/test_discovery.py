"""The list of workers in the configuration, several sources at once, and a local worker that registers by itself."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
from serve_rig import MODEL, TOKEN, WAIT_S, open_rig

from regauge.config import ServeConfig, decode
from regauge.config_discovery import DiscoveryConfig, WorkerConfig
from regauge.errors import ConfigError
from regauge.layout import files
from regauge.layout.presets import from_short, load_model, with_pages
from regauge.serve import wire
from regauge.serve.discovery import Static, merged
from regauge.serve.pools import sources
from regauge.serve.registering import registered
from regauge.serve.registration import Desk, Shelf
from regauge.serve.registry import Change, Drained, Entry, Joined, Left, read
from regauge.serve.text import Tokenizer

WORKERS = """
[[workers]]
name = "vllm-0"
role = "decode"
engine = "vllm"
url = "http://10.0.0.2:8000"
control = "10.0.0.2:9100"
status = "[fd00::2]:9200"
ranks = 2
token_file = "{token}"

[[workers]]
name = "local-0"
role = "prefill"
url = "http://10.0.0.3:8000"
layout = "{layout}"
"""


def test_a_list_of_workers_is_read(tmp_path: Path) -> None:
    layout = with_pages(from_short("bf16,page=16,nhd", load_model("smollm2-135m-instruct")), 64)
    (tmp_path / "layout.toml").write_bytes(files.encode(layout, format="toml"))
    (tmp_path / "token").write_text("s3cret\n")
    config = decode(WORKERS.format(token=tmp_path / "token", layout=tmp_path / "layout.toml").encode())
    one, other = Static(config.workers, secure=True).entries
    assert one.address == wire.WorkerAddress(
        "vllm-0", "decode", "http://10.0.0.2:8000",
        [
            wire.RankAddress("vllm-0.0", ("10.0.0.2", 9_100), "https://[fd00::2]:9200"),
            wire.RankAddress("vllm-0.1", ("10.0.0.2", 9_101), "https://[fd00::2]:9201"),
        ],
        "vllm", "s3cret",
    )  # fmt: skip
    assert other.address == wire.WorkerAddress(
        "local-0", "prefill", "http://10.0.0.3:8000", [wire.RankAddress("local-0")]
    )
    assert other.read_layout() == layout
    assert "s3cret" not in repr(one)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"workers\[0\]\.control: give the address"),
        ({"control": "10.0.0.2"}, r"workers\[0\]\.control '10\.0\.0\.2': give HOST:PORT"),
        ({"control": "h:1", "token_file": "/nowhere"}, r"workers\[0\]\.token_file '/nowhere'"),
        ({"control": "h:1", "layout": "/nowhere"}, r"workers\[0\]\.layout '/nowhere'"),
        ({"control": "h:1", "layout": __file__}, r"workers\[0\]\.layout"),
        ({"control": "h:1", "url": "10.0.0.2"}, r"address\.url: give one like"),
    ],
)
def test_a_wrong_list_names_the_setting(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Static([WorkerConfig(**{"name": "d", "role": "decode", "url": "http://h", **fields})], secure=False)  # type: ignore[arg-type]


def test_a_configuration_names_its_sources(tmp_path: Path) -> None:
    assert sources(ServeConfig()) == []
    text = (
        '[discovery.etcd]\nurls = ["http://h:1"]\n[discovery.kubernetes]\nnamespace = "n"\nprefill = "p"\ndecode = "d"\n'
        f'authority = ""\ntoken_file = "{tmp_path}"\n[[workers]]\nname = "w"\nrole = "prefill"\nurl = "http://h"\n'
    )
    kinds = [type(source).__name__ for source in sources(decode(text.encode()))]
    assert kinds == ["Static", "EtcdSource", "KubernetesSource"]
    with pytest.raises(ConfigError, match=r"discovery: '/nowhere': No such file"):
        sources(decode(text.replace('authority = ""', 'authority = "/nowhere"').encode()))
    with pytest.raises(ConfigError, match=r"lease_s: must be at least 1 and at most 86400, not 0\.5"):
        decode(b"[discovery]\nlease_s = 0.5\n")


def test_the_examples_of_the_page_are_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pools.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    config = decode(text.encode())
    assert (config.workers[0].ranks, config.discovery.kubernetes is not None) == (2, True)
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert read(text.encode()).address.receivers == {"decode-3": ("10.0.0.2", 9_002)}


class Told:
    """A source that tells what a test says."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[list[Change]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[list[Change]]:
        while True:
            yield await self.changes.get()


def entry(name: str, port: int) -> Entry:
    return Entry(wire.WorkerAddress(name, "prefill", f"http://h:{port}", [wire.RankAddress(name)]))


@pytest.mark.anyio
async def test_several_sources_are_followed_at_once() -> None:
    one, other = Told(), Told()
    changes = merged([one, other], taken=["own"])
    one.changes.put_nowait([Joined(entry("own", 1)), Joined(entry("a", 1))])
    assert await anext(changes) == [Joined(entry("a", 1))]
    other.changes.put_nowait([Joined(entry("a", 2)), Drained("a", True), Joined(entry("b", 2))])
    assert await anext(changes) == [Joined(entry("b", 2))]
    one.changes.put_nowait([Left("own", "gone"), Left("a", "gone")])
    assert await anext(changes) == [Left("a", "gone"), Joined(entry("a", 2)), Drained("a", True)]
    await changes.aclose()  # type: ignore[attr-defined]  # a generator's


@pytest.mark.anyio
async def test_a_source_that_breaks_leaves_the_others() -> None:
    class Broken:
        async def watch(self) -> AsyncIterator[list[Change]]:
            yield [Joined(entry("a", 1))]
            raise LookupError("nobody thought of this")

    good = Told()
    changes = merged([Broken(), good])
    assert await anext(changes) == [Joined(entry("a", 1))]
    good.changes.put_nowait([Joined(entry("b", 1))])
    assert await anext(changes) == [Joined(entry("b", 1))]
    await changes.aclose()  # type: ignore[attr-defined]  # a generator's


@pytest.mark.anyio
async def test_a_local_worker_registers_where_its_configuration_says(tokenizer: Tokenizer, tmp_path: Path) -> None:
    key = bytes(32)
    desk = Desk(Shelf(tmp_path / "workers", 9), key, 2.0, 9)
    layouts: Sequence[str] = ("fp8_e4m3,page=64,hnd", "bf16,page=16,nhd")
    base = load_model("smollm2-135m-instruct")
    async with open_rig(tokenizer, pools=[desk]) as rig:
        config = ServeConfig(discovery=DiscoveryConfig(gateways=[rig.base], lease_s=1.0))
        specs = [
            wire.WorkerSpec(
                config=config, name=worker.name, role=worker.role, model_folder="", model_name=MODEL, token=TOKEN, key=key.hex(),
                layout=files.encode(with_pages(from_short(short, base), 64), format="json"), port=worker.port,
                control_port=9 if worker.role == "decode" else 0, peers={},
            )
            for worker, short in zip((rig.prefill, rig.decode), layouts, strict=True)
        ]  # fmt: skip
        async with registered(specs[0], "127.0.0.1"), registered(specs[1], "127.0.0.1"):
            async with asyncio.timeout(WAIT_S):
                while (await rig.get("/ready"))[0] != 200:
                    pass
            assert (await rig.get("/version"))[1]["verdict"]["path"] == "CONVERT"
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
            status, body, _ = await rig.post("/v1/chat/completions", chat)
            assert status == 200, msgspec.json.encode(body)
            assert rig.prefill.prefills[0].decode == {"decode-0": ("127.0.0.1", 9)}
        async with asyncio.timeout(WAIT_S):
            while (await rig.get("/ready"))[1]["workers"]:
                pass
