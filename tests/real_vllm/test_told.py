"""What real engines tell about their transfers at `status_port`, since their answers cannot."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines import START_S, Engine, Pair, config, free_port
from regauge.engines.status import token
from regauge.testing.tiny_models import tiny_model

TOKEN_BYTES = 4 * 4 * 2 * 32 * 4
"""Per token of tiny-llama in fp32: 4 layers, 4 KV heads, K and V of 32 elements."""


class Told(Pair):
    """A pair with a status each."""

    def __init__(self, prefill: Engine, decode: Engine, port: int, status: tuple[int, int], key: bytes) -> None:
        super().__init__(prefill, decode, port)
        self.status = status
        self._token = token(key)

    def look(self, side: int, path: str) -> tuple[int, dict[str, Any]]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.status[side], timeout=60)) as connection:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder, model, port, key = tmp_path_factory.mktemp("told"), tiny_model("tiny-llama"), free_port(), os.urandom(32)
    file = Path(folder / "key")
    file.write_text(key.hex())
    file.chmod(0o600)
    status, engines = (free_port(), free_port()), []
    try:
        for name, role, own, size in (("p", "kv_producer", 0, 32), ("d", "kv_consumer", port, 128)):
            given = config(model, role=role, name=name, port=own, key=file, block_size=size)
            given["kv_transfer_config"]["kv_connector_extra_config"]["status_port"] = status[len(engines)]
            engines.append(Engine(given, folder / f"{name}.log"))
        for engine in engines:
            engine.wait("ready", limit_s=START_S)
        yield Told(*engines, port, status, key)
    finally:
        for engine in engines:
            engine.end()


def test_both_engines_tell_how_a_transfer_went(told: Told) -> None:
    ids = [3 + i % 400 for i in range(150)]
    name, p, d = told.begin(ids)
    ends = [told.look(side, f"/transfers/{name}?wait_s=30") for side in (0, 1)]
    told.prefill.answer(p)
    told.decode.answer(d)
    for (code, end), role in zip(ends, ("prefill", "decode"), strict=True):
        assert code == 200
        assert (end["role"], end["error"], end["path"], end["mode"]) == (role, "", "REMAP", "staged")
        assert end["wire_bytes"] == 150 * TOKEN_BYTES
        assert end["seconds"] > 0
    for side, (rank, pages) in enumerate((("p.0", 32), ("d.0", 128))):
        code, status = told.look(side, "/status")
        assert code == 200
        assert (status["name"], status["engine"]) == (rank, "vllm")
        [group] = status["layout"]["groups"]
        assert group["page_size"] == pages
        [state] = status["states"]
        assert state["totals"]["delivered"] >= 1
        assert state["totals"]["failed"] == {}


def test_why_a_transfer_failed_is_told(told: Told) -> None:
    name = "odd"
    ids = [3 + i % 300 for i in range(100)]
    to = {"d.0": ["127.0.0.1", told.port]}
    d = told.decode.ask(ids[:90], params={"regauge": {"transfer": name, "from": ["p.0"]}})
    p = told.prefill.ask(ids, tokens=1, params={"regauge": {"transfer": name, "to": to}})
    code, end = told.look(1, f"/transfers/{name}?wait_s=30")
    assert (code, end["reason"]) == (200, "mismatch")
    assert "offers 100 tokens, the request has 90" in end["error"]
    code, end = told.look(0, f"/transfers/{name}?wait_s=30")
    assert code == 200
    assert end["error"]
    told.prefill.answer(p)
    told.decode.answer(d)
