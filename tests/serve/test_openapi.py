"""The OpenAPI document: what it says, and that schemathesis finds nothing at the gateway that it does not."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
from serve_rig import MODEL, WAIT_S, Rig, open_rig

from regauge import observe
from regauge.config import LimitsConfig
from regauge.serve.openapi import OPERATIONS, document
from regauge.serve.text import Tokenizer

pytestmark = pytest.mark.anyio
SETTINGS = """\
# Some limits cannot be said in a schema, as the context: what passes the document may be answered 400.
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 403, 404, 503]
"""


async def test_it_is_served(rig: Rig) -> None:
    status, body, _ = await rig.get("/openapi.json")
    assert (status, body) == (200, msgspec.json.decode(document(MODEL)))
    assert body["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == [MODEL]


def test_every_route_is_described(rig: Rig) -> None:
    described = {operation.path for operation in OPERATIONS}
    routes = {route.path.replace(":path", "") for route in rig.server.config.loaded_app.app.starlette.routes}
    assert described == routes - {"/openapi.json", "/v1/responses", "/dashboard", "/dashboard/{file}"}, (
        "what is no API, or in the engines' words"
    )
    assert routes <= set(observe.ROUTES)


def test_keys_are_asked_for_where_they_are_wanted() -> None:
    free, keyed = (msgspec.json.decode(document(MODEL, keys=keys)) for keys in (False, True))
    assert "securitySchemes" not in free["components"]
    assert keyed["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"key": []}]
    assert keyed["paths"]["/health"]["get"]["security"] == []


async def test_schemathesis_finds_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    settings = tmp_path / "schemathesis.toml"
    settings.write_text(SETTINGS)
    async with open_rig(tokenizer, limits=LimitsConfig(request_timeout_s=WAIT_S)) as rig:
        command = [
            sys.executable, "-m", "schemathesis.cli", "--config-file", str(settings), "run", rig.base + "/openapi.json",
            "--checks", "all", "--max-examples", "5", "--seed", "7", "--phases", "examples,coverage,fuzzing", "--no-color",
            "--request-timeout", str(WAIT_S),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        out, _ = await process.communicate()
        assert process.returncode == 0, out.decode()
        assert rig.server.started
